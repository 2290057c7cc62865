"""Reconcile: settle what a crash left open. What is still alive is left alone; a second call changes nothing."""

from __future__ import annotations

import time
from pathlib import Path

from capsule.core.errors import BusyError
from capsule.host.lease import lease_directory
from capsule.host.ledger import Ledger
from capsule.host.reconcile import Finding
from capsule.host.reconcile import reconcile as reconcile_ledger
from capsule.host.slurm import settle
from capsule.host.workspace import Workspace, find_begun

POLL_SECONDS = 0.5
JOB_POLL_SECONDS = 5.0
"""How often a cluster is asked about its jobs while somebody waits for them."""
ACCOUNTING_SECONDS = 15.0
"""How long the end of a run waits for a cluster's accounting; what comes later is added by the next command."""
ENDED = ("reconciled", "corrected", "unaccounted")
"""States of findings on attempts that have ended."""


def reconcile(protocol_file: Path) -> list[Finding]:
    """Look at every open attempt of a protocol and settle those that nobody looks after any more.

    Raises:
        IncompleteError: the protocol was never frozen.
        RefusedError: the ledger is damaged.
    """
    return _reconcile(find_begun(protocol_file))


def settle_open(workspace: Workspace, *, wait: bool) -> list[Finding]:
    """Settle what can be settled before a run; `wait` waits for attempts that are still running.

    Raises:
        BusyError: another run's attempt is still going on.
    """
    findings = _reconcile(workspace)
    while alive := [finding for finding in findings if finding.state not in ENDED]:
        if not wait:
            raise BusyError(
                f"expected no open attempt of {workspace.name}, found {alive[0].attempt} ({alive[0].words})",
                hint="wait for it: capsule run --wait; or see it: capsule status",
            )
        time.sleep(JOB_POLL_SECONDS if any(_is_job(workspace, item) for item in alive) else POLL_SECONDS)
        findings = [*(f for f in findings if f.state in ENDED[:2]), *_reconcile(workspace)]
    return findings


def account_jobs(workspace: Workspace) -> list[Finding]:
    """Compare ended attempts that were jobs with their cluster's accounting, which may be some seconds late."""
    until = time.monotonic() + ACCOUNTING_SECONDS
    findings: list[Finding] = []
    while True:
        found = settle.reconcile(Ledger(workspace.ledger, workspace.head), workspace.attempts)
        findings += [finding for finding in found if finding.state == "corrected"]
        late = [finding for finding in found if finding.state == "unaccounted"]
        if not late or time.monotonic() >= until:
            return [*findings, *late]
        time.sleep(1)


def _is_job(workspace: Workspace, finding: Finding) -> bool:
    return settle.is_job(workspace.attempts / finding.attempt)


def _reconcile(workspace: Workspace) -> list[Finding]:
    ledger = Ledger(workspace.ledger, workspace.head)
    here = reconcile_ledger(ledger, workspace.attempts, lease_directory())
    return sorted([*here, *settle.reconcile(ledger, workspace.attempts)], key=lambda finding: finding.attempt)

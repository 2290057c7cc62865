"""Reconcile: settle what a crash left open. What is still alive is left alone; a second call changes nothing."""

from __future__ import annotations

import time
from pathlib import Path

from capsule.core.errors import BusyError
from capsule.host.lease import lease_directory
from capsule.host.ledger import Ledger
from capsule.host.reconcile import Finding
from capsule.host.reconcile import reconcile as reconcile_ledger
from capsule.host.workspace import Workspace, find_workspace

POLL_SECONDS = 0.5


def reconcile(protocol_file: Path) -> list[Finding]:
    """Look at every open attempt of a protocol and settle those that nobody looks after any more.

    Raises:
        RefusedError: the ledger is damaged.
    """
    return _reconcile(find_workspace(protocol_file))


def settle_open(workspace: Workspace, *, wait: bool) -> list[Finding]:
    """Settle what can be settled before a run; `wait` waits for attempts that are still running.

    Raises:
        BusyError: another run's attempt is still going on.
    """
    findings = _reconcile(workspace)
    while alive := [finding for finding in findings if finding.state != "reconciled"]:
        if not wait:
            raise BusyError(
                f"expected no open attempt of {workspace.name}, found {alive[0].attempt} ({alive[0].words})",
                hint="wait for it: capsule run --wait; or see it: capsule status",
            )
        time.sleep(POLL_SECONDS)
        findings = [*(f for f in findings if f.state == "reconciled"), *_reconcile(workspace)]
    return findings


def _reconcile(workspace: Workspace) -> list[Finding]:
    return reconcile_ledger(Ledger(workspace.ledger, workspace.head), workspace.attempts, lease_directory())

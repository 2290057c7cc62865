"""Amend: a new manifest that supersedes the old one, under the same ledger and the same spent budget.

What had been seen by then is derived from the ledger, never asked; amending erases no attempt and no cost.
"""

from __future__ import annotations

from pathlib import Path

from capsule.core.errors import FrozenError, UsageError
from capsule.core.manifest import Supersedes
from capsule.host.ledger import Ledger
from capsule.host.workspace import find_workspace
from capsule.steps.freeze import Frozen, Progress, draft, refuse_secrets, write


def amend(protocol_file: Path, reason: str, *, progress: Progress | None = None) -> Frozen:
    """Freeze the protocol as it is now as an amendment.

    Raises:
        IncompleteError: nothing was frozen yet.
        FrozenError: nothing changed.
        UsageError: the reason is empty.
        RefusedError: what would be published holds a secret.
    """
    if not reason.strip():
        raise UsageError(
            "expected a reason for the amendment, found an empty one", hint="readers will want to know why"
        )
    refuse_secrets(reason.encode(), "the reason of an amendment", "--reason")
    workspace = find_workspace(protocol_file)
    current = workspace.current()
    unchanged = draft(workspace, current.manifest.supersedes, progress=progress)
    if unchanged.manifest == current.manifest:
        raise FrozenError(f"{protocol_file}: expected a change to amend, found what is frozen already")
    chain, account = Ledger(workspace.ledger, workspace.head).read()
    attempts, pilots, rows = account.seen
    supersedes = Supersedes(
        manifest=current.manifest.identity,
        reason=reason.strip(),
        ledger_events=chain.head.count,
        ledger_head=chain.head.sha256,
        attempts_seen=attempts,
        pilot_attempts_seen=pilots,
        rows_seen=rows,
    )
    made = draft(workspace, supersedes)
    return Frozen(write(workspace, made, current.number + 1), True, made.warnings)

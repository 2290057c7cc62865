"""What remains of a plan: how long it will take and what it may cost, from what has ended so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from capsule.core.account import Account
from capsule.core.attempt import Attempt
from capsule.core.manifest import Manifest
from capsule.core.plan import Cell
from capsule.core.progress import remaining, reserved_processes
from capsule.core.protocol import reserved_ms


@dataclass(frozen=True)
class Rest:
    """What remains: processes without final rows, those of them with an open attempt, and the cells of both.

    `worst_ms` is what the processes without an open attempt may cost, each once, beside what open ones hold already;
    `expected_ms` and `seconds` go by the attempts that completed, and are None before one has. `seconds` is the time
    for all that remains, with as many attempts at a time as are open now.
    """

    processes: int
    open: int
    cells: int
    worst_ms: int
    expected_ms: int | None
    seconds: float | None


def rest_of(manifest: Manifest, cells: Sequence[Cell], account: Account) -> Rest:
    """Return what remains of a plan."""
    todo = remaining(manifest, cells, account)
    own = _own(account, manifest.identity)
    at_work = {a.reserved.process for a in own if a.open and a.reserved is not None}
    opened = sum(process.ordinal in at_work for process in todo)
    count = sum(len(process.cells) for process in todo)
    waiting = [process for process in todo if process.ordinal not in at_work]
    pace = pace_ms(manifest, cells, account)
    expected = None if pace is None else round(pace * sum(len(process.cells) for process in waiting))
    seconds = None if pace is None else pace * count / manifest.protocol.budget.devices / max(1, opened) / 1000
    return Rest(
        processes=len(todo),
        open=opened,
        cells=count,
        worst_ms=len(waiting) * reserved_ms(manifest.protocol.budget),
        expected_ms=expected,
        seconds=None if seconds is None else round(seconds, 1),
    )


def pace_ms(manifest: Manifest, cells: Sequence[Cell], account: Account) -> float | None:
    """Return the device-milliseconds that one planned cell has cost in attempts that ran to their end."""
    sizes = {ordinal: len(process.cells) for ordinal, process in reserved_processes(cells, account).items()}
    cost = count = 0
    for attempt in _own(account, manifest.identity):
        if attempt.end is not None and attempt.end.outcome in ("completed", "trial_error") and attempt.reserved:
            cost += attempt.end.charge.debited_ms
            count += sizes.get(attempt.reserved.process, 0)
    return cost / count if count else None


def _own(account: Account, manifest: str) -> list[Attempt]:
    return [
        attempt
        for attempt in account.attempts.values()
        if attempt.reserved and attempt.reserved.manifest == manifest and attempt.refused is None and not attempt.pilot
    ]

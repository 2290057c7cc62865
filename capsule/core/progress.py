"""From a plan, a ledger and journals to the one final row of every planned cell, and to what remains to run.

The process is the unit: rows become final when their process ran to its end record with a row for every planned
cell; an interrupted process is void and runs again whole; a failed one may be retried as the protocol says, and then
fails every cell it was to observe. Nothing is dropped: every planned cell has exactly one final row.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Literal

from capsule.core.account import Account
from capsule.core.attempt import COMPLETED, INTERRUPTED, Attempt
from capsule.core.manifest import Manifest
from capsule.core.plan import Cell, Plan, running
from capsule.core.record import Journal, Scalar

Status = Literal["ok", "failed", "not_run"]


@dataclass(frozen=True, slots=True)
class Row:
    """The final row of a planned cell: its status, the reason when it is not ok, and the values observed."""

    cell: Cell
    status: Status
    reason: str | None
    attempt: str | None
    values: Mapping[str, Scalar | None]


@dataclass(frozen=True, slots=True)
class Process:
    """One launch of the plan: its ordinal and the cells that it runs, excluded ones left out."""

    ordinal: int
    cells: Sequence[Cell]

    @property
    def names(self) -> Collection[str]:
        """The names of its cells."""
        return self.cells.names if isinstance(self.cells, Plan) else [cell.cell for cell in self.cells]


def processes(cells: Sequence[Cell]) -> list[Process]:
    """Group the plan's cells into its launches."""
    return list(_launches(cells))


def reserved_processes(cells: Sequence[Cell], account: Account) -> dict[int, Process]:
    """Return the launches that attempts were reserved for, by ordinal; a plan has up to a launch for each cell."""
    wanted = {attempt.reserved.process for attempt in account.attempts.values() if attempt.reserved}
    return {process.ordinal: process for process in _launches(cells, wanted)}


def _launches(cells: Sequence[Cell], wanted: Container[int] | None = None) -> Iterator[Process]:
    start = 0
    for ordinal, group in groupby(cells.ordinals if isinstance(cells, Plan) else [cell.process for cell in cells]):
        stop = start + sum(1 for _ in group)
        if wanted is None or ordinal in wanted:
            yield Process(ordinal, running(cells[start:stop]))
        start = stop


def tries(account: Account, manifest: str, ordinal: int) -> list[Attempt]:
    """Return the attempts that count for a process: of this manifest, not pilot, not refused, in order."""
    return tries_by_process(account, manifest).get(ordinal, [])


def deciding_attempt(manifest: Manifest, attempts: Sequence[Attempt]) -> Attempt | None:
    """Return the attempt that settles a process, or None while it is still to run (again)."""
    counts: dict[str, int] = {}
    retries = {str(name): count for name, count in manifest.protocol.retry.items()}
    for attempt in attempts:
        if attempt.end is None or attempt.end.outcome in INTERRUPTED:
            continue
        outcome: str = attempt.end.outcome
        counts[outcome] = counts.get(outcome, 0) + 1
        if outcome == "completed" or counts[outcome] > retries.get(outcome, 0):
            return attempt
    return None


def tries_by_process(account: Account, manifest: str) -> dict[int, list[Attempt]]:
    """Return `tries` for every process that has any."""
    found: dict[int, list[Attempt]] = {}
    for attempt in account.attempts.values():
        reserved = attempt.reserved
        if reserved and attempt.refused is None and not attempt.pilot and reserved.manifest == manifest:
            found.setdefault(reserved.process, []).append(attempt)
    return found


def remaining(manifest: Manifest, cells: Sequence[Cell], account: Account) -> list[Process]:
    """Return the processes that are still to run, in order."""
    found = tries_by_process(account, manifest.identity)
    return [
        process
        for process in _launches(cells)
        if process.cells and deciding_attempt(manifest, found.get(process.ordinal, [])) is None
    ]


def final_rows(
    manifest: Manifest, cells: Iterable[Cell], account: Account, journals: Mapping[str, Journal]
) -> Iterator[Row]:
    """Yield the final row of every planned cell, in the order of the plan.

    `journals` holds a journal for each attempt that was started under this manifest.
    """
    identity = manifest.identity
    empty: dict[str, Scalar | None] = {column.name: None for column in manifest.protocol.observations}
    found = tries_by_process(account, identity)
    pending = _pending_reason(account, identity)
    for ordinal, group in groupby(cells, key=attrgetter("process")):
        attempts = found.get(ordinal, [])
        attempt = deciding_attempt(manifest, attempts)
        last = attempts[-1].end if attempts else None
        void = last is not None and last.outcome in INTERRUPTED
        reason = "interrupted" if void and pending == "pending" else pending
        for cell in group:
            if cell.excluded is not None:
                yield Row(cell, "not_run", f"excluded: {cell.excluded}", None, empty)
            elif attempt is None:
                yield Row(cell, "not_run", reason, None, empty)
            else:
                yield _decided(cell, attempt, journals.get(attempt.id), empty)


def _decided(cell: Cell, attempt: Attempt, journal: Journal | None, empty: dict[str, Scalar | None]) -> Row:
    assert attempt.end is not None
    if attempt.end.outcome not in COMPLETED:
        return Row(cell, "failed", attempt.end.outcome, attempt.id, empty)
    raw = journal.rows.get(cell.cell) if journal is not None else None
    if raw is None:
        return Row(cell, "failed", "missing_row", attempt.id, empty)
    if raw.error is not None:
        return Row(cell, "failed", "trial_error", attempt.id, empty)
    return Row(cell, "ok", None, attempt.id, raw.values)


def _pending_reason(account: Account, manifest: str) -> str:
    """Why processes without a deciding attempt have none: the last refusal if nothing came after it."""
    own = [attempt for attempt in account.attempts.values() if not attempt.pilot]
    if own and own[-1].refused is not None and own[-1].refused.manifest == manifest:
        return own[-1].refused.reason
    return "pending"


def outcome_of(process: Process, journal: Journal) -> tuple[str, str]:
    """Judge a process that exited with status 0 by its journal: an outcome and its evidence."""
    if journal.fault_count:
        return (
            "bad_records",
            f"{journal.fault_count} faulty line{'s' if journal.fault_count > 1 else ''}; {journal.faults[0]}",
        )
    missing = len(process.cells) - len(journal.rows)
    if journal.torn or not journal.ended or missing:
        words = f"rows missing for {missing} of {len(process.cells)} cells" if missing else "no end record"
        return "incomplete", words
    errors = [row for row in journal.rows.values() if row.error is not None]
    if errors:
        return (
            "trial_error",
            f"{len(errors)} of {len(process.cells)} cells raised; {errors[0].cell}: {errors[0].error}",
        )
    return "completed", f"{len(process.cells)} cells"


def counts(rows: Iterable[Row]) -> dict[str, int]:
    """Return how many rows have each status."""
    result = {"ok": 0, "failed": 0, "not_run": 0}
    for row in rows:
        result[row.status] += 1
    return result

"""Two witnesses of one attempt's cost: its own ledger and Slurm's accounting. The larger is charged. Pure.

The ledger counts from lease to release on the node's boot-time clock. The accounting counts whole seconds in which a
job had its devices, once for every time it was started (a requeue is another row). It can be wrong in the cheap
direction: it does not count the grace between asking a job to end and killing it, and its repair of a job whose end it
missed sets that job to no time at all. So neither witness ever lowers what the other says.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from capsule.core.attempt import Charge, Clock, Outcome
from capsule.host.clock import realtime_ms
from capsule.host.heartbeats import heartbeat_interval_ms
from capsule.host.reconcile import SILENT_INTERVALS, Ending
from capsule.host.slurm.answers import REQUEUED, Row

ROUNDING_MS = 1_000
"""By how much whole seconds may fall short of the time that they stand for."""
CLOCKS_MS = 2_000
"""How far the clocks of node and controller may be apart."""
KILLED = frozenset(("CANCELLED", "DEADLINE", "PREEMPTED", "TIMEOUT", REQUEUED))
"""States of rows that end when the job was asked to end, not when its processes had gone."""
OUTCOMES: dict[str, Outcome] = {
    "BOOT_FAIL": "host_crash",
    "CANCELLED": "user",
    "NODE_FAIL": "host_crash",
    "PREEMPTED": "user",
    REQUEUED: "user",
}
"""How an attempt ended whose supervisor wrote no end, by the state of its row; `lost` for any other."""


WHY = {
    126: "its node cannot execute the Python that submitted it",
    127: "its node does not have the Python that submitted it",
}
"""What an exit status of the job's script says that began nothing."""
NO_OUTPUT = 53
"""What the accounting has in the place of a signal where the node could not open the job's output."""


@dataclass(frozen=True)
class Finding:
    """What both witnesses come to: the charge that is due, and words on where they disagree (empty if they do not)."""

    due_ms: int
    words: str


def rows_of_attempt(rows: Iterable[Row], *, name: str, uid: int, submitted: int) -> tuple[Row, ...]:
    """Return an attempt's own rows in order: by name, user and time of submission, since a job's id may come again."""
    own = {row.id: row for row in rows if (row.name, row.uid) == (name, uid) and row.submitted >= submitted}
    return tuple(sorted(own.values(), key=lambda row: (row.submitted, row.id)))


def complete(rows: Sequence[Row]) -> bool:
    """Whether every row has its end and none is to follow."""
    return bool(rows) and all(row.final for row in rows) and rows[-1].state != REQUEUED


def still_writes(leased: Clock | None, last: Clock, now: Clock) -> bool:
    """Whether an attempt's supervisor wrote so lately that it may live, whatever the accounting says of its job."""
    if leased is None:
        return False
    silent_ms = realtime_ms(now.realtime) - realtime_ms(last.realtime)
    return 0 <= silent_ms < SILENT_INTERVALS * heartbeat_interval_ms(last.boottime_ms - leased.boottime_ms)


def row_of_charge(rows: Sequence[Row], leased: Clock | None) -> Row | None:
    """Return the row in which the attempt took its lease: the last one that had started by then, else the first."""
    if leased is None:
        return None
    at_ms = realtime_ms(leased.realtime) + CLOCKS_MS
    started = [row for row in rows if row.started is not None]
    by_then = [row for row in started if row.started is not None and row.started * 1000 <= at_ms]
    return by_then[-1] if by_then else started[0] if started else None


def compare(
    rows: Sequence[Row], *, debited_ms: int, devices: int, leased: Clock | None, by_rows: bool = False
) -> Finding:
    """Compare an ended attempt's charge with its rows: one charge a row, the larger of two for the attempt's own.

    `by_rows`: the debit was made from all rows already (`end_of`), so it is their sum that it is held to.
    """
    if by_rows:
        sum_ms = sum(devices * row.elapsed_seconds * 1000 for row in rows)
        more = (
            f"{'; '.join(map(str, rows))} are {sum_ms / 1000:g} device-seconds, the ledger says {debited_ms / 1000:g}"
        )
        return Finding(max(sum_ms, debited_ms), more if sum_ms > debited_ms else "")
    own = row_of_charge(rows, leased)
    due_ms = debited_ms
    found = []
    for row in rows:
        row_ms = devices * row.elapsed_seconds * 1000
        if row is not own:
            due_ms += row_ms
            found += [f"{row} is {row_ms / 1000:g} device-seconds more, of another start"] if row_ms else []
        elif row_ms > debited_ms:
            due_ms += row_ms - debited_ms
            found.append(f"{row} is {row_ms / 1000:g} device-seconds, the ledger says {debited_ms / 1000:g}")
        elif row_ms + devices * ROUNDING_MS < debited_ms:
            found.append(
                f"{row} is {row_ms / 1000:g} device-seconds, the ledger says {debited_ms / 1000:g}, which stays"
            )
    return Finding(due_ms, "; ".join(found))


def end_of(
    rows: Sequence[Row],
    *,
    devices: int,
    reserved_ms: int,
    kill_wait_ms: int,
    leased: Clock | None,
    last: Clock,
    now: Clock,
) -> Ending:
    """Say how an attempt ended that wrote no end, and what it cost at least and at most.

    `last` is its last sign of life. A row that ends before it is no proof of anything: then
    the upper bound is what could be until now, within the reservation, whose limits Slurm and the watchdog enforce.
    """
    own = row_of_charge(rows, leased)
    others_ms = sum(devices * row.elapsed_seconds * 1000 for row in rows if row is not own)
    listed = "; ".join(map(str, rows))
    if leased is None:
        words = f"no intent was written; {listed or 'it was never in the queue'}{_why(rows[-1]) if rows else ''}"
        return Ending("never_started", words, _bounds(0, others_ms))
    lower_ms = devices * max(0, last.boottime_ms - leased.boottime_ms)
    until_now_ms = devices * max(0, realtime_ms(now.realtime) - realtime_ms(leased.realtime))
    if own is None or own.ended is None or own.ended * 1000 + CLOCKS_MS < realtime_ms(last.realtime):
        upper_ms = min(reserved_ms, until_now_ms)
        why = f"the accounting has no end after its last event at {last.realtime}"
    else:
        upper_ms = devices * own.elapsed_seconds * 1000
        why = f"last event at {last.realtime}"
        if own.state in KILLED:
            upper_ms += devices * kill_wait_ms
            why += f", and up to {kill_wait_ms / 1000:g} s more until Slurm had killed it"
    outcome: Outcome = OUTCOMES.get(own.state, "lost") if own else "lost"
    charge = _bounds(lower_ms + others_ms, upper_ms + others_ms)
    return Ending(outcome, f"its supervisor wrote no end; {listed}; {why}", charge)


def _why(row: Row) -> str:
    """Say why a job began nothing, as far as its row shows it."""
    if row.signal == NO_OUTPUT:
        return "; its node does not have the workspace, which must be on a file system that all nodes share"
    if row.exit_code:
        return f"; {WHY.get(row.exit_code, f'exit status {row.exit_code}, see supervisor.log beside the attempt')}"
    return ""


def _bounds(lower_ms: int, upper_ms: int) -> Charge:
    upper_ms = max(lower_ms, upper_ms)
    return Charge(lower_ms=lower_ms, upper_ms=upper_ms, debited_ms=upper_ms, observed=False)

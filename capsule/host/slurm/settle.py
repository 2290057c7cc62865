"""Settling attempts that are Slurm jobs: those that wrote no end, and those whose accounting says more than the ledger.

An attempt that waits or runs is never settled because no process of this machine looks after it. One whose job is over
stays open until the accounting has its last row, however late that is. What the accounting says beyond the ledger is
added as a correction; what it says less is written down and takes nothing away. A second call finds nothing to do.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from capsule.core.attempt import Attempt, Clock, Correction, Reconciled
from capsule.core.errors import MachineError
from capsule.core.schema import Model
from capsule.host.clock import ClockSource, read_clock, realtime_ms
from capsule.host.durable import read_regular, write_durably
from capsule.host.ledger import Ledger, Transaction
from capsule.host.process import is_alive
from capsule.host.reconcile import Ending, write_end
from capsule.host.reconcile import Finding as Found
from capsule.host.slurm.answers import HELD, Job, Row
from capsule.host.slurm.job import Engine, accounting, cancel, job_of, known_engine, record
from capsule.host.slurm.witness import compare, complete, end_of, still_writes
from capsule.host.traces import ENGINE, read_traces

ACCOUNTED = "accounting.json"
"""The note that an attempt's rows were compared, so that they are not asked for again."""
UNSEEN_MS = 60_000
"""How long a job may take to appear after it was asked for by somebody who is gone."""
GONE_SECONDS = 10.0


class Accounted(Model):
    """What the accounting said when an attempt was compared with it: its rows, in words."""

    rows: tuple[str, ...]


@dataclass(frozen=True)
class Standing:
    """How an open attempt that is a job stands: `over` carries how it ended, every other state leaves it open.

    `unknown`: Slurm does not answer, or its accounting has not said the last.
    """

    state: Literal["starting", "queued", "running", "unknown", "over"]
    words: str
    ending: Ending | None = None


def is_job(attempt_dir: Path) -> bool:
    """Whether an attempt was handed to an engine; what is known of its job may be damaged."""
    return os.path.lexists(attempt_dir / ENGINE)


def look(attempt: Attempt, attempt_dir: Path, *, clock: ClockSource = read_clock, act: bool = False) -> Standing:
    """Ask Slurm how an open attempt stands; with `act`, a job that was never let go is cancelled if nobody will."""
    try:
        engine = known_engine(attempt_dir)
        job = job_of(engine)
        if job is not None and engine.job is None and act:
            engine = record(attempt_dir, engine, job)
        if job is not None and not job.over:
            if not (act and _abandoned(engine, job, attempt_dir)):
                return _alive(engine, job, attempt_dir)
            job = _cancel(engine)
            if job is not None and not job.over:
                return Standing("unknown", f"Slurm job {job.id} is {job.state} and was cancelled")
        if engine.job is None and job is None:
            return _unseen(engine, attempt_dir, clock())
        rows = accounting(engine)
    except MachineError as error:
        return Standing("unknown", f"Slurm does not say how it stands: {error.message}")
    return _over(attempt, engine, rows, clock())


def _alive(engine: Engine, job: Job, attempt_dir: Path) -> Standing:
    words = f"Slurm job {job.id} of cluster {engine.cluster} is {job.state}"
    if job.state != "PENDING":
        return Standing("running", words)
    if _abandoned(engine, job, attempt_dir):
        return Standing("queued", f"{words}, held by whoever submitted it, who is gone")
    return Standing("queued", f"{words} ({job.reason})")


def _abandoned(engine: Engine, job: Job, attempt_dir: Path) -> bool:
    """Whether a job waits for a release by whoever submitted it, and that one is certainly gone."""
    return job.reason == HELD and not engine.released and not _launcher_lives(engine, attempt_dir)


def _launcher_lives(engine: Engine, attempt_dir: Path) -> bool:
    """Whether whoever submitted may still be at work; of another host nobody here can say that it is not."""
    launcher = read_traces(attempt_dir).launcher
    return platform.node() != engine.host or (launcher is not None and is_alive(launcher))


def _cancel(engine: Engine) -> Job | None:
    """Cancel a job that was never let go, and wait a moment for that."""
    cancel(engine)
    until = time.monotonic() + GONE_SECONDS
    while (job := job_of(engine)) is not None and not job.over and time.monotonic() < until:
        time.sleep(0.5)
    return job


def _unseen(engine: Engine, attempt_dir: Path, now: Clock) -> Standing:
    """Say how an attempt stands of which Slurm has no job: it may come, and then it stays held."""
    waited_ms = realtime_ms(now.realtime) - realtime_ms(engine.asked.realtime)
    if _launcher_lives(engine, attempt_dir) or waited_ms < UNSEEN_MS:
        return Standing("starting", f"Slurm has no job {engine.name} yet")
    rows = accounting(engine)
    if rows and not complete(rows):
        return Standing("unknown", f"the accounting has no end yet of {rows[-1]}")
    ending = end_of(rows, devices=0, reserved_ms=0, kill_wait_ms=engine.kill_wait_ms, leased=None, last=now, now=now)
    return Standing("over", ending.evidence, ending)


def _over(attempt: Attempt, engine: Engine, rows: Sequence[Row], now: Clock) -> Standing:
    assert attempt.reserved is not None
    assert attempt.last is not None
    if not complete(rows):
        late = str(rows[-1]) if rows else f"Slurm job {engine.job}"
        return Standing("unknown", f"its job is over, and the accounting has no end yet of {late}")
    leased = attempt.intent.leased if attempt.intent else None
    if still_writes(leased, attempt.last, now):
        return Standing("running", f"{rows[-1]}, and its supervisor wrote at {attempt.last.realtime}")
    ending = end_of(
        rows,
        devices=len(attempt.reserved.devices),
        reserved_ms=attempt.reserved.reserved_ms,
        kill_wait_ms=engine.kill_wait_ms,
        leased=leased,
        last=attempt.last,
        now=now,
    )
    return Standing("over", ending.evidence, ending)


def reconcile(ledger: Ledger, attempts_dir: Path, *, clock: ClockSource = read_clock) -> list[Found]:
    """Look at every attempt that is a job: settle those that are over, and compare the ended ones' accounting."""
    found = []
    for attempt in ledger.read()[1].attempts.values():
        folder = attempts_dir / attempt.id
        if attempt.open and is_job(folder):
            stands = look(attempt, folder, clock=clock, act=True)
            if stands.state != "over":
                found.append(Found(attempt.id, stands.state, stands.words))
                continue
            assert stands.ending is not None, attempt.id
            found.append(write_end(ledger, attempt, read_traces(folder), stands.ending, clock))
            attempt = ledger.read()[1].attempts[attempt.id]
        if unaccounted(attempt, folder):
            found += _accounted(ledger, attempt, folder, clock)
    return found


def _accounted(ledger: Ledger, attempt: Attempt, folder: Path, clock: ClockSource) -> list[Found]:
    try:
        words = account(ledger, attempt, folder, clock=clock)
    except MachineError as error:
        words = f"its accounting is not known: {error.message}"
    if words is None:
        return []
    return [Found(attempt.id, "unaccounted" if unaccounted(attempt, folder) else "corrected", words)]


# Attempts that have ended.


def unaccounted(attempt: Attempt, attempt_dir: Path) -> bool:
    """Whether an ended attempt's accounting is still to be compared."""
    return not attempt.open and is_job(attempt_dir) and read_regular(attempt_dir / ACCOUNTED) is None


def account(ledger: Ledger, attempt: Attempt, attempt_dir: Path, *, clock: ClockSource = read_clock) -> str | None:
    """Compare an ended attempt with its accounting and write what that adds; words on it, None if there are none.

    Raises:
        MachineError: Slurm did not answer, or which job it was cannot be read.
    """
    engine = known_engine(attempt_dir)
    job = job_of(engine)
    if job is not None and not job.over:
        if job.reason == HELD and not engine.released:
            cancel(engine if engine.job is not None else record(attempt_dir, engine, job))
        return f"Slurm job {job.id} is still {job.state}"
    rows = accounting(engine)
    never = attempt.end is not None and attempt.end.outcome == "never_started" and not rows
    if not complete(rows) and not never:
        return f"the accounting has no end yet of {rows[-1] if rows else f'Slurm job {engine.job}'}"
    words = _correct(ledger, attempt, rows, clock)
    accounted = Accounted(rows=tuple(map(str, rows)))
    write_durably(attempt_dir / ACCOUNTED, accounted.to_bytes())
    return words


def _correct(ledger: Ledger, attempt: Attempt, rows: Sequence[Row], clock: ClockSource) -> str | None:
    """Add what is due beyond what was debited; a refused attempt costs nothing, by the rules of the ledger."""
    end, reserved = attempt.end, attempt.reserved
    if end is None or reserved is None:
        return None
    leased = attempt.intent.leased if attempt.intent else None
    found = compare(
        rows,
        debited_ms=end.charge.debited_ms,
        devices=len(reserved.devices),
        leased=leased,
        by_rows=isinstance(end, Reconciled),
    )
    reason = f"the accounting: {found.words}"

    def work(transaction: Transaction) -> int | None:
        current = transaction.account.attempts[attempt.id]
        added_ms = max(0, found.due_ms - current.held_ms)
        if not added_ms and reason in said:
            return None
        transaction.append("correction", attempt.id, Correction(debited_ms=added_ms, reason=reason), clock())
        return added_ms

    if not found.words:
        return None
    said = {
        event.data.reason
        for event in ledger.read()[0].events
        if event.attempt == attempt.id and isinstance(event.data, Correction)
    }
    added_ms = ledger.transaction(work)
    return None if added_ms is None else f"{added_ms / 1000:g} device-seconds added by {reason}"

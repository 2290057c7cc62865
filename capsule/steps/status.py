"""Status and ledger: where a protocol stands and what it cost, derived from what is on disk at this moment."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capsule.core.attempt import COMPLETED, INTERRUPTED, Attempt
from capsule.core.progress import counts, final_rows
from capsule.core.protocol import Budget, milliseconds, reserved_ms
from capsule.host.clock import read_clock
from capsule.host.lease import is_held, lease_directory
from capsule.host.ledger import Ledger
from capsule.host.process import lock_owners
from capsule.host.reconcile import liveness
from capsule.host.reservation import LOCK, Worker, at_work
from capsule.host.slurm import settle
from capsule.host.slurm.job import ASK_SECONDS
from capsule.host.workspace import Workspace, find_begun, find_workspace
from capsule.steps.pace import Rest, rest_of
from capsule.steps.slots import DeviceState, Machine
from capsule.steps.standing import standing

ATTENDED = ("starting", "queued", "running", "silent", "watched", "unknown")
"""What an open attempt is while somebody still looks after it; else it is `lost`."""
MOMENT_SECONDS = 0.3
"""How long a reader waits in silence for a ledger that is being written."""


@dataclass(frozen=True)
class UnitBudget:
    """What attempts of one unit hold of a budget, in device-milliseconds."""

    unit: str
    pilot: bool
    budget_ms: int
    held_ms: int

    @property
    def left_ms(self) -> int:
        """What another attempt may still reserve; observed time beyond a reservation can exceed the budget."""
        return max(0, self.budget_ms - self.held_ms)


@dataclass(frozen=True)
class OutcomeTotal:
    """What all attempts of one outcome took from the budgets; `kind` says what their rows count for."""

    outcome: str
    kind: str
    attempts: int
    held_ms: int


@dataclass(frozen=True)
class Status:
    """A protocol's standing: manifest, cells by status, what remains, every attempt, budgets, this machine's devices.

    `liveness` says for every open attempt whether anybody looks after it at this moment, by its id. `worker` is the
    command that is at work on the protocol.
    """

    protocol: str
    manifest: str
    generation: int
    cells: dict[str, int]
    processes: int
    rest: Rest
    attempts: list[Attempt]
    totals: list[OutcomeTotal]
    budgets: list[UnitBudget]
    reserved_ms: int
    liveness: dict[str, str]
    worker: Worker | None
    devices: list[DeviceState]
    devices_missing: str | None

    @property
    def active(self) -> bool:
        """Whether anything can change by itself: a command is at work, or an open attempt is looked after."""
        return self.worker is not None or any(state in ATTENDED for state in self.liveness.values())


def status(
    protocol_file: Path,
    machine: Machine | None = None,
    jobs: Jobs | None = None,
    *,
    note: Callable[[str], None] = lambda words: None,
) -> Status:
    """Derive a protocol's status; `note` hears what takes longer than a moment.

    Who calls it again and again gives the same `machine` and `jobs`.

    Raises:
        IncompleteError: nothing is frozen.
        RefusedError: the ledger is damaged.
    """
    workspace = find_workspace(protocol_file)
    note_if_locked(workspace, note)
    now = standing(workspace)
    manifest, account = now.generation.manifest, now.account
    budget = manifest.protocol.budget
    attempts = list(account.attempts.values())
    devices, missing = (machine or Machine(lease_directory())).look()
    return Status(
        protocol=manifest.protocol.name,
        manifest=manifest.identity,
        generation=now.generation.number,
        cells=counts(final_rows(manifest, now.cells, account, now.journals)),
        processes=len({cell.process for cell in now.cells}),
        rest=rest_of(manifest, now.cells, account),
        attempts=attempts,
        totals=totals_of(attempts),
        budgets=_budgets(budget, attempts),
        reserved_ms=reserved_ms(budget),
        liveness={
            attempt.id: state
            for attempt in attempts
            if (state := _liveness(workspace, attempt, jobs or Jobs())) is not None
        },
        worker=at_work(workspace.state / LOCK),
        devices=devices,
        devices_missing=missing,
    )


class Jobs:
    """How open attempts that are jobs stand: a cluster answers everybody, so it is asked every few seconds at most."""

    def __init__(self) -> None:
        self._said: dict[str, tuple[float, str]] = {}

    def look(self, attempt: Attempt, folder: Path) -> str:
        """Return the state of one; `lost` if its job is over and its end is not yet written."""
        at, state = self._said.get(attempt.id, (-math.inf, ""))
        if time.monotonic() - at >= ASK_SECONDS:
            state = settle.look(attempt, folder).state
            self._said[attempt.id] = (time.monotonic(), state)
        return "lost" if state == "over" else state


def _liveness(workspace: Workspace, attempt: Attempt, jobs: Jobs) -> str | None:
    """Say how an open attempt stands, by its processes here or by what its cluster says; None of one that has ended."""
    folder = workspace.attempts / attempt.id
    if not attempt.open or attempt.last is None:
        return None
    if settle.is_job(folder):
        return jobs.look(attempt, folder)
    return liveness(attempt, workspace.attempts, attempt.last, read_clock())


def _budgets(budget: Budget, attempts: Iterable[Attempt]) -> list[UnitBudget]:
    """Return the budget of every unit that was used, or could be as far as the protocol names it; pilots' if used."""
    held: dict[tuple[str, bool], int] = {}
    for attempt in attempts:
        if attempt.reserved is not None:
            key = (attempt.reserved.unit, attempt.pilot)
            held[key] = held.get(key, 0) + attempt.held_ms
    if budget.device in ("cpu", "gpu"):
        held.setdefault((budget.device, False), 0)
    for unit in {unit for unit, _ in held}:
        held.setdefault((unit, False), 0)
    limits = {False: milliseconds(budget.device_seconds), True: milliseconds(budget.pilot_device_seconds)}
    return [UnitBudget(unit, pilot, limits[pilot], used) for (unit, pilot), used in sorted(held.items())]


def outcome_of(attempt: Attempt) -> str:
    """Return an attempt's outcome: `refused` if nothing was started, `open` while it has none."""
    return attempt.end.outcome if attempt.end else "refused" if attempt.refused else "open"


def totals_of(attempts: Iterable[Attempt]) -> list[OutcomeTotal]:
    """Add up by outcome, pilots apart, what attempts took from the budgets; the dearest come first."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for attempt in attempts:
        outcome = outcome_of(attempt)
        key = (outcome, "pilot" if attempt.pilot else _kind(outcome))
        count, held_ms = found.get(key, (0, 0))
        found[key] = (count + 1, held_ms + attempt.held_ms)
    rows = [OutcomeTotal(outcome, kind, count, held) for (outcome, kind), (count, held) in found.items()]
    return sorted(rows, key=lambda row: (-row.held_ms, row.outcome, row.kind))


def _kind(outcome: str) -> str:
    if outcome in ("refused", "open"):
        return outcome
    return "final" if outcome in COMPLETED else "void" if outcome in INTERRUPTED else "failed"


@dataclass(frozen=True)
class LedgerView:
    """A ledger: every event as an object, its attempts, what outcomes cost, and whether anybody is at work on it."""

    events: list[dict[str, Any]]
    attempts: list[Attempt]
    totals: list[OutcomeTotal]
    active: bool


def ledger(
    protocol_file: Path, jobs: Jobs | None = None, *, note: Callable[[str], None] = lambda words: None
) -> LedgerView:
    """Read a protocol's ledger.

    Raises:
        IncompleteError: the protocol was never frozen.
        RefusedError: the ledger is damaged.
    """
    workspace = find_begun(protocol_file)
    note_if_locked(workspace, note)
    chain, account = Ledger(workspace.ledger, workspace.head).read()
    events = [
        {
            "seq": event.seq,
            "event": event.name,
            "attempt": event.attempt,
            "at": event.at.to_json(),
            "data": event.data.to_json(),
        }
        for event in chain.events
    ]
    attempts = list(account.attempts.values())
    attended = any(_liveness(workspace, attempt, jobs or Jobs()) in ATTENDED for attempt in attempts)
    active = attended or at_work(workspace.state / LOCK) is not None
    return LedgerView(events, attempts, totals_of(attempts), active)


def note_if_locked(workspace: Workspace, note: Callable[[str], None]) -> None:
    """Say so if the ledger's lock is not to be had within a moment: reading then goes on without it, a little later."""
    path = workspace.ledger.with_name(workspace.ledger.name + ".lock")
    until = time.monotonic() + MOMENT_SECONDS
    while is_held(path):
        if time.monotonic() >= until:
            break
        time.sleep(0.01)
    else:
        return
    owners = ", ".join(f"pid {item.pid}" for item in lock_owners(path)) or "a process that cannot be seen from here"
    note(f"the ledger is locked by {owners}; it is read without its lock in a few seconds")

"""Status and ledger: where a protocol stands, derived from what is on disk at this moment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from capsule.core.attempt import Attempt
from capsule.core.progress import Process, counts, final_rows, processes, remaining
from capsule.core.protocol import milliseconds, reserved_ms
from capsule.host.clock import read_clock
from capsule.host.ledger import Ledger
from capsule.host.reconcile import liveness
from capsule.host.workspace import find_workspace
from capsule.steps.standing import standing


@dataclass(frozen=True)
class UnitBudget:
    """What attempts of one unit hold of a budget, in device-milliseconds."""

    unit: str
    pilot: bool
    budget_ms: int
    held_ms: int


@dataclass(frozen=True)
class Status:
    """A protocol's standing: manifest, cells by status, processes left, every attempt, budgets.

    `liveness` says for every open attempt whether anybody looks after it at this moment, by its id.
    """

    protocol: str
    manifest: str
    generation: int
    cells: dict[str, int]
    processes: int
    remaining: list[Process]
    attempts: list[Attempt]
    budgets: list[UnitBudget]
    reserved_ms: int
    liveness: dict[str, Literal["starting", "running", "silent", "lost"]]


def status(protocol_file: Path) -> Status:
    """Derive a protocol's status.

    Raises:
        IncompleteError: nothing is frozen.
        RefusedError: the ledger is damaged.
    """
    workspace = find_workspace(protocol_file)
    now = standing(workspace)
    manifest, account = now.generation.manifest, now.account
    budget = manifest.protocol.budget
    units = sorted({attempt.reserved.unit for attempt in account.attempts.values() if attempt.reserved})
    budgets = [
        UnitBudget(unit, pilot, milliseconds(limit), account.held_ms(unit, pilot=pilot))
        for unit in units
        for pilot, limit in ((False, budget.device_seconds), (True, budget.pilot_device_seconds))
    ]
    return Status(
        protocol=manifest.protocol.name,
        manifest=manifest.identity,
        generation=now.generation.number,
        cells=counts(final_rows(manifest, now.cells, account, now.journals)),
        processes=len(processes(now.cells)),
        remaining=remaining(manifest, now.cells, account),
        attempts=list(account.attempts.values()),
        budgets=[item for item in budgets if item.held_ms or not item.pilot],
        reserved_ms=reserved_ms(budget),
        liveness={
            attempt.id: liveness(attempt, workspace.attempts, attempt.last, read_clock())
            for attempt in account.attempts.values()
            if attempt.open and attempt.last is not None
        },
    )


def ledger_events(protocol_file: Path) -> list[dict[str, Any]]:
    """Return every event of the ledger as an object, in order."""
    workspace = find_workspace(protocol_file)
    chain, _ = Ledger(workspace.ledger, workspace.head).read()
    return [
        {
            "seq": event.seq,
            "event": event.name,
            "attempt": event.attempt,
            "at": event.at.to_json(),
            "data": event.data.to_json(),
        }
        for event in chain.events
    ]

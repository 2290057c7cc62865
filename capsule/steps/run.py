"""Run: attempts until every planned cell has its row or the frozen budget ends; goes on where an earlier run stopped.

Everything that a run needs to know is derived from manifest, ledger and journals, so killing it at any moment loses
nothing: the next one settles what is open, and runs what has no final row. One command at a time works on a protocol;
it runs attempts side by side where it was given the devices. No argument changes a seed, threshold, metric or budget.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from capsule.core.account import Account
from capsule.core.attempt import ManifestAdopted, Opened
from capsule.core.errors import BusyError, DriftError, MachineError, RefusedError
from capsule.core.progress import counts, final_rows, remaining
from capsule.core.protocol import reserved_ms
from capsule.host import environment
from capsule.host.clock import read_clock
from capsule.host.lease import lease_directory
from capsule.host.ledger import Ledger, Transaction
from capsule.host.reservation import LOCK, Worker, alone
from capsule.host.slurm.job import rehearse
from capsule.host.workspace import Generation, Workspace, find_workspace
from capsule.steps.attempts import AttemptRan, Display, Request, Work
from capsule.steps.freeze import check_drift, claim, draft
from capsule.steps.reconcile import account_jobs, settle_open
from capsule.steps.side_by_side import SideBySide
from capsule.steps.slots import choose_slots
from capsule.steps.standing import Standing, standing

__all__ = ["AttemptRan", "Display", "Ran", "Request", "run"]

TURN_SECONDS = 0.3


@dataclass(frozen=True)
class Ran:
    """What a call of `run` did, and where the protocol stands after it; `side_by_side` attempts could go at a time."""

    protocol: str
    manifest: str
    dry_run: bool
    pilot: bool
    device: str
    side_by_side: int
    unit: str
    attempts: tuple[AttemptRan, ...]
    cells: dict[str, int]
    remaining: int
    stopped: str | None
    budget_ms: int
    held_ms: int
    reserved_ms: int


def run(request: Request, display: Display) -> Ran:
    """Run a protocol's remaining processes, or one pilot process.

    Raises:
        IncompleteError: nothing is frozen (a pilot may run before).
        DriftError: sources, protocol or environment differ from what was frozen.
        BusyError: another run is at work on this protocol, or holds the device.
        RefusedError: a device is in quarantine, or nothing could be started.
        MachineError: there is no such device here, or Slurm does not answer.
        KeyboardInterrupt: a signal asked to stop; every attempt has ended.
    """
    workspace = find_workspace(request.protocol)
    generation = _generation(workspace, request)
    choices = request.gpus or ((request.device,) if request.device else ())
    try:
        slots = choose_slots(generation.manifest.protocol.budget, choices, lease_directory())
    except MachineError as error:
        if request.slurm is not None:
            error.hint = "a job has the devices of the machine that submits it: submit where they are"
        raise
    work = Work(
        request=request,
        workspace=workspace,
        generation=generation,
        slots=slots[:1] if request.pilot else slots,
        ledger=Ledger(workspace.ledger, workspace.head),
        display=display,
        environment=environment.find_environment(),
    )
    _check(work)
    if request.slurm is not None:
        budget = generation.manifest.protocol.budget
        work.cluster = rehearse(request.slurm, reserved_ms(budget) // budget.devices)
        display.note(f"jobs of cluster {work.cluster.name}: {'; '.join(work.cluster.notes)}")
    if request.dry_run:
        return _ran(work, standing(workspace, generation))
    claim(workspace)
    with _turn(work):
        _open_ledger(work)
        for settlement in settle_open(workspace, wait=request.wait):
            display.note(f"{settlement.attempt}: {settlement.words}")
        _check_unit(work, standing(workspace, generation).account)
        try:
            SideBySide(work).run()
        finally:
            if work.cluster is not None:
                for finding in account_jobs(workspace):
                    display.note(f"{finding.attempt}: {finding.words}")
    return _ran(work, standing(workspace, generation))


def _generation(workspace: Workspace, request: Request) -> Generation:
    """Return the manifest in force; before the first freeze a pilot runs under one that is made and not published."""
    if workspace.generations() or not request.pilot:
        return workspace.current()
    made = draft(workspace, None)
    return Generation(0, workspace.frozen, made.manifest, made.files)


def _check(work: Work) -> None:
    """Compare what was frozen with what is here, before anything is reserved."""
    if not work.request.from_frozen and work.generation.number:
        check_drift(work.workspace, work.generation)
    manifest = work.generation.manifest
    mismatches: list[str] = []
    for slot in work.slots:
        mismatches += environment.check_required(
            manifest.protocol.environment, work.found(slot), lock=manifest.lock, root=work.workspace.root
        )
    if mismatches:
        raise DriftError(
            f"expected the frozen environment, found: {'; '.join(dict.fromkeys(mismatches))}",
            hint="use the environment that the protocol requires, or amend it",
        )


@contextmanager
def _turn(work: Work) -> Iterator[None]:
    """Have the protocol to ourselves, or say who has it; with `wait`, once that one is done.

    Raises:
        BusyError: another command is at work.
    """
    said = False
    while True:
        own = Worker(pid=os.getpid(), since=read_clock().realtime)
        with alone(work.workspace.state / LOCK, own) as other:
            if other is None:
                yield
                return
        words = f"pid {other.pid}, at work since {other.since}{_open_words(work)}"
        if not work.request.wait:
            raise BusyError(
                f"expected no other run of {work.workspace.name}, found {words}",
                hint="wait for it: capsule run --wait; or see it: capsule status; one run can use several devices at "
                "the same time: --gpu UUID --gpu UUID",
            )
        if not said:
            said = True
            work.display.note(f"waiting for another run of {work.workspace.name}: {words}")
        time.sleep(TURN_SECONDS)


def _open_words(work: Work) -> str:
    attempts = work.ledger.read()[1].attempts.values()
    return "".join(f", {attempt.id}" for attempt in attempts if attempt.open)


def _check_unit(work: Work, account: Account) -> None:
    """Attempts of one manifest share a unit, so that no estimate mixes a CPU's times with a GPU's."""
    own = [a.reserved for a in account.attempts.values() if a.reserved and not a.pilot and a.refused is None]
    units = {item.unit for item in own if item.manifest == work.generation.manifest.identity}
    if not work.request.pilot and units - {work.unit}:
        raise RefusedError(
            f"expected the {units.pop()} on which this manifest's attempts ran, found {work.unit}",
            hint=f"choose the device: --device {'cpu' if work.unit == 'gpu' else 'gpu'}",
        )


def _open_ledger(work: Work) -> None:
    """Open the ledger and adopt the manifests of the chain that it does not know yet."""
    chain = [generation.manifest for generation in work.workspace.generations()]

    def write(transaction: Transaction) -> None:
        account = transaction.account
        if account.protocol is None and any(work.workspace.attempts.glob("a[0-9]*")):
            raise RefusedError(
                f"expected the ledger of the attempts in {work.workspace.attempts}, found none",
                hint="a ledger is evidence and never removed; restore it with its head from a copy",
            )
        if account.protocol is None:
            opened = Opened(format="capsule.ledger/1", protocol=work.workspace.name)
            transaction.append("opened", None, opened, read_clock())
        for manifest in chain[len(account.manifests) :]:
            before = manifest.supersedes.manifest if manifest.supersedes else None
            adopted = ManifestAdopted(manifest=manifest.identity, supersedes=before)
            transaction.append("manifest_adopted", None, adopted, read_clock())

    work.ledger.transaction(write)


def _ran(work: Work, now: Standing) -> Ran:
    manifest = work.generation.manifest
    return Ran(
        protocol=manifest.protocol.name,
        manifest=manifest.identity,
        dry_run=work.request.dry_run,
        pilot=work.request.pilot,
        device=", ".join(f"{device.uuid} ({device.name})" for slot in work.slots for device in slot),
        side_by_side=len(work.slots),
        unit=work.unit,
        attempts=tuple(replace(ran, debited_ms=now.account.attempts[ran.id].held_ms) for ran in work.attempts),
        cells=counts(final_rows(manifest, now.cells, now.account, now.journals)),
        remaining=len(remaining(manifest, now.cells, now.account)),
        stopped=work.stopped,
        budget_ms=work.budget_ms,
        held_ms=now.account.held_ms(work.unit, pilot=work.request.pilot),
        reserved_ms=reserved_ms(manifest.protocol.budget),
    )

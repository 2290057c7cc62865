"""Run: attempts until every planned cell has its row or the frozen budget ends; goes on where an earlier run stopped.

Everything that a run needs to know is derived from manifest, ledger and journals, so killing it at any moment loses
nothing: the next one settles what is open, and runs what has no final row. No argument changes a seed, threshold,
metric or budget.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from typing import Protocol as Interface

from capsule.core.attempt import COMPLETED, INTERRUPTED, Account, ManifestAdopted, Opened, Refused, Reserved
from capsule.core.canonical import canonical
from capsule.core.digest import digest_of, hex_of
from capsule.core.errors import BudgetError, BusyError, DriftError, MachineError, RefusedError
from capsule.core.progress import Process, counts, deciding_attempt, final_rows, processes, remaining, tries
from capsule.core.protocol import milliseconds, reserved_ms
from capsule.core.results import failing_stop_gate
from capsule.host import environment, launch, store
from capsule.host.clock import read_clock
from capsule.host.devices import Device, backend_for, find_devices
from capsule.host.durable import read_regular, write_durably
from capsule.host.lease import lease_directory
from capsule.host.ledger import Ledger, Transaction
from capsule.host.reservation import reserve
from capsule.host.workspace import Generation, Workspace, find_workspace, sources_name
from capsule.steps.freeze import check_drift, claim, draft
from capsule.steps.reconcile import settle_open
from capsule.steps.standing import Standing, standing

POLL_SECONDS = 0.1
WAIT_MS_MAX = 7 * 24 * 3600 * 1000


@dataclass(frozen=True)
class Request:
    """What the caller asks for."""

    protocol: Path
    dry_run: bool = False
    pilot: bool = False
    device: str | None = None
    gpus: tuple[str, ...] = ()
    wait: bool = False
    from_frozen: bool = False


class Display(Interface):
    """Where a run says how it goes."""

    def note(self, words: str) -> None:
        """Say something that stays."""

    def going_on(self, attempt: str, rows: int, cells: int, done: int, processes: int, left: float | None) -> None:
        """Show the attempt at hand; `left` is in seconds."""

    def ended(self, attempt: str, outcome: str, evidence: str, seconds: float, unit: str) -> None:
        """Say how an attempt ended and what it cost in device-seconds."""


@dataclass(frozen=True)
class AttemptRan:
    """One attempt of this call."""

    id: str
    process: int
    outcome: str
    evidence: str
    debited_ms: int


@dataclass(frozen=True)
class Ran:
    """What a call of `run` did, and where the protocol stands after it."""

    protocol: str
    manifest: str
    dry_run: bool
    pilot: bool
    device: str
    unit: str
    attempts: tuple[AttemptRan, ...]
    cells: dict[str, int]
    remaining: int
    stopped: str | None
    budget_ms: int
    held_ms: int
    reserved_ms: int


@dataclass
class _Run:
    """The state of one call: what it works on, and the attempts it made."""

    request: Request
    workspace: Workspace
    generation: Generation
    devices: tuple[Device, ...]
    ledger: Ledger
    display: Display
    attempts: list[AttemptRan] = field(default_factory=list)
    stopped: str | None = None

    @property
    def unit(self) -> str:
        """The unit in which this run is charged."""
        return self.devices[0].unit

    @property
    def budget_ms(self) -> int:
        """The frozen budget of this run's unit, for pilots the pilots' own."""
        budget = self.generation.manifest.protocol.budget
        return milliseconds(budget.pilot_device_seconds if self.request.pilot else budget.device_seconds)


def run(request: Request, display: Display) -> Ran:
    """Run a protocol's remaining processes, or one pilot process.

    Raises:
        IncompleteError: nothing is frozen (a pilot may run before).
        DriftError: sources, protocol or environment differ from what was frozen.
        BusyError: another run holds the device.
        MachineError: there is no such device here.
    """
    workspace = find_workspace(request.protocol)
    generation = _generation(workspace, request)
    budget = generation.manifest.protocol.budget
    choices = request.gpus or ((request.device,) if request.device and request.device != "any" else ())
    devices = find_devices(budget.device, choices, budget.devices)
    this = _Run(request, workspace, generation, devices, Ledger(workspace.ledger, workspace.head), display)
    _check(this)
    if request.dry_run:
        return _ran(this, standing(workspace, generation))
    claim(workspace)
    _open_ledger(this)
    for settlement in settle_open(workspace, wait=request.wait):
        display.note(f"{settlement.attempt}: {settlement.words}")
    now = standing(workspace, generation)
    _check_unit(this, now.account)
    for process in _to_run(this, now):
        try:
            if not _attempt(this, process):
                break
        except _TakenError:
            settle_open(workspace, wait=request.wait)
        except BudgetError as error:
            this.stopped = error.message
            break
    return _ran(this, standing(workspace, generation))


def _generation(workspace: Workspace, request: Request) -> Generation:
    """Return the manifest in force; before the first freeze a pilot runs under one that is made and not published."""
    if workspace.generations() or not request.pilot:
        return workspace.current()
    made = draft(workspace, None)
    return Generation(0, workspace.frozen, made.manifest, made.files)


def _check(this: _Run) -> None:
    """Compare what was frozen with what is here, before anything is reserved."""
    if not this.request.from_frozen and this.generation.number:
        check_drift(this.workspace, this.generation)
    manifest = this.generation.manifest
    mismatches = environment.check_required(
        manifest.protocol.environment, _found(this), lock=manifest.lock, root=this.workspace.root
    )
    if mismatches:
        raise DriftError(
            f"expected the frozen environment, found: {'; '.join(mismatches)}",
            hint="use the environment that the protocol requires, or amend it",
        )


def _found(this: _Run) -> dict[str, Any]:
    """Describe what is here: interpreter, distributions, and the devices of this run with their driver."""
    found = environment.find_environment() | {"devices": [device.name for device in this.devices]}
    if this.unit == "gpu":
        uuid = this.devices[0].uuid
        found["driver"] = backend_for(uuid).baseline(uuid).get("driver")
    return found


def _check_unit(this: _Run, account: Account) -> None:
    """Attempts of one manifest share a unit, so that no estimate mixes a CPU's times with a GPU's."""
    own = [a.reserved for a in account.attempts.values() if a.reserved and not a.pilot and a.refused is None]
    units = {item.unit for item in own if item.manifest == this.generation.manifest.identity}
    if not this.request.pilot and units - {this.unit}:
        raise RefusedError(
            f"expected the {units.pop()} on which this manifest's attempts ran, found {this.unit}",
            hint=f"choose the device: --device {'cpu' if this.unit == 'gpu' else 'gpu'}",
        )


def _open_ledger(this: _Run) -> None:
    """Open the ledger and adopt the manifests of the chain that it does not know yet."""
    chain = [generation.manifest for generation in this.workspace.generations()]

    def work(transaction: Transaction) -> None:
        account = transaction.account
        if account.protocol is None and any(this.workspace.attempts.glob("a[0-9]*")):
            raise RefusedError(
                f"expected the ledger of the attempts in {this.workspace.attempts}, found none",
                hint="a ledger is evidence and never removed; restore it with its head from a copy",
            )
        if account.protocol is None:
            opened = Opened(format="capsule.ledger/0", protocol=this.workspace.name)
            transaction.append("opened", None, opened, read_clock())
        for manifest in chain[len(account.manifests) :]:
            before = manifest.supersedes.manifest if manifest.supersedes else None
            adopted = ManifestAdopted(manifest=manifest.identity, supersedes=before)
            transaction.append("manifest_adopted", None, adopted, read_clock())

    this.ledger.transaction(work)


def _to_run(this: _Run, now: Standing) -> Iterator[Process]:
    """Yield the process to run next, looking anew after each attempt; a pilot is one process."""
    if this.request.pilot:
        while not this.attempts:
            yield next(process for process in processes(now.cells) if process.cells)
        return
    while todo := remaining(this.generation.manifest, now.cells, now.account):
        refusal = _refusal(this, now)
        if refusal is not None:
            reason, this.stopped = refusal
            _refuse(this, todo[0], reason, this.stopped)
            return
        yield todo[0]
        now = standing(this.workspace, this.generation)


def _refusal(this: _Run, now: Standing) -> tuple[str, str] | None:
    """Return why the frozen rules let nothing more start, as a word and in words: a stop gate failed."""
    manifest = this.generation.manifest
    failing = failing_stop_gate(manifest, final_rows(manifest, now.cells, now.account, now.journals))
    if failing is not None:
        gate, row = failing
        return "gate", f"gate {gate.name} failed in cell {row.cell.cell}, and its failure stops the experiment"
    return None


def _reservation(this: _Run, process: Process) -> Reserved:
    return Reserved(
        manifest=this.generation.manifest.identity,
        process=process.ordinal,
        pilot=this.request.pilot,
        from_frozen=this.request.from_frozen,
        unit=this.devices[0].unit,
        devices=tuple(device.uuid for device in this.devices),
        reserved_ms=reserved_ms(this.generation.manifest.protocol.budget),
    )


class _TakenError(Exception):
    """Another run of this protocol took the process, or is at work, since we looked."""


def _check_free(this: _Run, process: Process, account: Account) -> None:
    """Under the ledger's lock: no other attempt is open, and the process is still to run."""
    identity = this.generation.manifest.identity
    attempts = tries(account, identity, process.ordinal)
    decided = deciding_attempt(this.generation.manifest, attempts) is not None
    if any(attempt.open for attempt in account.attempts.values()) or (decided and not this.request.pilot):
        raise _TakenError


def _refuse(this: _Run, process: Process, reason: str, words: str) -> None:
    """Write once why nothing more is started, so that what was not run has its reason."""
    manifest = this.generation.manifest.identity

    def work(transaction: Transaction) -> None:
        attempts = list(transaction.account.attempts.values())
        if not attempts or attempts[-1].refused is None or attempts[-1].refused.reason != reason:
            refused = Refused(manifest=manifest, process=process.ordinal, pilot=False, reason=reason, words=words)
            transaction.append("refused", transaction.account.next_attempt(), refused, read_clock())

    this.ledger.transaction(work)


def _attempt(this: _Run, process: Process) -> bool:
    """Reserve, launch and watch one attempt; False when the run should end."""
    protocol = this.generation.manifest.protocol
    revision = protocol.arm(process.cells[0].arm).revision
    snapshot = _snapshot(this, revision)
    reservation = reserve(
        this.ledger,
        _reservation(this, process),
        budget_ms=this.budget_ms,
        attempts_max=protocol.budget.attempts_max,
        not_after=None if this.request.pilot else protocol.budget.not_after,
        admit=lambda account: _check_free(this, process, account),
        before=lambda attempt: launch.announce(this.workspace.attempts / attempt),
    )
    folder = this.workspace.attempts / reservation.attempt
    write_durably(folder / "environment.json", canonical(_found(this)))
    order = launch.compose(
        protocol,
        process,
        reservation,
        ledger=this.workspace.ledger,
        ledger_head=this.workspace.head,
        attempt_dir=folder,
        lease_dir=lease_directory(),
        source_roots={cell.arm: Path(snapshot.root) for cell in process.cells},
        snapshot=digest_of(this.generation.files[sources_name(revision)]),
        trees=[snapshot],
        lease_wait_ms=WAIT_MS_MAX if this.request.wait else 0,
    )
    supervision = launch.start(order)
    for words in supervision.notes:
        this.display.note(words)
    interrupt = _watch(this, supervision, process)
    _ended(this, reservation.attempt, supervision)
    if interrupt is not None:
        raise interrupt
    return this.stopped is None


def _snapshot(this: _Run, revision: str | None) -> launch.SourceTree:
    """Materialise the frozen sources of the work tree or of a revision, with their list beside them."""
    listed = this.generation.files[sources_name(revision)]
    name = hex_of(digest_of(listed))
    root = this.workspace.snapshots / name
    entries = this.generation.sources(revision)
    try:
        store.materialise(this.workspace.root, entries, root)
    except DriftError as error:
        if any(attempt.open for attempt in this.ledger.read()[1].attempts.values()):
            raise
        this.display.note(f"an earlier attempt changed its snapshot, which is made again: {error.message}")
        store.renew(this.workspace.root, entries, root)
    beside = root.with_name(f"{name}.jsonl")
    write_durably(beside, listed)
    return launch.SourceTree(root=str(root), sources=str(beside))


def _watch(this: _Run, supervision: launch.Supervision, process: Process) -> KeyboardInterrupt | None:
    """Wait for an attempt's end and show how it goes; returns the first request to stop (a second means at once)."""
    journal = this.workspace.attempts / supervision.attempt / launch.JOURNAL
    cells, total = len(process.cells), len(processes(this.generation.cells))
    began = time.monotonic()
    asked: KeyboardInterrupt | None = None
    while True:
        try:
            if supervision.wait(POLL_SECONDS) is not None:
                return asked
            rows = _lines(journal)
            left = _left(this, began, rows, process)
            this.display.going_on(supervision.attempt, rows, cells, process.ordinal, total, left)
        except KeyboardInterrupt as interrupt:
            this.display.note("stopping; interrupt again to kill at once" if asked is None else "killing")
            supervision.stop(now=asked is not None)
            asked = asked or interrupt


def _lines(journal: Path) -> int:
    return (read_regular(journal) or b"").count(b"\n")


def _left(this: _Run, began: float, rows: int, process: Process) -> float | None:
    """Estimate the seconds that all remaining cells will take at the pace of this attempt so far."""
    spent = time.monotonic() - began
    if rows == 0 or spent < 1:
        return None
    later = sum(cell.process > process.ordinal and cell.excluded is None for cell in this.generation.cells)
    return spent / rows * (len(process.cells) - min(rows, len(process.cells)) + later)


def _ended(this: _Run, name: str, supervision: launch.Supervision) -> None:
    """Read from the ledger how an attempt ended; what could not be settled there is an error of this run.

    Raises:
        BusyError: the device was held.
        RefusedError: nothing was started.
        MachineError: the supervisor could not do its work; `reconcile` will settle the attempt.
    """
    _, account = this.ledger.read()
    attempt = account.attempts[name]
    if attempt.refused is not None:
        kind = BusyError if attempt.refused.reason == "busy" else RefusedError
        hint = "wait for it: capsule run --wait" if kind is BusyError else None
        raise kind(f"{name} was refused: {attempt.refused.words}", hint=hint)
    if attempt.end is None or attempt.reserved is None:
        log = this.workspace.attempts / name / "supervisor.log"
        raise MachineError(
            f"{name}: expected its supervisor to settle it, found it ended with status {supervision.poll()}; see {log}",
            hint="settle it and go on: capsule run again, or capsule reconcile",
        )
    end = attempt.end
    ran = AttemptRan(name, attempt.reserved.process, end.outcome, end.evidence, end.charge.debited_ms)
    this.attempts.append(ran)
    this.display.ended(name, end.outcome, end.evidence, end.charge.debited_ms / 1000, this.unit)
    if end.outcome not in COMPLETED | INTERRUPTED or end.outcome == "trial_error":
        this.display.note(f"what it printed is in {this.workspace.attempts / name}")
    if end.outcome in INTERRUPTED and end.outcome != "user":
        this.stopped = f"{name} ended as {end.outcome}: {end.evidence}"


def _ran(this: _Run, now: Standing) -> Ran:
    manifest = this.generation.manifest
    return Ran(
        protocol=manifest.protocol.name,
        manifest=manifest.identity,
        dry_run=this.request.dry_run,
        pilot=this.request.pilot,
        device=", ".join(f"{device.uuid} ({device.name})" for device in this.devices),
        unit=this.unit,
        attempts=tuple(this.attempts),
        cells=counts(final_rows(manifest, now.cells, now.account, now.journals)),
        remaining=len(remaining(manifest, now.cells, now.account)),
        stopped=this.stopped,
        budget_ms=this.budget_ms,
        held_ms=now.account.held_ms(this.unit, pilot=this.request.pilot),
        reserved_ms=reserved_ms(manifest.protocol.budget),
    )

"""One attempt of a run: reserved, composed and started on its devices, and what the ledger says of its end."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from typing import Protocol as Interface

from capsule.core.account import Account
from capsule.core.attempt import COMPLETED, INTERRUPTED, Reserved, Unit
from capsule.core.canonical import canonical
from capsule.core.digest import digest_of, hex_of
from capsule.core.errors import BusyError, CapsuleError, DriftError, MachineError, RefusedError
from capsule.core.progress import Process, deciding_attempt, tries
from capsule.core.protocol import milliseconds, reserved_ms
from capsule.host import disk, launch, store
from capsule.host.attempt_files import secret_names
from capsule.host.devices import ask, backend_for
from capsule.host.disk import cannot_write
from capsule.host.durable import read_tail, write_durably
from capsule.host.lease import lease_directory
from capsule.host.ledger import Ledger
from capsule.host.reservation import refusal_of, reserve
from capsule.host.slurm.commands import Cluster
from capsule.host.slurm.job import SlurmSupervision, submit
from capsule.host.slurm.settle import reconcile as reconcile_jobs
from capsule.host.supervision import Supervision, start
from capsule.host.workspace import Generation, Workspace
from capsule.steps.slots import Slot, readmit_hint

WAIT_MS_MAX = 7 * 24 * 3600 * 1000
LOG_TAIL_BYTES = 2000


@dataclass(frozen=True)
class Request:
    """What the caller asks for; `gpus` are UUIDs, in groups of as many as the protocol gives one attempt.

    `slurm` are arguments for `sbatch` if attempts are to be jobs of a Slurm cluster, None if they run here.
    """

    protocol: Path
    dry_run: bool = False
    pilot: bool = False
    device: str | None = None
    gpus: tuple[str, ...] = ()
    wait: bool = False
    from_frozen: bool = False
    slurm: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Progress:
    """How far one attempt that is going on has come: rows of the cells that it is to run."""

    attempt: str
    rows: int
    cells: int


class Display(Interface):
    """Where a run says how it goes."""

    @property
    def shows(self) -> bool:
        """Whether anybody sees `going_on`."""

    def note(self, words: str) -> None:
        """Say something that stays."""

    def going_on(self, attempts: Sequence[Progress], done: int, processes: int, left: float | None) -> None:
        """Show the attempts at hand and how many processes are done; `left` is in seconds."""

    def ended(self, attempt: str, outcome: str, evidence: str, seconds: float, unit: str) -> None:
        """Say how an attempt ended and what it cost in device-seconds."""


@dataclass(frozen=True)
class AttemptRan:
    """One attempt of this call, and what it took from the budget."""

    id: str
    process: int
    devices: tuple[str, ...]
    outcome: str
    evidence: str
    debited_ms: int


@dataclass
class Work:
    """What one call works on, the attempts that ended in it, and why it starts no more: rules, or an error.

    With a `cluster`, attempts are its jobs.
    """

    request: Request
    workspace: Workspace
    generation: Generation
    slots: list[Slot]
    ledger: Ledger
    display: Display
    environment: dict[str, Any]
    cluster: Cluster | None = None
    attempts: list[AttemptRan] = field(default_factory=list)
    stopped: str | None = None
    error: CapsuleError | None = None

    @property
    def unit(self) -> Unit:
        """The unit in which this run is charged."""
        return self.slots[0][0].unit

    @property
    def budget_ms(self) -> int:
        """The frozen budget of this run's unit, for pilots the pilots' own."""
        budget = self.generation.manifest.protocol.budget
        return milliseconds(budget.pilot_device_seconds if self.request.pilot else budget.device_seconds)

    def found(self, slot: Slot) -> dict[str, Any]:
        """Describe what is here: interpreter, distributions, and the devices of one slot with their driver."""
        found = self.environment | {"devices": [device.name for device in slot]}
        if self.unit == "gpu":
            backend = backend_for(slot[0].uuid)
            found["driver"] = ask(backend, lambda: backend.baseline(slot[0].uuid)).get("driver")
        return found


@dataclass(frozen=True)
class Going:
    """An attempt of this call that is going on."""

    slot: Slot
    process: Process
    supervision: Supervision | SlurmSupervision


class TakenError(Exception):
    """Another command's attempt is open, or has settled the process, since we looked."""


class LaterError(Exception):
    """Another attempt can start only when those of this call that are running have ended."""


def prepare(work: Work, process: Process, *, alone: bool) -> launch.SourceTree:
    """Materialise the frozen sources of a process, from the work tree or a revision, with their list beside them.

    Raises:
        LaterError: an attempt changed them, and others of this call are using them.
    """
    revision = work.generation.manifest.protocol.arm(process.cells[0].arm).revision
    listed = b"".join(work.generation.list_blocks(revision))
    name = hex_of(digest_of(listed))
    root = work.workspace.snapshots / name
    entries = work.generation.sources(revision)
    try:
        store.materialise(work.workspace.root, entries, root)
    except DriftError as error:
        if not alone:
            raise LaterError from error
        if any(attempt.open for attempt in work.ledger.read()[1].attempts.values()):
            raise
        work.display.note(f"an earlier attempt changed its snapshot, which is made again: {error.message}")
        store.renew(work.workspace.root, entries, root)
    beside = root.with_name(f"{name}.jsonl")
    write_durably(beside, listed)
    return launch.SourceTree(root=str(root), sources=str(beside))


def begin(work: Work, process: Process, slot: Slot, snapshot: launch.SourceTree, own: Collection[str]) -> Going:
    """Reserve and start one attempt on a slot; `own` are the open attempts of this call.

    Raises:
        BudgetError: the frozen rules allow no further attempt; the refusal is in the ledger.
        LaterError: they do not before one of `own` has ended; nothing was written.
        TakenError: another command's attempt is in the way; nothing was written.
    """
    manifest = work.generation.manifest
    budget = manifest.protocol.budget
    asked = Reserved(
        manifest=manifest.identity,
        process=process.ordinal,
        pilot=work.request.pilot,
        from_frozen=work.request.from_frozen,
        unit=work.unit,
        devices=tuple(device.uuid for device in slot),
        reserved_ms=reserved_ms(budget),
    )

    def admit(account: Account) -> None:
        """Under the ledger's lock: only our own attempts are open, and the process is still to run."""
        attempts = tries(account, manifest.identity, process.ordinal)
        decided = deciding_attempt(manifest, attempts) is not None and not work.request.pilot
        if decided or any(attempt.open and attempt.id not in own for attempt in account.attempts.values()):
            raise TakenError
        if own and refusal_of(account, asked, work.budget_ms, budget.attempts_max):
            raise LaterError

    found = canonical(work.found(slot))
    reservation = reserve(
        work.ledger,
        asked,
        budget_ms=work.budget_ms,
        attempts_max=budget.attempts_max,
        not_after=None if work.request.pilot else budget.not_after,
        admit=admit,
        before=lambda attempt: launch.announce(work.workspace.attempts / attempt),
    )
    folder = work.workspace.attempts / reservation.attempt
    try:
        write_durably(folder / "environment.json", found)
    except OSError as error:
        raise cannot_write(folder, error) from error
    order = launch.compose(
        manifest.protocol,
        process,
        reservation,
        ledger=work.workspace.ledger,
        ledger_head=work.workspace.head,
        attempt_dir=folder,
        lease_dir=lease_directory(),
        source_roots={cell.arm: Path(snapshot.root) for cell in process.cells},
        snapshot=work.generation.list_digest(manifest.protocol.arm(process.cells[0].arm).revision).sha256,
        trees=[snapshot],
        secret_names=secret_names(os.environ),
        lease_wait_ms=WAIT_MS_MAX if work.request.wait and work.cluster is None else 0,
    )
    if work.cluster is not None:
        return Going(slot, process, submit(order, work.cluster, work.request.slurm or ()))
    return Going(slot, process, start(order))


def report(work: Work, going: Going) -> None:
    """Read from the ledger how an attempt ended; what could not be settled there is an error of this run.

    Raises:
        BusyError: the device was held.
        RefusedError: nothing was started.
        MachineError: the supervisor could not do its work; `reconcile` will settle the attempt.
    """
    name = going.supervision.attempt
    attempt = work.ledger.read()[1].attempts.get(name)
    if attempt is None:
        raise MachineError(
            f"{work.ledger.path}: expected attempt {name}, which this run reserved, found another ledger or none",
            hint="put the ledger and its head back: a budget that was spent is known from nowhere else",
        )
    if attempt.open and isinstance(going.supervision, SlurmSupervision):
        reconcile_jobs(work.ledger, work.workspace.attempts)
        attempt = work.ledger.read()[1].attempts[name]
    if attempt.refused is not None:
        reason, words = attempt.refused.reason, f"{name} was refused: {attempt.refused.words}"
        if reason == "busy":
            wait = "wait for it: capsule run --wait; `capsule status` says who holds what"
            raise BusyError(words, hint=wait if work.cluster is None else "for a node of its own: --sbatch=--exclusive")
        if reason == "machine" and disk.says_full(words):
            raise MachineError(words, hint=disk.hint_where_full(work.workspace.attempts))
        readmit = f"once the device is sound again: {readmit_hint(going.slot[0].uuid)}"
        raise RefusedError(words, hint=readmit if reason == "quarantined" else None)
    if attempt.end is None or attempt.reserved is None:
        raise _unsettled(work, going)
    end = attempt.end
    cost_ms = end.charge.debited_ms
    ran = AttemptRan(name, going.process.ordinal, attempt.reserved.devices, end.outcome, end.evidence, cost_ms)
    work.attempts.append(ran)
    work.display.ended(name, end.outcome, end.evidence, cost_ms / 1000, work.unit)
    if end.outcome not in COMPLETED | INTERRUPTED or end.outcome == "trial_error":
        work.display.note(f"what it printed is in {work.workspace.attempts / name}")
    if end.outcome in INTERRUPTED:
        work.stopped = f"{name} ended as {end.outcome}: {end.evidence}"


def _unsettled(work: Work, going: Going) -> MachineError:
    """Say what a supervisor that settled nothing left behind: its last words, or that its disk takes none."""
    name = going.supervision.attempt
    log = work.workspace.attempts / name / launch.LOG
    said = read_tail(log, LOG_TAIL_BYTES).decode(errors="replace").strip().splitlines()
    full = disk.says_full("\n".join(said)) or disk.is_full(log)
    found = f"found it ended with status {going.supervision.poll()}"
    if said:
        found += f": {next(filter(disk.says_full, said), said[-1])}; see {log}"
    elif full:
        found += f", and no room for its log {log}"
    else:
        found += f", and nothing in its log {log}"
    hint = "settle it and go on: capsule run again, or capsule reconcile"
    return MachineError(
        f"{name}: expected its supervisor to settle it, {found}", hint=disk.hint_where_full(log) if full else hint
    )

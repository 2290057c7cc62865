"""The supervisor: one process that leases, starts, watches, ends and settles one attempt, and outlives its caller.

    python -m capsule.host.supervisor ORDER.json

It takes the lease, looks at the idle device, writes `intent`, starts the trial, and from then on writes before it
acts: why it stops a trial before it signals, that the tree is empty, that the device is clean, and the charge. Every
descendant of the trial is below it (it is a subreaper), so the tree is emptied whole, whatever daemons a trial started.
If the ledger cannot be written while the trial runs, the trial is stopped and the attempt stays open: an attempt whose
cost cannot be written down must not go on.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from capsule.core.attempt import (
    Clock,
    DeviceClean,
    EventName,
    Exit,
    Heartbeat,
    Intent,
    Outcome,
    Refused,
    Settled,
    Spawned,
    Stopping,
    TreeEmpty,
)
from capsule.core.errors import BusyError, CapsuleError, MachineError, RefusedError
from capsule.core.redact import redact_text
from capsule.core.schema import Model
from capsule.host import launch
from capsule.host.attempt_files import finish_files, irregular_words, secrets_of
from capsule.host.child import Child, Signals
from capsule.host.clock import ClockSource, read_clock
from capsule.host.devices.base import Baseline
from capsule.host.durable import crash_at, sync, write_durably
from capsule.host.lease import Holder, Lease, take
from capsule.host.ledger import Ledger
from capsule.host.output import CappedOutput
from capsule.host.preflight import TREE, IdleDevices, Refusal, inspect_devices, source_drifts
from capsule.host.process import become_subreaper, descendants, identify, is_alive, read_stat, send
from capsule.host.settlement import (
    Cause,
    cut_journal,
    failed_exit,
    foreign_imports,
    judge,
    observed_charge,
    observed_exit,
    read_rows,
    suspended_ms,
    write_end_record,
)

IDENTITY = "supervisor.json"
FAILURE = "ledger_failed.json"

FIRST_HEARTBEAT_MS = 1_000
HEARTBEAT_MS = 5_000
HEARTBEAT_MS_MAX = 60_000
HEARTBEAT_GROWTH = 100
LINGER_MS = 1_000
"""How long helpers of a finished trial may take to notice that it is gone before they count as leaked."""
TURN_MS = 50


def heartbeat_interval_ms(elapsed_ms: int) -> int:
    """Return when the next heartbeat is due: after 5 s, growing to a hundredth of the time elapsed, at most 60 s.

    So a ledger stays small however long an attempt runs, and the last heartbeat, which is the lower bound of an
    unobserved charge, misses at most 1 % of it, or 5 s.
    """
    return max(HEARTBEAT_MS, min(elapsed_ms // HEARTBEAT_GROWTH, HEARTBEAT_MS_MAX))


class Supervisor:
    """One attempt from its lease to its settlement."""

    def __init__(self, order: launch.LaunchOrder, clock: ClockSource = read_clock) -> None:
        self.order = order
        self.clock = clock
        self.directory = Path(order.attempt_dir)
        self.ledger = Ledger(Path(order.ledger), Path(order.ledger_head), resumed=order.ledger_position)
        self.secrets = secrets_of(order.secrets)
        self.signals = Signals()
        self.leased = clock()
        self.devices = IdleDevices({}, {})
        self.outputs: tuple[CappedOutput, ...] = ()
        self.child: Child | None = None
        self.journal = -1
        self.cause: Cause | None = None
        self.kill_at_ms = 0
        self.beat_at_ms = 0
        self.heartbeat_at_ms = 0

    def run(self) -> int:
        """Carry the order out and return the exit status that says how far it went."""
        order = self.order
        try:
            drift = source_drifts(order.trees)
            if drift is not None:
                raise Refusal("source_changed", drift)
            lease = take(
                Path(order.lease_dir),
                order.reserved.devices,
                self._holder({}),
                wait_ms=order.lease_wait_ms,
                cancelled=lambda: bool(self.signals.stops),
            )
        except (Refusal, CapsuleError) as error:
            return self._refuse(error)
        try:
            self.leased = self.clock()
            try:
                self.devices = inspect_devices(order.reserved.devices, lease.inherited, order.exclusivity)
                if self.signals.stops:
                    raise Refusal("user", "stopped")
                lease.write(self._holder(self.devices.baseline))
            except (Refusal, MachineError) as error:
                return self._refuse(error)
            return self._guarded(lease)
        finally:
            lease.release()

    def _guarded(self, lease: Lease) -> int:
        """Run the attempt; whatever goes wrong here, the trial does not outlive it."""
        try:
            if not self._announce():
                return launch.REFUSED
            return self._attempt(lease)
        except (CapsuleError, OSError) as error:
            self._abandon(error.message if isinstance(error, CapsuleError) else str(error))
            return launch.LEDGER_FAILED
        except Exception as error:
            traceback.print_exc()
            self._abandon(repr(error))
            return launch.DEFECT

    def _holder(self, baseline: Baseline) -> Holder:
        order, since = self.order, self.clock().realtime
        return Holder(
            protocol=order.protocol,
            attempt=order.attempt,
            pid=os.getpid(),
            since=since,
            token=order.token,
            baseline=baseline,
        )

    def _refuse(self, error: Refusal | CapsuleError) -> int:
        """Write that nothing was started, and why."""
        asked = self.order.reserved
        reason = error.reason if isinstance(error, Refusal) else "busy" if isinstance(error, BusyError) else "machine"
        words = str(error)
        if self.signals.stops:
            reason, words = "user", f"{self.signals.stops[0]} before anything was started"
        refused = Refused(manifest=asked.manifest, process=asked.process, pilot=asked.pilot, reason=reason, words=words)
        print(words, file=sys.stderr)
        try:
            self._append("refused", refused)
        except CapsuleError as failure:
            print(failure.message, file=sys.stderr)
            return launch.MACHINE
        return launch.REFUSED

    # The attempt itself.

    def _announce(self) -> bool:
        """Write the intent to start; False if the attempt was settled by another command meanwhile."""
        order = self.order
        secrets = [os.fsdecode(secret) for secret in self.secrets]
        intent = Intent(
            leased=self.leased,
            supervisor_pid=os.getpid(),
            argv=tuple(redact_text(argument, secrets) for argument in launch.shown_argv(order)),
            snapshot=order.snapshot,
            device_baseline=self.devices.baseline,
        )
        try:
            self._append("intent", intent)
        except RefusedError as error:
            print(error.message, file=sys.stderr)
            return False
        return True

    def _attempt(self, lease: Lease) -> int:
        failure = self._spawn(lease)
        if failure is None:
            self._watch(lease)
        exited = self._exit(failure)
        self._append("exit", exited)
        leaked = self._empty_tree()
        clean = self._clean_device()
        if clean.clean:
            lease.clear()
        self._settle(exited, leaked, clean)
        return launch.SETTLED

    def _spawn(self, lease: Lease) -> str | None:
        """Start the trial; words if it could not be executed."""
        order = self.order
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self.journal = os.open(self.directory / launch.JOURNAL, flags, 0o644)
        limit = order.limits.output_bytes_max
        stdout, stderr = (CappedOutput(self.directory / name, limit) for name in ("stdout", "stderr"))
        self.outputs = (stdout, stderr)
        try:
            self.child = Child(
                order.argv,
                directory=Path(order.directory),
                environment=self._environment(),
                inherited=list(lease.descriptors.values()),
                outputs=(stdout, stderr),
                signals=self.signals,
            )
        except OSError as error:
            return f"{error.filename or order.argv[0]}: {error.strerror}"
        except ValueError as error:
            return f"{order.argv[0]!r} and its arguments cannot be passed on: {error}"
        found = read_stat(self.child.pid)
        self._append("spawned", Spawned(pid=self.child.pid, start_ticks=found.start_ticks if found else 0))
        return None

    def _environment(self) -> dict[str, str]:
        """Pass the environment through, except what would let unfrozen code in or show devices not leased."""
        kept = launch.trial_environment(os.environ)
        return kept | self.devices.environment() | self.order.environment | {TREE: self.order.token}

    def _watch(self, lease: Lease) -> None:
        """Until the leader was collected: heartbeats, the deadline, requests to stop."""
        child, limits = self.child, self.order.limits
        assert child is not None
        self.beat_at_ms = self.clock().boottime_ms + FIRST_HEARTBEAT_MS
        deadline_ms = self.leased.boottime_ms + limits.wall_ms
        while child.status is None:
            now = self.clock()
            if self.cause is None and self.signals.stops:
                self._stop("user", f"{self.signals.stops[0]} was received")
            if self.cause is None and now.boottime_ms >= deadline_ms:
                self._stop("wall_limit", f"{limits.wall_ms / 1000:g} s since the lease")
            if now.boottime_ms >= self.beat_at_ms:
                self._beat(now)
                loss = lease.loss() if self.cause is None else None
                if loss is not None:
                    self._stop("lease_lost", loss)
            if self.cause is not None and (self.signals.now or now.boottime_ms >= self.kill_at_ms):
                self._signal_tree(signal.SIGKILL)
                child.turn(TURN_MS)
                continue
            until = min(self.beat_at_ms, deadline_ms if self.cause is None else self.kill_at_ms)
            child.turn(until - self.clock().boottime_ms)

    def _beat(self, now: Clock) -> None:
        """Bound what a crash of the machine can take from the journal; show that the attempt is alive when due."""
        sync(self.journal)
        if now.boottime_ms >= self.heartbeat_at_ms:
            elapsed_ms = now.boottime_ms - self.leased.boottime_ms
            self.heartbeat_at_ms = now.boottime_ms + heartbeat_interval_ms(elapsed_ms)
            self._append("heartbeat", Heartbeat(elapsed_ms=elapsed_ms), now)
        self.beat_at_ms = min(now.boottime_ms + HEARTBEAT_MS, self.heartbeat_at_ms)

    def _stop(self, cause: Outcome, evidence: str) -> None:
        """Write why, then ask the whole tree to end."""
        self.cause = (cause, evidence)
        self._append("stopping", Stopping(cause=cause, evidence=evidence))
        self.kill_at_ms = self.clock().boottime_ms + self.order.limits.kill_grace_ms
        self._signal_tree(signal.SIGKILL if self.signals.now else signal.SIGTERM)

    def _signal_tree(self, number: signal.Signals) -> None:
        """Signal every live descendant; parents come first, so that they start nothing new meanwhile."""
        for item in descendants(os.getpid()):
            send(item, number)

    def _exit(self, failure: str | None) -> Exit:
        if failure is not None:
            return failed_exit(failure)
        assert self.child is not None
        assert self.child.status is not None
        assert self.child.usage is not None
        return observed_exit(self.child.status, self.child.usage, self.cause)

    # After the leader's end.

    def _empty_tree(self) -> str | None:
        """End what is left of the tree; words if descendants had outlived the leader on their own account."""
        leaked = None
        ending = self.cause is not None
        killed: set[tuple[int, int]] = set()
        lingering_until_ms = self.clock().boottime_ms + LINGER_MS
        while tree := descendants(os.getpid()):
            now = self.clock()
            if now.boottime_ms >= self.beat_at_ms:
                self._beat(now)
            if not ending and (now.boottime_ms >= lingering_until_ms or self.signals.stops):
                ending = True
                pids = ", ".join(str(item.pid) for item in tree[:10])
                leaked = f"{len(tree)} descendants outlived the trial: pid {pids}"
                self._append("stopping", Stopping(cause="leaked_descendants", evidence=leaked))
                self.kill_at_ms = self.clock().boottime_ms + self.order.limits.kill_grace_ms
                self._signal_tree(signal.SIGTERM)
            if ending:
                killed |= {(item.pid, item.start_ticks) for item in tree}
                if self.signals.now or now.boottime_ms >= self.kill_at_ms:
                    self._signal_tree(signal.SIGKILL)
            self._turn(10)
        if self.child is not None:
            self.child.drain(1.0)
        self._append("tree_empty", TreeEmpty(killed=len(killed), level="subreaper"))
        return leaked

    def _clean_device(self) -> DeviceClean:
        """Wait until every device is back at its idle baseline, at most for the grace; the charge ends here."""
        until_ms = self.clock().boottime_ms + self.order.limits.release_grace_ms
        while True:
            try:
                words = self.devices.unclean()
                lost = False
            except MachineError as error:
                words, lost = error.message, True
            now = self.clock()
            if not words or lost or now.boottime_ms >= until_ms:
                break
            if now.boottime_ms >= self.beat_at_ms:
                self._beat(now)
            self._turn(100)
        if lost and self.cause is None:
            self.cause = ("device_lost", words or "")
        clean = DeviceClean(clean=not words, released=now, evidence=words or "back at its idle baseline")
        self._append("device_clean", clean, now)
        return clean

    def _settle(self, exited: Exit, leaked: str | None, clean: DeviceClean) -> None:
        order, released = self.order, clean.released
        if exited.exit_code == 0 and order.kind == "command":
            write_end_record(self.journal)
        for output in self.outputs:
            output.close()
        sync(self.journal)
        irregular = irregular_words(self.directory)
        cut = cut_journal(self.directory)
        journal = read_rows(order)
        drift = source_drifts(order.trees)
        foreign = foreign_imports(order, journal)
        outcome, evidence = judge(
            order, exited, journal, cause=self.cause, leaked=leaked, drift=drift, foreign=foreign, cut=cut
        )
        notes = [output.failure for output in self.outputs if output.failure] + irregular
        if cut is not None and outcome != "bad_records":
            notes.append(cut)
        if drift is not None and outcome != "source_changed":
            notes.append(drift)
        if not clean.clean and outcome != "device_lost":
            notes.append(f"the device is not clean: {clean.evidence}")
        if not is_alive(order.launcher):
            notes.append("cli_lost: the command that started this attempt was gone before its end")
        charge = observed_charge(len(order.reserved.devices), self.leased, released)
        settled = Settled(
            outcome=outcome,
            evidence="; ".join([evidence, *notes]),
            charge=charge,
            overrun_ms=max(0, charge.debited_ms - order.reserved.reserved_ms),
            suspended_ms=suspended_ms(self.leased, released),
            exclusivity="unverifiable",
            telemetry={},
            rows=len(journal.rows),
            files=finish_files(self.directory, order.limits.output_bytes_max, self.secrets),
        )
        self._append("settled", settled)

    # When the ledger fails.

    def _abandon(self, words: str) -> None:
        """End the trial without writing to the ledger, and leave a note of when that was for `reconcile`."""
        print(f"the attempt is abandoned: {words}", file=sys.stderr)
        until_ms = self.clock().boottime_ms + self.order.limits.kill_grace_ms
        self._signal_tree(signal.SIGTERM)
        while descendants(os.getpid()):
            if self.signals.now or self.clock().boottime_ms >= until_ms:
                self._signal_tree(signal.SIGKILL)
            self._turn(10)
        try:
            write_durably(self.directory / FAILURE, Failure(words=words, emptied=self.clock()).to_bytes())
        except OSError as failure:
            print(f"no note of it could be left: {failure}", file=sys.stderr)

    def _turn(self, timeout_ms: int) -> None:
        if self.child is not None:
            self.child.turn(timeout_ms)

    def _append(self, name: EventName, data: Model, at: Clock | None = None) -> None:
        self.ledger.append(name, self.order.attempt, data, at or self.clock())


class Failure(Model):
    """The note of a supervisor that could not write its ledger: why, and when the tree was empty."""

    words: str
    emptied: Clock


def main(arguments: Sequence[str]) -> int:
    """Carry out the order in the file named on the command line."""
    path = Path(arguments[0])
    order = launch.LaunchOrder.from_bytes(path.read_bytes(), str(path))
    if crash := os.environ.get("CAPSULE_CRASH_AT"):
        crash_at(int(crash))
    os.umask(0o022)
    try:
        become_subreaper()
        write_durably(Path(order.attempt_dir) / IDENTITY, identify(os.getpid()).to_bytes())
    except (MachineError, OSError) as error:
        print(f"{order.attempt_dir}: nothing was started: {error}", file=sys.stderr)
        return launch.MACHINE
    return Supervisor(order).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

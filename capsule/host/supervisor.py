"""The supervisor: one process that leases, starts, watches, ends and settles one attempt, and outlives its caller.

    python -m capsule.host.supervisor ORDER.json

It takes the lease, looks at the idle device, writes `intent`, starts the trial, and from then on writes before it
acts: why it stops a trial before it signals, that the tree is empty, that the device is clean, and the charge. Two
processes are forked off it: the watchdog, which is the trial's parent and ends it if the supervisor cannot, and the
sampler, which asks the driver and may hang there. If the ledger cannot be written while the trial runs, the trial is
stopped and the attempt stays open: an attempt whose cost cannot be written down must not go on.
"""

from __future__ import annotations

import contextlib
import os
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
from capsule.core.schema import Model
from capsule.core.telemetry import Sample, worst
from capsule.host import launch, traces
from capsule.host.attempt_files import (
    finish_files,
    forget_secrets,
    irregular_words,
    keep_secrets,
    redact_records,
    secrets_of,
    without_secrets,
)
from capsule.host.attempt_tree import AttemptTree
from capsule.host.child import collect
from capsule.host.clock import ClockSource, read_clock, same_boot
from capsule.host.devices.base import Baseline
from capsule.host.durable import arm, sync
from capsule.host.lease import Holder, Lease, quarantine, quarantined, take
from capsule.host.ledger import Ledger
from capsule.host.loop import Loop, Signals
from capsule.host.preflight import TREE, Refusal, source_drifts
from capsule.host.process import become_subreaper, identify, is_alive
from capsule.host.sampler import Sampler
from capsule.host.settlement import (
    Cause,
    cause_of_sigkill,
    clock_step,
    cut_journal,
    failed_exit,
    foreign_imports,
    judge,
    memory_hint,
    observed_charge,
    observed_exit,
    read_rows,
    suspended_ms,
    write_end_record,
)
from capsule.host.telemetry_file import TelemetryFile
from capsule.host.watchdog import LINGER_MS, Trial, Watchdog

FIRST_HEARTBEAT_MS = 1_000
HEARTBEAT_MS = 5_000
HEARTBEAT_MS_MAX = 60_000
HEARTBEAT_GROWTH = 100
TURN_MS = 50
LOOK_MS = 1_000
"""How often the tree is counted and recorded."""
DRIVER_SECONDS = 30.0
"""How long the driver may take to be opened, and to say how the idle device looks."""
WATCHDOG_MS = 3_000
"""How long a watchdog whose trial has ended may take to say so and to end."""


def heartbeat_interval_ms(elapsed_ms: int) -> int:
    """Return when the next heartbeat is due: after 5 s, growing to a hundredth of the time elapsed, at most 60 s.

    So a ledger stays small however long an attempt runs, and the last heartbeat, which is the lower bound of an
    unobserved charge, misses at most 1 % of it, or 5 s.
    """
    return max(HEARTBEAT_MS, min(elapsed_ms // HEARTBEAT_GROWTH, HEARTBEAT_MS_MAX))


def say(words: str) -> None:
    """Write to the log, which may be on a disk that is full: what must be done next is done all the same."""
    with contextlib.suppress(OSError):
        print(words, file=sys.stderr, flush=True)


class Supervisor:
    """One attempt from its lease to its settlement."""

    def __init__(self, order: launch.LaunchOrder, clock: ClockSource = read_clock) -> None:
        self.order = order
        self.clock = clock
        self.directory = Path(order.attempt_dir)
        self.ledger = Ledger(Path(order.ledger), Path(order.ledger_head), resumed=order.ledger_position)
        self.secrets = secrets_of(order.secrets)
        self.loop = Loop()
        self.signals = Signals(self.loop)
        self.leased = clock()
        self.baseline: Baseline = {}
        self.sees: dict[str, str] = {}
        self.telemetry = TelemetryFile(self.directory)
        self.sampler = Sampler(order.reserved.devices, self.loop, clock, self._sampled)
        self.watchdog: Watchdog | None = None
        self.tree = AttemptTree(self.directory, order.token, order.limits.processes_max)
        self.tree.sampler = self.sampler.pid
        self.journal = -1
        self.cause: Cause | None = None
        self.alarm: Cause | None = None
        self.kill_at_ms = 0
        self.beat_at_ms = 0
        self.look_at_ms = 0
        self.heartbeat_at_ms = 0

    def run(self) -> int:
        """Carry the order out and return the exit status that says how far it went."""
        order = self.order
        try:
            drift = source_drifts(order.trees)
            if drift is not None:
                raise Refusal("source_changed", drift)
            self.sampler.open(DRIVER_SECONDS, lambda: bool(self.signals.stops))
            lease = take(
                Path(order.lease_dir),
                order.reserved.devices,
                self._holder(),
                wait_ms=order.lease_wait_ms,
                cancelled=lambda: bool(self.signals.stops),
            )
        except (Refusal, CapsuleError, OSError) as error:
            self.sampler.kill()
            return self._refuse(error)
        try:
            try:
                self._inspect(lease)
            except (Refusal, MachineError, OSError) as error:
                if not lease.inherited:
                    lease.clear()
                return self._refuse(error)
            return self._guarded(lease)
        finally:
            self.sampler.kill()
            self.tree.forget()
            lease.release()

    def _inspect(self, lease: Lease) -> None:
        """Look at the leased devices before anything is started."""
        self.leased = self.clock()
        for device in self.order.reserved.devices:
            barred = quarantined(Path(self.order.lease_dir), device)
            if barred is not None:
                raise Refusal("quarantined", f"device {device} is quarantined: {barred.words}")
        self.baseline, self.sees = self.sampler.inspect(
            lease.inherited, self.order.exclusivity, DRIVER_SECONDS, lambda: bool(self.signals.stops)
        )
        if self.signals.stops:
            raise Refusal("user", "stopped")
        keep_secrets(self.directory, self.secrets)
        lease.write(self._holder())

    def _guarded(self, lease: Lease) -> int:
        """Run the attempt; whatever goes wrong here, the trial does not outlive it."""
        try:
            if not self._announce():
                self._forget_secrets()
                return launch.REFUSED
            return self._attempt(lease)
        except (CapsuleError, OSError) as error:
            self._abandon(error.message if isinstance(error, CapsuleError) else str(error))
            return launch.LEDGER_FAILED
        except Exception as error:
            say(traceback.format_exc())
            self._abandon(repr(error))
            return launch.DEFECT

    def _holder(self) -> Holder:
        order, since = self.order, self.clock().realtime
        return Holder(
            protocol=order.protocol,
            attempt=order.attempt,
            pid=os.getpid(),
            since=since,
            token=order.token,
            baseline=self.baseline,
        )

    def _refuse(self, error: Refusal | CapsuleError | OSError) -> int:
        """Write that nothing was started, and why."""
        asked = self.order.reserved
        reason = error.reason if isinstance(error, Refusal) else "busy" if isinstance(error, BusyError) else "machine"
        words = self._shown(str(error))
        if self.signals.stops:
            reason, words = "user", f"{self.signals.stops[0]} before anything was started"
        self._forget_secrets()
        refused = Refused(manifest=asked.manifest, process=asked.process, pilot=asked.pilot, reason=reason, words=words)
        say(words)
        try:
            self._append("refused", refused)
        except CapsuleError as failure:
            say(failure.message)
            return launch.MACHINE
        return launch.REFUSED

    # The attempt itself.

    def _announce(self) -> bool:
        """Write the intent to start; False if the attempt was settled by another command meanwhile."""
        order = self.order
        intent = Intent(
            leased=self.leased,
            supervisor_pid=os.getpid(),
            argv=tuple(map(self._shown, launch.shown_argv(order))),
            snapshot=order.snapshot,
            device_baseline=self.baseline,
        )
        try:
            self._append("intent", intent)
        except RefusedError as error:
            say(error.message)
            return False
        return True

    def _attempt(self, lease: Lease) -> int:
        exited = self._spawn(lease) or self._watch(lease)
        self._append("exit", exited)
        leaked = self._empty_tree()
        self._dismiss_watchdog()
        clean = self._clean_device()
        if clean.clean:
            lease.clear()
        self._settle(exited, leaked, clean)
        return launch.SETTLED

    def _spawn(self, lease: Lease) -> Exit | None:
        """Start the trial; its exit if it could not be started."""
        order = self.order
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self.journal = os.open(self.directory / launch.JOURNAL, flags, 0o644)
        environment = launch.trial_environment(os.environ) | self.sees | order.environment | {TREE: order.token}
        mismatch = self._mismatch(environment)
        if mismatch is not None:
            return failed_exit("device_mismatch", self._shown(mismatch))
        self.tree.enclose()
        trial = Trial(
            argv=order.argv,
            directory=Path(order.directory),
            environment=environment,
            inherited=list(lease.descriptors.values()),
            attempt_dir=self.directory,
            output_bytes_max=order.limits.output_bytes_max,
            deadline_ms=self.leased.boottime_ms + order.limits.wall_ms,
            kill_grace_ms=order.limits.kill_grace_ms,
            cgroup=self.tree.cgroup,
        )
        watchdog = self.watchdog = Watchdog(trial, self.loop, self.clock)
        self.tree.watchdog = watchdog.pid
        self._leave_whereabouts()
        self._await_start(trial.deadline_ms)
        if watchdog.failure is not None:
            return failed_exit("exec_failed", self._shown(watchdog.failure))
        if watchdog.started is None:
            return failed_exit("lost", "the watchdog was killed before it said that the trial had started")
        pid, start_ticks = watchdog.started
        self.tree.seen.add(pid)
        self._append("spawned", Spawned(pid=pid, start_ticks=start_ticks))
        return None

    def _await_start(self, until_ms: int) -> None:
        """Until it is known whether the trial was started: a watchdog that does not say so in time is killed."""
        watchdog = self.watchdog
        while watchdog is not None and watchdog.started is None and watchdog.failure is None and not watchdog.gone:
            now_ms = self.clock().boottime_ms
            if self.signals.stops:
                until_ms = min(until_ms, now_ms + WATCHDOG_MS)
            if now_ms >= until_ms:
                watchdog.kill()
            self._turn(TURN_MS)

    def _leave_whereabouts(self) -> None:
        watchdog = identify(self.watchdog.pid) if self.watchdog else None
        cgroup = str(self.tree.cgroup.path) if self.tree.cgroup else None
        found = traces.Whereabouts(supervisor=identify(os.getpid()), watchdog=watchdog, cgroup=cgroup)
        traces.leave(self.directory, traces.WHEREABOUTS, found)

    def _mismatch(self, environment: dict[str, str]) -> str | None:
        """Compare the devices that a program with this environment sees with those that were leased."""
        if self.order.reserved.unit == "cpu":
            return None
        try:
            found = self.sampler.visible(environment, lambda: bool(self.signals.stops))
        except (Refusal, MachineError) as error:
            say(f"which devices the trial sees is not known: {error}")
            return None
        leased = sorted(self.order.reserved.devices)
        if found is None or sorted(found) == leased:
            return None
        return f"expected a program to see {', '.join(leased)}, found {', '.join(found) or 'no device'}"

    def _watch(self, lease: Lease) -> Exit:
        """Until the leader was collected: heartbeats, the deadline, alarms and requests to stop."""
        watchdog, limits = self.watchdog, self.order.limits
        assert watchdog is not None
        deadline_ms = self.leased.boottime_ms + limits.wall_ms
        self.beat_at_ms = self.look_at_ms = self.clock().boottime_ms + FIRST_HEARTBEAT_MS
        while watchdog.status is None or watchdog.usage is None:
            now = self.clock()
            if self.cause is None:
                self._check(watchdog, now, deadline_ms)
            if now.boottime_ms >= self.beat_at_ms:
                self._beat(now)
                loss = lease.loss() if self.cause is None else None
                if loss is not None:
                    self._stop("lease_lost", loss)
            if now.boottime_ms >= self.look_at_ms:
                self._look(now)
            if watchdog.gone and not self.tree.live():
                self._turn(0)
                if watchdog.status is None:
                    return self._unknown_exit()
                continue
            if self.cause is not None and (self.signals.now or now.boottime_ms >= self.kill_at_ms):
                self.tree.kill()
                if now.boottime_ms >= self.kill_at_ms + WATCHDOG_MS and not self.tree.live():
                    watchdog.kill()
                self._turn(TURN_MS)
                continue
            until = min(self.beat_at_ms, self.look_at_ms, deadline_ms if self.cause is None else self.kill_at_ms)
            self._turn(until - self.clock().boottime_ms)
        return observed_exit(watchdog.status, watchdog.usage, self.cause)

    def _unknown_exit(self) -> Exit:
        """Return the exit of a leader that its watchdog had collected when it was killed, before it could say so."""
        assert self.cause is not None
        return failed_exit(self.cause[0], f"how it ended was lost with its watchdog; {self.cause[1]}")

    def _check(self, watchdog: Watchdog, now: Clock, deadline_ms: int) -> None:
        """Stop the trial if there is a reason to."""
        if self.signals.stops:
            self._stop("user", f"{self.signals.stops[0]} was received")
        elif now.boottime_ms >= deadline_ms:
            self._stop("wall_limit", f"{self.order.limits.wall_ms / 1000:g} s since the lease")
        elif watchdog.gone:
            self._stop("lost", f"its watchdog, pid {watchdog.pid}, was killed, and what it printed since is lost")
        elif watchdog.overruled is not None:
            self._stop("wall_limit", watchdog.overruled)
        elif self.alarm is not None:
            self._stop(*self.alarm)

    def _sampled(self, sample: Sample) -> None:
        """Keep a sample; raise the alarm if the trial should not go on."""
        if not self.telemetry.write(sample):
            return
        if sample.lost:
            self.alarm = self.alarm or ("device_lost", sample.error or "the driver has lost the device")
        elif sample.exclusivity == "contaminated" and self.order.on_contamination == "stop":
            self.alarm = self.alarm or ("contaminated", sample.words)

    def _beat(self, now: Clock) -> None:
        """Bound what a crash of the machine can take from the journal; show that the attempt is alive when due."""
        sync(self.journal)
        self.telemetry.sync()
        if now.boottime_ms >= self.heartbeat_at_ms:
            elapsed_ms = now.boottime_ms - self.leased.boottime_ms
            self.heartbeat_at_ms = now.boottime_ms + heartbeat_interval_ms(elapsed_ms)
            self._append("heartbeat", Heartbeat(elapsed_ms=elapsed_ms), now)
        self.beat_at_ms = min(now.boottime_ms + HEARTBEAT_MS, self.heartbeat_at_ms)

    def _look(self, now: Clock) -> None:
        """Record the tree, for whoever must end it if everybody above it is killed; a fork storm ends now."""
        self.look_at_ms = now.boottime_ms + LOOK_MS
        self._revive_sampler()
        storm = self.tree.look()
        if storm is not None and self.cause is None:
            self._stop("fork_storm", storm)
            self.kill_at_ms = now.boottime_ms

    def _revive_sampler(self) -> None:
        self.sampler.revive(self.baseline)
        self.tree.sampler = self.sampler.pid

    def _stop(self, cause: Outcome, evidence: str) -> None:
        """Write why, then ask the whole tree to end."""
        self.cause = (cause, self._shown(evidence))
        self._append("stopping", Stopping(cause=cause, evidence=self.cause[1]))
        self._ask_to_end()

    def _ask_to_end(self) -> None:
        self.kill_at_ms = self.clock().boottime_ms + (0 if self.signals.now else self.order.limits.kill_grace_ms)
        self.tree.ask_to_end()

    # After the leader's end.

    def _empty_tree(self) -> str | None:
        """End what is left of the tree; words if descendants had outlived the leader on their own account."""
        leaked = None
        ending = self.cause is not None
        killed: set[tuple[int, int]] = set()
        lingering_until_ms = self.clock().boottime_ms + LINGER_MS
        while tree := self.tree.live():
            now = self.clock()
            if now.boottime_ms >= self.beat_at_ms:
                self._beat(now)
            if not ending and (now.boottime_ms >= lingering_until_ms or self.signals.stops):
                ending = True
                pids = ", ".join(str(item.pid) for item in tree[:10])
                leaked = f"{len(tree)} descendants outlived the trial: pid {pids}"
                self._append("stopping", Stopping(cause="leaked_descendants", evidence=leaked))
                self._ask_to_end()
            if ending:
                killed |= {(item.pid, item.start_ticks) for item in tree}
                if self.signals.now or now.boottime_ms >= self.kill_at_ms:
                    self.tree.kill()
            self._turn(10)
        self._append("tree_empty", TreeEmpty(killed=len(killed), level="cgroup" if self.tree.cgroup else "subreaper"))
        return leaked

    def _dismiss_watchdog(self) -> None:
        """Let the watchdog close the trial's output and end: it holds the lease as well."""
        watchdog = self.watchdog
        if watchdog is None:
            return
        watchdog.finish()
        until_ms = self.clock().boottime_ms + WATCHDOG_MS
        while not watchdog.gone:
            if self.clock().boottime_ms >= until_ms:
                watchdog.kill()
            self._turn(TURN_MS)

    def _clean_device(self) -> DeviceClean:
        """Wait until every device is back at its idle baseline, at most for the grace; the charge ends here.

        A driver that gives no answer is asked again, by another sampler if need be: what is not known is charged.
        """
        began = self.clock()
        until_ms = began.boottime_ms + self.order.limits.release_grace_ms
        while True:
            left_s = max(1.0, (until_ms - self.clock().boottime_ms) / 1000)
            try:
                self._revive_sampler()
                words = self.sampler.unclean(left_s)
            except MachineError as error:
                words = error.message
            now = self.clock()
            if not words or now.boottime_ms >= until_ms:
                break
            if now.boottime_ms >= self.beat_at_ms:
                self._beat(now)
            self._turn(100)
        clean = DeviceClean(clean=not words, released=now, evidence=self._shown(words or "back at its idle baseline"))
        self._append("device_clean", clean, now)
        return clean

    def _settle(self, exited: Exit, leaked: str | None, clean: DeviceClean) -> None:
        order, released, watchdog = self.order, clean.released, self.watchdog
        self.sampler.kill()
        if exited.exit_code == 0 and order.kind == "command":
            write_end_record(self.journal)
        sync(self.journal)
        self.telemetry.close()
        irregular = irregular_words(self.directory)
        cut = cut_journal(self.directory)
        redact_records(self.directory, self.secrets, order.observations)
        journal = read_rows(order)
        drift = source_drifts(order.trees)
        foreign = foreign_imports(order, journal)
        found = self.telemetry.judge(order, self.leased, released)
        outcome, evidence = judge(
            order,
            exited,
            journal,
            cause=self.cause,
            device=found.fault,
            shared=found.shared,
            killed=cause_of_sigkill(exited, self.tree.cgroup, sorted(self.tree.seen), self.leased),
            leaked=leaked,
            drift=drift,
            foreign=foreign,
            cut=cut,
        )
        notes = [*(watchdog.output_failures if watchdog else ()), *irregular, *found.notes]
        if cut is not None and outcome != "bad_records":
            notes.append(cut)
        if drift is not None and outcome != "source_changed":
            notes.append(drift)
        if not clean.clean:
            notes.append(f"the device is not clean: {clean.evidence}")
        if same_boot(order.launcher.boot_id, self.leased.boot_id) and not is_alive(order.launcher):
            notes.append("cli_lost: the command that started this attempt was gone before its end")
        notes += [words for words in (memory_hint(order, exited, journal), clock_step(self.leased, released)) if words]
        for device, words in found.suspects.items():
            self._quarantine(device, words, released)
        charge = observed_charge(len(order.reserved.devices), self.leased, released)
        settled = Settled(
            outcome=outcome,
            evidence=self._shown("; ".join([evidence, *notes])),
            charge=charge,
            overrun_ms=max(0, charge.debited_ms - order.reserved.reserved_ms),
            suspended_ms=suspended_ms(self.leased, released),
            exclusivity=worst(found.devices.values()),
            telemetry=found.devices,
            rows=len(journal.rows),
            files=finish_files(self.directory, order.limits.output_bytes_max, self.secrets, order.observations),
        )
        self._forget_secrets()
        self._append("settled", settled)

    def _quarantine(self, device: str, words: str, released: Clock) -> None:
        order = self.order
        quarantine(
            Path(order.lease_dir),
            device,
            words=self._shown(words),
            attempt=order.attempt,
            protocol=order.protocol,
            since=released.realtime,
        )

    # When the ledger fails.

    def _abandon(self, words: str) -> None:
        """End the trial without writing to the ledger, and leave a note of when that was for `reconcile`."""
        say(f"the attempt is abandoned: {words}")
        self._await_start(self.clock().boottime_ms + WATCHDOG_MS)
        self._ask_to_end()
        while self.tree.live():
            if self.signals.now or self.clock().boottime_ms >= self.kill_at_ms:
                self.tree.kill()
            self._turn(10)
        self._dismiss_watchdog()
        try:
            failure = traces.Failure(words=self._shown(words), emptied=self.clock())
            traces.leave(self.directory, traces.FAILURE, failure)
        except OSError as error:
            say(f"no note of it could be left: {error}")

    def _turn(self, timeout_ms: int) -> None:
        """Take in what comes within that time: messages of the helpers, signals, and ends of children."""
        self.loop.turn(timeout_ms)
        for pid, status, usage in collect():
            self.sampler.collected(pid)
            if self.watchdog is not None:
                self.watchdog.collected(pid, status, usage)

    def _shown(self, words: str) -> str:
        """Return words as the ledger may have them: a trial's messages and paths can hold secrets."""
        return without_secrets(words, self.secrets)

    def _forget_secrets(self) -> None:
        """Remove the values kept for whoever would have had to end this attempt; a failing disk keeps none open."""
        try:
            forget_secrets(self.directory)
        except OSError as error:
            say(f"the values of its secrets could not be removed: {error}")

    def _append(self, name: EventName, data: Model, at: Clock | None = None) -> None:
        self.ledger.append(name, self.order.attempt, data, at or self.clock())


def main(arguments: Sequence[str]) -> int:
    """Carry out the order in the file named on the command line."""
    path = Path(arguments[0])
    order = launch.LaunchOrder.from_bytes(path.read_bytes(), str(path))
    arm(os.environ)
    os.umask(0o022)
    try:
        become_subreaper()
        found = traces.Whereabouts(supervisor=identify(os.getpid()), watchdog=None, cgroup=None)
        traces.leave(Path(order.attempt_dir), traces.WHEREABOUTS, found)
    except (MachineError, OSError) as error:
        say(f"{order.attempt_dir}: nothing was started: {error}")
        return launch.MACHINE
    return Supervisor(order).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

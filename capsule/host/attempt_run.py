"""One attempt under way: its trial started, watched and ended whole, until its devices are clean.

Every event is written before what it announces is done: why a trial is stopped before it is signalled. Two processes
are forked off this one: the watchdog, which is the trial's parent and ends it if this process cannot, and the sampler,
which asks the driver and may hang there.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from capsule.core.attempt import Clock, DeviceClean, Exit, Heartbeat, Outcome, Spawned, Stopping, TreeEmpty
from capsule.core.errors import MachineError
from capsule.core.telemetry import Sample
from capsule.host import launch, traces
from capsule.host.attempt_ledger import AttemptLedger, say
from capsule.host.attempt_tree import AttemptTree
from capsule.host.child import collect
from capsule.host.clock import ClockSource
from capsule.host.devices.base import Baseline
from capsule.host.durable import sync
from capsule.host.heartbeats import FIRST_HEARTBEAT_MS, HEARTBEAT_MS, heartbeat_interval_ms
from capsule.host.lease import Lease
from capsule.host.loop import Loop, Signals
from capsule.host.preflight import TREE, Refusal
from capsule.host.process import identify
from capsule.host.sampler import Sampler
from capsule.host.settlement import Cause, failed_exit, observed_exit
from capsule.host.telemetry_file import TelemetryFile
from capsule.host.watchdog import LINGER_MS, Trial, Watchdog

TURN_MS = 50
LOOK_MS = 1_000
"""How often the tree is counted and recorded."""
WATCHDOG_MS = 3_000
"""How long a watchdog whose trial has ended may take to say so and to end."""
UNKILLABLE_MS = 30_000
"""How long after its kill a process is one that cannot be killed: a large context on a device takes seconds to end."""


class Seen(NamedTuple):
    """What was seen of an attempt's end: its leader's exit, words on what outlived that, and its devices' release."""

    exited: Exit
    leaked: str | None
    clean: DeviceClean


class AttemptRun:
    """An attempt from the start of its helpers to the release of its devices.

    Whoever takes the lease says in `leased`, `baseline` and `sees` since when, how its devices look when idle, and by
    which environment a program sees them alone.
    """

    def __init__(self, order: launch.LaunchOrder, book: AttemptLedger, clock: ClockSource) -> None:
        self.order = order
        self.book = book
        self.clock = clock
        self.directory = Path(order.attempt_dir)
        self.leased = clock()
        self.baseline: Baseline = {}
        self.sees: dict[str, str] = {}
        self.loop = Loop()
        self.signals = Signals(self.loop)
        self.telemetry = TelemetryFile(self.directory)
        self.sampler = Sampler(order.reserved.devices, self.loop, clock, self._sampled)
        self.watchdog: Watchdog | None = None
        self.tree = AttemptTree(self.directory, order.token, order.limits.processes_max)
        self.tree.sampler = self.sampler.pid
        self.journal = -1
        self.cause: Cause | None = None
        self._alarm: Cause | None = None
        self._shared: set[str] = set()
        self._kill_at_ms = 0
        self._barred = False
        self._beat_at_ms = 0
        self._look_at_ms = 0
        self._heartbeat_at_ms = 0

    def is_stopped(self) -> bool:
        """Whether somebody has asked this process to stop."""
        return bool(self.signals.stops)

    def go(self, lease: Lease) -> Seen:
        """Run the trial to its end, and wait until its tree is empty and its devices are clean."""
        exited = self._spawn(lease) or self._watch(lease)
        self.book.append("exit", exited)
        leaked = self._empty_tree()
        self._dismiss_watchdog()
        return Seen(exited, leaked, self._clean_device())

    def give_up(self) -> None:
        """End whatever was started and write no event of it: the ledger cannot be written."""
        self._await_start(self.clock().boottime_ms + WATCHDOG_MS)
        self._ask_to_end()
        while self.tree.live():
            if self.signals.now or self.clock().boottime_ms >= self._kill_at_ms:
                self.tree.kill()
            self._turn(10)
        self._dismiss_watchdog()

    def _kill(self) -> None:
        """Kill what is left of the tree; a device that something holds which cannot be killed waits for a person."""
        self.tree.kill()
        now = self.clock()
        if self._barred or now.boottime_ms < self._kill_at_ms + UNKILLABLE_MS or self.order.reserved.unit == "cpu":
            return
        if tree := self.tree.live():
            self._barred = True
            words = f"pid {tree[0].pid} of its last attempt could not be killed for {UNKILLABLE_MS / 1000:g} s"
            for device in self.order.reserved.devices:
                self.book.quarantine(device, words, now)

    # The trial.

    def _spawn(self, lease: Lease) -> Exit | None:
        """Start the trial; its exit if it could not be started."""
        order = self.order
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self.journal = os.open(self.directory / launch.JOURNAL, flags, 0o644)
        environment = launch.trial_environment(os.environ) | self.sees | order.environment | {TREE: order.token}
        mismatch = self._mismatch(environment)
        if mismatch is not None:
            return failed_exit("device_mismatch", self.book.shown(mismatch))
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
            return failed_exit("exec_failed", self.book.shown(watchdog.failure))
        if watchdog.started is None:
            return failed_exit("lost", "the watchdog was killed before it said that the trial had started")
        pid, start_ticks = watchdog.started
        self.tree.seen.add(pid)
        self.book.append("spawned", Spawned(pid=pid, start_ticks=start_ticks))
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
            found = self.sampler.visible(environment, self.is_stopped)
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
        self._beat_at_ms = self._look_at_ms = self.clock().boottime_ms + FIRST_HEARTBEAT_MS
        while watchdog.status is None or watchdog.usage is None:
            now = self.clock()
            if self.cause is None:
                self._check(watchdog, now, deadline_ms)
            if now.boottime_ms >= self._beat_at_ms:
                self._beat(now)
                self._check_lease(lease)
            if now.boottime_ms >= self._look_at_ms:
                self._look(now)
            if watchdog.gone and not self.tree.live():
                self._turn(0)
                if watchdog.status is None:
                    return self._unknown_exit()
                continue
            if self.cause is not None and (self.signals.now or now.boottime_ms >= self._kill_at_ms):
                self._kill()
                if now.boottime_ms >= self._kill_at_ms + WATCHDOG_MS and not self.tree.live():
                    watchdog.kill()
                self._turn(TURN_MS)
                continue
            until = min(self._beat_at_ms, self._look_at_ms, deadline_ms if self.cause is None else self._kill_at_ms)
            self._turn(until - self.clock().boottime_ms)
        self._check_lease(lease)
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
        elif self._alarm is not None:
            self._stop(*self._alarm)

    def _check_lease(self, lease: Lease) -> None:
        """Stop an attempt whose lease guards nothing any more: another may have had the device since."""
        loss = lease.loss() if self.cause is None else None
        if loss is not None:
            self._stop("lease_lost", loss)

    def _sampled(self, sample: Sample) -> None:
        """Keep a sample; raise the alarm if the trial should not go on."""
        if not self.telemetry.write(sample):
            return
        (self._shared.add if sample.foreign else self._shared.discard)(sample.device)
        if sample.lost:
            self._alarm = self._alarm or ("device_lost", sample.error or "the driver has lost the device")
        elif sample.exclusivity == "contaminated" and self.order.on_contamination == "stop":
            self._alarm = self._alarm or ("contaminated", sample.words)

    def _beat(self, now: Clock) -> None:
        """Bound what a crash of the machine can take from the journal; show that the attempt is alive when due."""
        sync(self.journal)
        self.telemetry.sync()
        if now.boottime_ms >= self._heartbeat_at_ms:
            elapsed_ms = now.boottime_ms - self.leased.boottime_ms
            self._heartbeat_at_ms = now.boottime_ms + heartbeat_interval_ms(elapsed_ms)
            self.book.append("heartbeat", Heartbeat(elapsed_ms=elapsed_ms), now)
        self._beat_at_ms = min(now.boottime_ms + HEARTBEAT_MS, self._heartbeat_at_ms)

    def _look(self, now: Clock) -> None:
        """Record the tree, for whoever must end it if everybody above it is killed; a fork storm ends now."""
        self._look_at_ms = now.boottime_ms + LOOK_MS
        self._revive_sampler()
        storm = self.tree.look()
        if storm is not None and self.cause is None:
            self._stop("fork_storm", storm)
            self._kill_at_ms = now.boottime_ms

    def _revive_sampler(self) -> None:
        self.sampler.revive(self.baseline)
        self.tree.sampler = self.sampler.pid

    def _stop(self, cause: Outcome, evidence: str) -> None:
        """Write why, then ask the whole tree to end."""
        self.cause = (cause, self.book.shown(evidence))
        self.book.append("stopping", Stopping(cause=cause, evidence=self.cause[1]))
        self._ask_to_end()

    def _ask_to_end(self) -> None:
        self._kill_at_ms = self.clock().boottime_ms + (0 if self.signals.now else self.order.limits.kill_grace_ms)
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
            if now.boottime_ms >= self._beat_at_ms:
                self._beat(now)
            if not ending and (now.boottime_ms >= lingering_until_ms or self.signals.stops):
                ending = True
                pids = ", ".join(str(item.pid) for item in tree[:10])
                leaked = f"{len(tree)} descendants outlived the trial: pid {pids}"
                self.book.append("stopping", Stopping(cause="leaked_descendants", evidence=leaked))
                self._ask_to_end()
            if ending:
                killed |= {(item.pid, item.start_ticks) for item in tree}
                if self.signals.now or now.boottime_ms >= self._kill_at_ms:
                    self._kill()
            self._turn(10)
        self.book.append(
            "tree_empty", TreeEmpty(killed=len(killed), level="cgroup" if self.tree.cgroup else "subreaper")
        )
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

        A driver that gives no answer is asked again, by another sampler if need be: what is not known is charged. A
        device that is not clean for no reason that can be seen may not be used until somebody has looked at it.
        """
        until_ms = self.clock().boottime_ms + self.order.limits.release_grace_ms
        while True:
            left_s = max(1.0, (until_ms - self.clock().boottime_ms) / 1000)
            unclean: dict[str, str] = {}
            try:
                self._revive_sampler()
                unclean = self.sampler.unclean(left_s)
                words = "; ".join(unclean.values())
            except MachineError as error:
                words = error.message
            now = self.clock()
            if not words or now.boottime_ms >= until_ms:
                break
            if now.boottime_ms >= self._beat_at_ms:
                self._beat(now)
            self._turn(100)
        for device in unclean.keys() - self._shared:
            self.book.quarantine(device, f"not clean after its last attempt: {unclean[device]}", now)
        clean = DeviceClean(
            clean=not words, released=now, evidence=self.book.shown(words or "back at its idle baseline")
        )
        self.book.append("device_clean", clean, now)
        return clean

    def _turn(self, timeout_ms: int) -> None:
        """Take in what comes within that time: messages of the helpers, signals, and ends of children."""
        self.loop.turn(timeout_ms)
        for pid, status, usage in collect():
            self.tree.collected(pid)
            self.sampler.collected(pid)
            if self.watchdog is not None:
                self.watchdog.collected(pid, status, usage)

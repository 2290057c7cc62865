"""The supervisor: one process that leases, starts, watches, ends and settles one attempt, and outlives its caller.

    python -m capsule.host.supervisor ORDER.json

is how a job of an engine starts it; `capsule run` forks it.

It takes the lease, looks at the idle device, writes `intent`, and lets the trial run (`attempt_run`) and be settled
(`attempt_end`). If the ledger cannot be written while the trial runs, the trial is stopped and the attempt stays open:
an attempt whose cost cannot be written down must not go on.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from capsule.core.attempt import Intent, Refused
from capsule.core.errors import BusyError, CapsuleError, MachineError, RefusedError
from capsule.host import launch, traces
from capsule.host.attempt_end import settle
from capsule.host.attempt_ledger import AttemptLedger, say
from capsule.host.attempt_run import AttemptRun
from capsule.host.clock import ClockSource, read_clock
from capsule.host.durable import arm
from capsule.host.lease import Holder, Lease, quarantined, take
from capsule.host.preflight import Refusal, source_drifts
from capsule.host.process import become_subreaper, identify

DRIVER_SECONDS = 30.0
"""How long the driver may take to be opened, and to say how the idle device looks."""


class Supervisor:
    """One attempt from its lease to its settlement."""

    def __init__(self, order: launch.LaunchOrder, clock: ClockSource = read_clock) -> None:
        self.order = order
        self.clock = clock
        self.book = AttemptLedger(order, clock)
        self.attempt = AttemptRun(order, self.book, clock)

    def run(self) -> int:
        """Carry the order out and return the exit status that says how far it went."""
        order, attempt = self.order, self.attempt
        try:
            drift = source_drifts(order.trees)
            if drift is not None:
                raise Refusal("source_changed", drift)
            attempt.sampler.open(DRIVER_SECONDS, attempt.is_stopped)
            lease = take(
                Path(order.lease_dir),
                order.reserved.devices,
                self._holder(),
                wait_ms=order.lease_wait_ms,
                cancelled=attempt.is_stopped,
            )
        except (Refusal, CapsuleError, OSError) as error:
            attempt.sampler.kill()
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
            attempt.sampler.kill()
            attempt.tree.forget()
            lease.release()

    def _inspect(self, lease: Lease) -> None:
        """Look at the leased devices before anything is started."""
        attempt = self.attempt
        attempt.leased = self.clock()
        for device in self.order.reserved.devices:
            barred = quarantined(Path(self.order.lease_dir), device)
            if barred is not None:
                raise Refusal("quarantined", f"device {device} is quarantined: {barred.words}")
        attempt.baseline, attempt.sees = attempt.sampler.inspect(
            lease.inherited, self.order.exclusivity, DRIVER_SECONDS, attempt.is_stopped
        )
        if attempt.is_stopped():
            raise Refusal("user", "stopped")
        self.book.keep_secrets()
        lease.write(self._holder())

    def _guarded(self, lease: Lease) -> int:
        """Run the attempt; whatever goes wrong here, the trial does not outlive it."""
        try:
            if not self._announce():
                self.book.forget_secrets()
                return launch.REFUSED
            seen = self.attempt.go(lease)
            if seen.clean.clean:
                lease.clear()
            settle(self.attempt, seen)
        except (CapsuleError, OSError) as error:
            self._abandon(error.message if isinstance(error, CapsuleError) else str(error))
            return launch.LEDGER_FAILED
        except Exception as error:
            say(traceback.format_exc())
            self._abandon(repr(error))
            return launch.DEFECT
        return launch.SETTLED

    def _holder(self) -> Holder:
        order, now = self.order, self.clock()
        return Holder(
            protocol=order.protocol,
            attempt=order.attempt,
            pid=os.getpid(),
            since=now.realtime,
            boot_id=now.boot_id,
            token=order.token,
            baseline=self.attempt.baseline,
        )

    def _refuse(self, error: Refusal | CapsuleError | OSError) -> int:
        """Write that nothing was started, and why."""
        asked, stops = self.order.reserved, self.attempt.signals.stops
        reason = error.reason if isinstance(error, Refusal) else "busy" if isinstance(error, BusyError) else "machine"
        words = self.book.shown(str(error))
        if stops:
            reason, words = "user", f"{stops[0]} before anything was started"
        self.book.forget_secrets()
        refused = Refused(manifest=asked.manifest, process=asked.process, pilot=asked.pilot, reason=reason, words=words)
        say(words)
        try:
            self.book.append("refused", refused)
        except CapsuleError as failure:
            say(failure.message)
            return launch.MACHINE
        return launch.REFUSED

    def _announce(self) -> bool:
        """Write the intent to start; False if the attempt was settled by another command meanwhile."""
        intent = Intent(
            leased=self.attempt.leased,
            supervisor_pid=os.getpid(),
            argv=tuple(map(self.book.shown, launch.shown_argv(self.order))),
            snapshot=self.order.snapshot,
            device_baseline=self.attempt.baseline,
        )
        try:
            self.book.append("intent", intent)
        except RefusedError as error:
            say(error.message)
            return False
        return True

    def _abandon(self, words: str) -> None:
        """End the trial without writing to the ledger, and leave a note of when that was for `reconcile`."""
        say(f"the attempt is abandoned: {words}")
        self.attempt.give_up()
        self.book.leave_failure(words)


def supervise(order: launch.LaunchOrder) -> int:
    """Make this process the supervisor of an attempt, carry the order out and return the exit status."""
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


def main(arguments: Sequence[str]) -> int:
    """Carry out the order in the file named on the command line."""
    path = Path(arguments[0])
    return supervise(launch.LaunchOrder.from_bytes(path.read_bytes(), str(path)))


if __name__ == "__main__":
    ended = main(sys.argv[1:])
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os._exit(ended)  # the interpreter's own end gives another status where its log is on a full disk

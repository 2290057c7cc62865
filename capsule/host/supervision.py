"""Starting the supervisor of an attempt, and the handle on its process.

The supervisor is a process of its own in a session of its own, forked from the command that starts it: an interpreter
started anew would import for longer than all else that an attempt costs beyond its trial.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from capsule.core.errors import MachineError
from capsule.host import launch, supervisor
from capsule.host.durable import write_durably
from capsule.host.forks import fork_helper, name_process
from capsule.host.loop import STOP_NOW, STOP_SIGNALS

POLL_SECONDS_MAX = 0.01
COLLECTED_ELSEWHERE = -1
"""Stands for the exit status of a supervisor that something else in this process collected; the ledger says more."""


class Supervision:
    """The handle on a running supervisor; losing it loses nothing."""

    def __init__(self, attempt: str, pid: int, notes: Sequence[str]) -> None:
        self.attempt = attempt
        self.pid = pid
        self.notes = tuple(notes)
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return the supervisor's exit status (`SETTLED`, `REFUSED`, …), or None while it runs."""
        if self._status is None:
            try:
                found, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                self._status = COLLECTED_ELSEWHERE
            else:
                self._status = os.waitstatus_to_exitcode(status) if found else None
        return self._status

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the supervisor's end and return its exit status; None after `timeout` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        pause = 0.0005
        while self.poll() is None and (until is None or time.monotonic() < until):
            time.sleep(pause)
            pause = min(2 * pause, POLL_SECONDS_MAX)
        return self._status

    def stop(self, number: signal.Signals = signal.SIGTERM, *, now: bool = False) -> None:
        """Ask the supervisor to end the trial, for the reason that this signal is: after the kill grace, or at once."""
        if self.poll() is None:
            os.kill(self.pid, STOP_NOW if now else number)


def start(order: launch.LaunchOrder) -> Supervision:
    """Start a supervisor for an order.

    It holds signals to stop back until it can heed them.

    Raises:
        MachineError: the order cannot be written or the supervisor cannot be started.
    """
    attempt_dir = Path(order.attempt_dir)
    unpassed = sorted(name for name in os.environ.keys() - launch.FIXED.keys() if not launch.passes(name))
    notes = [f"{name} is set here and not passed to the trial" for name in unpassed if _is_meant(name)]
    try:
        attempt_dir.mkdir(parents=True, exist_ok=True)
        write_durably(attempt_dir / launch.ORDER, order.to_bytes())
        pid = fork_helper(
            lambda: _supervise(order),
            keep=(),
            dies_with_parent=False,
            log=attempt_dir / launch.LOG,
            held=(*STOP_SIGNALS, STOP_NOW),
        )
    except OSError as error:
        raise MachineError(f"{attempt_dir}: an attempt cannot be started: {error.strerror}") from error
    return Supervision(order.attempt, pid, notes)


def _is_meant(variable: str) -> bool:
    """Whether somebody who set the variable may expect it in a trial."""
    return bool(os.environ[variable]) and variable not in launch.REMOVED


def _supervise(order: launch.LaunchOrder) -> int:
    name_process(f"capsule supervisor of {order.attempt}")
    os.setsid()
    os.chdir("/")
    return supervisor.supervise(order)

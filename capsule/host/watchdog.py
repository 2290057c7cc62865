"""The watchdog: the trial's parent, forked from the supervisor and quiet while that one lives.

It starts the trial, keeps its output and collects its end. Whatever the trial leaves behind becomes its child (it is a
subreaper). If the supervisor is gone, or is stopped beyond the deadline, it ends the whole tree itself and leaves a
note of when the tree was empty. It holds the lease as long as it lives.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capsule.host.cgroup import Cgroup
from capsule.host.child import Child, Usage, collect
from capsule.host.clock import ClockSource
from capsule.host.forks import fork_helper, name_process
from capsule.host.loop import Loop, Signals, received
from capsule.host.output import CappedOutput
from capsule.host.process import become_subreaper, descendants, end_tree, read_stat, send
from capsule.host.traces import NOTE, Note, leave

LINGER_MS = 1_000
"""How long helpers of a finished trial may take to notice that it is gone before they count as leaked."""
BACKSTOP_MS = 2_000
"""How much later than the supervisor should have ended a trial the watchdog does it in its place."""
TURN_MS = 50
MESSAGE_BYTES = 1 << 16


@dataclass(frozen=True)
class Trial:
    """What a watchdog needs to know: the program, where its output goes, and its limits on the boot-time clock."""

    argv: Sequence[str]
    directory: Path
    environment: Mapping[str, str]
    inherited: Collection[int]
    attempt_dir: Path
    output_bytes_max: int
    deadline_ms: int
    kill_grace_ms: int
    cgroup: Cgroup | None


class Watchdog:
    """The supervisor's handle on its watchdog.

    `started` is pid and start time of the trial's leader, `failure` why it could not be started; `status` and `usage`
    are None until the leader was collected, by the watchdog or, if that was killed, by the supervisor. `overruled` says
    why the watchdog ended the trial on its own account.
    """

    def __init__(self, trial: Trial, loop: Loop, clock: ClockSource) -> None:
        self.started: tuple[int, int] | None = None
        self.failure: str | None = None
        self.status: int | None = None
        self.usage: Usage | None = None
        self.overruled: str | None = None
        self.output_failures: list[str] = []
        self.closed = False
        self.gone = False
        self._loop = loop
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        keep = [theirs.fileno(), *trial.inherited]
        self.pid = fork_helper(lambda: _Keeper(trial, theirs, clock).run(), keep=keep, dies_with_parent=False)
        theirs.close()
        self._channel.setblocking(False)
        loop.watch(self._channel.fileno(), self._take)

    def collected(self, pid: int, status: int, usage: Usage) -> None:
        """Take in that a child of the supervisor ended: the watchdog, or a leader whose watchdog was killed."""
        if pid == self.pid:
            self._take()
            self.gone = True
        elif self.started is not None and pid == self.started[0] and self.status is None:
            self.status, self.usage = status, usage

    def finish(self) -> None:
        """Let the watchdog close the trial's output and end."""
        try:
            self._channel.send(b'{"finish":true}')
        except OSError:
            self.closed = True

    def kill(self) -> None:
        """Kill the watchdog; what it leaves becomes the supervisor's."""
        if not self.gone:
            os.kill(self.pid, signal.SIGKILL)

    def _take(self) -> None:
        for data in received(self._channel, MESSAGE_BYTES) if not self.closed else ():
            if not data:
                self.closed = True
                self._loop.forget(self._channel.fileno())
                return
            self._heed(json.loads(data))

    def _heed(self, message: Mapping[str, Any]) -> None:
        match message:
            case {"started": [pid, start_ticks]}:
                self.started = pid, start_ticks
            case {"failed": words}:
                self.failure = words
            case {"status": status, "usage": usage}:
                self.status, self.usage = status, Usage(*usage)
            case {"overruled": words}:
                self.overruled = words
            case {"output_failures": words}:
                self.output_failures = words


class _Keeper:
    """What the forked process does."""

    def __init__(self, trial: Trial, channel: socket.socket, clock: ClockSource) -> None:
        self.trial = trial
        self.channel = channel
        self.clock = clock
        self.loop = Loop()
        self.signals = Signals(self.loop)
        self.alone = False
        self.finishing = False
        self.leader: int | None = None
        self.status: int | None = None
        self.exited_ms = 0
        self.why: str | None = None
        self.kill_at_ms = 0

    def run(self) -> None:
        name_process(f"capsule watchdog of {self.trial.attempt_dir.name}")
        become_subreaper()
        self.channel.setblocking(False)
        self.loop.watch(self.channel.fileno(), self._listen)
        trial = self.trial
        try:
            names = ("stdout", "stderr")
            stdout, stderr = (CappedOutput(trial.attempt_dir / name, trial.output_bytes_max) for name in names)
            child = Child(
                trial.argv,
                directory=trial.directory,
                environment=trial.environment,
                inherited=list(trial.inherited),
                outputs=(stdout, stderr),
                loop=self.loop,
                join=trial.cgroup.join if trial.cgroup else None,
            )
        except OSError as error:
            self._tell({"failed": f"{error.filename or trial.argv[0]}: {error.strerror}"})
            return
        except ValueError as error:
            self._tell({"failed": f"{trial.argv[0]!r} and its arguments cannot be passed on: {error}"})
            return
        self.leader = child.pid
        found = read_stat(child.pid)
        self._tell({"started": [child.pid, found.start_ticks if found else 0]})
        self._keep()
        child.drain(1.0)
        failures = []
        for output in (stdout, stderr):
            output.close()
            failures += [output.failure] if output.failure else []
        if self.alone:
            self._leave_note()
        self._tell({"output_failures": failures})

    def _keep(self) -> None:
        """Until the supervisor is done, or is gone and the tree is empty."""
        trial = self.trial
        backstop_ms = trial.deadline_ms + trial.kill_grace_ms + BACKSTOP_MS
        while not self.finishing:
            self._collect()
            now_ms = self.clock().boottime_ms
            if self.alone:
                self._look_after(now_ms)
                if self.status is not None and not descendants(os.getpid()):
                    return
            elif now_ms >= backstop_ms and self.why is None:
                self._end("the supervisor did not end it at its wall limit", now_ms)
                self._tell({"overruled": self.why})
            if self.why is not None and now_ms >= self.kill_at_ms:
                self._kill()
            polled = self.alone or self.why is not None
            self.loop.turn(TURN_MS if polled else backstop_ms - now_ms)

    def _look_after(self, now_ms: int) -> None:
        """Decide, in the place of a supervisor that is gone, whether the tree must end now."""
        if self.why is not None:
            return
        if self.signals.stops:
            self._end(f"{self.signals.stops[0]} was received", now_ms)
        elif now_ms >= self.trial.deadline_ms:
            self._end("its wall limit was reached", now_ms)
        elif self.status is not None and now_ms >= self.exited_ms + LINGER_MS:
            self._end("descendants outlived the trial", now_ms)

    def _end(self, why: str, now_ms: int) -> None:
        self.why = why
        self.kill_at_ms = now_ms + (0 if self.signals.now else self.trial.kill_grace_ms)
        for item in descendants(os.getpid()):
            send(item, signal.SIGTERM)

    def _kill(self) -> None:
        if self.trial.cgroup is not None:
            self.trial.cgroup.kill()
        end_tree(lambda: descendants(os.getpid()), seconds=1.0)

    def _collect(self) -> None:
        for pid, status, usage in collect():
            if pid == self.leader:
                self.status, self.exited_ms = status, self.clock().boottime_ms
                self._tell({"status": status, "usage": usage})

    def _listen(self) -> None:
        try:
            data = self.channel.recv(MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self.finishing = True
        else:
            self.alone = True
            self.loop.forget(self.channel.fileno())

    def _tell(self, message: Mapping[str, Any]) -> None:
        if not self.alone:
            try:
                self.channel.send(json.dumps(message).encode())
            except OSError:
                self.alone = True

    def _leave_note(self) -> None:
        words = self.why or "the trial ended by itself"
        note = Note(words=f"its watchdog saw that {words}", wait_status=self.status, emptied=self.clock())
        leave(self.trial.attempt_dir, NOTE, note)

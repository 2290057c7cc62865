"""The trial's process as its supervisor sees it: output, exits and signals arrive in one place, one at a time."""

from __future__ import annotations

import os
import resource
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from capsule.host.output import CappedOutput

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOP_NOW = signal.SIGQUIT
CHUNK = 1 << 16


class Signals:
    """The signals that this process received: requests to stop, and the wake-ups of exiting children.

    From here on none is blocked, neither here nor in what this process starts; those held back so far are received.
    """

    def __init__(self) -> None:
        self.stops: list[str] = []
        self.now = False
        self.reader, self._writer = socket.socketpair()
        self.reader.setblocking(False)
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in (*STOP_SIGNALS, STOP_NOW, signal.SIGCHLD):
            signal.signal(number, self._received)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    def _received(self, number: int, frame: FrameType | None) -> None:
        if number in STOP_SIGNALS:
            self.stops.append(signal.Signals(number).name)
        if number == STOP_NOW:
            self.stops.append(signal.Signals(number).name)
            self.now = True
        if len(self.stops) > 1:
            self.now = True


class Child:
    """A started trial: `status` and `usage` are None until its leader was collected."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        directory: Path,
        environment: Mapping[str, str],
        inherited: Sequence[int],
        outputs: tuple[CappedOutput, CappedOutput],
        signals: Signals,
    ) -> None:
        """Start the trial in a session of its own.

        Raises:
            OSError: there is no such program or folder, or it cannot be executed.
            ValueError: an argument holds a byte that none can hold.
        """
        self.status: int | None = None
        self.usage: resource.struct_rusage | None = None
        self._signals = signals
        self._popen = subprocess.Popen(
            list(argv),
            cwd=directory,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=list(inherited),
            start_new_session=True,
            bufsize=0,
        )
        self.pid = self._popen.pid
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals.reader, selectors.EVENT_READ, None)
        for pipe, output in zip((self._popen.stdout, self._popen.stderr), outputs, strict=True):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, output)

    def turn(self, timeout_ms: int) -> None:
        """Wait up to `timeout_ms` for output, an exit or a signal, and take in what came."""
        for key, _ in self._selector.select(max(0, timeout_ms) / 1000):
            if key.data is None:
                self._signals.reader.recv(4096)
            else:
                self._read(key)
        self._collect()

    def drain(self, seconds: float) -> bool:
        """Take in the output that is left; False if somebody outside the tree still holds a pipe open."""
        until = time.monotonic() + seconds
        while len(self._selector.get_map()) > 1:
            if time.monotonic() > until:
                return False
            self.turn(50)
        return True

    def _read(self, key: selectors.SelectorKey) -> None:
        pipe, output = key.fileobj, key.data
        try:
            data = os.read(key.fd, CHUNK)
        except BlockingIOError:
            return
        if data:
            output.write(data)
        else:
            self._selector.unregister(pipe)
            pipe.close()  # type: ignore[union-attr]

    def _collect(self) -> None:
        """Collect every exited child: the leader, and orphans that the kernel made ours."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.pid:
                self.status, self.usage = status, usage
                self._popen.returncode = status

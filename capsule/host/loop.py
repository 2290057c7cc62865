"""One process's loop: descriptors with what takes them in, the signals that it received, and forking helpers off it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Collection
from types import FrameType
from typing import NoReturn

from capsule.host import durable

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOP_NOW = signal.SIGQUIT
PR_SET_PDEATHSIG = 1


class Loop:
    """Waits for what is watched and hands each readable descriptor to whatever takes it in, one at a time."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def watch(self, descriptor: int, take: Callable[[], None]) -> None:
        """Call `take` whenever the descriptor is readable."""
        self._selector.register(descriptor, selectors.EVENT_READ, take)

    def forget(self, descriptor: int) -> None:
        """Stop watching a descriptor; it is the caller's to close."""
        self._selector.unregister(descriptor)

    def turn(self, timeout_ms: int) -> None:
        """Wait up to `timeout_ms` for something readable, and take in what came."""
        for key, _ in self._selector.select(max(0, timeout_ms) / 1000):
            key.data()


class Signals:
    """The signals that this process received: requests to stop, and the wake-ups of exiting children.

    From here on none is blocked, neither here nor in what this process starts; those held back so far are received.
    """

    def __init__(self, loop: Loop) -> None:
        self.stops: list[str] = []
        self.now = False
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        loop.watch(self._reader.fileno(), lambda: void(self._reader.recv(4096)))
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


def void(value: object) -> None:
    """Take a value and do nothing with it."""


def fork_helper(main: Callable[[], None], *, keep: Collection[int], dies_with_parent: bool) -> int:
    """Fork a helper of this process that runs `main` and ends; returns its pid.

    The helper keeps the standard streams and the descriptors in `keep`, no others, so that it holds no lease, pipe or
    lock by accident. It reacts to signals as a new process does, until it says otherwise.
    """
    pid = os.fork()
    if pid == 0:
        _helper(main, keep, dies_with_parent)
    return pid


def _helper(main: Callable[[], None], keep: Collection[int], dies_with_parent: bool) -> NoReturn:
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (*STOP_SIGNALS, STOP_NOW, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        if dies_with_parent:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        durable.disarm()
        close_all_but({0, 1, 2, *keep})
        main()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def close_all_but(keep: Collection[int]) -> None:
    """Close every descriptor of this process that is not in `keep`."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - pathlib would hold a descriptor of its own
        if int(name) not in keep:
            with contextlib.suppress(OSError):
                os.close(int(name))

"""One process's loop: descriptors with what takes them in, and the signals that it received."""

from __future__ import annotations

import selectors
import signal
import socket
from collections.abc import Callable, Iterator
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOP_NOW = signal.SIGQUIT


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


def received(channel: socket.socket, bytes_max: int) -> Iterator[bytes]:
    """Yield the messages that wait in a channel; at last an empty one if its other end is gone."""
    data = b"?"
    while data:
        try:
            data = channel.recv(bytes_max)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        yield data

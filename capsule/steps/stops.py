"""Requests to stop while attempts run: taken in without an exception at an arbitrary place, and passed on at once.

SIGINT, SIGTERM and SIGHUP reach every attempt as themselves, so that the ledger names the signal that was sent; a
second one kills. When all attempts have ended, the first request takes its usual course. A signal that whoever started
the command had ignored (`nohup`) stays ignored.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stops:
    """The requests so far; each is handed to `passed_on` inside the signal's handler, with whether to kill now."""

    def __init__(self, passed_on: Callable[[signal.Signals, bool], None]) -> None:
        self.asked: list[signal.Signals] = []
        self._passed_on = passed_on
        self._breakable = False

    @contextmanager
    def taken_in(self) -> Iterator[None]:
        """Take requests in; on leaving, the first of them is raised as if it had come just now."""
        before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            heeded = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
            before = {number: signal.signal(number, self._take) for number in heeded}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            if self.asked:
                signal.raise_signal(self.asked[0])

    @contextmanager
    def breakable(self) -> Iterator[None]:
        """Let a request break off, once, what is done inside, which must be something that can be done again."""
        self._breakable = True
        try:
            if self.asked:
                raise KeyboardInterrupt
            yield
        finally:
            self._breakable = False

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.asked.append(signal.Signals(number))
        self._passed_on(self.asked[-1], len(self.asked) > 1)
        if self._breakable:
            self._breakable = False
            raise KeyboardInterrupt

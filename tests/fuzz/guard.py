"""Holds a reader to what it may do: end within two seconds, write nowhere, start nothing, open no connection."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

SECONDS_MAX = 2.0
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_EFFECTS = (
    "os.", "shutil.", "subprocess.", "socket.", "tempfile.", "ftplib.", "urllib.", "ctypes.", "pty.", "winreg.",
)  # fmt: skip
_HARMLESS = {"os.listdir", "os.scandir", "os.fwalk", "os.walk", "os.getxattr", "os.listxattr"}


class ForbiddenEffectError(BaseException):
    """A reader did what no reader may do; no handler of the product catches it."""


class HangError(BaseException):
    """A reader took longer than `SECONDS_MAX`."""


class _Hook:
    """One audit hook for the life of the process, which acts only while it is armed."""

    def __init__(self) -> None:
        self.armed = False
        self.folder: str | None = None
        sys.addaudithook(self)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.armed:
            return
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & _WRITES and not self._inside(path):
                self._refuse(event, arguments)
        elif event.startswith(_EFFECTS) and event not in _HARMLESS and not self._inside(arguments[0]):
            self._refuse(event, arguments)

    def _inside(self, path: Any) -> bool:
        """Whether a path may be written: a name without folders relative to an open folder, or one below `folder`."""
        if self.folder is None or isinstance(path, int):
            return False
        written = os.fsdecode(path)
        if written in ("", ".", "..") or "\0" in written:
            return False
        return "/" not in written or os.path.normpath(written).startswith(self.folder)

    def _refuse(self, event: str, arguments: tuple[Any, ...]) -> NoReturn:
        self.armed = False
        raise ForbiddenEffectError(f"{event}{arguments!r}"[:200])


_hook: _Hook | None = None


@contextmanager
def only_reading(*, folder: str | None = None) -> Iterator[None]:
    """Refuse every effect within but below `folder`."""
    global _hook
    if _hook is None:
        _hook = _Hook()
    _hook.armed, _hook.folder = True, folder
    try:
        yield
    finally:
        _hook.armed = False


@contextmanager
def within_time() -> Iterator[None]:
    """Refuse what takes too long, by a timer of the CPU, so that a busy machine makes no difference."""

    def hang(_number: int, _frame: FrameType | None) -> NoReturn:
        raise HangError(f"more than {SECONDS_MAX} seconds")

    before = signal.signal(signal.SIGVTALRM, hang)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS_MAX)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)

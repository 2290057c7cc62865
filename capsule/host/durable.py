"""Writing that survives a crash: syncs, files put in place whole, and the points at which tests crash on purpose."""

from __future__ import annotations

import os
import signal
from pathlib import Path

_crash: dict[str, int] = {}


def crash_at(boundaries: int) -> None:
    """Let this process kill itself at the boundary of that number, counted from one: for tests of crash safety."""
    _crash["left"] = boundaries


def boundary() -> None:
    """Mark a point at which a crash leaves the ledger in a state of its own."""
    if _crash:
        _crash["left"] -= 1
        if _crash["left"] == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def sync(descriptor: int) -> None:
    """Make what was written to a descriptor durable."""
    os.fsync(descriptor)


def sync_directory(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, data: bytes) -> None:
    """Put a file in its place whole or not at all, durably."""
    temporary = path.with_name(path.name + ".tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
        sync(descriptor)
    finally:
        os.close(descriptor)
    temporary.replace(path)
    sync_directory(path.parent)

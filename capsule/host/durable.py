"""Writing that survives a crash, and reading what a trial may have tampered with; points at which tests crash."""

from __future__ import annotations

import errno
import os
import secrets
import signal
import stat
from pathlib import Path

_crash: dict[str, int] = {}


def crash_at(boundaries: int) -> None:
    """Let this process kill itself at the boundary of that number, counted from one: for tests of crash safety."""
    _crash["left"] = boundaries


def crash_never() -> None:
    """Forget `crash_at` in a process that was forked from one which heeds it."""
    _crash.clear()


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
    """Put a file in its place whole or not at all, durably; of several at once, one wins."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(descriptor, left) :]
            sync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EACCES)


def read_regular(path: Path, limit: int | None = None, *, durable: bool = False) -> bytes | None:
    """Read a regular file, its first `limit` bytes at most; None for everything else, without following or waiting.

    A trial can put a named pipe, a folder or a link where a file of its attempt is expected, or take away the right to
    read it: none of these may hold up or mislead whoever settles the attempt, so they count as absent.
    What is read is synced first if it is to be `durable`.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _NOT_THERE:
            return None
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        if durable:
            sync(descriptor)
        with open(descriptor, "rb", closefd=False) as file:
            return file.read() if limit is None else file.read(limit)
    finally:
        os.close(descriptor)


def read_tail(path: Path, limit: int) -> bytes:
    """Return the last `limit` bytes at most of a regular file; nothing of everything else."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        found = os.fstat(descriptor)
        return os.pread(descriptor, limit, max(0, found.st_size - limit)) if stat.S_ISREG(found.st_mode) else b""
    finally:
        os.close(descriptor)

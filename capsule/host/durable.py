"""Writing that survives a crash, and reading what a trial may have tampered with; points at which tests crash."""

from __future__ import annotations

import errno
import os
import secrets
import signal
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

CRASH_AT = "CAPSULE_CRASH_AT"
"""Environment variable of a process that arms itself: `7` kills it at its seventh boundary."""
FAIL_AT = "CAPSULE_FAIL_AT"
"""Likewise: `7:ENOSPC` lets its seventh operation on a disk fail, `7+:ENOSPC` every one from there on."""

_crash: dict[str, int] = {}
_fail: dict[str, int] = {}


def arm(environment: Mapping[str, str]) -> None:
    """Let this process crash or fail as its environment says, for tests: see `CRASH_AT` and `FAIL_AT`."""
    if at := environment.get(CRASH_AT):
        crash_at(int(at))
    if at := environment.get(FAIL_AT):
        number, _, name = at.partition(":")
        fail_at(int(number.removesuffix("+")), getattr(errno, name), lasting=number.endswith("+"))


def crash_at(boundaries: int) -> None:
    """Let this process kill itself at the boundary of that number, counted from one: for tests of crash safety."""
    _crash["left"] = boundaries


def fail_at(operations: int, error: int, *, lasting: bool = False) -> None:
    """Let the operation of that number, counted from one, fail with that error; if `lasting`, all later ones too."""
    _fail.update(left=operations, error=error, lasting=lasting)


def disarm() -> None:
    """Forget `crash_at` and `fail_at`, also in a process that was forked from one which heeds them."""
    _crash.clear()
    _fail.clear()


def boundary() -> None:
    """Mark a point at which a crash leaves the disk in a state of its own."""
    if _crash:
        _crash["left"] -= 1
        if _crash["left"] == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def _operate(place: str | int) -> None:
    """Come before every operation that makes or keeps a file: the place at which a test lets it fail."""
    if _fail:
        _fail["left"] -= 1
        if _fail["left"] == 0 or (_fail["left"] < 0 and _fail["lasting"]):
            raise OSError(_fail["error"], os.strerror(_fail["error"]), place if isinstance(place, str) else None)


@contextmanager
def _named(descriptor: int) -> Iterator[None]:
    """Let an error name the file that a descriptor is of, as those of opening do."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            with suppress(OSError):
                error.filename = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        raise


def create(path: Path, flags: int, mode: int = 0o644) -> int:
    """Open a file that may be made thereby; returns its descriptor, which no program that is executed inherits."""
    _operate(str(path))
    return os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, mode)


def write(descriptor: int, data: bytes) -> None:
    """Write all of the data, or raise."""
    left = memoryview(data)
    with _named(descriptor):
        while left:
            _operate(descriptor)
            left = left[os.write(descriptor, left) :]


def pwrite(descriptor: int, data: bytes, offset: int) -> None:
    """Write all of the data in one call at a place, or raise."""
    boundary()
    with _named(descriptor):
        _operate(descriptor)
        written = os.pwrite(descriptor, data, offset)
        if written != len(data):
            raise OSError(errno.ENOSPC, f"{written} of {len(data)} bytes were written")


def sync(descriptor: int) -> None:
    """Make what was written to a descriptor durable."""
    boundary()
    with _named(descriptor):
        _operate(descriptor)
        os.fsync(descriptor)


def sync_directory(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def _linked(temporary: Path, path: Path) -> bool:
    """Give a file its name, never another's; False where the file system has no links and nothing has the name yet."""
    try:
        path.hardlink_to(temporary)
    except FileExistsError:
        raise
    except OSError as error:
        if os.path.lexists(path) or error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        return False
    temporary.unlink()
    return True


def write_durably(path: Path, data: bytes, *, mode: int = 0o644, over: bool = True) -> None:
    """Put a file in its place whole or not at all, durably; of several at once, one wins.

    Raises:
        FileExistsError: something is there, and nothing may be written `over` it.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    descriptor = create(temporary, os.O_WRONLY | os.O_EXCL, mode)
    try:
        try:
            write(descriptor, data)
            sync(descriptor)
        finally:
            os.close(descriptor)
        _operate(str(path))
        if over or not _linked(temporary, path):
            temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write_output(path: Path, data: bytes) -> None:
    """Write a file that a person named: whole or not at all, but into a device or pipe that is there."""
    place = path.resolve()
    if place.exists() and not place.is_file():
        place.write_bytes(data)
    else:
        write_durably(place, data)


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

"""What a person is told where a disk takes no more: which file, on which file system, what is left, and what to do."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from capsule.core.errors import MachineError

FULL = (errno.ENOSPC, errno.EDQUOT)
LITTLE_BYTES = 1 << 20
"""Less than this is as good as nothing: an attempt's own files need more."""

THEN = "then run the command again: it settles what is open and goes on"
_HINTS = {
    errno.EFBIG: f"a file size limit is in force (`ulimit -f`); raise it, {THEN}",
    errno.EROFS: "the file system is mounted read-only; attempts need one that can be written",
    errno.EACCES: "the folder must be writable by whoever runs attempts",
    errno.EPERM: "the folder must be writable by whoever runs attempts",
}
_OTHER = f"check the disk (its kernel log says more), {THEN}"


def cannot_write(path: Path, error: OSError) -> MachineError:
    """Return the error for a file that cannot be written; a file that the error names itself is named."""
    named = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else path
    hint = hint_where_full(named) if error.errno in FULL else _HINTS.get(error.errno or 0, _OTHER)
    return MachineError(f"{named}: cannot be written: {error.strerror or error}", hint=hint)


def says_full(words: str) -> bool:
    """Whether words of another process, such as its log, say that a disk was full."""
    return any(os.strerror(number) in words for number in FULL)


def is_full(path: Path) -> bool:
    """Whether the file system of a path has as good as no room for more bytes or files."""
    found = os.statvfs(_existing(path))
    return found.f_bavail * found.f_frsize < LITTLE_BYTES or (found.f_files > 0 and found.f_favail == 0)


def hint_where_full(path: Path) -> str:
    """Say what to do about a full disk, naming the file system of a path and what it has left."""
    place = _existing(path)
    found = os.statvfs(place)
    left = f"{found.f_bavail * found.f_frsize / 1e6:.1f} MB"
    if found.f_files > 0 and not found.f_favail:
        left = "no more files"
    return f"free space on the file system at {_mount_point(place)} ({left} left, a quota may allow less), {THEN}"


def _existing(path: Path) -> Path:
    place = path.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    return place


def _mount_point(place: Path) -> Path:
    device = place.stat().st_dev
    while place != place.parent and place.parent.stat().st_dev == device:
        place = place.parent
    return place

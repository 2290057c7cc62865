"""Show: list a capsule's members or give one of them, without unpacking anything."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from capsule.archive.access import list_members, open_member
from capsule.archive.reader import End, Event, MemberEnd, walk
from capsule.core.errors import BrokenError, UsageError
from capsule.steps.verify import open_capsule, recognised


@dataclass(frozen=True)
class Listing:
    """A sound capsule's members: the size in bytes of the largest, and name, size and digest of each as they are read.

    They can be gone through once; however many there are, they take no memory.
    """

    size_max: int
    members: Iterator[tuple[str, int, str]]


def open_regular(path: Path) -> BinaryIO:
    """Open a capsule file that is read more than once.

    Raises:
        UsageError: there is no such file, or it is a pipe or a device.
        MachineError: it cannot be read.
    """
    with suppress(OSError):
        kind = path.stat().st_mode
        if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):
            raise UsageError(
                f"expected a regular file at {path}, as it is read more than once, found a pipe or a device",
                hint="write the capsule to a file first; `capsule verify` reads a pipe",
            )
    return open_capsule(path)


def sound(path: Path) -> Iterator[Event]:
    """Yield what a capsule holds, as `capsule.archive.reader.walk` does; raises at the end of one that is damaged.

    Raises:
        UsageError: there is no such file, or it is a pipe: who asks for this reads the file twice.
        BrokenError: the container is damaged; `verify` says where.
        MalformedError: the file is no capsule.
    """
    with open_regular(path) as stream:
        for event in walk(recognised(stream)):
            if isinstance(event, End) and event.sealed is None:
                raise BrokenError(
                    f"{path}: expected a sound container, found damage", hint=f"see where: capsule verify {path}"
                )
            yield event


def members(path: Path) -> Listing:
    """List the members in order, once all of the file was read and found sound.

    Raises:
        BrokenError: the container is damaged; `verify` says where.
        MalformedError: the file is no capsule.
    """
    size_max = max((event.size for event in sound(path) if isinstance(event, MemberEnd)), default=0)
    return Listing(size_max, list_members(path))


def member(path: Path, name: str) -> bytes:
    """Return the bytes of one member, checked against the digest in the member table.

    Raises:
        UsageError: there is no such file, or it is a pipe, which cannot be read twice.
        MalformedError: the file is no capsule.
        IncompleteError: it has no such member.
    """
    with open_regular(path) as stream:
        recognised(stream)
    return open_member(path, name)

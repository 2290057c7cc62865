"""Show: list a capsule's members or give one of them, without unpacking anything."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from capsule.archive.access import list_members, open_member
from capsule.archive.reader import End, Event, MemberEnd, walk
from capsule.core.errors import BrokenError
from capsule.steps.verify import open_capsule, recognised


@dataclass(frozen=True)
class Listing:
    """A sound capsule's members: the size in bytes of the largest, and name, size and digest of each as they are read.

    They can be gone through once; however many there are, they take no memory.
    """

    size_max: int
    members: Iterator[tuple[str, int, str]]


def sound(path: Path) -> Iterator[Event]:
    """Yield what a capsule holds, as `capsule.archive.reader.walk` does; raises at the end of one that is damaged.

    Raises:
        BrokenError: the container is damaged; `verify` says where.
        MalformedError: the file is no capsule.
    """
    with open_capsule(path) as stream:
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
    """Return the bytes of one member, checked against the digest in the member table."""
    with open_capsule(path) as stream:
        recognised(stream)
    return open_member(path, name)

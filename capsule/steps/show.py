"""Show: list a capsule's members or give one of them, without unpacking anything."""

from __future__ import annotations

from pathlib import Path

from capsule.archive.access import open_member
from capsule.archive.reader import End, MemberEnd, walk
from capsule.core.errors import BrokenError
from capsule.steps.verify import open_capsule, recognised


def members(path: Path) -> list[tuple[str, int, str]]:
    """Return name, size in bytes and digest of every member, in order.

    Raises:
        BrokenError: the container is damaged; `verify` says where.
        MalformedError: the file is no capsule.
    """
    listed: list[tuple[str, int, str]] = []
    with open_capsule(path) as stream:
        for event in walk(recognised(stream)):
            if isinstance(event, MemberEnd):
                listed.append((event.name, event.size, event.digest))
            elif isinstance(event, End) and event.sealed is None:
                raise BrokenError(
                    f"{path}: expected a sound container, found damage", hint=f"see where: capsule verify {path}"
                )
    return listed


def member(path: Path, name: str) -> bytes:
    """Return the bytes of one member, checked against the digest in the member table."""
    with open_capsule(path) as stream:
        recognised(stream)
    return open_member(path, name)

"""Digests in the one form in which they are written: `sha256:` and 64 lower-case hexadecimal digits."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator
from typing import Annotated

from pydantic import StringConstraints

PREFIX = "sha256:"
HEX_PATTERN = r"[0-9a-f]{64}"

Digest = Annotated[str, StringConstraints(pattern=rf"^sha256:{HEX_PATTERN}$")]
"""A digest as every manifest, ledger line and message carries it."""

_FORM = re.compile(rf"sha256:{HEX_PATTERN}")


def digest_of(data: bytes) -> str:
    """Return the digest of `data` in written form."""
    return PREFIX + hashlib.sha256(data).hexdigest()


def is_digest(text: str) -> bool:
    """Whether `text` is a digest in written form (upper case, short and unknown algorithms are not)."""
    return _FORM.fullmatch(text) is not None


def hex_of(digest: str) -> str:
    """Return the hexadecimal part of a digest; a malformed one is a bug of the caller."""
    assert is_digest(digest), digest
    return digest[len(PREFIX) :]


ROOM_MAX = 8
"""Members that a room has on the average, at most."""


class PackedSet:
    """A set of byte strings of one size that takes little more than their bytes, for millions of them.

    Each lies in one of many rooms, by Python's own hash, which nobody outside the process can aim at. Rooms are
    doubled as the set grows, and looked through member by member, so no choice of bytes makes it slow.
    """

    def __init__(self, size: int) -> None:
        self._members = struct.Struct(f"{size}s").iter_unpack
        self._size = size
        self._count = 0
        self._rooms = [b""]

    def add(self, raw: bytes) -> None:
        """Add what may be there already."""
        assert len(raw) == self._size, raw
        number = hash(raw) % len(self._rooms)
        room = self._rooms[number]
        if (raw,) in self._members(room):
            return
        self._rooms[number] = room + raw
        self._count += 1
        if self._count > ROOM_MAX * len(self._rooms):
            self._double()

    def discard(self, raw: bytes) -> None:
        """Remove what may be there."""
        if raw in self:
            number = hash(raw) % len(self._rooms)
            self._rooms[number] = b"".join(other for (other,) in self._members(self._rooms[number]) if other != raw)
            self._count -= 1

    def _double(self) -> None:
        """Let every room hand what belongs there to a new one, as many rooms further on."""
        before = len(self._rooms)
        for number in range(before):
            kept: list[bytes] = []
            moved: list[bytes] = []
            for (raw,) in self._members(self._rooms[number]):
                (moved if hash(raw) & before else kept).append(raw)
            self._rooms[number] = b"".join(kept)
            self._rooms.append(b"".join(moved))

    def __contains__(self, raw: bytes) -> bool:
        return (raw,) in self._members(self._rooms[hash(raw) % len(self._rooms)])

    def __iter__(self) -> Iterator[bytes]:
        for room in self._rooms:
            for (raw,) in self._members(room):
                yield raw

    def __len__(self) -> int:
        return self._count


class Digests:
    """A set of digests in written form, of 32 bytes each; goes through them in no order."""

    def __init__(self) -> None:
        self._raw = PackedSet(hashlib.sha256().digest_size)

    def add(self, digest: str) -> None:
        """Add what may be there already."""
        self._raw.add(bytes.fromhex(hex_of(digest)))

    def discard(self, digest: str) -> None:
        """Remove what may be there."""
        self._raw.discard(bytes.fromhex(hex_of(digest)))

    def __contains__(self, digest: str) -> bool:
        return bytes.fromhex(hex_of(digest)) in self._raw

    def __iter__(self) -> Iterator[str]:
        return (PREFIX + raw.hex() for raw in self._raw)

    def __len__(self) -> int:
        return len(self._raw)

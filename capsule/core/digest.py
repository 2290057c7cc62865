"""Digests in the one form in which they are written: `sha256:` and 64 lower-case hexadecimal digits."""

from __future__ import annotations

import hashlib
import re
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


ROOMS = 4096


class PackedSet:
    """A set of byte strings of one size that takes little more than their bytes, for hundreds of thousands of them.

    Each lies in one of many rooms, by Python's own hash, which nobody outside the process can aim at.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._rooms = [bytearray() for _ in range(ROOMS)]

    def add(self, raw: bytes) -> None:
        """Add what may be there already."""
        assert len(raw) == self._size, raw
        if raw not in self:
            self._rooms[hash(raw) % ROOMS] += raw

    def discard(self, raw: bytes) -> None:
        """Remove what may be there."""
        room = self._rooms[hash(raw) % ROOMS]
        at = self._place(room, raw)
        if at >= 0:
            del room[at : at + self._size]

    def __contains__(self, raw: bytes) -> bool:
        return self._place(self._rooms[hash(raw) % ROOMS], raw) >= 0

    def _place(self, room: bytearray, raw: bytes) -> int:
        at = room.find(raw)
        while at > 0 and at % self._size:
            at = room.find(raw, at + 1)
        return at

    def __iter__(self) -> Iterator[bytes]:
        for room in self._rooms:
            for at in range(0, len(room), self._size):
                yield bytes(room[at : at + self._size])

    def __len__(self) -> int:
        return sum(map(len, self._rooms)) // self._size


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

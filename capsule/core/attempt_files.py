"""Names, sizes and digests of the files of attempts, of which a capsule may have a million, in some 45 bytes each."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping

from capsule.core.digest import PREFIX, hex_of
from capsule.core.manifest import FileDigest

_ENTRY = struct.Struct("=BQ32s")
"""Number of the file's name, size in bytes, digest."""


class AttemptFiles(Mapping[str, Mapping[str, FileDigest]]):
    """By attempt the digests of its files, by their names, of which there are a few."""

    def __init__(self) -> None:
        self._packed: dict[str, bytes] = {}
        self._names: list[str] = []

    def add(self, attempt: str, file: str, size: int, digest: str) -> None:
        """Take in a file; of two of one name the later counts."""
        if file not in self._names:
            self._names.append(file)
        entry = _ENTRY.pack(self._names.index(file), size, bytes.fromhex(hex_of(digest)))
        self._packed[attempt] = self._packed.get(attempt, b"") + entry

    def __getitem__(self, attempt: str) -> Mapping[str, FileDigest]:
        entries = _ENTRY.iter_unpack(self._packed[attempt])
        return {self._names[name]: FileDigest(size=size, sha256=PREFIX + raw.hex()) for name, size, raw in entries}

    def __iter__(self) -> Iterator[str]:
        return iter(self._packed)

    def __len__(self) -> int:
        return len(self._packed)

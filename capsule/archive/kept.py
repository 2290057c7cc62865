"""Content that is kept while the rest of a file is read: compressed in memory, and decompressed a piece at a time.

Evidence is text of which a twentieth is left, and what a few kilobytes of a file declare takes no more than these here.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import BinaryIO

import zstandard

from capsule.core.lines import PIECE_BYTES

WHOLE_BYTES_MAX = 4096
"""Content of so few bytes is kept as it is."""


class Kept:
    """The bytes of a member in pieces of a mebibyte, which can be gone through again and again, or read as a file."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._begun = bytearray()
        self.size = 0

    def feed(self, data: bytes | memoryview) -> None:
        """Keep the next bytes."""
        self._begun += data
        self.size += len(data)
        while len(self._begun) >= PIECE_BYTES:
            self._pieces.append(_compress(memoryview(self._begun)[:PIECE_BYTES]))
            del self._begun[:PIECE_BYTES]

    def content(self) -> bytes | Kept:
        """Return what was kept, once nothing follows."""
        if self.size <= WHOLE_BYTES_MAX:
            return bytes(self._begun)
        if self._begun:
            self._pieces.append(_compress(self._begun))
            self._begun = bytearray()
        return self

    def __iter__(self) -> Iterator[bytes]:
        return map(_decompress, self._pieces)

    def piece(self, number: int) -> bytes:
        """Return one piece; empty behind the last."""
        return _decompress(self._pieces[number]) if number < len(self._pieces) else b""


def _compress(data: bytearray | memoryview) -> bytes:
    # Copied, since the library's own object keeps the room for data that do not compress.
    return bytes(memoryview(zstandard.ZstdCompressor(level=1).compress(data)))


def _decompress(piece: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(piece)


def as_file(content: bytes | Kept) -> BinaryIO:
    """Return a file, to be read at any place, of what was kept."""
    return io.BytesIO(content) if isinstance(content, bytes) else io.BufferedReader(_KeptFile(content))


class _KeptFile(io.RawIOBase):
    """A cursor over kept content that holds the piece it stands in."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        self._at = 0
        self._number = -1
        self._piece = b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._kept.size}[whence])
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # any writable buffer in the stub
        number, start = divmod(self._at, PIECE_BYTES)
        if number != self._number:
            self._number, self._piece = number, self._kept.piece(number)
        data = self._piece[start : start + len(buffer)]
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

"""Lists of lines that stream by: cut at their newlines, and hashed, many at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from capsule.archive.layout import LINE_SIZE_MAX

LINES_AT_ONCE = 256
PIECE_SIZE = 1 << 16
"""Bytes that are cut into lines at once."""


class LineDigest:
    """A SHA-256 over lines, some at a time; `size` is their length."""

    def __init__(self, tag: bytes = b"") -> None:
        self.size = 0
        self._hasher = hashlib.sha256(tag)
        self._waiting: list[bytes] = []

    def add(self, line: bytes) -> None:
        """Add the next line."""
        self.size += len(line)
        self._waiting.append(line)
        if len(self._waiting) >= LINES_AT_ONCE:
            self.digest()

    def digest(self) -> bytes:
        """Return the digest of all lines so far."""
        self._hasher.update(b"".join(self._waiting))
        self._waiting.clear()
        return self._hasher.digest()


class LineSplitter:
    """Cuts a stream of pieces into lines, each with its newline; a line beyond the limit comes out cut there."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes | memoryview) -> Iterator[list[bytes]]:
        """Yield the lines that end within `data`, many at a time."""
        for start in range(0, len(data), PIECE_SIZE):
            cut = (self._rest + bytes(data[start : start + PIECE_SIZE])).split(b"\n")
            self._rest = cut.pop()
            lines = [line + b"\n" for line in cut]
            while len(self._rest) > LINE_SIZE_MAX:
                lines.append(self._rest[:LINE_SIZE_MAX])
                self._rest = self._rest[LINE_SIZE_MAX:]
            yield lines

    def finish(self) -> Iterator[bytes]:
        """Yield what follows the last newline, if anything."""
        if self._rest:
            yield self._rest

"""One stream of bytes, read once and in order, with a bounded look ahead; the same for a file and a pipe.

Bytes are read into buffers that are never written twice, so a view of a frame stays good while later ones are read.
"""

from __future__ import annotations

import io
from typing import BinaryIO, cast

from capsule.archive.layout import FRAME_SIZE
from capsule.core.errors import MachineError

BUFFER_SIZE_MAX = FRAME_SIZE + (FRAME_SIZE >> 4)
"""The largest frame fits with the beginning of the next, so that its bytes are moved at most once."""
BUFFER_SIZE_MIN = 1 << 16
FIND_SIZE = 1 << 20


class Source:
    """A cursor over a stream: `peek` and `view` look ahead, `take` and `skip` move."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = cast(io.RawIOBase, stream)
        self._buffer: bytes | bytearray = b""
        self._at = self._filled = 0
        self._ended = False
        self.offset = 0
        """Bytes before the cursor."""

    @classmethod
    def of(cls, data: bytes) -> Source:
        """Return a cursor over bytes in memory."""
        source = cls(io.BytesIO())
        source._buffer, source._filled, source._ended = data, len(data), True
        return source

    def available(self, size: int) -> int:
        """Return how many of the next `size` bytes there are; fewer only at the end of the stream."""
        while self._filled - self._at < size and not self._ended:
            self._read(size)
        return min(size, self._filled - self._at)

    def peek(self, ahead: int, size: int) -> bytes:
        """Return the `size` bytes that begin `ahead` bytes after the cursor; fewer only at the end."""
        found = self.available(ahead + size)
        start = self._at + ahead
        return bytes(self._buffer[start : self._at + found])

    def view(self, size: int) -> memoryview:
        """Return the next `size` bytes without moving or copying; fewer only at the end."""
        found = self.available(size)
        return memoryview(self._buffer)[self._at : self._at + found]

    def take(self, size: int) -> memoryview:
        """Return the next `size` bytes and move past them; fewer only at the end."""
        data = self.view(size)
        self.skip(len(data))
        return data

    def skip(self, size: int) -> None:
        """Move past `size` bytes that were seen by `available`, `peek`, `view` or `find`."""
        assert size <= self._filled - self._at
        self._at += size
        self.offset += size

    def find(self, needle: bytes) -> bool:
        """Move to the next occurrence of `needle`, or to the end of the stream; say whether there is one."""
        while True:
            self.available(FIND_SIZE)
            index = self._buffer.find(needle, self._at, self._filled)
            if index >= 0:
                self.skip(index - self._at)
                return True
            left = self._filled - self._at
            if self._ended:
                self.skip(left)
                return False
            self.skip(max(0, left - len(needle) + 1))

    def _read(self, size: int) -> None:
        """Read on, so that `size` bytes after the cursor fit; what is not used yet moves to a new buffer if need be."""
        if self._at + size > len(self._buffer):
            rest = memoryview(self._buffer)[self._at : self._filled]
            self._buffer = bytearray(max(size, min(2 * len(self._buffer), BUFFER_SIZE_MAX), BUFFER_SIZE_MIN))
            self._buffer[: len(rest)] = rest
            self._at, self._filled = 0, len(rest)
        try:
            count = self._stream.readinto(memoryview(self._buffer)[self._filled :])
        except OSError as error:
            raise MachineError(
                f"cannot read beyond byte {self.offset}: {error.strerror}", hint="copy the file and try again"
            ) from error
        self._filled += count or 0
        self._ended = not count

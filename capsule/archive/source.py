"""One stream of bytes, read once and in order, with a bounded look ahead; the same for a file and a pipe."""

from __future__ import annotations

import io
from typing import BinaryIO

from capsule.core.errors import MachineError

READ_SIZE = 1 << 20


class Source:
    """A cursor over a stream: `peek` looks ahead, `take` and `skip` move."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._buffer = bytearray()
        self._at = 0
        self._ended = False
        self.offset = 0
        """Bytes before the cursor."""

    @classmethod
    def of(cls, data: bytes) -> Source:
        """Return a cursor over bytes in memory."""
        return cls(io.BytesIO(data))

    def available(self, size: int) -> int:
        """Return how many of the next `size` bytes there are; fewer only at the end of the stream."""
        while len(self._buffer) - self._at < size and not self._ended:
            if self._at >= READ_SIZE:
                del self._buffer[: self._at]
                self._at = 0
            try:
                data = self._stream.read(READ_SIZE)
            except OSError as error:
                raise MachineError(
                    f"cannot read beyond byte {self.offset}: {error.strerror}", hint="copy the file and try again"
                ) from error
            self._ended = not data
            self._buffer += data
        return min(size, len(self._buffer) - self._at)

    def peek(self, ahead: int, size: int) -> bytes:
        """Return the `size` bytes that begin `ahead` bytes after the cursor; fewer only at the end."""
        self.available(ahead + size)
        start = self._at + ahead
        return bytes(self._buffer[start : start + size])

    def take(self, size: int) -> bytes:
        """Return the next `size` bytes and move past them; fewer only at the end."""
        data = self.peek(0, size)
        self.skip(len(data))
        return data

    def skip(self, size: int) -> None:
        """Move past `size` bytes that were seen by `available`, `peek` or `find`."""
        assert size <= len(self._buffer) - self._at
        self._at += size
        self.offset += size

    def find(self, needle: bytes) -> bool:
        """Move to the next occurrence of `needle`, or to the end of the stream; say whether there is one."""
        while True:
            self.available(READ_SIZE)
            index = self._buffer.find(needle, self._at)
            if index >= 0:
                self.skip(index - self._at)
                return True
            left = len(self._buffer) - self._at
            if self._ended:
                self.skip(left)
                return False
            self.skip(max(0, left - len(needle) + 1))

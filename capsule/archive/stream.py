"""The tar inside the data frames, read in order; holds the frames to the frame rule (C-07) and logs each of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from capsule.archive import layout, tar
from capsule.archive.frames import Decoded
from capsule.archive.index import FrameLog
from capsule.archive.model import ContainerError, Finding, fault
from capsule.archive.source import Source


class TarStream:
    """The tar inside the frames, read in order; logs each frame, and holds them to the frame rule (C-07)."""

    def __init__(self, source: Source, frames: Iterator[Decoded | Finding]) -> None:
        self._source = source
        self._frames = frames
        self._view = memoryview(b"")
        self.current: Decoded | None = None
        self.at = 0
        self.offset = 0
        self.short_before = False
        self.table_start: int | None = None
        self.table_hasher = hashlib.sha256()
        self.log = FrameLog()

    def fill(self) -> bool:
        """Make the next byte available; false at the end of the frames."""
        if self.at < len(self._view):
            return True
        item = next(self._frames, None)
        if item is None:
            return False
        if isinstance(item, Finding):
            raise ContainerError(item)
        frame = item.frame
        if item.finding is not None:
            raise ContainerError(item.finding)
        self.short_before = self.current is not None and self.current.frame.raw_size < layout.FRAME_SIZE
        if self.short_before and self.table_start is not None:
            raise fault("C-07", frame.offset, "expected the last frame of the table to end the data, found one more")
        self.current = item
        self._view, self.at, self.offset = memoryview(item.raw), 0, frame.offset
        self.log.append(frame.offset, len(frame.data), frame.raw_size, item.digest)
        if self.table_start is not None:
            self.table_hasher.update(frame.data)
        return True

    def begin_table(self) -> None:
        """Declare that the member at the start of the current frame is the table."""
        assert self.current is not None
        self.table_start = len(self.log) - 1
        self.table_hasher.update(self.current.frame.data)

    def some(self, size: int) -> memoryview:
        """Return at least one of the next `size` bytes, as many as the frame has."""
        if not self.fill():
            raise self.ended()
        if self.at == 0 and self.short_before and self.table_start is None:
            raise self.cut_short()
        piece = self._view[self.at : self.at + size]
        self.at += len(piece)
        return piece

    def exactly(self, size: int) -> bytes:
        """Return the next `size` bytes."""
        if 0 < self.at <= len(self._view) - size:
            self.at += size
            return bytes(self._view[self.at - size : self.at])
        pieces = []
        while size:
            pieces.append(self.some(size))
            size -= len(pieces[-1])
        return b"".join(pieces)

    def zeros(self, size: int) -> bool:
        """Read the next `size` bytes (at most two blocks); say whether all are zero."""
        return self.exactly(size) == tar.END[:size]

    def starts_table(self) -> bool:
        """Whether the cursor stands at the start of a frame that begins like the header of the table."""
        return self.at == 0 and starts_table(self._view)

    def ended(self) -> ContainerError:
        """Return the error for a tar that stops before its end."""
        if self._source.available(1):
            return fault(
                "C-10", self._source.offset, "expected the table and two zero blocks before the index, found none"
            )
        return fault("C-02", self._source.offset, "expected more frames, found the end of the file")

    def cut_short(self) -> ContainerError:
        """Return the error for a frame that ends early."""
        return fault(
            "C-07", self.offset, f"expected a frame of {layout.FRAME_SIZE} raw bytes before this one, found fewer"
        )


def starts_table(raw: bytes | memoryview) -> bool:
    """Whether raw bytes begin like the header of the table."""
    name = layout.TABLE.encode() + b"\0"
    return raw[: len(name)] == name

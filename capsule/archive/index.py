"""The trailing index and the seek table: two skippable frames with exactly one encoding for given data frames.

The index says where the member table is and pins its bytes (C-17); the seek table (zstd's published seekable
format) lets existing tools find a frame (C-18). Both are hints: a reader of the whole file derives them from what
it saw and compares; random access checks what it finds through them against digests.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from capsule.archive.model import fault

INDEX_MAGIC = b"\x5c\x2a\x4d\x18"
SEEK_MAGIC = b"\x5e\x2a\x4d\x18"
SEEKABLE_MAGIC = 0x8F92EAB1
SKIPPABLE = frozenset(bytes((0x50 + low, 0x2A, 0x4D, 0x18)) for low in range(16))
_TAG = b"capsule-index/1\n"
_INDEX = struct.Struct("<4sI16sQQQQQ32s")
_ENTRY = struct.Struct("<II")
_FOOTER = struct.Struct("<IBI")
_LOGGED = struct.Struct("<QII32s")
INDEX_SIZE = _INDEX.size
INDEX_START = INDEX_MAGIC + struct.pack("<I", INDEX_SIZE - 8)
FOOTER_SIZE = _FOOTER.size
FRAMES_MAX = 1 << 27
"""The most frames that the seekable format allows."""


@dataclass(frozen=True, slots=True)
class Index:
    """Where the member table is: its frames' place in the file, its place in the tar, and their SHA-256."""

    members: int
    frames: int
    table_offset: int
    table_size: int
    table_raw_offset: int
    table_digest: bytes


class FrameLog:
    """Every data frame in order, packed: file offset, compressed size, raw size, SHA-256 of its bytes."""

    def __init__(self) -> None:
        self._packed = bytearray()

    def __len__(self) -> int:
        return len(self._packed) // _LOGGED.size

    def __getitem__(self, number: int) -> tuple[int, int, int, bytes]:
        return _LOGGED.unpack_from(self._packed, number * _LOGGED.size)

    def __iter__(self) -> Iterator[tuple[int, int, int, bytes]]:
        return _LOGGED.iter_unpack(self._packed)

    def append(self, offset: int, size: int, raw_size: int, digest: bytes) -> None:
        """Add the next frame."""
        self._packed += _LOGGED.pack(offset, size, raw_size, digest)


def encode_index(index: Index) -> bytes:
    """Return the index frame."""
    return _INDEX.pack(
        INDEX_MAGIC,
        INDEX_SIZE - 8,
        _TAG,
        index.members,
        index.frames,
        index.table_offset,
        index.table_size,
        index.table_raw_offset,
        index.table_digest,
    )


def decode_index(data: bytes, offset: int) -> Index:
    """Parse an index frame.

    Raises:
        ContainerError: it is not the encoding of any index (C-17).
    """
    if len(data) == INDEX_SIZE:
        index = Index(*_INDEX.unpack(data)[3:])
        if encode_index(index) == data:
            return index
    raise fault("C-17", offset, "expected an index frame of format 1, found other bytes")


def encode_seek_table(log: FrameLog) -> bytes:
    """Return the seek table of all data frames and the index, which holds no raw bytes."""
    entries = b"".join(_ENTRY.pack(size, raw_size) for _, size, raw_size, _ in log) + _ENTRY.pack(INDEX_SIZE, 0)
    count = len(log) + 1
    assert count <= FRAMES_MAX
    body = entries + _FOOTER.pack(count, 0, SEEKABLE_MAGIC)
    return SEEK_MAGIC + struct.pack("<I", len(body)) + body


def seek_table_size(count: int) -> int:
    """Return the length of a seek table of `count` entries."""
    return 8 + count * _ENTRY.size + FOOTER_SIZE


def decode_footer(data: bytes, offset: int) -> int:
    """Return the number of entries that the last bytes of a file announce (C-18 if they are no footer)."""
    if len(data) == FOOTER_SIZE:
        count, descriptor, magic = _FOOTER.unpack(data)
        if descriptor == 0 and magic == SEEKABLE_MAGIC and 1 < count <= FRAMES_MAX:
            return int(count)
    raise fault("C-18", offset, "expected the footer of a seek table at the end of the file, found other bytes")


def decode_seek_table(data: bytes, offset: int) -> list[tuple[int, int]]:
    """Return compressed and raw size of each data frame.

    Raises:
        ContainerError: the bytes are not a seek table that ends with the entry of the index (C-18).
    """
    count = (len(data) - 8 - FOOTER_SIZE) // _ENTRY.size
    start = SEEK_MAGIC + struct.pack("<I", len(data) - 8)
    entries = list(_ENTRY.iter_unpack(data[8 : 8 + count * _ENTRY.size]))
    if not data.startswith(start) or seek_table_size(count) != len(data) or entries[-1] != (INDEX_SIZE, 0):
        raise fault("C-18", offset, "expected a seek table of format 1, found other bytes")
    return entries[:-1]

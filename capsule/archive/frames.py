"""Data frames: how one is made, and how one is judged before a decoder sees it.

A frame is one-shot zstd (RFC 8878) of at most 2 MiB, with content size and checksum. The reader parses the frame
header and walks the block headers itself, so that the exact length is known and that concatenation, garbage,
truncation, large windows and lying sizes are refused before any memory is reserved for them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import zstandard

from capsule.archive.layout import FRAME_SIZE
from capsule.archive.model import ContainerError, Finding, fault
from capsule.archive.source import Source
from capsule.archive.tar import BLOCK

MAGIC = b"\x28\xb5\x2f\xfd"
HEADER_SIZE_MAX = 18
WINDOW_SIZE_MAX = 1 << 23
BLOCK_SIZE_MAX = 1 << 17
BLOCKS_MAX = 4096
FRAME_COMPRESSED_MAX = FRAME_SIZE + (FRAME_SIZE >> 8)  # what zstd promises never to exceed
LEVEL_MAX = 19
LIBRARY = ".".join(map(str, zstandard.ZSTD_VERSION))


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """What a frame declares: the length of this header, of the raw content, and the window to decode it."""

    size: int
    raw_size: int
    window_size: int


@dataclass(frozen=True, slots=True)
class Frame:
    """A whole frame as it stands in the file, not decoded yet."""

    offset: int
    data: memoryview
    raw_size: int


@dataclass(frozen=True, slots=True)
class Decoded:
    """A frame with its raw bytes, or the finding why there are none."""

    frame: Frame
    digest: bytes
    raw: bytes
    finding: Finding | None


def compress(raw: bytes, level: int) -> bytes:
    """Return the frame of `raw`; a fresh context each time, so that bytes depend on nothing else."""
    return zstandard.ZstdCompressor(level=level, write_checksum=True, write_content_size=True).compress(raw)


def decompress(data: bytes | memoryview, raw_size: int, offset: int) -> bytes:
    """Return the raw bytes of a frame whose header and blocks were judged before.

    Raises:
        ContainerError: the frame does not decode to `raw_size` bytes with the checksum that it carries (C-06).
    """
    decoder = zstandard.ZstdDecompressor(max_window_size=WINDOW_SIZE_MAX)
    try:
        raw = decoder.decompress(data, max_output_size=raw_size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise fault("C-06", offset, f"expected a frame that decodes, found damage ({error})") from error
    if len(raw) != raw_size:
        raise fault("C-06", offset, f"expected a frame of {raw_size} raw bytes, found {len(raw)}")
    return raw


def decode(frame: Frame) -> Decoded:
    """Decode and hash one frame; a finding is a value here, so that frames can be decoded in any order."""
    digest = hashlib.sha256(frame.data).digest()
    try:
        return Decoded(frame, digest, decompress(frame.data, frame.raw_size, frame.offset), None)
    except ContainerError as error:
        return Decoded(frame, digest, b"", error.finding)


def parse_header(data: bytes, offset: int) -> FrameHeader:
    """Parse the header of the frame that begins `data` (at least 18 bytes unless the file ends before).

    Raises:
        ContainerError: no frame (C-01), a header that the format forbids (C-03), a size or window beyond the
            limits (C-04), or the end of the file inside it (C-02).
    """
    if len(data) < 4 and MAGIC.startswith(data):
        raise _cut(offset, data)
    if data[:4] != MAGIC:
        raise fault("C-01", offset, f"expected a data frame or the index, found bytes {data[:4].hex(' ')}")
    if len(data) < 5:
        raise _cut(offset, data)
    descriptor = data[4]
    if descriptor & 0b11:
        raise fault("C-03", offset, "expected a frame without dictionary, found a dictionary id")
    if descriptor & 0b11000:
        raise fault("C-03", offset, "expected reserved bits of the frame header to be zero, found one set")
    if not descriptor & 0b100:
        raise fault("C-03", offset, "expected a frame with a checksum, found none")
    single = bool(descriptor & 0b100000)
    size_length = (int(single), 2, 4, 8)[descriptor >> 6]
    if not size_length:
        raise fault("C-03", offset, "expected a frame with its content size, found none")
    size_at = 5 if single else 6
    if len(data) < size_at + size_length:
        raise _cut(offset, data)
    raw_size = int.from_bytes(data[size_at : size_at + size_length], "little") + (256 if size_length == 2 else 0)
    window_size = raw_size if single else _window_size(data[5])
    if not 0 < raw_size <= FRAME_SIZE or raw_size % BLOCK:
        raise fault(
            "C-04", offset, f"expected 512 to {FRAME_SIZE} raw bytes in whole blocks, found {raw_size} declared"
        )
    if window_size > WINDOW_SIZE_MAX:
        raise fault("C-04", offset, f"expected a window of at most {WINDOW_SIZE_MAX} bytes, found {window_size}")
    return FrameHeader(size_at + size_length, raw_size, window_size)


def measure(source: Source) -> tuple[int, int]:
    """Return compressed and raw size of the frame at the cursor, without moving or decoding.

    Raises:
        ContainerError: as `parse_header`; blocks that the format forbids (C-05).
    """
    offset = source.offset
    header = parse_header(source.peek(0, HEADER_SIZE_MAX), offset)
    position = header.size
    for _ in range(BLOCKS_MAX):
        block = int.from_bytes(source.peek(position, 3).ljust(3, b"\0"), "little")
        kind, size = block >> 1 & 3, block >> 3
        if kind == 3 or size > BLOCK_SIZE_MAX:
            raise fault(
                "C-05", offset, f"expected a block of a known type and at most {BLOCK_SIZE_MAX} bytes, found none"
            )
        last = block & 1
        position += 3 + (1 if kind == 1 else size) + 4 * last
        if position > FRAME_COMPRESSED_MAX:
            raise fault("C-05", offset, f"expected a frame of at most {FRAME_COMPRESSED_MAX} bytes, found more")
        if source.available(position) < position:
            raise fault(
                "C-02", offset + source.available(position), "expected the rest of a frame, found the end of the file"
            )
        if last:
            return position, header.raw_size
    raise fault("C-05", offset, f"expected at most {BLOCKS_MAX} blocks in a frame, found more")


def _window_size(descriptor: int) -> int:
    base = 1 << (10 + (descriptor >> 3))
    return base + (base >> 3) * (descriptor & 7)


def _cut(offset: int, data: bytes) -> ContainerError:
    return fault("C-02", offset + len(data), "expected the rest of a frame header, found the end of the file")

"""Builds containers byte by byte, sound or with one fault, and shares no code with the writer.

Each stage can be edited; the stages after it are computed from the edited one, so that everything else in the file
agrees with the fault.
"""

from __future__ import annotations

import hashlib
import io
import struct
import tarfile
from collections.abc import Callable, Sequence
from typing import BinaryIO

import zstandard

FRAME = 2 << 20
HEADER = ("0-header.json", b'{"digest":"sha256","format":"capsule-archive/1","frame_size_bytes":2097152}\n')
END = bytes(1024)
LIBRARY_LINE = b'["zstd","%d.%d.%d",1]\n' % zstandard.ZSTD_VERSION

Member = tuple[str, bytes]
Bytes = Callable[[bytes], bytes]
Frames = Callable[[list[bytes]], list[bytes]]

MANIFEST = ("1-manifest/000/manifest.json", b'{"schema":"example"}\n')
STDOUT = ("3-attempts/a000001/stdout", b"epoch 1\nepoch 2\n" * 40)
RESULTS = ("7-results/results.json", b"[]\n")
SMALL: list[Member] = [MANIFEST, STDOUT, RESULTS]


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def same(data: bytes) -> bytes:
    return data


def compress(raw: bytes, level: int = 1) -> bytes:
    return zstandard.ZstdCompressor(level=level, write_checksum=True).compress(raw)


def tar_header(name: str, size: int) -> bytes:
    """The header as Python's tarfile writes it with our fields."""
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = size, 0o644, 315532800
    block = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
    if block[329:345] == bytes(16):  # older tarfile leaves the device numbers of a file empty
        block[329:345] = b"0000000\0" * 2
        block[148:156] = b" " * 8
        block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def edited(block: bytes, *changes: tuple[int, bytes], fix: bool = True) -> bytes:
    """Return a header with bytes replaced at offsets, and with the checksum made right again."""
    result = bytearray(block)
    for at, value in changes:
        result[at : at + len(value)] = value
    if fix:
        result[148:156] = b" " * 8
        result[148:156] = b"%06o\0 " % sum(result[:512])
    return bytes(result)


def raw_header(name: bytes, size: int, *changes: tuple[int, bytes]) -> bytes:
    """Return a header of a name that may be any bytes."""
    return edited(tar_header("x", size), (0, name.ljust(100, b"\0")[:100]), *changes)


def pax(records: bytes, typeflag: bytes = b"x") -> bytes:
    """Return an extended header with these records."""
    return edited(tar_header("PaxHeader", len(records)), (156, typeflag)) + records + bytes(-len(records) % 512)


def entry(name: str, content: bytes, header: bytes | None = None) -> bytes:
    return (header or tar_header(name, len(content))) + content + bytes(-len(content) % 512)


def checksums(members: Sequence[Member]) -> bytes:
    return b"".join(f"{sha(content)}  {name}\n".encode("latin-1") for name, content in members)


def cut(raw: bytes, size: int = FRAME) -> list[bytes]:
    return [raw[start : start + size] for start in range(0, len(raw), size)]


def member_lines(members: Sequence[Member]) -> bytes:
    return b"".join(f'["{name}",{len(content)},"{sha(content)}"]\n'.encode("latin-1") for name, content in members)


def frame_lines(frames: Sequence[bytes], raws: Sequence[bytes]) -> bytes:
    lines = []
    offset = 0
    for number, (frame, raw) in enumerate(zip(frames, raws, strict=True)):
        lines.append(f'[{number},{offset},{len(frame)},{len(raw)},"{sha(frame)}"]\n'.encode())
        offset += len(frame)
    return b"".join(lines)


def index_frame(members: int, frames: int, offset: int, raw_offset: int, table: bytes) -> bytes:
    body = b"capsule-index/1\n" + struct.pack("<5Q", members, frames, offset, len(table), raw_offset)
    return struct.pack("<II", 0x184D2A5C, 88) + body + hashlib.sha256(table).digest()


def seek_table(entries: Sequence[tuple[int, int]]) -> bytes:
    body = b"".join(struct.pack("<II", *item) for item in entries) + struct.pack("<IBI", len(entries), 0, 0x8F92EAB1)
    return struct.pack("<II", 0x184D2A5E, len(body)) + body


def with_lists(members: Sequence[Member], sums: Bytes = same) -> list[Member]:
    """Add the container's own first and last-but-one member."""
    whole = [HEADER, *members]
    return [*whole, ("9-SHA256SUMS", sums(checksums(whole)))]


def forge(
    members: Sequence[Member] = SMALL,
    *,
    present: Sequence[Member] | None = None,
    listed: Sequence[Member] | None = None,
    sums: Bytes = same,
    body: Bytes = same,
    split: Callable[[bytes], list[bytes]] = cut,
    pack: Callable[[bytes], bytes] = compress,
    table: Bytes = same,
    table_header: bytes | None = None,
    end: bytes = END,
    frames: Frames = lambda frames: frames,
    index: Bytes = same,
    seek: Bytes = same,
    whole: Bytes = same,
) -> bytes:
    """Return a container of `members`; `present` replaces all of them, `listed` those that the table names."""
    present = with_lists(members, sums) if present is None else present
    raws = split(body(b"".join(entry(*member) for member in present)))
    packed = [pack(raw) for raw in raws]
    lines = member_lines(present if listed is None else listed) + LIBRARY_LINE + frame_lines(packed, raws)
    lines = table(lines)
    table_raws = cut(entry("9-TABLE", lines, table_header) + end)
    table_frames = [pack(raw) for raw in table_raws]
    data = b"".join(frames(packed)) + b"".join(table_frames)
    start = len(data) - sum(map(len, table_frames))
    count = len(present)
    index_bytes = index(
        index_frame(count, len(raws) + len(table_raws), start, sum(map(len, raws)), b"".join(table_frames))
    )
    sizes = [(len(frame), len(raw)) for frame, raw in zip(packed + table_frames, raws + table_raws, strict=True)]
    return whole(data + index_bytes + seek(seek_table([*sizes, (len(index_bytes), 0)])))


def pack_into(stream: BinaryIO, members: Sequence[Member], **options: object) -> None:
    from capsule.archive.writer import CapsuleWriter

    with CapsuleWriter(stream, **options) as writer:  # type: ignore[arg-type]
        for name, content in members:
            writer.add(name, len(content), content)
        writer.close()


def pack_with_writer(members: Sequence[Member], **options: object) -> bytes:
    stream = io.BytesIO()
    pack_into(stream, members, **options)
    return stream.getvalue()

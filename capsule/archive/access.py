"""Reads one small member of a file through its index, without reading the rest.

Index and seek table are hints. What is returned has the digest that the table gives, and the table has the digest
that the index gives (C-21); whether the file as a whole is sound, only `reader.walk` says.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from capsule.archive import index, layout, tar
from capsule.archive.frames import decompress, measure
from capsule.archive.members import content_of
from capsule.archive.model import ContainerError, fault
from capsule.archive.source import Source
from capsule.core.canonical import whole_lines
from capsule.core.digest import PREFIX
from capsule.core.errors import IncompleteError

MEMBER_SIZE_MAX = 1 << 28
_SIZE = re.compile(rb'",(0|[1-9][0-9]{0,15}),"')


def open_member(path: Path | str, name: str, *, size_max: int = MEMBER_SIZE_MAX) -> bytes:
    """Return the content of one member.

    Raises:
        IncompleteError: the table lists no such member.
        ContainerError: what the index leads to is damaged, or the member is larger than `size_max` (C-19).
    """
    with Path(path).open("rb") as stream:
        entries, found = _read_index(stream)
        raw_offset, size, digest_hex = _find(_blocks(content_of(_table_frames(stream, found))), name)
        if size > size_max:
            raise fault("C-19", 0, f"expected at most {size_max} bytes, found {size}", name)
        start = raw_offset + tar.header_size(size)
        content = _read_raw(stream, entries, raw_offset, start + size)
        header, data = content[: start - raw_offset], content[start - raw_offset :]
        if header != tar.encode(name, size) or hashlib.sha256(data).hexdigest() != digest_hex:
            raise fault("C-21", 0, "expected the content that the table names, found other bytes", name)
        return data


def list_members(path: Path | str) -> Iterator[tuple[str, int, str]]:
    """Yield name, size in bytes and digest of every member that the table lists, in its order.

    Raises:
        ContainerError: what the index leads to is damaged; said at the end, so only of a sound file is all of it true.
    """
    with Path(path).open("rb") as stream:
        _, found = _read_index(stream)
        for block in _blocks(content_of(_table_frames(stream, found))):
            for line in whole_lines(block):
                if member := layout.parse_member_line(line + b"\n"):
                    name, size, digest_hex = member
                    yield name, size, PREFIX + digest_hex


def _read_index(stream: BinaryIO) -> tuple[list[tuple[int, int]], index.Index]:
    end = stream.seek(0, io.SEEK_END)
    footer_at = max(0, end - index.FOOTER_SIZE)
    count = index.decode_footer(_read(stream, footer_at, index.FOOTER_SIZE), footer_at)
    size = index.seek_table_size(count)
    seek_at = end - size
    index_at = seek_at - index.INDEX_SIZE
    if index_at < 0:
        raise fault("C-18", footer_at, f"expected a seek table within the file, found {count} entries")
    entries = index.decode_seek_table(_read(stream, seek_at, size), seek_at)
    found = index.decode_index(_read(stream, index_at, index.INDEX_SIZE), index_at)
    if found.table_offset + found.table_size != index_at:
        raise fault("C-17", index_at, "expected the table right before the index, found another place")
    return entries, found


def _table_frames(stream: BinaryIO, found: index.Index) -> Iterator[bytes]:
    """Yield the raw frames of the table; raises at the end unless its frames have the digest of the index."""
    stream.seek(found.table_offset)
    source = Source(stream)
    hasher = hashlib.sha256()
    left = found.table_size
    while left > 0:
        try:
            size, raw_size = measure(source)
        except ContainerError as error:
            raise fault("C-21", found.table_offset, f"expected the frames of the table, found: {error}") from error
        data = source.take(size)
        hasher.update(data)
        left -= size
        yield decompress(data, raw_size, found.table_offset)
    if left or hasher.digest() != found.table_digest:
        raise fault("C-21", found.table_offset, "expected the table that the index names, found other bytes")


def _blocks(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield a table in blocks of whole lines."""
    rest = b""
    for piece in pieces:
        whole, newline, rest = (rest + piece).rpartition(b"\n")
        if len(rest) > layout.LINE_SIZE_MAX:
            raise fault("C-21", 0, "expected a table of lines, found a line that is too long", layout.TABLE)
        yield whole + newline


def _find(blocks: Iterator[bytes], name: str) -> tuple[int, int, str]:
    """Return raw offset, size and digest of a member; goes through all blocks, so that the table's digest is checked.

    Lines before are only looked at for their sizes: were one not canonical, no header would be where they lead.
    """
    start = b'\n["%b",' % name.encode("ascii", "replace")
    raw_offset = 0
    result: tuple[int, int, str] | None = None
    for block in blocks:
        if result is not None:
            continue
        at = (b"\n" + block).find(start) if layout.is_allowed(name, newer=True) else -1
        member = layout.parse_member_line(block[at : block.index(b"\n", at) + 1]) if at >= 0 else None
        raw_offset += _raw_size(block[:at] if member else block)
        if member:
            result = raw_offset, member[1], member[2]
    if result is None:
        raise IncompleteError(f"expected a member {name!r}, found none of that name")
    return result


def _raw_size(lines: bytes) -> int:
    """Return how many bytes of the tar the members of these lines take."""
    sizes = [*map(int, _SIZE.findall(lines))]
    extended = sum(size > tar.USTAR_SIZE_MAX for size in sizes)
    return (sum([size + 2 * tar.BLOCK - 1 >> 9 for size in sizes]) + 2 * extended) * tar.BLOCK


def _read_raw(stream: BinaryIO, entries: list[tuple[int, int]], start: int, stop: int) -> bytes:
    """Return raw bytes from `start` to `stop`, from the frames that hold them."""
    pieces = []
    offset = raw_offset = 0
    for size, raw_size in entries:
        if raw_offset < stop and start < raw_offset + raw_size:
            source = Source.of(_read(stream, offset, size))
            if measure(source) != (size, raw_size):
                raise fault("C-18", offset, "expected the frame that the seek table describes, found another")
            raw = decompress(source.take(size), raw_size, offset)
            pieces.append(raw[max(0, start - raw_offset) : stop - raw_offset])
        offset += size
        raw_offset += raw_size
    return b"".join(pieces)


def _read(stream: BinaryIO, offset: int, size: int) -> bytes:
    stream.seek(offset)
    return stream.read(size)

"""The footer of a Parquet file, read before pyarrow sees it: some values that no writer writes abort the process there.

A footer is one struct in Thrift's compact protocol. Only what bounds the decoding is looked at: the codec and the
encodings of every column, that nothing is encrypted, and that every enumeration has a value that exists. The footer
only claims encodings; the header of every page says them, and is read likewise before its row group is decoded.
"""

from __future__ import annotations

import io
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

MAGIC = b"PAR1"
SIZE_MAX = 1 << 20
"""Bytes of a footer; one of 250 row groups with forty columns has about as many."""

ROW_GROUP_ROWS_MAX = 65_536
ROW_GROUP_BYTES_MAX = 8 << 20
"""Bytes that the columns of a row group declare together: a reader holds one row group, and a page is no larger."""

DEPTH_MAX = 16
UNCOMPRESSED = DATA_PAGE = 0
ENCODINGS = frozenset({0, 3})
"""PLAIN and RLE, of values and of the levels that say which are null; others can be larger decoded than encoded."""

TYPES, REPETITIONS, CONVERTED_TYPES = range(8), range(3), range(22)
PAGES_MAX = 256
"""Pages of a column in a row group; the writer makes one for each mebibyte or 20,000 rows."""
PAGE_HEADER_BYTES_MAX = 1024

_VARINT_BYTES_MAX = 10
Fields = Mapping[int, Any]
"""A struct: values by the number of their field."""
Kept = Mapping[int, Any]
"""What is kept of a struct: numbers of fields, each with what is kept of the structs that are there."""

_NONE: Kept = {}
_COLUMN = dict.fromkeys((1, 2, 3, 4, 5, 6, 7, 9, 11), _NONE)
_PAGE = {1: _NONE, 2: _NONE, 3: _NONE, 5: {1: _NONE, 2: _NONE}}
_CHUNK = {1: _NONE, 3: _COLUMN, 8: _NONE, 9: _NONE}
_LEAF = dict.fromkeys((1, 3, 4, 5, 6), _NONE)
_FILE = {2: _LEAF, 3: _NONE, 4: {1: _CHUNK, 3: _NONE}, 8: _NONE, 9: _NONE}

STRUCT_BYTES = 8
"""Bytes that a struct of those which are kept takes at least, seen over a whole footer."""


class FooterError(ValueError):
    """Words for a footer that is none, or that asks for more than plain uncompressed columns."""


@dataclass(frozen=True)
class RowGroup:
    """How many rows a row group declares, and for each column where in the file it begins and how many bytes it has."""

    rows: int
    places: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """The bytes of all columns."""
        return sum(size for _, size in self.places)


def check_footer(source: BinaryIO, columns: Sequence[str], rows_max: int) -> list[RowGroup]:
    """Hold the footer of a Parquet file to flat, plain, uncompressed columns of these names (R-09).

    Raises:
        FooterError: it says otherwise, or cannot be read.
    """
    footer, file_size = _read_footer(source)
    try:
        file = _Compact(footer).whole(_FILE)
        _check_schema(file, [name.encode() for name in columns])
        rows = file[3]
        if not 0 <= rows <= rows_max or len(file[4]) > rows_max + 1:
            raise FooterError(f"{rows} rows declared, of which at most {rows_max} are expected")
        for group in file[4]:
            rows -= _from_zero(group[3], "number of rows")
            if any(chunk[3][5] != group[3] for chunk in group[1]):
                raise FooterError("a column with another number of values than rows")
            if [chunk[3][3] for chunk in group[1]] != [[name.encode()] for name in columns]:
                raise FooterError("a row group without the frozen columns")
            for chunk in group[1]:
                _check_column(chunk, file_size)
            size = sum(max(chunk[3][6], chunk[3][7]) for chunk in group[1])
            if size > ROW_GROUP_BYTES_MAX or group[3] > ROW_GROUP_ROWS_MAX:
                most = f"at most {ROW_GROUP_ROWS_MAX} rows and {ROW_GROUP_BYTES_MAX} bytes expected"
                raise FooterError(f"a row group of {group[3]} rows and {size} bytes; {most}")
    except (IndexError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise FooterError("a footer that cannot be read") from error
    if rows:
        raise FooterError("another number of rows than in its row groups")
    return [RowGroup(group[3], tuple((chunk[3][9], chunk[3][7]) for chunk in group[1])) for group in file[4]]


def _read_footer(source: BinaryIO) -> tuple[bytes, int]:
    """Return the bytes of the footer, and how many the file has."""
    file_size = source.seek(0, io.SEEK_END)
    source.seek(0)
    start = source.read(4)
    source.seek(max(0, file_size - 8))
    end = source.read(8)
    size = int.from_bytes(end[:4], "little")
    if start != MAGIC or end[4:] != MAGIC or not 0 < size <= file_size - 12:
        raise FooterError("no footer of an unencrypted Parquet file")
    if size > SIZE_MAX:
        raise FooterError(f"a footer of {size} bytes, of which at most {SIZE_MAX} are read")
    source.seek(file_size - 8 - size)
    return source.read(size), file_size


def check_pages(source: BinaryIO, group: RowGroup) -> None:
    """Hold the columns of a row group to plain pages of all its rows (R-09).

    Raises:
        FooterError: a page is something else, or cannot be read.
    """
    for start, size in group.places:
        _check_pages(source, start, start + size, group.rows)


def _check_pages(source: BinaryIO, start: int, end: int, left: int) -> None:
    for _ in range(PAGES_MAX):
        if not left:
            return
        source.seek(start)
        try:
            header, header_size = _Compact(source.read(min(end - start, PAGE_HEADER_BYTES_MAX))).first(_PAGE)
            kind, size, values, encoding = header[1], header[3], header[5][1], header[5][2]
            is_plain = kind == DATA_PAGE and encoding in ENCODINGS and header[2] == size
        except (IndexError, KeyError, TypeError, struct.error, FooterError) as error:
            raise FooterError("a page of other than plain values") from error
        start += header_size + size
        if not is_plain or not 0 <= values <= left or size < 0 or start > end:
            raise FooterError("a page of other than plain values")
        left -= values
    if left:
        raise FooterError(f"more than {PAGES_MAX} pages of a column in a row group")


def _check_schema(file: Fields, columns: Sequence[bytes]) -> None:
    """Hold the schema to a root with these leaves, and the file to no encryption."""
    root, *leaves = file[2]
    if [leaf[4] for leaf in leaves] != columns or root[5] != len(columns):
        raise FooterError(f"columns {b', '.join(leaf[4] for leaf in leaves)[:200]!r}, expected the frozen ones")
    for leaf in leaves:
        if leaf.get(5):
            raise FooterError("columns within columns")
        _one_of(TYPES, leaf[1], "type")
        _one_of(REPETITIONS, leaf[3], "repetition")
        _one_of(CONVERTED_TYPES, leaf.get(6, 0), "converted type")
    if 8 in file or 9 in file:
        raise FooterError("a footer that is encrypted or signed")


def _check_column(chunk: Fields, size: int) -> None:
    """Hold one column of one row group to what can be decoded within the file's size."""
    column = chunk[3]
    if 1 in chunk or 8 in chunk or 9 in chunk:
        raise FooterError("a column in another file, or encrypted")
    if 11 in column:
        raise FooterError("a column with a dictionary")
    _one_of(TYPES, column[1], "type")
    if column[4] != UNCOMPRESSED or not ENCODINGS.issuperset(column[2]):
        raise FooterError(f"codec {column[4]}, encodings {sorted(set(column[2]))}; plain uncompressed columns expected")
    if max(_from_zero(column[6], "size"), _from_zero(column[7], "size"), _from_zero(column[9], "place")) > size:
        raise FooterError("a column that declares more bytes than the file has")


def _from_zero(value: int, what: str) -> int:
    if not 0 <= value < 2**63:
        raise FooterError(f"a {what} of {value}")
    return value


def _one_of(allowed: range, value: Any, what: str) -> None:
    if value not in allowed:
        raise FooterError(f"a {what} that does not exist: {str(value)[:40]}")


class _Compact:
    """A cursor over Thrift's compact protocol; what it gives is bounded by the bytes that it is given."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._structs_left = 16 + len(data) // STRUCT_BYTES

    def whole(self, kept: Kept) -> Fields:
        """Return the one struct that the bytes are."""
        fields, size = self.first(kept)
        if size != len(self._data):
            raise FooterError("bytes behind the footer's end")
        return fields

    def first(self, kept: Kept) -> tuple[Fields, int]:
        """Return the struct that the bytes begin with, and how many it has."""
        return self._struct(0, kept), self._at

    def _struct(self, depth: int, kept: Kept) -> Fields:
        fields: dict[int, Any] = {}
        last = 0
        while header := self._byte():
            number = last + (header >> 4) if header >> 4 else self._integer()
            if number <= last:
                raise FooterError(f"field {number} twice or out of order")
            last = number
            kind = header & 15
            value = kind == 1 if kind in (1, 2) else self._value(kind, depth + 1, kept.get(number))
            if number in kept:
                fields[number] = value
        if not fields:
            return _NONE
        self._structs_left -= 1
        if self._structs_left < 0:
            raise FooterError("more structs than its columns have")
        return fields

    def _value(self, kind: int, depth: int, kept: Kept | None) -> Any:
        """Return a value of what is kept, and go past any other."""
        if depth > DEPTH_MAX:
            raise FooterError(f"more than {DEPTH_MAX} levels")
        if kind in (1, 2, 3):  # in a list, a truth value is a byte
            return self._byte()
        if kind in (4, 5, 6):
            return self._integer()
        if kind == 7:
            return struct.unpack("<d", self._bytes(8))[0]
        if kind == 8:
            return self._bytes(self._varint())
        if kind in (9, 10):
            header = self._byte()
            count = header >> 4 if header >> 4 < 15 else self._varint()
            if kept is not None and header & 15 in (9, 10, 11):
                raise FooterError("lists within a list")
            values = (self._value(header & 15, depth + 1, kept) for _ in range(count))
            return deque(values, maxlen=0) if kept is None else list(values)
        if kind == 11:
            count = self._varint()
            kinds = self._byte() if count else 0
            for _ in range(count):
                self._value(kinds >> 4, depth + 1, None)
                self._value(kinds & 15, depth + 1, None)
            return None
        if kind == 12:
            return self._struct(depth, kept or _NONE)
        raise FooterError(f"a value of the unknown kind {kind}")

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def _bytes(self, size: int) -> bytes:
        if size > len(self._data) - self._at:
            raise FooterError("text beyond the footer's end")
        self._at += size
        return self._data[self._at - size : self._at]

    def _varint(self) -> int:
        value = 0
        for place in range(_VARINT_BYTES_MAX):
            byte = self._byte()
            value |= (byte & 0x7F) << 7 * place
            if byte < 0x80:
                return value
        raise FooterError("a number of more than 64 bits")

    def _integer(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)

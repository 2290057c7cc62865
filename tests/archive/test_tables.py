"""Tables as Parquet: written in row groups, read back whole or a few rows at a time, never trusted."""

from __future__ import annotations

import io
from contextlib import suppress
from typing import Any

import pyarrow.parquet as pq
import pytest

from capsule.archive.tables import BATCH_ROWS, ROW_GROUP_ROWS, read_table, scan_table, write_table
from capsule.core.errors import MalformedError

COLUMNS = [("name", "text"), ("number", "int64"), ("share", "float64"), ("good", "bool")]


def rows(count: int) -> list[dict[str, Any]]:
    """Return rows with everything that a column may hold, and nothing."""
    odd = [None, "NaN", "-0", 0.1, 7]
    return [
        {
            "name": None if at % 3 else f"row {at}",
            "number": None if at % 5 else at,
            "share": odd[at % 5],
            "good": at > 3,
        }
        for at in range(count)
    ]


@pytest.mark.parametrize("count", [0, 1, BATCH_ROWS + 1, ROW_GROUP_ROWS + 1])
def test_rows_come_back(count: int) -> None:
    """K-05: rows written from an iterator come back whole and in pieces; row groups are bounded."""
    written = write_table(COLUMNS, iter(rows(count)))
    assert written == write_table(COLUMNS, rows(count))
    assert read_table(written, COLUMNS, count, "t") == rows(count)
    assert list(scan_table(written, COLUMNS, count, "t")) == rows(count)
    assert pq.ParquetFile(io.BytesIO(written)).metadata.num_row_groups == max(1, -(-count // ROW_GROUP_ROWS))


def test_what_is_no_such_table_is_refused_before_a_value_is_decoded() -> None:
    """K-05: other columns, more rows than there can be, and bytes that are no table at all."""
    written = write_table(COLUMNS, rows(9))
    for data, columns, most in ((written, COLUMNS, 8), (written, COLUMNS[:3], 9), (b"PAR1", COLUMNS, 9)):
        with pytest.raises(MalformedError):
            scan_table(data, columns, most, "t")


def test_damage_in_the_middle_is_words_and_not_a_crash() -> None:
    """K-05: a table whose footer is sound and whose pages are not is refused while it is read, if at all."""
    written = write_table(COLUMNS, rows(500))
    for at in range(4, len(written) // 2, 97):
        damaged = bytearray(written)
        damaged[at] ^= 0xFF
        with suppress(MalformedError):
            assert len(list(scan_table(bytes(damaged), COLUMNS, 500, "t"))) == 500


def column_footer(data: bytes, name: bytes) -> int:
    """Return where in a table's footer the codec of a column stands, zigzag in one byte."""
    before = bytes([len(name)]) + name + b"\x15"
    assert data.count(before + b"\x00\x16") == 1
    return data.index(before + b"\x00\x16") + len(before)


def test_a_footer_is_judged_before_pyarrow_aborts_over_it() -> None:
    """A codec that does not exist ends the process within pyarrow; a damaged footer must be words."""
    data = write_table(COLUMNS, rows(20))
    at = column_footer(data, b"number")
    for codec, words in ((b"\x7e", "codec 63"), (b"\x0c", "codec 6"), (b"\x01", "codec -1")):
        with pytest.raises(MalformedError, match=words):
            read_table(data[:at] + codec + data[at + 1 :], COLUMNS, 20, "x")
    values = data[:at] + b"\x00\x16\x26" + data[at + 3 :]
    with pytest.raises(MalformedError, match="another number of values"):
        read_table(values, COLUMNS, 20, "x")
    assert len(read_table(data, COLUMNS, 20, "x")) == 20


def test_every_flipped_bit_of_a_footer_is_a_table_or_words() -> None:
    data = write_table(COLUMNS, rows(20))
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    refused = 0
    for position in range(start, len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            try:
                read_table(bytes(changed), COLUMNS, 20, "x")
            except MalformedError:
                refused += 1
    assert refused > 1500


@pytest.mark.parametrize(
    ("footer", "words"),
    [
        (b"\x19\x0c" * 20, "cannot be read"),
        (b"\x1c" * 40, "more than 16 levels"),
        (b"\x1d\x00", "unknown kind"),
        (b"\x18\xff\xff\xff\x7f", "beyond the footer's end"),
        (b"\x19\xf3\xff\xff\xff\xff\x7f", "cannot be read"),
        (b"\x16" + b"\xff" * 11, "more than 64 bits"),
        (b"\x16\x02\x06\x02\x02\x00", "field 1 twice"),
        (b"\x00x", "bytes behind"),
        (b"\x00", "cannot be read"),
        (bytes((1 << 20) + 1), "at most 1048576"),
    ],
)
def test_footers_that_are_none(footer: bytes, words: str) -> None:
    data = b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1"
    with pytest.raises(MalformedError, match=words):
        read_table(data, COLUMNS, 20, "x")

"""Tables as Parquet: written in row groups, read back a few rows at a time, never trusted."""

from __future__ import annotations

import io
import re
import tracemalloc
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from capsule.archive.parquet_footer import ROW_GROUP_BYTES_MAX, ROW_GROUP_ROWS_MAX
from capsule.archive.tables import BATCH_ROWS, ROW_BYTES_MAX, ROW_GROUP_BYTES, open_table, write_table
from capsule.core.errors import MalformedError
from tests.tables import read_rows, table_bytes

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


@pytest.mark.parametrize("count", [0, 1, BATCH_ROWS + 1, ROW_GROUP_ROWS_MAX + 1])
def test_rows_come_back(count: int) -> None:
    """K-05: rows written from an iterator come back, as often as is asked; row groups are bounded."""
    written = table_bytes(COLUMNS, iter(rows(count)))
    assert written == table_bytes(COLUMNS, rows(count))
    table = open_table(io.BytesIO(written), COLUMNS, count, "t")
    begun = iter(table)
    first = [next(begun) for _ in range(min(count, 3))]
    assert list(table) == first + list(begun) == rows(count)
    assert len(table) == count
    assert pq.ParquetFile(io.BytesIO(written)).metadata.num_row_groups == max(1, -(-count // ROW_GROUP_ROWS_MAX))


def test_row_groups_are_bounded_by_bytes() -> None:
    """R-09: also where texts are long, and where one row alone has more than a batch; every row comes back."""
    long = [{"name": "é" * (at % 7 * 5_000), "number": at, "share": 0.5, "good": None} for at in range(500)]
    long[77]["name"] = long[78]["name"] = "x" * (ROW_BYTES_MAX - 100)
    written = table_bytes(COLUMNS, long)
    assert read_rows(written, COLUMNS, 500, "t") == long
    found = pq.ParquetFile(io.BytesIO(written)).metadata
    groups = [found.row_group(number) for number in range(found.num_row_groups)]
    assert len(groups) > 3
    assert max(group.total_byte_size for group in groups) < ROW_GROUP_BYTES_MAX
    assert sum(group.total_byte_size for group in groups) / len(groups) > ROW_GROUP_BYTES / 2


def parquet(table: Any, **options: Any) -> bytes:
    """Write a table of pyarrow's in the form of R-09, but for the options."""
    sink = io.BytesIO()
    settings = {"compression": "none", "use_dictionary": False, "write_statistics": False, "store_schema": False}
    pq.write_table(table, sink, **(settings | options))
    return sink.getvalue()


@pytest.mark.parametrize(("count", "group"), [(ROW_GROUP_ROWS_MAX + 1, 1 << 20), (ROW_GROUP_BYTES_MAX // 256, 1 << 15)])
def test_larger_row_groups_are_refused(count: int, group: int) -> None:
    """R-09: by rows and by bytes; the same rows in more row groups are read."""
    text = "x" * (256 if group < ROW_GROUP_ROWS_MAX else 0)
    table = pa.table({"name": pa.repeat(text, count), "number": pa.array(range(count), pa.int64())})
    with pytest.raises(MalformedError, match=r"a row group of [0-9]+ rows and [0-9]+ bytes"):
        open_table(io.BytesIO(parquet(table, row_group_size=group)), COLUMNS[:2], count, "t")
    small = parquet(table, row_group_size=group // 64)
    assert sum(row["number"] for row in open_table(io.BytesIO(small), COLUMNS[:2], count, "t")) == sum(range(count))


def test_a_dictionary_that_the_footer_hides_is_refused() -> None:
    """R-09: 4 KiB that decode to 4 MiB, a page of a dictionary before one of indices; the footer says neither."""
    data = parquet(pa.table({"name": ["x" * 1_000] * 4_000}), use_dictionary=True)
    assert len(data) < 4_000
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    footer = data[start:-8].replace(b"\x19\x35\x00\x06\x10", b"\x19\x35\x00\x06\x00")
    footer, count = re.subn(rb"\x26..\x26\x08\x29", b"\x26\x08\x49", footer, flags=re.DOTALL)
    changed = data[:start] + footer + len(footer).to_bytes(4, "little") + b"PAR1"
    assert (count, pq.ParquetFile(io.BytesIO(changed)).read().num_rows) == (1, 4_000)
    with pytest.raises(MalformedError, match="a page of other than plain values"):
        read_rows(changed, COLUMNS[:1], 4_000, "t")


def test_pages_are_few() -> None:
    """R-09: the headers of pages are read in Python, so a column of a row group has no thousands of them."""
    for count in (256, 257):
        table = pa.table({"number": pa.array(range(count), pa.int64())})
        data = parquet(table, data_page_size=1, write_batch_size=1)
        if count > 256:
            with pytest.raises(MalformedError, match="more than 256 pages"):
                read_rows(data, COLUMNS[1:2], count, "t")
        else:
            assert [row["number"] for row in read_rows(data, COLUMNS[1:2], count, "t")] == list(range(count))


def test_a_row_of_more_than_any_journal_has_is_refused_before_it_is_decoded() -> None:
    large = [*rows(3), {**rows(1)[0], "name": "x" * (ROW_BYTES_MAX + 1)}]
    found = iter(open_table(io.BytesIO(table_bytes(COLUMNS, large)), COLUMNS, 4, "t"))
    assert [next(found) for _ in range(3)] == rows(3)
    with pytest.raises(MalformedError, match=rf"a row of {ROW_BYTES_MAX // 100}[0-9]{{2}} bytes"):
        next(found)


def test_memory_stays_near_one_row_group(tmp_path: Path) -> None:
    """Of 80 MiB that are written and read no more than a row group is held at a time, by Python and by pyarrow."""
    columns = COLUMNS[:2]
    with (tmp_path / "t.parquet").open("w+b") as file:
        some = ({"name": f"{at:04000}", "number": at} for at in range(20_000))
        assert peak_bytes(lambda: write_table(file, columns, some)) < 2 * ROW_GROUP_BYTES_MAX
        assert file.tell() > 9 * ROW_GROUP_BYTES_MAX
        table = open_table(file, columns, 20_000, "t")
        assert peak_bytes(lambda: deque(table, maxlen=0)) < 2 * ROW_GROUP_BYTES_MAX


def test_columns_without_values_take_no_memory() -> None:
    """A missing value takes nothing in the file: of many columns fewer rows are decoded at a time."""
    names = [f"o{number}" for number in range(1_000)]
    data = parquet(pa.table([pa.nulls(BATCH_ROWS, pa.float64())] * len(names), names))
    table = open_table(io.BytesIO(data), [(name, "float64") for name in names], BATCH_ROWS, "t")
    assert len(data) < 1 << 18
    assert peak_bytes(lambda: next(iter(table))) < 2 * ROW_GROUP_BYTES_MAX
    assert next(iter(table)) == dict.fromkeys(names)


def peak_bytes(action: Callable[[], Any]) -> int:
    """Return how much memory an action had at most, of Python's and of pyarrow's."""
    usual, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        action()
        return int(pool.max_memory()) + tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(usual)


@pytest.mark.parametrize(("kind", "value"), [(12, b"\x11\x00"), (12, b"\x00"), (9, b"\x0c"), (8, b"\x01x")])
def test_what_nobody_looks_at_in_a_footer_takes_no_memory(kind: int, value: bytes) -> None:
    """Structs, lists and texts are gone through and not kept; each would take some hundred bytes for two."""
    data = table_bytes(COLUMNS, rows(3))
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    values = bytes([0xF0 | kind]) + varint(50_000) + value * 50_000
    footer = data[start:-9] + b"\x09" + varint(120) + values + b"\x00"
    changed = data[:start] + footer + len(footer).to_bytes(4, "little") + b"PAR1"
    assert peak_bytes(lambda: open_table(io.BytesIO(changed), COLUMNS, 3, "t")) < 1 << 20
    assert read_rows(changed, COLUMNS, 3, "t") == rows(3)


def varint(value: int) -> bytes:
    """Return a number as Thrift's compact protocol writes it."""
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


def test_what_is_no_such_table_is_refused_before_a_value_is_decoded() -> None:
    """K-05: other columns, more rows than there can be, and bytes that are no table at all."""
    written = table_bytes(COLUMNS, rows(9))
    for data, columns, most in ((written, COLUMNS, 8), (written, COLUMNS[:3], 9), (b"PAR1", COLUMNS, 9)):
        with pytest.raises(MalformedError):
            open_table(io.BytesIO(data), columns, most, "t")


def test_damage_in_the_middle_is_words_and_not_a_crash() -> None:
    """K-05: a table whose footer is sound and whose pages are not is refused while it is read, if at all."""
    written = table_bytes(COLUMNS, rows(500))
    for at in range(4, len(written) // 2, 97):
        damaged = bytearray(written)
        damaged[at] ^= 0xFF
        with suppress(MalformedError):
            assert len(read_rows(bytes(damaged), COLUMNS, 500, "t")) == 500


def column_footer(data: bytes, name: bytes) -> int:
    """Return where in a table's footer the codec of a column stands, zigzag in one byte."""
    before = bytes([len(name)]) + name + b"\x15"
    assert data.count(before + b"\x00\x16") == 1
    return data.index(before + b"\x00\x16") + len(before)


def test_a_footer_is_judged_before_pyarrow_aborts_over_it() -> None:
    """A codec that does not exist ends the process within pyarrow; a damaged footer must be words."""
    data = table_bytes(COLUMNS, rows(20))
    at = column_footer(data, b"number")
    for codec, words in ((b"\x7e", "codec 63"), (b"\x0c", "codec 6"), (b"\x01", "codec -1")):
        with pytest.raises(MalformedError, match=words):
            read_rows(data[:at] + codec + data[at + 1 :], COLUMNS, 20, "x")
    values = data[:at] + b"\x00\x16\x26" + data[at + 3 :]
    with pytest.raises(MalformedError, match="another number of values"):
        read_rows(values, COLUMNS, 20, "x")
    assert len(read_rows(data, COLUMNS, 20, "x")) == 20


def test_every_flipped_bit_of_a_footer_is_a_table_or_words() -> None:
    data = table_bytes(COLUMNS, rows(20))
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    refused = 0
    for position in range(start, len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            try:
                read_rows(bytes(changed), COLUMNS, 20, "x")
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
        (b"\x36\x02\x06\x02\x02\x00", "field 1 twice or out of order"),
        (b"\x49\xfc\x28" + b"\x36\x00\x00" * 40 + b"\x00", "more structs than"),
        (b"\x00x", "bytes behind"),
        (b"\x00", "cannot be read"),
        (bytes((1 << 20) + 1), "at most 1048576"),
    ],
)
def test_footers_that_are_none(footer: bytes, words: str) -> None:
    data = b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1"
    with pytest.raises(MalformedError, match=words):
        read_rows(data, COLUMNS, 20, "x")

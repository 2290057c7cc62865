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

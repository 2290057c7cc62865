"""The columns of the record table."""

from __future__ import annotations

from builders import History, protocol

from capsule.core.protocol_checks import RESERVED_COLUMNS
from capsule.core.table import FIXED_COLUMNS, table_columns, table_rows


def test_fixed_columns_come_first_and_cannot_be_observed() -> None:
    """R-09: every row says what it is of before what was observed, and no observation can take such a name."""
    plan = protocol()
    columns = table_columns(plan.observations)
    assert tuple(columns[: len(FIXED_COLUMNS)]) == FIXED_COLUMNS
    assert columns[len(FIXED_COLUMNS) :] == [("seconds", "float64"), ("total", "uint64"), ("note", "text")]
    assert {name for name, _ in FIXED_COLUMNS} < RESERVED_COLUMNS


def test_rows_have_the_columns() -> None:
    """R-09: every row of the table has every column, in order."""
    history = History().opened()
    history.attempt(0)
    history.attempt(1, pilot=True)
    names = [name for name, _ in table_columns(history.manifest.protocol.observations)]
    rows = list(table_rows(history.manifest, history.cells, history.account, history.read_journals()))
    assert len(rows) == 32
    assert all(list(row) == names for row in rows)


def test_the_table_does_not_depend_on_the_order_in_which_journals_were_read() -> None:
    """R-09: rows that are not final stand in the order of their attempts."""
    history = History().opened()
    history.lose(0, rows=2)
    history.lose(0, rows=3)
    journals = history.read_journals()
    backwards = dict(reversed(journals.items()))
    one, other = (list(table_rows(history.manifest, history.cells, history.account, j)) for j in (journals, backwards))
    assert one == other
    assert [row["attempt"] for row in one[24:]] == ["a000001"] * 2 + ["a000002"] * 3

"""Tables as bytes and as lists, for tests that change one and seal it again."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any

from capsule.archive.tables import Columns, open_table, write_table


def table_bytes(columns: Columns, rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Return the Parquet file of some rows."""
    file = io.BytesIO()
    write_table(file, columns, rows)
    return file.getvalue()


def read_rows(data: bytes, columns: Columns, rows_max: int, where: str) -> list[dict[str, Any]]:
    """Return all rows of a Parquet file, free to be changed; raises `MalformedError`."""
    return list(open_table(io.BytesIO(data), columns, rows_max, where))

"""The tables of a capsule as Parquet: written with every float's bits, read back as from a stranger.

Columns are plain and uncompressed (the container compresses), so a reader can bound what it will decode from the file's
size. pyarrow is imported on use: only commands that read or write records pay for it.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from capsule.archive.parquet_footer import SIZE_MAX, check_footer
from capsule.core.errors import MalformedError
from capsule.core.record import float_bits, from_float_bits

ROW_GROUP_ROWS = 65_536
BATCH_ROWS = 4_096
"""Rows of a large table that are held at a time."""
FLOAT_BYTES = {"float64": 8, "float32": 4, "float16": 2}


def write_table(columns: Sequence[tuple[str, str]], rows: Iterable[dict[str, Any]]) -> bytes:
    """Return the Parquet bytes of `rows`, whose values are canonical scalars or None, in the order of `columns`.

    The rows of one row group are held at a time.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    left = iter(rows)
    listed = list(islice(left, ROW_GROUP_ROWS))
    schema = pa.schema([pa.field(name, _arrow_type(pa, kind)) for name, kind in columns])
    sink = io.BytesIO()
    with pq.ParquetWriter(
        sink,
        schema,
        compression="none",
        use_dictionary=False,
        write_statistics=False,
        store_schema=False,
        version="2.6",
    ) as writer:
        while True:
            arrays = [_array(pa, kind, [row[name] for row in listed]) for name, kind in columns]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema), row_group_size=ROW_GROUP_ROWS)
            if not (listed := list(islice(left, ROW_GROUP_ROWS))):
                break
    return sink.getvalue()


def read_table(data: bytes, columns: Sequence[tuple[str, str]], rows_max: int, where: str) -> list[dict[str, Any]]:
    """Read a table that must have exactly `columns` and at most `rows_max` rows, as canonical scalars.

    The footer is checked before anything is decoded: columns, rows, compression and sizes.

    Raises:
        MalformedError: the bytes are not such a table.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        check_footer(data, [name for name, _ in columns], rows_max)
        file = pq.ParquetFile(io.BytesIO(data), thrift_string_size_limit=SIZE_MAX, thrift_container_size_limit=SIZE_MAX)
        _check_schema(pa, file, columns, where)
        table = file.read(use_threads=False)
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError, RuntimeError) as error:
        raise _no_table(error, where) from error
    return list(_rows(pa, table, columns))


def scan_table(data: bytes, columns: Sequence[tuple[str, str]], rows_max: int, where: str) -> Iterator[dict[str, Any]]:
    """Check the footer as `read_table` does, and return an iterator that decodes a few thousand rows at a time.

    Raises:
        MalformedError: the bytes are not such a table; of values, only while iterating.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        check_footer(data, [name for name, _ in columns], rows_max)
        file = pq.ParquetFile(io.BytesIO(data), thrift_string_size_limit=SIZE_MAX, thrift_container_size_limit=SIZE_MAX)
        _check_schema(pa, file, columns, where)
    except (pa.ArrowException, OSError, ValueError, RuntimeError) as error:
        raise _no_table(error, where) from error
    return _scanned(pa, file, columns, where)


def _scanned(pa: Any, file: Any, columns: Sequence[tuple[str, str]], where: str) -> Iterator[dict[str, Any]]:
    try:
        for batch in file.iter_batches(batch_size=BATCH_ROWS, use_threads=False):
            batch.validate(full=True)
            yield from _rows(pa, pa.Table.from_batches([batch]), columns)
    except (pa.ArrowException, OSError, ValueError, RuntimeError) as error:
        raise _no_table(error, where) from error


def _no_table(error: Exception, where: str) -> MalformedError:
    return MalformedError(f"{where}: expected a Parquet table, found: {str(error).splitlines()[0][:200]}")


def _rows(pa: Any, table: Any, columns: Sequence[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    values = {name: _scalars(pa, kind, table.column(name)) for name, kind in columns}
    for row in zip(*values.values(), strict=True):
        yield dict(zip(values, row, strict=True))


def _check_schema(pa: Any, file: Any, columns: Sequence[tuple[str, str]], where: str) -> None:
    schema = pa.schema([pa.field(name, _arrow_type(pa, kind)) for name, kind in columns])
    if not file.schema_arrow.equals(schema):
        raise MalformedError(f"{where}: expected the frozen columns, found {', '.join(file.schema_arrow.names)[:200]}")


def _arrow_type(pa: Any, kind: str) -> Any:
    types = {
        "text": pa.string, "bool": pa.bool_, "int64": pa.int64, "uint64": pa.uint64, "float64": pa.float64,
        "float32": pa.float32, "float16": pa.float16,
    }  # fmt: skip
    return types[kind]()


def _array(pa: Any, kind: str, values: Sequence[Any]) -> Any:
    if kind in FLOAT_BYTES:
        bits = b"".join(bytes(FLOAT_BYTES[kind]) if value is None else float_bits(value, kind) for value in values)
        valid = pa.array([value is not None for value in values], pa.bool_())
        validity = valid.buffers()[1] if None in values else None
        return pa.Array.from_buffers(_arrow_type(pa, kind), len(values), [validity, pa.py_buffer(bits)])
    if kind in ("int64", "uint64"):
        values = [None if value is None else int(value) for value in values]
    return pa.array(values, _arrow_type(pa, kind))


def _scalars(pa: Any, kind: str, column: Any) -> list[Any]:
    array = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], _arrow_type(pa, kind))
    if kind not in FLOAT_BYTES:
        values = array.to_pylist()
        if kind in ("int64", "uint64"):
            return [value if value is None or abs(value) < 2**53 else str(value) for value in values]
        return list(values)
    width = FLOAT_BYTES[kind]
    bits = array.buffers()[1].to_pybytes() if len(array) else b""
    valid = array.is_valid().to_pylist()
    start = array.offset
    places = range(start * width, (start + len(array)) * width, width)
    return [from_float_bits(bits[at : at + width], kind) if ok else None for at, ok in zip(places, valid, strict=True)]

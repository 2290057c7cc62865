"""The tables of a capsule as Parquet: written with every float's bits, read back as from a stranger.

Columns are plain and uncompressed (the container compresses), so a reader can bound what it will decode from the file's
size. A table is never held whole: of one that is written a row group, of one that is read a row group and a few rows.
pyarrow is imported on use: only commands that read or write records pay for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

from capsule.archive.parquet_footer import ROW_GROUP_BYTES_MAX, ROW_GROUP_ROWS_MAX, SIZE_MAX, check_footer, check_pages
from capsule.core.errors import MalformedError
from capsule.core.record import float_bits, from_float_bits

ROW_GROUP_BYTES = ROW_GROUP_BYTES_MAX // 2
"""About as many are written into a row group; the other half is for a last batch of long texts, and for headers."""
BATCH_ROWS = 4_096
BATCH_BYTES = ROW_GROUP_BYTES // 2
"""Rows, and bytes at most of their values unless one row has more, that are written at a time."""
ROW_BYTES_MAX = 5 << 18
"""Bytes of a row that is read, a quarter more than a line of a journal has, and about as many are decoded at a time."""
LIST_MAX = 1 << 16
"""Entries of a list of a footer, such as its columns or row groups; room is made for them before they are read."""
FLOAT_BYTES = {"float64": 8, "float32": 4, "float16": 2}
VALUE_BYTES = 8
"""What a value other than text has at most, and more than the length of a text."""
CHARACTER_BYTES = 4

Columns = Sequence[tuple[str, str]]
"""Name and type of every column."""


def write_table(file: BinaryIO, columns: Columns, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write `rows`, whose values are canonical scalars or None, to `file` as Parquet, in the order of `columns`.

    The rows of one row group are held at a time.

    Raises:
        OSError: the file cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = _schema(pa, columns)
    with pq.ParquetWriter(
        file,
        schema,
        compression="none",
        use_dictionary=False,
        write_statistics=False,
        store_schema=False,
        version="2.6",
    ) as writer:
        group: list[Any] = []
        for listed in _batches(columns, rows):
            arrays = [_array(pa, kind, [row[name] for row in listed]) for name, kind in columns]
            batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
            if group and not _fits([*group, batch]):
                writer.write_table(pa.Table.from_batches(group), row_group_size=ROW_GROUP_ROWS_MAX)
                group = []
            group.append(batch)
        writer.write_table(pa.Table.from_batches(group, schema=schema), row_group_size=ROW_GROUP_ROWS_MAX)


def _batches(columns: Columns, rows: Iterable[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """Yield the rows in lists that are bounded by number and by an upper estimate of bytes."""
    texts = [name for name, kind in columns if kind == "text"]
    batch: list[Mapping[str, Any]] = []
    size = 0
    for row in rows:
        row_size = VALUE_BYTES * len(columns) + CHARACTER_BYTES * sum(len(row[name] or "") for name in texts)
        if batch and (len(batch) == BATCH_ROWS or size + row_size > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(row)
        size += row_size
    if batch:
        yield batch


def _fits(batches: Sequence[Any]) -> bool:
    """Whether batches may share a row group."""
    rows = sum(int(batch.num_rows) for batch in batches)
    size = sum(int(batch.nbytes) for batch in batches)
    return rows <= ROW_GROUP_ROWS_MAX and size <= ROW_GROUP_BYTES


def open_table(file: BinaryIO, columns: Columns, rows_max: int, where: str) -> Table:
    """Open a table that must have exactly `columns` and at most `rows_max` rows; `file` can be read at any place.

    The footer is checked before anything is decoded: columns, rows, compression and sizes.

    Raises:
        MalformedError: the bytes are not such a table.
    """
    return Table(file, columns, rows_max, where)


class Table:
    """A table's rows as canonical scalars, which can be gone through again; `len` is what its footer declares.

    Going through them reads one row group at a time, decodes a few thousand rows, and raises `MalformedError` where
    values are none.
    """

    def __init__(self, file: BinaryIO, columns: Columns, rows_max: int, where: str) -> None:
        import pyarrow as pa

        self._file = file
        self._columns = columns
        self._where = where
        try:
            self._groups = check_footer(file, [name for name, _ in columns], rows_max)
            self._count = sum(group.rows for group in self._groups)
            found = self._opened().schema_arrow
        except (pa.ArrowException, OSError, ValueError, RuntimeError) as error:
            raise self._no_table(error) from error
        if not found.equals(_schema(pa, columns)):
            raise MalformedError(f"{where}: expected the frozen columns, found {', '.join(found.names)[:200]}")

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        import pyarrow as pa

        left = self._count
        # A value that is missing takes nothing in the file and as much as any other when it is decoded.
        rows_max = 1 + ROW_BYTES_MAX // (VALUE_BYTES * len(self._columns))
        try:
            file = self._opened()
            for number, group in enumerate(self._groups):  # one by one: a batch of several row groups holds all of them
                check_pages(self._file, group)
                rows = min(BATCH_ROWS, rows_max, 1 + group.rows * ROW_BYTES_MAX // max(1, group.size))
                for batch in file.iter_batches(batch_size=rows, row_groups=[number], use_threads=False):
                    batch.validate(full=True)
                    left -= batch.num_rows
                    for part in _parts(batch):
                        yield from self._rows(part)
        except (pa.ArrowException, OSError, ValueError, RuntimeError) as error:
            raise self._no_table(error) from error
        if left:
            raise self._no_table(ValueError(f"{self._count - left} rows, of which its footer declares {self._count}"))

    def _opened(self) -> Any:
        import pyarrow.parquet as pq

        # No buffer: a column of a row group is read in one, which the footer's bounds allow, and none of it copied.
        return pq.ParquetFile(
            self._file, pre_buffer=False, thrift_string_size_limit=SIZE_MAX, thrift_container_size_limit=LIST_MAX
        )

    def _rows(self, batch: Any) -> Iterator[dict[str, Any]]:
        names = [name for name, _ in self._columns]
        values = [_scalars(kind, batch.column(place)) for place, (_, kind) in enumerate(self._columns)]
        for row in zip(*values, strict=True):
            yield dict(zip(names, row, strict=True))

    def _no_table(self, error: Exception) -> MalformedError:
        words = str(error).splitlines() or [type(error).__name__]
        return MalformedError(f"{self._where}: expected a Parquet table, found: {words[0][:200]}")


def _parts(batch: Any) -> Iterator[Any]:
    """Halve a batch until its parts are small, for text takes up to four times as many bytes when it is decoded."""
    if batch.nbytes <= ROW_BYTES_MAX:
        yield batch
        return
    if batch.num_rows == 1:
        raise ValueError(f"a row of {batch.nbytes} bytes, of which at most {ROW_BYTES_MAX} are read")
    half = batch.num_rows // 2
    yield from _parts(batch.slice(0, half))
    yield from _parts(batch.slice(half))


def _schema(pa: Any, columns: Columns) -> Any:
    return pa.schema([pa.field(name, _arrow_type(pa, kind)) for name, kind in columns])


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


def _scalars(kind: str, array: Any) -> list[Any]:
    if kind not in FLOAT_BYTES:
        values = array.to_pylist()
        if kind in ("int64", "uint64"):
            return [value if value is None or abs(value) < 2**53 else str(value) for value in values]
        return list(values)
    width = FLOAT_BYTES[kind]
    bits = array.buffers()[1].slice(array.offset * width, len(array) * width).to_pybytes()
    places = range(0, len(bits), width)
    valid = array.is_valid().to_pylist()
    return [from_float_bits(bits[at : at + width], kind) if ok else None for at, ok in zip(places, valid, strict=True)]

"""Records: what one process observed, read from its journal and typed by the frozen columns.

A journal is the bytes that the trial wrote: one JSON object a line. A row names its cell and its observations; an
error row names its cell and the error; the end record says that the process reached its end. Values are kept as
canonical scalars, so that every float keeps its bits: finite floats as numbers, `-0`, `NaN`, `NaN:<bits>`, `Infinity`,
`-Infinity` and integers from 2^53 as strings, by the column's declared type.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, NoReturn

from capsule.core.canonical import INTEGER_LIMIT, Refusal, finite_float, refuse_depth
from capsule.core.errors import MalformedError
from capsule.core.lines import LINE_BYTES_MAX, Blocks, Content
from capsule.core.plan import Names
from capsule.core.protocol import Observation

Scalar = bool | int | float | str
"""A value in canonical form."""

FAULTS_MAX = 100
"""Faults that are kept in words."""

FAULTS_READ_MAX = 10_000
"""Faults after which a journal is not read on."""

TEXT_MAX = 10_000

_FLOAT = {"float64": ("<d", 11, 52), "float32": ("<f", 8, 23), "float16": ("<e", 5, 10)}
_BLANK_LINES = re.compile(rb"(?:[ \t\r\x0b\x0c]*+\n)++")
_INTEGER_TEXT = re.compile(r"-?[0-9]{1,20}")
_INTEGER = {"int64": (-(2**63), 2**63 - 1), "uint64": (0, 2**64 - 1)}


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row of a journal: its cell, its values in canonical form, or the error that took their place."""

    cell: str
    values: Mapping[str, Scalar | None]
    error: str | None = None


@dataclass
class Journal:
    """A journal read: rows by cell in the order written, whether the end was reached, and what is wrong with it."""

    rows: dict[str, RawRow] = field(default_factory=dict)
    ended: bool = False
    torn: int = 0
    faults: list[str] = field(default_factory=list)
    fault_count: int = 0

    def fault(self, words: str) -> None:
        """Count a fault and keep the first hundred."""
        self.fault_count += 1
        if len(self.faults) < FAULTS_MAX:
            self.faults.append(words)


def read_journal(content: Content, columns: Sequence[Observation], cells: Collection[str]) -> Journal:
    """Read a journal against the frozen columns and the cells planned for its process.

    A last line without newline is torn: it is counted and not read. Faulty lines are named and never become rows; of
    two rows for one cell neither counts.
    """
    journal = Journal()
    planned = cells if isinstance(cells, Names) else set(cells)
    twice: set[str] = set()
    blocks = Blocks(content)
    for number, line in _filled_lines(blocks):
        if journal.fault_count >= FAULTS_READ_MAX:
            break
        try:
            item = _object(line)
            if journal.ended:
                raise Refusal("expected nothing after the end record, found another line")
            if item.get("end") is True and "cell" not in item:
                journal.ended = True
                continue
            row = _row(item, columns, planned)
        except Refusal as refusal:
            journal.fault(f"line {number}: {refusal}")
            continue
        if row.cell in journal.rows or row.cell in twice:
            journal.fault(f"line {number}: expected one row for cell {row.cell}, found another")
            journal.rows.pop(row.cell, None)
            twice.add(row.cell)
        else:
            journal.rows[row.cell] = row
    journal.torn = blocks.torn
    return journal


def _filled_lines(blocks: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield number and bytes of each whole line that is not blank; blank ones, however many, take little time."""
    number = 0
    for block in blocks:
        start = 0
        while (end := block.find(b"\n", start)) >= 0:
            number += 1
            blank = _BLANK_LINES.match(block, start)
            if blank:
                number += block.count(b"\n", end + 1, blank.end())
                start = blank.end()
            else:
                yield number, block[start:end]
                start = end + 1


def _object(line: bytes) -> dict[str, Any]:
    if len(line) > LINE_BYTES_MAX:
        raise Refusal(f"expected at most {LINE_BYTES_MAX} bytes, found more")
    try:
        refuse_depth(line, "a record")
        text = line.decode("utf-8")
        item = json.loads(text, object_pairs_hook=_unique, parse_int=_integer, parse_float=finite_float)
    except MalformedError as error:
        raise Refusal("expected a flat object, found deep nesting") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise Refusal(f"expected a JSON object, found {line[:40]!r}") from error
    if not isinstance(item, dict):
        raise Refusal(f"expected a JSON object, found {line[:40]!r}")
    if b"\\u" in line:
        _refuse_surrogates(item)
    return item


def _refuse_surrogates(item: dict[str, Any]) -> None:
    """Refuse half a character: no table, ledger or message could hold it."""
    try:
        json.dumps(item, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise Refusal("expected Unicode text, found a lone surrogate") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise Refusal("expected unique keys, found one twice")
    return dict(pairs)


def _integer(text: str) -> int | float:
    """Return an integer of JSON; `-0` keeps its sign, which only a float column can hold."""
    if len(text) > 40:
        raise Refusal(f"expected a number of at most 40 digits, found {len(text)}")
    return -0.0 if text == "-0" else int(text)


def _row(item: dict[str, Any], columns: Sequence[Observation], planned: Collection[str]) -> RawRow:
    cell = item.pop("cell", None)
    if cell is None and len(planned) == 1:
        (cell,) = planned
    if not isinstance(cell, str) or cell not in planned:
        raise Refusal(f"expected a cell planned for this process, found {str(cell)[:40]!r}")
    if "error" in item:
        error = item.pop("error")
        words = error if isinstance(error, str) else json.dumps(error, sort_keys=True)
        return RawRow(cell, {column.name: None for column in columns}, words[:TEXT_MAX])
    names = {column.name for column in columns}
    unknown = sorted(item.keys() - names)
    missing = sorted(column.name for column in columns if not column.optional and item.get(column.name) is None)
    if unknown or missing:
        found = f"{unknown[0][:40]!r}, which is not declared" if unknown else "none"
        wanted = f"a value for {missing[0]}" if missing else "declared observations"
        raise Refusal(f"cell {cell}: expected {wanted}, found {found}")
    values: dict[str, Scalar | None] = {}
    for column in columns:
        raw = item.pop(column.name, None)
        try:
            value = values[column.name] = None if raw is None else encode(raw, column.type)
            _check_range(column, value)
        except ValueError as error:
            raise Refusal(f"cell {cell}: {column.name}: {error}") from error
    return RawRow(cell, values)


def _check_range(column: Observation, value: Scalar | None) -> None:
    """Refuse a number outside the column's declared minimum and maximum; a NaN is in no order with them.

    A float is compared with the double nearest to the bound, so that 0.1 is at most 0.1; integers are compared exactly.
    """
    low, high = column.minimum, column.maximum
    if value is None or (low is None and high is None):
        return
    found = number(value)
    nearest: Callable[[str], float | Decimal] = float if column.type.startswith("float") else Decimal
    if (low is not None and found < nearest(low)) or (high is not None and found > nearest(high)):
        raise ValueError(f"expected a value from {low or '-Infinity'} to {high or 'Infinity'}, found {value}")


def encode(raw: Any, kind: str) -> Scalar:
    """Return the canonical form of a value for a column of type `kind`.

    Raises:
        ValueError: the value is not of that type; the words say what was expected.
    """
    if kind == "bool":
        return raw if isinstance(raw, bool) else _refuse("true or false", raw)
    if kind == "text":
        return (
            raw
            if isinstance(raw, str) and len(raw) <= TEXT_MAX
            else _refuse(f"text of at most {TEXT_MAX} characters", raw)
        )
    if kind in _INTEGER:
        low, high = _INTEGER[kind]
        if isinstance(raw, str) and _INTEGER_TEXT.fullmatch(raw):
            raw = int(raw)
        if not isinstance(raw, int) or isinstance(raw, bool) or not low <= raw <= high:
            _refuse(f"an {kind}", raw)
        return raw if abs(raw) < INTEGER_LIMIT else str(raw)
    return _encode_float(raw, kind)


def _encode_float(raw: Any, kind: str) -> Scalar:
    layout = _FLOAT[kind][0]
    if isinstance(raw, str):
        if raw.startswith("NaN:"):
            return _nan_text(raw, kind)
        names = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf, "-0": -0.0}
        if raw not in names:
            _refuse(f"a {kind}", raw)
        raw = names[raw]
    if isinstance(raw, bool) or not isinstance(raw, int | float):
        _refuse(f"a {kind}", raw)
    try:
        value = struct.unpack(layout, struct.pack(layout, raw))[0]
    except (OverflowError, struct.error) as error:
        raise ValueError(f"expected a {kind}, found {str(raw)[:40]}, which it cannot hold") from error
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    if value == 0:
        return "-0" if math.copysign(1, value) < 0 else 0
    return int(value) if value.is_integer() and abs(value) < INTEGER_LIMIT else float(value)


def _nan_text(text: str, kind: str) -> str:
    """Keep a NaN's bits; a wider NaN keeps its sign and the leading bits of its payload, quiet if those are zero."""
    _, exponent_bits, mantissa_bits = _FLOAT[kind]
    width = 1 + exponent_bits + mantissa_bits
    digits = text[4:]
    if len(digits) not in (width // 4, 16) or any(digit not in "0123456789abcdef" for digit in digits):
        _refuse(f"NaN: and the {width // 4} hexadecimal digits of a {kind}", text)
    bits = int(digits, 16)
    source = next(shape for shape in _FLOAT.values() if 1 + shape[1] + shape[2] == len(digits) * 4)
    payload = bits & (1 << source[2]) - 1
    if not payload or bits >> source[2] & (1 << source[1]) - 1 != (1 << source[1]) - 1:
        _refuse("the bits of a NaN", text)
    payload = payload >> source[2] - mantissa_bits or 1 << mantissa_bits - 1
    sign = bits >> len(digits) * 4 - 1
    narrowed = sign << width - 1 | ((1 << exponent_bits) - 1) << mantissa_bits | payload
    quiet = ((1 << exponent_bits) - 1) << mantissa_bits | 1 << mantissa_bits - 1
    return "NaN" if narrowed == quiet else f"NaN:{narrowed:0{width // 4}x}"


def _refuse(expected: str, raw: Any) -> NoReturn:
    raise ValueError(f"expected {expected}, found {str(raw)[:40]!r}")


def number(value: Scalar) -> float | int:
    """Return the number of a canonical value of a numeric or boolean column, for arithmetic and comparison."""
    if not isinstance(value, str):
        return value
    special = {"Infinity": math.inf, "-Infinity": -math.inf, "-0": -0.0}
    if value in special:
        return special[value]
    return math.nan if value.startswith("NaN") else int(value)


def float_bits(value: Scalar, kind: str) -> bytes:
    """Return the little-endian bits of a canonical value of a float column."""
    layout, exponent_bits, mantissa_bits = _FLOAT[kind]
    if isinstance(value, str) and value.startswith("NaN"):
        quiet = ((1 << exponent_bits) - 1) << mantissa_bits | 1 << mantissa_bits - 1
        bits = int(value[4:], 16) if value[3:] else quiet
        return bits.to_bytes(struct.calcsize(layout), "little")
    return struct.pack(layout, number(value))


def from_float_bits(bits: bytes, kind: str) -> Scalar:
    """Return the canonical value of little-endian float bits; the inverse of `float_bits`."""
    value = struct.unpack(_FLOAT[kind][0], bits)[0]
    if math.isnan(value):
        return _nan_text(f"NaN:{int.from_bytes(bits, 'little'):0{len(bits) * 2}x}", kind)
    return _encode_float(value, kind)

"""Records: every value keeps its bits, and a faulty line never becomes a row."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import replace
from typing import Any

import pytest
from builders import History, journal_bytes
from hypothesis import example, given, settings
from hypothesis import strategies as st

from capsule.core.progress import Process, outcome_of
from capsule.core.protocol import Observation, ReplayRule
from capsule.core.record import FAULTS_MAX, LINE_BYTES_MAX, encode, float_bits, from_float_bits, number, read_journal

WIDTHS = {"float64": 8, "float32": 4, "float16": 2}
LAYOUTS = {"float64": "<d", "float32": "<f", "float16": "<e"}


def column(name: str, kind: str, *, optional: bool = False) -> Observation:
    """Return a column of a type."""
    return Observation(name=name, type=kind, optional=optional, replay=ReplayRule(rule="exact"))  # type: ignore[arg-type]


COLUMNS = [column("x", "float64"), column("n", "uint64", optional=True), column("t", "text", optional=True)]


def bits_of(kind: str) -> st.SearchStrategy[bytes]:
    """Give any bits of a float type, the special ones often."""
    width = WIDTHS[kind] * 8
    mantissa = {64: 52, 32: 23, 16: 10}[width]
    ones = (1 << (width - 1 - mantissa)) - 1 << mantissa
    special = [0, 1 << width - 1, 1, (1 << mantissa) - 1, 1 << mantissa, ones, ones | 1 << width - 1, ones | 1,
               ones | 1 << mantissa - 1, ones | 1 << width - 1 | 5, (1 << width) - 1, ones - 1]  # fmt: skip
    numbers = st.sampled_from(special) | st.integers(0, (1 << width) - 1) | st.integers(0, 1023).map(lambda n: ones | n)
    return numbers.map(lambda number: number.to_bytes(width // 8, "little"))


@pytest.mark.parametrize("kind", WIDTHS)
@given(st.data())
@settings(max_examples=300)
def test_every_float_keeps_its_bits(kind: str, data: st.DataObject) -> None:
    """R-04 R-05: bits -> canonical value -> JSON -> canonical value -> bits is the identity, NaN payloads included."""
    bits = data.draw(bits_of(kind))
    value = from_float_bits(bits, kind)
    assert float_bits(value, kind) == bits
    written = json.loads(json.dumps(value))
    assert encode(written, kind) == value
    assert type(encode(written, kind)) is type(value)
    assert not isinstance(value, float) or math.isfinite(value)


@pytest.mark.parametrize(
    ("raw", "kind", "expected"),
    [
        (0.0, "float64", 0), (-0.0, "float64", "-0"), ("-0", "float16", "-0"), (1.0, "float64", 1),
        (5e-324, "float64", 5e-324), (1e-46, "float32", 0), (-1e-46, "float32", "-0"), (1.5, "float16", 1.5),
        (0.1, "float32", 0.10000000149011612), (2.0**53, "float64", 2.0**53), (2**53 - 1, "float64", 2**53 - 1),
        (65504, "float16", 65504), (math.nan, "float64", "NaN"), (-math.inf, "float32", "-Infinity"),
        ("Infinity", "float64", "Infinity"), ("NaN:7ff8000000000000", "float64", "NaN"),
        ("NaN:fff8000000000000", "float64", "NaN:fff8000000000000"), ("NaN:7ff0000000000001", "float32", "NaN"),
        ("NaN:fff0000000000001", "float32", "NaN:ffc00000"), ("NaN:7ff0000000000001", "float16", "NaN"),
        ("NaN:7ff4000000000000", "float32", "NaN:7fa00000"), ("NaN:7fc00001", "float32", "NaN:7fc00001"),
        (2**64 - 1, "uint64", "18446744073709551615"), ("18446744073709551615", "uint64", "18446744073709551615"),
        (2**53 - 1, "uint64", 2**53 - 1), (2**53, "uint64", "9007199254740992"), (0, "uint64", 0),
        (-(2**63), "int64", "-9223372036854775808"), ("-5", "int64", -5), (2**63 - 1, "int64", "9223372036854775807"),
        (True, "bool", True), ("", "text", ""), ("x" * 10_000, "text", "x" * 10_000),
    ],
)  # fmt: skip
def test_canonical_values(raw: Any, kind: str, expected: Any) -> None:
    """R-04 R-05 R-06: each value has one canonical form by the type of its column."""
    found = encode(raw, kind)
    assert (found, type(found)) == (expected, type(expected))
    assert encode(found, kind) == found


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (True, "float64"), ("1.5", "float64"), ("nan", "float64"), ("+0", "float64"), (None, "float64"),
        ([], "float64"),
        (1e39, "float32"), (65520, "float16"), (10**40, "float32"), (10**400, "float64"),
        ("NaN:", "float64"), ("NaN:7ff0000000000000", "float64"), ("NaN:3ff0000000000001", "float64"),
        ("NaN:7FF8000000000000", "float64"), ("NaN:7fc00000", "float64"), ("NaN:7e00", "float32"), ("NaN:0", "float16"),
        ("NaN:7ff80000000000000", "float64"), ("NaN:+ff8000000000000", "float64"),
        (-1, "uint64"), (2**64, "uint64"), (2**63, "int64"), (-(2**63) - 1, "int64"), (1.0, "int64"), (True, "uint64"),
        ("--5", "int64"), ("-", "int64"), ("", "uint64"), ("1e3", "int64"), ("²", "uint64"), ("٣", "int64"),
        ("99999999999999999999", "uint64"), ("0" * 30, "uint64"), (" 5", "int64"), (-0.0, "int64"),
        (1, "bool"), ("true", "bool"), (1, "text"), ("x" * 10_001, "text"), (None, "text"),
    ],
)  # fmt: skip
def test_values_of_another_type_are_refused(raw: Any, kind: str) -> None:
    """R-04 R-06: a value that its column cannot hold is refused in words; nothing is rounded to fit or guessed."""
    with pytest.raises(ValueError, match="expected"):
        encode(raw, kind)


@given(st.floats(width=32) | st.floats(width=16) | st.floats())
@example(-0.0)
def test_numbers_of_canonical_values(value: float) -> None:
    """R-04: for arithmetic a canonical value is the number that it stands for, sign of zero included."""
    found = number(encode(value, "float64"))
    assert struct.pack("<d", found) == struct.pack("<d", value) or (math.isnan(found) and math.isnan(value))


@given(st.integers(0, 2**64 - 1) | st.sampled_from([2**53 - 1, 2**53, 2**63, 2**64 - 1]))
def test_every_uint64_survives(value: int) -> None:
    """R-06: every unsigned integer of 64 bits is kept exactly."""
    assert number(encode(value, "uint64")) == value
    assert number(encode(str(value), "uint64")) == value


def rows_of(data: bytes, cells: tuple[str, ...] = ("c0", "c1")) -> dict[str, Any]:
    """Return the rows of a journal."""
    return read_journal(data, COLUMNS, cells).rows


def test_a_whole_journal() -> None:
    """R-01: rows name their cells and values, an error takes their place, the end record says that all is done."""
    data = b'{"cell":"c1","x":1.5,"n":7}\r\n\n{"cell":"c0","error":{"b":1,"a":"[["}}\n{"end":true}\n'
    journal = read_journal(data, COLUMNS, ["c0", "c1"])
    assert list(journal.rows) == ["c1", "c0"]
    assert journal.rows["c1"].values == {"x": 1.5, "n": 7, "t": None}
    assert journal.rows["c0"].error == '{"a": "[[", "b": 1}'
    assert journal.rows["c0"].values == {"x": None, "n": None, "t": None}
    assert (journal.ended, journal.torn, journal.faults, journal.fault_count) == (True, 0, [], 0)


def test_a_process_of_one_cell_need_not_name_it() -> None:
    """R-01: a row without a cell is that of the process's only cell, and of none where there are several."""
    assert list(rows_of(b'{"x":1}\n', ("c7",))) == ["c7"]
    assert rows_of(b'{"x":1}\n') == {}


@pytest.mark.parametrize("cut", range(1, 30))
def test_a_torn_last_line_is_counted_and_not_read(cut: int) -> None:
    """R-02: a line without its newline is torn, also when it happens to be whole JSON."""
    whole = b'{"cell":"c0","x":1}\n'
    torn = b'{"cell":"c1","x":25,"n":1}\n{}'[:cut]
    journal = read_journal(whole + torn, COLUMNS, ["c0", "c1"])
    assert journal.torn == len(torn.split(b"\n")[-1])
    assert list(journal.rows) == (["c0", "c1"] if b"\n" in torn else ["c0"])
    assert not journal.fault_count


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"[1]", "a JSON object"), (b"{", "a JSON object"), (b"\xff", "a JSON object"), (b"x", "a JSON object"),
        (b'{"cell":"c0","x":1,"x":2}', "unique keys"), (b'{"cell":"c9","x":1}', "planned for this process, found 'c9'"),
        (b'{"cell":1,"x":1}', "planned for this process"), (b'{"x":1}', "planned for this process, found 'None'"),
        (b'{"cell":"c0"}', "a value for x, found none"), (b'{"cell":"c0","x":null}', "a value for x, found none"),
        (b'{"cell":"c0","x":"1"}', "x: expected a float64"),
        (b'{"cell":"c0","x":1,"z":1}', "declared observations, found 'z'"),
        (b'{"cell":"c0","x":1e400}', "a double can hold, found 1e400"),
        (b'{"cell":"c0","x":1,"n":-0}', "n: expected an uint64"),
        (b'{"cell":"c0","x":1,"t":-0}', "t: expected text"),
        (b'{"cell":"c0","x":' + b"1" * 41 + b"}", "at most 40 digits"),
        (b'{"cell":"c0","x":' + b"[" * 100_000, "deep nesting"),
        (b'{"cell":"c0","x":1,"t":"\\ud800"}', "a lone surrogate"),
        (b'{"cell":"c0","error":"\\udc00"}', "a lone surrogate"),
        (b'{"cell":"c0","x":1,"\\udc00":1}', "a lone surrogate"),
        (b'{"end":true,"cell":"c0"}', "a value for x"), (b'{"end":1}', "planned for this process"),
        (b'{"cell":"c0","x":1,"t":"' + b"a" * LINE_BYTES_MAX + b'"}', "at most 1048576 bytes"),
        (b'{"cell":"c0","x":1,"t":"' + b"a" * 10_001 + b'"}', "at most 10000 characters"),
    ],
    ids=lambda value: value[:40].decode("latin-1") if isinstance(value, bytes) else "",
)  # fmt: skip
def test_faulty_lines_are_named_and_never_become_rows(line: bytes, words: str) -> None:
    """R-03: a line that is no record is a fault with its number, and the lines around it are read all the same."""
    journal = read_journal(b'{"cell":"c1","x":1}\n' + line + b"\n" + b'{"end":true}\n', COLUMNS, ["c0", "c1"])
    assert list(journal.rows) == ["c1"]
    assert journal.ended
    assert journal.fault_count == 1
    assert journal.faults[0].startswith("line 2: ")
    assert words in journal.faults[0]


def test_what_only_looks_faulty_is_read() -> None:
    """R-03 R-04: brackets in text, escapes of whole characters and a zero with a sign are data."""
    text = "[{" * 500
    found = rows_of(json.dumps({"cell": "c0", "x": 1, "t": text}).encode() + b"\n")
    assert found["c0"].values["t"] == text
    found = rows_of(b'{"cell":"c0","x":-0,"t":"\\ud83d\\ude00"}\n{"cell":"c1","x":NaN}\n')
    assert found["c0"].values == {"x": "-0", "n": None, "t": "😀"}
    assert found["c1"].values["x"] == "NaN"


def test_of_two_rows_for_a_cell_neither_counts() -> None:
    """R-03: nobody can choose the better of two rows: all rows of a cell that has several are void."""
    data = b'{"cell":"c0","x":1}\n{"cell":"c1","x":1}\n{"cell":"c0","x":2}\n{"cell":"c0","x":1}\n'
    journal = read_journal(data, COLUMNS, ["c0", "c1"])
    assert list(journal.rows) == ["c1"]
    assert journal.fault_count == 2


def test_faults_are_counted_beyond_those_kept() -> None:
    """R-03: a hundred faults are kept in words, all are counted."""
    journal = read_journal(b"x\n" * 1000, COLUMNS, ["c0"])
    assert (len(journal.faults), journal.fault_count) == (FAULTS_MAX, 1000)


@given(
    st.binary(max_size=200)
    | st.lists(st.sampled_from([b'{"cell":"c0","x":1}', b"{", b"\n", b'{"end":true}', b"\\"])).map(b"".join)
)
def test_any_bytes_are_read_without_an_error(data: bytes) -> None:
    """R-03: whatever a trial wrote, reading it gives rows of planned cells and faults, never an error."""
    journal = read_journal(data, COLUMNS, ["c0", "c1"])
    assert set(journal.rows) <= {"c0", "c1"}
    assert journal.torn == len(data.split(b"\n")[-1])


CELLS = ("c0", "c1")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (journal_bytes([{"cell": "c0", "x": 1}, {"cell": "c1", "x": 1}]), "completed"),
        (journal_bytes([{"cell": "c0", "x": 1}, {"cell": "c1", "error": "no"}]), "trial_error"),
        (journal_bytes([{"cell": "c0", "x": 1}]), "incomplete"),
        (journal_bytes([{"cell": "c0", "x": 1}, {"cell": "c1", "x": 1}], ended=False), "incomplete"),
        (journal_bytes([{"cell": "c0", "x": 1}, {"cell": "c1", "x": 1}]) + b"{", "incomplete"),
        (journal_bytes([{"cell": "c0", "x": 1}, {"cell": "c1", "x": "?"}]), "bad_records"),
        (journal_bytes([{"cell": "c0", "x": 1}] * 2 + [{"cell": "c1", "x": 1}]), "bad_records"),
        (b"", "incomplete"),
    ],
)
def test_outcome_of_a_process_that_exited_well(data: bytes, expected: str) -> None:
    """R-07: exit status 0 is a success only with the end record and a row for every planned cell, all without fault."""
    cells = tuple(replace(cell, cell=name) for cell, name in zip(History().cells, CELLS, strict=False))
    outcome, words = outcome_of(Process(0, cells), read_journal(data, COLUMNS, CELLS))
    assert outcome == expected
    assert words


def test_nothing_counts_after_the_end_record() -> None:
    """R-03: a row, or a second end record, after the end record is a fault: nobody who was planned wrote it."""
    column = Observation(name="x", type="float64", replay=ReplayRule(rule="exact"))
    data = b'{"cell":"c000000","x":1}\n{"end":true}\n{"end":true}\n{"cell":"c000001","x":1}\n'
    journal = read_journal(data, [column], ["c000000", "c000001"])
    assert list(journal.rows) == ["c000000"]
    assert journal.fault_count == 2


def test_a_value_outside_the_declared_range_is_no_row() -> None:
    """R-05: a number below the minimum or above the maximum is a fault; a NaN is in no order with them."""
    column = Observation(name="x", type="float64", minimum="0", maximum="0.1", replay=ReplayRule(rule="exact"))
    for raw, good in (
        (0, True),
        (0.05, True),
        (-1e-300, False),
        (0.1, True),
        (0.11, False),
        ("Infinity", False),
        ("NaN", True),
    ):
        journal = read_journal(json.dumps({"x": raw}).encode() + b"\n", [column], ["c000000"])
        assert bool(journal.rows) == good, raw
        assert bool(journal.fault_count) != good, raw


def test_a_journal_is_not_read_on_after_ten_thousand_faults() -> None:
    row = b'{"cell":"c000000","x":1.5}\n'
    for faulty, read in ((9_999, True), (10_001, False)):
        found = read_journal(b"x\n" * faulty + row, COLUMNS, ["c000000"])
        assert bool(found.rows) is read
        assert found.fault_count == min(faulty, 10_000)


def test_blank_lines_are_counted_and_cost_little() -> None:
    """Millions of them, as a few kilobytes of a capsule may declare, are passed over at once."""
    found = read_journal(b"\n \t\r\n" * 2_000_000 + b"x\n\n", COLUMNS, ["c000000"])
    assert found.faults == ["line 4000001: expected a JSON object, found b'x'"]

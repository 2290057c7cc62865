"""Canonical JSON: one byte string for a value, and a reader that accepts no other."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from capsule.core.canonical import (
    DEPTH_MAX,
    INTEGER_LIMIT,
    canonical,
    canonical_checked,
    canonical_line,
    iterate_lines,
    join_lines,
    parse,
    parse_lines,
    parse_strict,
    refuse_depth,
)
from capsule.core.errors import MalformedError

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
integers = st.integers(-INTEGER_LIMIT + 1, INTEGER_LIMIT - 1)
values = st.recursive(
    st.none() | st.booleans() | integers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)


@given(values)
@example({"\ufb33": 1, "\U0001f600": 2, "é": 3, "": -1})
def test_round_trip(value: Any) -> None:
    """M-01: a value's canonical bytes read back as that value, and give the same bytes again."""
    data = canonical(value)
    assert parse(data, "x") == value
    assert canonical(parse(data, "x")) == data


@given(values)
@example({"\ufb33": 1, "\U0001f600": 2})
@example("".join(map(chr, range(0x20))) + '"\\/\x7f\x80\u2028\uffff')
@example([(1, True), -0, None, INTEGER_LIMIT - 1])
def test_the_fast_way_spells_as_the_general_one(value: Any) -> None:
    assert canonical_checked(value) == canonical(value)


def spellings(value: Any) -> list[bytes]:
    """Write a value in other ways that a lenient reader takes for the same."""
    escaped = json.dumps(value, separators=(",", ":"), sort_keys=True)
    spaced = json.dumps(value, sort_keys=True, ensure_ascii=False)
    unsorted = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    plain = canonical(value)
    return [
        escaped.encode(), spaced.encode(), unsorted.encode(), b" " + plain, plain + b"\n", plain + b" ",
        b"\xef\xbb\xbf" + plain, plain + plain, plain.replace(b",", b", "), plain.replace(b'"', b'\\u0022'),
        plain.replace(b"-", b"- "), plain.replace(b"e", b"\\u0065"),
    ]  # fmt: skip


@given(values)
@example({"b": 1, "a": [True, "e/-", None]})
def test_every_other_spelling_is_refused(value: Any) -> None:
    """M-01: of all spellings of a value exactly the canonical bytes are read."""
    others = [data for data in spellings(value) if data != canonical(value) and lenient(data) in ([value], [])]
    assert others
    for data in others:
        with pytest.raises(MalformedError):
            parse(data, "x")


def lenient(data: bytes) -> list[Any]:
    """Return what a lenient reader takes the bytes for, if anything."""
    try:
        return [json.loads(data)]
    except ValueError:
        return []


@given(values, st.data())
@settings(max_examples=150)
def test_a_changed_byte_gives_another_value_or_none(value: Any, data: st.DataObject) -> None:
    """M-01: no two byte strings are read as the same value, so an identity names one value only."""
    original = canonical(value)
    at = data.draw(st.integers(0, len(original) - 1))
    changed = bytearray(original)
    changed[at] ^= data.draw(st.integers(1, 255))
    try:
        found = parse(bytes(changed), "x")
    except MalformedError:
        return
    assert canonical(found) == changed != original


def test_keys_are_in_the_order_of_utf_16() -> None:
    """M-01: keys are ordered by UTF-16 code units, in which a character beyond U+FFFF comes before U+FB33."""
    assert canonical({"\ufb33": 1, "\U0001f600": 2, "a": 3}) == '{"a":3,"\U0001f600":2,"\ufb33":1}'.encode()
    with pytest.raises(MalformedError, match="another spelling"):
        parse('{"a":3,"\ufb33":1,"\U0001f600":2}'.encode(), "x")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"a":1,"a":1}', "found 'a' twice"),
        (b'{"a":{"b":1,"c":2,"b":1}}', "found 'b' twice"),
        (b"NaN", "found NaN"),
        (b"-Infinity", "found -Infinity"),
        (b"1.0", "found the number 1.0"),
        (b"1e2", "found the number 1e2"),
        (b"9007199254740992", r"below 2\^53"),
        (b"-9007199254740992", r"below 2\^53"),
        (b"1" * 5000, r"below 2\^53"),
        (b"-0", "another spelling"),
        (b"01", "expected JSON"),
        (b"", "expected JSON"),
        (b"\x00", "expected JSON"),
        (b'"\\ud800"', "lone surrogate"),
        (b'{"\\udfff":1}', "lone surrogate"),
        (b'["\xed\xa0\x80"]', "expected UTF-8"),
        (b"\xff", "byte 0xff at 0"),
        (b"[1,]", "expected JSON"),
        (b"{} {}", "expected JSON"),
        (b"[" * 100_000, "at most 32 nested levels"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, "at most 32 nested levels"),
    ],
)
def test_refusals_name_the_source_and_what_was_found(data: bytes, words: str) -> None:
    """M-01: what strict JSON does not allow is refused in words, however deep or long it is."""
    with pytest.raises(MalformedError, match=words) as caught:
        parse(data, "some/file")
    assert str(caught.value).startswith("some/file: ")


@pytest.mark.parametrize("value", [INTEGER_LIMIT - 1, 1 - INTEGER_LIMIT, 0])
def test_integers_up_to_the_limit_are_read(value: int) -> None:
    """M-01: every integer below 2^53 in magnitude is a number that all readers agree on."""
    assert parse(str(value).encode(), "x") == value


def test_depth_is_bounded_by_brackets_that_nest_only() -> None:
    """M-01: brackets inside text do not count as nesting, and exactly 32 levels are allowed."""
    text = {"text": '[{"[' * 40 + "\\"}
    assert parse(canonical(text), "x") == text
    assert parse(b"[" * DEPTH_MAX + b"]" * DEPTH_MAX, "x")
    wide = [[[]] for _ in range(100)]
    assert parse(canonical(wide), "x") == wide
    with pytest.raises(MalformedError, match="nested levels"):
        parse(b"[" * (DEPTH_MAX + 1) + b"]" * (DEPTH_MAX + 1), "x")


def test_strict_floats_are_finite() -> None:
    """A strict reader that takes floats takes none that a double cannot hold."""
    assert parse_strict(b"[1.5,1e300,1]", "x", floats=True) == [1.5, 1e300, 1]
    with pytest.raises(MalformedError, match="a double can hold, found 1e400"):
        parse_strict(b"[1e400]", "x", floats=True)


@given(st.lists(values, max_size=5))
def test_lines_round_trip(items: list[Any]) -> None:
    """M-04: a list is its items' canonical bytes, each with one newline, and reads back as that list."""
    data = join_lines(items)
    assert data == b"".join(canonical_line(item) for item in items)
    assert parse_lines(data, "x") == items


@pytest.mark.parametrize(
    ("data", "words"),
    [(b"1\n2", "expected a newline"), (b"1\n\n2\n", "x:2: "), (b"1\r\n", "x:1: "), (b"1\n{}\n{ }\n", "x:3: ")],
)
def test_lines_in_another_form_are_refused(data: bytes, words: str) -> None:
    """M-04: a list without its last newline, with an empty line or with a line in another spelling is no list."""
    with pytest.raises(MalformedError, match=words):
        list(iterate_lines(data, "x"))


def test_values_are_bounded_before_they_are_built() -> None:
    """A capsule of kilobytes may declare 64 MiB of empty arrays, which would take gigabytes."""
    with pytest.raises(MalformedError, match="at most 2000000 commas"):
        parse(b"[" + b"[]," * 2_000_001 + b"[]]", "x")
    assert len(parse(b"[" + b"1," * 2_000 + b"1]", "x")) == 2_001


@pytest.mark.parametrize(
    ("data", "refused"),
    [
        (b"[" * 33 + b"]" * 33, True),
        (b"[" * 32 + b"]" * 32, False),
        (b'["' + b"[" * 99 + b'"]', False),
        (b'["\\"' + b"[" * 99 + b'"]', False),
        (b'["\\\\",' + b"[" * 32, True),
        (b'["' + b'\\"' * 500_000 + b"[" * 99, False),
        (b'["' + b"[" * 99 + b"\\", False),
        (b"[]" * 99, False),
        (b'{"a":' * 33, True),
    ],
)
def test_depth_is_counted_outside_of_strings_in_one_pass(data: bytes, refused: bool) -> None:
    try:
        refuse_depth(data, "x")
    except MalformedError:
        assert refused
    else:
        assert not refused

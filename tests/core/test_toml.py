"""Reading a protocol file: errors name file, line and key, in bounded time."""

from __future__ import annotations

import time
from typing import Any, get_args, get_type_hints

import pytest
from builders import PROTOCOL, edited, protocol
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.core import protocol as protocol_module
from capsule.core.errors import ProtocolError
from capsule.core.schema import DecimalScalar, DecimalText, Model, NonNegativeDecimal, PositiveDecimal
from capsule.core.toml import DECIMAL_KEYS, line_of, read_protocol


def complaint(data: bytes | str) -> str:
    """Return the message with which a protocol is refused."""
    with pytest.raises(ProtocolError) as caught:
        read_protocol(data.encode() if isinstance(data, str) else data, "p.toml")
    return str(caught.value)


def line(text: str, of: str = PROTOCOL) -> int:
    """Return the number of the only line that holds a text."""
    found = [number for number, content in enumerate(of.split("\n"), start=1) if text in content]
    assert len(found) == 1, found
    return found[0]


def test_the_builders_protocol_is_read() -> None:
    """P-01: a valid protocol is read whole, defaults filled in."""
    found = protocol()
    assert (found.name, [arm.name for arm in found.arms], found.design.blocks) == ("sums", ["loop", "builtin"], 1)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "p.toml:1: protocol: expected a protocol, found an empty file"),
        (b"# nothing\n\n", "p.toml:1: protocol: expected a protocol, found an empty file"),
        (b"\x7fELF\n\n\xff\xfe\x00", "p.toml:3: protocol: expected UTF-8 text, found byte 0xff"),
        (b"\x00\x01\x02", "p.toml:1: protocol: expected TOML"),
        (b"x = 1\ny = [1,\n", "p.toml:2: y: expected TOML"),
        (b"x = 1\ny 2\n", "p.toml:2: protocol: expected TOML"),
        (b"a = 1\n\nb = 2\na = 3\n", "p.toml:4: a: expected each key once, found it again"),
        (b"[a]\nb = 1\n[a]\n", "p.toml:3: a: expected each key once, found it again"),
        (b"a = 1\nx = { b = 1, b = 2 }\n", "p.toml:2: x: expected each key once, found it again"),
        (b"[[a]]\n[a]\n", "p.toml:2: a: expected each key once, found it again"),
        (b"a.b = 1\na = 2", "p.toml:2: a: expected each key once, found it again"),
        (b"a = 1\nb = " + b"[" * 5000 + b"]" * 5000, "p.toml:2: protocol: expected at most 16 levels, found more"),
        (b"a = 1\nb = " + b"[" * 40 + b"]" * 40, "p.toml:2: b: expected at most 16 levels, found more"),
        (b"a = 1\n" + b".".join([b"b"] * 40) + b" = 1", "p.toml:2: b: expected at most 16 levels, found more"),
        (b"a = 1\nb = " + b"9" * 5000 + b"\nc = 1", "p.toml:2: protocol: expected integers of 64 bits"),
        (b"a = 1\nb = 0x1" + b"0" * 20 + b"\n", "p.toml:2: b: expected an integer of 64 bits, found one of 81 bits"),
        (b"a = 1\n[b]\nc = -9223372036854775809\n", "p.toml:3: b.c: expected an integer of 64 bits"),
    ],
    ids=lambda value: repr(value[:30]) if isinstance(value, bytes) else "",
)
def test_what_is_no_protocol_at_all(data: bytes, words: str) -> None:
    """P-01: an empty, binary, broken, repetitive, deep or endless file is refused with its line and key."""
    assert complaint(data).startswith(words)


@pytest.mark.parametrize(
    ("before", "after", "at", "key", "words"),
    [
        ('title = "Is', 'titel = 1\ntitle = "Is', "titel", "titel", "unknown key"),
        ("order_seed = 7", "order_seed = 7\nretries = 3", "retries", "design.retries", "unknown key"),
        ('question = "Does sum take less time than a loop?"\n', "", "", "question", "expected this key, found none"),
        ('name = "loop"\n', "", "", "arms[0].name", "expected this key, found none"),
        ('name = "loop"', "name = 3", "name = 3", "arms[0].name", "expected a valid string, found 3"),
        ('title = "Is the builtin sum faster?"', "title = 1.5", "title = 1.5", "title", "string, found 1.5"),
        ("order_seed = 7", "order_seed = 7.5", "7.5", "design.order_seed", "expected a valid integer, found 7.5"),
        ("seeds = [5, 3, 4]", "seeds = [5, -3, 4]", "seeds", "design.seeds[1]", "a number greater than or equal to 0"),
        ("seeds = [5, 3, 4]", "seeds = []", "seeds", "design.seeds", "at least 1 item"),
        ("seeds = [5, 3, 4]", "seeds = [5, 3, 5]", "seeds", "design.seeds", "expected distinct seeds"),
        ("seeds = [5, 3, 4]", "seeds = [\n  5,\n  -3,\n]", "seeds", "design.seeds[1]", "greater than or equal to 0"),
        ("device_seconds = 300", "device_seconds = nan", "nan", "budget.device_seconds", "found 'nan'"),
        ("device_seconds = 300", "device_seconds = inf", "inf", "budget.device_seconds", "found 'inf'"),
        ("device_seconds = 300", "device_seconds = 0", "device_seconds = 0", "budget.device_seconds", "above zero"),
        ("device_seconds = 300", "device_seconds = 9.999", "9.999", "budget.device_seconds", "worst case (10 device"),
        ("device_seconds = 300", "device_seconds = 1e300", "1e300", "budget.device_seconds", "fewer than 2^53 milli"),
        ('device = "cpu"', 'device = "cpu"\nnot_after = 2030-01-31T12:00:00', "01-31", "budget.not_after", "offset"),
        ('device = "cpu"', 'device = "cpu"\nnot_after = 2030-01-31', "not_after", "budget.not_after", "offset"),
        ('device = "cpu"', 'device = "cpu"\nnot_after = "soon"', "not_after", "budget.not_after", "found 'soon'"),
        ('device = "cpu"', 'device = "cpu"\nnot_after = "2030-01-31T12:00:00"', "01-31", "budget.not_after", "offset"),
        ('device = "cpu"', 'device = "cpu"\nnot_after = "2030-02-31T12:00:00Z"', "02-31", "budget.not_after", "offset"),
        ("numbers = 20 }", "numbers = nan }", "nan", "workloads[0].parameters.numbers", "list of these, found nan"),
        ("numbers = 20 }", "numbers = { a = 1 } }", "{ a", "workloads[0].parameters.numbers", 'found {"a": 1}'),
        ("numbers = 20 }", "numbers = [1, [2]] }", "[2]", "workloads[0].parameters.numbers", "found [1, [2]]"),
        ("numbers = 20 }", "numbers = 9007199254740992 }", "9007", "workloads[0].parameters.numbers", "below 2^53"),
        ("exit_nonzero = 1", "exit_nonzero = 1\nbad_luck = 1", "bad_luck", "retry.bad_luck", "found the key bad_luck"),
        ("exit_nonzero = 1", "exit_nonzero = 101", "= 101", "retry.exit_nonzero", "less than or equal to 100"),
        ("limit = 10", "limit = true", "limit = true", "gates[0].limit", "a boolean"),
        ('rule = "log_ratio"', 'rule = "ratio"', '"ratio"', "estimates[0].rule", "'log_ratio', found \"ratio\""),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 40 else "",
)  # fmt: skip
def test_errors_name_file_line_and_key(before: str, after: str, at: str, key: str, words: str) -> None:
    """P-01: whatever is wrong in a protocol is refused with its file, its line, its key and what was found."""
    text = edited((before, after))
    message = complaint(text)
    assert f": {key}: " in message
    assert words in message
    assert "\n" not in message
    if at:
        assert message.startswith(f"p.toml:{line(at, text)}: ")


@pytest.mark.parametrize(
    ("text", "at", "expected"),
    [
        ("a = 1\n[b]\n# c\nd = 2\n", ("b", "d"), 4),
        ("a = 1\n[b]\n# c\nd = 2\n", ("b", "missing"), 2),
        ("a = 1\n", ("b",), 1),
        ("[[a]]\nx = 1\n[[a]]\nx = 2\n[[a]]\n", ("a", 1, "x"), 4),
        ("[[a]]\nx = 1\n[[a]]\nx = 2\n[[a]]\n", ("a", 2), 5),
        ("[[a]]\nx = 1\n[[a]]\ny = 2\n", ("a", 1, "x"), 3),
        ("a = [\n { x = 1 },\n { x = 2 },\n]\nb = 1", ("a", 1, "x"), 1),
        ("\n\n# c\na = '''\nb = 2\n[c]\n'''\nb = 3", ("b",), 8),
        ("a = [\n[1],\n[2],\n]\nb = 1\n", ("b",), 5),
        ("a = [\n[1],\n[2]\n]\nb = 1\n", ("a", 1), 1),
        ('"a b".c = 1\n[ d . e ] # x\nf = 1', ("d", "e", "f"), 3),
        ('"a b".c = 1\n[ d . e ] # x\nf = 1', ("a b", "c"), 1),
        ("a.b = 1\na.c = 2\n", ("a", "c"), 2),
        ("a = 1", ("a",), 1),
    ],
)
def test_lines_of_keys(text: str, at: tuple[str | int, ...], expected: int) -> None:
    """P-01: a line is the first of the statement that makes the key exist, in every form that TOML allows."""
    assert line_of(text, at) == expected


@given(st.integers(0, 30), st.integers(0, 3), st.booleans())
@settings(max_examples=25)
def test_lines_of_keys_in_files_of_any_length(count: int, gap: int, header: bool) -> None:
    """P-01: the search for a line finds the same as counting does."""
    lines = ["[t]"] if header else []
    where = {}
    for number in range(count):
        lines += [f"# comment {number} = 0"] * (number % (gap + 1))
        where[number] = len(lines) + 1
        lines += [f"k{number} = [", f"  {number},", "]"] if number % 3 == gap else [f"k{number} = {number}"]
    text = "\n".join(lines)
    for number, expected in where.items():
        assert line_of(text, ("t", f"k{number}") if header else (f"k{number}",)) == expected


def test_all_complaints_of_a_file_are_shown_at_once() -> None:
    """P-01: several slips give several lines, each with its own place, ten at most."""
    text = edited(("title", "titel"), ("order_seed", "oder_seed"), ('claim = "Every sum is large."\n', ""))
    message = complaint(text)
    assert len(message.split("\n")) == 5
    assert f"p.toml:{line('titel', text)}: titel: unknown key" in message
    assert f"p.toml:{line('oder_seed', text)}: design.oder_seed: unknown key" in message
    many = complaint("".join(f"x{number} = 1\n" for number in range(50)))
    assert len(many.split("\n")) == 10


@pytest.mark.parametrize("ending", ["\r\n", "\n"])
def test_line_ends_do_not_matter(ending: str) -> None:
    """P-01: a file with CR LF says the same, and its errors name the same lines."""
    assert read_protocol(PROTOCOL.replace("\n", ending).encode(), "p.toml") == protocol()
    text = edited(("order_seed = 7", "order_seed = -7"))
    assert complaint(text.replace("\n", ending)) == complaint(text)


def test_a_time_with_its_offset_is_kept() -> None:
    """P-16: a time may be written as TOML or as text, with `Z` or an offset; it is kept as RFC 3339."""
    for written, kept in (
        ("2030-01-31T12:00:00Z", "2030-01-31T12:00:00Z"),
        ("2030-01-31 12:00:00.5+02:00", "2030-01-31T12:00:00.500000+02:00"),
        ('"2030-01-31T12:00:00-01:30"', "2030-01-31T12:00:00-01:30"),
    ):
        assert protocol(edited(('device = "cpu"', f'device = "cpu"\nnot_after = {written}'))).budget.not_after == kept


def test_fractions_are_kept_as_text() -> None:
    """P-02: numbers with a fraction keep every digit and sign that the author wrote."""
    text = edited(
        ("limit = 10", "limit = +1.50e+01"), ("device_seconds = 300", "device_seconds = 3_000.50"),
        ("threshold = 0", "threshold = -0.0"),
    )  # fmt: skip
    found = protocol(text)
    assert found.gates[0].limit == "+1.50e+01"
    assert found.budget.device_seconds == "3000.50"
    assert found.hypotheses[0].threshold == "-0.0"
    assert found.arms[1].parameters["scale"] == DecimalScalar(decimal="1.50")


def test_the_keys_that_take_decimals_are_those_of_the_models() -> None:
    """P-02: the reader's list of decimal keys is what the models declare."""
    found = set()
    for model in vars(protocol_module).values():
        if isinstance(model, type) and issubclass(model, Model):
            hints = get_type_hints(model, include_extras=True)
            found |= {name for name in model.model_fields if takes_decimal(hints[name])}
    assert found == DECIMAL_KEYS


def takes_decimal(hint: Any) -> bool:
    """Whether a field's type is one of the decimal texts, or one of them or nothing."""
    return hint in (DecimalText, PositiveDecimal, NonNegativeDecimal) or any(
        part in (DecimalText, PositiveDecimal, NonNegativeDecimal) for part in get_args(hint)
    )


def hostile() -> dict[str, bytes]:
    """Return files that a hostile capsule could carry to keep a verifier busy."""
    deep = b".".join([b"a"] * 200_000)
    return {
        "dotted key": deep + b" = 1\n",
        "dotted header": b"[" + deep + b"]\n" + b"x = 1\n" * 2,
        "dotted inline": b"x = { " + deep + b" = 1 }\n",
        "quoted dots": b"x = { " + b".".join([b'"a"'] * 100_000) + b" = 1 }\n",
        "long array": b"x = [\n" + b"1,\n" * 300_000 + b"]\n",
        "many keys": b"".join(b"k%d = 1\n" % number for number in range(80_000)),
        "array of tables": b"[[arms]]\n" * 100_000,
        "brackets": b"x = " + b"[" * 1_000_000,
        "false starts": b"x = [\n" + b"'a = 1',\n" * 60_000 + b"]\n",
        "unclosed text": b'x = """' + b"a\n" * 500_000,
        "too large": b"#" * (1 << 20) + b"\n",
    }


@pytest.mark.parametrize("name", list(hostile()))
def test_a_hostile_file_takes_bounded_time(name: str) -> None:
    """P-01: a protocol inside a stranger's capsule is refused within seconds, however it is made."""
    start = time.perf_counter()
    assert complaint(hostile()[name]).startswith("p.toml:")
    assert time.perf_counter() - start < 10


def test_dots_in_text_are_no_keys() -> None:
    """P-01: the limit on dots is one on keys; text may hold as many as it likes."""
    found = protocol(edited(("Every sum is large.", "..." * 200)))
    assert found.hypotheses[1].claim == "..." * 200


def test_a_parameter_may_look_like_anything() -> None:
    """P-02: free parameters keep type and text: integers, booleans, text, fractions, times and lists of these."""
    values = '{ a = 1, b = true, c = "1", d = 1.0, e = [1, 2.50, "x"], f = 2030-01-01T00:00:00Z, g = -0.0, h = [] }'
    found: dict[str, Any] = dict(protocol(edited(("{ numbers = 20 }", values))).workloads[0].parameters)
    assert found == {
        "a": 1, "b": True, "c": "1", "d": DecimalScalar(decimal="1.0"), "e": (1, DecimalScalar(decimal="2.50"), "x"),
        "f": "2030-01-01T00:00:00Z", "g": DecimalScalar(decimal="-0.0"), "h": (),
    }  # fmt: skip
    assert found["b"] is True

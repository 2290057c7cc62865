"""Vectors of every JSON document in a capsule, each spelled or typed as no writer of the format does (item M1)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.attacks.vectors import (
    CELLS,
    HEAD,
    JOURNAL,
    LEDGER,
    MANIFEST,
    RESULTS,
    SOURCES,
    Members,
    Vector,
    golden,
    sampled,
    sampled_attempt,
    sealed,
    with_file,
    with_ledger_lines,
    with_list,
    with_member,
)

Spelling = Callable[[bytes], bytes]


def number_as(text: bytes) -> Spelling:
    """Write the first number of an object otherwise."""

    def spell(line: bytes) -> bytes:
        spelled, count = re.subn(rb":(0|[1-9][0-9.e-]*)(?=[,}])", lambda _: b":" + text, line, count=1)
        assert count, line
        return spelled

    return spell


def first_pair(line: bytes) -> bytes:
    """Return the first key and value of an object, as it is written."""
    key, value = next(iter(json.loads(line).items()))
    return json.dumps({key: value}, separators=(",", ":"), ensure_ascii=False).encode()[1:-1]


def unsorted(line: bytes) -> bytes:
    value = json.loads(line)
    return json.dumps(dict(reversed(value.items())), separators=(",", ":"), ensure_ascii=False).encode()


def without_first_key(line: bytes) -> bytes:
    value = json.loads(line)
    value.pop(min(value))
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def text_replaced(new: bytes) -> Spelling:
    """Write the first text of an object otherwise."""
    return lambda line: re.sub(rb':"[^"]*"', lambda _: b':"' + new + b'"', line, count=1)


SPELLINGS: dict[str, Spelling] = {
    "duplicate-key": lambda line: b"{" + first_pair(line) + b"," + line[1:],
    "duplicate-key-escaped": lambda line: (
        b"{" + re.sub(rb'^"(.)', rb'"\\u006', first_pair(line)[:2]) + b'1":1,' + line[1:]
    ),
    "unknown-key": lambda line: line[:-1] + b',"zz":1}',
    "missing-key": without_first_key,
    "unsorted-keys": unsorted,
    "number-as-text": number_as(b'"1"'),
    "number-with-point": number_as(b"1.0"),
    "number-with-exponent": number_as(b"1e0"),
    "number-beyond-doubles": number_as(b"1e400"),
    "number-of-5000-digits": number_as(b"9" * 5000),
    "number-2-to-53": number_as(b"9007199254740992"),
    "number-2-to-64": number_as(b"18446744073709551616"),
    "number-negative-zero": number_as(b"-0"),
    "number-leading-zero": number_as(b"01"),
    "number-plus": number_as(b"+1"),
    "number-hexadecimal": number_as(b"0x1"),
    "true-for-number": number_as(b"true"),
    "null-for-number": number_as(b"null"),
    "nan": number_as(b"NaN"),
    "infinity": number_as(b"-Infinity"),
    "depth-100000": number_as(b"[" * 100_000 + b"]" * 100_000),
    "depth-100000-unclosed": number_as(b'{"a":' * 100_000),
    "byte-order-mark": lambda line: b"\xef\xbb\xbf" + line,
    "trailing-comma": lambda line: line[:-1] + b",}",
    "comment": lambda line: line[:-1] + b"/**/}",
    "space": lambda line: line.replace(b":", b": ", 1),
    "carriage-return": lambda line: line + b"\r",
    "single-quotes": lambda line: line.replace(b'"', b"'"),
    "invalid-utf8": text_replaced(b"\xff"),
    "overlong-utf8": text_replaced(b"\xc0\xaf"),
    "surrogate-in-utf8": text_replaced(b"\xed\xa0\x80"),
    "lone-surrogate": text_replaced(b"\\ud800"),
    "needless-escape": lambda line: re.sub(rb'^\{"(.)', lambda match: b'{"\\u%04x' % ord(match[1]), line),
    "raw-control-character": text_replaced(b"\x01"),
    "nul-after": lambda line: line + b"\0",
    "second-value": lambda line: line + b"{}",
    "array-for-object": lambda line: b"[" + line + b"]",
    "null": lambda _: b"null",
    "empty": lambda _: b"",
    "utf16": lambda line: line.decode().encode("utf-16"),
    "cut": lambda line: line[: len(line) // 2],
}


@dataclass(frozen=True)
class Document:
    """A member with JSON: `put` gives the members of a capsule whose line (of a list: one of them) was spelled anew."""

    name: str
    clause: str
    check: str
    put: Callable[[Spelling], Members]
    lenient: frozenset[str] = frozenset()
    """Spellings that the format allows here."""

    own_reader: bool = True
    """Whether it is not read by the one reader that the manifest is read by."""


def whole(name: str) -> Callable[[Spelling], Members]:
    return lambda spell: with_member(name, spell(golden()[name]))


def one_line(
    name: str, put: Callable[[str, bytes], Members], members: Callable[[], Members] = golden
) -> Callable[[Spelling], Members]:
    def build(spell: Spelling) -> Members:
        lines = members()[name].split(b"\n")
        at = min(1, len(lines) - 2)
        return put(name, b"\n".join([*lines[:at], spell(lines[at]), *lines[at + 1 :]]))

    return build


def ledger_line(spell: Spelling) -> Members:
    lines = golden()[LEDGER].splitlines()
    return with_ledger_lines([*lines[:2], spell(lines[2]), *lines[3:]])


def sample_line(spell: Spelling) -> Members:
    name = f"3-attempts/{sampled_attempt(sampled())}/telemetry.jsonl"
    return one_line(name, lambda it, data: with_file(it, data, sampled()), sampled)(spell)


TELLING = frozenset(
    {
        "duplicate-key",
        "unknown-key",
        "missing-key",
        "unsorted-keys",
        "number-as-text",
        "number-with-point",
        "true-for-number",
        "number-2-to-53",
        "nan",
        "depth-100000",
        "byte-order-mark",
        "invalid-utf8",
        "carriage-return",
        "array-for-object",
    }
)
"""Spellings of which each goes another way through the common reader."""

JOURNAL_ALLOWS = frozenset(
    {"unsorted-keys", "number-with-point", "number-with-exponent", "number-negative-zero", "space", "carriage-return",
     "needless-escape", "empty", "number-2-to-53", "number-2-to-64", "nan", "infinity"}
)  # fmt: skip
"""A trial may write what any JSON writer gives; what it means is judged (R-01, R-04)."""

DOCUMENTS = [
    Document("manifest", "M-01", "V-04", whole(MANIFEST)),
    Document("head", "L-02", "V-11", whole(HEAD), own_reader=False),
    Document("results", "K-08", "V-18", whole(RESULTS), own_reader=False),
    Document("cells", "M-04", "V-05", one_line(CELLS, with_list), own_reader=False),
    Document("sources", "M-05", "V-15", one_line(SOURCES, with_list), own_reader=False),
    Document("ledger", "L-01", "V-10", ledger_line),
    Document("journal", "R-03", "V-17", one_line(JOURNAL, with_file), JOURNAL_ALLOWS),
    Document("sample", "T-01", "V-19", sample_line),
]


def document_vectors() -> Iterator[Vector]:
    """Yield every spelling of every document with a reader of its own, and of the others those that differ in kind."""
    for document in DOCUMENTS:
        for name, spell in SPELLINGS.items():
            if name not in document.lenient and (document.own_reader or name in TELLING):
                yield Vector(
                    f"m1-{document.name}-{name}", document.clause, (document.check,), sealed(document.put, spell)
                )

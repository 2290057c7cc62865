"""Canonical JSON: the one byte string for a value (RFC 8785), and a reader that accepts no other.

Identities are digests of these bytes, so the reader refuses everything that a lenient parser lets pass: duplicate
keys, NaN, floats, integers from 2^53, deep nesting, and any spelling that differs from the canonical one. Numbers
that are not integers travel as decimal strings, so that no float enters an identity.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NoReturn

import rfc8785

from capsule.core.errors import MalformedError
from capsule.core.lines import LINE_BYTES_MAX, Blocks, Content

INTEGER_LIMIT = 2**53
DEPTH_MAX = 32
DIGITS_MAX = 16
COMMAS_MAX = 2_000_000
"""Commas in the bytes of one value, which bound what it becomes in memory and how long it takes."""


_ENCODE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode
quoted = json.JSONEncoder(ensure_ascii=False).encode
"""Spells a text, and only a text, as RFC 8785 does."""

_STRUCTURE = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)
"""A whole string, or one that has no end, or a bracket; each byte is looked at once."""


def canonical(value: Any) -> bytes:
    """Return the canonical bytes of a JSON value built from dicts, lists, strings, integers, booleans and null."""
    return rfc8785.dumps(value)


def canonical_line(value: Any) -> bytes:
    """Return the canonical bytes and a newline: one line of a record list, ledger or journal."""
    return rfc8785.dumps(value) + b"\n"


def canonical_checked(value: Any) -> bytes:
    """Return what `canonical` does, in a third of its time, of a value known to have text keys and no floats.

    In ASCII the standard library spells and orders as RFC 8785 does; beyond it the order of keys can differ.
    """
    text = _ENCODE(value)
    return text.encode("ascii") if text.isascii() else canonical(value)


def parse(data: bytes, where: str) -> Any:
    """Parse canonical JSON; `where` names the source in errors.

    Raises:
        MalformedError: the bytes are not the canonical form of any value.
    """
    value = parse_strict(data, where)
    if canonical_checked(value) != data:
        raise MalformedError(
            f"{where}: expected canonical JSON (RFC 8785), found another spelling of the same value",
            hint="the file was edited or written by another program; restore the original bytes",
        )
    return value


def parse_strict(data: bytes, where: str, *, floats: bool = False) -> Any:
    """Parse JSON strictly, in any spelling: no duplicate keys, no NaN, bounded depth and integers.

    With `floats`, finite numbers with a fraction or exponent are accepted; without it every number is an integer
    below 2^53 in magnitude.
    """
    if data.count(b",") > COMMAS_MAX:
        raise MalformedError(f"{where}: expected at most {COMMAS_MAX} commas in one value, found more")
    refuse_depth(data, where)
    try:
        text = data.decode("utf-8")
        value = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
            parse_float=finite_float if floats else _refuse_float,
            parse_int=_bounded_int,
        )
        if b"\\u" in data:
            _refuse_surrogates(value)
    except UnicodeDecodeError as error:
        raise MalformedError(
            f"{where}: expected UTF-8 text, found byte 0x{data[error.start]:02x} at {error.start}"
        ) from error
    except json.JSONDecodeError as error:
        raise MalformedError(
            f"{where}: expected JSON, found {error.msg} at line {error.lineno}, column {error.colno}"
        ) from error
    except Refusal as refusal:
        raise MalformedError(f"{where}: {refusal}") from refusal
    return value


def parse_lines(data: bytes, where: str) -> list[Any]:
    """Parse a list of canonical lines, each ended by one newline; see `parse`."""
    return list(iterate_lines(data, where))


def iterate_lines(content: Content, where: str) -> Iterator[Any]:
    """Yield the values of a list of canonical lines, each of at most a mebibyte and ended by one newline."""
    for number, line in enumerate(list_lines(content, where), start=1):
        yield parse(line, f"{where}:{number}")


def list_lines(content: Content, where: str) -> Iterator[bytes]:
    """Yield the lines of a list without their newlines.

    Raises:
        MalformedError: a line has more than a mebibyte, or the last one does not end.
    """
    blocks = Blocks(content)
    for number, line in enumerate(chain.from_iterable(map(whole_lines, blocks)), start=1):
        if len(line) > LINE_BYTES_MAX:
            refuse_long(line, f"{where}:{number}")
        yield line
    if blocks.torn:
        raise MalformedError(f"{where}: expected a newline at the end of the last line, found none")


def refuse_long(line: bytes, where: str) -> None:
    """Refuse a line of more than a mebibyte.

    Raises:
        MalformedError: it has more bytes.
    """
    if len(line) > LINE_BYTES_MAX:
        raise MalformedError(f"{where}: expected at most {LINE_BYTES_MAX} bytes in a line, found more")


def refuse_cut(data: bytes, where: str) -> None:
    """Refuse lines of which the last does not end.

    Raises:
        MalformedError: it does not.
    """
    if data and not data.endswith(b"\n"):
        raise MalformedError(f"{where}: expected a newline at the end of the last line, found none")


def whole_lines(data: bytes) -> Iterator[bytes]:
    """Yield every line that ends with a newline, without it, one at a time."""
    start = 0
    while (end := data.find(b"\n", start)) >= 0:
        yield data[start:end]
        start = end + 1


def join_lines(values: Iterable[Any]) -> bytes:
    """Return the bytes of a list of canonical lines."""
    return b"".join(canonical_line(value) for value in values)


class Refusal(ValueError):
    """Words for a value that strict JSON does not allow."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise Refusal(f"expected unique keys, found {key!r} twice")
        result[key] = value
    return result


def _refuse_constant(text: str) -> NoReturn:
    raise Refusal(f"expected a number of JSON, found {text}")


def _refuse_float(text: str) -> NoReturn:
    raise Refusal(f"expected an integer or a decimal string, found the number {text[:40]}")


def finite_float(text: str) -> float:
    """Return the double nearest to a number of JSON; one beyond the largest double is refused, never infinite.

    Raises:
        Refusal: no double holds a number of this size.
    """
    value = float(text)
    if math.isinf(value):
        raise Refusal(f"expected a number that a double can hold, found {text[:40]}")
    return value


def _bounded_int(text: str) -> int:
    if len(text.lstrip("-")) > DIGITS_MAX or abs(int(text)) >= INTEGER_LIMIT:
        raise Refusal(f"expected an integer below 2^53, found {text[:40]}")
    return int(text)


def refuse_depth(data: bytes, where: str) -> None:
    """Bound nesting before the recursive parser sees the bytes (brackets inside strings do not count).

    Raises:
        MalformedError: more than `DEPTH_MAX` levels.
    """
    if data.count(b"[") + data.count(b"{") <= DEPTH_MAX:
        return
    depth = 0
    for match in _STRUCTURE.finditer(data):
        byte = data[match.start()]
        if byte in b"[{":
            depth += 1
            if depth > DEPTH_MAX:
                raise MalformedError(f"{where}: expected at most {DEPTH_MAX} nested levels, found more")
        elif byte in b"]}":
            depth -= 1


def _refuse_surrogates(value: Any) -> None:
    if isinstance(value, str):
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise Refusal("expected Unicode text, found a lone surrogate")
    elif isinstance(value, dict):
        for key, item in value.items():
            _refuse_surrogates(key)
            _refuse_surrogates(item)
    elif isinstance(value, list):
        for item in value:
            _refuse_surrogates(item)

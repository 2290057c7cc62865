"""From the bytes of a protocol file to a `Protocol`, with errors that name file, line and key.

Floats are taken as the text that the author wrote. The line of a key is found by parsing beginnings of the file with
the standard parser, so there is no second TOML parser that could disagree with the first. Reading takes bounded time,
also of a file that someone else wrote.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from datetime import date, datetime, time
from typing import Any

from pydantic import ValidationError

from capsule.core.errors import ProtocolError
from capsule.core.plan_checks import complaints
from capsule.core.protocol import Protocol
from capsule.core.schema import key_path

SIZE_BYTES_MAX = 1 << 20
DEPTH_MAX = 16
DOTS_MAX = 100
"""Dots in a key: the standard parser takes time in the square of their number."""
SEARCH_BYTES_MAX = 1 << 20
"""Bytes that are parsed to find the lines of errors; beyond it a line is that of a statement before."""

DECIMAL_KEYS = frozenset(
    "confidence device_seconds high kill_grace_seconds limit low maximum minimum pilot_device_seconds "
    "release_grace_seconds threshold tolerance wall_limit_seconds".split()
)
"""The keys that take a decimal number; a number with a fraction anywhere else has the wrong type."""
_FREE_TABLES = {("arms", "parameters"), ("workloads", "parameters"), ("factors", "levels")}
_FREE_WORDS = "expected true or false, an integer below 2^53, text, a finite number or a list of these"
_PART = r"""(?:[A-Za-z0-9_-]++|"[^"\n]*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"(?:^|[\[{{,])[ \t]*+(?:{_PART}[ \t]*+\.[ \t]*+){{{DOTS_MAX + 1}}}", re.MULTILINE)
_AT_LINE = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")
_KEY = re.compile(r"\s*([A-Za-z0-9_.-]+)\s*=|\s*\[\[?\s*([A-Za-z0-9_.-]+)")

_START = re.compile(r"""\s*(["'A-Za-z0-9_-][^\n]*=|\[.*\]\s*(#.*)?$)""")
"""What every first line of a statement matches, and few others."""

_WORDS = {
    "Input should be greater": "expected a number greater",
    "Input should be less": "expected a number less",
    "Input should be": "expected",
    "String should": "expected text that should",
    "Tuple should": "expected an array that should",
}

At = tuple[str | int, ...]


class _Float(str):
    """The text of a TOML float, apart from a TOML string that looks the same."""


def read_protocol(data: bytes, file: str) -> Protocol:
    """Read a protocol from the bytes of its TOML file; `file` names it in errors.

    Raises:
        ProtocolError: not TOML, or not a protocol that can be frozen.
    """
    text = _decode(data, file)
    tree = _parse(text, file)
    if not tree:
        raise ProtocolError(
            f"{file}:1: protocol: expected a protocol, found an empty file",
            hint="`capsule init` writes one to start from",
        )
    source = _Source(text, tree, file)
    converted = source.convert(tree, ())
    try:
        protocol = Protocol.model_validate_json(json.dumps(converted), by_alias=True, by_name=False)
    except ValidationError as error:
        details = error.errors(include_url=False)
        lines = dict.fromkeys(source.complaint(*_place_and_words(tree, item)) for item in details[:40])
        raise ProtocolError("\n".join(list(lines)[:10]), hint=_hint(details)) from error
    found = list(complaints(protocol))
    if found:
        raise ProtocolError("\n".join(source.complaint(at, words) for at, words in found[:10]))
    return protocol


def _decode(data: bytes, file: str) -> str:
    if len(data) > SIZE_BYTES_MAX:
        raise ProtocolError(f"{file}: expected at most {SIZE_BYTES_MAX} bytes, found {len(data)}")
    try:
        return data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ProtocolError(
            f"{file}:{line}: protocol: expected UTF-8 text, found byte 0x{data[error.start]:02x}",
            hint="a protocol is a TOML text file",
        ) from error


def _parse(text: str, file: str) -> dict[str, Any]:
    """Parse TOML with the standard parser, and say where it fails."""
    lines = text.split("\n")
    long = _LONG_KEY.search(text)  # of which the standard parser's time is the square
    if long:
        number = text.count("\n", 0, long.start()) + 1
        raise ProtocolError(f"{file}:{number}: protocol: expected at most {DOTS_MAX} dots in a key, found more")
    try:
        return tomllib.loads(text, parse_float=_Float)
    except tomllib.TOMLDecodeError as error:
        place = _AT_LINE.search(str(error))
        words = str(error)[: place.start()] if place else str(error)
        number = int(place[1]) if place and place[1] else len(text.rstrip().split("\n"))
        key = _KEY.match(lines[number - 1])
        named = (key[1] or key[2]) if key else "protocol"
        again = words.startswith(("Cannot overwrite", "Cannot declare", "Duplicate", "Cannot mutate"))
        found = "expected each key once, found it again" if again else f"expected TOML, found: {words}"
        raise ProtocolError(f"{file}:{number}: {named}: {found}") from error
    except RecursionError as error:
        number = _first_line(lines, RecursionError)
        raise ProtocolError(f"{file}:{number}: protocol: expected at most {DEPTH_MAX} levels, found more") from error
    except ValueError as error:
        number = _first_line(lines, ValueError)
        raise ProtocolError(f"{file}:{number}: protocol: expected integers of 64 bits, found a longer one") from error


def _first_line(lines: Sequence[str], kind: type[Exception]) -> int:
    """Return the first line with which parsing fails in this way, which it does with every longer beginning too."""
    low, high = 0, len(lines)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            tomllib.loads("\n".join(lines[:middle]), parse_float=_Float)
            failed = False
        except (ValueError, RecursionError) as error:
            failed = isinstance(error, kind) and not isinstance(error, tomllib.TOMLDecodeError)
        low, high = (low, middle) if failed else (middle, high)
    return high


class _Source:
    """A protocol's text and tree, for messages that name file, line and key."""

    def __init__(self, text: str, tree: dict[str, Any], file: str) -> None:
        self._search = _Search(text, tree)
        self._file = file

    def complaint(self, at: At, words: str) -> str:
        """Write words about a place in the file; the place itself may be a key that is missing."""
        return f"{self._file}:{self._search.line(at)}: {key_path(at) or 'protocol'}: {words}"

    def convert(self, value: Any, at: At) -> Any:
        """Turn a TOML tree into JSON: float text kept, free parameters marked as decimals, zoned times as RFC 3339."""
        if len(at) > DEPTH_MAX:
            raise ProtocolError(self.complaint(at[:1], f"expected at most {DEPTH_MAX} levels, found more"))
        if isinstance(value, dict):
            return {key: self.convert(item, (*at, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [self.convert(item, (*at, index)) for index, item in enumerate(value)]
        if isinstance(value, _Float):
            if len(at) > 2 and (at[0], at[2]) in _FREE_TABLES:
                return {"decimal": str(value)}
            return str(value) if at[-1] in DECIMAL_KEYS else float(value)
        if isinstance(value, datetime) and value.tzinfo is not None:
            return value.isoformat().replace("+00:00", "Z")
        if isinstance(value, datetime | date | time):
            raise ProtocolError(
                self.complaint(at, f"expected a time with its offset from UTC, found {value.isoformat()}"),
                hint="write for example 2030-01-31T12:00:00Z",
            )
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            raise ProtocolError(
                self.complaint(at, f"expected an integer of 64 bits, found one of {value.bit_length()} bits")
            )
        return value


def _place_and_words(tree: Any, item: Any) -> tuple[At, str]:
    """Return where in the file a complaint of validation belongs, and its words.

    Unions add names of their own behind the place, one complaint for each of their members; all become the same words.
    """
    location: At = item["loc"]
    at = _known(tree, location)
    behind = location[len(at) :]
    if item["type"] == "missing" and len(behind) == 1:
        return location, "expected this key, found none"
    found = tree
    for part in at:
        found = found[part]
    shown = str(found) if isinstance(found, _Float) else json.dumps(found, default=str)
    if behind and behind[-1] != "[key]":
        return at, f"{_FREE_WORDS}, found {shown[:60]}"
    match item["type"]:
        case "extra_forbidden":
            return at, "unknown key"
        case "value_error":
            return at, str(item["msg"]).removeprefix("Value error, ")
    words = str(item["msg"])
    for theirs, ours in _WORDS.items():
        words = words.replace(theirs, ours)
    if behind:
        return at, f"{words}, found the key {at[-1]}"
    return at, words if isinstance(found, dict | list) else f"{words}, found {shown[:60]}"


def _hint(details: Sequence[Any]) -> str | None:
    if any(item["type"] == "extra_forbidden" and item["loc"][-2:-1] != ("DecimalScalar",) for item in details):
        return (
            "`capsule schema protocol` lists every key; unknown ones are refused, so that a slip cannot change the plan"
        )
    return None


def _known(tree: Any, location: At) -> At:
    """Return the part of a location that exists in the tree."""
    known: list[str | int] = []
    for part in location:
        inside_table = isinstance(tree, dict) and part in tree
        inside_array = isinstance(tree, list) and isinstance(part, int) and part < len(tree)
        if not inside_table and not inside_array:
            break
        tree = tree[part]
        known.append(part)
    return tuple(known)


def line_of(text: str, at: At) -> int:
    """Return the line (from 1) of the statement of a valid file that first makes the key path `at` exist; 1 if none."""
    return _Search(text, tomllib.loads(text, parse_float=_Float)).line(at)


class _Search:
    """Finds statements by parsing beginnings of a valid file.

    A beginning that ends before a statement parses and one that ends within a statement does not. So the search halves
    the list of lines that look like the first of a statement, and steps over those that only look so.
    """

    def __init__(self, text: str, tree: dict[str, Any]) -> None:
        self._lines = text.split("\n")
        self._ends = [number for number, line in enumerate(self._lines) if _START.match(line)] + [len(self._lines)]
        self._trees: dict[int, dict[str, Any] | None] = {0: {}, len(self._ends) - 1: tree}
        self._left = SEARCH_BYTES_MAX

    def line(self, at: At) -> int:
        """Return the line of the statement that first makes `at`, or the longest part of it that exists, exist."""
        low, high = 0, len(self._ends) - 1
        at = _known(self._trees[high], at)
        if not at:
            return 1
        while high - low > 1:
            start = stop = (low + high) // 2
            while start > low and self._tree(start) is None:
                start -= 1
            while stop < high and self._tree(stop) is None:
                stop += 1
            if len(_known(self._tree(start), at)) == len(at):
                high = start
            elif len(_known(self._tree(stop), at)) == len(at):
                low, high = start, start + 1 if stop > start else stop
            else:
                low = stop
        return self._ends[low] + 1

    def _tree(self, index: int) -> dict[str, Any] | None:
        """Return the tree of the lines before a statement, or None where that line is within another or time is up."""
        if index not in self._trees and self._left > 0:
            beginning = "\n".join(self._lines[: self._ends[index]])
            self._left -= len(beginning)
            try:
                self._trees[index] = tomllib.loads(beginning, parse_float=_Float)
            except tomllib.TOMLDecodeError:
                self._trees[index] = None
        return self._trees.get(index)

"""From the bytes of a protocol file to a `Protocol`, with errors that name file, line and key.

Floats are taken as the text that the author wrote. The line of a key is found by parsing growing prefixes of the
file with the standard parser, so there is no second TOML parser that could disagree with the first.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from datetime import date, datetime, time
from typing import Any

from pydantic import ValidationError

from capsule.core.errors import ProtocolError
from capsule.core.protocol import Protocol, check
from capsule.core.schema import key_path

SIZE_BYTES_MAX = 1 << 20
_FREE_TABLES = {("arms", "parameters"), ("workloads", "parameters"), ("factors", "levels")}


class _Float(str):
    """The text of a TOML float, apart from a TOML string that looks the same."""


def read_protocol(data: bytes, file: str) -> Protocol:
    """Read a protocol from the bytes of its TOML file; `file` names it in errors.

    Raises:
        ProtocolError: not TOML, or not a protocol that can be frozen.
    """
    text = _decode(data, file)
    try:
        tree = tomllib.loads(text, parse_float=_Float)
    except tomllib.TOMLDecodeError as error:
        raise ProtocolError(f"{file}: expected TOML, found: {error}") from error
    except RecursionError as error:
        raise ProtocolError(f"{file}: expected a protocol, found nesting without end") from error
    schema = tree.get("schema")
    if schema is None and not tree:
        raise ProtocolError(
            f"{file}: expected a protocol, found an empty file", hint="`capsule init` writes one to start from"
        )
    converted = _convert(tree, (), text, file)
    try:
        protocol = Protocol.model_validate_json(json.dumps(converted))
    except ValidationError as error:
        details = error.errors(include_url=False)
        lines = [_complaint(text, file, _known(tree, item["loc"]), item["loc"], _words(item)) for item in details[:10]]
        raise ProtocolError("\n".join(lines), hint=_hint(details)) from error
    complaints = list(check(protocol))
    if complaints:
        raise ProtocolError("\n".join(_complaint(text, file, at, at, words) for at, words in complaints[:10]))
    return protocol


def _decode(data: bytes, file: str) -> str:
    if len(data) > SIZE_BYTES_MAX:
        raise ProtocolError(f"{file}: expected at most {SIZE_BYTES_MAX} bytes, found {len(data)}")
    try:
        return data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ProtocolError(
            f"{file}: expected UTF-8 text, found byte 0x{data[error.start]:02x} at offset {error.start}",
            hint="a protocol is a TOML text file",
        ) from error


def _convert(value: Any, at: tuple[str | int, ...], text: str, file: str) -> Any:
    """Turn a TOML tree into JSON: float text kept, free parameters marked as decimals, zoned times as RFC 3339."""
    if isinstance(value, dict):
        return {key: _convert(item, (*at, key), text, file) for key, item in value.items()}
    if isinstance(value, list):
        return [_convert(item, (*at, index), text, file) for index, item in enumerate(value)]
    if isinstance(value, _Float):
        free = (at[0], at[2]) in _FREE_TABLES if len(at) > 2 else False
        return {"decimal": str(value)} if free else str(value)
    if isinstance(value, datetime) and value.tzinfo is not None:
        return value.isoformat().replace("+00:00", "Z")
    if isinstance(value, datetime | date | time):
        raise ProtocolError(
            _complaint(text, file, at, at, f"expected a time with its offset from UTC, found {value.isoformat()}"),
            hint="write for example 2030-01-31T12:00:00Z",
        )
    return value


def _words(item: Any) -> str:
    match item["type"]:
        case "extra_forbidden":
            return "unknown key"
        case "missing":
            return "expected this key, found none"
        case "value_error":
            return str(item["msg"]).removeprefix("Value error, ")
    found = item.get("input")
    shown = "" if isinstance(found, dict | list) else f", found {json.dumps(found)[:60]}"
    return f"{item['msg'][0].lower()}{item['msg'][1:]}{shown}"


def _hint(details: Sequence[Any]) -> str | None:
    if any(item["type"] == "extra_forbidden" for item in details):
        return (
            "`capsule schema protocol` lists every key; unknown ones are refused, so that a slip cannot change the plan"
        )
    return None


def _known(tree: Any, location: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """Return the part of a validation location that exists in the tree (unions add names of their own)."""
    known: list[str | int] = []
    for part in location:
        inside_table = isinstance(tree, dict) and part in tree
        inside_array = isinstance(tree, list) and isinstance(part, int) and part < len(tree)
        if not inside_table and not inside_array:
            break
        tree = tree[part]
        known.append(part)
    return tuple(known)


def _complaint(text: str, file: str, at: tuple[str | int, ...], shown: tuple[str | int, ...], words: str) -> str:
    key = key_path(shown if len(shown) <= len(at) + 1 else at)
    return f"{file}:{line_of(text, at)}: {key or 'protocol'}: {words}"


def line_of(text: str, at: tuple[str | int, ...]) -> int:
    """Return the line (from 1) of the statement that first makes the key path `at` exist; 1 if none does."""
    while at:
        lines = text.split("\n")
        start = 1
        for end in range(1, len(lines) + 1):
            try:
                tree = tomllib.loads("\n".join(lines[:end]), parse_float=_Float)
            except tomllib.TOMLDecodeError:
                continue
            if len(_known(tree, at)) == len(at):
                blanks = (line for line in range(start, end) if lines[line - 1].strip()[:1] not in ("", "#"))
                return next(blanks, end)
            start = end + 1
        at = at[:-1]
    return 1

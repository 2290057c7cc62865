"""Changes to an input that keep what it is: JSON stays canonical and lines stay lines, so that readers go on."""

from __future__ import annotations

import json
import random
from typing import Any

from capsule.core.canonical import canonical

NUMBERS = (0, 1, 2, -1, 255, 256, 2**31, 2**53 - 1, 2**53, -(2**63), True)
WORDS = ("", "x", "0", "-0", "NaN", "NaN:7ff0000000000001", "1e999", "é", "\0", "../x", "hex:ff", "sha256:" + "0" * 64)
TOKENS = (
    b"null", b"true", b"NaN", b"-0", b"1e400", b"1.0", b"9" * 30, b"\\u0000", b"\\ud800", b"\xed\xa0\x80",
    b"\xef\xbb\xbf", b'"', b"{", b"[", b"]" * 3, b"[" * 40, b",", b"\r\n", b"\n", b"\0", b"=", b"[[", b"'''",
    b'"""', b"\xff", b"\x28\xb5\x2f\xfd",
)  # fmt: skip


def mutate_bytes(chance: random.Random, data: bytes) -> bytes:
    """Change, leave out, repeat or add a few bytes."""
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        at = chance.randrange(len(data) + 1)
        size = min(chance.choice((1, 1, 2, 4, 8, 64, 512)), len(data) - at)
        match chance.randrange(6):
            case 0:
                data = data[:at] + bytes(byte ^ 1 << chance.randrange(8) for byte in data[at : at + 1]) + data[at + 1 :]
            case 1:
                data = data[:at] + chance.randbytes(size) + data[at + size :]
            case 2:
                data = data[:at] + data[at + size :]
            case 3:
                data = data[:at] + data[at : at + size] + data[at:]
            case 4:
                data = data[:at] + chance.choice(TOKENS) + data[at + size * chance.randrange(2) :]
            case _:
                data = data[:at] + chance.choice((b"\0", b"\xff", b"\x80", b"\x7f")) * size + data[at + size :]
    return data


def mutate_lines(chance: random.Random, data: bytes) -> bytes:
    """Change one line as a JSON value, or leave out, repeat or move a line; a first byte that is no JSON stays."""
    start = next((at for at in range(min(3, len(data))) if data[at : at + 1] in (b"{", b"[")), 0)
    lines = data[start:].split(b"\n")
    at = chance.randrange(len(lines))
    match chance.randrange(12):
        case 0:
            del lines[at]
        case 1:
            lines.insert(at, lines[at])
        case 2:
            other = chance.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
        case _:
            lines[at] = _line(chance, lines[at])
    return data[:start] + b"\n".join(lines)


def _line(chance: random.Random, line: bytes) -> bytes:
    try:
        value = changed(chance, json.loads(line))
        if chance.random() < 0.2:
            value = changed(chance, value)
    except (ValueError, RecursionError):
        return mutate_bytes(chance, line)
    try:
        return canonical(value)
    except ValueError:
        return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


def changed(chance: random.Random, value: Any) -> Any:
    """Return a JSON value with one thing in it changed."""
    if isinstance(value, dict) and value and chance.random() < 0.95:
        key = chance.choice(sorted(value))
        match chance.randrange(16):
            case 0:
                return {name: item for name, item in value.items() if name != key}
            case 1:
                return {**value, chance.choice(("x", key + "x")): value[key]}
            case 2:
                return {**value, key: value[chance.choice(sorted(value))]}
            case _:
                return {**value, key: changed(chance, value[key])}
    if isinstance(value, list) and value and chance.random() < 0.9:
        at = chance.randrange(len(value))
        match chance.randrange(6):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return [*value, value[at]]
            case _:
                return [*value[:at], changed(chance, value[at]), *value[at + 1 :]]
    if isinstance(value, str) and value and chance.random() < 0.6:
        at = chance.randrange(len(value))
        return value[:at] + chance.choice(("", "0", "9", "z", ".", "e", "/", "\ud83d\ude00"[:1])) + value[at + 1 :]
    if isinstance(value, int) and not isinstance(value, bool) and chance.random() < 0.5:
        return value + chance.choice((1, -1, 1000, -value, value))
    return chance.choice((None, False, [], {}, *NUMBERS, *WORDS))

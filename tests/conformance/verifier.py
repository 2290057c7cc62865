"""A second verifier, written from the specification and apart from the product: python verifier.py FILE.

It shares no code with `capsule` and is written another way on purpose: plain functions from top to bottom, plain
dictionaries, exact fractions and decimals, the whole file in memory. So it is short and slow. Where the two disagree,
one of them or the specification is wrong. It prints one JSON object and exits with 0 (intact), 1 (broken) or
3 (incomplete). Sections: canonical JSON, container, shapes, protocol, plan, ledger, journals, table, statistics,
results, signatures, checks, command line.
"""

from __future__ import annotations

import argparse
import binascii
import hashlib
import io
import itertools
import json
import math
import os
import re
import struct
import subprocess
import sys
import tempfile
import tomllib
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import date, datetime, time
from decimal import Decimal, localcontext
from fractions import Fraction
from pathlib import Path
from typing import Any

import zstandard

SAFE = 2**53
CHECKS = [f"V-{number:02d}" for number in range(1, 20)]


Known = dict[str, Any]


class Bad(Exception):
    """What was read is not what the format allows there."""


class Skip(Exception):
    """A check cannot be made; whether that leaves the capsule incomplete is the second argument."""


def sha(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


# --- canonical JSON -------------------------------------------------------------------------------------------------


def encode_json(value: Any) -> bytes:
    """RFC 8785 for values without floats."""
    if isinstance(value, dict):
        pairs = sorted(value.items(), key=lambda pair: pair[0].encode("utf-16-be"))
        return b"{" + b",".join(encode_json(key) + b":" + encode_json(item) for key, item in pairs) + b"}"
    if isinstance(value, list):
        return b"[" + b",".join(map(encode_json, value)) + b"]"
    if isinstance(value, float):
        raise Bad("a float in canonical JSON")
    return json.dumps(value, ensure_ascii=False).encode()


def depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


def decode_json(data: bytes) -> Any:
    """Accept the canonical bytes of a value and nothing else."""

    def whole(text: str) -> int:
        if len(text) > 17 or abs(int(text)) >= SAFE:
            raise Bad("an integer from 2^53")
        return int(text)

    def never(text: str) -> None:
        raise Bad(f"the number {text[:20]}")

    if data.count(b",") > 2_000_000:
        raise Bad("more values than any writer writes")
    try:
        value = json.loads(data.decode(), parse_int=whole, parse_float=never, parse_constant=never)
        if encode_json(value) != data:
            raise Bad("not canonical JSON")
    except (ValueError, RecursionError) as error:
        raise Bad(f"not JSON: {str(error)[:80]}") from error
    if depth(value) > 32:
        raise Bad("nested too deep")
    return value


def decode_lines(data: bytes) -> Iterator[Any]:
    if data and data[-1:] != b"\n":
        raise Bad("no newline at the end")
    for line in data.split(b"\n")[:-1]:
        if len(line) > 1 << 20:
            raise Bad("a line that is too long")
        yield decode_json(line)


# --- container ------------------------------------------------------------------------------------------------------

ZSTD = b"\x28\xb5\x2f\xfd"
INDEX_START = b"\x5c\x2a\x4d\x18" + struct.pack("<I", 88)
FULL = 2 << 20
HEADER = re.compile(
    rb'\{"digest":"sha256","format":"capsule-archive/1(\.[1-9][0-9]{0,2})?","frame_size_bytes":2097152\}\n'
)
OTHER_MAJOR = re.compile(rb'"format":"capsule-archive/(?!1[".])[0-9.]+"')
LATER = re.compile(r"8-[a-z][a-z0-9-]{0,30}/[A-Za-z0-9][A-Za-z0-9._-]{0,60}")
LARGEST_READ, LARGEST_TABLE, LARGEST_VALUE, ALL_VALUES = 64 << 20, 2 << 30, 2 << 20, 8 << 20
VALUES = re.compile(r"1-manifest/.*(?<!\.jsonl)|2-ledger\.head\.json")
NAMES = re.compile(
    r"0-header\.json"
    r"|1-manifest/[0-9]{3}/(cells\.jsonl|manifest\.json|manifest\.json(\.[2-9])?\.sig|manifest\.json\.tsr"
    r"|protocol\.toml|sources\.jsonl|sources-[0-9a-f]{40,64}\.jsonl)"
    r"|2-ledger\.head\.json|2-ledger\.jsonl"
    r"|3-attempts/a[0-9]{6}/(environment\.json|journal\.jsonl|provenance\.jsonl|redactions\.jsonl|stderr|stdout"
    r"|telemetry\.jsonl)"
    r"|4-records/(rows|telemetry)\.parquet|5-sources/[0-9a-f]{64}|6-oracles/[0-9a-f]{64}|7-results/results\.json"
    r"|8-README/(CITATION\.cff|VERIFY\.md)|9-SHA256SUMS|9-TABLE"
)
READ = re.compile(
    r"1-manifest/.*|2-ledger.*|3-attempts/.*/(journal|provenance|telemetry)\.jsonl|4-records/.*|7-results/.*", re.DOTALL
)


class Fault(Exception):
    """Where reading in order stops: clause, file offset, and the member that is named or None."""


def is_name(name: str, newer: bool = False) -> bool:
    return NAMES.fullmatch(name) is not None or (newer and LATER.fullmatch(name) is not None)


def measure(data: bytes, at: int) -> tuple[int, int]:
    """Return compressed and raw size of the data frame at `at`, judged by C-03 to C-05 without decoding it."""
    if not ZSTD.startswith(data[at : at + 4]) or at == len(data):
        raise Fault("C-01", at, None)
    if len(data) < at + 5:
        raise Fault("C-02", len(data), None)
    flags = data[at + 4]
    if flags & 0b11011 or not flags & 0b100:
        raise Fault("C-03", at, None)
    single, code = flags >> 5 & 1, flags >> 6
    width = [single, 2, 4, 8][code]
    if width == 0:
        raise Fault("C-03", at, None)
    fields = data[at + 5 : at + 6 - single + width]
    if len(fields) < 1 - single + width:
        raise Fault("C-02", len(data), None)
    raw = int.from_bytes(fields[1 - single :], "little") + 256 * (width == 2)
    window = raw if single else ((8 + (fields[0] & 7)) << (10 + (fields[0] >> 3))) // 8
    if raw % 512 or not 512 <= raw <= FULL or window > 8 << 20:
        raise Fault("C-04", at, None)
    end = at + 6 - single + width
    for _ in range(4096):
        block = int.from_bytes(data[end : end + 3], "little")
        last, kind, size = block & 1, block >> 1 & 3, block >> 3
        if kind == 3 or size > 128 << 10:
            raise Fault("C-05", at, None)
        end += 3 + (1 if kind == 1 else size)
        if end + 4 * last - at > FULL + FULL // 256:
            raise Fault("C-05", at, None)
        if end + 4 * last > len(data):
            raise Fault("C-02", len(data), None)
        if last:
            return end + 4 - at, raw
    raise Fault("C-05", at, None)


def expand(data: bytes, at: int, size: int, raw: int) -> bytes | None:
    try:
        found = zstandard.ZstdDecompressor(max_window_size=8 << 20).decompress(
            data[at : at + size], max_output_size=raw, allow_extra_data=False
        )
    except zstandard.ZstdError:
        return None
    return found if len(found) == raw else None


def frame_at(data: bytes, at: int) -> tuple[int, int]:
    """Measure a frame; where no frame follows it, its length counts only if it decodes."""
    size, raw = measure(data, at)
    after = data[at + size : at + size + 4]
    skippable = len(after) == 4 and 0x50 <= after[0] <= 0x5F and after[1:] == b"\x2a\x4d\x18"
    if after and after != ZSTD and not skippable and expand(data, at, size, raw) is None:
        raise Fault("C-06", at, None)
    return size, raw


def frames_of(data: bytes, place: list[int]) -> Iterator[tuple[int, int, bytes, bytes] | Fault]:
    """Yield (offset, size, raw bytes, SHA-256) of every data frame, and faults; `place` is left where frames end."""
    damaged, tries = False, 0
    while place[0] < len(data):
        at = place[0]
        if not INDEX_START.startswith(data[at : at + 8]):
            try:
                size, raw = frame_at(data, at)
                place[0] += size
                found = expand(data, at, size, raw)
                digest = hashlib.sha256(data[at : at + size]).digest()
                yield Fault("C-06", at, None) if found is None else (at, size, found, digest)
                continue
            except Fault as fault:
                damaged = True
                yield fault
        elif not damaged:
            return
        while True:  # go on where a whole frame begins, after at most 256 false starts
            place[0] = data.find(ZSTD, place[0] + 1)
            if place[0] < 0 or tries >= 256:
                place[0] = len(data)
                return
            try:
                frame_at(data, place[0])
                break
            except Fault:
                tries += 1


def ustar(name: bytes, size: int, kind: bytes) -> bytes:
    """Write the one header block of a member, field by field."""
    block = bytearray(512)
    for at, field in (
        (0, name), (100, b"0000644"), (108, b"0000000"), (116, b"0000000"), (124, b"%011o" % size),
        (136, b"%011o" % 315532800), (148, b" " * 8), (156, kind), (257, b"ustar\x0000"), (329, b"0000000"),
        (337, b"0000000"),
    ):  # fmt: skip
        block[at : at + len(field)] = field
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def tar_header(name: bytes, size: int) -> bytes:
    if size < 8 << 30:
        return ustar(name, size, b"0")
    length = len(b"00 size=%d\n" % size)
    record = b"%d size=%d\n" % (length, size)
    return ustar(b"PaxHeader", length, b"x") + record.ljust(512, b"\0") + ustar(name, 0, b"0")


def name_and_size(header: bytes, at: int) -> tuple[str, int]:
    """Take name and size from a header, and accept it only if it is the one header for them."""
    name = header[-512:][:100].split(b"\0")[0]
    if len(header) == 512:
        digits = re.fullmatch(rb"[0-7]{11}", header[124:135])
        size = int(digits[0], 8) if digits else -1
    else:
        record = re.match(rb"[0-9]{2} size=([1-9][0-9]{9,15})\n", header[512:])
        size = int(record[1]) if record else -1
    if not name or not 0 <= size < SAFE or tar_header(name, size) != header:
        raise Fault("C-08", at, name.decode("latin-1") or None)
    return name.decode("latin-1"), size


def read_container(data: bytes) -> dict[str, Any]:
    """Read a file in order. Findings with the name of a member go to `in_members`, all others to `in_container`."""
    place = [0]
    frames = frames_of(data, place)
    seen: list[tuple[int, int, bytes, bytes]] = []  # offset, size, raw, digest
    tar = bytearray()
    starts: list[int] = []  # where each frame begins in the tar
    values: list[int] = []  # sizes of members that are read as one value
    at = 0  # the cursor in the tar
    table_at: int | None = None
    inside: str | None = None
    members: dict[str, tuple[int, str, bytes]] = {}
    listed: list[tuple[str, int, str]] = []
    findings: list[tuple[str, str | None, str]] = []
    newer = other = False

    def say(code: str, member: str | None, words: str = "") -> None:
        findings.append((code, member, words))

    def ended() -> Fault:
        return Fault("C-10" if place[0] < len(data) else "C-02", place[0], None)

    def pull() -> bool:
        nonlocal tar
        item = next(frames, None)
        if item is None:
            return False
        if isinstance(item, Fault):
            raise item
        if table_at is not None and len(seen[-1][2]) < FULL:
            raise Fault("C-07", item[0], None)
        seen.append(item)
        starts.append(len(tar))
        tar += item[2]
        return True

    def take(size: int) -> bytes:
        nonlocal at
        begin, end = at, at + size
        while at < end:
            if at == len(tar) and not pull():
                raise ended()
            if at == starts[-1] and table_at is None and len(seen) > 1 and len(seen[-2][2]) < FULL:
                raise Fault("C-07", seen[-1][0], None)
            at = min(end, len(tar))
        return bytes(tar[begin:end])

    def read_members() -> int:
        nonlocal inside, table_at, newer, other
        last, total, sums = "", 0, b""
        while True:
            if at == len(tar) and not pull():
                raise ended()
            if at == starts[-1] and tar[at : at + 8] == b"9-TABLE\0":
                table_at = at
            header = take(512)
            if header[156:157] == b"x":
                header += take(1024)
            name, size = name_and_size(header, seen[-1][0])
            if name == "9-TABLE":
                if table_at is None:
                    raise Fault("C-07", seen[-1][0], None)
                inside = name
                if last != "9-SHA256SUMS":
                    say("C-14", name, "no checksums before it")
                return size
            total += size
            if total > 1 << 40 or len(listed) >= 10_000_000:
                raise Fault("C-19", seen[-1][0], name)
            inside = name
            wrong = []
            if not is_name(name, newer):
                wrong.append("C-11")
            elif name <= last:
                wrong.append("C-12")
            if (name == "0-header.json") != (not listed):
                wrong.append("C-13")
            if name == "9-SHA256SUMS" and size != len(sums):
                wrong.append("C-14")
            for code in wrong:
                say(code, name)
            content = take(size)
            if any(take(-size % 512)):
                say("C-09", name)
            digest = hashlib.sha256(content).hexdigest()
            if name == "0-header.json" and not listed:
                version = HEADER.fullmatch(content)
                newer, other = version is not None and version[1] is not None, OTHER_MAJOR.search(content) is not None
                if version is None:
                    say("C-13", name)
                if other:
                    raise Fault("C-13", seen[-1][0], name)
            if name == "9-SHA256SUMS" and size == len(sums) and content != sums:
                say("C-14", name)
            if is_name(name, newer):
                listed.append((name, size, digest))
                sums += f"{digest}  {name}\n".encode()
                last = max(last, name)
            if not wrong:
                largest = LARGEST_TABLE if name.startswith("4-") else LARGEST_READ
                if VALUES.fullmatch(name):
                    largest = min(LARGEST_VALUE, ALL_VALUES - sum(values))
                if is_name(name) and READ.fullmatch(name):
                    if size > largest:
                        say("size", name, "too large to be read")
                        content = b""
                    elif VALUES.fullmatch(name):
                        values.append(size)
                members[name] = (size, "sha256:" + digest, content)
            inside = None

    def read_table(size: int) -> None:
        nonlocal inside
        before = starts.index(table_at) if table_at is not None else 0
        if size > sum(len(member_line(*item)) for item in listed) + (before + 1) * 512 + FULL:
            raise Fault("C-15", seen[-1][0], "9-TABLE")
        check_table(take(size), listed, seen[:before], say)
        if any(take(-size % 512)):
            say("C-09", "9-TABLE")
        inside = None
        if any(take(1024)):
            raise Fault("C-10", seen[-1][0], None)
        if at < len(tar) or pull():
            raise Fault("C-10", seen[-1][0], None)

    try:
        read_table(read_members())
        assert table_at is not None
        before = starts.index(table_at)
        check_tail(data, place[0], len(listed), seen, before, table_at, say)
    except Fault as fault:
        code, offset, member = fault.args
        say(code, member or inside, f"at byte {offset}")
        salvage(frames, seen, table_at, say)
    lines = b"".join(member_line(*item) for item in listed)
    placed = [f"{code}: {member}: {words}" for code, member, words in findings if member is not None]
    return {
        "members": members,
        "in_container": [f"{code}: {words}" for code, member, words in findings if member is None],
        "in_members": placed,
        "identity": None if findings else sha(b"capsule-archive/1\n" + lines),
        "foreign": not data.startswith(ZSTD) or other,
    }


def member_line(name: str, size: int, digest: str) -> bytes:
    return f'["{name}",{size},"{digest}"]\n'.encode()


MEMBER_LINE = re.compile(rb'\["([^"\\]+)",(0|[1-9][0-9]{0,15}),"([0-9a-f]{64})"\]\n')
FRAME_LINE = re.compile(rb'\[(0|[1-9][0-9]*),(0|[1-9][0-9]*),([1-9][0-9]*),([1-9][0-9]*),"([0-9a-f]{64})"\]\n')
LIBRARY_LINE = re.compile(rb'\["zstd","(0|[1-9][0-9]?)\.(0|[1-9][0-9]?)\.(0|[1-9][0-9]?)",([1-9]|1[0-9])\]\n')


def check_table(
    table: bytes, listed: list[tuple[str, int, str]], frames: list[tuple[int, int, bytes, bytes]], say: Any
) -> None:
    """C-15 and C-16: a line for every member, one for the library, one for every frame before the table."""
    lines = re.findall(rb"[^\n]*\n|[^\n]+\Z", table)
    cut = next((number for number, line in enumerate(lines) if LIBRARY_LINE.fullmatch(line)), None)
    wanted = [member_line(*item) for item in listed]
    found = lines if cut is None else lines[:cut]
    if found != wanted:
        position = unmatched = 0
        said = False
        for line in found:
            parsed = MEMBER_LINE.fullmatch(line)
            if line in wanted[position:]:
                where = wanted.index(line, position)
                if where - position > unmatched:
                    say("C-15", None, "a member is not listed")
                    said = True
                position, unmatched = where + 1, 0 if where > position else unmatched
                continue
            say("C-15", parsed[1].decode("latin-1") if parsed and is_name(parsed[1].decode("latin-1"), True) else None)
            unmatched, said = unmatched + 1, True
        if len(wanted) - position > unmatched or not said:
            say("C-15", None, "members are not listed, or in another order")
    if cut is None:
        say("C-16", None, "no library line")
    expected = [
        f'[{number},{offset},{size},{len(raw)},"{digest.hex()}"]\n'.encode()
        for number, (offset, size, raw, digest) in enumerate(frames)
    ]
    if cut is not None and lines[cut + 1 :] != expected:
        say("C-16", None, "other frames")


def check_tail(data: bytes, at: int, members: int, frames: list[Any], before: int, table_at: int, say: Any) -> None:
    """C-17 and C-18: the index and the seek table that the frames imply, and nothing after them."""
    begin = frames[before][0]
    digest = hashlib.sha256(data[begin:at]).digest()
    index = b"capsule-index/1\n" + struct.pack("<5Q", members, len(frames), begin, at - begin, table_at) + digest
    pairs = [(size, len(raw)) for _, size, raw, _ in frames] + [(96, 0)]
    seek = b"".join(struct.pack("<II", *pair) for pair in pairs) + struct.pack("<IBI", len(pairs), 0, 0x8F92EAB1)
    for code, expected in (
        ("C-17", INDEX_START + index),
        ("C-18", b"\x5e\x2a\x4d\x18" + struct.pack("<I", len(seek)) + seek),
    ):
        found = data[at : at + len(expected)]
        if found != expected:
            say("C-02" if len(found) < len(expected) and expected.startswith(found) else code, None)
            if len(found) < len(expected) and expected.startswith(found):
                return
        at += len(found)
    if at < len(data):
        say("C-01", None, "bytes after the seek table")


def salvage(frames: Iterator[Any], seen: list[Any], table_at: int | None, say: Any) -> None:
    """C-20: after damage, name the members of which a whole table lists a frame that was not seen."""
    table: list[Any] = []
    if seen and table_at is None and seen[-1][2].startswith(b"9-TABLE\0"):
        table = [seen[-1]]
    known = list(seen)
    for item in frames:
        if isinstance(item, Fault):
            say(item.args[0], None, f"at byte {item.args[1]}")
            table = []
            continue
        known.append(item)
        if item[2].startswith(b"9-TABLE\0"):
            table = [item]
        elif table:
            table.append(item)
    if not table:
        if table_at is None:
            say("C-20", None, "no whole table follows")
        return
    raw = b"".join(item[2] for item in table)
    header = raw[: 1536 if raw[156:157] == b"x" else 512]
    try:
        _, size = name_and_size(header, table[0][0])
    except Fault:
        say("C-08", "9-TABLE")
        return
    lines = re.findall(rb"[^\n]*\n", raw[len(header) : len(header) + size])
    there = Counter((offset, digest) for offset, _, _, digest in known)
    spans, missing, begin = [], [], 0
    for line in lines:
        if match := FRAME_LINE.fullmatch(line):
            key = int(match[2]), bytes.fromhex(match[5].decode())
            span = begin, begin + int(match[4]), key[1]
            begin = span[1]
            if there[key]:
                there[key] -= 1
            else:
                missing.append(span)
    moved = Counter(digest for (_, digest), count in there.items() for _ in range(count))
    for start, stop, digest in missing:
        if moved[digest]:
            moved[digest] -= 1
        else:
            spans.append((start, stop))
    begin = 0
    for line in lines:
        match = MEMBER_LINE.fullmatch(line)
        if match is None or not is_name(match[1].decode("latin-1"), True):
            break
        size = int(match[2])
        stop = begin + len(tar_header(match[1], size)) + size + -size % 512
        if any(start < stop and begin < end for start, end in spans):
            say("C-20", match[1].decode(), "damaged or missing")
        begin = stop


# --- shapes: what a JSON value must look like -----------------------------------------------------------------------

Shape = Callable[[Any], bool]
DIGEST_TEXT = re.compile(r"sha256:[0-9a-f]{64}")
DECIMAL_TEXT = re.compile(r"[+-]?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]{1,3})?")


def like(pattern: str) -> Shape:
    compiled = re.compile(pattern)
    return lambda value: isinstance(value, str) and compiled.fullmatch(value) is not None


def string(low: int = 0, high: int = SAFE) -> Shape:
    return lambda value: isinstance(value, str) and low <= len(value) <= high


def integer(low: int = 0, high: int = SAFE - 1) -> Shape:
    return lambda value: type(value) is int and low <= value <= high


def word(*allowed: str) -> Shape:
    return lambda value: isinstance(value, str) and value in allowed


def maybe(shape: Shape) -> Shape:
    return lambda value: value is None or shape(value)


def either(*shapes: Shape) -> Shape:
    return lambda value: any(shape(value) for shape in shapes)


def array(shape: Shape, least: int = 0, most: int = SAFE) -> Shape:
    return lambda value: isinstance(value, list) and least <= len(value) <= most and all(map(shape, value))


def mapping(key: Shape, shape: Shape) -> Shape:
    return lambda value: isinstance(value, dict) and all(map(key, value)) and all(map(shape, value.values()))


def record(**fields: Shape) -> Shape:
    return lambda value: (
        isinstance(value, dict) and value.keys() == fields.keys() and all(fields[key](value[key]) for key in fields)
    )


def boolean(value: Any) -> bool:
    return isinstance(value, bool)


def digest(value: Any) -> bool:
    return isinstance(value, str) and DIGEST_TEXT.fullmatch(value) is not None


def decimal(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= 64 and DECIMAL_TEXT.fullmatch(value) is not None


def positive(value: Any) -> bool:
    return decimal(value) and Fraction(value) > 0


def not_negative(value: Any) -> bool:
    return decimal(value) and Fraction(value) >= 0


NAME = like(r"[a-z0-9][a-z0-9._-]{0,62}")
IDENTIFIER = like(r"[a-z][a-z0-9_]{0,62}")
REVISION = like(r"[0-9a-f]{40}([0-9a-f]{24})?")
TEXT = string(1, 10_000)
COUNT = integer(1, 1_000_000)
SCALAR = either(
    boolean,
    integer(1 - SAFE),
    string(),
    lambda value: (
        isinstance(value, dict)
        and value.keys() == {"decimal"}
        and decimal(value["decimal"])
        and not math.isinf(float(value["decimal"]))
    ),
)
PARAMETERS = mapping(string(1, 200), either(SCALAR, array(SCALAR)))
FAILURES = (
    "bad_records config_changed contaminated device_lost device_mismatch device_suspect exec_failed exit_nonzero "
    "fork_storm incomplete leaked_descendants oom_cgroup oom_host provenance sigkill_unattributed signalled "
    "source_changed trial_error unverifiable wall_limit"
).split()
VOID = "user lost host_crash lease_lost ledger_failed never_started".split()

PROTOCOL = record(
    schema=word("capsule.protocol/1"),
    name=NAME,
    title=TEXT,
    question=TEXT,
    arms=array(
        record(
            name=NAME,
            trial=maybe(like(r"[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*")),
            command=maybe(array(TEXT, 1)),
            parameters=PARAMETERS,
            revision=maybe(REVISION),
        ),
        1,
    ),
    workloads=array(record(name=NAME, parameters=PARAMETERS), 1),
    factors=array(record(name=NAME, levels=array(SCALAR, 1))),
    design=record(
        seeds=array(integer(), 1),
        starts=COUNT,
        blocks=COUNT,
        order=word("abba", "shuffled", "listed"),
        order_seed=integer(),
        isolation=word("start", "workload", "cell"),
    ),
    observations=array(
        record(
            name=IDENTIFIER,
            type=word("float64", "float32", "float16", "int64", "uint64", "bool", "text"),
            unit=maybe(TEXT),
            description=maybe(TEXT),
            minimum=maybe(decimal),
            maximum=maybe(decimal),
            optional=boolean,
            replay=record(
                rule=word("exact", "absolute", "relative", "never"), tolerance=maybe(not_negative), reason=maybe(TEXT)
            ),
        ),
        1,
    ),
    gates=array(
        record(
            name=NAME,
            observation=IDENTIFIER,
            rule=word("at_most", "at_least", "above", "below", "equal", "not_equal", "finite"),
            limit=maybe(decimal),
            on_failure=word("record", "exclude", "stop"),
        )
    ),
    estimates=array(
        record(
            name=NAME,
            rule=word("mean", "difference", "log_ratio"),
            observation=IDENTIFIER,
            numerator=NAME,
            denominator=maybe(NAME),
            confidence=positive,
        )
    ),
    hypotheses=array(
        record(
            name=NAME,
            claim=TEXT,
            rule=word("interval_above", "interval_below", "interval_within", "gates_pass"),
            estimate=maybe(NAME),
            threshold=maybe(decimal),
            low=maybe(decimal),
            high=maybe(decimal),
            gates=array(NAME),
            workloads=array(TEXT),
        ),
        1,
    ),
    exclusions=array(record(arm=maybe(NAME), workload=maybe(TEXT), reason=TEXT)),
    analysis=record(missing=word("withhold", "drop_start"), starts_min=COUNT, multiplicity=word("none", "bonferroni")),
    budget=record(
        device=string(1, 100),
        devices=COUNT,
        device_seconds=positive,
        pilot_device_seconds=not_negative,
        wall_limit_seconds=positive,
        kill_grace_seconds=not_negative,
        release_grace_seconds=not_negative,
        attempts_max=COUNT,
        output_bytes_max=integer(1, 2**40),
        processes_max=integer(1, 10**6),
        not_after=maybe(string()),
        exclusivity=word("required", "best_effort"),
        on_contamination=word("finish", "stop"),
    ),
    retry=mapping(word(*FAILURES), integer(0, 100)),
    environment=record(
        python=TEXT, packages=mapping(like(r"[A-Za-z0-9._-]+"), string()), lock=maybe(TEXT), driver=maybe(TEXT)
    ),
    sources=record(include=array(TEXT), exclude=array(TEXT), secrets_allowed=array(TEXT)),
    replay_sample=COUNT,
)
LIST = record(count=integer(), sha256=digest)
FILE = record(size=integer(), sha256=digest)
MANIFEST = record(
    schema=word("capsule.manifest/1"),
    protocol=PROTOCOL,
    protocol_file=FILE,
    cells=LIST,
    sources=LIST,
    arms=array(record(arm=string(), revision=maybe(string()), sources=LIST)),
    lock=maybe(FILE),
    supersedes=maybe(
        record(
            manifest=digest,
            reason=TEXT,
            ledger_events=integer(),
            ledger_head=maybe(digest),
            attempts_seen=integer(),
            pilot_attempts_seen=integer(),
            rows_seen=integer(),
        )
    ),
)
SOURCE = record(
    path=string(),
    kind=word("file", "link"),
    mode=maybe(word("0644", "0755")),
    size=integer(),
    sha256=digest,
    target=maybe(string()),
    blob=maybe(REVISION),
    notes=array(string()),
)


def moment(value: Any) -> bool:
    """A time that exists, in UTC and to the millisecond."""
    if not like(r"[0-9]{4}(-[0-9]{2}){2}T([01][0-9]|2[0-3])(:[0-9]{2}){2}\.[0-9]{3}Z")(value):
        return False
    try:
        return bool(datetime.fromisoformat(value))
    except ValueError:
        return False


CLOCK = record(
    realtime=moment,
    boottime_ms=integer(),
    monotonic_ms=integer(),
    boot_id=string(0, 100),
)
OUTCOME = word("completed", *FAILURES, *VOID)
ANY_INTEGER = maybe(integer(-SAFE, SAFE))
CHARGE = record(lower_ms=integer(), upper_ms=integer(), debited_ms=integer(), observed=boolean)
DOUBTS = ["contaminated", "unverifiable", "exclusive"]  # the worst first
SUMMARY = record(
    samples=integer(), elapsed_ms=integer(), observed_ms=integer(), exclusivity=word(*DOUBTS), evidence=string(),
    energy_mj=maybe(integer()), energy_missing=maybe(string()), throttled_ms=mapping(string(), integer()),
)  # fmt: skip
COUNTERS = (
    "memory_used_bytes utilization_percent sm_clock_mhz memory_clock_mhz temperature_celsius power_mw energy_mj "
    "throttle ecc_corrected ecc_uncorrected remapped_rows xid"
).split()
READINGS = [*COUNTERS, "driver", "layout"]
SAMPLE = record(
    at_ms=integer(), device=string(), exclusivity=word(*DOUBTS), words=string(), own=array(integer()),
    foreign=array(integer()), **dict.fromkeys(COUNTERS, maybe(integer())), driver=maybe(string()),
    layout=maybe(string()), missing=mapping(string(), string()), error=maybe(string()), lost=boolean,
)  # fmt: skip
END = {"outcome": OUTCOME, "evidence": string(), "charge": CHARGE, "rows": integer(), "files": mapping(string(), FILE)}
EVENTS: dict[str, Shape] = {
    "opened": record(format=word("capsule.ledger/1"), protocol=string()),
    "manifest_adopted": record(manifest=digest, supersedes=maybe(digest)),
    "sealed": record(size=integer(), sha256=digest, hex=like("([0-9a-f]{2})*")),
    "correction": record(debited_ms=integer(), reason=string()),
    "reserved": record(
        manifest=digest, process=integer(), pilot=boolean, from_frozen=boolean, unit=word("cpu", "gpu"),
        devices=array(string(0, 100), 1, 1000), reserved_ms=integer(),
    ),
    "refused": record(manifest=digest, process=integer(), pilot=boolean, reason=string(0, 100), words=string()),
    "intent": record(
        leased=CLOCK, supervisor_pid=integer(), argv=array(string()), snapshot=digest,
        device_baseline=mapping(string(), either(ANY_INTEGER, string())),
    ),
    "spawned": record(pid=integer(), start_ticks=integer()),
    "heartbeat": record(elapsed_ms=integer()),
    "stopping": record(cause=OUTCOME, evidence=string()),
    "exit": record(
        wait_status=ANY_INTEGER, exit_code=ANY_INTEGER, signal=ANY_INTEGER, core_dumped=boolean, cause=string(0, 100),
        evidence=string(), user_ms=integer(), system_ms=integer(), max_rss_bytes=integer(),
    ),
    "tree_empty": record(killed=integer(), level=word("cgroup", "subreaper")),
    "device_clean": record(clean=boolean, released=CLOCK, evidence=string()),
    "settled": record(
        overrun_ms=integer(), suspended_ms=integer(), exclusivity=word(*DOUBTS), telemetry=mapping(string(), SUMMARY),
        **END,
    ),
    "held_unknown": record(evidence=string()),
    "reconciled": record(**END),
}  # fmt: skip
EVENT = record(
    seq=integer(),
    prev=maybe(digest),
    event=word(*EVENTS),
    attempt=maybe(like(r"a[0-9]{6}")),
    at=CLOCK,
    data=lambda value: isinstance(value, dict),
)
HEAD = record(count=integer(), sha256=maybe(digest))


# --- the protocol: from TOML, and what it may not mean --------------------------------------------------------------

DEFAULTS: dict[str, dict[str, Any]] = {
    "": {
        "factors": [], "gates": [], "estimates": [], "exclusions": [], "retry": {}, "sources": {}, "replay_sample": 1,
    },
    "arms": {"trial": None, "command": None, "parameters": {}, "revision": None},
    "workloads": {"parameters": {}},
    "factors": {},
    "design": {"starts": 1, "blocks": 1},
    "observations": {"unit": None, "description": None, "minimum": None, "maximum": None, "optional": False},
    "gates": {"limit": None},
    "estimates": {"denominator": None},
    "hypotheses": {"estimate": None, "threshold": None, "low": None, "high": None, "gates": [], "workloads": []},
    "exclusions": {"arm": None, "workload": None},
    "analysis": {"starts_min": 2},
    "budget": {
        "devices": 1, "pilot_device_seconds": "0", "attempts_max": 1_000_000, "output_bytes_max": 16 << 20,
        "processes_max": 4096, "not_after": None, "on_contamination": "finish",
    },
    "environment": {"packages": {}, "lock": None, "driver": None},
    "sources": {"include": [], "exclude": [], "secrets_allowed": []},
}  # fmt: skip
DECIMALS = {
    "observations": ["minimum", "maximum"], "gates": ["limit"], "estimates": ["confidence"],
    "hypotheses": ["threshold", "low", "high"],
    "budget": "device_seconds pilot_device_seconds wall_limit_seconds kill_grace_seconds release_grace_seconds".split(),
}  # fmt: skip


class FloatText(str):
    """A TOML float as its text."""


def read_toml(data: bytes) -> dict[str, Any]:
    """Return the normalised protocol of a TOML file: every key written out, numbers with a fraction as text."""
    if len(data) > 1 << 20:
        raise Bad("more than a megabyte")
    try:
        tree = tomllib.loads(data.decode().replace("\r\n", "\n"), parse_float=FloatText)
        tree = normal(tree)
        if not PROTOCOL(tree):
            raise Bad("not a protocol")
    except (ValueError, RecursionError) as error:
        raise Bad(f"not TOML: {error}") from error
    return tree


def normal(tree: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {**DEFAULTS[""], **tree}
    for name, defaults in DEFAULTS.items():
        if not name or name not in result:
            continue
        group = result[name] if isinstance(result[name], list) else [result[name]]
        filled = []
        for item in group:
            if not isinstance(item, dict):
                raise Bad(f"{name} must be tables")
            item = {**defaults, **item}
            for key in DECIMALS.get(name, []):
                item[key] = number_text(item.get(key))
            if name == "observations" and isinstance(item.get("replay"), dict):
                replay = {"tolerance": None, "reason": None, **item["replay"]}
                item["replay"] = {**replay, "tolerance": number_text(replay["tolerance"])}
            for free in ("parameters", "levels"):
                if free in item and name in ("arms", "workloads", "factors"):
                    item[free] = free_value(item[free])
            filled.append(item)
        result[name] = filled if isinstance(result[name], list) else filled[0]
    filled_in: dict[str, Any] = plain(result)
    return filled_in


def number_text(value: Any) -> Any:
    if type(value) is int and -(2**63) <= value < 2**64:
        return str(value)
    return str(value).replace("_", "") if isinstance(value, str) else value


def free_value(value: Any, inside: bool = False) -> Any:
    """A parameter: numbers with a fraction become {"decimal": TEXT}."""
    if isinstance(value, FloatText):
        return {"decimal": value.replace("_", "")}
    if isinstance(value, list):
        return [free_value(item, True) for item in value]
    if not isinstance(value, dict):
        return value
    if inside and value.keys() == {"decimal"} and not isinstance(value["decimal"], FloatText):
        return {"decimal": number_text(value["decimal"])}
    return {key: free_value(item, True) for key, item in value.items()}


def plain(value: Any) -> Any:
    """Refuse numbers with a fraction where none belongs, and write times as RFC 3339."""
    if isinstance(value, FloatText):
        raise Bad(f"the number {value} where none with a fraction belongs")
    if isinstance(value, datetime) and value.tzinfo is not None:
        return value.isoformat().replace("+00:00", "Z")
    if isinstance(value, datetime | date | time):
        raise Bad("a time without its offset")
    if isinstance(value, list):
        return [plain(item) for item in value]
    return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def named(items: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {item["name"]: item for item in items}


def milliseconds(seconds: str) -> int:
    return math.ceil(Fraction(seconds) * 1000)


def worst_case(budget: dict[str, Any]) -> int:
    parts = ("wall_limit_seconds", "kill_grace_seconds", "release_grace_seconds")
    return int(budget["devices"]) * sum(milliseconds(budget[part]) for part in parts)


def base(workload: str) -> str:
    return workload.partition("[")[0]


def workload_names(protocol: dict[str, Any]) -> list[str]:
    """The workloads crossed with the factors, in order."""
    result = []
    for workload in protocol["workloads"]:
        for levels in itertools.product(*(factor["levels"] for factor in protocol["factors"])):
            pairs = zip(protocol["factors"], levels, strict=True)
            crossing = ",".join(f"{factor['name']}={level_text(level)}" for factor, level in pairs)
            result.append(f"{workload['name']}[{crossing}]" if crossing else workload["name"])
    return result


def level_text(level: Any) -> str:
    return level["decimal"] if isinstance(level, dict) else str(level)


def excluded(protocol: dict[str, Any], arm: str, workload: str) -> str | None:
    for item in protocol["exclusions"]:
        if item["arm"] in (None, arm) and item["workload"] in (None, workload, base(workload)):
            return str(item["reason"])
    return None


def selected(protocol: dict[str, Any], hypothesis: dict[str, Any]) -> list[str]:
    wanted = hypothesis["workloads"]
    return [name for name in workload_names(protocol) if not wanted or name in wanted or base(name) in wanted]


def count_cells(protocol: dict[str, Any]) -> int:
    design = protocol["design"]
    per_block = len(protocol["arms"]) * (1 + (design["order"] == "abba"))
    workloads = len(protocol["workloads"]) * math.prod(len(factor["levels"]) for factor in protocol["factors"])
    return int(len(design["seeds"]) * design["starts"] * design["blocks"] * workloads * per_block)


def complaint(protocol: dict[str, Any]) -> str | None:
    """Return the first thing that a protocol may not mean, or None."""
    return next(complaints(protocol), None)


def complaints(protocol: dict[str, Any]) -> Iterator[str]:
    for group in ("arms", "workloads", "factors", "observations", "gates", "estimates", "hypotheses"):
        if len(named(protocol[group])) < len(protocol[group]):
            yield f"a name twice in {group}"
    design, arms, columns = protocol["design"], named(protocol["arms"]), named(protocol["observations"])
    starts = len(design["seeds"]) * design["starts"]
    if len(set(design["seeds"])) < len(design["seeds"]):
        yield "a seed twice"
    for arm in protocol["arms"]:
        if (arm["trial"] is None) == (arm["command"] is None):
            yield "not exactly one of trial and command"
        if arm["command"] is not None and design["isolation"] != "cell":
            yield "a command without a process for each cell"
    if len({arm["revision"] for arm in protocol["arms"]}) > 1 and design["isolation"] != "cell":
        yield "revisions that share a process"
    for column in protocol["observations"]:
        yield from column_complaints(column)
    for gate in protocol["gates"]:
        yield from gate_complaints(gate, columns.get(gate["observation"]))
    for estimate in protocol["estimates"]:
        column = columns.get(estimate["observation"])
        if column is None or column["type"] == "text":
            yield "an estimate of no number"
        if estimate["numerator"] not in arms or (estimate["rule"] == "mean") != (estimate["denominator"] is None):
            yield "an estimate of the wrong arms"
        if estimate["denominator"] is not None and estimate["denominator"] not in arms.keys() - {estimate["numerator"]}:
            yield "an estimate against no other arm"
        if not Fraction(1, 2) <= Fraction(estimate["confidence"]) <= Fraction("0.9999999"):
            yield "a confidence out of range"
        if not max(2, protocol["analysis"]["starts_min"]) <= starts:
            yield "too few starts"
    for hypothesis in protocol["hypotheses"]:
        yield from hypothesis_complaints(protocol, hypothesis)
    yield from budget_complaints(protocol["budget"])
    if count_cells(protocol) > 200_000:
        yield "too many cells"
        return
    if too_large(protocol):
        yield "too much for everyone who verifies"
        return
    yield from plan_complaints(protocol, set(arms))


def column_complaints(column: dict[str, Any]) -> Iterator[str]:
    low, high, replay = column["minimum"], column["maximum"], column["replay"]
    taken = "cell arm workload seed start block position process status reason attempt final pilot manifest error end"
    if column["name"] in taken.split():
        yield "a name that every row has"
    if column["type"] == "text":
        if low is not None or high is not None:
            yield "a range of text"
    else:
        least, most = support(column)
        if least > most:
            yield "an empty range"
    if (replay["rule"] in ("absolute", "relative")) != (replay["tolerance"] is not None):
        yield "a tolerance out of place"
    if (replay["rule"] == "never") != (replay["reason"] is not None):
        yield "a reason out of place"
    if column["type"] in ("text", "bool") and replay["rule"] in ("absolute", "relative"):
        yield "a tolerance of what is no number"


Bound = Fraction | float


def support(column: dict[str, Any]) -> tuple[Bound, Bound]:
    """The values that a column may hold: its declared range within that of its type."""
    low: Bound = -math.inf if column["minimum"] is None else Fraction(column["minimum"])
    high: Bound = math.inf if column["maximum"] is None else Fraction(column["maximum"])
    types = {"bool": (0, 1), "int64": (-(2**63), 2**63 - 1), "uint64": (0, 2**64 - 1)}
    if column["type"] in types:
        least, most = types[column["type"]]
        low = Fraction(least if low == -math.inf else max(least, math.ceil(low)))
        high = Fraction(most if high == math.inf else min(most, math.floor(high)))
    return low, high


def meets(rule: str, value: Any, limit: Any) -> bool:
    order = (value > limit) - (value < limit)
    allowed = {"at_most": (-1, 0), "at_least": (0, 1), "above": (1,), "below": (-1,), "equal": (0,)}
    return order in allowed.get(rule, (-1, 1))


def holds(limit: str, kind: str) -> bool:
    """Whether a float column has a value that is exactly this decimal."""
    try:
        return exact(as_number(float_bits(float(limit), kind), kind)) == Fraction(limit)
    except Bad:
        return False


def gate_complaints(gate: dict[str, Any], column: dict[str, Any] | None) -> Iterator[str]:
    if column is None or column["type"] == "text":
        yield "a gate on no number"
        return
    real = column["type"].startswith("float")
    if (gate["rule"] == "finite") != (gate["limit"] is None):
        yield "a limit out of place"
    elif gate["rule"] == "finite":
        if not real:
            yield "a gate that can never fail"
    else:
        limit, (low, high) = Fraction(gate["limit"]), support(column)
        probes: list[Bound] = [low, high]  # the ends, the limit, and what lies just beside it
        if low <= limit <= high and (holds(gate["limit"], column["type"]) if real else limit.denominator == 1):
            probes.append(limit)
        answers = {meets(gate["rule"], probe, limit) for probe in probes}
        if len(answers) < 2:
            yield "a gate that can never pass or never fail"


def hypothesis_complaints(protocol: dict[str, Any], hypothesis: dict[str, Any]) -> Iterator[str]:
    needed = {"gates_pass": {"gates"}, "interval_within": {"estimate", "low", "high"}}
    given = {key for key in ("estimate", "threshold", "low", "high", "gates") if hypothesis[key] not in (None, [])}
    if given != needed.get(hypothesis["rule"], {"estimate", "threshold"}):
        yield "keys that the rule does not take"
    if hypothesis["estimate"] is not None and hypothesis["estimate"] not in named(protocol["estimates"]):
        yield "no such estimate"
    if not set(hypothesis["gates"]) <= named(protocol["gates"]).keys():
        yield "no such gate"
    low, high = hypothesis["low"], hypothesis["high"]
    if low is not None and high is not None and Fraction(low) >= Fraction(high):
        yield "a range upside down"


def budget_complaints(budget: dict[str, Any]) -> Iterator[str]:
    for key in DECIMALS["budget"]:
        if milliseconds(budget[key]) * budget["devices"] >= SAFE:
            yield "too much time"
            return
    if budget["not_after"] is not None:
        form = r"[0-9]{4}(-[0-9]{2}){2}T[0-9]{2}(:[0-9]{2}){2}(\.[0-9]{1,6})?(Z|[+-][0-9]{2}:[0-9]{2})"
        try:
            right = re.fullmatch(form, budget["not_after"]) and datetime.fromisoformat(budget["not_after"]).tzinfo
        except ValueError:
            right = None
        if not right:
            yield "no time"
    if worst_case(budget) > milliseconds(budget["device_seconds"]):
        yield "a budget for no attempt"


def too_large(protocol: dict[str, Any]) -> bool:
    design = protocol["design"]
    arms, columns, gates, estimates = (len(protocol[key]) for key in ("arms", "observations", "gates", "estimates"))
    crossed = len(protocol["workloads"]) * math.prod(len(factor["levels"]) for factor in protocol["factors"])
    starts = len(design["seeds"]) * design["starts"]
    decisions = sum(len(hypothesis["gates"]) or 1 for hypothesis in protocol["hypotheses"])
    cells = count_cells(protocol)
    if columns > 400 or crossed * (estimates * (starts + 1) + decisions + arms * columns) > 200_000:
        return True
    names = sum(len(name) for name in workload_names(protocol))
    return cells * (columns + gates + estimates) > 10_000_000 or names * (cells // crossed) > 2**25


def plan_complaints(protocol: dict[str, Any], arms: set[str]) -> Iterator[str]:
    workloads = workload_names(protocol)
    known = {*workloads, *map(base, workloads)}
    for factor in protocol["factors"]:
        if any(factor["name"] in workload["parameters"] for workload in protocol["workloads"]):
            yield "a factor that a workload sets"
        if len(set(map(level_text, factor["levels"]))) < len(factor["levels"]):
            yield "a level twice"
    if len(set(workloads)) < len(workloads):
        yield "a crossed workload twice"
    for exclusion in protocol["exclusions"]:
        if exclusion["arm"] not in {None, *arms} or exclusion["workload"] not in {None, *known}:
            yield "an exclusion of nothing"
    if all(excluded(protocol, arm, workload) is not None for arm in arms for workload in workloads):
        yield "every cell excluded"
        return
    reasons = sum(len(excluded(protocol, arm, workload) or "") for arm in arms for workload in workloads)
    if reasons * count_cells(protocol) // (len(arms) * len(workloads)) > 2**25:
        yield "too long reasons"
        return
    estimates = named(protocol["estimates"])
    for hypothesis in protocol["hypotheses"]:
        if not set(hypothesis["workloads"]) <= known:
            yield "no such workload"
        estimate = estimates.get(hypothesis["estimate"] or "", {})
        for workload in selected(protocol, hypothesis):
            out = {arm for arm in arms if excluded(protocol, arm, workload) is not None}
            if out & {estimate.get("numerator"), estimate.get("denominator")} or out == arms:
                yield "a hypothesis about cells that are not run"


# --- the plan -------------------------------------------------------------------------------------------------------


def shuffled(items: list[str], seed: int, label: str) -> list[str]:
    """Fisher-Yates with 64-bit words of SHA-256 in counter mode, words that would favour a place skipped."""
    result = list(items)
    stream = (
        int.from_bytes(hashlib.sha256(f"capsule.shuffle/0\n{seed}\n{label}\n{counter}".encode()).digest()[at : at + 8])
        for counter in itertools.count()
        for at in (0, 8, 16, 24)
    )
    for last in reversed(range(1, len(result))):
        size = last + 1
        while (drawn := next(stream)) >= 2**64 // size * size:
            pass
        chosen = drawn % size
        result[last], result[chosen] = result[chosen], result[last]
    return result


def plan_of(protocol: dict[str, Any]) -> list[dict[str, Any]]:
    """Every planned cell in running order."""
    design = protocol["design"]
    names, arms = workload_names(protocol), [arm["name"] for arm in protocol["arms"]]
    cells: list[dict[str, Any]] = []
    shared: dict[Any, int] = {}
    for seed in design["seeds"]:
        for start in range(design["starts"]):
            for workload in drawn_order(names, design, f"workloads/{seed}/{start}"):
                for block in range(design["blocks"]):
                    order = drawn_order(arms, design, f"arms/{seed}/{start}/{workload}/{block}")
                    if design["order"] == "abba":
                        order = order + order[::-1]
                    for position, arm in enumerate(order):
                        together = {"start": (seed, start), "workload": (seed, start, workload), "cell": len(cells)}
                        process = shared.setdefault(together[design["isolation"]], len(shared))
                        cells.append({
                            "cell": f"c{len(cells):06d}", "arm": arm, "workload": workload, "seed": seed,
                            "start": start, "block": block, "position": position, "process": process,
                            "excluded": excluded(protocol, arm, workload),
                        })  # fmt: skip
    return cells


def drawn_order(items: list[str], design: dict[str, Any], label: str) -> list[str]:
    return list(items) if design["order"] == "listed" else shuffled(items, design["order_seed"], label)


# --- the ledger -----------------------------------------------------------------------------------------------------

STATES = """
none     reserved>reserved refused>refused
reserved intent>intent refused>refused held_unknown>held
intent   spawned>running exit>exited held_unknown>held
running  heartbeat>running stopping>stopping exit>exited held_unknown>held
stopping heartbeat>stopping stopping>stopping exit>exited held_unknown>held
exited   tree_empty>emptied stopping>exited heartbeat>exited held_unknown>held
emptied  device_clean>clean heartbeat>emptied held_unknown>held
clean    settled>settled held_unknown>held
held     reconciled>reconciled held_unknown>held
"""
NEXT = {
    (line.split()[0], *step.split(">")[:1]): step.split(">")[1]
    for line in STATES.strip().splitlines()
    for step in line.split()[1:]
}
OVER = ("settled", "reconciled", "refused")
LONGEST_EVENT = 4 << 20


def read_ledger(data: bytes) -> dict[str, Any]:
    """Return the events that could be read, the hash of every line, and what is wrong with the chain."""
    *lines, tail = data.split(b"\n")
    events: list[dict[str, Any]] = []
    numbers: list[int] = []
    hashes: list[str | None] = []
    wrong: list[str] = []
    for number, line in enumerate(lines):
        try:
            if len(line) > LONGEST_EVENT or line.count(b",") > 50_000:
                raise Bad("too long")
            event = decode_json(line)
            if not EVENT(event):
                raise Bad("not an event")
            if len(line) > (4 << 20) // 2 - 1024 and not (event["event"] == "sealed" and line.isascii()):
                raise Bad("too long")
            if not EVENTS[event["event"]](event["data"]):
                raise Bad(f"not the data of {event['event']}")
            if event["seq"] != number or event["prev"] != (hashes[-1] if hashes else None):
                wrong.append(f"line {number + 1} does not follow the line before it")
            events.append(event)
            numbers.append(number)
        except Bad as bad:
            wrong.append(f"line {number + 1}: {bad}")
        hashes.append(sha(line) if len(line) <= LONGEST_EVENT else None)
    if tail:
        wrong.append("a torn tail")
    if not events:
        wrong.append("no events")
    return {"events": events, "numbers": numbers, "hashes": hashes, "wrong": wrong}


def new_account() -> dict[str, Any]:
    return {"protocol": None, "manifests": [], "attempts": {}, "wrong": []}


def add_up(events: Any) -> dict[str, Any]:
    account = new_account()
    for event in events:
        book(account, event)
    return account


def book(account: dict[str, Any], event: dict[str, Any]) -> None:
    """Add one event to an account."""
    kind, data, wrong = event["event"], event["data"], account["wrong"]
    if event["seq"] == 0 and kind != "opened":
        wrong.append("the first event does not open")
    if (event["attempt"] is None) != (kind in ("opened", "manifest_adopted", "sealed")):
        wrong.append(f"{kind} of {event['attempt']}")
    elif kind == "opened":
        if event["seq"] != 0 or account["protocol"] is not None:
            wrong.append("opened again")
        account["protocol"] = data["protocol"]
    elif kind == "manifest_adopted":
        if data["supersedes"] != (account["manifests"][-1] if account["manifests"] else None):
            wrong.append("a manifest out of its chain")
        account["manifests"].append(data["manifest"])
    elif kind == "sealed":
        tail = bytes.fromhex(data["hex"])
        if (data["size"], data["sha256"]) != (len(tail), sha(tail)):
            wrong.append("sealed bytes that are not what they say")
    elif event["attempt"] is not None:
        book_attempt(account, event)


def book_attempt(account: dict[str, Any], event: dict[str, Any]) -> None:
    name, kind, data = event["attempt"], event["event"], event["data"]
    if name not in account["attempts"]:
        if name != f"a{len(account['attempts']) + 1:06d}":
            account["wrong"].append(f"attempt {name} out of order")
        account["attempts"][name] = {"state": "none", "corrected": 0, "lived": 0, "since": event["at"]["realtime"]}
    attempt = account["attempts"][name]
    if kind == "correction":
        if attempt["state"] not in OVER:
            account["wrong"].append(f"a correction of {name}, which goes on")
        attempt["corrected"] += data["debited_ms"]
        return
    if (attempt["state"], kind) not in NEXT:
        account["wrong"].append(f"{kind} after {attempt['state']} of {name}")
        return
    attempt["state"] = NEXT[attempt["state"], kind]
    attempt["end" if kind in ("settled", "reconciled") else kind] = data
    if kind == "heartbeat":
        attempt["lived"] = data["elapsed_ms"]
    if kind == "reserved" and not data["pilot"] and [data["manifest"]] != account["manifests"][-1:]:
        account["wrong"].append(f"{name} under another manifest than the current one")


def is_pilot(attempt: dict[str, Any]) -> bool:
    return bool((attempt.get("reserved") or attempt.get("refused") or {"pilot": False})["pilot"])


def held(attempt: dict[str, Any]) -> int:
    """Device-milliseconds that an attempt takes from the budget."""
    if "refused" in attempt or "reserved" not in attempt:
        return 0
    if "end" in attempt:
        return int(attempt["end"]["charge"]["debited_ms"] + attempt["corrected"])
    return int(attempt["reserved"]["reserved_ms"])


def held_by(account: dict[str, Any], unit: str, pilot: bool) -> int:
    own = [a for a in account["attempts"].values() if "reserved" in a and a["reserved"]["unit"] == unit]
    return sum(held(attempt) for attempt in own if is_pilot(attempt) == pilot)


# --- journals -------------------------------------------------------------------------------------------------------

FLOATS = {"float64": ("<d", 52, 64), "float32": ("<f", 23, 32), "float16": ("<e", 10, 16)}  # layout, mantissa, width
INTEGERS = {"int64": (-(2**63), 2**63 - 1), "uint64": (0, 2**64 - 1)}


def read_journal(data: bytes, columns: list[dict[str, Any]], cells: list[str]) -> dict[str, Any]:
    """Return the rows of a journal by cell: a map of typed values, or the text of an error."""
    journal: dict[str, Any] = {"rows": {}, "ended": False, "faults": 0}
    *lines, tail = data.split(b"\n")
    journal["torn"] = bool(tail)
    spoiled = set()
    for line in lines:
        if not line.strip():
            continue
        if journal["faults"] == 10_000:
            break
        try:
            item = journal_object(line)
            if journal["ended"]:
                raise Bad("a line after the end")
            if item.get("end") is True and "cell" not in item:
                journal["ended"] = True
                continue
            cell, row = journal_row(item, columns, cells)
            if cell in journal["rows"] or cell in spoiled:
                spoiled.add(cell)
                raise Bad("two rows of a cell")
            journal["rows"][cell] = row
        except Bad:
            journal["faults"] += 1
    for cell in spoiled:
        del journal["rows"][cell]
    return journal


def journal_object(line: bytes) -> dict[str, Any]:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        if len(result) < len(items):
            raise Bad("a key twice")
        return result

    def whole(text: str) -> Any:
        if len(text) > 40:
            raise Bad("too long a number")
        return -0.0 if text == "-0" else int(text)

    def fraction(text: str) -> float:
        if math.isinf(float(text)):
            raise Bad("too large a number")
        return float(text)

    if len(line) > 1 << 20:
        raise Bad("too long a line")
    try:
        item = json.loads(line.decode(), object_pairs_hook=pairs, parse_int=whole, parse_float=fraction)
        json.dumps(item, ensure_ascii=False).encode()  # no half characters
    except (ValueError, RecursionError) as error:
        raise Bad(str(error)) from error
    if not isinstance(item, dict) or depth(item) > 32:
        raise Bad("not a flat object")
    return item


def journal_row(item: dict[str, Any], columns: list[dict[str, Any]], cells: list[str]) -> tuple[str, Any]:
    cell = item.pop("cell", None)
    if cell is None and len(cells) == 1:
        cell = cells[0]
    if not isinstance(cell, str) or cell not in cells:
        raise Bad("no planned cell")
    if "error" in item:
        return cell, str(item["error"])
    row = {}
    for column in columns:
        value = item.pop(column["name"], None)
        if value is None and not column["optional"]:
            raise Bad("a value is missing")
        row[column["name"]] = None if value is None else typed(value, column["type"])
        if value is not None and not in_range(row[column["name"]], column):
            raise Bad("a value out of its declared range")
    if item:
        raise Bad("an undeclared value")
    return cell, row


def in_range(value: Any, column: dict[str, Any]) -> bool:
    """Whether a typed value lies in the range that its column declares; a NaN is below and above nothing."""
    if column["type"] == "text":
        return True
    number = exact(as_number(value, column["type"]))
    low, high = column["minimum"], column["maximum"]
    return not ((low and number < Fraction(low)) or (high and number > Fraction(high)))


def typed(value: Any, kind: str) -> Any:
    """Return a value as its column holds it: floats as their bits."""
    if kind == "bool":
        if isinstance(value, bool):
            return value
    elif kind == "text":
        if isinstance(value, str) and len(value) <= 10_000:
            return value
    elif kind in INTEGERS:
        if isinstance(value, str) and re.fullmatch("-?[0-9]{1,20}", value):
            value = int(value)
        low, high = INTEGERS[kind]
        if type(value) is int and low <= value <= high:
            return value
    elif isinstance(value, str):
        names = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf, "-0": -0.0}
        if value in names:
            return float_bits(names[value], kind)
        if value.startswith("NaN:"):
            return nan_bits(value[4:], kind)
    elif type(value) in (int, float):
        return float_bits(value, kind)
    raise Bad(f"not a {kind}")


def float_bits(value: float, kind: str) -> bytes:
    layout, mantissa, width = FLOATS[kind]
    if math.isnan(value):
        return ((1 << width - 1) - (1 << mantissa - 1)).to_bytes(width // 8, "little")
    try:
        return struct.pack(layout, value)
    except (OverflowError, struct.error) as error:
        raise Bad("too large a number") from error


def nan_bits(digits: str, kind: str) -> bytes:
    """A NaN by its bits; of a double's in a narrower column the sign and the leading bits of the payload are kept."""
    _, mantissa, width = FLOATS[kind]
    if len(digits) not in (width // 4, 16) or not re.fullmatch("[0-9a-f]+", digits):
        raise Bad("not the bits of a NaN")
    bits, wide = int(digits, 16), next(own for own in FLOATS.values() if own[2] == 4 * len(digits))
    _, wide_mantissa, wide_width = wide
    payload = bits % (1 << wide_mantissa)
    exponent = (1 << wide_width - 1) - (1 << wide_mantissa)
    if not payload or bits & exponent != exponent:
        raise Bad("not the bits of a NaN")
    payload = payload >> wide_mantissa - mantissa or 1 << mantissa - 1
    whole = (bits >> wide_width - 1 << width - 1) + (1 << width - 1) - (1 << mantissa) + payload
    return whole.to_bytes(width // 8, "little")


def as_number(value: Any, kind: str) -> Any:
    """Return a typed value as a number; integers stay exact."""
    return struct.unpack(FLOATS[kind][0], value)[0] if kind in FLOATS else int(value)


def judged(cells: list[str], journal: dict[str, Any]) -> str:
    """The outcome of a process that exited with status 0."""
    rows = journal["rows"]
    if journal["faults"]:
        return "bad_records"
    if journal["torn"] or not journal["ended"] or not all(cell in rows for cell in cells):
        return "incomplete"
    return "trial_error" if any(isinstance(row, str) for row in rows.values()) else "completed"


# --- final rows and the table ---------------------------------------------------------------------------------------


def deciding(protocol: dict[str, Any], attempts: list[tuple[str, Any]]) -> tuple[str, Any] | None:
    """The attempt that settles a process: the first that completed, or one failure more than its retries."""
    failures: Counter[str] = Counter()
    for name, attempt in attempts:
        outcome = attempt["end"]["outcome"] if "end" in attempt else "user"
        if outcome in VOID:
            continue
        failures[outcome] += 1
        if outcome == "completed" or failures[outcome] > protocol["retry"].get(outcome, 0):
            return name, attempt
    return None


def final_rows(known: dict[str, Any]) -> list[dict[str, Any]]:
    """The one final row of every planned cell."""
    protocol, identity, attempts = known["protocol"], known["identity"], known["account"]["attempts"]
    own = [attempt for attempt in attempts.values() if not is_pilot(attempt)]
    waiting = "pending"
    if own and "refused" in own[-1] and own[-1]["refused"]["manifest"] == identity:
        waiting = own[-1]["refused"]["reason"]
    tries: dict[int, list[Any]] = {}
    for name, attempt in attempts.items():
        reserved = attempt.get("reserved", {"manifest": None})
        if reserved["manifest"] == identity and "refused" not in attempt and not reserved["pilot"]:
            tries.setdefault(reserved["process"], []).append((name, attempt))
    nothing = {column["name"]: None for column in protocol["observations"]}
    rows = []
    for cell in known["cells"]:
        mine = tries.get(cell["process"], [])
        row = {"cell": cell, "status": "not_run", "reason": None, "attempt": None, "values": nothing}
        decided = deciding(protocol, mine)
        if cell["excluded"] is not None:
            row["reason"] = f"excluded: {cell['excluded']}"
        elif decided is None:
            void = mine and "end" in mine[-1][1] and mine[-1][1]["end"]["outcome"] in VOID
            row["reason"] = "interrupted" if void and waiting == "pending" else waiting
        else:
            name, attempt = decided
            row |= {"status": "failed", "attempt": name, "reason": attempt["end"]["outcome"]}
            if row["reason"] in ("completed", "trial_error"):
                found = known["journals"].get(name, {"rows": {}})["rows"].get(cell["cell"])
                if isinstance(found, dict):
                    row |= {"status": "ok", "reason": None, "values": found}
                else:
                    row["reason"] = "missing_row" if found is None else "trial_error"
        rows.append(row)
    return rows


def table_of(known: dict[str, Any], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the table: the final ones, then what did not become final."""
    cells = {cell["cell"]: cell for cell in known["cells"]}
    nothing = {column["name"]: None for column in known["protocol"]["observations"]}
    lines = [table_line(r["cell"], r["status"], r["reason"], r["attempt"], True, False, r["values"]) for r in rows]
    used = {(r["attempt"], r["cell"]["cell"]) for r in rows if r["status"] == "ok" or r["reason"] == "trial_error"}
    for name, attempt in known["account"]["attempts"].items():
        if "reserved" not in attempt or attempt["reserved"]["manifest"] != known["identity"]:
            continue
        outcome = attempt["end"]["outcome"] if "end" in attempt else "open"
        for cell, found in known["journals"].get(name, {"rows": {}})["rows"].items():
            if (name, cell) not in used:
                words = "pilot" if is_pilot(attempt) else f"void: {outcome}"
                status, reason = ("failed", "trial_error") if isinstance(found, str) else ("ok", words)
                values = nothing if isinstance(found, str) else found
                lines.append(table_line(cells[cell], status, reason, name, False, is_pilot(attempt), values))
    return lines


def table_line(
    cell: dict[str, Any], status: str, reason: str | None, attempt: str | None, final: bool, pilot: bool, values: Any
) -> dict[str, Any]:
    kept = ("cell", "arm", "workload", "seed", "start", "block", "position", "process")
    own = {"status": status, "reason": reason, "attempt": attempt, "final": final, "pilot": pilot}
    return {**{key: cell[key] for key in kept}, **own, **values}


def record_columns(protocol: dict[str, Any]) -> list[tuple[str, str]]:
    """Name and type of the columns of the record table."""
    kinds = dict.fromkeys("cell arm workload status reason attempt".split(), "text")
    kinds |= dict.fromkeys("seed start block position process".split(), "int64") | {"final": "bool", "pilot": "bool"}
    order = "cell arm workload seed start block position process status reason attempt final pilot".split()
    columns = [(name, kinds[name]) for name in order]
    return columns + [(column["name"], column["type"]) for column in protocol["observations"]]


def read_table(data: bytes, columns: list[tuple[str, str]], count: int, most: int) -> list[dict[str, Any]]:
    """Read a packed table: these columns, plain and uncompressed, `count` rows. Floats come as their bits.

    All of that is known before a value is decoded, so that no file can ask for more memory than an honest one.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    arrow = {
        "text": pa.string(), "bool": pa.bool_(), "int64": pa.int64(), "uint64": pa.uint64(),
        "float64": pa.float64(), "float32": pa.float32(), "float16": pa.float16(),
    }  # fmt: skip
    try:
        check_footer(data, [name.encode() for name, _ in columns])
        file = pq.ParquetFile(io.BytesIO(data))
        if not file.schema_arrow.equals(pa.schema([(name, arrow[kind]) for name, kind in columns])):
            raise Bad("other columns than the frozen ones")
        groups = [file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)]
        for group in groups:
            for index in range(len(columns)):
                chunk = group.column(index)
                if chunk.compression != "UNCOMPRESSED" or not {*chunk.encodings} <= {"PLAIN", "RLE"}:
                    raise Bad("columns that are not plain and uncompressed")
                if chunk.total_uncompressed_size > len(data):
                    raise Bad("a column larger than the file")
        if max(file.metadata.num_rows, len(groups) - 1) > most:
            raise Bad(f"more than the {most} rows that plan and journals allow")
        if not count == file.metadata.num_rows == sum(group.num_rows for group in groups):
            raise Bad(f"{file.metadata.num_rows} rows, expected {count}")
        table = file.read(use_threads=False)
        table.validate(full=True)
        values = [column_values(pa, table.column(name), kind) for name, kind in columns]
    except (pa.ArrowException, OSError, ValueError) as error:
        raise Bad(f"not a table: {str(error)[:80]}") from error
    return [dict(zip((name for name, _ in columns), row, strict=True)) for row in zip(*values, strict=True)]


def check_footer(data: bytes, names: list[bytes]) -> None:
    """Read the footer, one struct of Thrift's compact protocol, for what pyarrow does not survive."""
    size = int.from_bytes(data[-8:-4], "little")
    if not (data[:4] == data[-4:] == b"PAR1") or not 0 < size <= min(len(data) - 12, 1 << 20):
        raise Bad("a table without a footer")
    try:
        file, rest = thrift(12, data[-8 - size : -8], 0)
        parts = [(part, part[3]) for group in file[4] for part in group[1]]
        plain = all(meta[4] == 0 and {*meta[2]} <= {0, 3} and not {1, 8, 9} & {*part} for part, meta in parts)
        kinds = all(0 <= leaf[1] < 8 and 0 <= leaf[3] < 3 and 0 <= leaf.get(6, 0) < 22 for leaf in file[2][1:])
        sizes = all(0 <= meta[key] < 2**63 and 0 <= meta[1] < 8 for _, meta in parts for key in (6, 7, 9))
        sizes &= not any(11 in meta for _, meta in parts)
        flat = [leaf[4] for leaf in file[2][1:]] == names and not any(leaf.get(5) for leaf in file[2][1:])
        whole = all([part[3][3] for part in group[1]] == [[name] for name in names] for group in file[4])
        whole &= all(part[3][5] == group[3] for group in file[4] for part in group[1])
        small = all(group[3] <= 1 << 16 for group in file[4])
        small &= all(sum(max(part[3][6], part[3][7]) for part in group[1]) <= 1 << 23 for group in file[4])
    except (IndexError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise Bad("a footer that cannot be read") from error
    if rest or not (plain and kinds and sizes and flat and whole and small) or {8, 9} & {*file}:
        raise Bad("a footer of other than plain columns, whole and uncompressed")
    if not all(plain_pages(data, part[3], group[3]) for group in file[4] for part in group[1]):
        raise Bad("pages of other than plain values")


def plain_pages(data: bytes, meta: dict[int, Any], rows: int) -> bool:
    """Whether a column of a row group is few enough pages that are what its footer says they are."""
    rest = data[meta[9] : meta[9] + meta[7]]
    for _ in range(256):
        if rows <= 0:
            break
        try:
            page, tail = thrift(12, rest[:1024], 0)
            size, values = page[3], page[5][1]
            if (page[1], page[2]) != (0, size) or page[5][2] not in (0, 3) or size < 0 or not 0 <= values <= rows:
                return False
        except (IndexError, KeyError, TypeError, struct.error):
            return False
        used = len(rest[:1024]) - len(tail) + size
        if used > len(rest):
            return False
        rest, rows = rest[used:], rows - values
    return not rows


def thrift(kind: int, data: bytes, depth: int) -> tuple[Any, bytes]:
    """Take one value of a kind off the front; returns it and what is left."""
    if depth > 16:
        raise Bad("a footer that is too deep")
    view, at = memoryview(data), 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while shift < 70:
            at += 1
            value |= (view[at - 1] & 127) << shift
            if view[at - 1] < 128:
                return value
            shift += 7
        raise Bad("a number that is too long")

    def take(kind: int) -> Any:
        nonlocal at, depth
        value, left = thrift(kind, view[at:], depth + 1)  # type: ignore[arg-type]
        at = len(view) - len(left)
        return value

    result: Any
    if kind in (1, 2, 3):
        at, result = 1, view[0]
    elif kind in (4, 5, 6):
        result = number()
        result = -(result + 1) // 2 if result & 1 else result // 2
    elif kind == 7:
        at, result = 8, struct.unpack_from("<d", view)[0]
    elif kind == 8:
        size = number()
        if size > len(view) - at:
            raise Bad("a text beyond the footer")
        at, result = at + size, bytes(view[at : at + size])
    elif kind in (9, 10):
        head, at = view[0], 1
        count = head >> 4 if head < 240 else number()
        result = [take(head & 15) for _ in range(count)]
    elif kind == 11:
        count = number()
        if count:
            at += 1
            pair = divmod(view[at - 1], 16)
            for _ in range(2 * count):
                take(pair[_ % 2])
        result = None
    elif kind == 12:
        result, field = {}, 0
        while True:
            head, at = view[at], at + 1
            if not head:
                break
            last, field = field, field + (head >> 4) if head > 15 else take(6)
            if field <= last:
                raise Bad("a field of the footer twice or behind a later one")
            result[field] = take(head & 15) if head & 15 not in (1, 2) else head & 15 == 1
    else:
        raise Bad("a footer of unknown kinds")
    return result, view[at:]  # type: ignore[return-value]


def column_values(pa: Any, column: Any, kind: str) -> list[Any]:
    if kind not in FLOATS:
        return list(column.to_pylist())
    width, result = FLOATS[kind][2] // 8, []
    for chunk in column.chunks:
        bits = chunk.buffers()[1].to_pybytes() if len(chunk) else b""
        for index, there in enumerate(chunk.is_valid().to_pylist()):
            at = (chunk.offset + index) * width
            result.append(bits[at : at + width] if there else None)
    return result


# --- statistics -----------------------------------------------------------------------------------------------------

Exact = Fraction | float


def exact(value: float) -> Exact:
    """A number for comparison without rounding; infinities stay what they are."""
    return value if isinstance(value, float) and not math.isfinite(value) else Fraction(value)


def mean(values: list[float]) -> float:
    """The mean of finite values: their correctly rounded sum divided by their number, as doubles."""
    try:
        return float(sum(map(Fraction, values))) / len(values)
    except OverflowError:
        return float(sum(map(Fraction, values)) / len(values))


def start_number(rule: str, top: list[float], bottom: list[float]) -> float | None:
    if not top or (rule != "mean" and not bottom) or not all(map(math.isfinite, top + bottom)):
        return None
    if rule == "log_ratio":
        if min(top + bottom) <= 0:
            return None
        top, bottom = [logarithm(value) for value in top], [logarithm(value) for value in bottom]
    found = mean(top) - (mean(bottom) if rule != "mean" else 0)
    return found if math.isfinite(found) else None


def logarithm(value: float) -> float:
    with localcontext() as context:
        context.prec = 40
        return float(Decimal(value).ln())


def confidence_interval(values: list[float], level: float) -> tuple[float, float, float] | None:
    """Mean, low and high of Student's t over starts, or None where an end is no double."""
    count, middle = len(values), mean(values)
    try:
        spread = [float(Fraction(value) - Fraction(middle)) for value in values]
    except OverflowError:
        return None
    with localcontext() as context:
        context.prec, context.Emax, context.Emin = 50, 999_999, -999_999
        error = (sum((Decimal(item) ** 2 for item in spread), Decimal(0)) / (count - 1) / count).sqrt()
        half = float(t_quantile(0.5 + level / 2, count - 1) * error)
    low, high = middle - half, middle + half
    return (middle, low, high) if math.isfinite(low) and math.isfinite(high) else None


def t_quantile(probability: float, degrees: int) -> Decimal:
    """The quantile of Student's t for whole degrees of freedom, by its finite trigonometric series.

    With t = sqrt(degrees) tan(angle) the probability between -t and t is a finite sum in sine and cosine of the angle
    (Abramowitz and Stegun 26.7.3 and 26.7.4); Newton's method, held in a bracket, finds the angle to 40 digits.
    """
    with localcontext() as context:
        context.prec = 50
        return solved_quantile(2 * Decimal(probability) - 1, degrees)


def solved_quantile(target: Decimal, degrees: int) -> Decimal:
    half_turn = arctangent_of_one() * 2
    slope = 2 / (half_turn * 2) if degrees % 2 else Decimal(1)
    for number in range(1 + (degrees + 1) % 2, degrees, 2):
        slope *= Decimal(number + 1) / number
    low, high = Decimal(0), half_turn
    angle = half_turn / 2
    for _ in range(400):
        sine, cosine = sine_cosine(angle)
        difference = between(angle, sine, cosine, degrees, half_turn) - target
        low, high = (low, angle) if difference > 0 else (angle, high)
        following = angle - difference / (slope * cosine ** (degrees - 1))
        if not low < following < high:
            following = (low + high) / 2
        if abs(following - angle) <= abs(half_turn - angle) * Decimal("1e-38"):
            break
        angle = following
    return Decimal(degrees).sqrt() * sine / cosine


def between(angle: Decimal, sine: Decimal, cosine: Decimal, degrees: int, half_turn: Decimal) -> Decimal:
    """The probability between -t and t, t = sqrt(degrees) tan(angle)."""
    square = cosine * cosine
    term = cosine if degrees % 2 else Decimal(1)
    total = Decimal(0)
    for number in range(2 + degrees % 2, degrees + 1, 2):
        total += term
        term *= square * (number - 1) / number
    return (angle + sine * total) / half_turn if degrees % 2 else sine * total


def arctangent_of_one() -> Decimal:
    """A quarter of pi, by Machin's formula."""
    return 4 * arctangent_of_inverse(5) - arctangent_of_inverse(239)


def arctangent_of_inverse(number: int) -> Decimal:
    power = total = 1 / Decimal(number)
    for odd in range(3, 120, 2):
        power /= -number * number
        total += power / odd
    return total


def sine_cosine(angle: Decimal) -> tuple[Decimal, Decimal]:
    sums = [Decimal(1), angle]
    term = angle
    for power in range(2, 60):
        term *= angle / power
        sums[power % 2] += -term if power % 4 in (2, 3) else term
    return sums[1], sums[0]


# --- results --------------------------------------------------------------------------------------------------------


def text(value: float) -> str:
    return repr(float(value))


def passes(gate: dict[str, Any], row: dict[str, Any], kinds: dict[str, str]) -> bool | None:
    """Whether a final row passes a gate; None where it has nothing to judge."""
    found = row["values"].get(gate["observation"])
    if row["status"] != "ok" or found is None:
        return None
    value = as_number(found, kinds[gate["observation"]])
    if isinstance(value, float) and math.isnan(value):
        return False
    if gate["rule"] == "finite":
        return math.isfinite(value)
    return meets(gate["rule"], exact(value), Fraction(gate["limit"]))


def gate_counts(gate: dict[str, Any], rows: list[dict[str, Any]], kinds: dict[str, str]) -> dict[str, Any]:
    planned = [row for row in rows if row["cell"]["excluded"] is None]
    answers = [(row["cell"]["cell"], passes(gate, row, kinds)) for row in planned]
    failed = [cell for cell, answer in answers if answer is False]
    passed = sum(answer is True for _, answer in answers)
    missing = len(answers) - passed - len(failed)
    return {
        "gate": gate["name"], "passed": passed, "failed": len(failed), "missing": missing, "failed_cells": failed[:20]
    }  # fmt: skip


def level_of(protocol: dict[str, Any], estimate: dict[str, Any]) -> float:
    confidence = float(estimate["confidence"])
    if protocol["analysis"]["multiplicity"] == "none":
        return confidence
    shared = sum(len(selected(protocol, item)) for item in protocol["hypotheses"] if item["estimate"])
    return 1 - (1 - confidence) / max(shared, 1)


def estimated(
    protocol: dict[str, Any], estimate: dict[str, Any], workload: str, rows: list[dict[str, Any]], kinds: dict[str, str]
) -> dict[str, Any]:
    strict = [gate for gate in protocol["gates"] if gate["on_failure"] == "exclude"]
    starts = []
    for seed in protocol["design"]["seeds"]:
        for start in range(protocol["design"]["starts"]):
            own = [r for r in rows if (r["cell"]["seed"], r["cell"]["start"]) == (seed, start)]
            value, reason = start_value(estimate, own, strict, kinds)
            starts.append({"seed": seed, "start": start, "value": value, "reason": reason})
    values = [float(item["value"]) for item in starts if item["value"] is not None]
    needed = max(protocol["analysis"]["starts_min"], 2)
    level, found, withheld = level_of(protocol, estimate), None, None
    if len(values) < len(starts) and protocol["analysis"]["missing"] == "withhold":
        withheld = f"{len(starts) - len(values)} of {len(starts)} starts have no value"
    elif len(values) < needed:
        withheld = f"{len(values)} starts have a value, {needed} are needed"
    else:
        found = confidence_interval(values, level)
        withheld = None if found else "an end of the interval is beyond the largest double"
    middle, low, high = map(text, found) if found else (None, None, None)
    return {
        "estimate": estimate["name"], "workload": workload, "level": text(level), "starts": starts, "mean": middle,
        "low": low, "high": high, "withheld": withheld,
    }  # fmt: skip


def start_value(
    estimate: dict[str, Any], rows: list[dict[str, Any]], strict: list[dict[str, Any]], kinds: dict[str, str]
) -> tuple[str | None, str | None]:
    """The number of one start, or the reason why there is none."""
    name = estimate["observation"]
    sides: dict[str, list[float]] = {estimate["numerator"]: [], estimate["denominator"]: []}
    for row in rows:
        cell = row["cell"]
        if cell["arm"] not in sides or cell["excluded"] is not None:
            continue
        if any(passes(gate, row, kinds) is False for gate in strict):
            return None, f"{cell['cell']}: excluded by a gate"
        if row["status"] != "ok" or row["values"][name] is None:
            return None, f"{cell['cell']}: {row['reason'] or 'no value'}"
        sides[cell["arm"]].append(float(as_number(row["values"][name], kinds[name])))
    found = start_number(estimate["rule"], sides[estimate["numerator"]], sides[estimate["denominator"]])
    return (None, "values for which the rule is not defined") if found is None else (text(found), None)


def decided(
    protocol: dict[str, Any], hypothesis: dict[str, Any], by_workload: dict[str, list[Any]], estimates: list[Any],
    kinds: dict[str, str],
) -> dict[str, Any]:  # fmt: skip
    parts = []
    for workload in selected(protocol, hypothesis):
        if hypothesis["rule"] == "gates_pass":
            gates = [gate for gate in protocol["gates"] if gate["name"] in hypothesis["gates"]]
            counts = [gate_counts(gate, by_workload[workload], kinds) for gate in gates]
            failed, missing, passed = (sum(item[key] for item in counts) for key in ("failed", "missing", "passed"))
            decision = "refuted" if failed else "inconclusive" if missing or not passed else "supported"
            reason = f"{failed} failed, {missing} missing, {passed} passed"
        else:
            result = next(e for e in estimates if e["estimate"] == hypothesis["estimate"] and e["workload"] == workload)
            decision = decide(hypothesis, result)
            reason = f"interval {result['low']} to {result['high']}"
            if result["withheld"] is not None:
                reason = f"withheld: {result['withheld']}"
        parts.append({"workload": workload, "decision": decision, "reason": reason})
    return {
        "hypothesis": hypothesis["name"], "claim": hypothesis["claim"],
        "decision": combined([part["decision"] for part in parts]), "components": parts,
    }  # fmt: skip


def decide(hypothesis: dict[str, Any], result: dict[str, Any]) -> str:
    """Supported or refuted only where the whole interval says so."""
    if result["withheld"] is not None:
        return "inconclusive"
    low, high = Fraction(float(result["low"])), Fraction(float(result["high"]))
    if hypothesis["rule"] == "interval_within":
        floor, ceiling = Fraction(hypothesis["low"]), Fraction(hypothesis["high"])
        supported, refuted = floor < low and high < ceiling, high < floor or low > ceiling
    else:
        threshold = Fraction(hypothesis["threshold"])
        supported, refuted = low > threshold, high < threshold
        if hypothesis["rule"] == "interval_below":
            supported, refuted = refuted, supported
    return "supported" if supported else "refuted" if refuted else "inconclusive"


def combined(decisions: list[str]) -> str:
    if "refuted" in decisions:
        return "refuted"
    return "supported" if decisions and set(decisions) == {"supported"} else "inconclusive"


def summaries(protocol: dict[str, Any], by_workload: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    for workload, rows in by_workload.items():
        for arm, column in itertools.product(protocol["arms"], protocol["observations"]):
            name, kind = column["name"], column["type"]
            mine = [r["values"][name] for r in rows if r["cell"]["arm"] == arm["name"] and r["status"] == "ok"]
            values = [float(as_number(v, kind)) for v in mine if v is not None] if kind != "text" else []
            if values:
                nan = any(map(math.isnan, values))
                yield {
                    "workload": workload, "arm": arm["name"], "observation": name, "count": len(values),
                    "mean": text(mean(values) if all(map(math.isfinite, values)) else math.nan),
                    "minimum": text(math.nan if nan else min(values)),
                    "maximum": text(math.nan if nan else max(values)),
                }  # fmt: skip


def charges(protocol: dict[str, Any], account: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for unit, pilot in itertools.product(("cpu", "gpu"), (False, True)):
        own = [
            attempt
            for attempt in account["attempts"].values()
            if "reserved" in attempt and attempt["reserved"]["unit"] == unit and is_pilot(attempt) == pilot
        ]
        if own:
            budget = protocol["budget"]["pilot_device_seconds" if pilot else "device_seconds"]
            ends = [a["end"]["outcome"] if "end" in a else "refused" if "refused" in a else "open" for a in own]
            yield {
                "unit": unit, "pilot": pilot, "budget_ms": milliseconds(budget),
                "debited_ms": held_by(account, unit, pilot), "attempts": dict(Counter(ends)),
            }  # fmt: skip


def derive(known: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Everything that the records say, by the frozen rules."""
    protocol = known["protocol"]
    kinds = {column["name"]: column["type"] for column in protocol["observations"]}
    by_workload: dict[str, list[Any]] = {name: [] for name in workload_names(protocol)}
    for row in rows:
        by_workload[row["cell"]["workload"]].append(row)
    estimates = [
        estimated(protocol, estimate, workload, own, kinds)
        for estimate in protocol["estimates"]
        for workload, own in by_workload.items()
    ]
    hypotheses = [decided(protocol, item, by_workload, estimates, kinds) for item in protocol["hypotheses"]]
    return {
        "schema": "capsule.results/1",
        "manifest": known["identity"],
        "cells": {status: sum(r["status"] == status for r in rows) for status in ("ok", "failed", "not_run")},
        "reasons": dict(Counter(f"{r['status']}: {r['reason']}" for r in rows if r["status"] != "ok")),
        "summaries": list(summaries(protocol, by_workload)),
        "gates": [gate_counts(gate, rows, kinds) for gate in protocol["gates"]],
        "estimates": estimates,
        "hypotheses": hypotheses,
        "charges": list(charges(protocol, known["account"])),
        "outcome": combined([item["decision"] for item in hypotheses]),
    }


def differences(packed: Any, derived: Any, key: str = "results", size: float = 0.0) -> Iterator[str]:
    """Where two results differ; computed numbers may, by 1e-12 of themselves, and mean and ends of the larger end."""
    if isinstance(packed, dict) and isinstance(derived, dict) and packed.keys() == derived.keys():
        ends = [abs(float(derived[end])) for end in ("low", "high") if isinstance(derived.get(end), str)]
        for name in derived:
            yield from differences(packed[name], derived[name], name, max([size, *ends]))
    elif isinstance(packed, list) and isinstance(derived, list) and len(packed) == len(derived):
        for one, other in zip(packed, derived, strict=True):
            yield from differences(one, other, key, size)
    elif type(packed) is not type(derived) or (packed != derived and not close(packed, derived, key, size)):
        yield f"{key}: {str(derived)[:60]} by the records, {str(packed)[:60]} in the results"


def close(packed: Any, derived: Any, key: str, size: float) -> bool:
    if not isinstance(packed, str):
        return False
    if key == "reason" and packed.count(" ") == derived.count(" "):
        words = derived.split(" ")
        if words[0] == "interval":
            size = max(abs(float(words[1])), abs(float(words[3])))
        pairs = zip(packed.split(" "), words, strict=True)
        return all(one == other or close(one, other, "mean", size) for one, other in pairs)
    if key not in ("value", "mean", "low", "high", "minimum", "maximum", "level"):
        return False
    try:
        one, other = float(packed), float(derived)
    except ValueError:
        return False
    spelled = text(one) == packed and text(other) == derived
    scale = size if key in ("mean", "low", "high") else 0.0
    return spelled and math.isclose(one, other, rel_tol=1e-12, abs_tol=max(1e-300, 1e-12 * scale))


# --- signatures, timestamps and the order in time -------------------------------------------------------------------

ARMOUR = (b"-----BEGIN SSH SIGNATURE-----", b"-----END SSH SIGNATURE-----")
KEY_TYPES = (
    "ssh-ed25519 ssh-rsa ecdsa-sha2-nistp256 ecdsa-sha2-nistp384 ecdsa-sha2-nistp521 sk-ssh-ed25519@openssh.com "
    "sk-ecdsa-sha2-nistp256@openssh.com"
).split()
SIGNATURE_FILES = ["manifest.json.sig", *(f"manifest.json.{number}.sig" for number in range(2, 10))]
LARGEST_SIGNATURE = 65_536
SIGNED_DATA, TIMESTAMP, SHA256 = (
    bytes.fromhex(text) for text in ("2a864886f70d010702", "2a864886f70d0109100104", "608648016503040201")
)


def ssh_strings(data: bytes) -> list[bytes]:
    """Cut bytes into strings with their length before them (S-04)."""
    found, stream = [], io.BytesIO(data)
    while head := stream.read(4):
        size = int.from_bytes(head)
        found.append(stream.read(size))
        if len(head) < 4 or len(found[-1]) < size:
            raise Bad("a string that is cut")
    return found


def first_string(data: bytes) -> bytes:
    """The string with which bytes begin; empty where they do not begin with one."""
    size = int.from_bytes(data[:4])
    return data[4 : 4 + size] if len(data) >= 4 + size else b""


def read_sshsig(data: bytes, namespace: str) -> dict[str, str]:
    """S-03 to S-05: the type of the key, its name and its public half, of a signature for this namespace."""
    begin, *body, end = data.removesuffix(b"\n").split(b"\n") if b"\n" in data.removesuffix(b"\n") else (b"", b"")
    if len(data) > LARGEST_SIGNATURE or (begin, end) != ARMOUR or not body or not all(1 <= len(x) <= 100 for x in body):
        raise Bad("not an armoured signature")
    joined = b"".join(body)
    try:
        blob = binascii.a2b_base64(joined, strict_mode=True)
    except ValueError as error:
        raise Bad(f"not base64: {error}") from error
    if binascii.b2a_base64(blob, newline=False) != joined or blob[:10] != b"SSHSIG\0\0\0\1":
        raise Bad("not a signature of version 1 in canonical base64")
    strings = ssh_strings(blob[10:])
    if len(strings) != 5:
        raise Bad("not five strings")
    key, found, reserved, algorithm, signature = strings
    kind = first_string(key).decode("latin-1")
    if kind not in KEY_TYPES or reserved or algorithm not in (b"sha256", b"sha512") or not first_string(signature):
        raise Bad("another key, something reserved, another hash or no signature")
    if found != namespace.encode():
        raise Bad(f"a signature for {found[:40]!r}")
    name = binascii.b2a_base64(hashlib.sha256(key).digest(), newline=False).decode().rstrip("=")
    return {"type": kind, "key": f"SHA256:{name}", "public": binascii.b2a_base64(key, newline=False).decode()}


def ssh_keygen(message: bytes, *arguments: str) -> tuple[bool, str]:
    environment = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(["ssh-keygen", "-Y", *arguments], input=message, capture_output=True, env=environment)
    return done.returncode == 0, done.stderr.decode(errors="replace")


def judge_signature(
    message: bytes, data: bytes, namespace: str, public: str, signers: bytes | None, at: str | None
) -> tuple[str, list[str]]:
    """S-06 and S-07: what ssh-keygen says of a signature, and the principals that the policy has for its key."""
    with tempfile.TemporaryDirectory() as folder:
        file, policy = Path(folder, "signature"), Path(folder, "signers")
        file.write_bytes(data)
        if not ssh_keygen(message, "check-novalidate", "-n", namespace, "-s", str(file))[0]:
            return "broken", []
        if signers is None:
            return "unknown", []
        policy.write_bytes(signers)
        when = ["-O", "verify-time=" + re.sub(r"\.[0-9]+|[-:T]", "", at)] if at else []
        said, accepted, names = "", [], principals(signers.decode("latin-1"), public)
        for name in names:
            good, words = ssh_keygen(
                message, "verify", "-n", namespace, "-s", str(file), "-f", str(policy), "-I", name, *when
            )
            accepted += [name] if good else []
            said += words
    if accepted:
        return "accepted", accepted
    if "key has expired" in said or "key is not yet valid" in said:
        return "not_valid", names
    return ("not_permitted", names) if "not permitted for use in signature namespace" in said else ("unknown", [])


def principals(policy: str, public: str) -> list[str]:
    """The names of all lines that hold a key, each once, those that are only excluded left out."""
    found: list[str] = []
    for line in policy.splitlines():
        first, *others = line.split() or [""]
        names = line.split('"')[1] if first.startswith('"') else first
        if public in others and not first.startswith("#"):
            found += [name for name in names.split(",") if name and name[0] != "!" and name not in found]
    return found


def der(data: bytes, *tags: int, more: bool = False) -> list[bytes]:
    """S-08: cut bytes into elements, which must have these tags, and return their contents; `more` may follow."""
    found: list[tuple[int, bytes]] = []
    while data:
        if data[0] & 31 == 31 or len(data) < 2:
            raise Bad("not DER")
        head, size = 2, data[1]
        if size > 127:
            head += size - 128
            size = int.from_bytes(data[2:head])
            shortest = 2 + (size.bit_length() + 7) // 8 if size > 127 else 0
            if not 3 <= head <= 6 or head != shortest:
                raise Bad("a length that is not the shortest")
        if len(data) < head + size:
            raise Bad("an element that is cut")
        found.append((data[0], data[head : head + size]))
        data = data[head + size :]
    if [tag for tag, _ in found[: len(tags)]] != list(tags) or (not more and len(found) > len(tags)):
        raise Bad("other elements than those of a timestamp")
    return [content for _, content in found[: len(tags)]]


def read_token(data: bytes) -> tuple[str, str]:
    """S-08 and S-09: the digest that a granted reply is over, and its time."""
    if len(data) > LARGEST_SIGNATURE:
        raise Bad("a token that is too large")
    status, content = der(der(data, 0x30)[0], 0x30, 0x30)
    kind, signed = der(content, 0x06, 0xA0)
    inner = der(der(signed, 0x30)[0], 0x02, 0x31, 0x30, more=True)[2]
    inner_kind, octets = der(inner, 0x06, 0xA0)
    info = der(der(octets, 0x04)[0], 0x30)[0]
    version, _, imprint, _, written = der(info, 0x02, 0x06, 0x30, 0x02, 0x18, more=True)
    algorithm, digest_found = der(imprint, 0x30, 0x04)
    if der(status, 0x02, more=True)[0] not in (b"\0", b"\1") or (kind, inner_kind) != (SIGNED_DATA, TIMESTAMP):
        raise Bad("not a granted timestamp")
    if version != b"\1" or der(algorithm, 0x06, more=True)[0] != SHA256 or len(digest_found) != 32:
        raise Bad("another version, or not over a SHA-256")
    parts = re.fullmatch(r"(....)(..)(..)(..)(..)(..)(\.[0-9]{0,5}[1-9])?Z", written.decode("latin-1"))
    if not parts or not re.fullmatch(r"[0-9]{14}", "".join(parts.groups()[:6])) or parts[4] > "23":
        raise Bad("not a time")
    told = f"{parts[1]}-{parts[2]}-{parts[3]}T{parts[4]}:{parts[5]}:{parts[6]}{parts[7] or ''}Z"
    try:
        datetime.fromisoformat(told)
    except ValueError as error:
        raise Bad(f"no time that exists: {told}") from error
    return "sha256:" + digest_found.hex(), told


def judge_token(manifest: bytes, data: bytes, authority: bytes | None) -> str:
    """S-10: what openssl says of a token."""
    if authority is None:
        return "unchecked"
    with tempfile.TemporaryDirectory() as folder:
        files = {"data": manifest, "in": data, "CAfile": authority}
        arguments: list[str] = []
        for name, content in files.items():
            Path(folder, name).write_bytes(content)
            arguments += [f"-{name}", str(Path(folder, name))]
        done = subprocess.run(["openssl", "ts", "-verify", *arguments], capture_output=True)
    if done.returncode == 0:
        return "verified"
    return "foreign" if b"certificate verify error" in done.stderr else "broken"


def read_tokens(known: Known) -> None:
    """The tokens of all manifests, and what is wrong with some."""
    stamped = [number for number, files in sorted(known["generations"].items()) if "manifest.json.tsr" in files]
    if len(stamped) > 100:
        known["token_faults"].append("more than 100 tokens")
    for number in stamped[:100]:
        files = known["generations"][number]
        manifest = files.get("manifest.json", b"")
        try:
            imprint, told = read_token(files["manifest.json.tsr"])
        except Bad as bad:
            known["token_faults"].append(f"manifest {number}: {bad}")
            continue
        if imprint != sha(manifest):
            known["token_faults"].append(f"manifest {number}: a token over something else")
            continue
        answer = judge_token(manifest, files["manifest.json.tsr"], known["trust"]["authority"])
        if answer == "broken":
            known["token_faults"].append(f"manifest {number}: a token that its certificate does not bear out")
        known["tokens"].append({"manifest": number, "time": told, "answer": answer})


def signatures_offered(known: Known) -> Iterator[tuple[str, bytes, str, bytes | None, int | None]]:
    """S-01 and S-02: file, bytes, namespace, what should be signed, and the number of the manifest."""
    for number, files in sorted(known["generations"].items()):
        for name in SIGNATURE_FILES:
            if name in files:
                place = f"1-manifest/{number:03d}/{name}"
                yield place, files[name], "capsule-manifest", files.get("manifest.json", b""), number
    message = (known["archive"] + "\n").encode() if known["archive"] else None
    for name, data in known["trust"]["signatures"]:
        yield name, data, "capsule-archive", message, None


def v08_signature(known: Known) -> Iterator[str]:
    read_tokens(known)
    trust = known["trust"]
    offered = list(signatures_offered(known))
    if len(offered) > 100:
        yield "more than 100 signatures"
    for place, data, namespace, message, number in offered[:100]:
        try:
            read = read_sshsig(data, namespace)
        except Bad as bad:
            yield f"{place}: {bad}"
            continue
        stamped = [t["time"] for t in known["tokens"] if (t["manifest"], t["answer"]) == (number, "verified")]
        answer, names, at = "unchecked", list[str](), None
        if message is not None and trust["checks"]:
            for at in [*stamped, None]:
                answer, names = judge_signature(message, data, namespace, read["public"], trust["signers"], at)
                if answer != "not_valid":
                    break
        if answer == "broken":
            yield f"{place}: not over this object"
        known["signatures"].append({
            "file": place, "manifest": number, "key_type": read["type"], "key": read["key"], "answer": answer,
            "principals": names, "judged_at": at if answer == "accepted" else None,
        })  # fmt: skip
    accepted = {found["manifest"] for found in known["signatures"] if found["answer"] == "accepted"}
    capsule, manifest = None in accepted, max(known["generations"], default=0) in accepted
    met = {"any": capsule or manifest, "capsule": capsule, "manifest": manifest, "both": capsule and manifest}
    if trust["signers"] is not None and not met[trust["signature_of"]]:
        raise Skip("what was demanded is not signed by a trusted key", True)
    if not accepted:
        raise Skip("signed by nobody who is trusted", False)


def v09_timestamp(known: Known) -> Iterator[str]:
    yield from known["token_faults"]
    verified = {token["manifest"] for token in known["tokens"] if token["answer"] == "verified"}
    if known["trust"]["authority"] is not None and max(known["generations"], default=0) not in verified:
        raise Skip("no token of the manifest in force by the given authority", True)
    if not verified:
        raise Skip("no verified token", False)


def order_in_time(known: Known, sound: bool) -> list[dict[str, Any]]:
    """S-11 and S-12: every claim, with its evidence."""
    claims: list[dict[str, Any]] = []

    def claim(event: str, manifest: int | None, evidence: str = "none", proven: bool = False, **more: Any) -> None:
        claims.append({
            "event": event, "manifest": manifest, "after": None, "at": None, "evidence": evidence, "proven": proven,
            "late": False, **more,
        })  # fmt: skip

    events, hashes = known["chain"]["events"], known["chain"]["hashes"]
    for number, identity, manifest in known["manifests"]:
        name = "freeze" if number == min(known["generations"]) == 1 else "amendment"
        token = next((t for t in known["tokens"] if t["manifest"] == number and t["answer"] != "broken"), None)
        own = [event for event in events if event["data"].get("manifest") == identity]
        adopted = next((event for event in own if event["event"] == "manifest_adopted"), None)
        first = next((event for event in own if event["event"] == "reserved" and not event["data"]["pilot"]), None)
        if token and token["answer"] == "verified":
            claim(name, number, "signed token", True, at=token["time"])
        elif adopted:
            claim(name, number, "local clock only", at=adopted["at"]["realtime"])
        else:
            claim(name, number)
        seen = (manifest["supersedes"] or {"ledger_events": 0})["ledger_events"]
        if seen:
            there = hashes[seen - 1 : seen] == [manifest["supersedes"]["ledger_head"]]
            claim(name, number, "ledger chain", sound and there, after=f"event {seen - 1}")
        for found in known["signatures"]:
            if found["manifest"] == number and found["answer"] != "broken":
                claim("signature", number)
        if token:
            verified = token["answer"] == "verified"
            claim("timestamp", number, "signed token" if verified else "none", verified, at=token["time"])
        if first:
            began = first["at"]["realtime"]
            in_order = adopted is not None and adopted["seq"] < first["seq"]
            claim("first attempt", number, "ledger chain", sound and in_order, after=f"{name} {number}", at=began)
            if token is not None:
                late = datetime.fromisoformat(began) < datetime.fromisoformat(token["time"])
                claim("first attempt", number, "local clock only", after=f"timestamp {number}", at=began, late=late)
    for found in known["signatures"]:
        if found["manifest"] is None and found["answer"] != "broken":
            claim("capsule signature", None)
    return claims


def rests_on(known: Known) -> list[str]:
    """S-13: what the verdict rests on."""
    accepted = {found["manifest"] for found in known["signatures"] if found["answer"] == "accepted"}
    grounds = {
        "capsule identity from elsewhere": known["archive"] in known["against"],
        "manifest identity from elsewhere": any(item[1] in known["against"] for item in known["manifests"]),
        "capsule signature": None in accepted,
        "manifest signature": bool(accepted - {None}),
        "timestamp": any(token["answer"] == "verified" for token in known["tokens"]),
        "ledger chain": bool(known["chain"]["events"]),
    }
    sealed = grounds["capsule identity from elsewhere"] or grounds["capsule signature"]
    return [*(name for name, holds in grounds.items() if holds), *([] if sealed else ["no seal from outside"])]


# --- the checks: each returns its findings, or says that it cannot be made ------------------------------------------

REQUIRED = (
    "0-header.json", "2-ledger.head.json", "2-ledger.jsonl", "4-records/rows.parquet", "7-results/results.json",
    "8-README/VERIFY.md",
)  # fmt: skip


def need(present: Any, what: str) -> None:
    if not present:
        raise Skip(f"{what} could not be read", True)


def v01_container(known: Known) -> Iterator[str]:
    yield from known["in_container"]


def v02_members(known: Known) -> Iterator[str]:
    yield from known["in_members"]
    for name, (_, found, _) in known["members"].items():
        if name.startswith(("5-sources/", "6-oracles/")) and found != "sha256:" + name[10:]:
            yield f"{name} holds other bytes"
    need(known["archive"], "the member table")


def v03_required(known: Known) -> Iterator[str]:
    absent = [name for name in REQUIRED if name not in known["members"]]
    if not known["generations"] or sorted(known["generations"]) != list(range(1, len(known["generations"]) + 1)):
        absent.append("1-manifest/001")
    for number, files in known["generations"].items():
        wanted = ("cells.jsonl", "manifest.json", "protocol.toml", "sources.jsonl")
        absent += [f"1-manifest/{number:03d}/{name}" for name in wanted if name not in files]
    if absent:
        raise Skip(f"absent: {', '.join(absent)}", True)
    yield from ()


def read_manifest(data: bytes) -> dict[str, Any]:
    manifest = decode_json(data)
    if not MANIFEST(manifest):
        raise Bad("not a manifest")
    wrong = complaint(manifest["protocol"])
    if wrong:
        raise Bad(f"its protocol: {wrong}")
    return dict(manifest)


def v04_manifest(known: Known) -> Iterator[str]:
    commas = 0
    for number, files in sorted(known["generations"].items()):
        need("manifest.json" in files, f"manifest {number}")
        commas += files["manifest.json"].count(b",")
        if commas > 32_000:
            raise Bad("more values than the manifests of a chain may have")
        manifest = read_manifest(files["manifest.json"])
        known["manifests"].append((number, sha(files["manifest.json"]), manifest))
        arms = [(arm["name"], arm["revision"]) for arm in manifest["protocol"]["arms"]]
        if [(arm["arm"], arm["revision"]) for arm in manifest["arms"]] != arms:
            yield f"manifest {number} names other arms than its protocol"
        lists = {"cells.jsonl": manifest["cells"], "sources.jsonl": manifest["sources"]}
        for arm in manifest["arms"]:
            name = f"sources-{arm['revision']}.jsonl" if arm["revision"] else "sources.jsonl"
            if lists.setdefault(name, arm["sources"]) != arm["sources"]:
                yield f"{name} of arm {arm['arm']} is another list"
        for name in files.keys() - lists.keys():
            if name.endswith(".jsonl"):
                yield f"{name} is a list that manifest {number} does not name"
        for name, expected in lists.items():
            data = files.get(name, b"")
            if expected != {"count": data.count(b"\n"), "sha256": sha(data)}:
                yield f"{name} is not the list of manifest {number}"
        file = files.get("protocol.toml", b"")
        if manifest["protocol_file"] != {"size": len(file), "sha256": sha(file)}:
            yield f"protocol.toml is not that of manifest {number}"
        else:
            protocol = read_toml(file)
            wrong = complaint(protocol)
            if wrong:
                raise Bad(f"protocol.toml: {wrong}")
            if encode_json(protocol) != encode_json(manifest["protocol"]):
                yield f"the protocol of manifest {number} is not that of protocol.toml"
    need(known["manifests"], "the manifest")


def v05_plan(known: Known) -> Iterator[str]:
    need(known["manifests"], "the manifest")
    known["number"], known["identity"], known["manifest"] = known["manifests"][-1]
    known["protocol"] = known["manifest"]["protocol"]
    known["cells"] = plan_of(known["protocol"])
    lines = b"".join(encode_json(cell) + b"\n" for cell in known["cells"])
    if known["generations"][known["number"]].get("cells.jsonl", b"") != lines:
        yield "the cells are not those of the protocol"


def v06_manifest_chain(known: Known) -> Iterator[str]:
    need(known["manifests"], "the manifest")
    before, name = None, None
    for number, identity, manifest in known["manifests"]:
        if (manifest["supersedes"] or {"manifest": None})["manifest"] != before:
            yield f"manifest {number} does not supersede the one before it"
        if name not in (None, manifest["protocol"]["name"]):
            yield f"manifest {number} is of another protocol"
        before, name = identity, manifest["protocol"]["name"]


def v07_against(known: Known) -> Iterator[str]:
    if not known["against"]:
        raise Skip("nothing to check against", False)
    identities = {identity for _, identity, _ in known["manifests"]} | {known["archive"]}
    for expected in known["against"]:
        if expected not in identities:
            yield f"{expected} is neither the capsule nor a manifest"


def v10_ledger_chain(known: Known) -> Iterator[str]:
    need("2-ledger.jsonl" in known["members"], "the ledger")
    known["chain"] = read_ledger(known["members"]["2-ledger.jsonl"][2])
    known["account"] = add_up(known["chain"]["events"])
    yield from known["chain"]["wrong"]


def v11_ledger_head(known: Known) -> Iterator[str]:
    need("2-ledger.head.json" in known["members"], "the head")
    head = decode_json(known["members"]["2-ledger.head.json"][2])
    if not HEAD(head):
        raise Bad("not a head")
    hashes, count = known["chain"]["hashes"], head["count"]
    if not len(hashes) - 1 <= count <= len(hashes):
        yield f"the head counts {count} of {len(hashes)} events"
    elif count and hashes[count - 1] != head["sha256"]:
        yield "the head has another hash"


def v12_attempt_states(known: Known) -> Iterator[str]:
    need(known["chain"]["events"], "the ledger")
    account = known["account"]
    yield from account["wrong"]
    for name, attempt in account["attempts"].items():
        if attempt["state"] not in OVER:
            yield f"{name} has not ended"
    if known["manifests"] and account["protocol"] != known["manifests"][-1][2]["protocol"]["name"]:
        yield "the ledger of another protocol"
    chain = [identity for _, identity, _ in known["manifests"]]
    if account["manifests"] != chain[: len(account["manifests"])]:
        yield "the ledger of other manifests"
    hashes = [None, *known["chain"]["hashes"]]
    for number, _, manifest in known["manifests"]:
        said = manifest["supersedes"]
        if said is None:
            continue
        count = said["ledger_events"]
        if count >= len(hashes) or said["ledger_head"] != hashes[count]:
            yield f"manifest {number} names a ledger that never was"
            continue
        by_then = bisect_left(known["chain"]["numbers"], count)
        then = add_up(known["chain"]["events"][:by_then])["attempts"].values()
        pilots = [is_pilot(attempt) for attempt in then if "end" in attempt]
        rows = sum(attempt["end"]["rows"] for attempt in then if "end" in attempt)
        seen = {"attempts_seen": pilots.count(False), "pilot_attempts_seen": pilots.count(True), "rows_seen": rows}
        if any(said[key] != value for key, value in seen.items()):
            yield f"manifest {number} says that something else had been seen"


def reservation_faults(attempt: dict[str, Any], budget: dict[str, Any]) -> Iterator[str]:
    """Where a reservation is not what the frozen budget allows."""
    reserved = attempt["reserved"]
    if reserved["reserved_ms"] != worst_case(budget):
        yield "not the worst case reserved"
    if not len(reserved["devices"]) == len({*reserved["devices"]}) == budget["devices"]:
        yield "other devices than the budget has"
    if budget["device"] in ("cpu", "gpu") and budget["device"] != reserved["unit"]:
        yield f"a {reserved['unit']} in place of a {budget['device']}"
    until = None if is_pilot(attempt) else budget["not_after"]
    if until is not None and datetime.fromisoformat(attempt["since"]) > datetime.fromisoformat(until):
        yield f"begun at {attempt['since']}, after {until}"


def v13_charges(known: Known) -> Iterator[str]:
    need(known["manifests"] and known["chain"]["events"], "the manifest or the ledger")
    budgets = {identity: manifest["protocol"]["budget"] for _, identity, manifest in known["manifests"]}
    for name, attempt in known["account"]["attempts"].items():
        reserved, end = attempt.get("reserved"), attempt.get("end")
        if reserved is None:
            continue
        if reserved["manifest"] in budgets:
            for words in reservation_faults(attempt, budgets[reserved["manifest"]]):
                yield f"{name}: {words}"
        if end is None:
            continue
        charge, devices = end["charge"], len(reserved["devices"])
        if attempt["state"] == "settled" and not charge["observed"]:
            yield f"{name}: settled without being observed"
        bounds = charge["lower_ms"], charge["upper_ms"], charge["debited_ms"]
        if attempt["state"] == "settled":
            leased, released = attempt["intent"]["leased"], attempt["device_clean"]["released"]
            measured = devices * (released["boottime_ms"] - leased["boottime_ms"])
            if leased["boot_id"] != released["boot_id"] or bounds != (measured, measured, measured):
                yield f"{name}: {measured} ms from lease to release, {bounds} charged"
            if end["overrun_ms"] != max(0, measured - reserved["reserved_ms"]):
                yield f"{name}: {measured} ms of {reserved['reserved_ms']} reserved, {end['overrun_ms']} over"
        elif not devices * attempt["lived"] <= bounds[0] <= bounds[1] == bounds[2]:
            yield f"{name}: {bounds} charged for an end that was not seen"
    account = new_account()
    for event in known["chain"]["events"]:
        own = event["data"]
        if event["event"] == "reserved" and own["manifest"] in budgets:
            budget = budgets[own["manifest"]]
            limit = milliseconds(budget["pilot_device_seconds" if own["pilot"] else "device_seconds"])
            if held_by(account, own["unit"], own["pilot"]) + own["reserved_ms"] > limit:
                yield f"{event['attempt']}: reserved beyond the budget"
            before = [a for a in account["attempts"].values() if "reserved" in a and "refused" not in a]
            if sum(is_pilot(attempt) == own["pilot"] for attempt in before) >= budget["attempts_max"]:
                yield f"{event['attempt']}: reserved beyond the number of attempts"
        book(account, event)


def v14_attempt_files(known: Known) -> Iterator[str]:
    need(known["chain"]["events"], "the ledger")
    recorded = {
        f"3-attempts/{name}/{file}": value
        for name, attempt in known["account"]["attempts"].items()
        if "end" in attempt
        for file, value in attempt["end"]["files"].items()
    }
    found = {
        name: {"size": size, "sha256": value}
        for name, (size, value, _) in known["members"].items()
        if name.startswith("3-attempts/")
    }
    for name in sorted(found.keys() | recorded.keys()):
        if found.get(name) != recorded.get(name):
            yield f"{name} is not what the ledger recorded"


LONGEST_PATH, LONGEST_LINE = 4096, 1 << 20


def read_sources(data: bytes) -> list[dict[str, Any]]:
    entries, last = [], None
    if max(map(len, data.split(b"\n"))) > LONGEST_LINE:
        raise Bad("a line that is too long")
    for entry in decode_lines(data):
        if not SOURCE(entry):
            raise Bad("not a source")
        try:
            path = raw_path(entry["path"])
        except ValueError as error:
            raise Bad("not a path") from error
        if last is not None and path <= last:
            raise Bad("paths out of order")
        if {entry["kind"] == "link"} != {entry["target"] is not None, entry["mode"] is None}:
            raise Bad("a target or a mode out of place")
        entries.append(entry)
        last = path
    return entries


def written_path(text: str) -> bytes:
    """The bytes of a path in the one form that they have: `hex:` only where text could not stand for them."""
    if not text.startswith("hex:"):
        return text.encode()
    if not re.fullmatch("([0-9a-f]{2})*", text[4:]):
        raise Bad("not the hexadecimal digits of a path")
    path = bytes.fromhex(text[4:])
    try:
        needed = path.decode().startswith("hex:")
    except ValueError:
        needed = True
    if not needed:
        raise Bad("hexadecimal digits where text would do")
    return path


def raw_path(text: str) -> bytes:
    return bytes.fromhex(text[4:]) if text.startswith("hex:") else text.encode()


def below_files(paths: set[bytes]) -> Iterator[str]:
    for path in paths:
        if len(path) > LONGEST_PATH:
            continue
        parts = path.split(b"/")
        if any(b"/".join(parts[:count]) in paths for count in range(1, len(parts))):
            yield f"{path!r} lies below a file"


def source_faults(entry: dict[str, Any]) -> Iterator[str]:
    """What no honest freeze writes."""
    try:
        path = written_path(entry["path"])
        target = None if entry["target"] is None else written_path(entry["target"])
    except Bad as bad:
        yield str(bad)
        return
    parts = path.split(b"/")
    if len(path) > LONGEST_PATH:
        yield f"a path of {len(path)} bytes"
    if {b"", b".", b"..", b".git"} & {part.lower() for part in parts} or max(map(len, parts)) > 255 or 0 in path:
        yield f"{entry['path']!r} is no path inside the tree"
    if target is not None and {"size": len(target), "sha256": sha(target)} != {k: entry[k] for k in ("size", "sha256")}:
        yield f"{entry['path']!r} is a link with the digest of something else than its target"


def v15_sources(known: Known) -> Iterator[str]:
    need(known["manifests"], "the manifest")
    frozen = set()
    for number, files in sorted(known["generations"].items()):
        for name in sorted(files):
            if name.startswith("sources"):
                entries = read_sources(files[name])
                frozen |= {entry["sha256"] for entry in entries if entry["kind"] == "file"}
                for entry in entries:
                    yield from source_faults(entry)
                yield from below_files({raw_path(entry["path"]) for entry in entries})
                if number == known["number"]:
                    known["sources"][name] = entries
    present = {"sha256:" + name[10:] for name in known["members"] if name.startswith("5-sources/")}
    for value in frozen ^ present:
        yield f"{value} is frozen and absent, or there and not frozen"
    allowed = {
        (identity, arm["sources"]["sha256"]) for _, identity, manifest in known["manifests"] for arm in manifest["arms"]
    }
    for name, attempt in known["account"]["attempts"].items():
        ran = attempt.get("reserved", {}).get("manifest"), attempt.get("intent", {}).get("snapshot")
        if "intent" in attempt and not is_pilot(attempt) and ran not in allowed:
            yield f"{name} ran sources that its manifest does not freeze"


def v16_imports(known: Known) -> Iterator[str]:
    need(known["manifests"], "the manifest")
    arms = named(known["protocol"]["arms"])
    for name, attempt in known["account"]["attempts"].items():
        if "end" not in attempt or is_pilot(attempt) or attempt["reserved"]["manifest"] != known["identity"]:
            continue
        if attempt["end"]["outcome"] not in ("completed", "trial_error"):
            continue
        process = attempt["reserved"]["process"]
        ran = {cell["arm"] for cell in known["cells"] if cell["process"] == process and cell["excluded"] is None}
        member = f"3-attempts/{name}/provenance.jsonl"
        if member not in known["members"]:
            if any(arms[arm]["trial"] for arm in ran):
                yield f"{name} has no record of its imports"
            continue
        revisions = {arms[arm]["revision"] for arm in ran}
        lists = [f"sources-{revision}.jsonl" if revision else "sources.jsonl" for revision in revisions]
        frozen = {(entry["path"], entry["sha256"]) for item in lists for entry in known["sources"].get(item, [])}
        modules = [arms[arm]["trial"].partition(":")[0] for arm in ran if arms[arm]["trial"]]
        items = [line if isinstance(line, dict) else {} for line in decode_lines(known["members"][member][2])]
        shown = [item.get("module") for item in items if item.get("origin") == "source"]
        if attempt["end"]["outcome"] == "completed" and any(module not in shown for module in modules):
            yield f"{name} completed without the modules of its trials"
        for item in items:
            if item.get("origin") == "source":
                if (str(item.get("name")), str(item.get("sha256"))) not in frozen:
                    yield f"{name}: module {item.get('module')} is not frozen for its arm"
            elif item.get("origin") not in ("distribution", "stdlib", "tool"):
                yield f"{name}: module {item.get('module')} came from nowhere known"


JOURNAL = re.compile("3-attempts/.*/journal[.]jsonl")
AFTER_ZERO = "completed trial_error bad_records incomplete leaked_descendants provenance source_changed".split()
OF_DEVICE = "config_changed contaminated device_lost device_mismatch device_suspect unverifiable".split()


def exit_faults(ended: dict[str, Any], outcome: str) -> Iterator[str]:
    """Where an exit and its wait status, or an outcome and its exit, contradict each other."""
    status = ended["wait_status"]
    code = by = None
    if status is not None:
        by = status % 128 or None
        code = status // 256 % 256 if by is None else None
    if [ended["exit_code"], ended["signal"]] != [code, by]:
        yield f"wait status {status} with exit code {ended['exit_code']} and signal {ended['signal']}"
    if ended["cause"] not in ("exited", "signalled"):
        follows = [ended["cause"]]
    elif by is not None:
        follows = ["oom_cgroup", "oom_host", "sigkill_unattributed"] if by == 9 else ["signalled"]
    else:
        follows = AFTER_ZERO if code == 0 else [] if code is None else ["exit_nonzero"]
    if outcome not in [*follows, *OF_DEVICE]:
        yield f"{outcome} after cause {ended['cause']}, exit code {code} and signal {by}"


def v17_records(known: Known) -> Iterator[str]:
    need(known["manifests"] and known["cells"] and known["chain"]["events"], "the plan or the ledger")
    columns = known["protocol"]["observations"]
    last = max(cell["process"] for cell in known["cells"])
    for name, attempt in known["account"]["attempts"].items():
        reserved, end = attempt.get("reserved"), attempt.get("end")
        if reserved is None or "refused" in attempt or reserved["manifest"] != known["identity"]:
            continue
        if reserved["process"] > last:
            yield f"{name}: no such process"
            continue
        mine = [cell for cell in known["cells"] if cell["process"] == reserved["process"]]
        cells = [cell["cell"] for cell in mine if cell["excluded"] is None]
        data = known["members"].get(f"3-attempts/{name}/journal.jsonl", (0, "", b""))[2]
        journal = known["journals"][name] = read_journal(data, columns, cells)
        if end is None:
            continue
        if end["rows"] != len(journal["rows"]):
            yield f"{name}: {end['rows']} rows by the ledger, {len(journal['rows'])} in its journal"
        of_journal = judged(cells, journal)
        if end["outcome"] not in (of_journal, *{*FAILURES, *VOID} - {"bad_records", "incomplete", "trial_error"}):
            yield f"{name}: {end['outcome']} by the ledger, {of_journal} by its journal"
        if attempt["state"] == "settled":
            for words in exit_faults(attempt["exit"], end["outcome"]):
                yield f"{name}: {words}"
    need("4-records/rows.parquet" in known["members"], "the table")
    if known["number"] != len(known["generations"]):
        raise Bad("a table without the manifest that says its columns")
    expected = table_of(known, final_rows(known))
    lines = sum(content.count(b"\n") for name, (_, _, content) in known["members"].items() if JOURNAL.fullmatch(name))
    most = known["manifest"]["cells"]["count"] + lines
    packed = known["members"]["4-records/rows.parquet"][2]
    if read_table(packed, record_columns(known["protocol"]), len(expected), most) != expected:
        yield "the table is not that of the journals"


def v18_results(known: Known) -> Iterator[str]:
    need(known["manifests"] and known["cells"] and known["chain"]["events"], "the manifest, plan or ledger")
    known["results"] = derive(known, final_rows(known))
    need("7-results/results.json" in known["members"], "the results")
    packed = decode_json(known["members"]["7-results/results.json"][2])
    yield from differences(packed, known["results"])


THROTTLES = (
    "gpu_idle applications_clocks_setting sw_power_cap hw_slowdown sync_boost sw_thermal_slowdown hw_thermal_slowdown "
    "hw_power_brake_slowdown display_clock_setting"
).split()


def read_sample(line: bytes) -> dict[str, Any]:
    """One line of telemetry; it is refused where it is no sample or contradicts itself."""
    if len(line) > 1 << 20:
        raise Bad("a line that is too long")
    sample = decode_json(line)
    if not SAMPLE(sample):
        raise Bad("not a sample")
    null = {name for name in READINGS if sample[name] is None}
    reasons = {*sample["missing"]}
    if sample["error"] is None:
        if reasons != null or sample["lost"]:
            raise Bad("reasons for something else than what is null, or a lost device that answered")
    elif not reasons <= null or len(null) < 14 or sample["own"] or sample["foreign"]:
        raise Bad("something read from a device that did not answer")
    if (sample["foreign"] != []) != (sample["exclusivity"] == "contaminated"):
        raise Bad("foreign processes and no contamination, or the reverse")
    if sample["error"] is not None and sample["exclusivity"] != "unverifiable":
        raise Bad("a silent device that is not unverifiable")
    return dict(sample)


def due(after: int) -> int:
    """How many milliseconds after a sample the next is due, that long after the lease."""
    return sorted((500, after // 2000, 2000))[1]


def summary_of(samples: list[dict[str, Any]], leased: int, released: int) -> dict[str, Any]:
    """What the samples of one device add up to."""
    released = max(leased, released)
    inside = [sample for sample in samples if leased <= sample["at_ms"] <= released]
    answers = [sample for sample in inside if sample["error"] is None]
    observed, before, throttled = 0, leased, Counter[str]()
    for sample in [*answers, {"at_ms": released, "throttle": None}] if answers else []:
        passed, before = sample["at_ms"] - before, sample["at_ms"]
        if 0 <= passed <= 3 * due(before - leased):
            observed += passed
            mask = sample["throttle"] or 0
            for bit in range(mask.bit_length()):
                if mask >> bit & 1:
                    throttled[THROTTLES[bit] if bit < len(THROTTLES) else f"bit_{1 << bit:#x}"] += passed
    elapsed = released - leased
    kinds = [sample["exclusivity"] for sample in inside]
    if not inside:
        verdict, evidence = "unverifiable", "no sample was taken"
    elif {*kinds} != {"exclusive"}:
        verdict = min(kinds, key=DOUBTS.index)
        evidence = f"{inside[kinds.index(verdict)]['words']} (in {kinds.count(verdict)} of {len(kinds)} samples)"
    elif observed < elapsed:
        verdict, evidence = "unverifiable", f"{elapsed - observed} of {elapsed} ms were not observed"
    else:
        verdict, evidence = "exclusive", f"no foreign process in {len(kinds)} samples"
    energy, why = energy_of(inside)
    return {
        "samples": len(inside), "elapsed_ms": elapsed, "observed_ms": observed, "exclusivity": verdict,
        "evidence": evidence, "energy_mj": energy, "energy_missing": why,
        "throttled_ms": {name: spent for name, spent in throttled.items() if spent},
    }  # fmt: skip


def energy_of(samples: list[dict[str, Any]]) -> tuple[int | None, str | None]:
    readings = [sample["energy_mj"] for sample in samples if sample["energy_mj"] is not None]
    drivers = {sample["driver"] for sample in samples} - {None}
    if len(readings) < 2:
        reasons = [sample["missing"]["energy_mj"] for sample in samples if "energy_mj" in sample["missing"]]
        return None, reasons[0] if reasons else "fewer than two readings"
    if len(drivers) > 1:
        return None, f"the driver changed: {', '.join(sorted(drivers))}"
    if readings != sorted(readings):
        return None, "the counter fell"
    return readings[-1] - readings[0], None


def telemetry_line(attempt: str, sample: dict[str, Any]) -> dict[str, Any]:
    """The row of one sample."""
    own, foreign = (" ".join(map(str, sample[key])) for key in ("own", "foreign"))
    missing = encode_json(sample["missing"]).decode()
    return {"attempt": attempt, **sample, "own": own, "foreign": foreign, "missing": missing}


def telemetry_columns() -> list[tuple[str, str]]:
    names = "attempt device at_ms exclusivity words own foreign".split()
    names += [*READINGS, "missing", "error", "lost"]
    return [(name, "int64" if name in ("at_ms", *COUNTERS) else "bool" if name == "lost" else "text") for name in names]


def settled_faults(attempt: dict[str, Any], samples: list[dict[str, Any]], budget: Any) -> Iterator[str]:
    """Where exclusivity, the summaries or the outcome of a settled attempt are not what its samples give."""
    end, devices = attempt["end"], attempt["reserved"]["devices"]
    span = attempt["intent"]["leased"]["boottime_ms"], attempt["device_clean"]["released"]["boottime_ms"]
    by_device = {device: [sample for sample in samples if sample["device"] == device] for device in devices}
    taken = any(by_device.values())
    summaries = {device: summary_of(own, *span) for device, own in by_device.items()} if taken else {}
    if end["telemetry"] != summaries:
        yield "a summary that is not that of the samples"
    found = [item["exclusivity"] for item in summaries.values()]
    exclusivity = min(found, key=DOUBTS.index, default="unverifiable")
    if end["exclusivity"] != exclusivity:
        yield f"{end['exclusivity']} by the ledger, {exclusivity} by the samples"
    if budget is None:
        return
    required, stops = budget["exclusivity"] == "required", budget["on_contamination"] == "stop"
    allowed = {
        "completed": not required or end["exclusivity"] == "exclusive",
        "trial_error": not required or end["exclusivity"] == "exclusive",
        "contaminated": end["exclusivity"] == "contaminated" and (required or stops),
        "unverifiable": end["exclusivity"] == "unverifiable" and required,
    }
    if not allowed.get(end["outcome"], True):
        yield f"{end['outcome']} of an attempt that is {end['exclusivity']}"


def v19_telemetry(known: Known) -> Iterator[str]:
    need(known["chain"]["events"], "the ledger")
    budgets = {identity: manifest["protocol"]["budget"] for _, identity, manifest in known["manifests"]}
    rows: list[dict[str, Any]] = []
    for name, attempt in known["account"]["attempts"].items():
        content = known["members"].get(f"3-attempts/{name}/telemetry.jsonl", (0, "", None))[2]
        *lines, torn = (content or b"").split(b"\n")
        reserved = attempt.get("reserved", {"devices": [], "manifest": None})
        samples: list[dict[str, Any]] = []
        latest: dict[str, int] = {}
        for number, line in enumerate(lines, start=1):
            try:
                sample = read_sample(line)
            except Bad as bad:
                yield f"{name}: line {number} of its telemetry: {bad}"
                continue
            rows.append(telemetry_line(name, sample))
            if sample["device"] not in reserved["devices"]:
                yield f"{name}: a sample of a device that it did not reserve"
            if latest.get(sample["device"], 0) > sample["at_ms"]:
                yield f"{name}: a sample before the one before it"
            latest[sample["device"]] = sample["at_ms"]
            samples.append(sample)
        if attempt["state"] != "settled":
            continue
        if torn:
            yield f"{name}: torn telemetry of an attempt that was seen to its end"
        if content is None and attempt["end"]["telemetry"]:
            yield f"{name}: a summary of samples that are not there"
        else:
            for words in settled_faults(attempt, samples, budgets.get(reserved["manifest"])):
                yield f"{name}: {words}"
    table = known["members"].get("4-records/telemetry.parquet")
    if table is None:
        need(not rows, "the table of samples")
        return
    if not rows:
        yield "a table of samples, and there are none"
        return
    files = [content for name, (_, _, content) in known["members"].items() if name.endswith("/telemetry.jsonl")]
    most = sum(content.count(b"\n") for content in files)
    if read_table(table[2], telemetry_columns(), len(rows), most) != rows:
        yield "the table of samples is not that of the samples"


ALL: list[Callable[[Known], Iterator[str]]] = [
    v01_container, v02_members, v03_required, v04_manifest, v05_plan, v06_manifest_chain, v07_against, v08_signature,
    v09_timestamp, v10_ledger_chain, v11_ledger_head, v12_attempt_states, v13_charges, v14_attempt_files, v15_sources,
    v16_imports, v17_records, v18_results, v19_telemetry,
]  # fmt: skip


NOBODY: dict[str, Any] = {"signatures": (), "signers": None, "signature_of": "any", "authority": None, "checks": False}
"""What to judge by: signatures of the capsule, a policy and its demand, certificates; whether ssh-keygen is asked."""


def verify(data: bytes, against: tuple[str, ...] = (), trust: dict[str, Any] = NOBODY) -> dict[str, Any]:
    """Judge the bytes of a file: integrity, outcome, the checks that failed, and their findings."""
    read = read_container(data)
    if read["foreign"]:
        words = ["this is no capsule", *read["in_container"]]
        return {"integrity": "broken", "outcome": "withheld", "failed": ["V-01"], "findings": {"V-01": words}}
    generations: dict[int, dict[str, bytes]] = {}
    for name, (_, _, content) in read["members"].items():
        if name.startswith("1-manifest/") and is_name(name):
            generations.setdefault(int(name[11:14]), {})[name[15:]] = content
    known: Known = {
        **read, "archive": read["identity"], "against": against, "generations": generations, "manifests": [],
        "identity": None, "cells": [], "sources": {}, "journals": {}, "results": None, "account": new_account(),
        "chain": {"events": [], "hashes": [], "wrong": []}, "trust": trust, "signatures": [], "tokens": [],
        "token_faults": [],
    }  # fmt: skip
    findings: dict[str, list[str]] = {}
    failed, skipped, incomplete = [], [], False
    for identifier, check in zip(CHECKS, ALL, strict=True):
        found: list[str] = []
        try:
            checking = check(known)
            while (finding := next(checking, None)) is not None:
                found.append(finding)
        except Skip as skip:
            words, required = skip.args
            incomplete = incomplete or (required and not found)
            skipped.append(identifier)
            findings[identifier] = [f"not checked: {words}"]
        except Bad as bad:
            found.append(str(bad))
        if found:
            failed.append(identifier)
            findings[identifier] = found[:50]
    integrity = "broken" if failed else "incomplete" if incomplete else "intact"
    return {
        "integrity": integrity,
        "outcome": known["results"]["outcome"] if integrity == "intact" else "withheld",
        "failed": failed,
        "findings": findings,
        "signatures": known["signatures"],
        "tokens": known["tokens"],
        "order": order_in_time(known, not {"V-10", "V-11", "V-12"} & {*failed, *skipped}),
        "rests_on": rests_on(known),
    }


def beside(file: Path) -> list[Path]:
    """S-02: the signatures that lie beside a capsule."""
    names = [f"{file}.sig", *(f"{file}.{number}.sig" for number in range(2, 10))]
    return [path for path in map(Path, names) if path.is_file()]


def answer(arguments: list[str]) -> dict[str, Any]:
    """Judge a file by the options of a command line."""
    parser = argparse.ArgumentParser(description="Verify a capsule, independently of the product.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--against", action="append", default=[], metavar="DIGEST")
    parser.add_argument("--require-signature", type=Path, metavar="SIGNERS")
    parser.add_argument("--signature-of", default="any", choices=["any", "capsule", "manifest", "both"])
    parser.add_argument("--signature", type=Path, action="append", metavar="SIG")
    parser.add_argument("--tsa-ca", type=Path, metavar="PEM")
    options = parser.parse_args(arguments)
    trust = {
        "signatures": [(str(path), path.read_bytes()) for path in options.signature or beside(options.file)],
        "signers": options.require_signature.read_bytes() if options.require_signature else None,
        "signature_of": options.signature_of,
        "authority": options.tsa_ca.read_bytes() if options.tsa_ca else None,
        "checks": True,
    }
    return verify(options.file.read_bytes(), tuple(options.against), trust)


def main() -> int:
    said = answer(sys.argv[1:])
    print(json.dumps(said, indent=2))
    return {"intact": 0, "broken": 1, "incomplete": 3}[said["integrity"]]


if __name__ == "__main__":
    sys.exit(main())

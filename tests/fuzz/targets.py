"""What is fuzzed: each target reads bytes as a stranger could give them, and says what must hold of any.

A target returns for every input, or raises what is a fault of the product. Behind checksums and chains nothing that is
changed blindly would be looked at, so targets put those right around the input, as a forger does.
"""

from __future__ import annotations

import base64
import io
import json
import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from capsule.archive.access import open_member
from capsule.archive.reader import examine
from capsule.archive.tables import open_table
from capsule.core.canonical import canonical, parse, parse_lines, parse_strict
from capsule.core.chain import Head
from capsule.core.digest import digest_of
from capsule.core.errors import CapsuleError, MalformedError, ProtocolError
from capsule.core.evidence import Evidence
from capsule.core.judge import judge
from capsule.core.manifest import Manifest, read_cells, read_sources
from capsule.core.plan import Cell, enumerate_cells
from capsule.core.progress import Process, outcome_of
from capsule.core.protocol import Observation
from capsule.core.record import encode, read_journal
from capsule.core.results import Results, agree
from capsule.core.schema import Model
from capsule.core.sshsig import read_signature
from capsule.core.telemetry import Sample, read_samples, summarize
from capsule.core.tokens import as_reply, read_token
from capsule.core.toml import read_protocol
from capsule.steps.extract import extract, extract_sources
from capsule.steps.verify import collect, verify
from tests.archive.container_forge import SMALL, entry, forge, pack_with_writer, with_lists
from tests.conformance import histories, verifier
from tests.fuzz.guard import only_reading
from tests.golden.make import Members, seal, unpack
from tests.tables import table_bytes

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
GOLDEN = ROOT / "tests/golden/supported.capsule"
Shape = Literal["bytes", "lines", "text"]


@dataclass(frozen=True)
class Target:
    """A reader, inputs to begin with, and how inputs are built; `weight` is its share of a sample."""

    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    shape: Shape
    weight: int


TARGETS: dict[str, Target] = {}


def target(seeds: Callable[[], list[bytes]], shape: Shape, weight: int) -> Any:
    """Make a function a target, by its name."""

    def register(run: Callable[[bytes], None]) -> Callable[[bytes], None]:
        TARGETS[run.__name__] = Target(run, seeds, shape, weight)
        return run

    return register


@cache
def base(seed: int) -> Members:
    """Return the members of an honest capsule: the golden one, or one drawn."""
    return unpack(GOLDEN.read_bytes()) if seed == 0 else histories.draw(seed)


def files(suffix: str) -> list[bytes]:
    """Return the members of a few honest capsules whose name ends so."""
    return [data for seed in range(6) for name, data in base(seed).items() if name.endswith(suffix)]


def judge_container(data: bytes) -> None:
    """A container is sound exactly where the writer gives the same tar and lists for its members again."""
    try:
        found = examine(io.BytesIO(data), threads=0, keep=lambda _, size: size < 1 << 23)
    except MalformedError:  # of another major version
        return
    if found.sealed is None:
        assert found.findings
        return
    assert not found.findings
    own = ("0-header.json", "9-SHA256SUMS")
    members = [(name, content) for name, content in found.kept.items() if name not in own]
    again = examine(io.BytesIO(pack_with_writer(members)), threads=0)
    assert again.sealed is not None
    assert again.sealed.identity == found.sealed.identity


def sound() -> bytes:
    return forge(SMALL)


def long() -> bytes:
    """A container of several frames, of zeros."""
    return forge([SMALL[0], ("3-attempts/a000001/stdout", bytes(4_200_000)), SMALL[2]])


@target(lambda: [sound(), forge([]), long(), GOLDEN.read_bytes()], "bytes", 3)
def container(data: bytes) -> None:
    """Any bytes as a file."""
    judge_container(data)


@target(lambda: [b"".join(entry(*member) for member in with_lists(SMALL))], "bytes", 6)
def tar(data: bytes) -> None:
    """Any bytes as a tar within sound frames, index and seek table."""
    judge_container(forge(body=lambda _: data))


def table_seeds() -> list[bytes]:
    kept: list[bytes] = []
    forge(table=lambda lines: kept.append(lines) or lines)  # type: ignore[func-returns-value]
    return kept


@target(table_seeds, "text", 6)
def table(data: bytes) -> None:
    """Any bytes as the member table."""
    judge_container(forge(table=lambda _: data))


@cache
def frames_and_tail() -> tuple[bytes, bytes]:
    whole = sound()
    at = whole.index(b"\x5c\x2a\x4d\x18")
    return whole[:at], whole[at:]


@target(lambda: [frames_and_tail()[1]], "bytes", 6)
def index(data: bytes) -> None:
    """Any bytes as index and seek table behind sound frames; random access returns what was packed or nothing."""
    whole = frames_and_tail()[0] + data
    judge_container(whole)
    with file_of(whole) as path:
        for name, content in (*SMALL, ("2-ledger.jsonl", None)):
            with suppress(CapsuleError):
                assert open_member(path, name, size_max=1 << 20) == content


class file_of:  # noqa: N801 - used like a function
    """A file in memory with these bytes, under a path."""

    def __init__(self, data: bytes) -> None:
        self._descriptor = os.memfd_create("capsule")
        os.write(self._descriptor, data)

    def __enter__(self) -> Path:
        return Path(f"/proc/self/fd/{self._descriptor}")

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def json_seeds() -> list[bytes]:
    values = b'[1,-1,"\xc3\xa9\\u001f",{"a":null,"b":[true]}]'
    return [
        *files("head.json"),
        values,
        base(0)["1-manifest/001/sources.jsonl"],
        base(0)["3-attempts/a000001/journal.jsonl"],
    ]


@target(json_seeds, "text", 40)
def json_values(data: bytes) -> None:
    """Any bytes as canonical JSON, strict JSON, and lines of it."""
    for floats in (False, True):
        try:
            value = parse_strict(data, "x", floats=floats)
        except MalformedError:
            continue
        assert value == json.loads(data)
        assert floats or parse(canonical(value), "x") == value
    with suppress(MalformedError):
        assert canonical(parse(data, "x")) == data
    with suppress(MalformedError):
        assert b"".join(canonical(value) + b"\n" for value in parse_lines(data, "x")) == data


@cache
def evidence_of(seed: int) -> Evidence:
    found = collect(io.BytesIO(seal(base(seed))))
    return replace(found, telemetry_table=[] if isinstance(found.telemetry_table, str) else list(found.telemetry_table))


def chained(data: bytes) -> tuple[bytes, Head]:
    """Number and chain again those lines that are objects; return them and the head."""
    lines: list[bytes] = []
    prev: str | None = None
    *whole, torn = data.split(b"\n")
    for line in whole:
        try:
            value = json.loads(line)
            line = canonical({**value, "seq": len(lines), "prev": prev}) if isinstance(value, dict) else line
        except (ValueError, RecursionError):
            pass
        lines.append(line)
        prev = digest_of(line)
    return b"".join(line + b"\n" for line in lines) + torn, Head(count=len(lines), sha256=prev)


@target(lambda: [bytes([seed]) + base(seed)["2-ledger.jsonl"] for seed in range(4)], "lines", 2)
def ledger(data: bytes) -> None:
    """Any lines as a ledger, chained again, before all checks of a capsule that is honest otherwise."""
    lines, head = chained(data[1:])
    verdict = judge(replace(evidence_of(data[0] % 4 if data else 0), ledger=lines, head=head.to_bytes()))
    assert verdict.to_bytes()


KINDS = ("float64", "float32", "float16", "int64", "uint64", "bool", "text")
COLUMNS = [
    Observation.model_validate(
        {"name": kind, "type": kind, "optional": kind != "float64", "replay": {"rule": "exact"}}
        | ({"minimum": "-1e300"} if kind == "float64" else {})
    )
    for kind in KINDS
]


def planned(count: int) -> Process:
    named = {"arm": "a", "workload": "w", "seed": 0, "start": 0, "block": 0, "process": 0, "excluded": None}
    return Process(0, tuple(Cell(cell=f"c{n:06}", position=n, **named) for n in range(count)))  # type: ignore[arg-type]


ROWS = (
    b'\x02{"cell":"c000000","float64":2.5,"float32":"NaN:7fc00001","float16":-0,"int64":"-9223372036854775808"}\n'
    b'{"cell":"c000001","float64":"Infinity","uint64":"18446744073709551615","bool":true,"text":"\\u00e9"}\n'
    b'{"cell":"c000002","error":{"message":"out of memory","type":"RuntimeError"}}\n{"end":true}\n'
)


@target(
    lambda: [ROWS, b"\x00" + b'{"float64":1}\n{"end":true}\n', *(b"\2" + it for it in files("journal.jsonl"))],
    "lines",
    60,
)
def journal(data: bytes) -> None:
    """Any bytes as a process's journal: rows have canonical values of their columns' types, for planned cells."""
    process = planned(1 + (data[0] % 4 if data else 0))
    cells = [cell.cell for cell in process.cells]
    found = read_journal(data[1:], COLUMNS, cells)
    assert found.rows.keys() <= set(cells)
    for row in found.rows.values():
        for column in COLUMNS:
            value = row.values[column.name]
            assert value is None or encode(value, column.type) == value
    assert outcome_of(process, found)[0]
    canonical([found.faults, [row.error for row in found.rows.values()]])


@target(lambda: files("telemetry.jsonl"), "lines", 12)
def telemetry(data: bytes) -> None:
    """Any bytes as samples: what they add up to keeps within the time that passed."""
    samples = [item for item in read_samples(data) if isinstance(item, Sample)]
    for device in sorted({sample.device for sample in samples})[:3]:
        own = sorted((sample for sample in samples if sample.device == device), key=lambda sample: sample.at_ms)
        summary = summarize(device, own, 100, 5000)
        assert 0 <= summary.observed_ms <= summary.elapsed_ms == 4900
        assert sum(summary.throttled_ms.values()) <= 53 * summary.observed_ms
        assert summary.to_bytes()


def signature_seeds() -> list[bytes]:
    return [path.read_bytes() for path in sorted((HERE / "seeds").glob("*.sig"))]


@target(signature_seeds, "bytes", 60)
def signature(data: bytes) -> None:
    """Any bytes as an SSH signature, and as what the armour holds."""
    armoured = base64.encodebytes(data).replace(b"\n", b"")
    lines = b"".join(armoured[at : at + 70] + b"\n" for at in range(0, len(armoured), 70))
    wrapped = b"-----BEGIN SSH SIGNATURE-----\n" + lines + b"-----END SSH SIGNATURE-----\n"
    for text in (data, wrapped):
        try:
            found = read_signature(text, "x")
        except MalformedError:
            continue
        assert found.key.startswith("SHA256:")
        assert found.namespace.isascii()


@target(lambda: [path.read_bytes() for path in sorted((HERE / "seeds").glob("*.tsr"))], "bytes", 60)
def token(data: bytes) -> None:
    """Any bytes as a timestamp reply."""
    try:
        found = read_token(as_reply(data), "x")
    except MalformedError:
        return
    assert found.moment.tzinfo is not None
    assert len(found.imprint) == 71


@target(lambda: files("protocol.toml"), "text", 6)
def toml(data: bytes) -> None:
    """Any bytes as a protocol; what is one can be written, read again and planned."""
    try:
        protocol = read_protocol(data, "x.toml")
    except ProtocolError:
        return
    assert type(protocol).from_bytes(protocol.to_bytes(), "x") == protocol
    if len(data) < 5000:
        enumerate_cells(protocol)


PARQUET = [("text", "text"), ("bool", "bool"), ("int64", "int64"), ("float64", "float64"), ("float16", "float16")]


def parquet_seeds() -> list[bytes]:
    row: dict[str, Any] = {"text": "é", "bool": True, "int64": "-9007199254740993", "float64": "NaN", "float16": 1.5}
    empty = dict.fromkeys(row)
    return [table_bytes(PARQUET, rows) for rows in ([], [row], [row, empty] * 20)]


@target(parquet_seeds, "bytes", 10)
def parquet(data: bytes) -> None:
    """Any bytes as a table."""
    try:
        table = open_table(io.BytesIO(data), PARQUET, 50, "x")
        rows = list(table)
    except MalformedError:
        return
    assert len(rows) == len(table) <= 50
    assert repr(list(table)) == repr(rows)
    for row in rows:
        for name, kind in PARQUET:
            assert row[name] is None or encode(row[name], kind) == row[name]


LISTS: list[Callable[[bytes], Any]] = [
    lambda data: Manifest.from_bytes(data, "x"),
    lambda data: read_cells(data, "x"),
    lambda data: read_sources(data, "x"),
    lambda data: list(agree(Results.from_bytes(data, "x").to_json(), json.loads(base(0)["7-results/results.json"]))),
    lambda data: Head.from_bytes(data, "x"),
]
LIST_FILES = ("manifest.json", "cells.jsonl", "sources.jsonl", "results.json", "head.json")


@target(lambda: [bytes([n]) + data for n, name in enumerate(LIST_FILES) for data in files(name)], "lines", 6)
def documents(data: bytes) -> None:
    """Any bytes as a manifest, a list beside it, results or a head; what is read gives its bytes back."""
    if not data:
        return
    try:
        value = LISTS[data[0] % len(LISTS)](data[1:])
    except CapsuleError:
        return
    if isinstance(value, Model):
        assert value.to_bytes() == data[1:]
    if isinstance(value, Manifest) and len(data) < 5000:
        with suppress(ProtocolError):
            enumerate_cells(value.protocol)


def member_seeds() -> list[bytes]:
    return [
        bytes([seed, number]) + base(seed)[name]
        for seed in (0, 1, 2, 3)
        for number, name in enumerate(sorted(base(seed)))
        if len(base(seed)[name]) < 9000
    ]


@target(member_seeds, "lines", 2)
def member(data: bytes) -> None:
    """Any bytes in the place of one member of an honest capsule: verified, and the verdict can be written."""
    if len(data) < 2:
        return
    members = base(data[0] % 4)
    name = sorted(members)[data[1] % len(members)]
    verdict = verify(io.BytesIO(seal({**members, name: data[2:]})))
    assert verdict.to_bytes()
    if members[name] != data[2:] and name.startswith(("1-manifest/", "2-ledger.j", "3-", "4-", "5-", "7-")):
        kept = name.endswith(("protocol.toml", ".sig", ".tsr"))
        assert verdict.integrity != "intact" or kept, name


@target(lambda: [data for data in files("sources.jsonl") if data], "lines", 2)
def extraction(data: bytes) -> None:
    """Any bytes as the list of sources that are written to a folder: nothing lies outside of it."""
    members = {**base(0), "1-manifest/001/sources.jsonl": data}
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as outer:  # noqa: PTH112
        folder = Path(outer)
        (folder / "victim").write_bytes(b"untouched")
        with file_of(seal(members)) as path:
            for number, way in enumerate((extract, extract_sources)):
                inside = folder / "inside" / str(number)
                inside.mkdir(parents=True)
                with suppress(CapsuleError), only_reading(folder=str(inside)):
                    way(path, inside / "out")
                assert set(os.listdir(inside)) <= {"out"}  # noqa: PTH208
        assert sorted(os.listdir(folder)) == ["inside", "victim"]  # noqa: PTH208
        assert (folder / "victim").read_bytes() == b"untouched"
        assert set(os.listdir(folder / "inside")) == {"0", "1"}  # noqa: PTH208
        for place, folders, names, descriptor in os.fwalk(folder / "inside"):
            for name in (*folders, *names):
                if stat.S_ISLNK(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode):
                    reached = os.path.realpath(os.path.join(place, name))  # noqa: PTH118 - longer than a Path may be
                    assert reached.startswith(str(folder / "inside")), name


def both(name: str, ours: Callable[[], Any], theirs: Callable[[], Any]) -> None:
    """Both readers refuse, or both read the same."""
    try:
        found = ours()
    except CapsuleError:
        found = None
    try:
        second = theirs()
    except verifier.Bad:
        second = None
    assert found == second, (name, found, second)


SHOWN = [column.model_dump(mode="json") for column in COLUMNS]


def journal_read(data: bytes) -> Any:
    found = read_journal(data, COLUMNS, ["c000000", "c000001"])
    return sorted(found.rows), found.ended, bool(found.torn), found.fault_count


def journal_read_again(data: bytes) -> Any:
    found = verifier.read_journal(data, SHOWN, ["c000000", "c000001"])
    return sorted(found["rows"]), found["ended"], found["torn"], found["faults"]


def sample_read(data: bytes) -> Any:
    found = next(read_samples(data.replace(b"\n", b"") + b"\n"))
    return found.to_json() if isinstance(found, Sample) else None


def protocol_read_again(data: bytes) -> Any:
    tree = verifier.read_toml(data)
    if verifier.complaint(tree):
        raise verifier.Bad("complaint")
    return verifier.encode_json(tree)


READ_TWICE: list[tuple[str, Callable[[bytes], Any], Callable[[bytes], Any]]] = [
    ("json", lambda data: (parse(data, "x"),), lambda data: (verifier.decode_json(data),)),
    ("toml", lambda data: read_protocol(data, "x").to_bytes(), protocol_read_again),
    ("journal", journal_read, journal_read_again),
    ("sample", sample_read, lambda data: verifier.read_sample(data.replace(b"\n", b""))),
    ("token", lambda data: (read_token(data, "x").imprint,), lambda data: (verifier.read_token(data)[0],)),
]


def twice_seeds() -> list[bytes]:
    tokens = [path.read_bytes() for path in sorted((HERE / "seeds").glob("*.tsr"))]
    samples = [line for data in files("telemetry.jsonl")[:3] for line in data.splitlines()[:2]]
    kinds = [json_seeds(), files("protocol.toml"), [ROWS[1:], *files("journal.jsonl")[:8]], samples, tokens]
    return [bytes([number]) + data for number, kind in enumerate(kinds) for data in kind]


@target(twice_seeds, "lines", 12)
def twice(data: bytes) -> None:
    """Any bytes before the product's readers and those of the second verifier: both say the same."""
    if data:
        name, ours, theirs = READ_TWICE[data[0] % len(READ_TWICE)]
        both(name, lambda: ours(data[1:]), lambda: theirs(data[1:]))

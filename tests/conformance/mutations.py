"""Turns the members of a sound capsule into those of a forged or broken one, by one drawn change.

`mutate` changes one thing with knowledge of what it is: a key of the manifest, an event, a journal's line, a row of the
table. `mend` then makes everything that follows from it agree again, as far as it can, as a careful forger would; so
that what is left to find is the meaning of the change.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from histories import telemetry_table

from capsule.archive.layout import is_allowed
from capsule.core.canonical import canonical, join_lines
from capsule.core.checks import CHECK_FUNCTIONS
from capsule.core.digest import digest_of
from capsule.core.errors import CapsuleError, MalformedError
from capsule.core.evidence import Evidence, NotChecked, Reading
from capsule.core.manifest import FileDigest, cells_bytes
from capsule.core.plan import enumerate_cells
from capsule.core.progress import final_rows
from capsule.core.results import derive
from capsule.core.table import TELEMETRY_COLUMNS, table_columns, table_rows
from capsule.core.telemetry import Sample, read_samples, summarize, worst
from capsule.core.toml import read_protocol
from tests.golden.make import Members, rechain
from tests.tables import read_rows, table_bytes

LEDGER, HEAD = "2-ledger.jsonl", "2-ledger.head.json"
SAMPLES = "4-records/telemetry.parquet"
ROWS, RESULTS = "4-records/rows.parquet", "7-results/results.json"
NUMBERS = [0, 1, 2, -1, 7, 2**53 - 1, 2**53, True]
TEXTS = ["", "x", "0", "1.5", "-0", "NaN", "é", "a000001", "c000000", "completed", "lost", "sha256:" + "0" * 64]


def mutate(chance: random.Random, members: Members) -> Members:
    """Return the members with one thing changed."""
    change = chance.choice(
        [_member, _json, _json, _lines, _lines, _ledger, _ledger, _ledger, _rows, _journal, _toml, *[_telemetry] * 3]
    )
    changed: Members = change(chance, dict(members))
    return changed


def _member(chance: random.Random, members: Members) -> Members:
    """Leave out, exchange, add or damage a member."""
    name = chance.choice(sorted(members))
    kind = chance.randrange(6)
    if kind < 2:
        del members[name]
        return members
    data = members[name]
    match kind:
        case 2:
            other = chance.choice(sorted(members))
            members[name], members[other] = members[other], data
        case 3:
            new = re.sub("[0-9]", lambda match: str((int(match[0]) + chance.randrange(2)) % 10), name)
            if "1-manifest" in name and chance.random() < 0.5:
                new = f"1-manifest/001/sources-{chance.choice('0123456789ab') * 40}.jsonl"
            if is_allowed(new):
                members[new] = data
        case 4:
            members[name] = data[: chance.randrange(len(data) + 1)]
        case _:
            at = chance.randrange(len(data) + 1)
            members[name] = data[:at] + chance.choice([b"\0", b"\n", b" ", b"1", b'"']) + data[at + 1 :]
    return members


def _changed(chance: random.Random, value: Any) -> Any:
    """Return a JSON value with one thing in it changed."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(sorted(value))
        if chance.random() < 0.08:
            return {k: v for k, v in value.items() if k != key}
        if chance.random() < 0.08:
            return {**value, chance.choice(["x", "aa", "schema_"]): value[key]}
        return {**value, key: _changed(chance, value[key])}
    if isinstance(value, list) and value and chance.random() < 0.9:
        at = chance.randrange(len(value))
        match chance.randrange(8):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return [*value[:at], value[at], *value[at:]]
            case 2:
                return value[::-1]
            case _:
                return [*value[:at], _changed(chance, value[at]), *value[at + 1 :]]
    if isinstance(value, bool):
        return chance.choice([not value, int(value), 2, None])
    if isinstance(value, int):
        return chance.choice(
            [
                value + 1,
                *([bool(value)] if value in (0, 1) else []),
                value - 1,
                value * 10,
                str(value),
                *[n for n in NUMBERS if n != value],
            ]
        )
    if isinstance(value, str) and value and chance.random() < 0.5:
        at = chance.randrange(len(value))
        return value[:at] + chance.choice(["", "0", "1", "5", "z", "9.", "e"]) + value[at + 1 :]
    return chance.choice([None, [], {}, *NUMBERS, *TEXTS])


def _encoded(value: Any) -> bytes:
    """Return canonical bytes, also of a value that canonical JSON does not allow."""
    try:
        return canonical(value)
    except ValueError:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _json(chance: random.Random, members: Members) -> Members:
    names = [name for name in members if name.endswith(("manifest.json", "results.json", HEAD))]
    if not names:
        return members
    name = chance.choice(names)
    members[name] = _encoded(_changed(chance, _loaded(members[name]))) + (b"\n" if chance.random() < 0.02 else b"")
    return members


def _lines(chance: random.Random, members: Members) -> Members:
    names = [name for name in members if name.endswith("jsonl") and name != LEDGER]
    if names:
        name = chance.choice(names)
        members[name] = b"".join(line + b"\n" for line in _other_lines(chance, members[name].splitlines()))
    return members


def _other_lines(chance: random.Random, lines: list[bytes]) -> list[bytes]:
    if not lines:
        return [b"{}"]
    at = chance.randrange(len(lines))
    match chance.randrange(6):
        case 0:
            return lines[:at] + lines[at + 1 :]
        case 1:
            return [*lines[:at], lines[at], *lines[at:]]
        case 2:
            other = chance.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
            return lines
        case _:
            return [*lines[:at], _encoded(_changed(chance, _loaded(lines[at]))), *lines[at + 1 :]]


def _ledger(chance: random.Random, members: Members) -> Members:
    """Change the ledger's events; mostly chain them again."""
    lines = members.get(LEDGER, b"").splitlines()
    if chance.random() < 0.2:
        members[LEDGER] = b"".join(line + b"\n" for line in _other_lines(chance, lines))
        return members
    events = [json.loads(line) for line in _other_lines(chance, lines)]
    if chance.random() < 0.2:
        names = {event["attempt"] for event in events if isinstance(event, dict) and event.get("attempt")}
        gone = chance.choice(sorted(map(str, names))) if names else ""
        events = [event for event in events if not isinstance(event, dict) or event.get("attempt") != gone]
    return _chained(members, events)


def _chained(members: Members, events: list[Any]) -> Members:
    if not events or not all(isinstance(event, dict) for event in events):
        return members
    try:
        chained = rechain(events)
        head = canonical({"count": len(chained), "sha256": digest_of(canonical(chained[-1]))})
    except ValueError:
        return members
    return {**members, LEDGER: join_lines(chained), HEAD: head}


def _rows(chance: random.Random, members: Members) -> Members:
    """Change the table."""
    reading = _read(members)
    if reading.manifest is None:
        return members
    columns = table_columns(reading.manifest.protocol.observations)
    try:
        rows = read_rows(members.get(ROWS, b""), columns, 10_000, ROWS)
    except MalformedError:
        rows = []
    if not rows:
        return members
    at = chance.randrange(len(rows))
    match chance.randrange(4):
        case 0:
            del rows[at]
        case 1:
            rows.insert(at, rows[at])
        case 2:
            rows[0], rows[at] = rows[at], rows[0]
        case _:
            name, kind = chance.choice(columns)
            values: dict[str, list[Any]] = {
                "text": [None, "", "x", "ok", "failed"], "bool": [True, False, None], "int64": [0, 1, None, "-5"],
                "uint64": [0, 1, None], "float64": ["-0", 0, "NaN", "NaN:7ff0000000000001", None, 1.5, "Infinity"],
            }  # fmt: skip
            rows[at] = {**rows[at], name: chance.choice(values.get(kind, ["-0", 0, "NaN", None, 1.5]))}
    return {**members, ROWS: table_bytes(columns, rows)}


def _journal(chance: random.Random, members: Members) -> Members:
    """Change a journal as text."""
    names = [name for name in members if name.endswith("journal.jsonl")]
    if not names:
        return members
    name = chance.choice(names)
    old, new = chance.choice(JOURNAL_EDITS)
    members[name] = re.sub(old, lambda _: new, members[name], count=chance.randint(1, 2))
    return members


JOURNAL_EDITS: list[tuple[bytes, bytes]] = [
    (rb": ?[0-9.e+-]+", b":-0"), (rb": ?[0-9.e+-]+", b':"-0"'), (rb": ?[0-9.e+-]+", b":NaN"),
    (rb": ?[0-9.e+-]+", b':"NaN:fff8000000000001"'), (rb": ?[0-9.e+-]+", b":1e999"), (rb": ?[0-9.e+-]+", b":1e308"),
    (rb": ?[0-9.e+-]+", b":5e-324"), (rb": ?[0-9.e+-]+", b":null"), (rb": ?[0-9.e+-]+", b":3.0"),
    (rb": ?[0-9.e+-]+", b":9007199254740993"), (rb": ?[0-9.e+-]+", b":true"), (rb": ?[0-9.e+-]+", b':"1.5"'),
    (rb'"end":true', b'"end":1'), (rb'"end":true', b'"end":true,"x":1'), (rb'\{"end":true\}\n', b""),
    (rb'\{"end":true\}\n', b'{"end":true}\n{"end":true}\n'), (rb": ?[0-9.e+-]+", b":-1e9"),
    (rb"\n", b"\r\n"), (rb"\n", b"\n\n"), (rb"\n", b""), (rb'"cell"', b'"Cell"'), (rb"c00000", b"c00001"),
    (rb'\{', b'{"error":"x",'), (rb'\{', b"{ "), (rb'\}', b',"x":{}}'), (rb'\{', b"\xef\xbb\xbf{"),
]  # fmt: skip


def _telemetry(chance: random.Random, members: Members) -> Members:
    """Change a sample, the table of samples, or what the ledger makes of samples."""
    files = [name for name in members if name.endswith("/telemetry.jsonl") and members[name]]
    kind = chance.randrange(4)
    if kind == 0 and SAMPLES in members:
        data = members[SAMPLES]
        try:
            rows = read_rows(data, TELEMETRY_COLUMNS, 10_000, SAMPLES)
        except MalformedError:
            rows = []
        if not rows:
            return members
        at = chance.randrange(len(rows))
        name, kind_of = chance.choice(TELEMETRY_COLUMNS)
        odd = {"text": [None, "", "x"], "bool": [None, True], "int64": [None, 3, "-9007199254740993"]}[kind_of]
        new = [[], [rows[at], rows[at]], [{**rows[at], name: chance.choice(odd)}]][chance.randrange(3)]
        return {**members, SAMPLES: table_bytes(TELEMETRY_COLUMNS, [*rows[:at], *new, *rows[at + 1 :]])}
    if kind == 1 and files:
        name = chance.choice(files)
        lines = members[name].splitlines()
        at = chance.randrange(len(lines))
        sample = _loaded(lines[at])
        if not isinstance(sample, dict):
            return members
        lines[at] = _encoded(_reseen(chance, sample))
        members[name] = b"".join(line + b"\n" for line in lines) + chance.choice([b"", b"", b"", b"{"])
        return members
    events = [_loaded(line) for line in members.get(LEDGER, b"").splitlines()]
    ends = [event for event in events if isinstance(event, dict) and event.get("event") == "settled"]
    if not ends or not all(isinstance(event.get("data"), dict) for event in ends):
        return members
    data = chance.choice(ends)["data"]
    match chance.randrange(4):
        case 0:
            data["exclusivity"] = chance.choice(["exclusive", "contaminated", "unverifiable"])
        case 1:
            data["telemetry"] = _changed(chance, data.get("telemetry"))
        case 2:
            data["outcome"] = chance.choice(["contaminated", "unverifiable", "device_suspect", "completed", "oom_host"])
        case _:
            data["telemetry"], data["exclusivity"] = {}, "unverifiable"
    return _chained(members, events)


def _reseen(chance: random.Random, sample: dict[str, Any]) -> dict[str, Any]:
    """Change one sample, mostly to another that could be one."""
    match chance.randrange(7):
        case 0:
            return {**sample, "foreign": [7], "exclusivity": "contaminated"}
        case 1:
            return {**sample, "foreign": [], "exclusivity": chance.choice(["exclusive", "unverifiable"])}
        case 2:
            return {**sample, "at_ms": chance.choice([0, sample.get("at_ms", 0) + 1, sample.get("at_ms", 0) + 2000])}
        case 3:
            return {**sample, "throttle": chance.choice([0, 1, 2**40])}
        case 4:
            return {**sample, "energy_mj": chance.choice([0, 2**52])}
        case 5:
            return {**sample, "device": "other", "error": chance.choice([None, "x"])}
    changed = _changed(chance, sample)
    return changed if isinstance(changed, dict) else sample


def _summed(end: dict[str, Any], events: list[Any], data: bytes) -> dict[str, Any]:
    """Return what the ledger should say of an attempt's samples."""
    own = {e["event"]: e["data"] for e in events if isinstance(e, dict) and e.get("attempt") == end["attempt"]}
    span = own["intent"]["leased"]["boottime_ms"], own["device_clean"]["released"]["boottime_ms"]
    samples = [item for item in read_samples(data) if isinstance(item, Sample)]
    found = {device: summarize(device, samples, *span) for device in own["reserved"]["devices"]} if samples else {}
    return {
        "telemetry": {device: item.to_json() for device, item in found.items()},
        "exclusivity": worst(found.values()),
    }


def _toml(chance: random.Random, members: Members) -> Members:
    """Change a protocol file as text, in a way that may or may not change what it means."""
    names = [name for name in members if name.endswith("protocol.toml")]
    if not names:
        return members
    name = chance.choice(names)
    old, new = chance.choice(TOML_EDITS)
    members[name] = re.sub(old, lambda _: new, members[name], count=1)
    return members


TOML_EDITS: list[tuple[bytes, bytes]] = [
    (rb"\n", b"\r\n"), (rb"\n", b"\n# said\n"), (rb"threshold = [^\n]*", b"threshold = 0.0"),
    (rb"threshold = [^\n]*", b'threshold = "0"'), (rb"threshold = [^\n]*", b"threshold = inf"),
    (rb"confidence = [^\n]*", b"confidence = 0.9_5"), (rb"confidence = [^\n]*", b"confidence = 0.4"),
    (rb"confidence = [^\n]*", b"confidence = 1"), (rb"seeds = \[", b"seeds = [77, "),
    (rb"starts = [0-9]+", b"starts = 2"), (rb"starts = [0-9]+", b"starts = 2.0"), (rb"blocks = [0-9]+", b"blocks = 3"),
    (rb"order_seed = [0-9]+", b"order_seed = 5"), (rb"replay_sample = [0-9]+", b"replay_sample = 0"),
    (rb'order = "[a-z]*"', b'order = "shuffled"'), (rb'isolation = "[a-z]*"', b'isolation = "cell"'),
    (rb"\[retry\]", b"[retry]\nexit_nonzero = 1"), (rb'multiplicity = "none"', b'multiplicity = "bonferroni"'),
    (rb'missing = "withhold"', b'missing = "drop_start"'), (rb"limit = [^\n]*", b"limit = 1e300"),
    (rb"limit = [^\n]*", b"limit = 10.1"), (rb'on_failure = "[a-z]*"', b'on_failure = "record"'),
    (rb'rule = "above"', b'rule = "at_most"'), (rb"parameters = \{", b"parameters = { a = 1.50, b = [1, 'x'], "),
    (rb"parameters = \{", b"parameters = { a = {decimal = 2}, "), (rb"parameters = \{", b"parameters = { a = nan, "),
    (rb"\[design\]", b"[[exclusions]]\nworkload = 'small'\nreason = 'r'\n[design]"),
    (rb"\[design\]", b"[[exclusions]]\narm = 'once'\nreason = 'r'\n[design]"),
    (rb"\[design\]", b"[[factors]]\nname = 'f'\nlevels = [true, 1, 2.50, 'a']\n[design]"),
    (rb"\[design\]", b"[[factors]]\nname = 'f'\nlevels = [1, '1']\n[design]"),
    (rb"\[budget\]", b"[budget]\nnot_after = 2030-01-01T00:00:00Z"), (rb"\[budget\]", b"[budget]\nnot_after = '2030'"),
    (rb"\[budget\]", b"[budget]\nnot_after = 2030-01-01"), (rb"\[budget\]", b"[budget]\nattempts_max = 1"),
    (rb"device_seconds = [^\n]*", b"device_seconds = 30"), (rb"device_seconds = [^\n]*", b"device_seconds = 1e400"),
    (rb"\[budget\]", b"[budget]\nprocesses_max = 0"), (rb"\[budget\]", b"[budget]\nprocesses_max = 1000000"),
    (rb'exclusivity = "best_effort"', b'exclusivity = "required"'), (rb'"stop"\n', b'"finish"\n'),
    (rb"\[environment\]", b"[environment]\npackages = { numpy = '>=1' }"), (rb"minimum = 0", b"minimum = 11"),
    (rb"replay = \{ rule = \"exact\" \}", b'replay = { rule = "absolute", tolerance = 1e-3 }'),
    (rb"type = \"float64\"", b'type = "float32"'), (rb"type = \"float64\"", b'type = "float16"'),
    (rb"type = \"float64\"", b'type = "uint64"'), (rb"rule = \"log_ratio\"", b'rule = "difference"'),
]  # fmt: skip


def mend(members: Members, original: Members) -> Members:
    """Make manifests, ledger, table and results agree again with what they are about, where that can be done."""
    members = dict(members)
    places = sorted({name[:14] for name in members if name.startswith("1-manifest/")})
    events = [_loaded(line) for line in members.get(LEDGER, b"").splitlines()]
    before: str | None = None
    for place in places:
        name = place + "/manifest.json"
        manifest = _loaded(members.get(name, b""))
        if not isinstance(manifest, dict):
            continue
        file = members.get(place + "/protocol.toml", b"")
        if file != original.get(place + "/protocol.toml"):
            _freeze_again(members, place, manifest, file)
        for key in ("cells", "sources"):
            manifest[key] = _list(members.get(f"{place}/{key}.jsonl", b""))
        for arm in manifest.get("arms") or []:
            if isinstance(arm, dict):
                suffix = f"-{arm['revision']}" if arm.get("revision") else ""
                arm["sources"] = _list(members.get(f"{place}/sources{suffix}.jsonl", b""))
        manifest["protocol_file"] = {"size": len(file), "sha256": digest_of(file)}
        said = manifest.get("supersedes")
        if isinstance(said, dict) and before:
            said["manifest"] = before
        old = digest_of(original.get(name, b""))
        members[name] = _encoded(manifest)
        before = digest_of(members[name])
        events = _renamed(events, old, before)
    for event in events:
        if isinstance(event, dict) and isinstance(event.get("data"), dict) and "files" in event["data"]:
            event["data"]["files"] = {
                name.rpartition("/")[2]: FileDigest(size=len(data), sha256=digest_of(data)).to_json()
                for name, data in members.items()
                if name.startswith(f"3-attempts/{event.get('attempt')}/")
            }
            place = f"3-attempts/{event.get('attempt')}/telemetry.jsonl"
            if event.get("event") == "settled" and members.get(place) != original.get(place):
                with suppress(KeyError, TypeError):
                    event["data"].update(_summed(event, events, members.get(place, b"")))
    members = _chained(members, events)
    reading = _read(members)
    members.pop(SAMPLES, None)
    members |= telemetry_table(members, reading.account)
    if reading.manifest is None or not reading.cells:
        return members
    try:
        args = reading.manifest, reading.cells, reading.account, reading.journals
        columns = table_columns(reading.manifest.protocol.observations)
        members[ROWS] = table_bytes(columns, table_rows(*args))
        members[RESULTS] = derive(reading.manifest, final_rows(*args), reading.account).to_bytes()
    except (KeyError, AssertionError):
        pass
    return members


def _freeze_again(members: Members, place: str, manifest: dict[str, Any], file: bytes) -> None:
    """Take the protocol from its changed file, and plan its cells, where it is allowed."""
    try:
        protocol = read_protocol(file, "protocol.toml")
    except CapsuleError:
        return
    manifest["protocol"] = protocol.to_json()
    members[f"{place}/cells.jsonl"] = cells_bytes(enumerate_cells(protocol))


def _list(data: bytes) -> dict[str, Any]:
    return {"count": data.count(b"\n"), "sha256": digest_of(data)}


def _loaded(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return None


def _renamed(value: Any, old: str, new: str) -> Any:
    if isinstance(value, dict):
        return {key: _renamed(item, old, new) for key, item in value.items()}
    if isinstance(value, list):
        return [_renamed(item, old, new) for item in value]
    return new if value == old else value


def _read(members: Members) -> Reading:
    """Understand members as far as the product's checks do."""
    evidence = Evidence(members=set(members), ledger=members.get(LEDGER, b""), head=members.get(HEAD, b""))
    for name, data in members.items():
        if name.startswith("1-manifest/"):
            evidence.generations.setdefault(int(name[11:14]), {})[name[15:]] = data
        if name.endswith("/journal.jsonl"):
            evidence.journals[name[11:18]] = data
    reading = Reading(evidence)
    for identifier in ("V-04", "V-05", "V-10", "V-17"):
        _drained(CHECK_FUNCTIONS[identifier](reading))
    return reading


def _drained(findings: Iterable[str]) -> None:
    try:
        for _ in findings:
            pass
    except (CapsuleError, NotChecked):
        pass

"""What a vector is, and how the parts of an honest capsule are exchanged for others."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from capsule.core.canonical import canonical, join_lines, parse_lines
from capsule.core.digest import digest_of
from tests.conformance import histories
from tests.golden.make import LEDGER, MANIFEST, RESULTS, Members, rechain, seal, unpack

ROOT = Path(__file__).parents[2]
HEAD = "2-ledger.head.json"
ROWS = "4-records/rows.parquet"
SAMPLES = "4-records/telemetry.parquet"
CELLS, SOURCES = "1-manifest/001/cells.jsonl", "1-manifest/001/sources.jsonl"
TOML = "1-manifest/001/protocol.toml"
JOURNAL = "3-attempts/a000001/journal.jsonl"
PROVENANCE = "3-attempts/a000001/provenance.jsonl"
BROKEN, INCOMPLETE, MALFORMED = 1, 3, 3
"""Exit codes."""

Change = Callable[[Any], Any]


@dataclass(frozen=True)
class Vector:
    """A file with one fault: its name begins with the item of the list of attacks.

    `clause` is the MUST that it breaks, `checks` are those of which one must fail and say so (none: it is refused as no
    capsule, or incomplete), and `exit_code` is what `capsule verify` ends with.
    """

    name: str
    clause: str
    checks: tuple[str, ...]
    build: Callable[[], bytes]
    exit_code: int = BROKEN


@cache
def golden(name: str = "supported") -> Members:
    """Return the members of a golden capsule, with few imports, so that every vector is verified quickly."""
    members = unpack((ROOT / f"tests/golden/{name}.capsule").read_bytes())
    for file in [file for file in members if file.endswith("/provenance.jsonl")]:
        lines = parse_lines(members[file], file)
        kept = [line for line in lines if line["origin"] == "source"] + lines[:1]
        members = with_file(file, join_lines(sorted(kept, key=canonical)), members)
    return members


@cache
def sampled() -> Members:
    """Return the members of a small drawn history in which an attempt completed and was sampled."""
    return next(
        members for members in map(histories.draw, range(400)) if len(members) < 45 and sampled_attempt(members)
    )


def sampled_attempt(members: Members) -> str | None:
    """Return the first attempt that completed and had its device to itself."""
    for event in parse_lines(members[LEDGER], LEDGER):
        said = event["data"].get("exclusivity"), event["data"].get("outcome")
        if event["event"] == "settled" and said == ("exclusive", "completed"):
            return str(event["attempt"])
    return None


def with_member(name: str, data: bytes | None, members: Members | None = None) -> Members:
    """Exchange one member; None leaves it out."""
    changed = {**(golden() if members is None else members)}
    if data is None:
        del changed[name]
    else:
        changed[name] = data
    return changed


def events(members: Members | None = None) -> list[dict[str, Any]]:
    """Return a ledger's events, free to be changed."""
    return parse_lines((golden() if members is None else members)[LEDGER], LEDGER)


def with_events(changed: list[dict[str, Any]], members: Members | None = None) -> Members:
    """Put events in the place of the ledger's, chained again and with their head."""
    chained = rechain(changed)
    head = canonical({"count": len(chained), "sha256": digest_of(canonical(chained[-1]))})
    return {**(golden() if members is None else members), LEDGER: join_lines(chained), HEAD: head}


def with_ledger_lines(lines: list[bytes], members: Members | None = None, *, torn: bytes = b"") -> Members:
    """Put lines in the place of the ledger's and chain those that are events again, around those that are none."""
    prev: str | None = None
    chained = []
    for number, line in enumerate(lines):
        try:
            value = json.loads(line)
            canonical_already = isinstance(value, dict) and canonical(value) == line
        except (ValueError, RecursionError):
            canonical_already = False
        chained.append(canonical({**value, "seq": number, "prev": prev}) if canonical_already else line)
        prev = digest_of(chained[-1])
    head = canonical({"count": len(chained), "sha256": prev})
    whole = b"".join(line + b"\n" for line in chained) + torn
    return {**(golden() if members is None else members), LEDGER: whole, HEAD: head}


def with_file(name: str, data: bytes, members: Members | None = None) -> Members:
    """Exchange a file of an attempt, and what the ledger says of it."""
    members = golden() if members is None else members
    _, attempt, file = name.split("/")
    changed = events(members)
    for event in changed:
        if event["event"] in ("settled", "reconciled") and event["attempt"] == attempt:
            event["data"]["files"][file] = {"size": len(data), "sha256": digest_of(data)}
    return with_events(changed, {**members, name: data})


def with_manifest(change: Callable[[dict[str, Any]], Any], members: Members | None = None) -> Members:
    """Change the manifest, and let the ledger name the changed one."""
    members = golden() if members is None else members
    manifest = json.loads(members[MANIFEST])
    change(manifest)
    data = canonical(manifest)
    renamed = members[LEDGER].replace(digest_of(members[MANIFEST]).encode(), digest_of(data).encode())
    return with_events(parse_lines(renamed, LEDGER), {**members, MANIFEST: data})


def with_list(name: str, data: bytes, members: Members | None = None) -> Members:
    """Exchange a list beside the manifest, and its count and digest in the manifest and the ledger."""
    members = {**(golden() if members is None else members)}
    key = name.rpartition("/")[2].partition(".")[0]
    before = digest_of(members[name])

    def change(manifest: dict[str, Any]) -> None:
        listed = {"count": data.count(b"\n"), "sha256": digest_of(data)}
        manifest[key] = listed
        for arm in manifest["arms"] if key == "sources" else ():
            arm["sources"] = listed

    members |= {name: data, LEDGER: members[LEDGER].replace(before.encode(), digest_of(data).encode())}
    return with_manifest(change, members)


def with_results(change: Callable[[dict[str, Any]], Any], members: Members | None = None) -> Members:
    """Change the results."""
    members = golden() if members is None else members
    results = json.loads(members[RESULTS])
    change(results)
    return {**members, RESULTS: canonical(results)}


def event(kind: str, change: Change, number: int = 0) -> Callable[[], Members]:
    """Change one event of a kind."""

    def build() -> Members:
        changed = events()
        change([item for item in changed if item["event"] == kind][number])
        return with_events(changed)

    return build


def data(kind: str, **values: Any) -> Callable[[], Members]:
    """Let an event of a kind say something else."""
    return event(kind, lambda item: item["data"].update(values))


def ledger(change: Change) -> Callable[[], Members]:
    """Change the list of events."""

    def build() -> Members:
        changed = events()
        return with_events(either(change(changed), changed))

    return build


def either(result: Any, changed: list[Any]) -> list[Any]:
    """Return the list that a change gave, or the one that it changed in place."""
    return result if isinstance(result, list) else changed


def at(kind: str) -> int:
    """Return the number of the first event of a kind."""
    return next(number for number, item in enumerate(events()) if item["event"] == kind)


def again(kind: str, name: str, new: dict[str, Any]) -> Change:
    """Add an event after the first of a kind, at the same moment and of the same attempt."""

    def change(items: list[dict[str, Any]]) -> None:
        items.insert(at(kind) + 1, {**items[at(kind)], "event": name, "data": new})

    return change


def sealed(build: Callable[..., Members], *arguments: Any) -> Callable[[], bytes]:
    """Return a builder of the container of what `build` gives."""
    return lambda: seal(build(*arguments))

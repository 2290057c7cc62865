"""Diff: what differs between two capsules, in the order in which a person asks.

Manifest first (what was promised), then ledger (what was tried and what it cost), records, results and telemetry; last
every member whose bytes differ, so that nothing that differs is left unsaid. One capsule is read after the other, each
as `verify` reads it, and of the first only what is compared is kept. Differences are counted; the first are listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capsule.core.attempt import Attempt, Settled
from capsule.core.digest import PREFIX
from capsule.core.errors import CapsuleError, MalformedError
from capsule.core.manifest import Manifest, read_cells, read_sources
from capsule.core.results import Results
from capsule.core.verdict import Verdict
from capsule.steps.judged import Judged, judged
from capsule.steps.show import member

LISTED = 20
"""Differences of one section that are listed unless the caller asks for more."""

SECTIONS = ("protocol", "sources", "plan", "chain", "ledger", "records", "results", "telemetry", "members")
"""What is compared, in the order in which it is said."""

NAMING = ("gate", "hypothesis", "estimate", "workload", "arm", "observation", "seed", "start", "unit", "pilot")
"""Keys that name an entry of a list which has no `name`."""

Leaves = Mapping[str, Any]
"""Values by where they stand; a value that is a row has values by column."""


@dataclass(frozen=True)
class Difference:
    """One place where the two differ; a value is None where that capsule has nothing there."""

    where: str
    left: Any
    right: Any


@dataclass(frozen=True)
class Section:
    """What differs in one respect: how many places, and the first of them."""

    name: str
    count: int
    differences: tuple[Difference, ...]


@dataclass(frozen=True)
class Side:
    """One capsule, reduced to what is compared."""

    file: str
    verdict: Verdict
    sections: Mapping[str, Leaves]


@dataclass(frozen=True)
class Diff:
    """Two capsules compared."""

    left: Side
    right: Side
    sections: tuple[Section, ...]

    @property
    def equal(self) -> bool:
        """Whether the two have the same content, however it was compressed."""
        return self.left.verdict.capsule == self.right.verdict.capsule

    @property
    def same_manifest(self) -> bool:
        """Whether both are of one manifest; never of two that cannot be read."""
        return self.left.verdict.manifest is not None and self.left.verdict.manifest == self.right.verdict.manifest


def diff(left: Path, right: Path, *, limit: int = LISTED) -> Diff:
    """Compare two capsules; at most `limit` differences of each section are listed.

    Raises:
        UsageError: there is no such file.
        MalformedError: a file is no capsule, or its container is damaged, so that its content cannot be trusted.
    """
    sides = _side(left), _side(right)
    sections = tuple(_section(name, *_comparable(name, *sides), limit) for name in SECTIONS)
    return Diff(*sides, sections)


def _comparable(name: str, left: Side, right: Side) -> tuple[Leaves, Leaves]:
    """Return what is compared of both sides; where one has no results, that is the one difference."""
    found = left.sections[name], right.sections[name]
    if name == "results" and any("outcome" not in leaves for leaves in found) and found[0] != found[1]:
        return {"outcome": _outcome(left)}, {"outcome": _outcome(right)}
    return found


def _outcome(side: Side) -> str:
    word = side.verdict.outcome
    return f"{word}: the capsule is {side.verdict.integrity}" if word == "withheld" else word


def _section(name: str, left: Leaves, right: Leaves, limit: int) -> Section:
    count = 0
    listed: list[Difference] = []
    for difference in _differences(left, right):
        count += 1
        if len(listed) < limit:
            listed.append(difference)
    return Section(name, count, tuple(listed))


def _differences(left: Leaves, right: Leaves) -> Iterator[Difference]:
    """Yield where two sides differ; two rows of one place are compared column by column."""
    for where in (*left, *(where for where in right if where not in left)):
        one, other = left.get(where), right.get(where)
        if isinstance(one, dict) and isinstance(other, dict):
            for difference in _differences(one, other):
                yield Difference(f"{where} {difference.where}", difference.left, difference.right)
        elif one != other or (where in left) != (where in right):
            yield Difference(where, one, other)


def _side(path: Path) -> Side:
    found = judged(path)
    if found.verdict.capsule is None:
        raise MalformedError(
            f"{path}: expected a sound container to compare, found damage", hint=f"see where: capsule verify {path}"
        )
    sections = {
        "protocol": _protocol(found.manifest),
        "sources": _read(_sources, found),
        "plan": _read(_plan, found),
        "chain": _chain(found),
        "ledger": _ledger(found.account.attempts.values()),
        "records": _read(_records, found),
        "results": _results(found.results, found.verdict),
        "telemetry": _telemetry(found.account.attempts.values()),
        "members": _members(path),
    }
    return Side(str(path), found.verdict, sections)


def _read(reader: Any, found: Judged) -> Leaves:
    """Return what `reader` reads, or say in its place why it cannot be read."""
    try:
        return dict(reader(found))
    except CapsuleError as error:
        return {"not readable": error.message}


def _protocol(manifest: Manifest | None) -> Leaves:
    """Return every field of the protocol, and where each arm's sources come from, by its key."""
    if manifest is None:
        return {"not readable": "manifest.json"}
    value = manifest.to_json()
    lock = {"environment.lock": value["lock"]["sha256"]} if value["lock"] else {}
    return {**dict(flat(value["protocol"])), **lock}


def _sources(found: Judged) -> Iterator[tuple[str, Any]]:
    """Yield every frozen file by its path: digest and mode, or a link's target; other revisions under their names."""
    for file, data in found.files.items():
        if not file.startswith("sources"):
            continue
        revision = file.removeprefix("sources").removesuffix(".jsonl").removeprefix("-")
        for entry in read_sources(data, file):
            where = f"{revision}:{entry.path}" if revision else entry.path
            yield where, f"link to {entry.target}" if entry.kind == "link" else f"{entry.sha256} {entry.mode}"


def _plan(found: Judged) -> Iterator[tuple[str, Any]]:
    """Yield every planned cell: what it is to run, and when."""
    cells = read_cells(found.files.get("cells.jsonl", b""), "cells.jsonl")
    yield "planned cells", len(cells)
    for cell in cells:
        value = cell.to_json()
        yield value.pop("cell"), ", ".join(f"{key} {item}" for key, item in value.items() if item is not None)


def _chain(found: Judged) -> Leaves:
    """Return the manifests of the chain by number: identity of the one in force, digests of those before."""
    leaves: dict[str, Any] = {}
    for number, files in sorted(found.evidence.generations.items()):
        try:
            manifest = Manifest.from_bytes(files.get("manifest.json", b""), f"{number:03d}/manifest.json")
        except CapsuleError as error:
            leaves[f"manifest {number}"] = error.message
            continue
        leaves[f"manifest {number}"] = manifest.identity
        if manifest.supersedes is not None:
            leaves[f"manifest {number} reason"] = manifest.supersedes.reason
    return leaves


def _ledger(attempts: Iterable[Attempt]) -> Leaves:
    """Return totals by unit and outcome, then every attempt: what ran, how it ended, what it cost."""
    totals: dict[str, Any] = {}
    each: dict[str, Any] = {}
    count = 0
    for attempt in attempts:
        count += 1
        source, end = attempt.reserved or attempt.refused, attempt.end
        outcome = end.outcome if end else "refused" if attempt.refused else "open"
        unit = attempt.reserved.unit if attempt.reserved else "none"
        for name, amount in ((f"{outcome} attempts", 1), (f"charged {unit} ms", attempt.held_ms)):
            totals[name] = totals.get(name, 0) + amount
        each |= {
            f"{attempt.id} outcome": outcome,
            f"{attempt.id} process": source.process if source else None,
            f"{attempt.id} pilot": attempt.pilot,
            f"{attempt.id} devices": ", ".join(attempt.reserved.devices) if attempt.reserved else None,
            f"{attempt.id} held_ms": attempt.held_ms,
            f"{attempt.id} rows": end.rows if end else None,
            f"{attempt.id} exclusivity": end.exclusivity if isinstance(end, Settled) else None,
        }
    return {"attempts": count, **totals, **each}


def _records(found: Judged) -> Iterator[tuple[str, Any]]:
    """Yield every row of the table by its cell; one that is not final by its attempt as well."""
    table = found.evidence.table
    if isinstance(table, str):
        raise MalformedError(table)
    for row in table:
        yield str(row["cell"]) if row["final"] else f"{row['cell']} of {row['attempt']}, not final", row


def _results(results: Results | None, verdict: Verdict) -> Leaves:
    """Return what was derived, flat; nothing of a capsule that is not intact."""
    if results is None:
        return {"withheld": verdict.integrity}
    value = results.to_json()
    value.pop("manifest")
    first = {"outcome": value.pop("outcome")} | {
        f"hypotheses[{item['hypothesis']}].decision": item["decision"] for item in value["hypotheses"]
    }
    return {**first, **dict(flat(value))}


def _telemetry(attempts: Iterable[Attempt]) -> Leaves:
    """Return what the samples of every attempt and device add up to."""
    return {
        f"{attempt.id} {device} {where}": value
        for attempt in attempts
        if isinstance(attempt.end, Settled)
        for device, found in attempt.end.telemetry.items()
        for where, value in flat(found.to_json())
    }


def _members(path: Path) -> Leaves:
    """Return the digest of every member, from the list that the container has checked."""
    lines = member(path, "9-SHA256SUMS").decode("ascii").splitlines()
    return {name: PREFIX + digest for digest, _, name in (line.partition("  ") for line in lines)}


def flat(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf of a JSON value by its place; entries of a list stand under the name that they carry.

    Empty lists and objects are leaves, so that one which was emptied is a difference.
    """
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from flat(item, f"{at}.{key}" if at else str(key))
    elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        for name, item in zip(_names(value), value, strict=True):
            yield from flat(item, f"{at}[{name}]")
    else:
        yield at, value


def _names(items: list[dict[str, Any]]) -> list[str]:
    """Return a name for each entry of a list: what names it where that is distinct, else its number."""
    keys = ("name",) if all("name" in item for item in items) else NAMING
    names = [" ".join(_name(key, item[key]) for key in keys if item.get(key) not in (None, False)) for item in items]
    return names if all(names) and len(set(names)) == len(names) else [str(number) for number in range(len(items))]


def _name(key: str, value: Any) -> str:
    return key if value is True else str(value)

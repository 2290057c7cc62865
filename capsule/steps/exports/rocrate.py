"""A capsule as an RO-Crate 1.1: its members in a folder, and `ro-crate-metadata.json` that says what they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from capsule import __version__
from capsule.archive.layout import is_allowed
from capsule.core.digest import PREFIX
from capsule.core.document import visible
from capsule.core.errors import CapsuleError
from capsule.core.manifest import read_sources
from capsule.core.results import Results
from capsule.steps.exports.folder import Folder, Written
from capsule.steps.judged import Judged

Entity = dict[str, Any]

METADATA = "ro-crate-metadata.json"
PROFILE = "https://w3id.org/ro/crate/1.1"
UNDATED = "1980-01-01"
"""The date of a capsule whose ledger cannot be read: that of the container's own headers."""

LATER = "Added by a newer version of the format"
ROOMS = {
    "0-header.json": "The format of the container",
    "1-manifest": "What was promised: protocol, planned cells, frozen sources",
    "2-ledger.head.json": "Length and last hash of the ledger",
    "2-ledger.jsonl": "Every attempt and what it was charged",
    "3-attempts": "What an attempt left: records, logs, environment, imports, telemetry",
    "4-records": "The table of all records, or of all telemetry",
    "5-sources": "A frozen source file",
    "6-oracles": "A reference that was frozen",
    "7-results": "Estimates, gates and decisions, derived from the records",
    "8-README": "How to check and cite the capsule",
    "9-SHA256SUMS": "SHA-256 of all members",
}
FORMATS = {
    ".json": "application/json",
    ".jsonl": "application/x-ndjson",
    ".md": "text/markdown",
    ".py": "text/x-python",
    ".txt": "text/plain",
    ".toml": "application/toml",
    ".parquet": "application/vnd.apache.parquet",
    ".cff": "application/yaml",
}


def write(found: Judged, capsule: Path, folder: Folder) -> None:
    """Write the crate; its date is that of the ledger's last event."""
    assert found.verdict.capsule is not None
    files = folder.write_members(capsule, "", found.verdict.capsule)
    paths = _source_paths(found)
    parts = [_file(file, paths) for file in files]
    facts = list(_facts(found))
    graph = [
        {
            "@id": METADATA,
            "@type": "CreativeWork",
            "about": {"@id": "./"},
            "conformsTo": {"@id": PROFILE},
        },
        _root(found, parts, facts),
        *parts,
        *facts,
        {
            "@id": "#licence",
            "@type": "CreativeWork",
            "name": "No licence stated",
            "description": "A capsule states no licence of its own; ask whoever published it.",
        },
        {
            "@id": "#evidence-capsule",
            "@type": "SoftwareApplication",
            "name": "evidence-capsule",
            "softwareVersion": __version__,
        },
    ]
    crate = {"@context": f"{PROFILE}/context", "@graph": graph}
    folder.write(METADATA, (json.dumps(crate, indent=2, ensure_ascii=False) + "\n").encode())


def _root(found: Judged, parts: list[Entity], facts: list[Entity]) -> Entity:
    protocol = found.manifest.protocol if found.manifest else None
    verdict = found.verdict
    warning = "" if verdict.integrity == "intact" else f"This capsule is {verdict.integrity}: do not rely on it. "
    return {
        "@id": "./",
        "@type": "Dataset",
        "name": visible(protocol.title) if protocol else "A capsule whose manifest cannot be read",
        "description": warning
        + (visible(" ".join(protocol.question.split())) if protocol else "No question is known."),
        "datePublished": _date(found),
        "license": {"@id": "#licence"},
        "identifier": verdict.capsule,
        "hasPart": [{"@id": part["@id"]} for part in parts],
        "additionalProperty": [{"@id": fact["@id"]} for fact in facts],
        "creator": {"@id": "#evidence-capsule"},
    }


def _date(found: Judged) -> str:
    clocks = [attempt.last.realtime for attempt in found.account.attempts.values() if attempt.last]
    return max(clocks)[: len(UNDATED)] if clocks else UNDATED


def _file(file: Written, paths: dict[str, str]) -> Entity:
    path = paths.get(file.name.partition("/")[2], file.name) if file.name.startswith("5-sources/") else file.name
    text = path.endswith(("/stdout", "/stderr", "SUMS"))
    return {
        "@id": quote(file.name),
        "@type": "File",
        "name": visible(path),
        "description": description(file.name),
        "encodingFormat": "text/plain" if text else FORMATS.get(Path(path).suffix, "application/octet-stream"),
        "contentSize": str(file.size),
        "identifier": PREFIX + file.sha256,
    }


def description(name: str) -> str:
    """Say what a member is, by its room; one that this version does not know is none of its room's, wherever it is."""
    if not is_allowed(name):
        return LATER
    return ROOMS.get(name) or ROOMS[name.partition("/")[0]]


def _source_paths(found: Judged) -> dict[str, str]:
    """Return the path under which each source was frozen, by its digest."""
    paths: dict[str, str] = {}
    for file, data in found.files.items():
        if file.startswith("sources"):
            with suppress(CapsuleError):
                for entry in read_sources(data, file):
                    paths.setdefault(entry.sha256.removeprefix(PREFIX), entry.path)
    return paths


def _facts(found: Judged) -> Iterator[Entity]:
    """Yield what verifying says, and the derived results of an intact capsule."""
    verdict = found.verdict
    yield _fact("integrity", verdict.integrity, "Whether the evidence agrees with itself.")
    yield _fact("outcome", verdict.outcome, "What the evidence shows, by the rules that were frozen.")
    yield _fact("manifest", verdict.manifest or "none that can be read", "The identity of what was promised.")
    if found.results is not None:
        yield from _results(found.results)


def _results(results: Results) -> Iterator[Entity]:
    for hypothesis in results.hypotheses:
        yield _fact(f"hypothesis {hypothesis.hypothesis}", hypothesis.decision, visible(hypothesis.claim))
    for item in results.estimates:
        words = f"Mean over {len(item.starts)} starts, with its interval at level {item.level}."
        name = f"estimate {item.estimate} on {item.workload}"
        if item.mean is None:
            yield _fact(name, "withheld", visible(str(item.withheld)))
        else:
            yield {**_fact(name, item.mean, words), "minValue": item.low, "maxValue": item.high}


def _fact(name: str, value: str, words: str) -> Entity:
    identifier = f"#{quote(name.replace(' ', '-'), safe='')}"
    return {"@id": identifier, "@type": "PropertyValue", "name": visible(name), "value": value, "description": words}

"""A capsule as a folder of MLflow's file store.

One experiment: a run for every attempt, below it one for each arm on each workload that it observed, and one run with
the derived results.

MLflow's names are narrower than a protocol's: a character that it does not take becomes `_`, and a name that would
stand twice gets a number. Observations that are text stay in the records.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from capsule.core.attempt import COMPLETED, INTERRUPTED, Attempt
from capsule.core.document import visible
from capsule.core.errors import MalformedError
from capsule.core.evidence import Rows
from capsule.core.plan import crossed
from capsule.core.protocol import Protocol
from capsule.core.record import number
from capsule.core.results import Results
from capsule.core.schema import plain
from capsule.steps.exports.folder import Folder
from capsule.steps.judged import Judged

FINISHED, FAILED, KILLED = 3, 4, 5
"""MLflow's numbers for how a run ended."""
VALUE_CHARACTERS = 6_000
NAME_CHARACTERS = 200
TAKEN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-. ")

Point = tuple[int, float]
"""A value of a metric and its step."""


@dataclass
class Run:
    """One run: what MLflow shows of it."""

    name: str
    status: int
    began_ms: int
    ended_ms: int
    parent: str | None = None
    params: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, list[Point]] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)


def write(found: Judged, capsule: Path, folder: Folder) -> None:
    """Write the store."""
    protocol = found.manifest.protocol if found.manifest else None
    verdict = found.verdict
    identity = verdict.capsule
    assert identity is not None
    tags = {
        "capsule": identity,
        "capsule.manifest": verdict.manifest or "none that can be read",
        "capsule.integrity": verdict.integrity,
        "capsule.outcome": verdict.outcome,
    }
    runs = [*_attempt_runs(found, protocol)]
    began = min((run.began_ms for run in runs), default=0)
    ended = max((run.ended_ms for run in runs), default=0)
    if found.results is not None:
        runs.insert(0, _results_run(found.results, began, ended))
    seed = hashlib.sha256(f"mlflow\n{identity}".encode()).hexdigest()
    experiment = str(int(seed[:15], 16))
    meta = {
        "artifact_location": f"./{experiment}",
        "creation_time": began,
        "experiment_id": experiment,
        "last_update_time": ended,
        "lifecycle_stage": "active",
        "name": protocol.name if protocol else "unreadable",
    }
    folder.write(f"{experiment}/meta.yaml", _yaml(meta))
    _write_values(folder, f"{experiment}/tags", tags)
    for run in runs:
        _write_run(folder, experiment, run, {**tags, **run.tags}, identity)


def _attempt_runs(found: Judged, protocol: Protocol | None) -> Iterator[Run]:
    rows = _rows_of_attempts(found.evidence.table)
    for attempt in found.account.attempts.values():
        run = _attempt_run(attempt)
        yield run
        if protocol is None:
            continue
        groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
        for row in rows.get(attempt.id, ()):
            groups.setdefault((str(row["arm"]), str(row["workload"])), []).append(row)
        for (arm, workload), group in groups.items():
            yield _arm_run(protocol, run, arm, workload, group)


def _rows_of_attempts(table: Rows | str) -> dict[str, list[Mapping[str, Any]]]:
    """Return the rows of the packed table by attempt; none of a table that cannot be read."""
    rows: dict[str, list[Mapping[str, Any]]] = {}
    try:
        for row in () if isinstance(table, str) else table:
            rows.setdefault(str(row["attempt"]), []).append(row)
    except MalformedError:
        return {}
    return rows


def _attempt_run(attempt: Attempt) -> Run:
    source, end = attempt.reserved or attempt.refused, attempt.end
    outcome = end.outcome if end else "refused" if attempt.refused else "open"
    status = FINISHED if outcome in COMPLETED else KILLED if outcome in INTERRUPTED else FAILED
    began = _milliseconds(attempt.first.realtime) if attempt.first else 0
    ended = _milliseconds(attempt.last.realtime) if attempt.last else began
    run = Run(attempt.id, status, began, ended)
    evidence = end.evidence if end else attempt.refused.words if attempt.refused else ""
    run.tags = {"attempt": attempt.id, "outcome": outcome, "pilot": str(attempt.pilot).lower(), "evidence": evidence}
    run.params = {"process": str(source.process)} if source else {}
    if attempt.reserved:
        run.params |= {"unit": attempt.reserved.unit, "devices": ", ".join(attempt.reserved.devices)}
    run.metrics = {"charged_device_seconds": [(0, attempt.held_ms / 1000)]}
    for number_, (device, seen) in enumerate(sorted(getattr(end, "telemetry", {}).items())):
        run.tags[f"device.{number_}"] = device
        if seen.energy_mj is not None:
            run.metrics[f"energy_joules.{number_}"] = [(0, seen.energy_mj / 1000)]
    return run


def _arm_run(protocol: Protocol, parent: Run, arm: str, workload: str, rows: list[Mapping[str, Any]]) -> Run:
    run = Run(f"{parent.name} {arm} {workload}", parent.status, parent.began_ms, parent.ended_ms, parent.name)
    run.tags = {"attempt": parent.name, "pilot": parent.tags["pilot"], "outcome": parent.tags["outcome"]}
    run.params = {"arm": arm, "workload": workload}
    run.params |= {"seed": str(rows[0]["seed"]), "start": str(rows[0]["start"])}
    run.params |= _params("arm", next((item.parameters for item in protocol.arms if item.name == arm), {}))
    planned = (item.parameters for item in crossed(protocol) if item.name == workload)
    run.params |= _params("workload", next(planned, {}))
    for status in ("ok", "failed"):
        run.metrics[f"rows_{status}"] = [(0, float(sum(row["status"] == status for row in rows)))]
    for column in protocol.observations:
        if column.type == "text":
            continue
        points = [(step, row[column.name]) for step, row in enumerate(rows) if row.get(column.name) is not None]
        if points:
            run.metrics[column.name] = [(step, float(number(value))) for step, value in points]
    return run


def _params(prefix: str, parameters: Mapping[str, Any]) -> dict[str, str]:
    return {f"{prefix}.{key}": str(plain(value)) for key, value in parameters.items()}


def _results_run(results: Results, began: int, ended: int) -> Run:
    run = Run("results", FINISHED, began, ended)
    run.tags = {f"hypothesis.{item.hypothesis}": item.decision for item in results.hypotheses}
    for item in results.estimates:
        for name in ("mean", "low", "high"):
            value = getattr(item, name)
            if value is not None:
                run.metrics[f"{item.estimate}.{item.workload}.{name}"] = [(0, float(value))]
    run.metrics |= {f"cells_{status}": [(0, float(count))] for status, count in results.cells.items()}
    return run


def _write_run(folder: Folder, experiment: str, run: Run, tags: dict[str, str], capsule: str) -> None:
    identifier = _run_id(capsule, run.name)
    place = f"{experiment}/{identifier}"
    meta = {
        "artifact_uri": f"./{place}/artifacts",
        "end_time": run.ended_ms,
        "entry_point_name": "",
        "experiment_id": experiment,
        "lifecycle_stage": "active",
        "run_id": identifier,
        "run_name": run.name,
        "run_uuid": identifier,
        "source_name": "",
        "source_type": 4,
        "source_version": "",
        "start_time": run.began_ms,
        "status": run.status,
        "tags": [],
        "user_id": "capsule",
    }
    folder.write(f"{place}/meta.yaml", _yaml(meta))
    own = {"mlflow.runName": run.name, "mlflow.user": "capsule"}
    if run.parent is not None:
        own["mlflow.parentRunId"] = _run_id(capsule, run.parent)
    _write_values(folder, f"{place}/tags", {**own, **tags})
    _write_values(folder, f"{place}/params", run.params)
    folder.make(f"{place}/artifacts")
    if not run.metrics:
        folder.make(f"{place}/metrics")
    for name, points in _named(run.metrics):
        lines = "".join(f"{run.ended_ms} {_float(value)} {step}\n" for step, value in points)
        folder.write(f"{place}/metrics/{name}", lines.encode())


def _run_id(capsule: str, name: str) -> str:
    return hashlib.sha256(f"run\n{capsule}\n{name}".encode()).hexdigest()[:32]


def _write_values(folder: Folder, place: str, values: Mapping[str, str]) -> None:
    if not values:
        folder.make(place)
    for name, value in _named(values):
        folder.write(f"{place}/{name}", visible(value)[:VALUE_CHARACTERS].encode())


def _named(values: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """Yield the values under names that MLflow takes, and that stay in their folder whatever a protocol calls them."""
    used: set[str] = set()
    for key, value in values.items():
        plain_name = "".join(character if character in TAKEN else "_" for character in key)[:NAME_CHARACTERS].strip()
        base = name = f"_{plain_name}" if not plain_name.strip(".") else plain_name
        count = 1
        while name.lower() in used:
            count += 1
            name = f"{base}_{count}"
        used.add(name.lower())
        yield name, value


def _float(value: float) -> str:
    return "nan" if math.isnan(value) else repr(value)


def _milliseconds(realtime: str) -> int:
    moment = datetime.fromisoformat(realtime)
    return int(moment.timestamp()) * 1000 + moment.microsecond // 1000


def _yaml(values: Mapping[str, Any]) -> bytes:
    """Return a flat mapping as YAML: numbers, empty lists, and quoted strings of visible ASCII."""
    return "".join(f"{key}: {_scalar(value)}\n" for key, value in values.items()).encode("ascii")


def _scalar(value: Any) -> str:
    if not isinstance(value, str):
        return str(value)
    escaped = "".join(
        character
        if character.isascii() and character.isprintable() and character not in '"\\'
        else f"\\U{ord(character):08X}"
        for character in value
    )
    return f'"{escaped}"'

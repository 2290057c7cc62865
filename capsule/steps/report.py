"""Report: a Markdown account of a capsule for people, every cell in it, losing ones included."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from capsule.core.attempt import Attempt, Settled, add_up
from capsule.core.chain import read
from capsule.core.errors import MalformedError
from capsule.core.judge import judge
from capsule.core.manifest import Manifest
from capsule.core.results import EstimateResult, Results
from capsule.core.telemetry import DeviceTelemetry
from capsule.core.verdict import Verdict
from capsule.steps.verify import collect, open_capsule


def report(path: Path) -> str:
    """Return the Markdown report of a capsule; one that is not intact is reported as such, without an outcome.

    Raises:
        MalformedError: it has no manifest or no table to report.
    """
    with open_capsule(path) as stream:
        evidence = collect(stream)
    verdict = judge(evidence)
    files = evidence.generations.get(max(evidence.generations, default=0), {})
    if "manifest.json" not in files or isinstance(evidence.table, str):
        raise MalformedError(f"{path}: expected a manifest and records to report, found none that can be read")
    manifest = Manifest.from_bytes(files["manifest.json"], "manifest.json")
    sections = [_head(manifest, verdict), _checks(verdict)]
    if verdict.integrity == "intact":
        results = Results.from_bytes(evidence.results, "7-results/results.json")
        sections += [_hypotheses(results), _estimates(manifest, results), _gates(results), _charges(results)]
        attempts = add_up(read(evidence.ledger, "2-ledger.jsonl").events).attempts
        sections += [_devices(attempts, evidence.table), _summaries(results)]
    sections.append(_cells(manifest, evidence.table))
    return "\n".join(section for section in sections if section)


def _head(manifest: Manifest, verdict: Verdict) -> str:
    protocol = manifest.protocol
    lines = [
        f"# {_cell(protocol.title)}",
        "",
        _cell(" ".join(protocol.question.split())),
        "",
        f"- Protocol: `{protocol.name}`",
        f"- Manifest: `{manifest.identity}`",
        f"- Capsule: `{verdict.capsule or 'no identity'}`",
        f"- Integrity: **{verdict.integrity}**",
        f"- Outcome: **{verdict.outcome}**",
        f"- Signed: {'yes, not checked by this version' if verdict.signed else 'no'}",
    ]
    if verdict.amended:
        words = f"{verdict.amended}; the tables below are of the last manifest, earlier journals are in 3-attempts"
        lines.append(f"- {_cell(words[0].upper() + words[1:])}")
    return "\n".join([*lines, ""])


def _checks(verdict: Verdict) -> str:
    rows = [(check.id, check.name, check.status.replace("_", " "), check.words) for check in verdict.checks]
    findings = [f"- {check.id}: {_cell(finding)}" for check in verdict.checks for finding in check.findings]
    return "\n".join(
        ["## Checks", "", *_table(("", "check", "status", ""), rows), "", *findings, *([""] if findings else [])]
    )


def _hypotheses(results: Results) -> str:
    rows = [
        (item.hypothesis, item.decision, component.workload, component.decision, component.reason)
        for item in results.hypotheses
        for component in item.components
    ]
    claims = [f"- `{item.hypothesis}`: {_cell(item.claim)} **{item.decision}**" for item in results.hypotheses]
    table = _table(("hypothesis", "decision", "workload", "there", "because"), rows)
    return "\n".join(["## Hypotheses", "", *claims, "", *table, ""])


def _estimates(manifest: Manifest, results: Results) -> str:
    rules = {estimate.name: estimate.rule for estimate in manifest.protocol.estimates}
    rows = []
    for item in results.estimates:
        ratio = _ratio(item) if rules[item.estimate] == "log_ratio" else ""
        starts = ", ".join(
            f"{start.seed}/{start.start}: {_short(start.value) if start.value else start.reason}"
            for start in item.starts
        )
        interval = item.withheld or f"{_short(item.mean)} [{_short(item.low)}, {_short(item.high)}]"
        rows.append((item.estimate, item.workload, interval, ratio, f"{float(item.level):g}", starts))
    table = _table(("estimate", "workload", "mean [interval]", "ratio [interval]", "level", "seed/start: value"), rows)
    return "\n".join(["## Estimates", "", *table, ""])


def _ratio(item: EstimateResult) -> str:
    if item.mean is None or item.low is None or item.high is None:
        return ""
    mean, low, high = (math.exp(min(float(value), 700.0)) for value in (item.mean, item.low, item.high))
    return f"{mean:.3g} [{low:.3g}, {high:.3g}]"


def _gates(results: Results) -> str:
    rows = [(g.gate, str(g.passed), str(g.failed), str(g.missing), ", ".join(g.failed_cells)) for g in results.gates]
    return "\n".join(["## Gates", "", *_table(("gate", "passed", "failed", "no value", "failed cells"), rows), ""])


def _charges(results: Results) -> str:
    rows = [
        (
            f"{charge.unit}{' (pilot)' if charge.pilot else ''}",
            f"{charge.debited_ms / 1000:.3f}",
            f"{charge.budget_ms / 1000:g}",
            ", ".join(f"{count} {name}" for name, count in sorted(charge.attempts.items())),
        )
        for charge in results.charges
    ]
    table = _table(("unit", "device-seconds charged", "budget", "attempts"), rows)
    return "\n".join(["## What it cost", "", *table, ""])


def _devices(attempts: Mapping[str, Attempt], table: Sequence[Mapping[str, object]]) -> str:
    """Say what the devices were seen doing, and whether any attempt that counts may have shared its own."""
    settled = {name: item.end for name, item in attempts.items() if isinstance(item.end, Settled)}
    rows = [
        (name, device, found.exclusivity, _joules(found), _throttled(found), _observed(found))
        for name, end in settled.items()
        for device, found in end.telemetry.items()
    ]
    counted = {str(row["attempt"]) for row in table if row["final"] and row["attempt"]}
    words = [
        f"{doubt}: {', '.join(names[:20])}{f' and {len(names) - 20} more' if len(names) > 20 else ''}."
        for word, doubt in _DOUBTS
        if (names := sorted(name for name in counted & settled.keys() if settled[name].exclusivity == word))
    ]
    if not rows and not words:
        return ""
    head = ("attempt", "device", "exclusivity", "energy in J", "throttled", "observed")
    lines = [*_table(head, rows), ""] if rows else []
    return "\n".join(["## Devices", "", *lines, *[line for item in words for line in (item, "")]])


_DOUBTS = (
    ("contaminated", "Another process was seen on the device of attempts that count"),
    ("unverifiable", "Nothing shows that the device was free of other processes during attempts that count"),
)


def _joules(found: DeviceTelemetry) -> str:
    return f"{found.energy_mj / 1000:.4g}" if found.energy_mj is not None else f"none: {found.energy_missing}"


def _throttled(found: DeviceTelemetry) -> str:
    """Give the share of the observed time under each reason; an idle device is not held back."""
    held = [(name, spent) for name, spent in found.throttled_ms.items() if name != "gpu_idle"]
    return ", ".join(f"{name} {_share(spent, found.observed_ms)}" for name, spent in held) or "no"


def _observed(found: DeviceTelemetry) -> str:
    return _share(found.observed_ms, found.elapsed_ms)


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.3g} %" if whole else "0 %"


def _summaries(results: Results) -> str:
    rows = [
        (s.workload, s.arm, s.observation, str(s.count), _short(s.mean), _short(s.minimum), _short(s.maximum))
        for s in results.summaries
    ]
    table = _table(("workload", "arm", "observation", "n", "mean", "minimum", "maximum"), rows)
    return "\n".join(["## Observations by arm", "", *table, ""])


def _cells(manifest: Manifest, table: Sequence[dict[str, object]]) -> str:
    names = [column.name for column in manifest.protocol.observations]
    head = ("cell", "workload", "arm", "seed", "start", "block", "status", "attempt", *names)
    final = [_cell_row(row, names) for row in table if row["final"]]
    other = [_cell_row(row, names) for row in table if not row["final"]]
    lines = ["## Every planned cell", "", *_table(head, final), ""]
    if other:
        lines += ["## Rows that did not become final", "", *_table(head, other), ""]
    return "\n".join(lines)


def _cell_row(row: dict[str, object], names: Iterable[str]) -> tuple[str, ...]:
    status = f"{row['status']}: {row['reason']}" if row["reason"] else str(row["status"])
    fixed = (
        row["cell"],
        row["workload"],
        row["arm"],
        row["seed"],
        row["start"],
        row["block"],
        status,
        row["attempt"] or "",
    )
    return (*map(str, fixed), *(_short(row[name]) for name in names))


def _short(value: object) -> str:
    """Write a number with four significant digits; the records have all of them."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return str(value)
    try:
        number = float(value)
    except ValueError:
        return str(value)
    return str(value) if isinstance(value, int) else f"{number:.4g}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|" + " --- |" * len(head)
    for row in rows:
        yield "| " + " | ".join(_cell(value) for value in row) + " |"


def _cell(text: str) -> str:
    """Keep a text inside its cell, and its markup and control characters from acting."""
    escaped = "".join(character if character.isprintable() else f"\\x{ord(character):02x}" for character in text)
    for character in "\\`*_[]<>|#":
        escaped = escaped.replace(character, f"\\{character}")
    return escaped

"""Report: a capsule for people, as Markdown or as one HTML file with plots; every cell in it, losing ones included."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from capsule.core.attempt import Attempt, Settled
from capsule.core.document import Block, Bullets, Code, Heading, Inline, Paragraph, Strong, Table
from capsule.core.errors import MachineError, MalformedError, UsageError
from capsule.core.evidence import Rows
from capsule.core.manifest import Manifest
from capsule.core.markdown import markdown
from capsule.core.page import page
from capsule.core.results import EstimateResult, Results
from capsule.core.telemetry import DeviceTelemetry
from capsule.core.verdict import Verdict
from capsule.host.durable import write_output
from capsule.steps.figures import charge_figures, estimate_figures, telemetry_figures
from capsule.steps.judged import judged
from capsule.steps.limits import HEAD, gate_rows

Form = Literal["markdown", "html"]


def form_of(output: Path | None) -> Form:
    """Return the form of a report by the name of its file: HTML if it ends in `.html` or `.htm`, else Markdown."""
    return "html" if output is not None and output.suffix.lower() in (".html", ".htm") else "markdown"


def report(path: Path, form: Form = "markdown") -> str:
    """Return the report of a capsule; one that is not intact is reported as such, without an outcome.

    Raises:
        MalformedError: it has no manifest or no table to report.
    """
    found = judged(path)
    manifest, table = found.manifest, found.evidence.table
    if manifest is None or isinstance(table, str):
        raise MalformedError(f"{path}: expected a manifest and records to report, found none that can be read")
    blocks = [*_head(manifest, found.verdict), *_checks(found.verdict)]
    figures = form == "html"
    if found.results is not None:
        results, attempts = found.results, found.account.attempts
        blocks += _hypotheses(results)
        blocks += _estimates(manifest, results)
        blocks += estimate_figures(manifest.protocol, results) if figures else []
        blocks += [*_gates(manifest, results), *_charges(results)]
        blocks += charge_figures(attempts) if figures else []
        blocks += _devices(attempts, table)
        blocks += telemetry_figures(attempts, found.evidence.telemetry) if figures else []
        blocks += _summaries(results)
    blocks += _cells(manifest, table)
    return page(manifest.protocol.title, blocks) if figures else markdown(blocks)


def write_report(path: Path, output: Path) -> Form:
    """Write the report of the capsule at `path` to a file, in the form that its name asks for.

    Raises:
        UsageError: the file's folder is not there, or it is a folder itself.
        MalformedError: the capsule has nothing to report.
        MachineError: the file cannot be written.
    """
    check_output(output)
    form = form_of(output)
    text = report(path, form)
    try:
        write_output(output, text.encode())
    except OSError as error:
        raise MachineError(f"cannot write {output}: {error.strerror}") from error
    return form


def check_output(output: Path) -> None:
    """Refuse at once a file that cannot be made: its folder is not there, or it is a folder.

    Raises:
        UsageError: as said.
    """
    if not output.parent.is_dir():
        raise UsageError(
            f"expected a folder to write {output.name} into, found none at {output.parent}",
            hint=f"make it first: mkdir -p {output.parent}",
        )
    if output.is_dir():
        raise UsageError(
            f"expected a file to write to, found a folder at {output}", hint=f"name a file in it: {output}/NAME"
        )


def _head(manifest: Manifest, verdict: Verdict) -> list[Block]:
    protocol = manifest.protocol
    items: list[tuple[Inline, ...]] = [
        ("Protocol: ", Code(protocol.name)),
        ("Manifest: ", Code(manifest.identity)),
        ("Capsule: ", Code(verdict.capsule or "no identity")),
        ("Integrity: ", Strong(verdict.integrity)),
        ("Outcome: ", Strong(verdict.outcome)),
        ("Signatures inside: ", "some; `capsule verify` judges them" if verdict.signed else "none"),
    ]
    if verdict.amended:
        words = f"{verdict.amended}; the tables below are of the last manifest, earlier journals are in 3-attempts"
        items.append((words[0].upper() + words[1:],))
    return [Heading(1, protocol.title), Paragraph((" ".join(protocol.question.split()),)), Bullets(items)]


def _checks(verdict: Verdict) -> list[Block]:
    rows = [(check.id, check.name, check.status.replace("_", " "), check.words) for check in verdict.checks]
    findings = [(f"{check.id}: {finding}",) for check in verdict.checks for finding in check.findings]
    table = Table(("", "check", "status", ""), rows)
    return [Heading(2, "Checks"), table, *([Bullets(findings)] if findings else [])]


def _hypotheses(results: Results) -> list[Block]:
    rows = [
        (item.hypothesis, item.decision, component.workload, component.decision, component.reason)
        for item in results.hypotheses
        for component in item.components
    ]
    claims = [(Code(item.hypothesis), f": {item.claim} ", Strong(item.decision)) for item in results.hypotheses]
    table = Table(("hypothesis", "decision", "workload", "there", "because"), rows)
    return [Heading(2, "Hypotheses"), Bullets(claims), table]


def _estimates(manifest: Manifest, results: Results) -> list[Block]:
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
    head = ("estimate", "workload", "mean [interval]", "ratio [interval]", "level", "seed/start: value")
    return [Heading(2, "Estimates"), Table(head, rows)]


def _ratio(item: EstimateResult) -> str:
    if item.mean is None or item.low is None or item.high is None:
        return ""
    mean, low, high = (math.exp(min(float(value), 700.0)) for value in (item.mean, item.low, item.high))
    return f"{mean:.3g} [{low:.3g}, {high:.3g}]"


def _gates(manifest: Manifest, results: Results) -> list[Block]:
    failed = [", ".join(gate.failed_cells) for gate in results.gates]
    rows = [(*row, cells) for row, cells in zip(gate_rows(manifest.protocol, results), failed, strict=True)]
    return [Heading(2, "Gates"), Table((*HEAD, "failed cells"), rows)]


def _charges(results: Results) -> list[Block]:
    rows = [
        (
            f"{charge.unit}{' (pilot)' if charge.pilot else ''}",
            f"{charge.debited_ms / 1000:.3f}",
            f"{charge.budget_ms / 1000:g}",
            ", ".join(f"{count} {name}" for name, count in sorted(charge.attempts.items())),
        )
        for charge in results.charges
    ]
    return [Heading(2, "What it cost"), Table(("unit", "device-seconds charged", "budget", "attempts"), rows)]


def _devices(attempts: Mapping[str, Attempt], table: Rows) -> list[Block]:
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
        return []
    head = ("attempt", "device", "exclusivity", "energy in J", "throttled", "observed")
    lines = [Paragraph((item,)) for item in words]
    return [Heading(2, "Devices"), *([Table(head, rows)] if rows else []), *lines]


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


def _summaries(results: Results) -> list[Block]:
    rows = [
        (s.workload, s.arm, s.observation, str(s.count), _short(s.mean), _short(s.minimum), _short(s.maximum))
        for s in results.summaries
    ]
    head = ("workload", "arm", "observation", "n", "mean", "minimum", "maximum")
    return [Heading(2, "Observations by arm"), Table(head, rows)]


def _cells(manifest: Manifest, table: Rows) -> list[Block]:
    names = [column.name for column in manifest.protocol.observations]
    head = ("cell", "workload", "arm", "seed", "start", "block", "status", "attempt", *names)
    final = [_cell_row(row, names) for row in table if row["final"]]
    other = [_cell_row(row, names) for row in table if not row["final"]]
    blocks: list[Block] = [Heading(2, "Every planned cell"), Table(head, final)]
    return [*blocks, Heading(2, "Rows that did not become final"), Table(head, other)] if other else blocks


def _cell_row(row: Mapping[str, object], names: Iterable[str]) -> tuple[str, ...]:
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

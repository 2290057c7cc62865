"""Results: every table, estimate and decision, derived from final rows and the ledger by the frozen rules alone.

The same function writes the packed results, checks them and replays them, so the three cannot differ in what they mean.
Numbers are decimal strings with the shortest digits that give the same double back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import Field

from capsule.core.attempt import Account
from capsule.core.decision import Decision, combine, decide_gates, decide_interval, passes
from capsule.core.digest import Digest
from capsule.core.estimate import interval, mean, start_value
from capsule.core.manifest import Manifest
from capsule.core.plan import crossed, selected
from capsule.core.progress import Row, counts
from capsule.core.protocol import Estimate, Gate, Hypothesis, Protocol, milliseconds
from capsule.core.record import number
from capsule.core.schema import Model, Natural

CELLS_NAMED_MAX = 20
RELATIVE_TOLERANCE = 1e-12
ENDS = frozenset({"mean", "low", "high"})
NUMBERS = ENDS | {"value", "minimum", "maximum", "level"}
"""Keys whose values are computed numbers; in a `reason` they stand among words."""


class Summary(Model):
    """What one arm showed on one workload for one numeric observation."""

    workload: str
    arm: str
    observation: str
    count: Natural
    mean: str
    minimum: str
    maximum: str


class GateResult(Model):
    """How many final rows passed and failed a gate, how many had nothing to judge, and the first that failed."""

    gate: str
    passed: Natural
    failed: Natural
    missing: Natural
    failed_cells: tuple[str, ...]


class StartValue(Model):
    """The one number of a process start, or why there is none."""

    seed: Natural
    start: Natural
    value: str | None
    reason: str | None


class EstimateResult(Model):
    """An estimate on one workload: the starts, the mean and the interval, or why it was withheld."""

    estimate: str
    workload: str
    level: str
    starts: tuple[StartValue, ...]
    mean: str | None
    low: str | None
    high: str | None
    withheld: str | None


class Component(Model):
    """A hypothesis decided on one workload."""

    workload: str
    decision: Decision
    reason: str


class HypothesisResult(Model):
    """A hypothesis decided over its workloads."""

    hypothesis: str
    claim: str
    decision: Decision
    components: tuple[Component, ...]


class ChargeResult(Model):
    """What attempts of one unit cost, in device-milliseconds, against the frozen budget."""

    unit: Literal["cpu", "gpu"]
    pilot: bool
    budget_ms: Natural
    debited_ms: Natural
    attempts: dict[str, Natural]


class Results(Model):
    """Everything that the records say, by the frozen rules."""

    schema_: Annotated[Literal["capsule.results/1"], Field(alias="schema")]
    manifest: Digest
    cells: dict[str, Natural]
    reasons: dict[str, Natural]
    summaries: tuple[Summary, ...]
    gates: tuple[GateResult, ...]
    estimates: tuple[EstimateResult, ...]
    hypotheses: tuple[HypothesisResult, ...]
    charges: tuple[ChargeResult, ...]
    outcome: Decision


def derive(manifest: Manifest, rows: Sequence[Row], account: Account) -> Results:
    """Derive all results of a manifest from the final rows of its cells and its chain's ledger."""
    protocol = manifest.protocol
    gates = [_gate_result(gate, rows) for gate in protocol.gates]
    dropped = _excluded_cells(protocol.gates, rows)
    groups = _by_workload(protocol, rows)
    estimates = [
        _estimate_result(protocol, estimate, workload, group, dropped)
        for estimate in protocol.estimates
        for workload, group in groups.items()
    ]
    hypotheses = [_hypothesis_result(protocol, hypothesis, estimates, groups) for hypothesis in protocol.hypotheses]
    return Results(
        schema_="capsule.results/1",
        manifest=manifest.identity,
        cells=counts(rows),
        reasons=_reasons(rows),
        summaries=tuple(_summaries(protocol, groups)),
        gates=tuple(gates),
        estimates=tuple(estimates),
        hypotheses=tuple(hypotheses),
        charges=tuple(_charges(protocol, account)),
        outcome=combine(result.decision for result in hypotheses),
    )


def failing_stop_gate(manifest: Manifest, rows: Iterable[Row]) -> tuple[Gate, Row] | None:
    """Return the first row that fails a gate whose failure stops the experiment."""
    stops = [gate for gate in manifest.protocol.gates if gate.on_failure == "stop"]
    return next(((gate, row) for row in rows for gate in stops if _judge(gate, row) is False), None)


def text(value: float | int) -> str:
    """Write a number with the shortest digits that give it back."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else repr(float(value))


def agree(packed: Any, derived: Any, at: str = "results", scale: float = 0.0) -> Iterator[str]:
    """Yield every place where two results differ; numbers may differ by 1e-12, which libraries of mathematics do.

    Only computed numbers may, written as `text` writes them: names, counts and digests are equal or differ. An end of
    an interval may be a small difference of large numbers, so within an estimate `scale` is the largest of these.
    """
    if isinstance(packed, dict) and isinstance(derived, dict):
        scale = max(scale, _magnitude(derived))
        for key in sorted(packed.keys() | derived.keys()):
            if key not in packed or key not in derived:
                yield f"{at}.{key}: expected {'no such key' if key in packed else 'this key'}"
            else:
                yield from agree(packed[key], derived[key], f"{at}.{key}", scale)
    elif isinstance(packed, list) and isinstance(derived, list):
        if len(packed) != len(derived):
            yield f"{at}: expected {len(derived)} entries, found {len(packed)}"
        for index, (left, right) in enumerate(zip(packed, derived, strict=False)):
            yield from agree(left, right, f"{at}[{index}]", scale)
    elif packed != derived and not _close(packed, derived, at.rpartition(".")[2], scale):
        yield f"{at}: expected {derived} from the records, found {packed}"


def _magnitude(derived: dict[str, Any]) -> float:
    """Return the largest magnitude of an estimate's interval; 0 for anything else."""
    ends = [derived.get("low"), derived.get("high")]
    return max((abs(float(end)) for end in ends if isinstance(end, str)), default=0.0)


def _close(packed: Any, derived: Any, key: str, scale: float) -> bool:
    if not isinstance(packed, str) or not isinstance(derived, str):
        return False
    if key == "reason":
        left, right = packed.split(" "), derived.split(" ")
        if right[0] == "interval":
            scale = _magnitude({"low": right[1], "high": right[3]})
        return len(left) == len(right) and all(
            one == other or _close(one, other, "mean", scale) for one, other in zip(left, right, strict=True)
        )
    try:
        before, after = float(packed), float(derived)
    except ValueError:
        return False
    spelled = (text(before), text(after)) == (packed, derived)
    absolute = max(scale * RELATIVE_TOLERANCE if key in ENDS else 0.0, 1e-300)
    return key in NUMBERS and spelled and math.isclose(before, after, rel_tol=RELATIVE_TOLERANCE, abs_tol=absolute)


def _judge(gate: Gate, row: Row) -> bool | None:
    """Whether a row passes a gate; None where it has no value to judge."""
    value = row.values.get(gate.observation)
    if row.status != "ok" or value is None:
        return None
    return passes(gate, number(value))


def _gate_result(gate: Gate, rows: Iterable[Row]) -> GateResult:
    passed, failed, missing = 0, [], 0
    for row in rows:
        if row.cell.excluded is not None:
            continue
        judged = _judge(gate, row)
        if judged is None:
            missing += 1
        elif judged:
            passed += 1
        else:
            failed.append(row.cell.cell)
    named = tuple(failed[:CELLS_NAMED_MAX])
    return GateResult(gate=gate.name, passed=passed, failed=len(failed), missing=missing, failed_cells=named)


def _excluded_cells(gates: Iterable[Gate], rows: Iterable[Row]) -> set[str]:
    excluding = [gate for gate in gates if gate.on_failure == "exclude"]
    return {row.cell.cell for row in rows for gate in excluding if _judge(gate, row) is False}


def _by_workload(protocol: Protocol, rows: Iterable[Row]) -> dict[str, list[Row]]:
    grouped: dict[str, list[Row]] = {workload.name: [] for workload in crossed(protocol)}
    for row in rows:
        grouped[row.cell.workload].append(row)
    return grouped


def _level(protocol: Protocol, estimate: Estimate) -> float:
    confidence = float(estimate.confidence)
    if protocol.analysis.multiplicity == "none":
        return confidence
    comparisons = sum(len(selected(protocol, item)) for item in protocol.hypotheses if item.estimate)
    return 1 - (1 - confidence) / max(comparisons, 1)


def _estimate_result(
    protocol: Protocol, estimate: Estimate, workload: str, rows: Iterable[Row], dropped: set[str]
) -> EstimateResult:
    level = _level(protocol, estimate)
    ordered = sorted(rows, key=lambda row: (protocol.design.seeds.index(row.cell.seed), row.cell.start))
    starts = [
        _start(estimate, seed, start, list(group), dropped)
        for (seed, start), group in groupby(ordered, key=lambda row: (row.cell.seed, row.cell.start))
    ]
    values = [float(item.value) for item in starts if item.value is not None]
    missing = len(starts) - len(values)
    withheld = None
    if missing and protocol.analysis.missing == "withhold":
        withheld = f"{missing} of {len(starts)} starts have no value"
    elif len(values) < max(protocol.analysis.starts_min, 2):
        withheld = f"{len(values)} starts have a value, {max(protocol.analysis.starts_min, 2)} are needed"
    found = interval(values, level) if withheld is None else None
    if withheld is None and found is None:
        withheld = "an end of the interval is beyond the largest double"
    return EstimateResult(
        estimate=estimate.name,
        workload=workload,
        level=text(level),
        starts=tuple(starts),
        mean=text(found.mean) if found else None,
        low=text(found.low) if found else None,
        high=text(found.high) if found else None,
        withheld=withheld,
    )


def _start(estimate: Estimate, seed: int, start: int, rows: list[Row], dropped: set[str]) -> StartValue:
    """Reduce one start to its number; a planned cell without a usable value leaves the start without one."""
    sides: dict[str, list[float]] = {estimate.numerator: []}
    if estimate.denominator is not None:
        sides[estimate.denominator] = []
    for row in rows:
        if row.cell.arm not in sides or row.cell.excluded is not None:
            continue
        value = row.values.get(estimate.observation)
        if row.status != "ok" or value is None or row.cell.cell in dropped:
            why = "excluded by a gate" if row.cell.cell in dropped else (row.reason or "no value")
            return StartValue(seed=seed, start=start, value=None, reason=f"{row.cell.cell}: {why}")
        sides[row.cell.arm].append(float(number(value)))
    found = start_value(estimate.rule, sides[estimate.numerator], sides.get(estimate.denominator or "", []))
    reason = None if found is not None else "values for which the rule is not defined"
    return StartValue(seed=seed, start=start, value=None if found is None else text(found), reason=reason)


def _hypothesis_result(
    protocol: Protocol, hypothesis: Hypothesis, estimates: Iterable[EstimateResult], groups: Mapping[str, list[Row]]
) -> HypothesisResult:
    components = []
    for workload in selected(protocol, hypothesis):
        if hypothesis.rule == "gates_pass":
            results = [_gate_result(gate, groups[workload]) for gate in protocol.gates if gate.name in hypothesis.gates]
            passed = sum(item.passed for item in results)
            failed, missing = sum(item.failed for item in results), sum(item.missing for item in results)
            decision: Decision = decide_gates(passed, failed, missing)
            reason = f"{failed} failed, {missing} missing, {passed} passed"
        else:
            result = next(r for r in estimates if (r.estimate, r.workload) == (hypothesis.estimate, workload))
            if result.low is None or result.high is None:
                decision, reason = "inconclusive", f"withheld: {result.withheld}"
            else:
                decision = decide_interval(hypothesis, float(result.low), float(result.high))
                reason = f"interval {result.low} to {result.high}"
        components.append(Component(workload=workload, decision=decision, reason=reason))
    return HypothesisResult(
        hypothesis=hypothesis.name,
        claim=hypothesis.claim,
        decision=combine(component.decision for component in components),
        components=tuple(components),
    )


def _summaries(protocol: Protocol, groups: Mapping[str, list[Row]]) -> Iterator[Summary]:
    """Summarise every numeric column; where a value is a NaN, so are minimum and maximum."""
    for workload, group in groups.items():
        for arm in protocol.arms:
            for column in protocol.observations:
                if column.type == "text":
                    continue
                found = [row.values[column.name] for row in group if row.cell.arm == arm.name and row.status == "ok"]
                values = [float(number(value)) for value in found if value is not None]
                if not values:
                    continue
                middle = mean(values) if all(map(math.isfinite, values)) else math.nan
                ends = (math.nan, math.nan) if any(map(math.isnan, values)) else (min(values), max(values))
                yield Summary(
                    workload=workload, arm=arm.name, observation=column.name, count=len(values),
                    mean=text(middle), minimum=text(ends[0]), maximum=text(ends[1]),
                )  # fmt: skip


def _reasons(rows: Iterable[Row]) -> dict[str, int]:
    result: dict[str, int] = {}
    for row in rows:
        if row.status != "ok":
            key = f"{row.status}: {row.reason}"
            result[key] = result.get(key, 0) + 1
    return result


def _charges(protocol: Protocol, account: Account) -> Iterator[ChargeResult]:
    for unit in ("cpu", "gpu"):
        for pilot in (False, True):
            own = [a for a in account.attempts.values() if a.reserved and a.reserved.unit == unit and a.pilot == pilot]
            if not own:
                continue
            outcomes: dict[str, int] = {}
            for attempt in own:
                name = attempt.end.outcome if attempt.end else "refused" if attempt.refused else "open"
                outcomes[name] = outcomes.get(name, 0) + 1
            budget = protocol.budget.pilot_device_seconds if pilot else protocol.budget.device_seconds
            yield ChargeResult(
                unit=unit, pilot=pilot, budget_ms=milliseconds(budget),
                debited_ms=account.held_ms(unit, pilot=pilot), attempts=outcomes,
            )  # fmt: skip

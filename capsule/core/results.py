"""Results: every table, estimate and decision, derived from final rows and the ledger by the frozen rules alone.

The same function writes the packed results, checks them and replays them, so the three cannot differ in what they mean.
Numbers are decimal strings with the shortest digits that give the same double back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from sys import intern
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from capsule.core.account import Account
from capsule.core.canonical import canonical, canonical_checked
from capsule.core.decision import Decision, combine, decide_gates, decide_interval
from capsule.core.digest import Digest
from capsule.core.estimate import interval, mean
from capsule.core.manifest import Manifest
from capsule.core.plan import selected
from capsule.core.progress import Row
from capsule.core.protocol import Estimate, Gate, Hypothesis, Protocol, milliseconds
from capsule.core.schema import STRICT, Model, Natural
from capsule.core.tally import GateCount, StartValue, Tally, judge, text

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


@dataclass(frozen=True, slots=True)
class EstimateResult:
    """An estimate on one workload: the starts, the mean and the interval, or why it was withheld."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    estimate: str
    workload: str
    level: str
    starts: tuple[StartValue, ...]
    mean: str | None
    low: str | None
    high: str | None
    withheld: str | None


@dataclass(frozen=True, slots=True)
class Component:
    """A hypothesis decided on one workload."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

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


def derive(manifest: Manifest, rows: Iterable[Row], account: Account) -> Results:
    """Derive all results of a manifest from the final rows of its cells, in the order of the plan, and its ledger."""
    protocol = manifest.protocol
    tally = Tally(protocol)
    tally.add_up(rows)
    estimates = {
        estimate.name: _estimate_results(protocol, estimate, tally, starts)
        for estimate, starts in zip(protocol.estimates, tally.starts, strict=True)
    }
    places = {name: place for place, name in enumerate(tally.workloads)}
    hypotheses = [
        _hypothesis_result(protocol, hypothesis, estimates, tally, places) for hypothesis in protocol.hypotheses
    ]
    return Results(
        schema_="capsule.results/1",
        manifest=manifest.identity,
        cells=tally.statuses,
        reasons=tally.reasons,
        summaries=tuple(_summaries(protocol, tally)),
        gates=tuple(_gate_result(name, count) for name, count in tally.gates.items()),
        estimates=tuple(result for results in estimates.values() for result in results),
        hypotheses=tuple(hypotheses),
        charges=tuple(_charges(protocol, account)),
        outcome=combine(result.decision for result in hypotheses),
    )


def failing_stop_gate(manifest: Manifest, rows: Iterable[Row]) -> tuple[Gate, Row] | None:
    """Return the first row that fails a gate whose failure stops the experiment."""
    stops = [gate for gate in manifest.protocol.gates if gate.on_failure == "stop"]
    return next(((gate, row) for row in rows for gate in stops if judge(gate, row) is False), None)


def agree(packed: Any, derived: Any, at: str = "results", scale: float = 0.0) -> Iterator[str]:
    """Yield every place where two results differ; numbers may differ by 1e-12, which libraries of mathematics do.

    Only computed numbers may, written as `text` writes them: names, counts and digests are equal or differ. An end of
    an interval may be a small difference of large numbers, so within an estimate `scale` is the largest of these.
    """
    packed, derived = _opened(packed), _opened(derived)
    if isinstance(packed, dict) and isinstance(derived, dict):
        scale = max(scale, _magnitude(derived))
        for key in sorted(packed.keys() | derived.keys()):
            if key not in packed or key not in derived:
                yield f"{at}.{key}: expected {'no such key' if key in packed else 'this key'}"
            else:
                yield from agree(packed[key], derived[key], f"{at}.{key}", scale)
    elif isinstance(packed, list | tuple) and isinstance(derived, list | tuple):
        if len(packed) != len(derived):
            yield f"{at}: expected {len(derived)} entries, found {len(packed)}"
        for index, (left, right) in enumerate(zip(packed, derived, strict=False)):
            yield from agree(left, right, f"{at}[{index}]", scale)
    elif packed != derived and not _close(packed, derived, at.rpartition(".")[2], scale):
        yield f"{at}: expected {derived} from the records, found {packed}"


def _opened(value: Any) -> Any:
    """Return the fields of a model by their names in the format, and anything else as it is."""
    if isinstance(value, Model):
        return {field.alias or name: getattr(value, name) for name, field in type(value).model_fields.items()}
    if isinstance(value, EstimateResult | StartValue | Component):
        return {name: getattr(value, name) for name in value.__slots__}
    return value


def result_pieces(value: Any) -> Iterator[bytes]:
    """Yield the canonical bytes of results, or of a part of them, without making one tree of them all."""
    opened = _opened(value)
    if isinstance(value, tuple):
        opening = b"["
        for item in value:
            yield opening
            yield from result_pieces(item)
            opening = b","
        yield b"]" if value else b"[]"
    elif opened is not value and any(isinstance(item, tuple) for item in opened.values()):
        opening = b"{"
        for key in sorted(opened):
            yield opening + canonical(key) + b":"
            yield from result_pieces(opened[key])
            opening = b","
        yield b"}"
    else:
        yield canonical_checked(opened)


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


def _gate_result(name: str, count: GateCount) -> GateResult:
    return GateResult(
        gate=name, passed=count.passed, failed=count.failed, missing=count.missing, failed_cells=tuple(count.named)
    )


def _level(protocol: Protocol, estimate: Estimate, comparisons: int) -> float:
    confidence = float(estimate.confidence)
    if protocol.analysis.multiplicity == "none":
        return confidence
    return 1 - (1 - confidence) / max(comparisons, 1)


def _estimate_results(
    protocol: Protocol, estimate: Estimate, tally: Tally, starts: Sequence[Sequence[StartValue]]
) -> list[EstimateResult]:
    """Return an estimate's results on all workloads, whose starts `starts` holds."""
    comparisons = sum(len(selected(protocol, item)) for item in protocol.hypotheses if item.estimate)
    level = _level(protocol, estimate, comparisons)
    words = text(level)
    return [
        _estimate_result(protocol, estimate, workload, level, words, tuple(own))
        for workload, own in zip(tally.workloads, starts, strict=True)
    ]


def _estimate_result(
    protocol: Protocol, estimate: Estimate, workload: str, level: float, words: str, starts: tuple[StartValue, ...]
) -> EstimateResult:
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
        level=words,
        starts=starts,
        mean=text(found.mean) if found else None,
        low=text(found.low) if found else None,
        high=text(found.high) if found else None,
        withheld=withheld and intern(withheld),
    )


def _hypothesis_result(
    protocol: Protocol,
    hypothesis: Hypothesis,
    estimates: Mapping[str, Sequence[EstimateResult]],
    tally: Tally,
    places: Mapping[str, int],
) -> HypothesisResult:
    components = []
    counted = [tally.gates_on[name] for name in dict.fromkeys(hypothesis.gates)]
    for workload in selected(protocol, hypothesis):
        place = places[workload]
        if hypothesis.rule == "gates_pass":
            passed, failed, missing = (sum(counts[3 * place + which] for counts in counted) for which in range(3))
            decision: Decision = decide_gates(passed, failed, missing)
            reason = f"{failed} failed, {missing} missing, {passed} passed"
        else:
            result = estimates[hypothesis.estimate or ""][place]
            if result.low is None or result.high is None:
                decision, reason = "inconclusive", f"withheld: {result.withheld}"
            else:
                decision = decide_interval(hypothesis, float(result.low), float(result.high))
                reason = f"interval {result.low} to {result.high}"
        components.append(Component(workload=workload, decision=decision, reason=intern(reason)))
    return HypothesisResult(
        hypothesis=hypothesis.name,
        claim=hypothesis.claim,
        decision=combine(component.decision for component in components),
        components=tuple(components),
    )


def _summaries(protocol: Protocol, tally: Tally) -> Iterator[Summary]:
    """Summarise every numeric column; where a value is a NaN, so are minimum and maximum."""
    arms = {arm.name: number for number, arm in enumerate(protocol.arms)}
    columns = {column.name: number for number, column in enumerate(protocol.observations)}
    for place, arm, column in sorted(tally.values, key=lambda key: (key[0], arms[key[1]], columns[key[2]])):
        values = tally.values[place, arm, column]
        middle = mean(values) if all(map(math.isfinite, values)) else math.nan
        ends = (math.nan, math.nan) if any(map(math.isnan, values)) else (min(values), max(values))
        yield Summary(
            workload=tally.workloads[place], arm=arm, observation=column, count=len(values),
            mean=text(middle), minimum=text(ends[0]), maximum=text(ends[1]),
        )  # fmt: skip


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

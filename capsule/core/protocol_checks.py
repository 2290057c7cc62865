"""What a protocol may not mean: no planned cell, a gate that can never pass or never fail, names that point nowhere."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Set
from datetime import datetime
from decimal import Decimal
from fractions import Fraction

from capsule.core.canonical import INTEGER_LIMIT
from capsule.core.protocol import Budget, Estimate, Gate, Hypothesis, Observation, Protocol, milliseconds, reserved_ms

_TIME = re.compile(r"[0-9]{4}(-[0-9]{2}){2}T[0-9]{2}(:[0-9]{2}){2}(\.[0-9]{1,6})?(Z|[+-][0-9]{2}:[0-9]{2})")

Complaint = tuple[tuple[str | int, ...], str]
"""A place in the protocol (path of keys) and what is wrong there."""

CONFIDENCE_MAX = Decimal("0.9999999")
"""So that no level, also one shared by a million comparisons, rounds to 1, of which there is no interval."""

RESERVED_COLUMNS = frozenset(
    "cell arm workload seed start block position process status reason attempt final pilot manifest error end".split()
)


def check(protocol: Protocol) -> Iterator[Complaint]:
    """Yield every complaint about what the protocol means; a protocol without complaints can be frozen."""
    for group in ("arms", "workloads", "factors", "observations", "gates", "estimates", "hypotheses"):
        yield from _unique(group, (item.name for item in getattr(protocol, group)))
    if len(set(protocol.design.seeds)) < len(protocol.design.seeds):
        yield ("design", "seeds"), "expected distinct seeds, found one twice"
    yield from _check_arms(protocol)
    for index, column in enumerate(protocol.observations):
        yield from _check_observation(column, ("observations", index))
    arms, columns = {arm.name for arm in protocol.arms}, {column.name: column for column in protocol.observations}
    for index, gate in enumerate(protocol.gates):
        yield from _check_gate(columns, gate, ("gates", index))
    for index, estimate in enumerate(protocol.estimates):
        yield from _check_estimate(protocol, arms, columns, estimate, ("estimates", index))
    estimates, gates = {item.name for item in protocol.estimates}, {gate.name for gate in protocol.gates}
    for index, hypothesis in enumerate(protocol.hypotheses):
        yield from _check_hypothesis(estimates, gates, hypothesis, ("hypotheses", index))
    starts = len(protocol.design.seeds) * protocol.design.starts
    if protocol.estimates and 2 <= starts < protocol.analysis.starts_min:
        words = f"expected at most the {starts} planned starts, found {protocol.analysis.starts_min}"
        yield ("analysis", "starts_min"), words
    yield from _check_budget(protocol.budget)


def _unique(group: str, names: Iterable[str]) -> Iterator[Complaint]:
    seen: set[str] = set()
    for index, name in enumerate(names):
        if name in seen:
            yield (group, index, "name"), f"expected a new name, found {name!r} a second time"
        seen.add(name)


def _check_arms(protocol: Protocol) -> Iterator[Complaint]:
    revisions = {arm.revision for arm in protocol.arms}
    for index, arm in enumerate(protocol.arms):
        if (arm.trial is None) == (arm.command is None):
            yield ("arms", index), "expected exactly one of `trial` and `command`"
        if arm.command is not None and protocol.design.isolation != "cell":
            yield ("arms", index, "command"), 'a command runs one cell: expected isolation = "cell" in [design]'
    if len(revisions) > 1 and protocol.design.isolation != "cell":
        yield ("design", "isolation"), 'arms with different revisions cannot share a process: expected "cell"'


def _check_observation(column: Observation, at: tuple[str | int, ...]) -> Iterator[Complaint]:
    if column.name in RESERVED_COLUMNS:
        yield (*at, "name"), f"expected a name of your own, found {column.name!r}, which every row has already"
    low, high = column.minimum, column.maximum
    if low is not None and high is not None and Decimal(low) > Decimal(high):
        yield (*at, "maximum"), f"expected a maximum of at least the minimum {low}, found {high}"
    elif column.type != "text" and support(column)[0] > support(column)[1]:
        yield (*at, "maximum"), f"expected a range that holds a value of type {column.type}, found {low} to {high}"
    if column.type == "text" and (low is not None or high is not None):
        yield (*at, "minimum"), "a text observation has no minimum or maximum"
    replay = column.replay
    if (replay.rule in ("absolute", "relative")) != (replay.tolerance is not None):
        yield (*at, "replay", "tolerance"), "expected a tolerance exactly for the rules `absolute` and `relative`"
    if (replay.rule == "never") != (replay.reason is not None):
        yield (*at, "replay", "reason"), "expected a reason exactly for the rule `never`"
    if column.type in ("text", "bool") and replay.rule in ("absolute", "relative"):
        yield (*at, "replay", "rule"), f"a {column.type} observation can only be compared exactly"


def _check_gate(columns: Mapping[str, Observation], gate: Gate, at: tuple[str | int, ...]) -> Iterator[Complaint]:
    if gate.observation not in columns:
        yield (*at, "observation"), f"expected a declared observation, found {gate.observation!r}"
        return
    column = columns[gate.observation]
    if column.type == "text":
        yield (*at, "observation"), "a gate needs a number, found a text observation"
    elif (gate.rule == "finite") != (gate.limit is None):
        yield (*at, "limit"), "expected a limit for every rule but `finite`"
    else:
        can_pass, can_fail = feasible(gate, column)
        if not can_pass:
            yield (*at, "limit"), f"this gate can never pass over the declared values of its {column.type} observation"
        if not can_fail:
            yield (*at, "limit"), f"this gate can never fail over the declared values of its {column.type} observation"


def holds(kind: str, value: Decimal) -> bool:
    """Whether a column of type `kind` has a value that is exactly `value`; 0.1 is none of a float's values."""
    if not kind.startswith("float"):
        return value == value.to_integral_value()
    layout = {"float64": "<d", "float32": "<f", "float16": "<e"}[kind]
    try:
        return Decimal(struct.unpack(layout, struct.pack(layout, float(value)))[0]) == value
    except (OverflowError, struct.error):
        return False


def feasible(gate: Gate, column: Observation) -> tuple[bool, bool]:
    """Whether some value of the column's declared support passes the gate, and whether some value fails it."""
    low, high = support(column)
    if gate.rule == "finite":
        return True, column.type.startswith("float")
    assert gate.limit is not None
    limit = Decimal(gate.limit)
    below, above = low < limit, high > limit
    inside = low <= limit <= high and holds(column.type, limit)
    match gate.rule:
        case "at_most":
            return below or inside, above
        case "below":
            return below, above or inside
        case "at_least":
            return above or inside, below
        case "above":
            return above, below or inside
        case "equal":
            return inside, below or above
        case "not_equal":
            return below or above, inside


def support(column: Observation) -> tuple[Decimal, Decimal]:
    """Return the declared range of a numeric column within that of its type; integers and booleans (0, 1) are whole."""
    bounds = {"bool": (0, 1), "int64": (-(2**63), 2**63 - 1), "uint64": (0, 2**64 - 1)}
    if column.type not in bounds:
        return Decimal(column.minimum or "-Infinity"), Decimal(column.maximum or "Infinity")
    low, high = bounds[column.type]
    if column.minimum is not None:
        low = max(low, math.ceil(Fraction(column.minimum)))
    if column.maximum is not None:
        high = min(high, math.floor(Fraction(column.maximum)))
    return Decimal(low), Decimal(high)


def _check_estimate(
    protocol: Protocol,
    arms: Set[str],
    columns: Mapping[str, Observation],
    estimate: Estimate,
    at: tuple[str | int, ...],
) -> Iterator[Complaint]:
    column = columns.get(estimate.observation)
    if column is None:
        yield (*at, "observation"), f"expected a declared observation, found {estimate.observation!r}"
    elif column.type == "text":
        yield (*at, "observation"), "an estimate needs a number, found a text observation"
    if estimate.numerator not in arms:
        yield (*at, "numerator"), f"expected an arm, found {estimate.numerator!r}"
    if (estimate.rule == "mean") != (estimate.denominator is None):
        yield (*at, "denominator"), "expected a second arm for every rule but `mean`"
    elif estimate.denominator is not None and estimate.denominator not in arms:
        yield (*at, "denominator"), f"expected an arm, found {estimate.denominator!r}"
    elif estimate.denominator == estimate.numerator:
        yield (*at, "denominator"), "an arm compared with itself is always equal; name two arms"
    if not Decimal("0.5") <= Decimal(estimate.confidence) <= CONFIDENCE_MAX:
        yield (*at, "confidence"), f"expected a level from 0.5 to {CONFIDENCE_MAX}, found {estimate.confidence}"
    if len(protocol.design.seeds) * protocol.design.starts < 2:
        yield ("design", "starts"), "an interval needs two process starts: give more seeds or starts"


def _check_hypothesis(
    estimates: Set[str], gates: Set[str], hypothesis: Hypothesis, at: tuple[str | int, ...]
) -> Iterator[Complaint]:
    rule = hypothesis.rule
    needed = {
        "interval_above": {"estimate", "threshold"},
        "interval_below": {"estimate", "threshold"},
        "interval_within": {"estimate", "low", "high"},
        "gates_pass": {"gates"},
    }[rule]
    for key in ("estimate", "threshold", "low", "high", "gates"):
        given = getattr(hypothesis, key) not in (None, ())
        if given != (key in needed):
            yield (*at, key), f"the rule {rule} {'needs' if key in needed else 'does not take'} `{key}`"
    if hypothesis.estimate and hypothesis.estimate not in estimates:
        yield (*at, "estimate"), f"expected a declared estimate, found {hypothesis.estimate!r}"
    for name in hypothesis.gates:
        if name not in gates:
            yield (*at, "gates"), f"expected a declared gate, found {name!r}"
    if hypothesis.low and hypothesis.high and Decimal(hypothesis.low) >= Decimal(hypothesis.high):
        yield (*at, "high"), f"expected a value above {hypothesis.low}, found {hypothesis.high}"


def _check_budget(budget: Budget) -> Iterator[Complaint]:
    for key in ("device_seconds", "pilot_device_seconds", "wall_limit_seconds", "kill_grace_seconds",
                "release_grace_seconds"):  # fmt: skip
        if milliseconds(getattr(budget, key)) * budget.devices >= INTEGER_LIMIT:
            yield ("budget", key), f"expected fewer than 2^53 milliseconds, found {getattr(budget, key)} seconds"
            return
    if budget.not_after is not None and not _is_time(budget.not_after):
        words = f"expected a time with its offset from UTC, as 2030-01-31T12:00:00Z, found {budget.not_after!r}"
        yield ("budget", "not_after"), words
    worst = reserved_ms(budget)
    if worst > milliseconds(budget.device_seconds):
        yield (
            ("budget", "device_seconds"),
            f"expected at least one attempt's worst case ({worst / 1000:g} device-seconds: devices x (wall limit + "
            f"kill grace + release grace)), found {budget.device_seconds}",
        )


def _is_time(text: str) -> bool:
    """Whether a text is a time of RFC 3339 with its offset."""
    if _TIME.fullmatch(text) is None:
        return False
    try:
        return datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False

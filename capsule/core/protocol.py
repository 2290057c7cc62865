"""The protocol: what is asked, of which arms, on what budget, decided by which named rules.

The models say what a protocol may contain; `check` says what it may not mean (no planned cell, a gate that can never
pass or never fail, names that point nowhere). There are no expressions and no code strings: every rule is one of a
closed set. Reading the TOML file is `capsule.core.toml`; enumerating the cells is `capsule.core.plan`.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Iterator
from datetime import datetime
from decimal import Decimal
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from capsule.core.canonical import INTEGER_LIMIT
from capsule.core.schema import (
    Count,
    DecimalText,
    Identifier,
    Model,
    Name,
    Natural,
    NonNegativeDecimal,
    Parameters,
    PositiveDecimal,
    Scalar,
    Text,
)
from capsule.core.version import pattern

ObservationType = Literal["float64", "float32", "float16", "int64", "uint64", "bool", "text"]
FailureClass = Literal[
    "bad_records", "config_changed", "contaminated", "device_lost", "device_mismatch", "device_suspect", "exec_failed",
    "exit_nonzero", "fork_storm", "incomplete", "leaked_descendants", "oom_cgroup", "oom_host", "provenance",
    "sigkill_unattributed", "signalled", "source_changed", "trial_error", "unverifiable", "wall_limit",
]  # fmt: skip


class Arm(Model):
    """One thing that is compared: a Python trial or a command, with its own parameters and source revision."""

    name: Name
    trial: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    command: Annotated[tuple[Text, ...], Field(min_length=1)] | None = None
    parameters: Parameters = {}
    revision: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}([0-9a-f]{24})?$")] | None = None


class Workload(Model):
    """One setting on which all arms are measured."""

    name: Name
    parameters: Parameters = {}


class Factor(Model):
    """A parameter crossed with every workload: one planned workload for each of its levels."""

    name: Name
    levels: Annotated[tuple[Scalar, ...], Field(min_length=1)]


class Design(Model):
    """Seeds, process starts, blocks and order; the start is the unit of inference."""

    seeds: Annotated[tuple[Natural, ...], Field(min_length=1)]
    starts: Count = 1
    blocks: Count = 1
    order: Literal["abba", "shuffled", "listed"]
    order_seed: Natural
    isolation: Literal["start", "workload", "cell"]


class ReplayRule(Model):
    """How a recomputed observation is compared; `never` says why it cannot be recomputed."""

    rule: Literal["exact", "absolute", "relative", "never"]
    tolerance: NonNegativeDecimal | None = None
    reason: Text | None = None


class Observation(Model):
    """One column of the records: its type, unit, the values it can take, and how a replay judges it."""

    name: Identifier
    type: ObservationType
    unit: Text | None = None
    description: Text | None = None
    minimum: DecimalText | None = None
    maximum: DecimalText | None = None
    optional: bool = False
    replay: ReplayRule


class Gate(Model):
    """A limit that every observed value must meet, and what failing it does."""

    name: Name
    observation: Identifier
    rule: Literal["at_most", "at_least", "above", "below", "equal", "not_equal", "finite"]
    limit: DecimalText | None = None
    on_failure: Literal["record", "exclude", "stop"]


class Estimate(Model):
    """A named estimator over process starts, with a Student-t interval, computed for each workload."""

    name: Name
    rule: Literal["mean", "difference", "log_ratio"]
    observation: Identifier
    numerator: Name
    denominator: Name | None = None
    confidence: PositiveDecimal


class Hypothesis(Model):
    """A claim and the named rule that decides it."""

    name: Name
    claim: Text
    rule: Literal["interval_above", "interval_below", "interval_within", "gates_pass"]
    estimate: Name | None = None
    threshold: DecimalText | None = None
    low: DecimalText | None = None
    high: DecimalText | None = None
    gates: tuple[Name, ...] = ()
    workloads: tuple[Text, ...] = ()


class Exclusion(Model):
    """Planned cells that are not run, and why; they stay in every table."""

    arm: Name | None = None
    workload: Text | None = None
    reason: Text


class Analysis(Model):
    """What missing cells do to an estimate, and how several hypotheses share the level."""

    missing: Literal["withhold", "drop_start"]
    starts_min: Count = 2
    multiplicity: Literal["none", "bonferroni"]


class Budget(Model):
    """Device time that all attempts of the whole manifest chain may cost, and the limits of one attempt.

    `device_seconds` is per unit (cpu or gpu) when `device` is `any`. Pilot runs have their own allowance.
    """

    device: Annotated[str, StringConstraints(min_length=1, max_length=100)]
    devices: Count = 1
    device_seconds: PositiveDecimal
    pilot_device_seconds: NonNegativeDecimal = "0"
    wall_limit_seconds: PositiveDecimal
    kill_grace_seconds: NonNegativeDecimal
    release_grace_seconds: NonNegativeDecimal
    attempts_max: Count = 1_000_000
    output_bytes_max: Annotated[int, Field(ge=1, le=2**40)] = 16 * 2**20
    processes_max: Annotated[int, Field(ge=1, le=10**6)] = 4096
    not_after: str | None = None
    exclusivity: Literal["required", "best_effort"]
    on_contamination: Literal["finish", "stop"] = "finish"


class Environment(Model):
    """What the machine must offer; what was found belongs to each attempt."""

    python: Text
    packages: dict[Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]+$")], str] = {}
    lock: Text | None = None
    driver: Text | None = None


class Sources(Model):
    """The scope of the frozen sources, as shell-style patterns over paths; empty lists mean everything not ignored."""

    include: tuple[Text, ...] = ()
    exclude: tuple[Text, ...] = ()
    secrets_allowed: tuple[Text, ...] = ()


class Protocol(Model):
    """A whole protocol, normalised; see `docs/spec/protocol.md`."""

    schema_: Annotated[str, Field(alias="schema", pattern=pattern("capsule.protocol"))]
    name: Name
    title: Text
    question: Text
    arms: Annotated[tuple[Arm, ...], Field(min_length=1)]
    workloads: Annotated[tuple[Workload, ...], Field(min_length=1)]
    factors: tuple[Factor, ...] = ()
    design: Design
    observations: Annotated[tuple[Observation, ...], Field(min_length=1)]
    gates: tuple[Gate, ...] = ()
    estimates: tuple[Estimate, ...] = ()
    hypotheses: Annotated[tuple[Hypothesis, ...], Field(min_length=1)]
    exclusions: tuple[Exclusion, ...] = ()
    analysis: Analysis
    budget: Budget
    retry: dict[FailureClass, Annotated[int, Field(ge=0, le=100)]] = {}
    environment: Environment
    sources: Sources = Sources()
    replay_sample: Count = 1

    def arm(self, name: str) -> Arm:
        """Return the arm of that name; the caller has checked that it exists."""
        return next(arm for arm in self.arms if arm.name == name)

    def observation(self, name: str) -> Observation:
        """Return the observation of that name; the caller has checked that it exists."""
        return next(column for column in self.observations if column.name == name)


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
    for index, gate in enumerate(protocol.gates):
        yield from _check_gate(protocol, gate, ("gates", index))
    for index, estimate in enumerate(protocol.estimates):
        yield from _check_estimate(protocol, estimate, ("estimates", index))
    for index, hypothesis in enumerate(protocol.hypotheses):
        yield from _check_hypothesis(protocol, hypothesis, ("hypotheses", index))
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


def _check_gate(protocol: Protocol, gate: Gate, at: tuple[str | int, ...]) -> Iterator[Complaint]:
    if gate.observation not in {column.name for column in protocol.observations}:
        yield (*at, "observation"), f"expected a declared observation, found {gate.observation!r}"
        return
    column = protocol.observation(gate.observation)
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


def _check_estimate(protocol: Protocol, estimate: Estimate, at: tuple[str | int, ...]) -> Iterator[Complaint]:
    arms = {arm.name for arm in protocol.arms}
    columns = {column.name: column for column in protocol.observations}
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


def _check_hypothesis(protocol: Protocol, hypothesis: Hypothesis, at: tuple[str | int, ...]) -> Iterator[Complaint]:
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
    if hypothesis.estimate and hypothesis.estimate not in {item.name for item in protocol.estimates}:
        yield (*at, "estimate"), f"expected a declared estimate, found {hypothesis.estimate!r}"
    for name in hypothesis.gates:
        if name not in {gate.name for gate in protocol.gates}:
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


def milliseconds(seconds: str) -> int:
    """Return a decimal number of seconds in whole milliseconds, rounded up."""
    return math.ceil(Fraction(seconds) * 1000)


def reserved_ms(budget: Budget) -> int:
    """Return the worst case of one attempt in device-milliseconds: what is reserved before anything starts."""
    limits = (budget.wall_limit_seconds, budget.kill_grace_seconds, budget.release_grace_seconds)
    return budget.devices * sum(milliseconds(limit) for limit in limits)

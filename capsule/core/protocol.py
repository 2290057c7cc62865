"""The protocol: what is asked, of which arms, on what budget, decided by which named rules.

The models say what a protocol may contain; what it may not mean is `capsule.core.protocol_checks`. There are no
expressions and no code strings: every rule is one of a closed set. Reading the TOML file is `capsule.core.toml`;
enumerating the cells is `capsule.core.plan`.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

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

    schema_: Annotated[Literal["capsule.protocol/1"], Field(alias="schema")]
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


def milliseconds(seconds: str) -> int:
    """Return a decimal number of seconds in whole milliseconds, rounded up."""
    return math.ceil(Fraction(seconds) * 1000)


def reserved_ms(budget: Budget) -> int:
    """Return the worst case of one attempt in device-milliseconds: what is reserved before anything starts."""
    limits = (budget.wall_limit_seconds, budget.kill_grace_seconds, budget.release_grace_seconds)
    return budget.devices * sum(milliseconds(limit) for limit in limits)

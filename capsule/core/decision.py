"""The named rules: whether a value passes a gate, and what an interval says about a hypothesis."""

from __future__ import annotations

import math
from collections.abc import Iterable
from decimal import Decimal
from typing import Literal

from capsule.core.protocol import Gate, Hypothesis

Decision = Literal["supported", "refuted", "inconclusive"]


def passes(gate: Gate, value: float | int) -> bool:
    """Whether an observed number passes a gate; a NaN passes none. Comparison is exact, without rounding."""
    if isinstance(value, float) and math.isnan(value):
        return False
    if gate.rule == "finite":
        return not math.isinf(value)
    assert gate.limit is not None
    found, limit = Decimal(value), Decimal(gate.limit)
    match gate.rule:
        case "at_most":
            return found <= limit
        case "at_least":
            return found >= limit
        case "above":
            return found > limit
        case "below":
            return found < limit
        case "equal":
            return found == limit
        case "not_equal":
            return found != limit


def decide_interval(hypothesis: Hypothesis, low: float, high: float) -> Decision:
    """Decide an interval hypothesis: supported or refuted only when the whole interval says so."""
    if hypothesis.rule == "interval_within":
        assert hypothesis.low is not None
        assert hypothesis.high is not None
        floor, ceiling = Decimal(hypothesis.low), Decimal(hypothesis.high)
        if floor < Decimal(low) and Decimal(high) < ceiling:
            return "supported"
        return "refuted" if Decimal(high) < floor or Decimal(low) > ceiling else "inconclusive"
    assert hypothesis.threshold is not None
    threshold = Decimal(hypothesis.threshold)
    above, below = Decimal(low) > threshold, Decimal(high) < threshold
    if hypothesis.rule == "interval_below":
        above, below = below, above
    return "supported" if above else "refuted" if below else "inconclusive"


def decide_gates(passed: int, failed: int, missing: int) -> Decision:
    """Decide a gate hypothesis: one failure refutes it; a missing value, or none at all, leaves it open."""
    return "refuted" if failed else "inconclusive" if missing or not passed else "supported"


def combine(decisions: Iterable[Decision]) -> Decision:
    """All supported supports, one refuted refutes, everything else is inconclusive."""
    given = list(decisions)
    if any(decision == "refuted" for decision in given):
        return "refuted"
    return "supported" if given and all(decision == "supported" for decision in given) else "inconclusive"

"""The named rules that decide."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule.core.decision import Decision, combine, decide_gates, decide_interval
from capsule.core.protocol import Hypothesis


def hypothesis(rule: str, **limits: str) -> Hypothesis:
    """Return an interval hypothesis."""
    return Hypothesis(name="h", claim="c", rule=rule, estimate="e", **limits)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("low", "high", "above", "below", "within"),
    [
        (0.2, 0.3, "supported", "refuted", "supported"),
        (-0.3, -0.2, "refuted", "supported", "refuted"),
        (-0.1, 0.3, "inconclusive", "inconclusive", "inconclusive"),
        (0.0, 0.3, "inconclusive", "inconclusive", "inconclusive"),
        (-0.3, 0.0, "inconclusive", "inconclusive", "inconclusive"),
        (0.0, 0.0, "inconclusive", "inconclusive", "inconclusive"),
        (0.2, 0.5, "supported", "refuted", "inconclusive"),
        (0.6, 0.7, "supported", "refuted", "refuted"),
        (5e-324, 0.4, "supported", "refuted", "supported"),
    ],
)
def test_interval_rules(low: float, high: float, above: str, below: str, within: str) -> None:
    """P-14: a hypothesis is supported or refuted only by the whole interval; its edge decides nothing."""
    assert decide_interval(hypothesis("interval_above", threshold="0"), low, high) == above
    assert decide_interval(hypothesis("interval_below", threshold="0"), low, high) == below
    assert decide_interval(hypothesis("interval_within", low="0", high="0.5"), low, high) == within


finite = st.floats(-10, 10)


@given(finite, finite, finite)
def test_above_and_below_mirror_each_other(one: float, other: float, threshold: float) -> None:
    """P-14: what supports "above" refutes "below", and thresholds are compared without rounding."""
    low, high = min(one, other), max(one, other)
    text = str(Fraction(threshold).limit_denominator(1).numerator)
    above = decide_interval(hypothesis("interval_above", threshold=text), low, high)
    below = decide_interval(hypothesis("interval_below", threshold=text), low, high)
    mirror = {"supported": "refuted", "refuted": "supported", "inconclusive": "inconclusive"}
    assert mirror[above] == below
    assert (above == "supported") == (Fraction(low) > Fraction(text))


def test_thresholds_are_exact() -> None:
    """P-14: a lower end of 0.1 as a double, which is a little more than 0.1, is above the threshold 0.1."""
    assert decide_interval(hypothesis("interval_above", threshold="0.1"), 0.1, 1) == "supported"
    assert decide_interval(hypothesis("interval_above", threshold="0.3"), 0.3, 1) == "inconclusive"


@pytest.mark.parametrize(
    ("passed", "failed", "missing", "expected"),
    [
        (3, 0, 0, "supported"),
        (3, 1, 0, "refuted"),
        (0, 1, 9, "refuted"),
        (3, 0, 1, "inconclusive"),
        (0, 0, 0, "inconclusive"),
    ],
)
def test_gate_rules(passed: int, failed: int, missing: int, expected: str) -> None:
    """P-14: one failure refutes, a missing value leaves it open, and no value at all supports nothing."""
    assert decide_gates(passed, failed, missing) == expected


def test_combining() -> None:
    """P-14: all must be supported; one refuted refutes; nothing at all is inconclusive."""
    choices: tuple[Decision, ...] = ("supported", "refuted", "inconclusive")
    for given_ in itertools.product(choices, repeat=3):
        expected = "refuted" if "refuted" in given_ else "supported" if set(given_) == {"supported"} else "inconclusive"
        assert combine(given_) == expected
    assert combine([]) == "inconclusive"

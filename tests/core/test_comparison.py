"""How a recomputed value compares with the recorded one."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule.core.comparison import compare
from capsule.core.protocol import Observation, ReplayRule
from capsule.core.record import Scalar, encode


def column(rule: str, tolerance: str | None = None, kind: str = "float64") -> Observation:
    """Return a column with a replay rule."""
    reason = "a time is measured" if rule == "never" else None
    replay = ReplayRule(rule=rule, tolerance=tolerance, reason=reason)  # type: ignore[arg-type]
    return Observation(name="x", type=kind, replay=replay)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rule", "tolerance", "recorded", "replayed", "answer"),
    [
        ("exact", None, 1.5, 1.5, "exact"), ("exact", None, 1.5, 1.5000000000000002, "different"),
        ("exact", None, 0, "-0", "different"), ("exact", None, "NaN", "NaN", "exact"),
        ("exact", None, "NaN", "NaN:fff8000000000000", "different"), ("exact", None, None, None, "exact"),
        ("exact", None, None, 1, "different"), ("exact", None, "18446744073709551615", "18446744073709551615", "exact"),
        ("absolute", "0.5", 1, 1.5, "within_tolerance"), ("absolute", "0.5", 1, 1.5000000000000002, "different"),
        ("absolute", "0", 1, 1, "exact"), ("absolute", "0", 0, "-0", "within_tolerance"),
        ("absolute", "1e999", "NaN", 1, "different"), ("absolute", "1e999", "Infinity", "-Infinity", "different"),
        ("absolute", "1e999", "Infinity", "Infinity", "exact"), ("absolute", "1", 1, None, "different"),
        ("relative", "0.1", 10, 11, "within_tolerance"), ("relative", "0.1", -10, -11, "within_tolerance"),
        ("relative", "0.1", 11, 10, "within_tolerance"), ("relative", "0.1", 10, 11.000000000000002, "different"),
        ("relative", "0.5", 0, 5e-324, "different"), ("never", None, 1, 2, "not_verified"),
        ("absolute", "1", -1e-300, 1, "different"),
    ],
)  # fmt: skip
def test_answers(
    rule: str, tolerance: str | None, recorded: Scalar | None, replayed: Scalar | None, answer: str
) -> None:
    """P-18: each rule gives its answer, exactly at the edge and one unit in the last place beyond it."""
    found, words = compare(column(rule, tolerance), recorded, replayed)
    assert found == answer
    assert words or found == "exact"


finite = st.floats(allow_nan=False, allow_infinity=False)


@given(finite, finite, st.decimals(0, 1000, places=3).map(str), st.sampled_from(["absolute", "relative"]))
def test_a_tolerance_is_never_widened(recorded: float, replayed: float, tolerance: str, rule: str) -> None:
    """P-18: the comparison is that of exact rational arithmetic, without rounding."""
    limit = Fraction(tolerance) * (abs(Fraction(recorded)) if rule == "relative" else 1)
    inside = abs(Fraction(replayed) - Fraction(recorded)) <= limit
    found, _ = compare(column(rule, tolerance), encode(recorded, "float64"), encode(replayed, "float64"))
    assert (found in ("exact", "within_tolerance")) == inside


def test_the_words_of_what_is_never_verified_are_the_protocols() -> None:
    """P-18: an observation that cannot be recomputed says why, in the words that were frozen."""
    assert compare(column("never"), 1, 1) == ("not_verified", "a time is measured")

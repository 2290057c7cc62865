"""Estimators: a number per start, and a Student-t interval over starts."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from capsule.core.estimate import interval, logarithm, mean, start_value, t_distribution, t_quantile

TABLE = {
    (0.975, 1): 12.7062047364, (0.975, 2): 4.30265272975, (0.975, 3): 3.18244630528, (0.975, 4): 2.7764451052,
    (0.975, 5): 2.57058183661, (0.975, 9): 2.26215716280, (0.975, 10): 2.22813885196, (0.975, 15): 2.13144954556,
    (0.975, 20): 2.08596344727, (0.975, 30): 2.04227245630, (0.975, 60): 2.00029782201, (0.975, 120): 1.97993040505,
    (0.95, 1): 6.31375151468, (0.95, 2): 2.91998558036, (0.95, 5): 2.01504837267, (0.95, 10): 1.81246112281,
    (0.95, 30): 1.69726088659, (0.99, 1): 31.8205159538, (0.99, 5): 3.36492999891, (0.99, 10): 2.76376945811,
    (0.995, 1): 63.6567411629, (0.995, 2): 9.92484320092, (0.995, 5): 4.03214298356, (0.995, 10): 3.16927266715,
    (0.995, 30): 2.74999565357, (0.9995, 5): 6.86882663, (0.9995, 10): 4.58689385, (0.75, 1): 1.0,
    (0.75, 5): 0.726686843800,
}  # fmt: skip
"""Quantiles as printed in tables of Student's t distribution."""


@pytest.mark.parametrize(("key", "expected"), TABLE.items())
def test_quantiles_are_those_of_the_tables(key: tuple[float, int], expected: float) -> None:
    """P-12: quantiles agree with printed tables to every digit that these give."""
    assert math.isclose(t_quantile(*key), expected, rel_tol=2e-9)


@given(st.floats(1e-9, 1 - 1e-9))
def test_one_degree_is_cauchy_and_two_have_a_closed_form(p: float) -> None:
    """P-12: for one and two degrees of freedom the quantile is the known formula."""
    assume(abs(p - 0.5) > 1e-6)
    assert math.isclose(t_quantile(p, 1), math.tan(math.pi * (p - 0.5)), rel_tol=1e-7)
    assert math.isclose(t_quantile(p, 2), (2 * p - 1) / math.sqrt(2 * p * (1 - p)), rel_tol=1e-7)


@given(st.floats(0.5, 0.9999), st.integers(1, 400))
@settings(max_examples=60)
def test_quantiles_are_symmetric_and_inverse(p: float, degrees: int) -> None:
    """P-12: the distribution is symmetric about zero, and the quantile inverts it."""
    found = t_quantile(p, degrees)
    assert math.isclose(t_distribution(found, degrees), p, rel_tol=1e-12)
    assert math.isclose(-t_quantile(1 - p, degrees), found, rel_tol=1e-6, abs_tol=1e-9)
    assert found >= 0


@pytest.mark.parametrize("p", [0.75, 0.95, 0.975, 0.9999])
def test_quantiles_fall_with_degrees_towards_the_normal(p: float) -> None:
    """P-12: more starts give narrower intervals, down to those of the normal distribution."""
    from statistics import NormalDist

    found = [t_quantile(p, degrees) for degrees in (1, 2, 3, 5, 10, 30, 100, 1000, 100_000, 1_000_000)]
    assert found == sorted(found, reverse=True)
    assert math.isclose(found[-1], NormalDist().inv_cdf(p), rel_tol=1e-5)


def test_an_interval_by_hand() -> None:
    """P-12: mean 2, standard deviation 1, three starts: 2 ± 4.30265 / sqrt 3 at 95 %."""
    found = interval([1.0, 2.0, 3.0], 0.95)
    assert found is not None
    assert found.mean == 2
    assert math.isclose(found.standard_error, 1 / math.sqrt(3), rel_tol=1e-15)
    assert math.isclose(found.high - found.mean, 4.30265272975 / math.sqrt(3), rel_tol=1e-9)
    assert math.isclose(found.mean - found.low, found.high - found.mean, rel_tol=1e-12)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=8), st.floats(0.5, 0.999))
@settings(max_examples=60)
def test_intervals_hold_their_mean_and_widen_with_the_level(values: list[float], level: float) -> None:
    """P-12: an interval holds its mean, a higher level gives a wider one, the order of starts gives the same."""
    found, wider = interval(values, level), interval(values, level + (1 - level) / 2)
    assert found is not None
    assert wider is not None
    assert found.low <= found.mean <= found.high
    assert wider.low <= found.low
    assert found.high <= wider.high
    assert interval(values[::-1], level) == found


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=6, unique=True), st.integers(-1000, 1000))
@settings(max_examples=60)
def test_intervals_scale(values: list[float], power: int) -> None:
    """P-12: a change of unit by a power of two changes nothing but the unit, also where squares leave the doubles."""
    whole = interval(values, 0.95)
    scaled = interval([math.ldexp(value, power) for value in values], 0.95)
    assert whole is not None
    assume(scaled is not None)
    assert scaled is not None
    assert math.isclose(
        scaled.high - scaled.mean, math.ldexp(whole.high - whole.mean, power), rel_tol=1e-9, abs_tol=5e-324
    )
    assert scaled.standard_error > 0


@pytest.mark.parametrize(
    "values", [[1e308, -1e308], [1.7e308, 1.7e308, -1.7e308], [1.7e308] + [-1.7e308] * 9, [1.7e308, 1.6e308]]
)
def test_an_interval_that_no_double_holds_does_not_exist(values: list[float]) -> None:
    """P-12: an interval with an infinite end is none, and never an error."""
    assert interval(values, 0.95) is None


@pytest.mark.parametrize(
    ("rule", "numerator", "denominator", "expected"),
    [
        ("mean", [1, 2, 6], [], 3.0), ("difference", [3, 5], [1], 3.0), ("log_ratio", [math.e], [1], 1.0),
        ("log_ratio", [4, 1], [1, 1], math.log(2)), ("mean", [], [], None), ("difference", [1], [], None),
        ("difference", [], [1], None), ("log_ratio", [0, 1], [1], None), ("log_ratio", [1], [-1], None),
        ("mean", [math.nan], [], None), ("mean", [1, math.inf], [], None), ("difference", [1], [math.inf], None),
        ("mean", [1e308, 1e308], [], 1e308), ("difference", [1.7e308], [-1.7e308], None),
        ("mean", [1e16, 1, -1e16], [], 1 / 3), ("log_ratio", [5e-324], [5e-324], 0.0),
    ],
)  # fmt: skip
def test_the_number_of_a_start(
    rule: str, numerator: list[float], denominator: list[float], expected: float | None
) -> None:
    """P-12: cells of a start are averaged first; where the rule is not defined there is no number, never an error."""
    found = start_value(rule, numerator, denominator)
    assert (found is None) == (expected is None)
    assert found is None or expected is None or math.isclose(found, expected, rel_tol=1e-15, abs_tol=1e-15)


@given(st.floats(min_value=5e-324, allow_infinity=False))
def test_logarithms_are_those_of_the_platform_to_its_last_place(value: float) -> None:
    """P-12: the logarithm is computed without the platform's library, and is correct where that is."""
    assert math.isclose(logarithm(value), math.log(value), rel_tol=2**-51)


def test_a_golden_logarithm() -> None:
    """P-12: digits from a table: ln 2 and ln 10."""
    assert (logarithm(2), logarithm(10), logarithm(1)) == (0.6931471805599453, 2.302585092994046, 0.0)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=6))
def test_means_are_exact_to_the_last_places(values: list[float]) -> None:
    """P-12: the mean is that of exact arithmetic, and lies between the values, however large they are."""
    found = mean(values)
    exact = sum(map(Fraction, values)) / len(values)
    assert math.isfinite(found)
    assert abs(Fraction(found) - exact) <= abs(exact) * Fraction(1, 2**50) + Fraction(1, 2**1070)

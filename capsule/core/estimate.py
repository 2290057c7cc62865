"""Estimators over process starts: one number per start, then a Student-t interval over the starts.

The start is the unit: cells inside a start share a process and are not independent, so they are averaged first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal

_THIRTY_DIGITS = Context(prec=30)


@dataclass(frozen=True)
class Interval:
    """A mean over starts and its two-sided confidence interval, in the unit of the estimate."""

    mean: float
    low: float
    high: float
    standard_error: float


def start_value(rule: str, numerator: Sequence[float], denominator: Sequence[float]) -> float | None:
    """Return the one number of a start, or None where it does not exist.

    `mean`: the mean of the numerator's cells. `difference`: mean minus mean. `log_ratio`: the mean natural logarithm of
    the numerator's cells minus that of the denominator's; it needs values above zero. A number beyond the largest
    double does not exist.
    """
    if not numerator or (rule != "mean" and not denominator):
        return None
    if not all(math.isfinite(value) for value in (*numerator, *denominator)):
        return None
    if rule == "mean":
        return mean(numerator)
    if rule == "difference":
        found = mean(numerator) - mean(denominator)
        return found if math.isfinite(found) else None
    if min(*numerator, *denominator) <= 0:
        return None
    return mean([logarithm(value) for value in numerator]) - mean([logarithm(value) for value in denominator])


def logarithm(value: float) -> float:
    """Return the natural logarithm, rounded from thirty digits, the same on every platform.

    Libraries of mathematics differ in the last place, which is all that is left of the difference of two logarithms
    that are nearly equal.
    """
    return float(_THIRTY_DIGITS.ln(Decimal(value)))


def interval(values: Sequence[float], level: float) -> Interval | None:
    """Return mean and Student-t interval of at least two starts at confidence `level` (0 to 1).

    None where it does not exist: an end of it lies beyond the largest double.
    """
    n = len(values)
    middle = mean(values)
    deviations = [value - middle for value in values]
    largest = max(map(abs, deviations))
    if math.isinf(largest):
        return None
    scale = math.ldexp(1, math.frexp(largest)[1] - 1) if largest else 1.0  # squares then neither overflow nor vanish
    scaled = math.fsum((deviation / scale) * (deviation / scale) for deviation in deviations)
    error = scale * math.sqrt(scaled / (n - 1) / n)
    half = t_quantile(0.5 + level / 2, n - 1) * error
    found = Interval(middle, middle - half, middle + half, error)
    return found if math.isfinite(found.low) and math.isfinite(found.high) else None


def mean(values: Sequence[float]) -> float:
    """Return the mean of finite values; it exists even where their sum is beyond the largest double."""
    try:
        return math.fsum(values) / len(values)
    except OverflowError:
        return math.fsum(value / len(values) for value in values)


def t_quantile(probability: float, degrees: int) -> float:
    """Return the quantile of Student's t distribution with `degrees` degrees of freedom.

    Inverts the distribution function, which is an incomplete beta integral (Abramowitz and Stegun 26.7.1),
    by bisection.
    """
    assert 0 < probability < 1, probability
    assert degrees >= 1, degrees
    if probability < 0.5:
        return -t_quantile(1 - probability, degrees)
    tail = 1 - probability
    high = 1.0
    while t_tail(high, degrees) > tail:
        high *= 2
    return _bisect(lambda t: tail - t_tail(t, degrees), 0.0, high)


def t_distribution(t: float, degrees: int) -> float:
    """Return the probability that Student's t is at most `t` (not negative)."""
    return 1 - t_tail(t, degrees)


def t_tail(t: float, degrees: int) -> float:
    """Return the probability that Student's t is above `t` (not negative); far out it has digits that 1 - p loses."""
    return 0.5 * _beta_regularised(degrees / (degrees + t * t), degrees / 2, 0.5)


def _bisect(function: Callable[[float], float], low: float, high: float) -> float:
    while True:
        middle = (low + high) / 2
        if middle in (low, high):
            return middle
        if function(middle) < 0:
            low = middle
        else:
            high = middle


def _beta_regularised(x: float, a: float, b: float) -> float:
    """Return I_x(a, b), by the continued fraction of Abramowitz and Stegun 26.5.8 on the side where it converges."""
    if x <= 0:
        return 0.0
    if x >= 1:
        return 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta_regularised(1 - x, b, a)
    logarithm = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(logarithm) / a / _beta_fraction(x, a, b)


def _beta_fraction(x: float, a: float, b: float) -> float:
    """Evaluate 1 + d1/(1 + d2/(1 + …)) from the tail upwards; the number of terms grows until nothing changes."""
    previous = math.nan
    terms = 32
    while terms <= 1 << 16:
        value = 1.0
        for n in range(terms, 0, -1):
            m = n // 2
            top = m * (b - m) if n % 2 == 0 else -(a + m) * (a + b + m)
            value = 1 + top * x / ((a + n - 1) * (a + n)) / value
        if value == previous:
            return value
        previous, terms = value, terms * 2
    return previous

"""How a recomputed observation compares with the recorded one, by the frozen rule; a tolerance is never widened."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Literal

from capsule.core.protocol import Observation
from capsule.core.record import Scalar, number

Answer = Literal["exact", "within_tolerance", "different", "not_verified"]


def compare(column: Observation, recorded: Scalar | None, replayed: Scalar | None) -> tuple[Answer, str]:
    """Compare two canonical values of a column and say why in words.

    `relative` means |replayed - recorded| <= tolerance x |recorded|. The comparison is exact, without rounding.
    """
    rule = column.replay
    if rule.rule == "never":
        return "not_verified", rule.reason or ""
    if recorded is None or replayed is None:
        same = recorded is None and replayed is None
        return ("exact", "no value in either") if same else ("different", f"recorded {recorded}, replayed {replayed}")
    if recorded == replayed:
        return "exact", ""
    words = f"recorded {recorded}, replayed {replayed}"
    if rule.tolerance is None:
        return "different", words
    before, after = number(recorded), number(replayed)
    if not (math.isfinite(before) and math.isfinite(after)):
        return "different", words
    limit = Fraction(rule.tolerance) * (abs(Fraction(before)) if rule.rule == "relative" else 1)
    difference = abs(Fraction(after) - Fraction(before))
    return ("within_tolerance" if difference <= limit else "different"), f"{words}, tolerance {rule.tolerance}"

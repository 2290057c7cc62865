"""What a protocol may mean: names that point somewhere, gates that can pass and fail, claims that can be decided."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import get_args

import pytest
from builders import appended, edited, protocol
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.core.attempt import INTERRUPTED, OUTCOMES
from capsule.core.decision import passes
from capsule.core.errors import ProtocolError
from capsule.core.protocol import (
    Budget,
    FailureClass,
    Gate,
    Observation,
    ReplayRule,
    milliseconds,
    reserved_ms,
)
from capsule.core.protocol_checks import feasible, support

COMMAND = ('trial = "trial:measure"\n\n[[arms]]', 'command = ["true"]\n\n[[arms]]')
FACTOR = '[[factors]]\nname = "depth"\nlevels = [1, 2]\n'
REVISION = ('name = "builtin"\n', f'name = "builtin"\nrevision = "{"a" * 40}"\n')


EXACT = '{ rule = "exact" }\n\n[[gates]]'
WITHIN = (
    'rule = "interval_above"\nestimate = "speed-up"\nthreshold = 0',
    'rule = "interval_within"\nestimate = "speed-up"\nlow = 1\nhigh = 1.0',
)


def refused(text: str) -> list[str]:
    """Return the complaints about a protocol, without file and line."""
    with pytest.raises(ProtocolError) as caught:
        protocol(text)
    return [line.split(": ", 1)[1] for line in str(caught.value).split("\n")]


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        # P-03
        ('name = "builtin"', 'name = "loop"', "arms[1].name: expected a new name, found 'loop' a second time"),
        ('name = "large"', 'name = "small"', "workloads[1].name: expected a new name"),
        ('name = "large"', 'name = "small[x=1]"', "workloads[1].name: expected text that should match"),
        ('name = "note"', 'name = "total"', "observations[2].name: expected a new name"),
        ('name = "right"', 'name = "faster"', "hypotheses[1].name: expected a new name"),
        ('name = "note"', 'name = "status"', "observations[2].name: expected a name of your own"),
        ('name = "note"', 'name = "error"', "observations[2].name: expected a name of your own"),
        # P-04
        ('trial = "trial:measure"\nparameters', "parameters", "arms[1]: expected exactly one of `trial` and"),
        (*COMMAND, 'arms[0].command: a command runs one cell: expected isolation = "cell" in [design]'),
        (*REVISION, "design.isolation: arms with different revisions cannot share a process"),
        ('"trial:measure"', '"trial.py"', "arms[0].trial: expected text that should match"),
        ('[[arms]]\nname = "loop"', '[[arms]]\nname = "loop"\ncommand = []', "arms[0].command: expected an arr"),
        # P-05
        ("", FACTOR.replace("depth", "numbers"), "factors[0].name: expected a parameter that no workload sets"),
        ("", FACTOR.replace("[1, 2]", "[1, 1]"), "factors[0].levels: expected levels written differently"),
        ("", FACTOR.replace("[1, 2]", '[1, "1"]'), "factors[0].levels: expected levels written differently"),
        ("", FACTOR.replace("[1, 2]", "[]"), "factors[0].levels: expected an array that should have at least 1"),
        (
            "",
            '[[factors]]\nname = "x"\nlevels = ["a", "a,y=b"]\n[[factors]]\nname = "y"\nlevels = ["b,y=c", "c"]',
            "factors: expected a new name for every crossed workload, found 'small[x=a,y=b,y=c]' twice",
        ),
        # P-06
        ("", '[[exclusions]]\nreason = "all"', "exclusions: expected at least one cell to run, found all 24 planned"),
        ("", '[[exclusions]]\narm = "lop"\nreason = "x"', "exclusions[0].arm: expected an arm, found 'lop'"),
        ("", '[[exclusions]]\nworkload = "big"\nreason = "x"', "exclusions[0].workload: expected a workload, found"),
        ('order = "abba"', 'order = "abba"\nblocks = 100000', "design: expected at most 200000 planned cells"),
        (
            "",
            "".join(f'[[factors]]\nname = "f{i}"\nlevels = [1, 2, 3, 4, 5, 6, 7, 8]\n' for i in range(30)),
            "design: expected at most 200000 planned cells",
        ),
        # P-09
        ("minimum = 0", "minimum = 2\nmaximum = 1", "observations[0].maximum: expected a maximum of at least"),
        ('type = "uint64"', 'type = "uint64"\nmaximum = -1', "observations[1].maximum: expected a range that holds"),
        ('type = "uint64"', 'type = "int64"\nminimum = 0.2\nmaximum = 0.8', "observations[1].maximum: expected a r"),
        ('type = "text"', 'type = "text"\nminimum = 1', "observations[2].minimum: a text observation has no"),
        ('rule = "never", reason = "a time is measured"', 'rule = "never"', "observations[0].replay.reason: expected"),
        (EXACT, EXACT.replace("exact", "absolute"), "observations[2].replay.tolerance: expected a tolerance exactly"),
        (
            EXACT,
            EXACT.replace('"exact"', '"absolute", tolerance = 1'),
            "observations[2].replay.rule: a text observation can only be compared exactly",
        ),
        # P-10
        ('observation = "total"', 'observation = "totl"', "gates[0].observation: expected a declared observation"),
        ('observation = "total"', 'observation = "note"', "gates[0].observation: a gate needs a number"),
        ("limit = 10\n", "", "gates[0].limit: expected a limit for every rule but `finite`"),
        ('rule = "at_least"', 'rule = "finite"', "gates[0].limit: expected a limit for every rule but `finite`"),
        ("limit = 10", "limit = 0", "gates[0].limit: this gate can never fail"),
        ("limit = 10", "limit = 18446744073709551615.5", "gates[0].limit: this gate can never pass"),
        ("limit = 10", "limit = -1", "gates[0].limit: this gate can never fail"),
        ('rule = "at_least"\nlimit = 10', 'rule = "equal"\nlimit = 1.5', "gates[0].limit: this gate can never pass"),
        ('rule = "at_least"\nlimit = 10', 'rule = "finite"', "gates[0].limit: this gate can never fail"),
        # P-12
        ('observation = "seconds"', 'observation = "x"', "estimates[0].observation: expected a declared observation"),
        ('observation = "seconds"', 'observation = "note"', "estimates[0].observation: an estimate needs a number"),
        ('numerator = "loop"', 'numerator = "lop"', "estimates[0].numerator: expected an arm, found 'lop'"),
        ('denominator = "builtin"', 'denominator = "x"', "estimates[0].denominator: expected an arm, found 'x'"),
        ('denominator = "builtin"', 'denominator = "loop"', "estimates[0].denominator: an arm compared with itself"),
        ('denominator = "builtin"\n', "", "estimates[0].denominator: expected a second arm"),
        ('rule = "log_ratio"', 'rule = "mean"', "estimates[0].denominator: expected a second arm for every rule but"),
        ("confidence = 0.95", "confidence = 0.49", "estimates[0].confidence: expected a level from 0.5"),
        ("confidence = 0.95", "confidence = 1", "estimates[0].confidence: expected a level from 0.5"),
        ("confidence = 0.95", "confidence = 0.99999999999999999999", "estimates[0].confidence: expected a level"),
        ("seeds = [5, 3, 4]", "seeds = [5]", "design.starts: an interval needs two process starts"),
        # P-13
        ('missing = "withhold"', 'missing = "withhold"\nstarts_min = 4', "analysis.starts_min: expected at most the 3"),
        # P-14
        ("threshold = 0\n", "", "hypotheses[0].threshold: the rule interval_above needs `threshold`"),
        ("threshold = 0", "threshold = 0\nlow = 1", "hypotheses[0].low: the rule interval_above does not take `low`"),
        ('estimate = "speed-up"', 'estimate = "speed"', "hypotheses[0].estimate: expected a declared estimate"),
        ('gates = ["summed"]', 'gates = ["sumed"]', "hypotheses[1].gates: expected a declared gate, found 'sumed'"),
        ('gates = ["summed"]\n', "", "hypotheses[1].gates: the rule gates_pass needs `gates`"),
        (*WITHIN, "hypotheses[0].high: expected a value above 1, found 1.0"),
        ("threshold = 0", 'threshold = 0\nworkloads = ["smal"]', "hypotheses[0].workloads: expected a workload"),
        (
            "",
            '[[exclusions]]\narm = "loop"\nworkload = "large"\nreason = "x"',
            "hypotheses[0].workloads: never decided on large, where loop is excluded",
        ),
        (
            "",
            '[[exclusions]]\nworkload = "large"\nreason = "x"',
            "hypotheses[1].workloads: never decided on large, where every arm is excluded",
        ),
    ],
)
def test_what_a_protocol_must_not_mean(before: str, after: str, words: str) -> None:
    """P-03 P-04 P-05 P-06 P-09 P-10 P-12 P-13 P-14: a plan that contradicts itself or decides nothing is refused."""
    text = edited((before, after)) if before else appended(after)
    assert any(complaint.startswith(words) for complaint in refused(text)), refused(text)


@pytest.mark.parametrize(
    "text",
    [
        edited(COMMAND, ('isolation = "start"', 'isolation = "cell"')),
        edited(REVISION, ('isolation = "start"', 'isolation = "cell"')),
        edited(("limit = 10", "limit = 10.5"), ('"at_least"', '"above"')),
        edited(("limit = 10", "limit = 18446744073709551615"), ('"at_least"', '"equal"')),
        edited(("limit = 10\n", ""), ('"at_least"', '"finite"'), ('observation = "total"', 'observation = "seconds"')),
        edited(("confidence = 0.95", "confidence = 0.9999999")),
        appended('[[exclusions]]\nworkload = "large"\nreason = "x"', to=edited(
            ("threshold = 0", 'threshold = 0\nworkloads = ["small"]'),
            ('gates = ["summed"]', 'gates = ["summed"]\nworkloads = ["small"]'),
        )),
        appended(FACTOR + '[[exclusions]]\nworkload = "large[depth=2]"\narm = "loop"\nreason = "x"', to=edited(
            ("threshold = 0", 'threshold = 0\nworkloads = ["small", "large[depth=1]"]'),
        )),
    ],
)  # fmt: skip
def test_what_it_may_mean(text: str) -> None:
    """P-04 P-06 P-10 P-12 P-14: the nearest allowed neighbours of what is refused are read."""
    assert protocol(text).name == "sums"


def test_every_failure_class_may_be_retried_and_nothing_else() -> None:
    """P-17: retries are per class of failure; outcomes that are nobody's result, and success, have none."""
    classes = set(get_args(FailureClass))
    assert set(OUTCOMES) == classes | INTERRUPTED | {"completed"}
    assert not classes & INTERRUPTED
    for name in classes:
        assert protocol(edited(("exit_nonzero = 1", f"{name} = 2"))).retry == {name: 2}
    for name in INTERRUPTED | {"completed"}:
        assert refused(edited(("exit_nonzero = 1", f"{name} = 2")))[0].startswith(f"retry.{name}: expected")


NUMERIC = ["float64", "float32", "float16", "int64", "uint64", "bool"]
RULES = ["at_most", "at_least", "above", "below", "equal", "not_equal"]
bounds = st.none() | st.decimals(-3, 3, places=1).map(str)


@given(st.sampled_from(NUMERIC), bounds, bounds, st.sampled_from(RULES), st.decimals(-4, 4, places=1).map(str))
@settings(max_examples=300)
def test_a_gate_is_feasible_exactly_if_values_pass_and_fail_it(
    kind: str, low: str | None, high: str | None, rule: str, limit: str
) -> None:
    """P-10: over the declared support, "can pass" and "can fail" say what trying the values says."""
    column = Observation(name="x", type=kind, minimum=low, maximum=high, replay=ReplayRule(rule="exact"))  # type: ignore[arg-type]
    gate = Gate(name="g", observation="x", rule=rule, limit=limit, on_failure="record")  # type: ignore[arg-type]
    tried = [Fraction(n, 64) for n in range(-320, 321)]  # all of which every kind of float holds exactly
    if not kind.startswith("float"):
        tried = [value for value in tried if value.denominator == 1]
    if kind == "uint64":
        tried = [value for value in tried if value >= 0]
    if kind == "bool":
        tried = [value for value in tried if value in (0, 1)]
    tried = [
        value
        for value in tried
        if (low is None or value >= Fraction(low)) and (high is None or value <= Fraction(high))
    ]
    if not tried:
        return
    compare = {
        "at_most": lambda v, x: v <= x, "at_least": lambda v, x: v >= x, "above": lambda v, x: v > x,
        "below": lambda v, x: v < x, "equal": lambda v, x: v == x, "not_equal": lambda v, x: v != x,
    }  # fmt: skip
    answers = {compare[rule](value, Fraction(limit)) for value in tried}
    assert feasible(gate, column) == (True in answers, False in answers)


@given(
    st.sampled_from([*RULES, "finite"]),
    st.floats() | st.integers(0, 2**64),
    st.floats(allow_nan=False, allow_infinity=False),
)
def test_gates_compare_exactly(rule: str, value: float, limit: float) -> None:
    """P-11: a gate compares without rounding, and a NaN passes none."""
    text = str(Decimal(limit)) if len(str(Decimal(limit))) <= 64 else repr(limit)
    gate = Gate(name="g", observation="x", rule=rule, limit=None if rule == "finite" else text, on_failure="record")  # type: ignore[arg-type]
    if isinstance(value, float) and math.isnan(value):
        assert not passes(gate, value)
        return
    if isinstance(value, float) and math.isinf(value):
        expected = {
            "at_most": value < 0,
            "below": value < 0,
            "at_least": value > 0,
            "above": value > 0,
            "not_equal": True,
        }
        assert passes(gate, value) == expected.get(rule, False)
        return
    found, edge = Fraction(value), Fraction(text)
    expected = {"at_most": found <= edge, "at_least": found >= edge, "above": found > edge, "below": found < edge,
                "equal": found == edge, "not_equal": found != edge, "finite": True}  # fmt: skip
    assert passes(gate, value) == expected[rule]


def test_gates_do_not_confuse_neighbours() -> None:
    """P-11: one tenth as a double is not the decimal 0.1, and 2^64 - 1 is not 2^64."""
    at_most = Gate(name="g", observation="x", rule="at_most", limit="0.1", on_failure="record")
    assert not passes(at_most, 0.1)
    assert passes(at_most, math.nextafter(0.1, 0))
    assert not passes(at_most.model_copy(update={"rule": "equal", "limit": "18446744073709551616"}), 2**64 - 1)
    assert passes(at_most.model_copy(update={"rule": "equal", "limit": "1"}), True)


@pytest.mark.parametrize(
    ("kind", "low", "high", "expected"),
    [
        ("float64", None, None, ("-Infinity", "Infinity")),
        ("float16", "0", "1.5", ("0", "1.5")),
        ("int64", None, None, (-(2**63), 2**63 - 1)),
        ("uint64", "-7", "9.9", (0, 9)),
        ("int64", "0.1", None, (1, 2**63 - 1)),
        ("bool", "-1", "2", (0, 1)),
    ],
)
def test_support(kind: str, low: str | None, high: str | None, expected: tuple[object, object]) -> None:
    """P-09: the support of a column is the declared range within that of its type."""
    column = Observation(name="x", type=kind, minimum=low, maximum=high, replay=ReplayRule(rule="exact"))  # type: ignore[arg-type]
    assert support(column) == tuple(Decimal(end) for end in expected)  # type: ignore[arg-type]


@given(st.decimals(0, 10**9, places=5))
def test_milliseconds_are_rounded_up(seconds: Decimal) -> None:
    """P-16: a limit in seconds becomes whole milliseconds, rounded up, so that no budget is stretched."""
    found = milliseconds(str(seconds))
    assert found - 1 < Fraction(seconds) * 1000 <= found


def test_milliseconds_of_long_numbers_are_exact() -> None:
    """P-16: no digit is lost, however many the author wrote."""
    assert milliseconds("12345678901234567890123456789012.0001") == 12345678901234567890123456789012001
    assert milliseconds("1e-63") == 1
    assert milliseconds("0") == 0


def test_the_worst_case_counts_every_grace_of_every_device() -> None:
    """P-16: an attempt reserves devices x (wall limit + kill grace + release grace)."""
    budget: Budget = protocol(edited(("wall_limit_seconds = 8", "wall_limit_seconds = 8.0005\ndevices = 3"))).budget
    assert reserved_ms(budget) == 3 * (8001 + 1000 + 1000)

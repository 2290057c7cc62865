"""Results: derived from final rows and the ledger by the frozen rules alone."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from builders import History, appended, edited, generation, honest, journal_bytes, observed
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.core.errors import MalformedError
from capsule.core.plan import Cell, enumerate_cells
from capsule.core.progress import final_rows, processes
from capsule.core.results import EstimateResult, Results, agree, derive, failing_stop_gate, result_pieces
from capsule.core.tally import text

DEPTH = '[[factors]]\nname = "depth"\nlevels = [1, 2]\n'
EXCLUDE_ONE = '[[exclusions]]\narm = "loop"\nworkload = "large"\nreason = "slow"'
ONLY_SMALL = ("threshold = 0", 'threshold = 0\nworkloads = ["small"]')


def run(protocol_text: str, value: Callable[[Cell], dict[str, Any]] = observed, count: int = 3) -> History:
    """Return the history of a protocol whose first processes ran, with rows as `value` gives them."""
    history = History([generation(protocol_text)]).opened()
    for process in processes(history.cells)[:count]:
        rows = [value(cell) for cell in process.cells]
        outcome = "trial_error" if any("error" in row for row in rows) else "completed"
        history.attempt(process.ordinal, outcome, journal=journal_bytes(rows))
    return history


def results_of(history: History) -> Results:
    """Return the results of a history."""
    rows = final_rows(history.manifest, history.cells, history.account, history.read_journals())
    return derive(history.manifest, rows, history.account)


def estimate_on(results: Results, workload: str) -> EstimateResult:
    """Return the only estimate on a workload."""
    return next(item for item in results.estimates if item.workload == workload)


def changed(cell: Cell, *, seed: int, **values: Any) -> dict[str, Any]:
    """Return an honest row, with other values in one seed's loop cells on the small workload."""
    row = observed(cell)
    return {**row, **values} if (cell.seed, cell.arm, cell.workload) == (seed, "loop", "small") else row


def test_results_of_the_honest_history() -> None:
    """K-07 P-12 P-14: estimates, decisions, counts and charges of a small history, checked by hand."""
    found = results_of(honest())
    assert (found.cells, found.reasons, found.outcome) == ({"ok": 24, "failed": 0, "not_run": 0}, {}, "supported")
    small = estimate_on(found, "small")
    expected = [math.log(2 * (1 + seed / 100 + seed / 1000)) - math.log(1 + seed / 100) for seed in (5, 3, 4)]
    assert [(start.seed, start.start) for start in small.starts] == [(5, 0), (3, 0), (4, 0)]
    assert all(
        math.isclose(float(start.value or "nan"), value, rel_tol=1e-12)
        for start, value in zip(small.starts, expected, strict=True)
    )
    assert math.isclose(float(small.mean or "nan"), sum(expected) / 3, rel_tol=1e-12)
    assert small.level == "0.95"
    assert [(item.gate, item.passed, item.failed, item.missing) for item in found.gates] == [("summed", 24, 0, 0)]
    assert [(charge.unit, charge.pilot, charge.attempts) for charge in found.charges] == [
        ("cpu", False, {"completed": 3, "lost": 1, "exit_nonzero": 1}), ("cpu", True, {"completed": 1}),
    ]  # fmt: skip
    assert found.charges[0].budget_ms == 300_000
    assert found.charges[0].debited_ms == 4 * 60 + 90
    assert len(found.summaries) == 8


def test_results_are_read_from_their_own_bytes() -> None:
    """K-08: results are canonical JSON without a float; numbers are the shortest text that gives them back."""
    found = results_of(honest())
    assert Results.from_bytes(found.to_bytes(), "r") == found
    assert json.loads(found.to_bytes(), parse_float=lambda _: pytest.fail("a float"))["schema"] == "capsule.results/1"
    with pytest.raises(MalformedError):
        Results.from_bytes(found.to_bytes().replace(b'"supported"', b'"proven"'), "r")


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**64), 2**64))
def test_numbers_are_written_with_the_shortest_digits(value: float) -> None:
    """K-08: the text of a number gives the same number back."""
    assert type(value)(text(value)) == value
    assert len(text(value)) <= 25


@pytest.mark.parametrize(
    ("analysis", "count", "starts", "withheld"),
    [
        ('"withhold"', 3, 3, None),
        ('"withhold"', 2, 2, "1 of 3 starts have no value"),
        ('"withhold"', 0, 0, "3 of 3 starts have no value"),
        ('"drop_start"', 2, 2, None),
        ('"drop_start"', 1, 1, "1 starts have a value, 2 are needed"),
        ('"drop_start"\nstarts_min = 3', 2, 2, "2 starts have a value, 3 are needed"),
    ],
)
def test_missing_starts(analysis: str, count: int, starts: int, withheld: str | None) -> None:
    """P-13: a start without a value withholds the estimate or is dropped, as frozen; too few starts withhold it."""
    found = estimate_on(results_of(run(edited(('"withhold"', analysis)), count=count)), "small")
    assert len(found.starts) == 3
    assert sum(start.value is not None for start in found.starts) == starts
    assert all((start.value is None) != (start.reason is None) for start in found.starts)
    assert found.withheld == withheld
    assert (found.mean is None) == (found.low is None) == (found.high is None) == (withheld is not None)


def test_a_withheld_estimate_decides_nothing() -> None:
    """P-13 P-14: without an interval the hypothesis is inconclusive, and says why."""
    found = results_of(run(edited(), count=2))
    assert [item.decision for item in found.hypotheses] == ["inconclusive", "inconclusive"]
    assert found.hypotheses[0].components[0].reason == "withheld: 1 of 3 starts have no value"
    assert found.outcome == "inconclusive"
    assert found.reasons == {"not_run: pending": 8}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"total": 3}, "excluded by a gate"),
        ({"error": "no"}, "trial_error"),
        ({"seconds": 0}, "values for which the rule is not defined"),
        ({"seconds": "NaN"}, "values for which the rule is not defined"),
        ({"seconds": "Infinity"}, "values for which the rule is not defined"),
    ],
)
def test_cells_that_leave_their_start_without_a_value(values: dict[str, Any], reason: str) -> None:
    """P-13: a cell that failed, was excluded by a gate or has no usable value takes its whole start with it."""
    found = results_of(run(edited(), lambda cell: changed(cell, seed=3, **values)))
    small = estimate_on(found, "small")
    assert [start.value is None for start in small.starts] == [False, True, False]
    assert reason in (small.starts[1].reason or "")
    assert small.withheld == "1 of 3 starts have no value"
    assert estimate_on(found, "large").withheld is None


def test_results_are_written_in_pieces_as_they_are_whole() -> None:
    """K-07: the pieces are the canonical bytes, also of text that is not ASCII and of a part of which there is none."""
    text = edited(("The builtin takes less time.", "Das Eingebaute ist schneller 𝛑"))
    for found in (results_of(run(text)), results_of(run(text, count=0)), results_of(run(appended(DEPTH), count=1))):
        assert b"".join(result_pieces(found)) == found.to_bytes()
        assert list(agree(found, Results.from_bytes(found.to_bytes(), "x"))) == []


def test_gates_count_what_passed_failed_and_was_missing() -> None:
    """P-11 P-14: a gate judges every planned cell that is not excluded; its first failures are named."""
    history = run(edited(('"exclude"', '"stop"')), lambda cell: changed(cell, seed=3, total=3), count=2)
    found = results_of(history)
    assert (found.gates[0].passed, found.gates[0].failed, found.gates[0].missing) == (14, 2, 8)
    assert len(found.gates[0].failed_cells) == 2
    assert (found.hypotheses[1].decision, found.outcome) == ("refuted", "refuted")
    rows = list(final_rows(history.manifest, history.cells, history.account, history.read_journals()))
    stopped = failing_stop_gate(history.manifest, rows)
    assert stopped is not None
    assert stopped[1].cell.cell == found.gates[0].failed_cells[0]
    assert failing_stop_gate(honest().manifest, rows) is None


def test_cells_excluded_from_the_plan_do_not_count_as_missing() -> None:
    """P-13: an estimate where an arm is excluded has no value; gates and others are as if it were not planned."""
    found = results_of(run(appended(EXCLUDE_ONE, to=edited(ONLY_SMALL))))
    assert found.outcome == "supported"
    assert estimate_on(found, "large").mean is None
    assert found.gates[0].missing == 0
    assert found.reasons == {"not_run: excluded: slow": 6}


@pytest.mark.parametrize(
    ("selection", "comparisons"),
    [
        ("[]", 4),
        ('["small"]', 2),
        ('["small[depth=1]"]', 1),
        ('["small[depth=1]", "small"]', 2),
        ('["large", "large"]', 2),
    ],
)
def test_the_level_is_shared_by_all_comparisons(selection: str, comparisons: int) -> None:
    """P-15: with bonferroni the error of an estimate is divided by the planned comparisons, each counted once."""
    one = edited(("threshold = 0", f"threshold = 0\nworkloads = {selection}"), ('"none"', '"bonferroni"'))
    found = results_of(run(appended(DEPTH, to=one)))
    assert math.isclose(float(found.estimates[0].level), 1 - 0.05 / comparisons, rel_tol=1e-15)
    assert len(found.hypotheses[0].components) == comparisons
    assert len(found.hypotheses[1].components) == 4
    plain = results_of(run(appended(DEPTH, to=edited(("threshold = 0", f"threshold = 0\nworkloads = {selection}")))))
    assert plain.estimates[0].level == "0.95"
    wide, narrow = (float(item.estimates[0].high or 0) - float(item.estimates[0].low or 0) for item in (found, plain))
    assert (wide > narrow) == (comparisons > 1)


def test_two_hypotheses_count_twice() -> None:
    """P-15: every interval hypothesis adds its workloads; gates add nothing."""
    second = (
        '[[hypotheses]]\nname = "much"\nclaim = "c"\nrule = "interval_above"\nestimate = "speed-up"\nthreshold = 1\n'
    )
    found = results_of(run(appended(second, to=edited(('"none"', '"bonferroni"')))))
    assert math.isclose(float(found.estimates[0].level), 1 - 0.05 / 4, rel_tol=1e-15)


extreme = st.floats() | st.sampled_from([1.7e308, -1.7e308, 5e-324, 0.0, -0.0, 1e200, -1e200, 1e-200])


@given(st.lists(extreme, min_size=12, max_size=12), st.sampled_from(["mean", "difference", "log_ratio"]))
@settings(max_examples=120)
def test_no_value_breaks_the_derivation(values: list[float], rule: str) -> None:
    """K-07: whatever was observed, results are derived and can be written: no overflow, no infinite or NaN estimate."""
    mean = ('denominator = "builtin"\n', "") if rule == "mean" else ("[[gates]]", "[[gates]]")
    given_text = edited(('rule = "log_ratio"', f'rule = "{rule}"'), mean, ('order = "abba"', 'order = "listed"'))

    def value(cell: Cell) -> dict[str, Any]:
        raw = values[int(cell.cell[1:])]
        special = "NaN" if math.isnan(raw) else ("Infinity" if raw > 0 else "-Infinity")
        return {"cell": cell.cell, "total": 20, "seconds": raw if math.isfinite(raw) else special}

    found = results_of(run(given_text, value))
    assert Results.from_bytes(found.to_bytes(), "r") == found
    for item in found.estimates:
        for number in (item.mean, item.low, item.high, *(start.value for start in item.starts)):
            assert number is None or math.isfinite(float(number))
        assert (item.low is None) == (item.withheld is not None)


def test_a_narrow_interval_is_not_taken_for_a_point() -> None:
    """P-12: differences whose squares vanish in doubles still give an interval with a width."""
    small = edited(('rule = "log_ratio"', 'rule = "difference"'), ("minimum = 0\n", ""))
    found = results_of(run(small, lambda cell: {**observed(cell), "seconds": (cell.seed - 4) * 1e-200}))
    item = estimate_on(
        results_of(run(small, lambda c: {**observed(c), "seconds": (c.arm == "loop") * (c.seed - 4) * 1e-200})), "small"
    )
    assert float(item.low or 0) < 0 < float(item.high or 0)
    assert estimate_on(found, "small").low == "0.0"
    assert found.hypotheses[0].decision == "inconclusive"


def test_summaries_of_what_is_not_finite() -> None:
    """K-08: a NaN among the values shows in mean, minimum and maximum, wherever it stands; infinities are the ends."""
    for seed in (5, 3, 4):
        found = results_of(run(edited(), lambda cell, seed=seed: changed(cell, seed=seed, seconds="NaN")))
        summary = next(item for item in found.summaries if (item.workload, item.arm) == ("small", "loop"))
        assert (summary.mean, summary.minimum, summary.maximum) == ("nan", "nan", "nan")
    found = results_of(run(edited(), lambda cell: changed(cell, seed=3, seconds="Infinity")))
    summary = next(item for item in found.summaries if (item.workload, item.arm) == ("small", "loop"))
    assert (summary.mean, summary.maximum) == ("nan", "inf")
    assert float(summary.minimum) < 3


def nudged(value: str, steps: int) -> str:
    """Return the number some units in the last place away."""
    number = float(value)
    for _ in range(steps):
        number = math.nextafter(number, math.inf)
    return text(number)


def test_another_library_of_mathematics_agrees() -> None:
    """K-07: results that differ in the last places only, as other machines compute them, agree, also in their words."""
    derived = results_of(honest()).to_json()
    packed = json.loads(json.dumps(derived))
    for item in packed["estimates"]:
        for key in ("mean", "low", "high"):
            item[key] = nudged(item[key], 3)
        for start in item["starts"]:
            start["value"] = nudged(start["value"], 2)
    for component, item in zip(packed["hypotheses"][0]["components"], packed["estimates"], strict=True):
        component["reason"] = f"interval {item['low']} to {item['high']}"
    assert packed != derived
    assert list(agree(packed, derived)) == []


def test_an_end_near_zero_agrees_within_the_width_of_its_interval() -> None:
    """K-07: an end that is a small difference of large numbers may differ by 1e-12 of these, and by no more."""
    derived = {"estimates": [{"low": "1e-09", "high": "2.5", "mean": "1.25"}], "reason": "interval 1e-09 to 2.5"}
    near, far = ({"estimates": [{"low": low, "high": "2.5", "mean": "1.25"}], "reason": f"interval {low} to 2.5"}
                 for low in ("1.001e-09", "1.01e-09"))  # fmt: skip
    assert list(agree(near, derived)) == []
    assert len(list(agree(far, derived))) == 2


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda r: r["estimates"][0].update(mean=text(float(r["estimates"][0]["mean"]) * 1.00000001)), "[0].mean"),
        (lambda r: r["estimates"][0].update(mean="0" + r["estimates"][0]["mean"]), "estimates[0].mean"),
        (lambda r: r["estimates"][0].update(mean=None), "estimates[0].mean"),
        (lambda r: r["estimates"][0].update(level="0.950"), "estimates[0].level"),
        (lambda r: r["estimates"][0].update(withheld="no"), "estimates[0].withheld"),
        (lambda r: r["estimates"].pop(), "results.estimates"),
        (lambda r: r["cells"].update(ok=25), "cells.ok"),
        (lambda r: r["cells"].pop("ok"), "cells.ok"),
        (lambda r: r.update(outcome="refuted"), "results.outcome"),
        (lambda r: r["charges"][0].update(debited_ms=0), "charges[0].debited_ms"),
        (lambda r: r["hypotheses"][0]["components"][0].update(reason="interval 0.1 to 9"), "components[0].reason"),
        (lambda r: r["gates"][0].update(failed_cells=["c000001"]), "gates[0].failed_cells"),
    ],
)  # fmt: skip
def test_everything_else_must_be_equal(change: Callable[[Any], Any], place: str) -> None:
    """K-07: a number off by more than rounding, another spelling, word or count is a finding with its place."""
    derived = results_of(honest()).to_json()
    packed = json.loads(json.dumps(derived))
    change(packed)
    findings = list(agree(packed, derived))
    assert len(findings) == 1
    assert place in findings[0]


@pytest.mark.parametrize(
    ("one", "other"), [("1e3", "1000"), ("1.0", "1"), ("inf", "infinity"), ("1_0", "10"), ("nan", "NaN")]
)
def test_names_that_look_like_numbers_are_names(one: str, other: str) -> None:
    """K-07: only computed numbers may differ in the last places; names and digests are equal or differ."""
    assert list(agree({"estimate": one}, {"estimate": other}))
    assert list(agree({"mean": one}, {"mean": other}))
    assert not list(agree({"mean": "1e-310"}, {"mean": "1.1e-310"}))


def test_deriving_keeps_neither_rows_nor_cells() -> None:
    """P-06: what twenty thousand cells come to that were not run is gone through row by row."""
    many = History([generation(edited(('"abba"', '"abba"\nblocks = 834')))]).opened()
    cells, account = enumerate_cells(many.manifest.protocol), many.account
    derive(many.manifest, final_rows(many.manifest, cells, account, {}), account)
    tracemalloc.start()
    found = derive(many.manifest, final_rows(many.manifest, cells, account, {}), account)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.cells == {"ok": 0, "failed": 0, "not_run": 20_016}
    assert found.reasons == {"not_run: pending": 20_016}
    assert peak < 100_000


def test_results_of_many_workloads_take_little_for_each_start() -> None:
    """P-12: two thousand workloads, each with three starts of an estimate, take some hundred bytes for each start."""
    levels = "".join(f'[[factors]]\nname = "f{n}"\nlevels = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]\n' for n in range(3))
    many = History([generation(appended(levels, to=edited(('"abba"', '"listed"'))))]).opened()
    cells, account = enumerate_cells(many.manifest.protocol), many.account
    tracemalloc.start()
    found = derive(many.manifest, final_rows(many.manifest, cells, account, {}), account)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [len(found.estimates), len(found.hypotheses[0].components)] == [2000, 2000]
    assert found.estimates[-1].starts[-1].reason == "c011998: pending"
    assert peak < 2000 * 3 * 500

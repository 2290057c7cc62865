"""Gates beside what was seen: the demand as its author wrote it, and the range of all values."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from capsule.core.protocol import Gate
from capsule.steps.judged import judged
from capsule.steps.limits import HEAD, demand, gate_rows
from tests.conftest import Capsule

SUPPORTED = Path(__file__).parents[1] / "golden" / "supported.capsule"
GATE = {"name": "g", "observation": "loss", "on_failure": "record"}


@pytest.mark.parametrize(
    ("rule", "limit", "words"),
    [("at_most", "1e-6", "loss at most 1e-6"), ("above", "0", "loss above 0"), ("finite", None, "loss finite")],
)
def test_a_demand_is_said_in_words(rule: str, limit: str | None, words: str) -> None:
    """The limit stands as it was written, never rounded."""
    assert demand(Gate.model_validate({**GATE, "rule": rule, "limit": limit})) == words


@pytest.mark.parametrize(
    ("ends", "seen"),
    [
        ((("1.5", "20.0"), ("-3.0", "7.0")), "-3 to 20"),
        ((("7.25", "7.25"),), "7.25"),
        ((("1.0", "2.0"), ("nan", "nan")), "not all are numbers"),
        ((("-inf", "2.0"),), "-inf to 2"),
        ((), "none"),
    ],
)
def test_the_values_seen_are_those_of_all_arms(ends: tuple[tuple[str, str], ...], seen: str) -> None:
    """Least and greatest value of the gate's observation over all arms and workloads; of other columns nothing."""
    found = judged(SUPPORTED)
    assert found.manifest is not None
    assert found.results is not None
    one = found.results.summaries[0]
    summaries = [one.model_copy(update={"minimum": low, "maximum": high}) for low, high in ends]
    other = one.model_copy(update={"observation": "seconds", "minimum": "-1e9"})
    results = found.results.model_copy(update={"summaries": (*summaries, other)})
    ((name, demanded, values, *counts),) = gate_rows(found.manifest.protocol, results)
    assert (name, demanded, values, counts) == ("positive", "amount above 0", seen, ["8", "0", "0"])


def test_report_and_replay_show_limits_beside_values(capsule: Capsule) -> None:
    """Both print the same row, under the same head."""
    row = ["positive", "amount above 0", "10.1 to 20.44", "8", "0", "0"]
    report = capsule("report", SUPPORTED).out
    assert f"| {' | '.join(HEAD)} | failed cells |" in report
    assert f"| {' | '.join(row)} |" in report
    lines = [re.split(r"\s{2,}", line) for line in capsule("replay", SUPPORTED).out.splitlines()]
    assert row in lines
    assert list(HEAD) in lines

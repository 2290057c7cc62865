"""docs/fault-table.md, by which readers check us: every row is there, and every test that it names."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs/fault-table.md"
PARTS = {"A": 7, "B": 4, "C": 6, "D": 15, "E": 7, "F": 6, "R": 13}
"""How many rows each part has; R are the rules that hold in every row."""
ROWS: dict[str, list[str]] = {
    row[0]: re.findall(r"`([a-z]+/test_\w+\.py::test_\w+)`", row[4])
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines()
    if re.match(r"\| [A-Z][0-9]+ \|", line) and len(row := [cell.strip() for cell in line.split("|")[1:-1]]) == 6
}


@cache
def functions(file: str) -> frozenset[str]:
    """The test functions of one file."""
    body = ast.parse((ROOT / "tests" / file).read_bytes()).body
    return frozenset(node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"))


def test_every_row_is_there() -> None:
    assert list(ROWS) == [f"{part}{number}" for part, count in PARTS.items() for number in range(1, count + 1)]


@pytest.mark.parametrize("row", ROWS)
def test_every_row_is_shown_by_tests_that_exist(row: str) -> None:
    assert [name for name in ROWS[row] if not name.startswith("gpu/")], "a row needs a test that runs without a GPU"
    missing = [name for name in ROWS[row] if name.partition("::")[2] not in functions(name.partition("::")[0])]
    assert missing == []


def test_every_test_of_whole_attempts_on_fake_devices_is_of_a_row() -> None:
    file = "host/test_fault_devices.py"
    others = {
        "test_a_driver_may_take_half_a_minute_before_the_start_and_no_more",
        "test_of_two_attempts_back_to_back_both_are_exclusive",
        "test_time_in_which_a_device_settles_is_observed_however_long",
        "test_time_in_which_a_driver_says_what_a_trial_sees_is_observed",
        "test_utilization_that_does_not_settle_labels_all_of_the_attempt",
    }
    named = {name.partition("::")[2] for names in ROWS.values() for name in names if name.startswith(f"{file}::")}
    assert functions(file) == named | others

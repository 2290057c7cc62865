"""Trials that misbehave: each is charged, named and kept, and its capsule is still intact and honest about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.conftest import Capsule
from tests.study import make_command_study, make_study

HEAD = "import os, sys, time, subprocess, math, json\n"


def run_and_pack(capsule: Capsule, protocol: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Take a study the whole way; returns its status and its verdict."""
    assert capsule("freeze", protocol).code == 0
    said = capsule("run", protocol)
    assert said.code == 0, said
    assert capsule("pack", protocol).code == 0
    verdict = capsule("verify", protocol.with_suffix(".capsule"), "--json")
    status: dict[str, Any] = json.loads(capsule("status", protocol, "--json").out)
    return status, json.loads(verdict.out)


def outcomes(status: dict[str, Any]) -> set[str]:
    return {attempt["outcome"] for attempt in status["attempts"]}


def test_a_trial_that_raises_fails_its_cells_only(capsule: Capsule, tmp_path: Path) -> None:
    """An exception fails the cell it happened in; the others have their rows, and the estimate is withheld."""
    trial = HEAD + (
        "def measure(cell):\n"
        "    if cell.position == 2:\n        raise ValueError('no such luck')\n"
        "    return {'amount': float(cell.parameters['factor']), 'seconds': 0.0}\n"
    )
    status, verdict = run_and_pack(capsule, make_study(tmp_path / "s", trial=trial))
    assert status["cells"] == {"ok": 6, "failed": 2, "not_run": 0}
    assert outcomes(status) == {"trial_error"}
    assert "no such luck" in status["attempts"][0]["evidence"]
    assert (verdict["integrity"], verdict["outcome"]) == ("intact", "inconclusive")


def test_processes_that_end_early_fail_their_cells(capsule: Capsule, tmp_path: Path) -> None:
    """A process without its end record gives no final rows; every cell of it is failed with the class, and charged."""
    trial = HEAD + (
        "ends = {\n"
        "    1: lambda: os._exit(11), 2: lambda: os.kill(os.getpid(), 11), 3: lambda: sys.exit(0),\n"
        "    4: lambda: time.sleep(60),\n"
        "}\n"
        "def measure(cell):\n    if cell.position == 1:\n        ends[cell.seed]()\n"
        "    return {'amount': 1.0, 'seconds': 0.0}\n"
    )
    changes = {"wall_limit_seconds = 15": "wall_limit_seconds = 3", "seeds = [1, 2]": "seeds = [1, 2, 3, 4]"}
    status, verdict = run_and_pack(capsule, make_study(tmp_path / "s", trial=trial, changes=changes))
    attempts = sorted(status["attempts"], key=lambda attempt: attempt["process"])
    assert [attempt["outcome"] for attempt in attempts] == ["exit_nonzero", "signalled", "incomplete", "wall_limit"]
    for attempt, words in zip(attempts, ("11", "SIGSEGV", "rows", "3 s since the lease"), strict=True):
        assert words in attempt["evidence"]
        assert attempt["charge"]["observed"]
        assert attempt["held_ms"] == attempt["charge"]["debited_ms"] > 0
    assert attempts[3]["held_ms"] >= 3_000
    assert status["cells"] == {"ok": 0, "failed": 16, "not_run": 0}
    assert verdict["integrity"] == "intact"


def test_a_child_that_outlives_its_trial_is_found_and_named(capsule: Capsule, tmp_path: Path) -> None:
    """A daemon left behind is ended and charged, and the attempt is not plain ok; the one without is."""
    trial = HEAD + (
        "def measure(cell):\n"
        "    if (cell.position, cell.seed) == (0, 1):\n"
        "        subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
        "    return {'amount': 1.0, 'seconds': 0.0}\n"
    )
    status, verdict = run_and_pack(capsule, make_study(tmp_path / "s", trial=trial))
    held = {attempt["outcome"]: attempt["held_ms"] for attempt in status["attempts"]}
    assert held.keys() == {"leaked_descendants", "completed"}
    assert held["leaked_descendants"] >= 1_000, "the second in which helpers may end by themselves is charged"
    assert verdict["integrity"] == "intact"


def test_fifty_megabytes_of_output_are_capped_with_a_counted_gap(capsule: Capsule, tmp_path: Path) -> None:
    """Output beyond the limit is counted, its beginning and end kept."""
    trial = HEAD + (
        "def measure(cell):\n"
        "    if (cell.position, cell.seed) == (0, 1):\n"
        "        print('first'); sys.stdout.write('x' * 50_000_000); print('last', flush=True)\n"
        "    return {'amount': 1.0, 'seconds': 0.0}\n"
    )
    protocol = make_study(
        tmp_path / "s", trial=trial, changes={"device_seconds = 200": "device_seconds = 200\noutput_bytes_max = 100000"}
    )
    status, _ = run_and_pack(capsule, protocol)
    assert outcomes(status) == {"completed"}
    (name,) = (attempt["attempt"] for attempt in status["attempts"] if attempt["process"] == 0)
    out = capsule("show", protocol.with_suffix(".capsule"), f"3-attempts/{name}/stdout").out
    assert out.startswith("first")
    assert out.rstrip().endswith("last")
    assert len(out) < 101_000
    assert "bytes left out here" in out


def test_nan_and_infinities_keep_their_bits_and_pass_no_gate(capsule: Capsule, tmp_path: Path) -> None:
    """Non-finite values are records like others; a NaN fails every gate."""
    trial = HEAD + (
        "def measure(cell):\n"
        "    amount = [math.nan, math.inf, -0.0, 5e-324][cell.position]\n"
        "    return {'amount': amount, 'seconds': 0.0}\n"
    )
    protocol = make_study(tmp_path / "s", trial=trial)
    status, verdict = run_and_pack(capsule, protocol)
    assert status["cells"]["ok"] == 8
    assert verdict["integrity"] == "intact"
    assert verdict["outcome"] == "refuted"
    results = json.loads(capsule("show", protocol.with_suffix(".capsule"), "7-results/results.json").out)
    assert (results["gates"][0]["passed"], results["gates"][0]["failed"]) == (4, 4)


UNPLANNED = [
    '{"cell": "c999999", "amount": 1.0, "seconds": 0.0}',
    '{"amount": 1.0, "seconds": 0.0}\n{"amount": 1.0, "seconds": 0.0}',
    '{"amount": "many", "seconds": 0.0}',
    '{"amount": 1.0, "seconds": 0.0, "colour": "red"}',
    "not json",
]
"""A row for another cell, a second row, a wrong type, an unknown column, and what is no row."""


def test_rows_that_were_not_planned_are_bad_records(capsule: Capsule, tmp_path: Path) -> None:
    """Whatever is wrong with a row, its attempt fails as bad_records, and the others keep theirs."""
    lines = UNPLANNED + ['{"amount": 1.0, "seconds": 0.0}'] * 3
    script = (
        f"import os\nline = {lines!r}[int(os.environ['CAPSULE_CELL'][1:])]\n"
        "open(os.environ['CAPSULE_RECORDS'], 'a').write(line + '\\n')\n"
    )
    protocol = make_command_study(tmp_path / "s", '["python", "trial.py"]', script=script)
    status, verdict = run_and_pack(capsule, protocol)
    ended = {attempt["process"]: attempt["outcome"] for attempt in status["attempts"]}
    assert [ended[process] for process in range(8)] == ["bad_records"] * 5 + ["completed"] * 3
    assert status["cells"] == {"ok": 3, "failed": 5, "not_run": 0}
    assert verdict["integrity"] == "intact"


def test_a_plain_command_works_beside_python(capsule: Capsule, tmp_path: Path) -> None:
    """A script that knows nothing but `record` gets reservation, charging, records and a capsule."""
    script = (
        "import argparse, os, json\nfrom capsule import record\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--seed', type=int)\nparser.add_argument('--factor', type=int)\n"
        "given = parser.parse_args()\nassert str(given.seed) == os.environ['CAPSULE_SEED']\n"
        "record(amount=float(given.factor), seconds=0.0)\n"
    )
    command = '["python", "trial.py", "--seed", "{seed}", "--factor", "{parameters.factor}"]'
    status, verdict = run_and_pack(capsule, make_command_study(tmp_path / "s", command, script=script))
    assert status["cells"] == {"ok": 8, "failed": 0, "not_run": 0}
    assert (verdict["integrity"], verdict["outcome"]) == ("intact", "supported")


def test_a_missing_program_is_charged_and_named(capsule: Capsule, tmp_path: Path) -> None:
    """A command that cannot be executed fails as exec_failed."""
    protocol = make_command_study(tmp_path / "s", '["no-such-program"]', script="")
    status, _ = run_and_pack(capsule, protocol)
    assert outcomes(status) == {"exec_failed"}
    assert all(attempt["charge"]["observed"] for attempt in status["attempts"])
    assert all("no-such-program" in attempt["evidence"] for attempt in status["attempts"])


def test_retries_are_those_of_the_protocol(capsule: Capsule, tmp_path: Path) -> None:
    """A failure class with retries is tried again, whole, and only so often."""
    marker = tmp_path / "marker"
    trial = HEAD + (
        f"def measure(cell):\n    marker = {str(marker)!r} + str(cell.seed)\n"
        "    if cell.position == 1 and not os.path.exists(marker):\n        open(marker, 'w'); os._exit(3)\n"
        "    return {'amount': float(cell.parameters['factor']), 'seconds': 0.0}\n"
    )
    protocol = make_study(tmp_path / "s", trial=trial, changes={"[retry]": "[retry]\nexit_nonzero = 1"})
    status, verdict = run_and_pack(capsule, protocol)
    assert [a["outcome"] for a in status["attempts"]] == ["exit_nonzero", "completed"] * 2
    assert status["cells"]["ok"] == 8
    assert verdict["integrity"] == "intact"


def test_a_gate_that_stops_ends_the_run_and_says_so(capsule: Capsule, tmp_path: Path) -> None:
    """After a stop gate failed nothing more is started, and what is left is not_run with that reason."""
    trial = "def measure(cell):\n    return {'amount': 0.0, 'seconds': 0.0}\n"
    protocol = make_study(tmp_path / "s", trial=trial, changes={'on_failure = "exclude"': 'on_failure = "stop"'})
    assert capsule("freeze", protocol).code == 0
    said = capsule("run", protocol, "--json")
    assert said.code == 4
    assert "positive" in json.loads(said.out)["stopped"]
    assert json.loads(said.out)["cells"] == {"ok": 4, "failed": 0, "not_run": 4}
    assert capsule("pack", protocol).code == 0
    results = json.loads(capsule("show", protocol.with_suffix(".capsule"), "7-results/results.json").out)
    assert results["reasons"] == {"not_run: gate": 4}
    assert capsule("verify", protocol.with_suffix(".capsule")).code == 0


def test_budget_exhausted_is_a_clear_refusal(capsule: Capsule, tmp_path: Path) -> None:
    """When the worst case no longer fits, the run is refused, the rest is not_run, and the capsule is intact."""
    protocol = make_study(tmp_path / "s", changes={"device_seconds = 200": "device_seconds = 17.001"})
    assert capsule("freeze", protocol).code == 0
    said = capsule("run", protocol)
    assert said.code == 4
    assert "budget" in said.out
    assert capsule("pack", protocol).code == 0
    verdict = json.loads(capsule("verify", protocol.with_suffix(".capsule"), "--json").out)
    assert (verdict["integrity"], verdict["outcome"]) == ("intact", "inconclusive")
    results = json.loads(capsule("show", protocol.with_suffix(".capsule"), "7-results/results.json").out)
    assert results["reasons"] == {"not_run: budget": 4}


def test_a_value_outside_its_declared_range_is_no_record(capsule: Capsule, tmp_path: Path) -> None:
    """What a protocol says a value can be, it is: a negative time is a bad record."""
    trial = "def measure(cell):\n    return {'amount': 1.0, 'seconds': -5.0}\n"
    status, _ = run_and_pack(capsule, make_study(tmp_path / "s", trial=trial))
    assert outcomes(status) == {"bad_records"}
    assert "seconds" in status["attempts"][0]["evidence"]


def test_a_trial_that_writes_into_its_snapshot_is_found_and_the_next_runs(capsule: Capsule, tmp_path: Path) -> None:
    """A changed snapshot fails the attempt that changed it; the next one gets the frozen files again."""
    trial = HEAD + (
        "def measure(cell):\n"
        "    if cell.seed == 1:\n        open(os.path.join(cell.source_root, 'litter.txt'), 'w').write('x')\n"
        "    return {'amount': 1.0, 'seconds': 0.0}\n"
    )
    status, verdict = run_and_pack(capsule, make_study(tmp_path / "s", trial=trial))
    assert [a["outcome"] for a in status["attempts"]] == ["source_changed", "completed"]
    assert verdict["integrity"] == "intact"

"""The module that runs inside trials: what it writes is what the core reads, whatever a trial does."""

import json
import math
import os
import struct
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from capsule import guest
from capsule import record as public_record
from capsule.core.protocol import Observation
from capsule.core.record import float_bits, read_journal

GUEST = Path(guest.__file__)


def columns(**types: str) -> list[Observation]:
    return [
        Observation.model_validate({"name": name, "type": kind, "optional": True, "replay": {"rule": "exact"}})
        for name, kind in types.items()
    ]


class Scalar:
    """A value of one element as NumPy and torch have them."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def item(self) -> Any:
        if len(self.values) != 1:
            raise ValueError("only one element tensors can be converted to Python scalars")
        return self.values[0]


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "journal.jsonl"
    monkeypatch.setenv("CAPSULE_RECORDS", str(path))
    monkeypatch.delenv("CAPSULE_CELL", raising=False)
    return path


def double(bits: str) -> float:
    value: float = struct.unpack(">d", bytes.fromhex(bits))[0]
    return value


@pytest.mark.parametrize(
    "bits",
    ["7ff8000000000000", "fff8000000000000", "7ff8000000000001", "7ff0000000000000", "fff0000000000000",
     "8000000000000000", "0000000000000000", "0000000000000001", "7fefffffffffffff", "3fb999999999999a",
     "4340000000000001", "c34fffffffffffff"],
)  # fmt: skip
def test_every_bit_of_a_float_survives(journal: Path, bits: str) -> None:
    guest.record("c0", x=double(bits))
    row = read_journal(journal.read_bytes(), columns(x="float64"), ["c0"]).rows["c0"]
    value = row.values["x"]
    assert value is not None
    assert float_bits(value, "float64")[::-1].hex() == bits


@pytest.mark.parametrize("value", [0, -1, 2**53 - 1, 2**53, 2**63 - 1, -(2**63), 2**64 - 1])
def test_integers_survive(journal: Path, value: int) -> None:
    guest.record("c0", n=value)
    kind = "uint64" if value > 2**63 - 1 else "int64"
    row = read_journal(journal.read_bytes(), columns(n=kind), ["c0"]).rows["c0"]
    assert int(row.values["n"] or 0) == value


def test_booleans_text_none_and_scalars_of_libraries(journal: Path) -> None:
    public_record("c0", b=True, t="ü \n", nothing=None, s=Scalar(2.5), i=Scalar(7))
    kinds = columns(b="bool", t="text", nothing="float64", s="float32", i="int64")
    row = read_journal(journal.read_bytes(), kinds, ["c0"]).rows["c0"]
    assert row.values == {"b": True, "t": "ü \n", "nothing": None, "s": 2.5, "i": 7}


@pytest.mark.parametrize("value", [[1.0], {"a": 1}, b"x", 1j, Scalar(1.0, 2.0), object()])
def test_other_values_are_refused_by_name_and_nothing_is_written(journal: Path, value: Any) -> None:
    with pytest.raises(TypeError, match="loss: expected"):
        guest.record("c0", loss=value)
    assert not journal.exists()


@pytest.mark.parametrize(
    ("observations", "words"),
    [({"end": True}, "end record"), ({"t": "x" * 10_001}, "at most 10000"), ({"t": "\ud800"}, "lone surrogate"),
     ({f"t{i}": "x" * 10_000 for i in range(110)}, "at most 1048576 bytes")],
)  # fmt: skip
def test_rows_that_no_reader_would_take_are_refused(journal: Path, observations: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        guest.record("c0", **observations)
    assert not journal.exists()


def test_a_command_s_rows_are_named_by_its_cell(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAPSULE_CELL", "c000004")
    guest.record(x=1.5)
    assert json.loads(journal.read_text()) == {"cell": "c000004", "x": 1.5}


def test_outside_a_run_rows_go_to_stderr_with_one_note() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CAPSULE_")}
    code = "from capsule import record; record(x=float('nan')); record(x=2)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=GUEST.parent.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == ""
    assert done.stderr.count("capsule: note:") == 1
    assert done.stderr.splitlines()[1:] == ['{"x":"NaN"}', '{"x":2}']


def test_lines_of_several_processes_never_mix(journal: Path) -> None:
    code = "import sys; from capsule.guest import record\nfor i in range(300): record(f'c{i}', t=sys.argv[1] * 3000)"
    writers = [
        subprocess.Popen([sys.executable, "-c", code, letter], cwd=GUEST.parent.parent) for letter in ("a", "b", "c")
    ]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    rows = [json.loads(line) for line in journal.read_text().splitlines()]
    assert len(rows) == 900
    assert {len(set(row["t"])) for row in rows} == {1}


def test_a_full_disk_is_an_error_not_a_lost_row(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAPSULE_RECORDS", "/dev/full")
    with pytest.raises(OSError, match="No space"):
        guest.record("c0", x=1)


def test_importing_costs_the_standard_library_only() -> None:
    code = "import sys; before = set(sys.modules); import capsule.guest; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=GUEST.parent.parent, capture_output=True, text=True, check=True
    )
    added = {name.partition(".")[0] for name in done.stdout.split()}
    assert added - set(sys.stdlib_module_names) == {"capsule"}


# The loop over cells.


def run_task(tmp_path: Path, modules: dict[str, str], trials: list[str]) -> tuple[Any, str, list[dict[str, Any]]]:
    """Run a task in its own process; return the journal as the core reads it, stderr, and the imports."""
    root = tmp_path / "sources"
    root.mkdir()
    for name, source in modules.items():
        (root / name).write_text(source)
    cells = [
        {"cell": f"c{i}", "arm": "a", "trial": trial, "parameters": {"lr": 0.1}, "workload": {"n": 3}, "seed": 5,
         "start": 0, "block": 1, "position": i, "source_root": str(root)}
        for i, trial in enumerate(trials)
    ]  # fmt: skip
    task = {
        "attempt": "a000001", "device": "cpu", "cells": cells,
        "records": str(tmp_path / "journal.jsonl"), "imports": str(tmp_path / "imports.jsonl"),
    }  # fmt: skip
    (tmp_path / "task.json").write_text(json.dumps(task))
    done = subprocess.run(
        [sys.executable, str(GUEST), str(tmp_path / "task.json")], cwd="/", capture_output=True, text=True, check=False
    )
    data = (tmp_path / "journal.jsonl").read_bytes()
    imports = tmp_path / "imports.jsonl"
    lines = [json.loads(line) for line in imports.read_text().splitlines()] if imports.exists() else []
    read = read_journal(data, columns(x="float64", t="text"), [cell["cell"] for cell in cells])
    return (read, done.returncode), done.stderr, lines


GOOD = "from helper import value\ndef f(cell):\n    return {'x': value + cell.parameters['lr'], 't': repr(cell)}\n"


def test_each_cell_is_called_once_in_order_and_recorded(tmp_path: Path) -> None:
    modules = {"good.py": GOOD, "helper.py": "value = 2\nprint('imported')\n"}
    (journal, status), _, imports = run_task(tmp_path, modules, ["good:f", "good:f"])
    assert status == 0
    assert journal.ended
    assert [row.values["x"] for row in journal.rows.values()] == [2.1, 2.1]
    words = journal.rows["c1"].values["t"]
    assert words.startswith(
        "Cell(id='c1', arm='a', parameters={'lr': 0.1}, workload={'n': 3}, seed=5, start=0, block=1"
    )
    files = {item["module"]: item for item in imports}
    assert files["helper"]["file"] == str(tmp_path / "sources/helper.py")
    assert files["helper"]["sha256"].startswith("sha256:")
    assert files["json"]["file"].endswith("json/__init__.py")


def test_an_error_is_the_row_of_its_cell_and_the_next_still_runs(tmp_path: Path) -> None:
    source = (
        "class Odd(Exception): pass\n"
        "def f(cell): raise Odd('[{' * 100 + '\\ud800')\n"
        "def g(cell): return [1]\n"
        "def h(cell): return {'x': object()}\n"
        "def i(cell): return {'cell': 'c9'}\n"
        "def good(cell): return {'x': 1}\n"
        "number = 3\n"
    )
    trials = ["m:f", "m:g", "m:h", "m:i", "m:number", "m:missing", "absent:f", "m:good"]
    (journal, status), stderr, _ = run_task(tmp_path, {"m.py": source}, trials)
    assert status == 0
    assert journal.ended
    assert journal.faults == []
    errors = {cell: json.loads(row.error) if row.error else None for cell, row in journal.rows.items()}
    types = [error and error["type"] for error in errors.values()]
    expected = [
        "m.Odd",
        "TypeError",
        "TypeError",
        "TypeError",
        "TypeError",
        "AttributeError",
        "ModuleNotFoundError",
        None,
    ]
    assert types == expected
    assert "a mapping of observations, found a list" in errors["c1"]["message"]
    assert "a boolean, number, text or None, found a object" in errors["c2"]["message"]
    assert "Traceback" in stderr
    assert "Odd" in stderr


def test_a_trial_that_exits_leaves_no_end_record(tmp_path: Path) -> None:
    source = "import sys\ndef good(cell): return {'x': 1}\ndef leave(cell): sys.exit(0)\n"
    (journal, status), _, imports = run_task(tmp_path, {"m.py": source}, ["m:good", "m:leave", "m:good"])
    assert status == 0
    assert not journal.ended
    assert list(journal.rows) == ["c0"]
    assert imports == []


def test_the_tool_s_own_folder_is_not_importable(tmp_path: Path) -> None:
    source = "def f(cell):\n    import guest\n"
    (journal, _), _, _ = run_task(tmp_path, {"m.py": source}, ["m:f"])
    assert "No module named 'guest'" in journal.rows["c0"].error


def test_negative_zero_and_infinities_are_written_by_name() -> None:
    assert [guest.encode("x", value) for value in (-0.0, 0.0, math.inf, -math.inf)] == [
        "-0",
        0.0,
        "Infinity",
        "-Infinity",
    ]


def test_a_module_made_by_a_library_has_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module whose `__file__` is a bare name that leads nowhere was loaded from no file."""
    made = types.ModuleType("made")
    made.__file__ = "_made.py"
    monkeypatch.setitem(sys.modules, "made", made)
    reported = {item["module"] for item in guest.imported_modules()}
    assert "made" not in reported
    assert "json" in reported

"""Composing an order: what a trial is told, and what is refused before anything is reserved or started."""

import json
import sys
from pathlib import Path

import pytest

from capsule.core.errors import MachineError, UsageError
from capsule.core.plan import enumerate_cells
from capsule.host.launch import LaunchOrder, announce, command_line, python_task
from capsule.host.supervision import start
from tests.host.conftest import Bench, protocol_of


def line(*command: str) -> tuple[str, ...]:
    protocol = protocol_of(
        command=list(command),
        parameters={"lr": {"decimal": "1e-3"}, "on": True, "sizes": [1, 2], "name": "a b", "k": 3},
    )
    return command_line(protocol, enumerate_cells(protocol)[0], device="cpu")[0]


def test_placeholders_are_filled_in_as_their_author_wrote_them() -> None:
    command = ["run", "{parameters.lr}", "--{parameters.name}={parameters.k}", "{parameters.on}{parameters.sizes}"]
    assert line(*command) == ("run", "1e-3", "--a b=3", "true[1, 2]")


@pytest.mark.parametrize(
    "text", ["${seed}", "{}", '{"seed": 1}', "{SEED}", "{os.getpid()}", "{ seed }", "a{1}", "{workload.}"]
)
def test_other_braces_are_left_alone(text: str) -> None:
    assert line("run", text) == ("run", text)


def test_doubled_braces_stand_for_themselves() -> None:
    assert line("awk", "{{print}}", "{{seed}}") == ("awk", "{print}", "{seed}")


@pytest.mark.parametrize("text", ["{sede}", "--x={parameters.missing}", "{print}"])
def test_an_unknown_placeholder_is_an_error_with_a_way_out(text: str) -> None:
    with pytest.raises(UsageError, match="expected a placeholder that is one of cell, arm") as unknown:
        line("run", text)
    assert "{{" in (unknown.value.hint or "")


def test_python_is_the_interpreter_that_runs_capsule() -> None:
    assert line("python", "x.py")[0] == line("python3", "x.py")[0] == sys.executable
    assert line("/usr/bin/python3", "x.py")[0] == "/usr/bin/python3"


def test_a_task_names_every_cell_with_plain_numbers() -> None:
    protocol = protocol_of(trial="m:f", parameters={"lr": {"decimal": "0.1"}})
    cells = enumerate_cells(protocol)[:2]
    task = python_task(protocol, cells, attempt="a000001", device="cpu", root=Path("/src"), attempt_dir=Path("/at"))
    assert json.loads(json.dumps(task)) == task
    assert task["cells"][1] == {
        "cell": "c000001", "arm": "only", "trial": "m:f", "parameters": {"lr": 0.1}, "workload": {"n": 3}, "seed": 7,
        "start": 0, "block": 1, "position": 0, "source_root": "/src",
    }  # fmt: skip


def test_an_order_is_read_back_as_it_was_written(bench: Bench) -> None:
    order = bench.order(protocol_of(command=["true"], wall_limit_seconds="1.5"))
    assert LaunchOrder.from_bytes(order.to_bytes(), "order") == order
    assert order.limits.wall_ms == 1_500
    assert order.cells == bench.process(protocol_of(command=["true"])).cells


def test_an_attempt_s_folder_that_cannot_be_made_is_an_error_of_the_machine(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="cannot be written"):
        announce(tmp_path / "file/a000001")


def test_an_order_that_cannot_be_written_starts_nothing(bench: Bench) -> None:
    order = bench.order(protocol_of(command=["true"]))
    (bench.attempts / order.attempt / "order.json").mkdir()
    with pytest.raises(MachineError, match="cannot be started"):
        start(order)

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.checkpoints import make_ouro_demo
from experiments.exactness import FP32_GATE
from experiments.schedules import SCHEDULES, Schedule
from experiments.trials import gradient_step, inputs
from experiments.trials.gradient_step import trial
from experiments.trials.inputs import CellError

ROOT = Path(__file__).parents[2]
LOSS_ERROR_MAX = 2e-6
UPDATE_ERROR_MAX = 2e-6


@dataclass(frozen=True)
class FakeCell:
    arm: str = "baseline"
    parameters: dict[str, Any] = field(default_factory=lambda: {"schedule": "full-packed", "microbatch": 4})
    workload: dict[str, Any] = field(
        default_factory=lambda: {
            "prompt": 24,
            "response": 4,
            "responses": 8,
            "checkpoint": "experiments/checkpoints/ouro-demo",
            "dtype": "float32",
            "supervision": "all-loops",
        }
    )
    seed: int = 31
    start: int = 0
    block: int = 0
    position: int = 0
    id: str = "cell"
    source_root: Path = ROOT
    device: str = "cpu"

    def but(self, **changes):
        """Return the same cell with some workload or parameter values changed."""
        return replace(
            self,
            workload={key: changes.get(key, value) for key, value in self.workload.items()},
            parameters={key: changes.get(key, value) for key, value in self.parameters.items()},
        )


def results(observations):
    return {name: value for name, value in observations.items() if name != "update_seconds"}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("supervision", ["all-loops", "terminal-only"])
@pytest.mark.parametrize("shape", [(24, 4, 8), (4, 16, 3), (3, 1, 1)])
def test_every_schedule_passes_the_gates(schedule, supervision, shape):
    """fp32 against the fp64 oracle: loss, whole gradient, worst tensor, elements and the SGD update."""
    prompt, response, responses = shape
    cell = FakeCell().but(
        schedule=schedule, supervision=supervision, prompt=prompt, response=response, responses=responses
    )
    found = trial(cell)
    assert found["loss_error"] <= LOSS_ERROR_MAX
    assert found["gradient_relative_l2"] <= FP32_GATE.whole_max
    assert found["worst_tensor_relative_l2"] <= FP32_GATE.worst_tensor_max
    assert found["gradient_element_excess"] <= 1
    assert found["update_max_abs_error"] <= UPDATE_ERROR_MAX
    assert found["update_norm"] > 1e-3
    assert found["update_seconds"] > 0


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("checkpoint", ["nanbeige-tiny", "huginn-tiny"])
def test_any_familys_checkpoint_can_be_tried(schedule, checkpoint):
    folder = f"tests/experiments/reference/{checkpoint}"
    found = trial(FakeCell().but(schedule=schedule, checkpoint=folder, prompt=12))
    assert found["loss_error"] <= LOSS_ERROR_MAX
    assert found["gradient_relative_l2"] <= FP32_GATE.whole_max
    assert found["worst_tensor_relative_l2"] <= FP32_GATE.worst_tensor_max
    assert found["update_max_abs_error"] <= UPDATE_ERROR_MAX


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_fp64_trial_equals_its_oracle(schedule):
    found = trial(FakeCell().but(schedule=schedule, dtype="float64"))
    assert found["gradient_relative_l2"] <= 1e-12
    assert found["worst_tensor_relative_l2"] <= 1e-11
    assert found["loss_error"] <= 1e-13


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_cell_computed_again_in_a_fresh_process_state_is_the_same(schedule):
    """Everything but the time is a function of the cell: repeated, after other arms, and with cold caches."""
    cell = FakeCell().but(schedule=schedule)
    first = results(trial(cell))
    for other in ("full-packed", "prefix-packed"):
        trial(FakeCell().but(schedule=other, microbatch=3))
    again = results(trial(replace(cell, start=2, block=1, position=3, id="other")))
    gradient_step._prepared.cache_clear()
    gradient_step._warm_up.cache_clear()
    assert first == again == results(trial(cell))


def test_another_seed_is_another_group():
    assert trial(FakeCell())["loss"] != trial(replace(FakeCell(), seed=32))["loss"]


def test_memory_is_not_reported_where_it_is_not_measured():
    assert "peak_bytes" not in trial(FakeCell())


def test_the_parameters_are_put_back_even_after_a_failure(monkeypatch):
    """A schedule that breaks half-way leaves nothing behind for the next cell."""
    first = results(trial(FakeCell()))

    def broken(model, group, weights, objective, *, microbatch):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
            parameter.data.add_(1)
        raise ArithmeticError

    arm = gradient_step.Arm("full-packed", 4)
    setting = inputs.parse_setting(FakeCell().workload, 31, ROOT, "cpu")
    monkeypatch.setattr(gradient_step, "SCHEDULES", {"full-packed": broken})
    with pytest.raises(ArithmeticError):
        gradient_step._observe(setting, gradient_step._prepared(setting), arm)
    monkeypatch.undo()
    assert results(trial(FakeCell())) == first


def test_a_wrong_gradient_shows(monkeypatch):
    """Negative control: a schedule off by a thousandth fails both gradient gates, and one of zero the update's."""

    def scaled(factor: float) -> Schedule:
        def schedule(model, group, weights, objective, *, microbatch):
            loss = SCHEDULES["full-packed"](model, group, weights, objective, microbatch=microbatch)
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
            return loss

        return schedule

    wrong = {"full-packed": scaled(1.001), "nothing": scaled(0.0)}
    monkeypatch.setattr(gradient_step, "SCHEDULES", wrong)
    found = trial(FakeCell())
    assert found["gradient_relative_l2"] == pytest.approx(1e-3, rel=1e-2)
    assert found["worst_tensor_relative_l2"] > FP32_GATE.worst_tensor_max
    assert trial(FakeCell().but(schedule="nothing"))["update_norm"] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schedule": "magic"}, "schedule: expected one of full-serial, full-packed"),
        ({"microbatch": 0}, "microbatch: expected a positive integer"),
        ({"prompt": 0}, "prompt: expected a positive integer"),
        ({"responses": True}, "responses: expected a positive integer"),
        ({"dtype": "float16"}, "dtype: expected one of float32, float64"),
        ({"supervision": "some"}, "supervision: expected one of all-loops, terminal-only"),
        ({"checkpoint": "../elsewhere"}, "inside the sources"),
        ({"checkpoint": "/elsewhere"}, "inside the sources"),
    ],
)
def test_a_cell_that_makes_no_sense_is_refused_by_key(change, message):
    with pytest.raises(CellError, match=message):
        trial(FakeCell().but(**change))


def test_keys_are_exact():
    """A misspelt or missing key never falls back to a default."""
    with pytest.raises(CellError, match=r"workload: expected the keys .*, found .*extra"):
        trial(replace(FakeCell(), workload=FakeCell().workload | {"extra": 1}))
    with pytest.raises(CellError, match="parameters: expected the keys microbatch, schedule"):
        trial(replace(FakeCell(), parameters={"schedule": "full-packed"}))
    with pytest.raises(CellError, match="device: expected one of cpu, cuda"):
        trial(replace(FakeCell(), device="tpu"))


def test_the_demo_checkpoint_is_what_its_script_makes(tmp_path):
    """The committed bytes can be made again by anybody."""
    make_ouro_demo.write(tmp_path)
    committed = ROOT / "experiments/checkpoints/ouro-demo"
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / name).read_bytes() == (committed / name).read_bytes()

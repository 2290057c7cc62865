"""One training update of one schedule, timed, and judged against an fp64 oracle.

`trial` is called once per planned cell in a process that runs many cells. What depends only on workload, seed and
device is computed once a process; each arm runs once untimed before its first timed update. The timed region is
zeroing, forward, loss, the whole backward and the SGD step, between two device synchronisations. Afterwards the
parameters are put back, untimed, so that every cell starts from the same model. On a CPU one thread is used.

On a CPU everything but `update_seconds` is a function of the cell alone, so a replay can compute it again.
"""

import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from experiments import exactness
from experiments.schedules import SCHEDULES
from experiments.trials.inputs import (
    LEARNING_RATE,
    CellError,
    Inputs,
    Setting,
    count,
    parse_setting,
    prepare,
    refuse_other_keys,
)


class Cell(Protocol):
    """What this trial reads of a planned cell; its arm's name and its place in the plan change no result."""

    @property
    def parameters(self) -> Mapping[str, object]:
        """The arm's own: `schedule` and `microbatch` (the most responses that run at once)."""

    @property
    def workload(self) -> Mapping[str, object]:
        """`prompt`, `response`, `responses` (P, D, G), `checkpoint`, `dtype` and `supervision`."""

    @property
    def seed(self) -> int:
        """Seeds the tokens and rewards."""

    @property
    def source_root(self) -> Path:
        """The folder of the frozen sources, which `checkpoint` is relative to."""

    @property
    def device(self) -> str:
        """`cpu` or `cuda`."""


@dataclass(frozen=True, slots=True)
class Arm:
    """How to accumulate the gradient."""

    schedule: str
    microbatch: int


def trial(cell: Cell) -> dict[str, float | int | bool]:
    """Run one update and return its observations.

    - `update_seconds`: wall time of the timed region.
    - `loss`, and `loss_error`: its absolute distance from the oracle's.
    - `gradient_relative_l2`, `worst_tensor_relative_l2`, `gradient_element_excess`: see `exactness`.
    - `update_max_abs_error` against the oracle's SGD step, and `update_norm`, the L2 norm of the change.
    - `peak_bytes`, on CUDA only: the most that the update allocated beyond what was allocated when it began, so the
      model and cached inputs do not count. Left out on a CPU, where torch does not track allocations.

    Raises CellError for a cell that it cannot understand.
    """
    arm = _parse_arm(cell.parameters)
    setting = parse_setting(cell.workload, cell.seed, cell.source_root, cell.device)
    if setting.device == "cpu":
        torch.set_num_threads(1)
    inputs = _prepared(setting)
    _warm_up(setting, arm)
    return _observe(setting, inputs, arm)


@functools.cache
def _prepared(setting: Setting) -> Inputs:
    return prepare(setting)


@functools.cache
def _warm_up(setting: Setting, arm: Arm) -> None:
    """Run the arm once on this workload, so that lazy initialisation never falls into a timed region."""
    inputs = _prepared(setting)
    _timed_update(setting, inputs, arm)
    _restore(inputs)


def _parse_arm(parameters: Mapping[str, object]) -> Arm:
    refuse_other_keys("parameters", parameters, ("schedule", "microbatch"))
    schedule = str(parameters["schedule"])
    if schedule not in SCHEDULES:
        raise CellError(f"parameters schedule: expected one of {', '.join(SCHEDULES)}, found {schedule!r}")
    return Arm(schedule, count("parameters", parameters, "microbatch"))


def _observe(setting: Setting, inputs: Inputs, arm: Arm) -> dict[str, float | int | bool]:
    on_cuda = setting.device == "cuda"
    resident_bytes = 0
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
        resident_bytes = torch.cuda.memory_allocated()
    try:
        seconds, loss = _timed_update(setting, inputs, arm)
        peak_bytes = torch.cuda.max_memory_allocated() - resident_bytes if on_cuda else 0
        gradient = exactness.compare(exactness.gradients(inputs.model), inputs.oracle.gradient)
        update = exactness.compare_updates(_changes(inputs), inputs.oracle_update)
    finally:
        _restore(inputs)
    observations: dict[str, float | int | bool] = {
        "update_seconds": seconds,
        "loss": loss,
        "loss_error": abs(loss - inputs.oracle.loss),
        "gradient_relative_l2": gradient.whole,
        "worst_tensor_relative_l2": gradient.worst_tensor,
        "gradient_element_excess": gradient.element_excess,
        "update_max_abs_error": update.max_abs_error,
        "update_norm": update.norm,
    }
    if on_cuda:
        observations["peak_bytes"] = peak_bytes
    return observations


def _timed_update(setting: Setting, inputs: Inputs, arm: Arm) -> tuple[float, float]:
    """Return the seconds of one update and its loss; the parameters are left updated."""
    schedule = SCHEDULES[arm.schedule]
    trained = [parameter for parameter in inputs.model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=LEARNING_RATE)
    _synchronise(setting.device)
    began_ns = time.perf_counter_ns()
    optimizer.zero_grad(set_to_none=True)
    loss = schedule(inputs.model, inputs.group, inputs.weights, inputs.objective, microbatch=arm.microbatch)
    optimizer.step()
    _synchronise(setting.device)
    ended_ns = time.perf_counter_ns()
    return (ended_ns - began_ns) / 1e9, float(loss)


def _synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _changes(inputs: Inputs) -> dict[str, Tensor]:
    """Return how far each parameter has moved, subtracted in fp64."""
    return {
        name: parameter.detach().double() - inputs.initial[name].double()
        for name, parameter in inputs.model.named_parameters()
    }


def _restore(inputs: Inputs) -> None:
    """Put the parameters back and drop their gradients."""
    with torch.no_grad():
        for name, parameter in inputs.model.named_parameters():
            parameter.copy_(inputs.initial[name])
            parameter.grad = None

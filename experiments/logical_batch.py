"""The way in for a trainer: one call accumulates the gradient of a whole logical batch of groups."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from experiments.batch import Group
from experiments.contract import PLAIN, Options
from experiments.errors import ExperimentError
from experiments.family import LoopedModel
from experiments.objective import Loss
from experiments.plan import Plan, plan
from experiments.schedules import SCHEDULES


class UnknownScheduleError(ExperimentError):
    """No schedule has this name."""


class WeighedLoss(Loss, Protocol):
    """A loss that also knows what each token of a logical batch weighs."""

    def token_weights(self, lengths: Sequence[int]) -> tuple[Tensor, ...]:
        """Return one tensor [D] a response, over all responses of all groups in order."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Accumulated:
    """The detached loss of a logical batch, a scalar in fp64, and what each group shared in `prefix-packed`."""

    loss: Tensor
    plans: tuple[Plan, ...]


def accumulate(
    model: LoopedModel,
    groups: Sequence[Group],
    objective: WeighedLoss,
    *,
    schedule: str,
    microbatch: int,
    options: Options = PLAIN,
) -> Accumulated:
    """Add the gradient of a logical batch to the parameters' `.grad`; the optimizer steps afterwards, never before.

    Weights are computed once over all groups and sliced, so neither groups nor microbatches change the objective.
    """
    if schedule not in SCHEDULES:
        raise UnknownScheduleError(f"schedule: expected one of {', '.join(SCHEDULES)}, found {schedule!r}")
    device = model.head_VC.device
    weights = [part.to(device) for part in objective.token_weights([n for group in groups for n in group.lengths])]
    total, start = torch.zeros((), dtype=torch.float64, device=device), 0
    for group in groups:
        stop = start + len(group.responses)
        part = weights[start:stop]
        total += SCHEDULES[schedule](model, group, part, objective, microbatch=microbatch, options=options)
        start = stop
    plans = tuple(plan(model, group) for group in groups) if schedule == "prefix-packed" else ()
    return Accumulated(total, plans)

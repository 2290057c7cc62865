"""The way in for a trainer: one call accumulates the gradient of a whole logical batch of groups."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from experiments.batch import Group
from experiments.contract import PLAIN, Options, PolicyVersionError
from experiments.errors import ExperimentError
from experiments.family import LoopedModel
from experiments.objective import Loss, refuse_infinite, refuse_misshapen
from experiments.plan import Plan, plan
from experiments.schedules import SCHEDULES


class UnknownScheduleError(ExperimentError):
    """No schedule has this name."""


class ModelError(ExperimentError):
    """The model is none of a looped family, or is wrapped in another module."""


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
    Raises UnknownScheduleError, ModelError, PolicyVersionError where responses of any two groups were sampled by
    different versions, WeightError for weights that are not one finite [D] a response, and whatever the schedule
    refuses.
    """
    if schedule not in SCHEDULES:
        raise UnknownScheduleError(f"schedule: expected one of {', '.join(SCHEDULES)}, found {schedule!r}")
    if not isinstance(model, LoopedModel):
        raise ModelError(
            f"model: expected one that families.load gives, found {type(model).__name__}; of a wrapped one, hand in "
            "what it wraps"
        )
    groups, device = tuple(groups), model.head_VC.device
    _refuse_mixed_policies(groups, options)
    lengths = [length for group in groups for length in group.lengths]
    found = objective.token_weights(lengths)
    refuse_misshapen(found, lengths)
    refuse_infinite(found)
    weights = [slice_D.to(device) for slice_D in found]
    total, start = torch.zeros((), dtype=torch.float64, device=device), 0
    for group in groups:
        stop = start + len(group.responses)
        part = weights[start:stop]
        total += SCHEDULES[schedule](model, group, part, objective, microbatch=microbatch, options=options)
        start = stop
    plans = tuple(plan(model, group) for group in groups) if schedule == "prefix-packed" else ()
    return Accumulated(total, plans)


def _refuse_mixed_policies(groups: Sequence[Group], options: Options) -> None:
    """Raise where two responses, or a response and `options`, tell different versions of the policy."""
    expected = options.policy_version
    for place, group in enumerate(groups):
        for index, response in enumerate(group.responses):
            version = response.origin.policy_version if response.origin else expected
            expected = version if expected is None else expected
            if version != expected:
                raise PolicyVersionError(
                    f"group {place}, response {index}: expected policy version {expected}, found {version}"
                )

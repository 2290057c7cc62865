"""A wave: the forward and backward pass of some responses of a group, run the same way by every schedule.

Schedules differ in how they score responses; claiming them, weighing their loss and running it backward is here.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from experiments.batch import Response, microbatches
from experiments.contract import Contract, NoGradientError, SupervisedLoopsError
from experiments.objective import Loss, ObjectiveError, refuse_misshapen
from experiments.readout import Scores

Score = Callable[[Sequence[Response]], Scores]
"""Scores all tokens of some non-empty responses, in order, at the contract's supervised loops."""


class Wave:
    """Some responses whose forward pass has run and whose backward pass runs once; `loss` is None without tokens."""

    def __init__(self, contract: Contract, indices: Sequence[int], loss: Tensor | None) -> None:
        self._contract, self._indices, self._loss = contract, tuple(indices), loss

    def backward(self) -> Tensor:
        """Add this wave's gradient and return its detached share of the loss, a scalar; 0 without tokens.

        Only now are its responses covered. Where it raises half way, they never are, and nor is the group.
        """
        self._contract.start(self._indices)
        loss, self._loss = self._loss, None
        if loss is not None:
            (loss * self._contract.options.loss_scale).backward()  # type: ignore[no-untyped-call]
        self._contract.cover(self._indices)
        return torch.zeros((), device=self._contract.group.prompt_P.device) if loss is None else loss.detach()


def open_wave(
    contract: Contract, indices: Sequence[int], weights: Sequence[Tensor], objective: Loss, score: Score
) -> Wave:
    """Run the forward pass of some responses; empty ones add nothing.

    `weights` holds the whole group's slices of the logical batch's token weights, one tensor [D] a response. Raises
    WeightError, SupervisedLoopsError, ObjectiveError for a loss that is no scalar, NoGradientError for one that does
    not depend on the scores, and whatever the contract refuses.
    """
    loops = contract.model.loops
    refuse_misshapen(weights, contract.group.lengths)
    if tuple(objective.supervised_loops(loops)) != contract.loops:
        raise SupervisedLoopsError(
            f"expected an objective on loops {contract.loops}, found one on {objective.supervised_loops(loops)}"
        )
    covered = zip(contract.claim(indices), [weights[index] for index in indices], strict=True)
    filled = [pair for pair in covered if len(pair[0])]
    if not filled:
        return Wave(contract, indices, None)
    responses, slices = zip(*filled, strict=True)
    loss = objective.loss(score(responses), responses, slices, loops)
    if not isinstance(loss, Tensor) or loss.ndim:
        found = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ObjectiveError(f"responses {list(indices)}: expected a loss that is a scalar tensor, found {found}")
    if not loss.requires_grad:
        raise NoGradientError(f"responses {list(indices)}: expected a loss of their scores, found a constant")
    return Wave(contract, indices, loss)


def run(contract: Contract, weights: Sequence[Tensor], objective: Loss, microbatch: int, score: Score) -> Tensor:
    """Run every response forward and backward, at most `microbatch` at once; return the loss, a detached scalar."""
    total = torch.zeros((), dtype=torch.float64, device=contract.group.prompt_P.device)
    for part in microbatches(len(contract.group.responses), microbatch):
        total += open_wave(contract, part, weights, objective, score).backward()
    return total

"""The RLTT loss over a fixed trace: per-loop credit, a KL penalty to a frozen reference, an entropy bonus.

    loss = sum_t w_t * ( -A_t * sum_l credit_l * logp[t, l] + kl * k3_t ) - entropy * sum_t w_t * H_t
    k3   = exp(r) - 1 - r,  r = reference_t - logp[t, last];  H is the entropy at the last loop, in nats

The weights w_t belong to the logical batch: computed once over all its responses, then sliced. A microbatch never
renormalises them, so the parts of a loss add up to the whole whatever the partition.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor

from experiments.batch import Response
from experiments.errors import ExperimentError
from experiments.readout import Scores


class ObjectiveError(ExperimentError):
    """A coefficient without meaning, a logical batch without a response token, or a loss that is no scalar."""


class WeightError(ObjectiveError):
    """Token weights that do not belong to their responses."""


class Loss(Protocol):
    """What a schedule needs of a loss; `Objective` is one, a trainer may bring its own.

    It must be a sum over tokens, each of which reads its own scores alone.
    """

    def supervised_loops(self, loops: int) -> tuple[int, ...]:
        """Return the loops (from 0, ascending) whose readout it reads; the last must be among them."""
        ...

    def loss(self, scores: Scores, responses: Sequence[Response], weights: Sequence[Tensor], loops: int) -> Tensor:
        """Return these responses' share of the logical batch's loss, a scalar.

        `weights` is what the caller gave the schedule for them: one tensor [D] a response.
        """
        ...


class Supervision(StrEnum):
    """Which loops earn credit."""

    ALL_LOOPS = "all-loops"
    TERMINAL_ONLY = "terminal-only"


class Mean(StrEnum):
    """What each response token weighs: 1/T, or 1/(non-empty responses * own length)."""

    TOKEN = "token-mean"
    RESPONSE = "response-mean"


@dataclass(frozen=True, slots=True)
class Objective:
    """The constants of the loss; `alpha` 0 credits supervised loops uniformly, larger favours later loops."""

    alpha: float
    kl_coefficient: float
    entropy_coefficient: float
    supervision: Supervision
    mean: Mean

    def __post_init__(self) -> None:
        for name in ("alpha", "kl_coefficient", "entropy_coefficient"):
            if not math.isfinite(getattr(self, name)):
                raise ObjectiveError(f"{name}: expected a finite number, found {getattr(self, name)}")

    def supervised_loops(self, loops: int) -> tuple[int, ...]:
        """Return the loops (from 0) whose readout the loss needs; the last is always among them."""
        return (loops - 1,) if self.supervision is Supervision.TERMINAL_ONLY else tuple(range(loops))

    def credits(self, loops: int) -> tuple[float, ...]:
        """Return softmax(alpha * log(l)) over l = 1..loops, or 1 for the last loop alone; constants, summing to 1."""
        if self.supervision is Supervision.TERMINAL_ONLY:
            return (1.0,)
        powers = [float(loop) ** self.alpha for loop in range(1, loops + 1)]
        return tuple(power / math.fsum(powers) for power in powers)

    def token_weights(self, lengths: Sequence[int]) -> tuple[Tensor, ...]:
        """Return the weights of every response of a whole logical batch, each fp64 [D].

        Raises ObjectiveError where the logical batch has no response token.
        """
        tokens, filled = sum(lengths), sum(length > 0 for length in lengths)
        if not tokens:
            raise ObjectiveError(f"a logical batch of {len(lengths)} responses without any token has no mean")
        if self.mean is Mean.TOKEN:
            return tuple(torch.full((length,), 1 / tokens, dtype=torch.float64) for length in lengths)
        return tuple(
            torch.full((length,), 1 / (filled * length) if length else 0.0, dtype=torch.float64) for length in lengths
        )

    def loss(self, scores: Scores, responses: Sequence[Response], weights: Sequence[Tensor], loops: int) -> Tensor:
        """Return this part's share of the logical batch's loss, a scalar.

        `scores` holds the tokens of `responses` in order; `weights` are their slices of `token_weights`.
        """
        log_probs_NS, entropy_N = scores.log_probs_NS, scores.terminal_entropy_N
        advantages_N = torch.cat([response.advantages_D for response in responses]).to(log_probs_NS)
        reference_N = torch.cat([response.reference_log_probs_D for response in responses]).to(log_probs_NS)
        weights_N = torch.cat(tuple(weights)).to(log_probs_NS)
        credited_N = sum(
            (credit * log_probs_NS[:, index] for index, credit in enumerate(self.credits(loops))),
            start=torch.zeros_like(entropy_N),
        )
        gap_N = reference_N - log_probs_NS[:, -1]
        penalty_N = gap_N.expm1() - gap_N
        per_token_N = self.kl_coefficient * penalty_N - advantages_N * credited_N - self.entropy_coefficient * entropy_N
        return (weights_N * per_token_N).sum()


def refuse_misshapen(weights: Sequence[Tensor], lengths: Sequence[int]) -> None:
    """Raise WeightError unless `weights` holds one constant float tensor [D] for each response of D tokens."""
    if len(weights) != len(lengths):
        raise WeightError(
            f"token weights: expected one slice for each of {len(lengths)} responses, found {len(weights)}"
        )
    for index, (slice_D, length) in enumerate(zip(weights, lengths, strict=True)):
        if slice_D.shape != (length,) or not slice_D.is_floating_point() or slice_D.requires_grad:
            raise WeightError(
                f"token weights of response {index}: expected constant floats of shape [{length}], found "
                f"{str(slice_D.dtype).removeprefix('torch.')} {list(slice_D.shape)}"
            )


def refuse_infinite(weights: Sequence[Tensor]) -> None:
    """Raise WeightError where a weight is not finite; the host waits once for the device that holds them."""
    if weights and not bool(torch.cat(tuple(weights)).isfinite().all()):
        index = next(index for index, slice_D in enumerate(weights) if not bool(slice_D.isfinite().all()))
        raise WeightError(
            f"token weights of response {index}: expected finite numbers, found {weights[index].tolist()}"
        )


PUBLISHED_ALPHA = 1.5
PUBLISHED_KL_COEFFICIENT = 0.01
PUBLISHED_ENTROPY_COEFFICIENT = 0.003


def published(supervision: Supervision) -> Objective:
    """Return the constants of the published matrix: token mean, progressive credit."""
    return Objective(
        alpha=PUBLISHED_ALPHA,
        kl_coefficient=PUBLISHED_KL_COEFFICIENT,
        entropy_coefficient=PUBLISHED_ENTROPY_COEFFICIENT,
        supervision=supervision,
        mean=Mean.TOKEN,
    )

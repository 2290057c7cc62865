"""From readout states to what the objective reads: log-probabilities of the response tokens, and entropy.

This plain form holds one loop's [N, V] logits at a time in the graph: right for small vocabularies and for an exact
baseline, too large for big ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from experiments.layers import wide


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Differentiable results for N response tokens: log-probabilities [N, S] and last-loop entropy [N], in nats."""

    log_probs_NS: Tensor
    terminal_entropy_N: Tensor


def score(states: Sequence[Tensor], head_VC: Tensor, targets_N: Tensor) -> Scores:
    """Score each target from the states [N, C] of every supervised loop, ascending; the last is the terminal loop."""
    columns = []
    for state_NC in states:
        logits_NV = functional.linear(state_NC, head_VC).to(wide(state_NC.dtype))
        log_probs_NV = logits_NV.log_softmax(dim=-1)
        columns.append(log_probs_NV.gather(1, targets_N.unsqueeze(1)))
    entropy_N = -(log_probs_NV.exp() * log_probs_NV).sum(dim=-1)
    return Scores(torch.cat(columns, dim=1), entropy_N)

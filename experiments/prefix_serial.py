"""`prefix-serial`: one prompt pass, then the suffixes one at a time; the plain and slow reference of prefix schedules.

The layers run one suffix at a time. A microbatch's suffixes share one readout and one backward pass, so `microbatch`
bounds how many suffix graphs are alive at once and changes no result.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from experiments.attention import PrefixedCausal
from experiments.batch import Group, Response, microbatches
from experiments.family import LoopedModel
from experiments.objective import Objective
from experiments.prefix import SharedPrefix
from experiments.readout import score


def accumulate(
    model: LoopedModel, group: Group, weights: Sequence[Tensor], objective: Objective, *, microbatch: int
) -> Tensor:
    """Add the group's gradient to the parameters' `.grad` and return its detached loss, a scalar.

    `weights` is the group's part of the logical batch's token weights, one tensor a response.
    """
    shared = SharedPrefix(model, group, objective.supervised_loops(model.loops))
    total = torch.zeros((), dtype=torch.float64, device=group.prompt_P.device)
    for part in microbatches(len(group.responses), microbatch):
        total += accumulate_suffixes(shared, part, weights, objective)
    shared.finish()
    return total


def accumulate_suffixes(
    shared: SharedPrefix, indices: Sequence[int], weights: Sequence[Tensor], objective: Objective
) -> Tensor:
    """Run phase B for some responses of the group and return their detached share of the loss, a scalar.

    `weights` holds the whole group's slices. Empty responses count as covered and add nothing.
    """
    covered = [(shared.claim(index), weights[index]) for index in indices]
    filled = [pair for pair in covered if len(pair[0])]
    if not filled:
        return torch.zeros((), device=shared.group.prompt_P.device)
    responses, slices = zip(*filled, strict=True)
    by_response = [suffix_states(shared, response) for response in responses]
    states = [torch.cat(by_loop) for by_loop in zip(*by_response, strict=True)]
    targets_N = torch.cat([response.tokens_D for response in responses])
    scores = score(states, shared.model.head_VC, targets_N)
    loss = objective.loss(scores, responses, slices, shared.model.loops)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def suffix_states(shared: SharedPrefix, response: Response) -> list[Tensor]:
    """Return the states [D, C], one a supervised loop, that predict a non-empty response's tokens.

    The first comes from the prompt's boundary. The last token is never an input, so a response of one token runs no
    layer at all.
    """
    dtype = shared.model.head_VC.dtype
    first = [leaf_1C.to(dtype) for leaf_1C in shared.boundary.first]
    inputs = len(response) - 1
    if not inputs:
        return first
    tokens = response.tokens_D[:-1]
    positions = torch.arange(inputs, device=tokens.device) + len(shared.group.prompt_P)
    attend = PrefixedCausal(shared.boundary.keys, shared.boundary.values, inputs)
    later = shared.model.readout_states(tokens, positions, attend, shared.loops)
    return [torch.cat(pair) for pair in zip(first, later, strict=True)]

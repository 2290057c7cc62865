"""`prefix-serial`: one prompt pass, then the suffixes one at a time; the plain and slow reference of prefix schedules.

The layers run one suffix at a time. A microbatch's suffixes share one readout and one backward pass, so `microbatch`
bounds how many suffix graphs are alive at once and changes no result.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from experiments import waves
from experiments.attention import PrefixedCausal
from experiments.batch import Group, Response, latent_rows
from experiments.contract import PLAIN, Options
from experiments.family import LoopedModel
from experiments.objective import Loss
from experiments.prefix import SharedPrefix
from experiments.readout import Scores, score
from experiments.waves import Wave


def accumulate(
    model: LoopedModel,
    group: Group,
    weights: Sequence[Tensor],
    objective: Loss,
    *,
    microbatch: int,
    options: Options = PLAIN,
) -> Tensor:
    """Add the group's gradient to the parameters' `.grad` and return its detached loss, a scalar.

    `weights` is the group's part of the logical batch's token weights, one tensor a response.
    """
    shared = SharedPrefix(model, group, objective.supervised_loops(model.loops), options)
    total = waves.run(shared.contract, weights, objective, microbatch, partial(score_suffixes, shared))
    shared.finish()
    return total


def open_wave(shared: SharedPrefix, indices: Sequence[int], weights: Sequence[Tensor], objective: Loss) -> Wave:
    """Run the forward pass of phase B for some responses of the group; see `waves.open_wave`."""
    return waves.open_wave(shared.contract, indices, weights, objective, partial(score_suffixes, shared))


def score_suffixes(shared: SharedPrefix, responses: Sequence[Response]) -> Scores:
    """Return the scores of all tokens of some non-empty responses, in order; one pass a suffix, one readout for all."""
    by_response = [suffix_states(shared, response) for response in responses]
    states = [torch.cat(by_loop) for by_loop in zip(*by_response, strict=True)]
    return score(states, shared.model.head_VC, torch.cat([response.tokens_D for response in responses]))


def suffix_states(shared: SharedPrefix, response: Response) -> list[Tensor]:
    """Return the states [D, C], one a supervised loop, that predict a non-empty response's tokens.

    The first comes from the prompt's boundary. The last token is never an input, so a response of one token runs no
    layer at all.
    """
    first, inputs = shared.boundary.first, len(response) - 1
    if not inputs:
        return list(first)
    prompt, tokens = len(shared.group.prompt_P), response.tokens_D[:-1]
    positions = torch.arange(inputs, device=tokens.device) + prompt
    later = shared.model.readout_states(
        tokens,
        positions,
        PrefixedCausal(shared.boundary.keys, shared.boundary.values, [inputs]),
        shared.loops,
        latent_rows(shared.model, prompt, [response], [(prompt, prompt + inputs)]),
        rematerialise=shared.options.rematerialise,
    )
    return [torch.cat(pair) for pair in zip(first, later, strict=True)]

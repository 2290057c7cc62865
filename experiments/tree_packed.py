"""`tree-packed`: the prompt and all suffixes of a microbatch in one pass, each suffix behind the same prompt.

The strongest rival of a shared prompt pass: where the whole group fits one microbatch it does the same work in half
the passes; where it does not, the prompt runs once a microbatch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from experiments import waves
from experiments.attention import TreeCausal
from experiments.batch import Group, Response, latent_rows
from experiments.contract import PLAIN, Contract, Options, shared_identity
from experiments.family import LoopedModel
from experiments.objective import Loss
from experiments.readout import Scores
from experiments.suffixes import Suffixes


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

    `weights` is the group's part of the logical batch's token weights; at most `microbatch` responses run at once.
    Raises LatentIdentityError where the prompt cannot be the same for all.
    """
    contract = Contract(model, group, objective.supervised_loops(model.loops), options)
    shared_identity(group)

    def score_wave(responses: Sequence[Response]) -> Scores:
        return score_responses(model, group.prompt_P, responses, contract.loops, rematerialise=options.rematerialise)

    total = waves.run(contract, weights, objective, microbatch, score_wave)
    contract.finish()
    return total


def score_responses(
    model: LoopedModel,
    prompt_P: Tensor,
    responses: Sequence[Response],
    loops: Sequence[int],
    *,
    rematerialise: bool = False,
) -> Scores:
    """Return the scores of all tokens of some non-empty responses, in order, from one pass along the tree."""
    prompt = len(prompt_P)
    suffixes = Suffixes(prompt, responses)
    tokens, positions = [prompt_P], [torch.arange(prompt, device=prompt_P.device)]
    latents = [latent_rows(model, prompt, responses[:1], [(0, prompt)])]
    if suffixes.lengths:
        tokens.append(suffixes.tokens())
        positions.append(suffixes.positions())
        latents.append(suffixes.latents(model))
    present = [latent for latent in latents if latent is not None]
    states = model.readout_states(
        torch.cat(tokens),
        torch.cat(positions),
        TreeCausal(prompt, suffixes.lengths),
        loops,
        torch.cat(present) if present else None,
        rematerialise=rematerialise,
    )
    first = [state_TC[prompt - 1 : prompt] for state_TC in states]
    later = [state_TC[prompt:] for state_TC in states] if suffixes.lengths else None
    return suffixes.score(model, first, later)

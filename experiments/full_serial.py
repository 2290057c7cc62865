"""`full-serial`: every prompt and response alone, the slowest and plainest schedule; an oracle for the others."""

from collections.abc import Sequence

import torch
from torch import Tensor

from experiments import waves
from experiments.attention import dot_product
from experiments.batch import Group, Response, latent_rows, microbatches
from experiments.contract import PLAIN, Contract, Options
from experiments.family import LoopedModel
from experiments.objective import Loss
from experiments.readout import Scores, score


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

    `weights` is the group's part of the logical batch's token weights. Each response runs alone, forward and
    backward, so that `microbatch`, which must still be positive, changes nothing.
    """
    microbatches(len(group.responses), microbatch)
    contract = Contract(model, group, objective.supervised_loops(model.loops), options)

    def score_alone(responses: Sequence[Response]) -> Scores:
        (response,) = responses
        return score_response(model, group.prompt_P, response, contract.loops, rematerialise=options.rematerialise)

    total = waves.run(contract, weights, objective, 1, score_alone)
    contract.finish()
    return total


def score_response(
    model: LoopedModel, prompt_P: Tensor, response: Response, loops: Sequence[int], *, rematerialise: bool = False
) -> Scores:
    """Return the scores of one non-empty response from one pass over prompt and response."""
    tokens_T = torch.cat((prompt_P, response.tokens_D[:-1]))
    length = tokens_T.shape[0]
    latent_TC = latent_rows(model, len(prompt_P), [response], [(0, length)])
    positions_T = torch.arange(length, device=tokens_T.device)
    states = model.readout_states(tokens_T, positions_T, causal, loops, latent_TC, rematerialise=rematerialise)
    return score([state_TC[len(prompt_P) - 1 :] for state_TC in states], model.head_VC, response.tokens_D)


def causal(call: int, query_THE: Tensor, key_TKE: Tensor, value_TKE: Tensor) -> Tensor:
    """Causal attention over one sequence, [T, H, E]; every call follows the same rule."""
    packed = (query_THE.unsqueeze(0), key_TKE.unsqueeze(0), value_TKE.unsqueeze(0))
    return dot_product(*packed, causal=True).squeeze(0)

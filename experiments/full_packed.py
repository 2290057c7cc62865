"""`full-packed`: microbatches of whole sequences, the schedule that users run and the baseline of every comparison.

Each sequence is the prompt and its response, so the prompt is computed again for every response. Projections, norms,
MLP and readout run packed over a microbatch's tokens; attention stays within each sequence.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from experiments import waves
from experiments.attention import SegmentedCausal
from experiments.batch import Group, Response, latent_rows
from experiments.contract import PLAIN, Contract, Options
from experiments.family import LoopedModel
from experiments.objective import Loss
from experiments.readout import Scores, score


def score_responses(
    model: LoopedModel,
    prompt_P: Tensor,
    responses: Sequence[Response],
    loops: Sequence[int],
    *,
    rematerialise: bool = False,
) -> Scores:
    """Return the scores of all tokens of some non-empty responses, in order, from one packed forward pass.

    The last response token is never an input; the prompt's last position predicts the first response token.
    """
    prompt = prompt_P.shape[0]
    lengths = [prompt + len(response) - 1 for response in responses]
    tokens_T = torch.cat([part for response in responses for part in (prompt_P, response.tokens_D[:-1])])
    places_T = torch.arange(sum(lengths), device=tokens_T.device)
    positions_T = torch.cat([places_T[:length] for length in lengths])
    rows_N = torch.cat([places[prompt - 1 :] for places in torch.split(places_T, lengths)])
    latent_TC = latent_rows(model, prompt, responses, [(0, length) for length in lengths])
    attend = SegmentedCausal(lengths)
    states = model.readout_states(tokens_T, positions_T, attend, loops, latent_TC, rematerialise=rematerialise)
    targets_N = torch.cat([response.tokens_D for response in responses])
    return score([state_TC.index_select(0, rows_N) for state_TC in states], model.head_VC, targets_N)


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
    """
    contract = Contract(model, group, objective.supervised_loops(model.loops), options)

    def score_wave(responses: Sequence[Response]) -> Scores:
        return score_responses(model, group.prompt_P, responses, contract.loops, rematerialise=options.rematerialise)

    total = waves.run(contract, weights, objective, microbatch, score_wave)
    contract.finish()
    return total

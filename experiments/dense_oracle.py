"""The oracle: one dense, padded, full-batch evaluation in fp64, sharing the model's layers and no algorithm.

No packing, no microbatches, no fused attention, and the loss written out again from its formula over masked [G, D]
tables. The attention matrices of every call are held at once, so it suits small shapes only.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.batch import Group, latent_rows
from experiments.errors import ExperimentError
from experiments.family import LoopedModel
from experiments.objective import Mean, Objective

PADDING_TOKEN = 0


class OracleError(ExperimentError):
    """The oracle was asked to judge in less than fp64, or without any response token."""


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """The loss and its gradient by parameter name; frozen parameters have zeros."""

    loss: float
    gradient: dict[str, Tensor]


def explicit_attention(call: int, query_THE: Tensor, key_TKE: Tensor, value_TKE: Tensor) -> Tensor:
    """Causal attention by the textbook: every score, a mask, a softmax; [B, T, H, E] in and out."""
    repeats = query_THE.shape[2] // key_TKE.shape[2]
    key_THE, value_THE = (part_TKE.repeat_interleave(repeats, dim=2) for part_TKE in (key_TKE, value_TKE))
    scores = torch.einsum("bqhe,bkhe->bhqk", query_THE, key_THE) * query_THE.shape[-1] ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    mixing = scores.masked_fill(later, -torch.inf).softmax(dim=-1)
    return torch.einsum("bhqk,bkhe->bqhe", mixing, value_THE)


def log_prob_tables(
    model: LoopedModel, group: Group, loops: tuple[int, ...], head_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities [G, D, S] and last-loop entropy [G, D] with D the longest; padding is meaningless."""
    prompt, longest = group.prompt_P.shape[0], max(group.lengths)
    targets_GD = torch.nn.utils.rnn.pad_sequence(
        [response.tokens_D for response in group.responses], batch_first=True, padding_value=PADDING_TOKEN
    )
    tokens_GT = torch.cat((group.prompt_P.expand(len(group.responses), -1), targets_GD), dim=1)[:, :-1]
    positions_GT = torch.arange(prompt + longest - 1, device=tokens_GT.device).expand_as(tokens_GT)
    latent_TC = latent_rows(model, prompt, group.responses, [(0, tokens_GT.shape[1])] * len(group.responses))
    latent_GTC = None if latent_TC is None else latent_TC.view(*tokens_GT.shape, -1)
    states = model.readout_states(tokens_GT, positions_GT, explicit_attention, loops, latent_GTC)
    answers_GDSC = torch.stack(states, dim=2)[:, prompt - 1 :]
    log_probs_GDSV = (answers_GDSC @ (head_scale * model.head_VC).mT).log_softmax(dim=-1)
    index = targets_GD[:, :, None, None].expand(-1, -1, len(loops), 1)
    terminal_GDV = log_probs_GDSV[:, :, -1]
    return log_probs_GDSV.gather(3, index).squeeze(3), -(terminal_GDV.exp() * terminal_GDV).sum(-1)


def evaluate(model: LoopedModel, group: Group, objective: Objective) -> Evaluation:
    """Return the loss and full gradient of a logical batch of one group; parameters and `.grad` stay as they are.

    Raises OracleError unless every parameter is fp64 and some response has a token.
    """
    if not any(group.lengths):
        raise OracleError("expected a response token, found only empty responses")
    if any(parameter.dtype != torch.float64 for parameter in model.parameters()):
        raise OracleError("expected an fp64 model")
    loops = objective.supervised_loops(model.loops)
    log_probs_GDS, entropy_GD = log_prob_tables(model, group, loops)
    advantages_GD, reference_GD = (
        torch.nn.utils.rnn.pad_sequence([row.double() for row in rows], batch_first=True)
        for rows in (
            [response.advantages_D for response in group.responses],
            [response.reference_log_probs_D for response in group.responses],
        )
    )
    lengths_G = torch.tensor(group.lengths, device=entropy_GD.device)
    real_GD = torch.arange(max(group.lengths), device=entropy_GD.device) < lengths_G[:, None]
    if objective.mean is Mean.TOKEN:
        weights_GD = real_GD.double() / real_GD.sum()
    else:
        weights_GD = real_GD.double() / (lengths_G.clamp(min=1)[:, None] * (lengths_G > 0).sum())
    steps = torch.tensor([loop + 1.0 for loop in loops], dtype=torch.float64, device=entropy_GD.device)
    credit_S = (objective.alpha * steps.log()).softmax(dim=0)
    ratio_GD = torch.where(real_GD, reference_GD - log_probs_GDS[:, :, -1], 0.0)
    terms_GD = -advantages_GD * (log_probs_GDS @ credit_S) + objective.kl_coefficient * (ratio_GD.exp() - 1 - ratio_GD)
    loss = (weights_GD * terms_GD).sum() - objective.entropy_coefficient * (weights_GD * entropy_GD).sum()
    names, trained = zip(*[pair for pair in model.named_parameters() if pair[1].requires_grad], strict=True)
    found = dict(zip(names, torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True), strict=True))
    gradient = {name: found.get(name, torch.zeros_like(parameter)) for name, parameter in model.named_parameters()}
    return Evaluation(float(loss.detach()), gradient)

"""Sharing Huginn's prelude alone, for groups whose latents differ at the prompt.

The prelude reads no latent: its keys, values and result (the injection) at the prompt are the same for all responses.
They are computed once; everything behind them is replayed whole for each response.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from experiments import waves
from experiments.attention import SegmentedCausal, prefixed
from experiments.batch import Group, Response, latent_rows
from experiments.contract import PLAIN, Contract, ContractError, Options
from experiments.family import LoopedModel
from experiments.huginn import Huginn
from experiments.layers import wide
from experiments.objective import Loss
from experiments.prefix import CapturingCausal, Cut
from experiments.readout import Scores, score
from experiments.suffixes import Suffixes


class SharedPrelude:
    """The prelude's graph over the prompt, cut at its keys, values and injection."""

    def __init__(self, model: Huginn, group: Group, loops: Sequence[int], options: Options) -> None:
        self.model, self.group, self.loops, self.options = model, group, tuple(loops), options
        self.contract = Contract(model, group, loops, options)
        capture = CapturingCausal()
        turn = model.turn(torch.arange(len(group.prompt_P), device=group.prompt_P.device))
        injection_PC = model.inject(group.prompt_P, turn, capture, rematerialise=options.rematerialise_prefix)
        self._cut = Cut([*capture.keys, *capture.values, injection_PC])
        calls, leaves = len(capture.keys), self._cut.leaves
        self.keys, self.values, self.injection_PC = leaves[:calls], leaves[calls : 2 * calls], leaves[-1]

    def score_responses(self, responses: Sequence[Response]) -> Scores:
        """Return the scores of all tokens of some non-empty responses, in order."""
        model, prompt, remat = self.model, len(self.group.prompt_P), self.options.rematerialise
        suffixes = Suffixes(prompt, responses)
        injections = [self.injection_PC]
        if suffixes.lengths:
            attend = prefixed(self.keys, self.values, suffixes.lengths)
            turn = model.turn(suffixes.positions())
            injections.append(model.inject(suffixes.tokens(), turn, attend, rematerialise=remat))
        lengths = [prompt + len(response) - 1 for response in responses]
        places_T = torch.arange(sum(lengths), device=self.injection_PC.device)
        positions_T = torch.cat([places_T[:length] for length in lengths])
        owners = torch.cat(self._rows(responses, places_T))
        # In at least fp32, because the prompt's rows gather the gradients of every response.
        spread_TC = torch.cat(injections).to(wide(self.injection_PC.dtype))[owners].to(self.injection_PC.dtype)
        latent_TC = latent_rows(model, prompt, responses, [(0, length) for length in lengths])
        assert latent_TC is not None
        states = model.recur(
            spread_TC, latent_TC, model.turn(positions_T), SegmentedCausal(lengths), self.loops, rematerialise=remat
        )
        rows_N = torch.cat([places[prompt - 1 :] for places in torch.split(places_T, lengths)])
        targets_N = torch.cat([response.tokens_D for response in responses])
        return score([state_TC.index_select(0, rows_N) for state_TC in states], model.head_VC, targets_N)

    def finish(self) -> None:
        """Send the gathered adjoints back through the prelude, once."""
        self.contract.finish()
        self._cut.backward()
        self.contract.note_gradients()

    def _rows(self, responses: Sequence[Response], places_T: Tensor) -> list[Tensor]:
        """Return where each response's injections are in [prompt; suffixes], the prompt's first."""
        pieces, later = [], len(self.group.prompt_P)
        for response in responses:
            pieces += [places_T[: len(self.group.prompt_P)], places_T[: len(response) - 1] + later]
            later += len(response) - 1
        return pieces


def accumulate(
    model: LoopedModel,
    group: Group,
    weights: Sequence[Tensor],
    objective: Loss,
    *,
    microbatch: int,
    options: Options = PLAIN,
) -> Tensor:
    """Add the group's gradient to the parameters' `.grad` and return its detached loss, a scalar."""
    if not isinstance(model, Huginn):
        raise ContractError(f"expected a Huginn, found {type(model).__name__}, which has no prelude")
    shared = SharedPrelude(model, group, objective.supervised_loops(model.loops), options)
    total = waves.run(shared.contract, weights, objective, microbatch, shared.score_responses)
    shared.finish()
    return total

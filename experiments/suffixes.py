"""How the responses of a microbatch are laid out behind one prompt, for every schedule that packs suffixes.

Each non-empty response of D tokens has D - 1 inputs, packed one response after another; its first token is predicted
by the prompt's last state, which all responses share. So a response of one token has no input at all.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from experiments.batch import Response, latent_rows
from experiments.family import LoopedModel
from experiments.readout import Scores, score


class Suffixes:
    """Inputs, positions and targets of some non-empty responses behind a prompt of `prompt` tokens."""

    def __init__(self, prompt: int, responses: Sequence[Response]) -> None:
        self.prompt, self.responses = prompt, tuple(responses)
        self._longer = [response for response in responses if len(response) > 1]
        self.lengths = [len(response) - 1 for response in self._longer]

    @property
    def device(self) -> torch.device:
        """Where the tokens are."""
        return self.responses[0].tokens_D.device

    def tokens(self) -> Tensor:
        """Return the inputs, [R], R the sum of `lengths`."""
        return torch.cat([response.tokens_D[:-1] for response in self._longer])

    def positions(self) -> Tensor:
        """Return each input's position, [R], counted from the prompt's end."""
        places = torch.arange(max(self.lengths), device=self.device) + self.prompt
        if min(self.lengths) == len(places):
            return places.repeat(len(self.lengths))
        return torch.cat([places[:length] for length in self.lengths])

    def latents(self, model: LoopedModel) -> Tensor | None:
        """Return each input's latent, [R, C], for a family that takes one."""
        ranges = [(self.prompt, self.prompt + length) for length in self.lengths]
        return latent_rows(model, self.prompt, self._longer, ranges)

    def score(self, model: LoopedModel, first: Sequence[Tensor], later: Sequence[Tensor] | None) -> Scores:
        """Score all tokens, in order, from the prompt's last states [1, C] and the inputs' states [R, C] a loop.

        The shared state is repeated by a view, whose gradient is one sum over the responses.
        """
        count = len(self.responses)
        states = [first_1C.expand(count, -1) for first_1C in first]
        if later is None or self._equal():
            targets_N = torch.cat([response.tokens_D for response in self.responses])
            if later is not None:
                rows = (count, self.lengths[0], -1)
                pairs = zip(states, later, strict=True)
                states = [torch.cat((one.unsqueeze(1), rest.view(rows)), dim=1).flatten(0, 1) for one, rest in pairs]
            return score(states, model.head_VC, targets_N)
        states = [torch.cat(pair) for pair in zip(states, later, strict=True)]
        targets = [torch.stack([response.tokens_D[0] for response in self.responses])]
        targets += [response.tokens_D[1:] for response in self._longer]
        scores = score(states, model.head_VC, torch.cat(targets))
        order_N = self._order()
        return Scores(scores.log_probs_NS.index_select(0, order_N), scores.terminal_entropy_N.index_select(0, order_N))

    def _equal(self) -> bool:
        """Say whether all responses have inputs, and equally many."""
        return len(self.lengths) == len(self.responses) and len(set(self.lengths)) == 1

    def _order(self) -> Tensor:
        """Return where each token's score is: first tokens come before all later ones."""
        pieces, later = [], len(self.responses)
        for index, response in enumerate(self.responses):
            pieces += [torch.tensor([index]), torch.arange(later, later + len(response) - 1)]
            later += len(response) - 1
        return torch.cat(pieces).to(self.device)

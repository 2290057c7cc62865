"""One pass over a group's prompt, shared by all its responses.

- Phase A, `SharedPrefix(...)`: the prompt's forward pass, whose graph is kept. Its *boundary* is every call's keys and
  values at the prompt positions, and every supervised loop's state at the last prompt position, which predicts each
  first response token. Detached, these become leaves.
- Phase B, waves: suffixes run against the leaves, whose `.grad` gathers the adjoints.
- Phase C, `finish`: one backward pass through the prompt with the adjoints as output gradients. They carry the loss
  scale already; nothing is scaled again. Only then is the gradient whole and an optimizer may step.

The adjoints are at least fp32 whatever the model's dtype, so that many suffixes never add up in bf16.
What is refused stands in `contract`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.attention import dot_product
from experiments.batch import Group, latent_rows
from experiments.contract import PLAIN, Contract, ContractError, Options, shared_identity
from experiments.family import LoopedModel
from experiments.layers import wide


@dataclass(frozen=True, slots=True, eq=False)
class Boundary:
    """The leaves between prompt and suffixes, in the model's dtype; their gradients are at least fp32.

    `keys` and `values`: one [P, K, E] a call. `first`: one [1, C] a supervised loop.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    first: tuple[Tensor, ...]


class Cut:
    """Outputs of one graph that others read as leaves, until their adjoints are sent back through it."""

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        self._outputs = list(outputs)
        self.leaves = tuple(_leaf(output) for output in outputs)

    def backward(self) -> None:
        """Send back what the leaves have gathered, and let go of the graph."""
        reached = [
            (output, leaf.grad.to(output.dtype))
            for output, leaf in zip(self._outputs, self.leaves, strict=True)
            if leaf.grad is not None and output.requires_grad
        ]
        self._outputs.clear()
        if reached:
            outputs, adjoints = zip(*reached, strict=True)
            torch.autograd.backward(outputs, adjoints)


class SharedPrefix:
    """The prompt's graph and boundary, and the state of the three phases."""

    def __init__(self, model: LoopedModel, group: Group, loops: Sequence[int], options: Options = PLAIN) -> None:
        self.model, self.group, self.loops, self.options = model, group, tuple(loops), options
        self.contract = Contract(model, group, loops, options)
        shared_identity(group)
        prompt = len(group.prompt_P)
        capture = CapturingCausal()
        positions_P = torch.arange(prompt, device=group.prompt_P.device)
        filled = next((response for response in group.responses if len(response)), group.responses[0])
        states = model.readout_states(
            group.prompt_P,
            positions_P,
            capture,
            self.loops,
            latent_rows(model, prompt, [filled], [(0, prompt)]),
            rematerialise=options.rematerialise_prefix,
        )
        first = [state_PC[-1:] for state_PC in states]
        self._cut = Cut([*capture.keys, *capture.values, *first])
        calls, leaves = len(capture.keys), self._cut.leaves
        self.boundary = Boundary(
            keys=leaves[:calls],
            values=leaves[calls : 2 * calls],
            first=leaves[2 * calls :],
        )

    def finish(self) -> None:
        """Run phase C: add the prompt's part to the parameters' `.grad` and let go of the graph."""
        self.contract.finish()
        self._cut.backward()
        self.contract.note_gradients()


class CapturingCausal:
    """Causal attention over one sequence that remembers every call's keys and values, with their graph.

    A rematerialised call asks a second time; what was remembered first stays.
    """

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, call: int, query_THE: Tensor, key_TKE: Tensor, value_TKE: Tensor) -> Tensor:
        """Attend and remember."""
        if call > len(self.keys):
            raise ContractError(f"expected call {len(self.keys)} next, found call {call}")
        if call == len(self.keys):
            self.keys.append(key_TKE)
            self.values.append(value_TKE)
        packed = (query_THE.unsqueeze(0), key_TKE.unsqueeze(0), value_TKE.unsqueeze(0))
        return dot_product(*packed, causal=True).squeeze(0)


def _leaf(output: Tensor) -> Tensor:
    leaf = output.detach().requires_grad_()
    leaf.grad_dtype = wide(output.dtype)
    return leaf

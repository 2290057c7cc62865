"""One pass over a group's prompt, shared by all its responses; its contract is held here for every prefix schedule.

- Phase A, `SharedPrefix(...)`: the prompt's forward pass, whose graph is kept. Its *boundary* is every call's keys and
  values at the prompt positions, and every supervised loop's state at the last prompt position, which predicts each
  first response token. Detached, these become leaves.
- Phase B, `claim` and a schedule's own work: suffixes run against the leaves, whose `.grad` gathers the adjoints.
- Phase C, `finish`: one backward pass through the prompt with the adjoints as output gradients. They carry the loss
  scale already; nothing is scaled again. Only then is the gradient whole and an optimizer may step.

Leaves are at least fp32, so that adjoints of many suffixes never add up in bf16.

Refused: a response claimed twice, or never; another phase after C; parameters changed or replaced since A. A change is
seen by version counter and data pointer; writing through `parameter.data` moves neither and is not seen.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from experiments.attention import dot_product
from experiments.batch import Group, Response
from experiments.errors import ExperimentError
from experiments.family import LoopedModel
from experiments.layers import wide
from experiments.ouro import Ouro


class PrefixError(ExperimentError):
    """The three phases were not run as they must be; the gradient is not to be used."""


class ParametersChangedError(PrefixError):
    """A parameter changed or was replaced between the prompt's forward and backward pass."""


class PrefixFinishedError(PrefixError):
    """The prompt's backward pass has run; neither it nor a suffix may follow."""


class ResponseCoverageError(PrefixError):
    """A response took part twice, not at all, or does not exist."""


@dataclass(frozen=True, slots=True, eq=False)
class Boundary:
    """The leaves between prompt and suffixes, at least fp32.

    `keys` and `values`: one [P, K, E] a call. `first`: one [1, C] a supervised loop.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    first: tuple[Tensor, ...]


class SharedPrefix:
    """The prompt's graph and boundary, and the state of the three phases; for Ouro alone."""

    def __init__(self, model: LoopedModel, group: Group, loops: Sequence[int]) -> None:
        if not isinstance(model, Ouro):
            raise PrefixError(f"expected an Ouro, found {type(model).__name__}, whose prompt cannot be shared yet")
        self.model, self.group, self.loops = model, group, tuple(loops)
        self._stamp = _stamp(model)
        self._claimed: set[int] = set()
        self._finished = False
        capture = _CapturingCausal()
        positions_P = torch.arange(len(group.prompt_P), device=group.prompt_P.device)
        states = model.readout_states(group.prompt_P, positions_P, capture, self.loops)
        first = [state_PC[-1:] for state_PC in states]
        self._outputs = [*capture.keys, *capture.values, *first]
        self._leaves = [output.detach().to(wide(output.dtype)).requires_grad_() for output in self._outputs]
        calls = len(capture.keys)
        self.boundary = Boundary(
            keys=tuple(self._leaves[:calls]),
            values=tuple(self._leaves[calls : 2 * calls]),
            first=tuple(self._leaves[2 * calls :]),
        )

    def claim(self, index: int) -> Response:
        """Return a response that a suffix pass is about to cover; each may be claimed once."""
        self._refuse_misuse()
        if not 0 <= index < len(self.group.responses):
            raise ResponseCoverageError(
                f"response {index}: expected one of {len(self.group.responses)}, found no such response"
            )
        if index in self._claimed:
            raise ResponseCoverageError(f"response {index}: expected to be covered once, found it a second time")
        self._claimed.add(index)
        return self.group.responses[index]

    def finish(self) -> None:
        """Run phase C: add the prompt's part to the parameters' `.grad` and let go of the graph."""
        self._refuse_misuse()
        missing = sorted(set(range(len(self.group.responses))) - self._claimed)
        if missing:
            raise ResponseCoverageError(f"expected every response to be covered, found {missing} missing")
        reached = [
            (output, leaf.grad.to(output.dtype))
            for output, leaf in zip(self._outputs, self._leaves, strict=True)
            if leaf.grad is not None
        ]
        self._finished = True
        if reached:
            outputs, adjoints = zip(*reached, strict=True)
            torch.autograd.backward(outputs, adjoints)
        self._outputs.clear()

    def _refuse_misuse(self) -> None:
        if self._finished:
            raise PrefixFinishedError("expected an open prefix, found that its backward pass has already run")
        now = _stamp(self.model)
        changed = sorted(name for name in self._stamp.keys() | now.keys() if self._stamp.get(name) != now.get(name))
        if changed:
            raise ParametersChangedError(
                f"expected the parameters of the prompt's forward pass, found changes in {', '.join(changed)}"
            )


class _CapturingCausal:
    """Causal attention over one sequence that remembers every call's keys and values, with their graph."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, call: int, query_THE: Tensor, key_TKE: Tensor, value_TKE: Tensor) -> Tensor:
        if call != len(self.keys):
            raise PrefixError(f"expected call {len(self.keys)} next, found call {call}")
        self.keys.append(key_TKE)
        self.values.append(value_TKE)
        packed = (query_THE.unsqueeze(0), key_TKE.unsqueeze(0), value_TKE.unsqueeze(0))
        return dot_product(*packed, causal=True).squeeze(0)


def _stamp(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return every parameter's data pointer and version counter by name."""
    return {name: (parameter.data_ptr(), parameter._version) for name, parameter in model.named_parameters()}

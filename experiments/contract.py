"""What every schedule refuses, so that no gradient is silently wrong.

A `Contract` is opened when a schedule starts on a group and closed when the gradient is whole. It refuses

- parameters that changed or were replaced (`ParametersChangedError`);
- a prompt, response, constant or latent that changed (`TraceChangedError`), also between a wave's forward and
  backward pass;
- gradients that something else wrote to after the group's first wave (`GradientsChangedError`): `zero_grad`, clipping,
  another loss. Waves of other groups of the same model may come in between;
- a response that is covered twice, never, or does not exist (`ResponseCoverageError`), whose wave is still open at the
  end (`OpenWaveError`), or whose backward pass failed half way (`BrokenWaveError`);
- anything after the end (`PrefixFinishedError`);
- an objective that reads other loops than the prompt pass kept, or loops that the model does not run or that are out
  of order (`SupervisedLoopsError`);
- at the start, a response that was sampled from another prompt (`PromptMismatchError`), by another policy version
  (`PolicyVersionError`) or at another depth (`DepthMismatchError`), a token outside the vocabulary
  (`VocabularyError`), a latent that is missing or that nobody would read (`latent.LatentError`), and work that could
  leave no gradient (`NoGradientError`).

Changes are seen by data pointer and version counter. Writing through `tensor.data` moves neither and is seen only
with `Options.checksum`, which reads every value of parameters and trace once more at each check.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from experiments.batch import Group, Origin, Response, digest
from experiments.errors import ExperimentError
from experiments.family import LoopedModel
from experiments.latent import Latent, LatentError, LatentIdentity


class ContractError(ExperimentError):
    """A schedule was not run as it must be; the gradient is not to be used."""


class ParametersChangedError(ContractError):
    """A parameter changed or was replaced before the gradient was whole."""


class TraceChangedError(ContractError):
    """A token, advantage, reference log-probability or latent changed before the gradient was whole."""


class GradientsChangedError(ContractError):
    """Something other than a wave wrote to the parameters' `.grad` before the gradient was whole."""


class NoGradientError(ContractError):
    """Gradients are switched off, or nothing is there that could get one; `.grad` would stay as it is."""


class PrefixFinishedError(ContractError):
    """The gradient is whole; neither a second prompt backward pass nor another response may follow."""


class ResponseCoverageError(ContractError):
    """A response took part twice, not at all, or does not exist."""


class OpenWaveError(ContractError):
    """A response's forward pass has run and its backward pass has not."""


class BrokenWaveError(ContractError):
    """A backward pass failed half way and left a part of its gradient behind."""


class SupervisedLoopsError(ContractError):
    """An objective reads other loops than the ones whose states were kept, or loops that are not there or in order."""


class VocabularyError(ContractError):
    """A token of the prompt or of a response is outside the model's vocabulary."""


class PromptMismatchError(ContractError):
    """A response was sampled from another prompt."""


class PolicyVersionError(ContractError):
    """A response was sampled by another version of the policy."""


class DepthMismatchError(ContractError):
    """A response was sampled with another number of loops."""


class LatentIdentityError(ContractError):
    """Responses whose latents differ at prompt positions cannot share a complete prompt pass."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a schedule runs; nothing here changes the objective.

    `loss_scale` multiplies every gradient and not the returned loss. Rematerialisation keeps only each call's input
    and computes the call again in the backward pass: of the response passes, and of a shared prompt pass.
    `policy_version` is the version that the model now is; None asks only that all responses tell the same one.
    """

    loss_scale: float = 1.0
    rematerialise: bool = False
    rematerialise_prefix: bool = False
    checksum: bool = False
    policy_version: str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.loss_scale < float("inf"):
            raise ContractError(f"loss scale: expected a positive number, found {self.loss_scale}")


PLAIN = Options()
Stamp = tuple[int, int, int]
"""Data pointer, version counter, and checksum (0 without)."""


class Coverage(Enum):
    """How far a response has come."""

    OPEN = auto()
    """Its wave's forward pass was started."""
    RUNNING = auto()
    """Its wave's backward pass was started; where that is not under way, it has failed."""
    COVERED = auto()
    """Its gradient is complete."""


@dataclass(slots=True)
class _Gradients:
    """The `.grad` of one model as the last wave of any of its groups left them, and how often others wrote to them."""

    left: list[tuple[int, int]] = field(default_factory=list)
    foreign_writes: int = 0


_GRADIENTS: WeakKeyDictionary[nn.Module, _Gradients] = WeakKeyDictionary()
"""Shared, because several groups of one model may be open at once, and each wave writes to the same gradients."""


class Contract:
    """The state of one schedule's work on one group; `loops` are the supervised ones, from 0, ascending.

    Raises the errors that hold at the start.
    """

    def __init__(self, model: LoopedModel, group: Group, loops: Sequence[int], options: Options = PLAIN) -> None:
        self.model, self.group, self.loops, self.options = model, group, tuple(loops), options
        _refuse_other_loops(self.loops, model.loops)
        trace = _trace(group)
        _refuse_no_gradient(model, trace)
        _refuse_foreign(model, group, options)
        _refuse_other_latents(model, group)
        _refuse_unknown_tokens(group, model.head_VC.shape[0])
        self._parameters = _stamps(model.named_parameters(), options.checksum)
        self._trace = _stamps(trace.items(), options.checksum)
        self._places = [
            (owner._parameters, key, parameter)
            for owner in model.modules()
            for key, parameter in owner._parameters.items()
            if parameter is not None
        ]
        self._watched = [parameter for _, _, parameter in self._places] + list(trace.values())
        self._seen = _quick_stamps(self._watched)
        self._coverage: dict[int, Coverage] = {}
        self._finished = False
        self._gradients = _GRADIENTS.setdefault(model, _Gradients())
        self._foreign_writes: int | None = None
        self._held: list[Tensor | None] = []

    def claim(self, indices: Sequence[int]) -> list[Response]:
        """Return responses whose forward pass is about to run; each may be claimed once. Checks everything first."""
        _refuse_switched_off()
        self.check()
        claimed = set(self._coverage)
        for index in indices:
            if not 0 <= index < len(self.group.responses):
                raise ResponseCoverageError(
                    f"response {index}: expected one of {len(self.group.responses)}, found no such response"
                )
            if index in claimed:
                raise ResponseCoverageError(f"response {index}: expected to be covered once, found it a second time")
            claimed.add(index)
        self._coverage.update(dict.fromkeys(indices, Coverage.OPEN))
        return [self.group.responses[index] for index in indices]

    def start(self, indices: Sequence[int]) -> None:
        """Note that the backward pass of claimed responses begins; it may begin once. Checks everything first."""
        self.check()
        covered = [index for index in indices if self._coverage[index] is not Coverage.OPEN]
        if covered:
            raise ResponseCoverageError(f"responses {covered}: expected one backward pass, found a second")
        self._coverage.update(dict.fromkeys(indices, Coverage.RUNNING))

    def cover(self, indices: Sequence[int]) -> None:
        """Note that the backward pass of started responses has reached its end."""
        self._coverage.update(dict.fromkeys(indices, Coverage.COVERED))
        self.note_gradients()
        self._foreign_writes = self._gradients.foreign_writes
        self._held = [parameter.grad for _, _, parameter in self._places]  # so that none of their ids is used again

    def check(self) -> None:
        """Raise unless the gradient is still open, and parameters, trace and gradients are what they should be.

        A whole module put in another's place is seen by `finish` alone.
        """
        if self._finished:
            raise PrefixFinishedError("expected an open gradient, found that its last backward pass has already run")
        broken = self._having(Coverage.RUNNING)
        if broken:
            raise BrokenWaveError(
                f"responses {broken}: expected their backward pass to reach its end, found that it failed half way; "
                "drop this gradient and start the group again"
            )
        in_place = all(parameters.get(key) is parameter for parameters, key, parameter in self._places)
        if self.options.checksum or not in_place or _quick_stamps(self._watched) != self._seen:
            self._compare()
        if self._gradient_stamps() != self._gradients.left:
            self._gradients.foreign_writes += 1
            self.note_gradients()
        if self._foreign_writes not in (None, self._gradients.foreign_writes):
            raise GradientsChangedError(
                "expected every .grad as the last wave left it, found that something else wrote to it (zero_grad, "
                "clipping, another loss) before the gradient was whole"
            )

    def finish(self) -> None:
        """Close the contract; raise unless every response was covered and `check` holds."""
        self.check()
        self._compare()
        missing = sorted(set(range(len(self.group.responses))) - self._coverage.keys())
        if missing:
            raise ResponseCoverageError(f"expected every response to be covered, found {missing} missing")
        opened = self._having(Coverage.OPEN)
        if opened:
            raise OpenWaveError(f"responses {opened}: expected their backward pass, found that it has not run")
        self._finished = True
        self._held.clear()

    def note_gradients(self) -> None:
        """Remember the gradients as they are; what differs at the next check was written by something else."""
        self._gradients.left = self._gradient_stamps()

    def _having(self, coverage: Coverage) -> list[int]:
        return sorted(index for index, found in self._coverage.items() if found is coverage)

    def _compare(self) -> None:
        """Find by name what changed since the start, and raise."""
        now = _stamps(self.model.named_parameters(), self.options.checksum)
        if now != self._parameters:
            names = self._parameters.keys() | now.keys()
            changed = sorted(name for name in names if self._parameters.get(name) != now.get(name))
            raise ParametersChangedError(
                f"expected the parameters of the first forward pass, found changes in {', '.join(changed)}"
            )
        trace = _stamps(_trace(self.group).items(), self.options.checksum)
        if trace != self._trace:
            altered = [name for name, stamp in trace.items() if stamp != self._trace[name]]
            raise TraceChangedError(f"expected the tokens and constants of the start, found changes in {altered[0]}")

    def _gradient_stamps(self) -> list[tuple[int, int]]:
        """Return identity and version counter of every `.grad`."""
        grads = [parameter.grad for _, _, parameter in self._places]
        return [(0, 0) if grad is None else (id(grad), grad._version) for grad in grads]


def shared_identity(group: Group) -> LatentIdentity | None:
    """Return the latent identity of a group's prompt, None for no latent; raise where non-empty responses differ."""
    identities: dict[Latent, LatentIdentity] = {}
    first: tuple[int, LatentIdentity] | None = None
    for index, response in enumerate(group.responses):
        if response.latent is None or not len(response):
            continue
        if response.latent not in identities:
            identities[response.latent] = response.latent.identity(len(group.prompt_P))
        identity = identities[response.latent]
        first = first or (index, identity)
        if identity != first[1]:
            raise LatentIdentityError(
                f"a complete prompt pass needs one latent: expected {first[1]} of response {first[0]}, "
                f"found {identity} of response {index}"
            )
    return first[1] if first else None


def _refuse_switched_off() -> None:
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        raise NoGradientError("expected gradients to be switched on, found torch.no_grad() or torch.inference_mode()")


def _refuse_no_gradient(model: LoopedModel, trace: dict[str, Tensor]) -> None:
    """Raise where a forward pass would leave nothing to differentiate, or torch could not see a change."""
    _refuse_switched_off()
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise NoGradientError("expected a parameter that requires a gradient, found that all are frozen")
    for name, tensor in trace.items():
        if tensor.is_inference():
            raise NoGradientError(f"{name}: expected an ordinary tensor, found one of torch.inference_mode(); clone it")


def _refuse_other_loops(loops: tuple[int, ...], depth: int) -> None:
    """Raise unless the loops ascend from 0 or later to the last; states come in that order, whatever was asked."""
    if not loops or list(loops) != sorted(set(loops)) or loops[0] < 0 or loops[-1] != depth - 1:
        raise SupervisedLoopsError(
            f"expected supervised loops counted from 0, ascending, and {depth - 1} as the last, found {loops}"
        )


def _refuse_other_latents(model: LoopedModel, group: Group) -> None:
    """Raise unless each non-empty response has a latent where the family takes one, and none where it takes none.

    Schedules read different rows of it: one that shares the prompt reads none of a response of one token.
    """
    for index, response in enumerate(group.responses):
        if len(response) and (response.latent is not None) != model.takes_latent:
            wanted, found = ("a latent", "none") if model.takes_latent else ("no latent", "one")
            raise LatentError(f"response {index}: expected {wanted} for this family, found {found}")


def _refuse_unknown_tokens(group: Group, vocabulary: int) -> None:
    """Raise where a token is outside the vocabulary; the host waits for the device once a group."""
    rows = {"the prompt": group.prompt_P}
    rows |= {f"response {index}": response.tokens_D for index, response in enumerate(group.responses)}
    lowest, highest = torch.cat(tuple(rows.values())).aminmax()
    if not bool((lowest < 0) | (highest >= vocabulary)):
        return
    for name, tokens_T in rows.items():
        for position, token in enumerate(tokens_T.tolist()):
            if not 0 <= token < vocabulary:
                raise VocabularyError(
                    f"{name}: expected tokens from 0 to {vocabulary - 1}, found {token} at {position}"
                )


def _refuse_foreign(model: LoopedModel, group: Group, options: Options) -> None:
    """Compare every response's origin, where it has one, with the group, the policy version and the depth."""
    origins = [(index, response.origin) for index, response in enumerate(group.responses) if response.origin]
    if not origins:
        return
    version = options.policy_version or origins[0][1].policy_version
    expected = Origin(digest(group.prompt_P), version, model.loops)
    for index, origin in origins:
        where = f"response {index}"
        if origin.prompt_digest != expected.prompt_digest:
            raise PromptMismatchError(
                f"{where}: expected prompt {expected.prompt_digest}, found one of {origin.prompt_digest}"
            )
        if origin.policy_version != version:
            raise PolicyVersionError(f"{where}: expected policy version {version}, found {origin.policy_version}")
        if origin.depth != expected.depth:
            raise DepthMismatchError(f"{where}: expected {expected.depth} loops, found {origin.depth}")


def _trace(group: Group) -> dict[str, Tensor]:
    """Return every tensor that a group's gradient is a function of, beside the parameters; a latent once."""
    named = {"the prompt": group.prompt_P}
    latents: dict[Latent, int] = {}
    for index, response in enumerate(group.responses):
        named[f"the tokens of response {index}"] = response.tokens_D
        named[f"the advantages of response {index}"] = response.advantages_D
        named[f"the reference of response {index}"] = response.reference_log_probs_D
        if response.latent is not None:
            latents.setdefault(response.latent, index)
    for latent, index in latents.items():
        for place, tensor in enumerate(latent.tensors()):
            named[f"the latent of response {index}" + (f", tensor {place}" if place else "")] = tensor
    return named


def _quick_stamps(tensors: list[Tensor]) -> list[tuple[int, int]]:
    return [(tensor._version, tensor.data_ptr()) for tensor in tensors]


def _stamps(named: Iterable[tuple[str, Tensor]], checksum: bool) -> dict[str, Stamp]:
    return {name: (tensor.data_ptr(), tensor._version, _checksum(tensor) if checksum else 0) for name, tensor in named}


def _checksum(tensor: Tensor) -> int:
    """Return a position-dependent sum of the bits, modulo 2**64: any single changed element changes it."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bits = tensor.detach().contiguous().view(words).flatten().to(torch.int64)
    places = torch.arange(bits.numel(), device=bits.device, dtype=torch.int64)
    return int((bits * (2 * places + 1)).sum())

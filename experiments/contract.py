"""What every schedule refuses, so that no gradient is silently wrong.

A `Contract` is opened when a schedule starts on a group and closed when the gradient is whole. In between it refuses

- parameters that changed or were replaced (`ParametersChangedError`);
- a prompt, response or constant that changed (`TraceChangedError`), also between a forward pass and its backward one;
- a response that is covered twice, never, or does not exist (`ResponseCoverageError`);
- anything after the end (`PrefixFinishedError`);
- at the start, a response that was sampled from another prompt (`PromptMismatchError`), by another policy version
  (`PolicyVersionError`) or at another depth (`DepthMismatchError`).

Changes are seen by data pointer and version counter. Writing through `tensor.data` moves neither and is seen only
with `Options.checksum`, which reads every value once more at each check.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from experiments.batch import Group, Origin, Response, digest
from experiments.errors import ExperimentError
from experiments.family import LoopedModel
from experiments.latent import Latent, LatentIdentity


class ContractError(ExperimentError):
    """A schedule was not run as it must be; the gradient is not to be used."""


class ParametersChangedError(ContractError):
    """A parameter changed or was replaced before the gradient was whole."""


class TraceChangedError(ContractError):
    """A token, advantage or reference log-probability changed before the gradient was whole."""


class PrefixFinishedError(ContractError):
    """The gradient is whole; neither a second prompt backward pass nor another response may follow."""


class ResponseCoverageError(ContractError):
    """A response took part twice, not at all, or does not exist."""


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
    `policy_version` is the version that the model now is; None leaves it unchecked.
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


class Contract:
    """The state of one schedule's work on one group."""

    def __init__(self, model: LoopedModel, group: Group, options: Options = PLAIN) -> None:
        self.model, self.group, self.options = model, group, options
        _refuse_foreign(model, group, options)
        self._parameters = _parameter_stamps(model, options.checksum)
        self._trace = _trace_stamps(group, options.checksum)
        self._places = [
            (owner._parameters, key, parameter)
            for owner in model.modules()
            for key, parameter in owner._parameters.items()
            if parameter is not None
        ]
        self._watched = [parameter for _, _, parameter in self._places] + _trace_tensors(group)
        self._seen = _quick_stamps(self._watched)
        self._claimed: set[int] = set()
        self._finished = False

    def claim(self, index: int) -> Response:
        """Return a response that is about to be covered; each may be claimed once."""
        if self._finished:
            raise PrefixFinishedError(f"response {index}: expected an open gradient, found that it is already whole")
        if not 0 <= index < len(self.group.responses):
            raise ResponseCoverageError(
                f"response {index}: expected one of {len(self.group.responses)}, found no such response"
            )
        if index in self._claimed:
            raise ResponseCoverageError(f"response {index}: expected to be covered once, found it a second time")
        self._claimed.add(index)
        return self.group.responses[index]

    def check(self) -> None:
        """Raise unless the gradient is still open, and parameters and trace are what they were at the start.

        A whole module put in another's place is seen by `finish` alone.
        """
        if self._finished:
            raise PrefixFinishedError("expected an open gradient, found that its last backward pass has already run")
        in_place = all(parameters.get(key) is parameter for parameters, key, parameter in self._places)
        if self.options.checksum or not in_place or _quick_stamps(self._watched) != self._seen:
            self._compare()

    def _compare(self) -> None:
        """Find by name what changed since the start, and raise."""
        now = _parameter_stamps(self.model, self.options.checksum)
        if now != self._parameters:
            names = self._parameters.keys() | now.keys()
            changed = sorted(name for name in names if self._parameters.get(name) != now.get(name))
            raise ParametersChangedError(
                f"expected the parameters of the first forward pass, found changes in {', '.join(changed)}"
            )
        trace = _trace_stamps(self.group, self.options.checksum)
        if trace != self._trace:
            altered = [name for name, stamp in trace.items() if stamp != self._trace[name]]
            raise TraceChangedError(f"expected the tokens and constants of the start, found changes in {altered[0]}")

    def finish(self) -> None:
        """Close the contract; raise unless every response was covered and `check` holds."""
        self.check()
        self._compare()
        missing = sorted(set(range(len(self.group.responses))) - self._claimed)
        if missing:
            raise ResponseCoverageError(f"expected every response to be covered, found {missing} missing")
        self._finished = True


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


def _quick_stamps(tensors: list[Tensor]) -> list[tuple[int, int]]:
    return [(tensor._version, tensor.data_ptr()) for tensor in tensors]


def _trace_tensors(group: Group) -> list[Tensor]:
    tensors = [group.prompt_P]
    for response in group.responses:
        tensors += [response.tokens_D, response.advantages_D, response.reference_log_probs_D]
    return tensors


def _parameter_stamps(model: nn.Module, checksum: bool) -> dict[str, Stamp]:
    return {name: _stamp(parameter, checksum) for name, parameter in model.named_parameters()}


def _trace_stamps(group: Group, checksum: bool) -> dict[str, Stamp]:
    stamps = {"the prompt": _stamp(group.prompt_P, checksum)}
    for index, response in enumerate(group.responses):
        stamps[f"the tokens of response {index}"] = _stamp(response.tokens_D, checksum)
        stamps[f"the advantages of response {index}"] = _stamp(response.advantages_D, checksum)
        stamps[f"the reference of response {index}"] = _stamp(response.reference_log_probs_D, checksum)
    return stamps


def _stamp(tensor: Tensor, checksum: bool) -> Stamp:
    return tensor.data_ptr(), tensor._version, _checksum(tensor) if checksum else 0


def _checksum(tensor: Tensor) -> int:
    """Return a position-dependent sum of the bits, modulo 2**64: any single changed element changes it."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bits = tensor.detach().contiguous().view(words).flatten().to(torch.int64)
    places = torch.arange(bits.numel(), device=bits.device, dtype=torch.int64)
    return int((bits * (2 * places + 1)).sum())

"""A group: one prompt and its sampled responses, with everything the objective needs to know about each token.

All tensors are inputs, never differentiated. A group is checked once, here; schedules trust it.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.errors import ExperimentError
from experiments.family import LoopedModel
from experiments.latent import Latent, LatentError, packed_rows


class BatchError(ExperimentError):
    """A prompt or response whose tensors do not belong together."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What a response was sampled from: the prompt's `digest`, the policy's version and the number of loops."""

    prompt_digest: str
    policy_version: str
    depth: int


@dataclass(frozen=True, slots=True, eq=False)
class Response:
    """One sampled response; may be empty.

    `latent` is for families that start from one, and none for others. An `origin`, where there is one, is compared
    with the group and the model before anything runs.
    """

    tokens_D: Tensor
    advantages_D: Tensor
    reference_log_probs_D: Tensor
    latent: Latent | None = None
    origin: Origin | None = None

    def __post_init__(self) -> None:
        _refuse_no_tensors(tokens=self.tokens_D, advantages=self.advantages_D, reference=self.reference_log_probs_D)
        if self.tokens_D.ndim != 1 or self.tokens_D.dtype != torch.int64:
            raise BatchError(f"response tokens: expected int64 [D], found {_found(self.tokens_D)}")
        for name, values in (("advantages", self.advantages_D), ("reference", self.reference_log_probs_D)):
            if values.shape != self.tokens_D.shape or not values.is_floating_point():
                raise BatchError(
                    f"response {name}: expected one float for each of {len(self)} tokens, found {_found(values)}"
                )
            if values.requires_grad or not bool(values.isfinite().all()):
                raise BatchError(f"response {name}: expected finite constants")

    def __len__(self) -> int:
        return self.tokens_D.shape[0]


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """One prompt of at least one token and its responses, in their order; a list or generator becomes a tuple."""

    prompt_P: Tensor
    responses: tuple[Response, ...]

    def __post_init__(self) -> None:
        _refuse_no_tensors(prompt=self.prompt_P)
        if self.prompt_P.ndim != 1 or self.prompt_P.dtype != torch.int64 or not self.prompt_P.shape[0]:
            raise BatchError(f"prompt: expected int64 [P] with P >= 1, found {_found(self.prompt_P)}")
        object.__setattr__(self, "responses", tuple(self.responses))
        if not self.responses:
            raise BatchError("group: expected at least one response, found none")
        if any(response.tokens_D.device != self.prompt_P.device for response in self.responses):
            raise BatchError("group: expected prompt and responses on one device")

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of tokens of every response."""
        return tuple(len(response) for response in self.responses)

    def to(self, device: str) -> "Group":
        """Return the same group on another device."""
        return Group(
            self.prompt_P.to(device),
            tuple(
                Response(
                    response.tokens_D.to(device),
                    response.advantages_D.to(device),
                    response.reference_log_probs_D.to(device),
                    response.latent,
                    response.origin,
                )
                for response in self.responses
            ),
        )


def digest(tokens_T: Tensor) -> str:
    """Return a short name for a row of tokens: the first 16 digits of the SHA-256 of its values as int64."""
    return hashlib.sha256(tokens_T.detach().cpu().numpy().astype("<i8").tobytes()).hexdigest()[:16]


def microbatches(count: int, size: int) -> list[range]:
    """Split the indices of `count` responses into runs of at most `size`, in order."""
    if not isinstance(size, int) or size < 1:
        raise BatchError(f"microbatch: expected at least one response, found {size!r}")
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def latent_rows(
    model: LoopedModel, prompt: int, responses: Sequence[Response], ranges: Sequence[tuple[int, int]]
) -> Tensor | None:
    """Return each response's latent over its range of positions, one after another, [sum of lengths, C].

    `prompt` is the prompt's length. None for a family without latents; raises LatentError where a response has one
    that its family does not take, or has none that it needs.
    """
    latents = [response.latent for response in responses]
    if not model.takes_latent:
        if any(latent is not None for latent in latents):
            raise LatentError("expected no latent for a family that starts from its embedding, found one")
        return None
    head_VC = model.head_VC
    rows = packed_rows(latents, ranges, prompt, head_VC.shape[1])
    return rows.to(head_VC.device)


def _refuse_no_tensors(**named: object) -> None:
    for name, value in named.items():
        if not isinstance(value, Tensor):
            raise BatchError(f"{name}: expected a tensor, found {type(value).__name__}")


def _found(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"

"""The random state that a latent-depth family (Huginn) starts every token from, and the name of the rule that drew it.

A latent is a function of a key and the token's position alone: drawn on the CPU in fp32, the same whatever the
packing, the device or the order. Its *identity* is what decides the prompt's positions; responses may share a
complete prompt pass only where it agrees. Rules are named, because another rule is another sampling distribution:

- `position-v1` (`PositionLatent`): one key for the whole sequence.
- `two-key-v1` (`TwoKeyLatent`): one key at prompt positions, another after them. Responses of a group keep distinct
  latents of their own and still share their prompt.
- `given` (`GivenLatent`): a table of states, identified by the bytes of its prompt rows.

The draw is a truncated normal at 3 sigma with sigma = sqrt(2 / (5 * width)), times sqrt(width): the family's own
initialisation, by inversion of counted random bits instead of by a sequential generator.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from experiments.errors import ExperimentError

TRUNCATION_SIGMAS = 3.0
_LAYOUT_STEP = 2**20
"""Positions are below this and widths too, so that (position, column) pairs never meet."""


class LatentError(ExperimentError):
    """A latent is missing, of the wrong shape, or given to a family that takes none."""


@dataclass(frozen=True, slots=True)
class LatentIdentity:
    """What decides the latent of every prompt position: the rule and its key."""

    profile: str
    key: str

    def __str__(self) -> str:
        return f"{self.profile}({self.key})"


class Latent(Protocol):
    """One sequence's latent; equal (hashable) latents have equal rows."""

    def identity(self, prompt: int) -> LatentIdentity:
        """Return the identity at the first `prompt` positions."""
        ...

    def rows(self, start: int, stop: int, prompt: int, width: int) -> Tensor:
        """Return [stop - start, width] on the CPU, in fp32 or as given, for a sequence whose prompt has `prompt`."""
        ...

    def tensors(self) -> tuple[Tensor, ...]:
        """Return what it reads its rows from and somebody could write to; nothing where rows are drawn from a key."""
        ...


@dataclass(frozen=True, slots=True)
class PositionLatent:
    """The same key at every position."""

    seed: int

    def identity(self, prompt: int) -> LatentIdentity:
        """Return the rule's name and the seed."""
        return LatentIdentity("position-v1", str(self.seed))

    def rows(self, start: int, stop: int, prompt: int, width: int) -> Tensor:
        """Draw from (seed, position); `prompt` makes no difference."""
        return draw(self.seed, start, stop, width)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return nothing: a key never changes."""
        return ()


@dataclass(frozen=True, slots=True)
class TwoKeyLatent:
    """One key at prompt positions, shared by a group, and one of the response's own after them."""

    prompt_seed: int
    response_seed: int

    def identity(self, prompt: int) -> LatentIdentity:
        """Return the rule's name and the prompt's seed."""
        return LatentIdentity("two-key-v1", str(self.prompt_seed))

    def rows(self, start: int, stop: int, prompt: int, width: int) -> Tensor:
        """Draw from (prompt seed, position) up to the prompt's end and from (response seed, position) after it."""
        border = min(max(prompt, start), stop)
        parts = [draw(self.prompt_seed, start, border, width), draw(self.response_seed, border, stop, width)]
        return torch.cat(parts)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return nothing: keys never change."""
        return ()


@dataclass(frozen=True, slots=True, eq=False)
class GivenLatent:
    """A table [positions, C] that somebody else made."""

    table_TC: Tensor

    def identity(self, prompt: int) -> LatentIdentity:
        """Return a digest of the prompt's rows."""
        content = self.table_TC[:prompt].detach().cpu().contiguous()
        digest = hashlib.sha256(content.view(torch.uint8).numpy().tobytes()).hexdigest()
        return LatentIdentity("given", f"{str(content.dtype).removeprefix('torch.')} {digest[:16]}")

    def rows(self, start: int, stop: int, prompt: int, width: int) -> Tensor:
        """Return the table's rows; raise LatentError where it is too short or of another width."""
        if stop > self.table_TC.shape[0] or width != self.table_TC.shape[1]:
            raise LatentError(
                f"given latent: expected {stop} positions of width {width}, found {list(self.table_TC.shape)}"
            )
        return self.table_TC[start:stop]

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the table."""
        return (self.table_TC,)


def draw(seed: int, start: int, stop: int, width: int) -> Tensor:
    """Return the `position-v1` rows [stop - start, width] in fp32: a function of (seed, position, column) alone."""
    if not 0 <= start <= stop <= _LAYOUT_STEP or not 0 < width <= _LAYOUT_STEP:
        raise LatentError(f"latent: expected positions and width up to {_LAYOUT_STEP}, found {start}..{stop}, {width}")
    positions = torch.arange(start, stop, device="cpu").unsqueeze(1)
    counters = positions * _LAYOUT_STEP + torch.arange(width, device="cpu")
    bits = _mix(counters + int(_mix(torch.tensor(seed, dtype=torch.int64, device="cpu"))))
    uniform = ((bits & 0xFFFFFF).to(torch.float64) + 0.5) / 2**24
    inside = math.erf(TRUNCATION_SIGMAS / math.sqrt(2))
    normal: Tensor = math.sqrt(2) * torch.special.erfinv((2 * uniform - 1) * inside)
    sigma = math.sqrt(2 / (5 * width)) * math.sqrt(width)
    return (sigma * normal).to(torch.float32)


def packed_rows(latents: Sequence[Latent | None], ranges: Sequence[tuple[int, int]], prompt: int, width: int) -> Tensor:
    """Return the rows of several sequences one after another, [sum of lengths, C]; each distinct latent drawn once."""
    wanted: dict[Latent, tuple[int, int]] = {}
    for index, (latent, (start, stop)) in enumerate(zip(latents, ranges, strict=True)):
        if latent is None:
            raise LatentError(f"response {index}: expected a latent for a family that starts from one, found none")
        before = wanted.get(latent, (start, stop))
        wanted[latent] = (min(start, before[0]), max(stop, before[1]))
    drawn = {latent: latent.rows(start, stop, prompt, width) for latent, (start, stop) in wanted.items()}
    return torch.cat(
        [
            drawn[latent][start - wanted[latent][0] : stop - wanted[latent][0]]
            for latent, (start, stop) in zip(latents, ranges, strict=True)
            if latent is not None
        ]
    )


def refuse_latent(latent_TC: Tensor | None) -> None:
    """Raise LatentError where a latent is given to a family that takes none."""
    if latent_TC is not None:
        raise LatentError("expected no latent for a family that starts from its embedding, found one")


def _mix(values: Tensor) -> Tensor:
    """Scramble int64 counters by the finaliser of SplitMix64 (Steele, Lea and Flood, 2014), modulo 2**64."""
    values = values * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        values = (values ^ _shifted(values, shift)) * _signed(factor)
    return values ^ _shifted(values, 31)


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Shift right without the sign."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value

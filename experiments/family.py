"""What a schedule may ask of a model family, and nothing more.

A *call* is one physical layer at one loop. Calls are numbered from 0 in the order in which they run, and each
has its own keys and values. Attention is handed in by the schedule, so that a family holds no packing rule.

Shape suffixes used in this package:

    T tokens (any leading shape)   C width            V vocabulary
    H query heads                  K key/value heads  E head dimension
    P prompt tokens                D response tokens  G responses of a group
    N scored response tokens       S supervised loops B batch rows
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Attend(Protocol):
    """Attention of one call: rotated queries and keys and plain values in, the heads' outputs out."""

    def __call__(self, call: int, query_THE: Tensor, key_TKE: Tensor, value_TKE: Tensor) -> Tensor:
        """Return [T, H, E]; which token sees which is the schedule's business."""
        ...


class LoopedModel(nn.Module, ABC):
    """A decoder whose layers run several times; parameters carry the family's official names."""

    @property
    @abstractmethod
    def loops(self) -> int:
        """How many times the layers run."""

    @property
    @abstractmethod
    def head_VC(self) -> Tensor:
        """The readout matrix, [V, C]."""

    @property
    def takes_latent(self) -> bool:
        """Whether every token starts from a latent state that the caller supplies."""
        return False

    @abstractmethod
    def readout_states(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attend: Attend,
        loops: Sequence[int],
        latent_TC: Tensor | None = None,
        *,
        rematerialise: bool = False,
    ) -> list[Tensor]:
        """Return the state that the head reads after each of the given loops (from 0, ascending), each [T, C].

        `tokens_T` and `positions_T` are int64 and share one shape: [T] packed or [B, T] dense. `latent_TC` has that
        shape too, for a family that takes one; raises LatentError where it is missing, or given to another family.
        With `rematerialise` each call keeps its input alone and runs again in the backward pass.
        """


class Call(Protocol):
    """One physical layer."""

    def __call__(self, x_TC: Tensor, turn: tuple[Tensor, Tensor], attend: Attend, call: int) -> Tensor:
        """Return [T, C]."""
        ...


def run_call(
    layer: Call, x_TC: Tensor, turn: tuple[Tensor, Tensor], attend: Attend, call: int, rematerialise: bool
) -> Tensor:
    """Run a layer; to rematerialise it is to ask `attend` for the same call a second time, in the backward pass."""
    if not rematerialise or not torch.is_grad_enabled():
        return layer(x_TC, turn, attend, call)
    out: Tensor = checkpoint(layer, x_TC, turn, attend, call, use_reentrant=False, preserve_rng_state=False)
    return out

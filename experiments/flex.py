"""Suffix attention by torch's compiled FlexAttention: one kernel over [prefix; suffixes], a cross-check on CUDA.

Right by construction, since its gradients reduce inside the kernel, and it compiles for every shape unless lengths
are padded: prefix and suffix rows are padded to blocks of 128, and the block mask is data. Past dynamo's limit of
recompilations it would silently fall to a path some fifty times slower; here that is an error.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

BLOCK = 128
_compiled = torch.compile(flex_attention, dynamic=True)


class FlexPrefixed:
    """What `attention.MergedPrefixed` computes; uncompiled it is slow, and forward only on a CPU."""

    def __init__(
        self, keys: Sequence[Tensor], values: Sequence[Tensor], lengths: Sequence[int], *, compiled: bool = True
    ) -> None:
        self.keys, self.values, self.compiled = keys, values, compiled
        self.prefix, self.rows = keys[0].shape[0], sum(lengths)
        self._padded_prefix, self._padded_rows = _padded(self.prefix), _padded(self.rows)
        self._mask = self._block_mask(lengths, keys[0].device)

    def __call__(self, call: int, query_THE: Tensor, key_TKE: Tensor, value_TKE: Tensor) -> Tensor:
        """Attend to the call's own prefix keys and values, and causally within each suffix."""
        query = _heads_first(query_THE, self._padded_rows)
        key = torch.cat(
            (_heads_first(self.keys[call], self._padded_prefix), _heads_first(key_TKE, self._padded_rows)), dim=2
        )
        value = torch.cat(
            (_heads_first(self.values[call], self._padded_prefix), _heads_first(value_TKE, self._padded_rows)), dim=2
        )
        shared = query_THE.shape[1] != key_TKE.shape[1]
        attend: Any = _compiled if self.compiled else flex_attention
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            out: Tensor = attend(query, key, value, block_mask=self._mask, enable_gqa=shared)
        return out[0, :, : self.rows].transpose(0, 1)

    def _block_mask(self, lengths: Sequence[int], device: torch.device) -> Any:
        """Padding rows belong to owner -1 and see the first prefix key, so that no row is empty."""
        owners = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        owner_R = functional.pad(owners, (0, self._padded_rows - self.rows), value=-1).to(device)
        prefix, padded_prefix = self.prefix, self._padded_prefix

        def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            place = (key - padded_prefix).clamp(min=0)
            own = (key >= padded_prefix) & (owner_R[place] == owner_R[query]) & (place <= query)
            return (key < prefix) | own

        return create_block_mask(
            sees, None, None, self._padded_rows, self._padded_prefix + self._padded_rows, device=str(device)
        )


def _padded(rows: int) -> int:
    return -(-rows // BLOCK) * BLOCK


def _heads_first(rows_THE: Tensor, length: int) -> Tensor:
    """Return [1, H, length, E] with zeros after the rows."""
    padded = functional.pad(rows_THE, (0, 0, 0, 0, 0, length - rows_THE.shape[0]))
    return padded.transpose(0, 1).unsqueeze(0)

"""Causal attention: over a packed row of independent segments, and of a suffix behind a shared prefix."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional


def dot_product(
    query_BTHE: Tensor, key_BTKE: Tensor, value_BTKE: Tensor, *, causal: bool = False, mask: Tensor | None = None
) -> Tensor:
    """Return softmax(q k / sqrt(E)) v, [B, T, H, E]; query heads share key/value heads in equal runs.

    `mask` is boolean [queries, keys], true where a query sees a key; `causal` is for as many keys as queries.
    """
    out: Tensor = functional.scaled_dot_product_attention(
        query_BTHE.transpose(1, 2),
        key_BTKE.transpose(1, 2),
        value_BTKE.transpose(1, 2),
        attn_mask=mask,
        is_causal=causal,
        enable_gqa=query_BTHE.shape[2] != key_BTKE.shape[2],
    )
    return out.transpose(1, 2)


class SegmentedCausal:
    """Each token sees itself and the earlier tokens of its own segment; [T, H, E] with T the sum of the lengths.

    Segments of one length go through a single batched call, others through one call each.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)

    def __call__(self, call: int, query_THE: Tensor, key_TKE: Tensor, value_TKE: Tensor) -> Tensor:
        """Attend within segments; every call follows the same rule."""
        packed = (query_THE, key_TKE, value_TKE)
        if len(set(self.lengths)) == 1:
            rows = (len(self.lengths), self.lengths[0])
            query_BTHE, key_BTKE, value_BTKE = (part_THE.view(*rows, *part_THE.shape[1:]) for part_THE in packed)
            return dot_product(query_BTHE, key_BTKE, value_BTKE, causal=True).flatten(0, 1)
        segments = zip(*(torch.split(part_THE, self.lengths) for part_THE in packed), strict=True)
        return torch.cat(
            [
                dot_product(*(part_THE.unsqueeze(0) for part_THE in segment), causal=True).squeeze(0)
                for segment in segments
            ]
        )


class PrefixedCausal:
    """Each suffix token sees the whole prefix, itself and the earlier suffix tokens.

    `keys` and `values` hold one [P, K, E] tensor a call, rotated already; they may be wider than the suffix's dtype,
    in which case their gradients accumulate in the wider one.
    """

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor], length: int) -> None:
        self.keys, self.values = keys, values
        prefix = keys[0].shape[0]
        self.mask = torch.ones(length, prefix + length, dtype=torch.bool, device=keys[0].device).tril(prefix)

    def __call__(self, call: int, query_THE: Tensor, key_TKE: Tensor, value_TKE: Tensor) -> Tensor:
        """Attend to the call's own prefix keys and values, followed by the suffix's."""
        key = torch.cat((self.keys[call].to(key_TKE.dtype), key_TKE))
        value = torch.cat((self.values[call].to(value_TKE.dtype), value_TKE))
        mixed = dot_product(query_THE.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0), mask=self.mask)
        return mixed.squeeze(0)

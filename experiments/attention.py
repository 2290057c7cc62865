"""Causal attention: over a packed row of independent segments, of suffixes behind a shared prefix, along a tree.

Each rule has a plain form on torch's own scaled dot product; the fused form must agree with it.

Several kernels over few scores cost more to launch than to run. So on a CPU a small shape goes through one masked
call, by a rule of size alone (`launch_bound`); a large one never computes masked scores nor copies a prefix.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from experiments import flash
from experiments.family import Attend
from experiments.layers import wide

SCORES_MAX = 2**15
"""The most scores, masked ones too, that one call computes where several kernels would compute fewer."""
COPIED_MAX = 2**16
"""The most elements of a prefix's keys (and as many of its values) that are copied to stand before the suffixes'."""


def dot_product(
    query_BTHE: Tensor, key_BTKE: Tensor, value_BTKE: Tensor, *, causal: bool = False, mask: Tensor | None = None
) -> Tensor:
    """Return softmax(q k / sqrt(E)) v, [B, T, H, E]; query heads share key/value heads in equal runs.

    `mask` is [queries, keys]: boolean, true where a query sees a key, or what is added to scores that are at least
    fp32. `causal` is for as many keys as queries. On a CPU narrow queries are computed in fp32 and rounded once:
    torch's own kernel rounds its probabilities too, which made the results of two right schedules scatter.
    """
    if query_BTHE.device.type == "cpu" and query_BTHE.dtype != wide(query_BTHE.dtype):
        wide_out: Tensor = _Wide.apply(query_BTHE, key_BTKE, value_BTKE, causal, mask)  # type: ignore[no-untyped-call]
        return wide_out
    out: Tensor = functional.scaled_dot_product_attention(
        query_BTHE.transpose(1, 2),
        key_BTKE.transpose(1, 2),
        value_BTKE.transpose(1, 2),
        attn_mask=mask,
        is_causal=causal,
        enable_gqa=query_BTHE.shape[2] != key_BTKE.shape[2],
    )
    return out.transpose(1, 2)


class _Wide(torch.autograd.Function):
    """Attention of narrow queries in fp32, rounded once at the end, that keeps no wide copies; masks are boolean."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None) -> Tensor:
        added = None if mask is None else _added(mask, wide(query.dtype))
        wide_out, lse = flash.dense(query, key, value, causal=causal, mask=added)
        out = wide_out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse, mask)
        ctx.causal = causal
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *saved, mask = ctx.saved_tensors
        added = None if mask is None else _added(mask, wide(grad.dtype))
        return *flash.dense_backward(grad, *saved, causal=ctx.causal, mask=added), None, None


def _added(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what to add to scores so that only visible keys count."""
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, -torch.inf)


def launch_bound(query_THE: Tensor, keys: int, copied: int = 0) -> bool:
    """Say whether one masked call over so many keys, after copying so many elements of them, beats several kernels.

    Measured on one CPU core; narrow dtypes stay with kernels that hand back gradients of prefixes in fp32.
    """
    on_cpu = query_THE.device.type == "cpu" and query_THE.dtype == wide(query_THE.dtype)
    rows, heads = query_THE.shape[:2]
    return on_cpu and rows * keys * heads <= SCORES_MAX and copied <= COPIED_MAX


class SegmentedCausal:
    """Each token sees itself and the earlier tokens of its own segment; [T, H, E] with T the sum of the lengths.

    Segments of one length go through a single batched call, others through one masked call or one call each.
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
        if launch_bound(query_THE, len(query_THE)):
            return _masked(query_THE, key_TKE, value_TKE, _additive(0, tuple(self.lengths), query_THE.dtype))
        segments = zip(*(torch.split(part_THE, self.lengths) for part_THE in packed), strict=True)
        return torch.cat(
            [
                dot_product(*(part_THE.unsqueeze(0) for part_THE in segment), causal=True).squeeze(0)
                for segment in segments
            ]
        )


class PrefixedCausal:
    """Each suffix token sees the whole prefix, itself and the earlier tokens of its own suffix: the plain form.

    `keys` and `values` hold one [P, K, E] tensor a call, rotated already. One masked softmax over [prefix; suffixes]:
    right in every dtype and on every device, and quadratic in the rows of all suffixes together.
    """

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor], lengths: Sequence[int]) -> None:
        self.keys, self.values = keys, values
        self.mask = suffix_mask(keys[0].shape[0], lengths, keys[0].device)

    def __call__(self, call: int, query_THE: Tensor, key_TKE: Tensor, value_TKE: Tensor) -> Tensor:
        """Attend to the call's own prefix keys and values, followed by the suffixes'."""
        key = torch.cat((self.keys[call], key_TKE))
        value = torch.cat((self.values[call], value_TKE))
        return _masked(query_THE, key, value, self.mask)


def _masked(query_THE: Tensor, key_TKE: Tensor, value_TKE: Tensor, mask: Tensor) -> Tensor:
    """Attend within one row of tokens, [T, H, E]."""
    return dot_product(query_THE.unsqueeze(0), key_TKE.unsqueeze(0), value_TKE.unsqueeze(0), mask=mask).squeeze(0)


def suffix_mask(prefix: int, lengths: Sequence[int], device: torch.device) -> Tensor:
    """Return which of [prefix; suffixes] each suffix row sees, boolean [R, prefix + R]."""
    owner_R = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    rows = owner_R.shape[0]
    own = (owner_R[:, None] == owner_R) & torch.ones(rows, rows, dtype=torch.bool).tril()
    return torch.cat((torch.ones(rows, prefix, dtype=torch.bool), own), dim=1).to(device)


def tree_mask(prompt: int, lengths: Sequence[int], device: torch.device) -> Tensor:
    """Return which of [prompt; suffixes] each of these rows sees, boolean [T, T]."""
    trunk = torch.ones(prompt, prompt + sum(lengths), dtype=torch.bool, device=device).tril()
    return torch.cat((trunk, suffix_mask(prompt, lengths, device)))


@lru_cache(maxsize=64)
def _additive(prompt: int, lengths: tuple[int, ...], dtype: torch.dtype, *, tree: bool = False) -> Tensor:
    """Return a mask to add to scores on a CPU; small by `launch_bound`, and the same for many calls and waves."""
    visible = (tree_mask if tree else suffix_mask)(prompt, lengths, torch.device("cpu"))
    return _added(visible, dtype)


class MergedPrefixed:
    """What `PrefixedCausal` computes, by `merged`."""

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor], lengths: Sequence[int]) -> None:
        self.keys, self.values = keys, values
        self.segments = flash.Segments(lengths, keys[0].device)

    def __call__(self, call: int, query_THE: Tensor, key_TKE: Tensor, value_TKE: Tensor) -> Tensor:
        """Attend to the call's own prefix keys and values, and causally within each suffix."""
        return merged(query_THE, self.keys[call], self.values[call], key_TKE, value_TKE, self.segments)


def prefixed(keys: Sequence[Tensor], values: Sequence[Tensor], lengths: Sequence[int]) -> Attend:
    """Return attention of suffixes of the given lengths (each at least 1) behind a prefix; fused where it can be."""
    kind = MergedPrefixed if flash.supports(keys[0]) else PrefixedCausal
    return kind(keys, values, lengths)


class TreeCausal:
    """One packed row [prompt; suffixes]: the prompt is causal, each suffix sees the prompt and itself."""

    def __init__(self, prompt: int, lengths: Sequence[int]) -> None:
        self.prompt, self.lengths = prompt, list(lengths)
        self._segments: flash.Segments | None = None

    def __call__(self, call: int, query_THE: Tensor, key_TKE: Tensor, value_TKE: Tensor) -> Tensor:
        """Attend along the tree; every call follows the same rule."""
        prompt, packed = self.prompt, (query_THE, key_TKE, value_TKE)
        if self.lengths and launch_bound(query_THE, len(query_THE)):
            return _masked(*packed, _additive(prompt, tuple(self.lengths), query_THE.dtype, tree=True))
        trunk = dot_product(*(part[:prompt].unsqueeze(0) for part in packed), causal=True).squeeze(0)
        if not self.lengths:
            return trunk
        query, key, value = (part[prompt:] for part in packed)
        if flash.supports(query_THE):
            self._segments = self._segments or flash.Segments(self.lengths, query_THE.device)
            branches = merged(query, key_TKE[:prompt], value_TKE[:prompt], key, value, self._segments)
        else:
            branches = PrefixedCausal([key_TKE[:prompt]], [value_TKE[:prompt]], self.lengths)(0, query, key, value)
        return torch.cat((trunk, branches))


def merged(
    query_RHE: Tensor,
    prefix_key_PKE: Tensor,
    prefix_value_PKE: Tensor,
    key_RKE: Tensor,
    value_RKE: Tensor,
    segments: flash.Segments,
) -> Tensor:
    """Return one softmax over [prefix; own suffix so far], [R, H, E], with gradients of first order for everything.

    Two fused kernels and one merge, which copy no prefix; or, where that is launch bound, one masked call.
    """
    prefix = len(prefix_key_PKE)
    if launch_bound(query_RHE, prefix + len(query_RHE), prefix_key_PKE.numel()):
        mask = _additive(prefix, segments.lengths, query_RHE.dtype)
        return _masked(query_RHE, torch.cat((prefix_key_PKE, key_RKE)), torch.cat((prefix_value_PKE, value_RKE)), mask)
    parts = (query_RHE, prefix_key_PKE, prefix_value_PKE, key_RKE, value_RKE)
    if query_RHE.is_cuda:
        parts = tuple(part.contiguous() for part in parts)  # type: ignore[assignment]
    out: Tensor = _Merged.apply(*parts, segments)  # type: ignore[no-untyped-call]
    return out


class _Merged(torch.autograd.Function):
    """Two fused attentions and one softmax.

    Autograd through the merge would differentiate each part as if its own log-sum-exp were constant. Here the fused
    backward of each part is called with the merged output and log-sum-exp instead: its probabilities are then those
    of the whole softmax, query gradients add up, and prefix gradients come out summed over all suffixes.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, prefix_key: Tensor, prefix_value: Tensor, key: Tensor, value: Tensor, segments: Any
    ) -> Tensor:
        behind = flash.whole(query, prefix_key, prefix_value)
        own = flash.causal(query, key, value, segments)
        wide_out, lse = flash.merge(*behind, *own)
        out = wide_out.to(query.dtype)
        ctx.save_for_backward(query, prefix_key, prefix_value, key, value, out, lse)
        ctx.segments = segments
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, prefix_key, prefix_value, key, value, out, lse = ctx.saved_tensors
        grad = grad.contiguous() if grad.is_cuda else grad
        by_prefix, *prefix = flash.whole_backward(grad, query, prefix_key, prefix_value, out, lse)
        by_own, *own = flash.causal_backward(grad, query, key, value, out, lse, ctx.segments)
        return (by_prefix + by_own).to(query.dtype), *prefix, *own, None

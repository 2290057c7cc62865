"""Fused attention kernels without autograd: each forward returns the log-sum-exp that its backward needs.

They exist because attention over two sets of keys can be merged only below autograd: differentiating through a
log-sum-exp merge of the fused operators gives wrong query and key gradients without any error. Queries here are
[R, H, E], keys and values [R or P, K, E] with K dividing H, log-sum-exps [R, H] and at least fp32.

On a CPU this is torch's fused CPU kernel, run in at least fp32, so that parts are not rounded before they are merged;
on CUDA its flash kernel (bf16 and fp16, head dimensions divisible by 8).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from experiments.layers import cast, wide

_aten = torch.ops.aten
CUDA_DTYPES = (torch.float16, torch.bfloat16)
CUDA_HEAD_DIM_MAX = 256

Gradients = tuple[Tensor, Tensor, Tensor]
"""Of queries, keys and values."""


def supports(query_RHE: Tensor) -> bool:
    """Say whether these kernels take queries of this device, dtype and head dimension."""
    if query_RHE.device.type == "cpu":
        return query_RHE.is_floating_point()
    dim = query_RHE.shape[-1]
    return query_RHE.is_cuda and query_RHE.dtype in CUDA_DTYPES and dim % 8 == 0 and dim <= CUDA_HEAD_DIM_MAX


class Segments:
    """Where packed rows of independent segments begin and end; every segment has at least one row."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths = tuple(lengths)
        self.rows, self.longest = sum(lengths), max(lengths)
        self.equal = min(lengths) == self.longest
        ends = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
        self.bounds = ends.to(device=device, dtype=torch.int32) if device.type == "cuda" else None
        self.places: Tensor | None = None
        if not self.equal and device.type == "cpu":
            places = [torch.arange(length) + index * self.longest for index, length in enumerate(lengths)]
            self.places = torch.cat(places)

    def spread(self, rows_R: Tensor) -> Tensor:
        """Return [segments, longest, ...]: a view for equal lengths, else a copy with zeros after each segment.

        Under causal attention nothing before the zeros sees them, and a zero gradient makes them add nothing.
        """
        shape = (len(self.lengths), self.longest, *rows_R.shape[1:])
        if self.places is None:
            return rows_R.view(shape)
        spread = rows_R.new_zeros(shape)
        spread.flatten(0, 1).index_copy_(0, self.places, rows_R)
        return spread

    def gather(self, spread: Tensor) -> Tensor:
        """Undo `spread`, [R, ...]."""
        flat = spread.flatten(0, 1)
        return flat if self.places is None else flat.index_select(0, self.places)


def whole(query_RHE: Tensor, key_PKE: Tensor, value_PKE: Tensor) -> tuple[Tensor, Tensor]:
    """Let every query see every key; return outputs [R, H, E] and log-sum-exps [R, H]."""
    parts = (query_RHE.unsqueeze(0), key_PKE.unsqueeze(0), value_PKE.unsqueeze(0))
    if query_RHE.is_cuda:
        longest = (query_RHE.shape[0], key_PKE.shape[0])
        out, lse, *_ = _aten._flash_attention_forward(*parts, None, None, *longest, 0.0, False, False)
        return out.squeeze(0), lse.squeeze(0).transpose(0, 1)
    out, lse = dense(*parts)
    return out.squeeze(0), lse.squeeze(0)


def whole_backward(
    grad_RHE: Tensor, query_RHE: Tensor, key_PKE: Tensor, value_PKE: Tensor, out_RHE: Tensor, lse_RH: Tensor
) -> Gradients:
    """Return the gradients of `whole`; `out_RHE` and `lse_RH` may belong to a larger softmax that it is part of."""
    parts = (query_RHE.unsqueeze(0), key_PKE.unsqueeze(0), value_PKE.unsqueeze(0), out_RHE.unsqueeze(0))
    if query_RHE.is_cuda:
        longest = (query_RHE.shape[0], key_PKE.shape[0])
        lse = lse_RH.transpose(0, 1).unsqueeze(0).contiguous()
        grads = _aten._flash_attention_backward(
            grad_RHE.unsqueeze(0), *parts, lse, None, None, *longest, 0.0, False, *_no_dropout(query_RHE)
        )
    else:
        grads = dense_backward(grad_RHE.unsqueeze(0), *parts, lse_RH.unsqueeze(0))
    query, key, value = (grad.squeeze(0) for grad in grads)
    return query, key, value


def causal(query_RHE: Tensor, key_RKE: Tensor, value_RKE: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """Let every query see itself and earlier keys of its segment; outputs [R, H, E] and log-sum-exps [R, H]."""
    if query_RHE.is_cuda:
        bounds = (segments.bounds, segments.bounds, segments.longest, segments.longest)
        out, lse, *_ = _aten._flash_attention_forward(query_RHE, key_RKE, value_RKE, *bounds, 0.0, True, False)
        return out, lse.transpose(0, 1)
    out, lse = dense(*(segments.spread(part) for part in (query_RHE, key_RKE, value_RKE)), causal=True)
    return segments.gather(out), segments.gather(lse)


def causal_backward(
    grad_RHE: Tensor,
    query_RHE: Tensor,
    key_RKE: Tensor,
    value_RKE: Tensor,
    out_RHE: Tensor,
    lse_RH: Tensor,
    segments: Segments,
) -> Gradients:
    """Return the gradients of `causal`; `out_RHE` and `lse_RH` may belong to a larger softmax that it is part of."""
    if query_RHE.is_cuda:
        bounds = (segments.bounds, segments.bounds, segments.longest, segments.longest)
        lse = lse_RH.transpose(0, 1).contiguous()
        parts = (grad_RHE, query_RHE, key_RKE, value_RKE, out_RHE)
        grads = _aten._flash_attention_backward(*parts, lse, *bounds, 0.0, True, *_no_dropout(query_RHE))
        query, key, value = grads
        return query, key, value
    parts = (grad_RHE, query_RHE, key_RKE, value_RKE, out_RHE)
    spread = [segments.spread(part) for part in (*parts, lse_RH)]
    query, key, value = (segments.gather(grad) for grad in dense_backward(*spread, causal=True))
    return query, key, value


def dense(
    query_BTHE: Tensor, key_BTKE: Tensor, value_BTKE: Tensor, *, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attend on a CPU within each of B rows; outputs [B, T, H, E] and log-sum-exps [B, T, H], both at least fp32.

    `mask` [queries, keys] is added to the scores.
    """
    dtype = wide(query_BTHE.dtype)
    heads_first = (cast(part, dtype).transpose(1, 2) for part in (query_BTHE, key_BTKE, value_BTKE))
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(*heads_first, 0.0, causal, attn_mask=_broad(mask))
    return out.transpose(1, 2), lse.transpose(1, 2)


def dense_backward(
    grad_BTHE: Tensor,
    query_BTHE: Tensor,
    key_BTKE: Tensor,
    value_BTKE: Tensor,
    out_BTHE: Tensor,
    lse_BTH: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
) -> Gradients:
    """Return the gradients of `dense`, at least fp32; output and log-sum-exp may belong to a larger softmax."""
    parts = (grad_BTHE, query_BTHE, key_BTKE, value_BTKE, out_BTHE, lse_BTH)
    dtype = wide(query_BTHE.dtype)
    heads_first = [cast(part, dtype).transpose(1, 2) for part in parts]
    grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *heads_first, 0.0, causal, attn_mask=_broad(mask)
    )
    query, key, value = (grad.transpose(1, 2) for grad in grads)
    return query, key, value


def _broad(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask[None, None]


def _no_dropout(like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the random state arguments of the flash backward, which reads neither without dropout."""
    empty = torch.empty((), device=like.device, dtype=torch.int64)
    return empty, empty


def merge(out1_RHE: Tensor, lse1_RH: Tensor, out2_RHE: Tensor, lse2_RH: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of one softmax over the keys of two, computed at least in fp32.

    A part without keys has log-sum-exp -inf and adds nothing; its output must be finite.
    """
    share_RH1 = torch.sigmoid(lse1_RH - lse2_RH).unsqueeze(-1)
    dtype = wide(out1_RHE.dtype)
    out_RHE = torch.lerp(cast(out2_RHE, dtype), cast(out1_RHE, dtype), cast(share_RH1, dtype))
    return out_RHE, torch.logaddexp(lse1_RH, lse2_RH)

"""Blocks that families share: RMS norm, both rotations, Llama's attention projections, SwiGLU.

Dtype-pure: fp64 inputs are reduced and rotated in fp64; narrower ones at least in fp32, and handed back as they came.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.family import Attend

Turn = tuple[Tensor, Tensor]
"""Cosine [T, 1, 1, E/2] and signed sine [T, 1, 2, E/2] of every position, for pairs (a, b) times and (b, a) times."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for reductions: fp64 stays fp64, everything else becomes fp32."""
    return torch.promote_types(dtype, torch.float32)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values in a dtype; in eager mode even a conversion to the same dtype has a price."""
    return x if x.dtype == dtype else x.to(dtype)


@cache
def number(value: float, dtype: torch.dtype) -> Tensor:
    """Return a zero-dimensional tensor, made once: to wrap a Python number costs more than a small tensor's sum."""
    return torch.tensor(value, dtype=dtype, device="cpu")


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x_TC: Tensor) -> Tensor:
        """Return the shape and dtype of the input."""
        out: Tensor = _RMSNorm.apply(x_TC, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return out


class _RMSNorm(torch.autograd.Function):
    """Keeps its input and one number a row; plain operators would keep three more tensors, twice as wide in bf16.

    With r = 1 / rms(x) and n = x * r:  dx = r * (g * w - n * mean(g * w * n)),  dw = sum of g * n over rows.
    """

    @staticmethod
    def forward(ctx: Any, x_TC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
        x = cast(x_TC, wide(x_TC.dtype))
        scale_T1 = torch.add(number(eps, x.dtype), (x * x).sum(-1, keepdim=True), alpha=1 / x.shape[-1]).rsqrt_()
        ctx.save_for_backward(x_TC, weight_C, scale_T1)
        return cast((x * scale_T1).mul_(weight_C), x_TC.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_TC: Tensor) -> tuple[Tensor, Tensor, None]:
        x_TC, weight_C, scale_T1 = ctx.saved_tensors
        grad = cast(grad_TC, scale_T1.dtype)
        normed = x_TC * scale_T1
        by_weight_C = (grad * normed).sum(tuple(range(grad.ndim - 1)))
        grad = grad * weight_C
        along_T1 = (grad * normed).sum(-1, keepdim=True)
        by_x_TC = torch.addcmul(grad, normed, along_T1, value=-1 / x_TC.shape[-1]).mul_(scale_T1)
        return cast(by_x_TC, x_TC.dtype), cast(by_weight_C, weight_C.dtype), None


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), no biases."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x_TC: Tensor) -> Tensor:
        """Return [T, C]."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x_TC)) * self.up_proj(x_TC))
        return out


class LlamaAttention(nn.Module):
    """The projections around a call's attention, split-half rotation; query heads may share key/value heads."""

    def __init__(self, width: int, heads: int, key_value_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(width, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, key_value_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, key_value_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, width, bias=False)

    def forward(self, x_TC: Tensor, turn: Turn, attend: Attend, call: int) -> Tensor:
        """Return [T, C]."""
        query_THE = self.q_proj(x_TC).unflatten(-1, (-1, self.head_dim))
        key_TKE = self.k_proj(x_TC).unflatten(-1, (-1, self.head_dim))
        value_TKE = self.v_proj(x_TC).unflatten(-1, (-1, self.head_dim))
        mixed_THE = attend(call, rotate_split_half(query_THE, *turn), rotate_split_half(key_TKE, *turn), value_TKE)
        out: Tensor = self.o_proj(mixed_THE.flatten(-2))
        return out


def rotation(positions_T: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Turn:
    """Return cosine [T, 1, 1, E/2] and signed sine [T, 1, 2, E/2] of position * theta^(-2i/E).

    The sine is negated in the first row, which turns a pair's first half. The angles are formed in fp64 whatever the
    model's dtype: in fp32 an angle at position 1000 would be off by 6e-5, which alone exceeds the fp32 gate.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions_T.device) / head_dim
    angles = positions_T.to(torch.float64).unsqueeze(-1) * theta**-exponents
    angles = angles.unsqueeze(-2).unsqueeze(-2)
    sine = angles.sin()
    return angles.cos().to(wide(dtype)), torch.cat((-sine, sine), dim=-2).to(wide(dtype))


def rotate_split_half(x_THE: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate the pairs (i, i + E/2) of every head; shape and dtype stay."""
    pairs = torch.unflatten(cast(x_THE, cosine.dtype), -1, (2, -1))
    return cast(_turned(pairs, pairs.flip(-2), cosine, sine).flatten(-2), x_THE.dtype)


def rotate_adjacent(x_THE: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate the pairs (2i, 2i + 1) of every head; shape and dtype stay."""
    pairs = torch.unflatten(cast(x_THE, cosine.dtype), -1, (-1, 2))
    return cast(_turned(pairs, pairs.flip(-1), cosine.mT, sine.mT).flatten(-2), x_THE.dtype)


def _turned(pairs: Tensor, swapped: Tensor, cosine: Tensor, signed_sine: Tensor) -> Tensor:
    """Return (a cos - b sin, b cos + a sin) of all pairs (a, b), from the pairs (a, b) and (b, a)."""
    return torch.addcmul(pairs * cosine, swapped, signed_sine)

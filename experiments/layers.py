"""Blocks that families share: RMS norm, both rotations, Llama's attention projections, SwiGLU.

Dtype-pure: fp64 inputs are reduced and rotated in fp64; narrower ones at least in fp32, and handed back as they came.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.family import Attend

Turn = tuple[Tensor, Tensor]
"""Cosine and sine of every position, each [T, 1, E/2]."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for reductions: fp64 stays fp64, everything else becomes fp32."""
    return torch.promote_types(dtype, torch.float32)


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
        x = x_TC.to(wide(x_TC.dtype))
        scale_T1 = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x_TC, weight_C, scale_T1)
        return (x * scale_T1 * weight_C).to(x_TC.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_TC: Tensor) -> tuple[Tensor, Tensor, None]:
        x_TC, weight_C, scale_T1 = ctx.saved_tensors
        grad = grad_TC.to(scale_T1.dtype)
        normed = x_TC.to(scale_T1.dtype) * scale_T1
        by_weight_C = (grad * normed).flatten(0, -2).sum(0)
        grad = grad * weight_C
        by_x_TC = scale_T1 * (grad - normed * (grad * normed).mean(-1, keepdim=True))
        return by_x_TC.to(x_TC.dtype), by_weight_C.to(weight_C.dtype), None


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
    """Return cosine and sine, each [T, 1, E/2], of position * theta^(-2i/E).

    The angles are formed in fp64 whatever the model's dtype: in fp32 an angle at position 1000 would be off by
    6e-5, which alone exceeds the fp32 gate.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions_T.device) / head_dim
    angles = positions_T.to(torch.float64).unsqueeze(-1) * theta**-exponents
    return angles.cos().to(wide(dtype)).unsqueeze(-2), angles.sin().to(wide(dtype)).unsqueeze(-2)


def rotate_split_half(x_THE: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate the pairs (i, i + E/2) of every head; shape and dtype stay."""
    first, second = x_THE.chunk(2, dim=-1)
    rotated = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    return rotated.to(x_THE.dtype)


def rotate_adjacent(x_THE: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate the pairs (2i, 2i + 1) of every head; shape and dtype stay."""
    first, second = x_THE[..., 0::2], x_THE[..., 1::2]
    rotated = torch.stack((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    return rotated.flatten(-2).to(x_THE.dtype)

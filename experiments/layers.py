"""Blocks that families share: RMS norm, split-half rotation, SwiGLU.

Dtype-pure: fp64 inputs are reduced and rotated in fp64; narrower ones at least in fp32, and handed back as they came.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional


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
        x = x_TC.to(wide(x_TC.dtype))
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return (x * self.weight).to(x_TC.dtype)


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


def rotation(positions_T: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
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

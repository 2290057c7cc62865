"""Ouro: a sandwich-normed Llama-like stack that runs `total_ut_steps` times.

`model.norm` follows every loop; its output is what the head reads and what the next loop starts from. The early
exit gate is loaded, because official checkpoints hold it, but takes no part in a fixed-depth objective: it is frozen.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from experiments.checkpoint import (
    CONFIG_NAME,
    COUNT_MAX,
    HARMLESS,
    LLAMA_LIKE,
    Fields,
    fill,
    positive_float,
    positive_int,
    read_heads,
    read_object,
    read_rope_theta,
    read_tensors,
    refuse_other_families,
    refuse_other_values,
    refuse_windows,
)
from experiments.family import Attend, LoopedModel, run_call
from experiments.latent import refuse_latent
from experiments.layers import LlamaAttention, RMSNorm, SwiGLU, Turn, rotation

_HARMLESS = HARMLESS | {"early_exit_threshold", "early_exit_step"}
"""At a fixed depth nobody exits early."""


@dataclass(frozen=True, slots=True)
class OuroConfig:
    """The fields of an official `config.json` that shape the computation."""

    width: int
    inner: int
    vocabulary: int
    layers: int
    loops: int
    heads: int
    key_value_heads: int
    head_dim: int
    rope_theta: float
    norm_eps: float

    @classmethod
    def parse(cls, config: Mapping[str, object]) -> "OuroConfig":
        """Read official field names; a field that is neither read nor known to be harmless is refused."""
        fields = Fields(config)
        refuse_other_families(fields, "ouro")
        refuse_other_values(fields, LLAMA_LIKE)
        refuse_windows(fields)
        heads = read_heads(fields)
        parsed = cls(
            width=positive_int(fields, "hidden_size"),
            inner=positive_int(fields, "intermediate_size"),
            vocabulary=positive_int(fields, "vocab_size"),
            layers=positive_int(fields, "num_hidden_layers", COUNT_MAX),
            loops=positive_int(fields, "total_ut_steps", COUNT_MAX),
            heads=heads.query,
            key_value_heads=heads.key_value,
            head_dim=heads.dim,
            rope_theta=read_rope_theta(fields),
            norm_eps=positive_float(fields, "rms_norm_eps"),
        )
        fields.refuse_rest(_HARMLESS)
        return parsed


class OuroLayer(nn.Module):
    """x + norm2(attn(norm1(x))), then x + norm4(mlp(norm3(x)))."""

    def __init__(self, config: OuroConfig) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config.width, config.heads, config.key_value_heads, config.head_dim)
        self.mlp = SwiGLU(config.width, config.inner)
        self.input_layernorm = RMSNorm(config.width, config.norm_eps)
        self.input_layernorm_2 = RMSNorm(config.width, config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.width, config.norm_eps)
        self.post_attention_layernorm_2 = RMSNorm(config.width, config.norm_eps)

    def forward(self, x_TC: Tensor, turn: Turn, attend: Attend, call: int) -> Tensor:
        """Return [T, C]."""
        x_TC = x_TC + self.input_layernorm_2(self.self_attn(self.input_layernorm(x_TC), turn, attend, call))
        out: Tensor = x_TC + self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(x_TC)))
        return out


class OuroStack(nn.Module):
    """What the official checkpoint keeps under `model.`."""

    def __init__(self, config: OuroConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(OuroLayer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.early_exit_gate = nn.Linear(config.width, 1).requires_grad_(False)


class Ouro(LoopedModel):
    """The whole decoder; load one with `load`."""

    def __init__(self, config: OuroConfig) -> None:
        super().__init__()
        self.config = config
        self.model = OuroStack(config)
        self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False)

    @property
    def loops(self) -> int:
        """How many times the layers run."""
        return self.config.loops

    @property
    def head_VC(self) -> Tensor:
        """The readout matrix, [V, C]."""
        return self.lm_head.weight

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
        """Return the normed state after each of the given loops, each [T, C]; call = loop * layers + layer."""
        refuse_latent(latent_TC)
        x_TC: Tensor = self.model.embed_tokens(tokens_T)
        turn = rotation(positions_T, self.config.head_dim, self.config.rope_theta, x_TC.dtype)
        states = []
        for loop in range(self.config.loops):
            for index, layer in enumerate(self.model.layers):
                call = loop * self.config.layers + index
                x_TC = run_call(layer, x_TC, turn, attend, call, rematerialise)
            x_TC = self.model.norm(x_TC)
            if loop in loops:
                states.append(x_TC)
        return states


def load(folder: Path, dtype: torch.dtype, device: str = "cpu") -> Ouro:
    """Load an official checkpoint folder in one dtype; raise CheckpointError if it is not a whole Ouro."""
    config = OuroConfig.parse(read_object(folder / CONFIG_NAME))
    with torch.device("meta"):
        model = Ouro(config)
    fill(model, read_tensors(folder), dtype, device)
    return model

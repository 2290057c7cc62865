"""Nanbeige: a pre-norm Llama stack that runs `num_loops` times.

`model.norm` stands at every loop boundary and its output is fed on. With `skip_loop_final_norm` the recurrent state
goes on without it; the head reads the normed state in both cases.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from experiments.checkpoint import (
    CONFIG_NAME,
    CheckpointError,
    fill,
    positive_float,
    positive_int,
    read_heads,
    read_object,
    read_tensors,
    refuse_other_families,
    refuse_other_values,
)
from experiments.family import Attend, LoopedModel, run_call
from experiments.latent import refuse_latent
from experiments.layers import LlamaAttention, RMSNorm, SwiGLU, Turn, rotation

_UNDERSTOOD: Mapping[str, object] = {
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_scaling": None,
    "attention_bias": False,
    "mlp_bias": False,
}


@dataclass(frozen=True, slots=True)
class NanbeigeConfig:
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
    skip_loop_final_norm: bool

    @classmethod
    def parse(cls, config: Mapping[str, object]) -> "NanbeigeConfig":
        """Read official field names; other fields are ignored unless they would change the model's meaning."""
        refuse_other_families(config, "nanbeige")
        refuse_other_values(config, _UNDERSTOOD)
        heads = read_heads(config)
        skip = config.get("skip_loop_final_norm", False)
        if not isinstance(skip, bool):
            raise CheckpointError(f"config field skip_loop_final_norm: expected true or false, found {skip!r}")
        return cls(
            width=positive_int(config, "hidden_size"),
            inner=positive_int(config, "intermediate_size"),
            vocabulary=positive_int(config, "vocab_size"),
            layers=positive_int(config, "num_hidden_layers"),
            loops=positive_int(config, "num_loops"),
            heads=heads.query,
            key_value_heads=heads.key_value,
            head_dim=heads.dim,
            rope_theta=positive_float(config, "rope_theta"),
            norm_eps=positive_float(config, "rms_norm_eps"),
            skip_loop_final_norm=skip,
        )


class NanbeigeLayer(nn.Module):
    """x + attn(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: NanbeigeConfig) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config.width, config.heads, config.key_value_heads, config.head_dim)
        self.mlp = SwiGLU(config.width, config.inner)
        self.input_layernorm = RMSNorm(config.width, config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.width, config.norm_eps)

    def forward(self, x_TC: Tensor, turn: Turn, attend: Attend, call: int) -> Tensor:
        """Return [T, C]."""
        x_TC = x_TC + self.self_attn(self.input_layernorm(x_TC), turn, attend, call)
        out: Tensor = x_TC + self.mlp(self.post_attention_layernorm(x_TC))
        return out


class NanbeigeStack(nn.Module):
    """What the official checkpoint keeps under `model.`."""

    def __init__(self, config: NanbeigeConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(NanbeigeLayer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_eps)


class Nanbeige(LoopedModel):
    """The whole decoder; load one with `load`."""

    def __init__(self, config: NanbeigeConfig) -> None:
        super().__init__()
        self.config = config
        self.model = NanbeigeStack(config)
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
            feeds_on = not self.config.skip_loop_final_norm and loop + 1 < self.config.loops
            if loop in loops or feeds_on:
                normed_TC = self.model.norm(x_TC)
                if loop in loops:
                    states.append(normed_TC)
                if feeds_on:
                    x_TC = normed_TC
        return states


def load(folder: Path, dtype: torch.dtype, device: str = "cpu") -> Nanbeige:
    """Load an official checkpoint folder in one dtype; raise CheckpointError if it is not a whole Nanbeige."""
    config = NanbeigeConfig.parse(read_object(folder / CONFIG_NAME))
    with torch.device("meta"):
        model = Nanbeige(config)
    fill(model, read_tensors(folder), dtype, device)
    return model

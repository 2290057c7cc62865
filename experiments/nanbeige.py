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
    COUNT_MAX,
    HARMLESS,
    LLAMA_LIKE,
    CheckpointError,
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

_SWITCHES: Mapping[str, object] = {
    "enable_double_loop_split": False,
    "enable_depth_attention": False,
    "loop_share_kv": False,
}
"""Features of the published code that have no weights of their own, so that only the config gives them away."""
_WEIGHTED_FEATURES = ("ngram", "hyper_connection", "depth_attention", "double_loop_split")
"""Features that the published checkpoint leaves off: numbers that belong to one say nothing while nothing is true."""


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
        """Read official field names; a field that is neither read nor known to be harmless is refused."""
        fields = Fields(config)
        refuse_other_families(fields, "nanbeige")
        refuse_other_values(fields, {**LLAMA_LIKE, **_SWITCHES})
        refuse_windows(fields)
        heads = read_heads(fields)
        skip = fields.get("skip_loop_final_norm", False)
        if not isinstance(skip, bool):
            raise CheckpointError(f"config field skip_loop_final_norm: expected true or false, found {skip!r}")
        loops = positive_int(fields, "num_loops", COUNT_MAX)
        _refuse_other_loops(fields, loops)
        parsed = cls(
            width=positive_int(fields, "hidden_size"),
            inner=positive_int(fields, "intermediate_size"),
            vocabulary=positive_int(fields, "vocab_size"),
            layers=positive_int(fields, "num_hidden_layers", COUNT_MAX),
            loops=loops,
            heads=heads.query,
            key_value_heads=heads.key_value,
            head_dim=heads.dim,
            rope_theta=read_rope_theta(fields),
            norm_eps=positive_float(fields, "rms_norm_eps"),
            skip_loop_final_norm=skip,
        )
        fields.refuse_rest(HARMLESS | {name for name, value in config.items() if _of_a_feature(name, value)})
        return parsed


def _refuse_other_loops(config: Mapping[str, object], loops: int) -> None:
    """Raise CheckpointError unless `loop_loss_weights`, one for each further loop, mean the same number of loops."""
    further = config.get("loop_loss_weights")
    if further and (not isinstance(further, list) or len(further) != loops - 1):
        raise CheckpointError(
            f"config field loop_loss_weights: expected one for each loop after the first of {loops}, "
            f"found {further!r:.80}"
        )


def _of_a_feature(name: str, value: object) -> bool:
    return value is not True and any(feature in name for feature in _WEIGHTED_FEATURES)


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

"""Huginn: a prelude, a core that runs `mean_recurrence` times from a latent state, and a coda in front of the head.

The scaled embedding goes through the prelude once; its result, the *injection*, enters every loop through the
adapter: s = core(adapter([s; e])). The readout of a loop is ln_f, coda, ln_f and the tied head. The coda's output is
never fed back, and runs only for the loops that are asked for.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.checkpoint import (
    CONFIG_NAME,
    COUNT_MAX,
    HARMLESS,
    CheckpointError,
    Fields,
    fill,
    positive_float,
    positive_int,
    read_object,
    read_tensors,
    refuse_other_families,
    refuse_other_values,
)
from experiments.family import Attend, LoopedModel, run_call
from experiments.latent import LatentError
from experiments.layers import RMSNorm, Turn, rotate_adjacent, rotation

_UNDERSTOOD: Mapping[str, object] = {
    "tie_embeddings": True,
    "tie_word_embeddings": True,
    "bias": False,
    "injection_type": "linear",
    "nonlin_name": "SiLU",
    "mlp_class_name": "GatedMLP",
    "block_class_name": "SandwichBlock",
    "norm_class_name": "RMSNorm_llama",
    "architecture_class_name": "RecurrentGPT",
    "state_init": "like-init",
}
_HARMLESS = HARMLESS | {
    "activation_checkpoint_impl",
    "block_size",
    "effective_expected_depth",
    "init_orthogonal",
    "init_strategy",
    "mean_backprop_depth",
    "num_hidden_layers",
    "sampling_scheme",
    "test_time_noise_type",
}
"""How the checkpoint was trained and initialised; the depth counts say again what the layer counts say."""
_TIED_HEAD = "lm_head.weight"
_EMBEDDING = "transformer.wte.weight"
_DERIVED = ("freqs_cis",)
"""Buffers that a checkpoint may hold though its config implies them."""


@dataclass(frozen=True, slots=True)
class HuginnConfig:
    """The fields of an official `config.json` that shape the computation; `vocabulary` counts padded rows."""

    width: int
    inner: int
    vocabulary: int
    prelude: int
    core: int
    coda: int
    loops: int
    heads: int
    rope_base: float
    norm_eps: float
    qk_bias: bool

    @property
    def head_dim(self) -> int:
        """Width over heads."""
        return self.width // self.heads

    @classmethod
    def parse(cls, config: Mapping[str, object]) -> "HuginnConfig":
        """Read official field names; a field that is neither read nor known to be harmless is refused."""
        fields = Fields(config)
        refuse_other_families(fields, "huginn_raven")
        refuse_other_values(fields, _UNDERSTOOD)
        width, heads = positive_int(fields, "n_embd"), positive_int(fields, "n_heads", COUNT_MAX)
        if width % heads or (width // heads) % 2:
            raise CheckpointError(f"config: width {width} does not split into {heads} heads of an even dimension")
        qk_bias = fields.get("qk_bias")
        if not isinstance(qk_bias, bool):
            raise CheckpointError(f"config field qk_bias: expected true or false, found {qk_bias!r}")
        prelude, core, coda = (
            positive_int(fields, f"n_layers_in_{part}", COUNT_MAX) for part in ("prelude", "recurrent_block", "coda")
        )
        again = {"num_key_value_heads": heads, "num_attention_heads": heads, "head_dim": width // heads}
        refuse_other_values(fields, again | {"hidden_size": width, "n_layers": prelude + core + coda})
        _refuse_other_scales(fields, width)
        parsed = cls(
            width=width,
            inner=positive_int(fields, "intermediate_size"),
            vocabulary=_padded_vocabulary(fields),
            prelude=prelude,
            core=core,
            coda=coda,
            loops=positive_int(fields, "mean_recurrence", COUNT_MAX),
            heads=heads,
            rope_base=positive_float(fields, "rope_base"),
            norm_eps=positive_float(fields, "norm_eps"),
            qk_bias=qk_bias,
        )
        fields.refuse_rest(_HARMLESS)
        return parsed


def _padded_vocabulary(config: Mapping[str, object]) -> int:
    """Return the rows of the embedding: as stated, or the vocabulary rounded up to the padding."""
    tokens = positive_int(config, "vocab_size")
    multiple = positive_int(config, "padding_multiple") if "padding_multiple" in config else 1
    padded = positive_int(config, "padded_vocab_size") if "padded_vocab_size" in config else None
    if padded is not None and padded < tokens:
        raise CheckpointError(f"config field padded_vocab_size: expected at least {tokens}, found {padded}")
    return padded or -(-tokens // multiple) * multiple


def _refuse_other_scales(config: Mapping[str, object], width: int) -> None:
    """Raise CheckpointError where `init_values` scales the embedding or the latent by another rule than ours.

    The other initial values were used once, before training.
    """
    values = config.get("init_values")
    if values is None:
        return
    for name, expected in (("embed_scale", math.sqrt(width)), ("std", math.sqrt(2 / (5 * width)))):
        found = values.get(name, expected) if isinstance(values, dict) else values
        if not isinstance(found, int | float) or not 0.9999 * expected <= found <= 1.0001 * expected:
            raise CheckpointError(f"config field init_values: expected {name} = {expected:.6g}, found {found!r:.80}")


class HuginnAttention(nn.Module):
    """The projections around a call's attention; a learned bias goes onto queries and keys before the rotation."""

    def __init__(self, config: HuginnConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.Wqkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.proj = nn.Linear(config.width, config.width, bias=False)
        shape = (2, 1, config.heads, config.head_dim)
        self.qk_bias = nn.Parameter(torch.zeros(shape)) if config.qk_bias else None

    def forward(self, x_TC: Tensor, turn: Turn, attend: Attend, call: int) -> Tensor:
        """Return [T, C]."""
        parts = self.Wqkv(x_TC).chunk(3, dim=-1)
        query_THE, key_THE, value_THE = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        if self.qk_bias is not None:
            query_THE, key_THE = query_THE + self.qk_bias[0], key_THE + self.qk_bias[1]
        mixed_THE = attend(call, rotate_adjacent(query_THE, *turn), rotate_adjacent(key_THE, *turn), value_THE)
        out: Tensor = self.proj(mixed_THE.flatten(-2))
        return out


class HuginnMLP(nn.Module):
    """proj(silu(first) * second) of the two halves of fc(x), no biases."""

    def __init__(self, config: HuginnConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(config.width, 2 * config.inner, bias=False)
        self.proj = nn.Linear(config.inner, config.width, bias=False)

    def forward(self, x_TC: Tensor) -> Tensor:
        """Return [T, C]."""
        gate, up = self.fc(x_TC).chunk(2, dim=-1)
        out: Tensor = self.proj(functional.silu(gate) * up)
        return out


class HuginnBlock(nn.Module):
    """norm2(attn(norm1(x)) + x), then norm4(mlp(norm3(x)) + x)."""

    def __init__(self, config: HuginnConfig) -> None:
        super().__init__()
        self.norm_1 = RMSNorm(config.width, config.norm_eps)
        self.norm_2 = RMSNorm(config.width, config.norm_eps)
        self.norm_3 = RMSNorm(config.width, config.norm_eps)
        self.norm_4 = RMSNorm(config.width, config.norm_eps)
        self.attn = HuginnAttention(config)
        self.mlp = HuginnMLP(config)

    def forward(self, x_TC: Tensor, turn: Turn, attend: Attend, call: int) -> Tensor:
        """Return [T, C]."""
        x_TC = self.norm_2(self.attn(self.norm_1(x_TC), turn, attend, call) + x_TC)
        out: Tensor = self.norm_4(self.mlp(self.norm_3(x_TC)) + x_TC)
        return out


class HuginnStack(nn.Module):
    """What the official checkpoint keeps under `transformer.`."""

    def __init__(self, config: HuginnConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocabulary, config.width)
        self.prelude = nn.ModuleList(HuginnBlock(config) for _ in range(config.prelude))
        self.adapter = nn.Linear(2 * config.width, config.width, bias=False)
        self.core_block = nn.ModuleList(HuginnBlock(config) for _ in range(config.core))
        self.coda = nn.ModuleList(HuginnBlock(config) for _ in range(config.coda))
        self.ln_f = RMSNorm(config.width, config.norm_eps)


class Huginn(LoopedModel):
    """The whole decoder; load one with `load`."""

    def __init__(self, config: HuginnConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer = HuginnStack(config)

    @property
    def loops(self) -> int:
        """How many times the core runs."""
        return self.config.loops

    @property
    def head_VC(self) -> Tensor:
        """The readout matrix, [V, C]: the embedding itself."""
        return self.transformer.wte.weight

    @property
    def takes_latent(self) -> bool:
        """Always."""
        return True

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
        """Return ln_f(coda(ln_f(s))) after each of the given loops, each [T, C].

        Calls run in this order: the prelude; then loop by loop the core and, if the loop is asked for, the coda.
        """
        if latent_TC is None or latent_TC.shape != (*tokens_T.shape, self.config.width):
            found = "none" if latent_TC is None else list(latent_TC.shape)
            raise LatentError(f"expected a latent of shape {[*tokens_T.shape, self.config.width]}, found {found}")
        turn = self.turn(positions_T)
        injection_TC = self.inject(tokens_T, turn, attend, rematerialise=rematerialise)
        return self.recur(injection_TC, latent_TC, turn, attend, loops, rematerialise=rematerialise)

    def turn(self, positions_T: Tensor) -> Turn:
        """Return the rotation of every position."""
        return rotation(positions_T, self.config.head_dim, self.config.rope_base, self.head_VC.dtype)

    def inject(self, tokens_T: Tensor, turn: Turn, attend: Attend, *, rematerialise: bool = False) -> Tensor:
        """Return the prelude's result, [T, C]."""
        x_TC: Tensor = self.transformer.wte(tokens_T) * math.sqrt(self.config.width)
        for call, block in enumerate(self.transformer.prelude):
            x_TC = run_call(block, x_TC, turn, attend, call, rematerialise)
        return x_TC

    def recur(
        self,
        injection_TC: Tensor,
        latent_TC: Tensor,
        turn: Turn,
        attend: Attend,
        loops: Sequence[int],
        *,
        rematerialise: bool = False,
    ) -> list[Tensor]:
        """Return the readout states of the given loops, each [T, C], from an injection and a latent."""
        parts, states, call = self.transformer, [], self.config.prelude
        state_TC = latent_TC.to(injection_TC)
        for loop in range(self.config.loops):
            state_TC = parts.adapter(torch.cat((state_TC, injection_TC), dim=-1))
            for block in parts.core_block:
                state_TC = run_call(block, state_TC, turn, attend, call, rematerialise)
                call += 1
            if loop in loops:
                read_TC = parts.ln_f(state_TC)
                for block in parts.coda:
                    read_TC = run_call(block, read_TC, turn, attend, call, rematerialise)
                    call += 1
                states.append(parts.ln_f(read_TC))
        return states


def load(folder: Path, dtype: torch.dtype, device: str = "cpu") -> Huginn:
    """Load an official checkpoint folder in one dtype; raise CheckpointError if it is not a whole Huginn.

    A checkpoint may repeat the tied head, if it equals the embedding, and may hold the rotation table.
    """
    config = HuginnConfig.parse(read_object(folder / CONFIG_NAME))
    with torch.device("meta"):
        model = Huginn(config)
    tensors = {name: tensor for name, tensor in read_tensors(folder).items() if name not in _DERIVED}
    head, embedding = tensors.pop(_TIED_HEAD, None), tensors.get(_EMBEDDING)
    if head is not None and (embedding is None or head.dtype != embedding.dtype or not torch.equal(head, embedding)):
        raise CheckpointError(f"{_TIED_HEAD}: expected the tied embedding {_EMBEDDING}, found other values")
    fill(model, tensors, dtype, device)
    return model

"""Small random models of every family, for tests, benchmarks and examples; no checkpoint needed.

Loops are the published ones of the toy matrix (Ouro 4, Nanbeige 2, Huginn 3); Nanbeige's queries are twice as wide as
the model and share keys, as in its checkpoint. Values are scaled uniform draws, kept
near unit scale, with sublayers smaller than the residual: a random looped model amplifies rounding, and larger
sublayers would hide the errors that gates look for.
"""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from experiments.errors import ExperimentError
from experiments.family import LoopedModel
from experiments.huginn import Huginn, HuginnConfig
from experiments.nanbeige import Nanbeige, NanbeigeConfig
from experiments.ouro import Ouro, OuroConfig

SUBLAYER_SCALE = 0.3
HEADS = 2
VOCABULARY = 13


class ToyError(ExperimentError):
    """A family or a width that no toy has."""


def _ouro(width: int, vocabulary: int) -> Ouro:
    return Ouro(
        OuroConfig(
            width=width,
            inner=2 * width,
            vocabulary=vocabulary,
            layers=2,
            loops=4,
            heads=HEADS,
            key_value_heads=HEADS,
            head_dim=width // HEADS,
            rope_theta=1e6,
            norm_eps=1e-6,
        )
    )


def _nanbeige(width: int, vocabulary: int) -> Nanbeige:
    return Nanbeige(
        NanbeigeConfig(
            width=width,
            inner=2 * width,
            vocabulary=vocabulary,
            layers=2,
            loops=2,
            heads=2 * HEADS,
            key_value_heads=HEADS,
            head_dim=width // HEADS,
            rope_theta=7e7,
            norm_eps=1e-5,
            skip_loop_final_norm=False,
        )
    )


def _huginn(width: int, vocabulary: int) -> Huginn:
    return Huginn(
        HuginnConfig(
            width=width,
            inner=2 * width,
            vocabulary=vocabulary,
            prelude=1,
            core=2,
            coda=1,
            loops=3,
            heads=HEADS,
            rope_base=5e4,
            norm_eps=1e-6,
            qk_bias=True,
        )
    )


TOYS: Mapping[str, Callable[[int, int], LoopedModel]] = {"ouro": _ouro, "nanbeige": _nanbeige, "huginn": _huginn}


def toy(
    family: str,
    *,
    width: int = 16,
    dtype: torch.dtype = torch.float64,
    vocabulary: int = VOCABULARY,
    seed: int = 7,
) -> LoopedModel:
    """Return a random model; `width` is a multiple of 8. The same arguments give the same values in every dtype."""
    if family not in TOYS or width < 8 or width % 8:
        raise ToyError(f"expected one of {', '.join(TOYS)} in a multiple of 8, found {family!r} in width {width}")
    model = TOYS[family](width, vocabulary).to(dtype)
    generator = torch.Generator("cpu").manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            uniform = torch.rand(parameter.shape, generator=generator, dtype=torch.float64) * 2 - 1
            parameter.copy_(_scaled(name, parameter, uniform))
    return model


def _scaled(name: str, parameter: nn.Parameter, uniform: torch.Tensor) -> torch.Tensor:
    """Scale draws from [-1, 1]: norms about 1, matrices and embeddings of unit gain, what closes a sublayer less."""
    if name.endswith("layernorm_2.weight"):
        return SUBLAYER_SCALE * (1 + 0.1 * uniform)
    if parameter.ndim == 1:
        return 1 + 0.1 * uniform
    if name.endswith("qk_bias"):
        return 0.3 * uniform
    if "embed_tokens" in name:
        return float(3**0.5) * uniform
    gain = SUBLAYER_SCALE if name.endswith(("o_proj.weight", "down_proj.weight", ".proj.weight")) else 1.0
    return uniform * float(gain * (3 / parameter.shape[-1]) ** 0.5)

"""The published shapes, as official `config.json` fields: what predictions can be made for without a checkpoint."""

from collections.abc import Callable, Mapping
from pathlib import Path

from experiments.checkpoint import CONFIG_NAME, CheckpointError, read_object
from experiments.costs import Config
from experiments.huginn import HuginnConfig
from experiments.nanbeige import NanbeigeConfig
from experiments.ouro import OuroConfig

OFFICIAL: Mapping[str, Mapping[str, object]] = {
    "Ouro-1.4B": {
        "model_type": "ouro",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "vocab_size": 49152,
        "num_hidden_layers": 24,
        "total_ut_steps": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
    },
    "Nanbeige4.2-3B": {
        "model_type": "nanbeige",
        "hidden_size": 3072,
        "intermediate_size": 10752,
        "vocab_size": 166144,
        "num_hidden_layers": 22,
        "num_loops": 2,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 7e7,
        "rms_norm_eps": 1e-5,
    },
    "Huginn-0125": {
        "model_type": "huginn_raven",
        "n_embd": 5280,
        "intermediate_size": 17920,
        "vocab_size": 65536,
        "n_layers_in_prelude": 2,
        "n_layers_in_recurrent_block": 4,
        "n_layers_in_coda": 2,
        "mean_recurrence": 32,
        "n_heads": 55,
        "rope_base": 50000.0,
        "norm_eps": 1e-6,
        "qk_bias": True,
    },
}
_PARSERS: Mapping[str, Callable[[Mapping[str, object]], Config]] = {
    "ouro": OuroConfig.parse,
    "nanbeige": NanbeigeConfig.parse,
    "huginn_raven": HuginnConfig.parse,
}


def config_of(model: str) -> Config:
    """Return the configuration of a published name, or of a checkpoint folder; raise CheckpointError for neither."""
    try:
        fields = OFFICIAL[model] if model in OFFICIAL else read_object(Path(model) / CONFIG_NAME)
    except CheckpointError as error:
        raise CheckpointError(f"model {model!r:.80}: expected {', '.join(OFFICIAL)} or a folder; {error}") from error
    parser = _PARSERS.get(str(fields.get("model_type")))
    if parser is None:
        found = fields.get("model_type")
        raise CheckpointError(f"config field model_type: expected one of {', '.join(_PARSERS)}, found {found!r:.80}")
    return parser(fields)

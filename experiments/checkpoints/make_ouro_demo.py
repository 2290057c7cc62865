"""Makes `ouro-demo`: a random Ouro small enough to keep in the repository, in fp32 and official names.

Run `python -m experiments.checkpoints.make_ouro_demo FOLDER`. Every value is a scaled uniform draw from one CPU
generator, taken in the order of the parameter names: no transcendental function, so the bytes are the same anywhere.
Weights keep activations near unit scale, and each sublayer adds a quarter of the residual's: with equal shares eight
random layer calls amplify fp32 rounding to 4e-6 of the gradient, which would hide the errors that gates look for.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from experiments.checkpoint import CONFIG_NAME, TENSORS_NAME
from experiments.ouro import Ouro, OuroConfig

SEED = 20240
NORM_SPREAD = 0.1
SUBLAYER_SCALE = 0.25
CONFIG: dict[str, object] = {
    "architectures": ["OuroForCausalLM"],
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 4096,
    "model_type": "ouro",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "total_ut_steps": 4,
    "vocab_size": 61,
}


def draw_parameters(config: OuroConfig, seed: int) -> dict[str, Tensor]:
    """Return fp32 parameters by official name.

    Norms are about 1 (a quarter after a sublayer), matrices have variance 1/columns, embeddings variance 1.
    """
    with torch.device("meta"):
        shapes = {name: parameter.shape for name, parameter in Ouro(config).named_parameters()}
    generator = torch.Generator("cpu").manual_seed(seed)
    drawn = {}
    for name in sorted(shapes):
        uniform = torch.rand(shapes[name], generator=generator, dtype=torch.float32) * 2 - 1
        if name.endswith("norm.weight"):
            drawn[name] = 1 + NORM_SPREAD * uniform
        elif name.endswith("norm_2.weight"):
            drawn[name] = SUBLAYER_SCALE * (1 + NORM_SPREAD * uniform)
        elif name == "model.embed_tokens.weight":
            drawn[name] = 3**0.5 * uniform
        else:
            drawn[name] = (3 / shapes[name][-1]) ** 0.5 * uniform
    return drawn


def write(folder: Path) -> None:
    """Write the config and the parameters into a folder, which is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_NAME).write_text(json.dumps(CONFIG, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    save_file(draw_parameters(OuroConfig.parse(CONFIG), SEED), folder / TENSORS_NAME, metadata={"format": "pt"})


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m experiments.checkpoints.make_ouro_demo FOLDER")
    write(Path(sys.argv[1]))

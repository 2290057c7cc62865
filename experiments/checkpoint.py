"""Reads an official checkpoint folder: `config.json` and safetensors, whole or in shards.

Promises that a model holds exactly the checkpoint: tensors that are unknown, missing or misshapen are refused by
name, and nothing is left at its initial value. Never unpickles.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from experiments.errors import ExperimentError

CONFIG_NAME = "config.json"
TENSORS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"


class CheckpointError(ExperimentError):
    """The folder is not a checkpoint of the family that was asked for."""


def read_object(path: Path) -> dict[str, object]:
    """Return the JSON object in a file; raise CheckpointError if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: expected a JSON object, found {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def positive_int(config: Mapping[str, object], name: str) -> int:
    """Return a config field that must be a positive integer."""
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise CheckpointError(f"config field {name}: expected a positive integer, found {value!r}")
    return value


def positive_float(config: Mapping[str, object], name: str) -> float:
    """Return a config field that must be a positive number."""
    value = config.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise CheckpointError(f"config field {name}: expected a positive number, found {value!r}")
    return float(value)


def refuse_other_values(config: Mapping[str, object], understood: Mapping[str, object]) -> None:
    """Raise CheckpointError where a field is present with a value that would change the model's meaning."""
    for name, value in understood.items():
        if name in config and config[name] != value:
            raise CheckpointError(f"config field {name}: only {value!r} is supported, found {config[name]!r}")


def refuse_other_families(config: Mapping[str, object], family: str) -> None:
    """Raise CheckpointError unless `model_type` is there and names the family."""
    found = config.get("model_type")
    if found != family:
        raise CheckpointError(f"config field model_type: expected {family!r}, found {found!r}")


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention heads of a Llama-like config; `query` is a multiple of `key_value`, `dim` is even."""

    query: int
    key_value: int
    dim: int


def read_heads(config: Mapping[str, object]) -> Heads:
    """Read the official head fields; the head dimension falls back to width / heads where it is not given."""
    query = positive_int(config, "num_attention_heads")
    key_value = positive_int(config, "num_key_value_heads")
    dim = positive_int(config, "head_dim") if "head_dim" in config else positive_int(config, "hidden_size") // query
    if query % key_value:
        raise CheckpointError(f"config: {query} heads cannot share {key_value} key/value heads evenly")
    if dim % 2 or not dim:
        raise CheckpointError(f"config: rotation needs an even head dimension, found {dim}")
    return Heads(query, key_value, dim)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return every tensor of `model.safetensors`, or else of the shards that its index names, on the CPU."""
    files = [folder / TENSORS_NAME]
    if not files[0].exists() and (folder / INDEX_NAME).exists():
        files = [folder / name for name in _shard_names(folder / INDEX_NAME)]
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            shard = load_file(file)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file}: expected a safetensors file, found {error}") from error
        repeated = sorted(tensors.keys() & shard.keys())
        if repeated:
            raise CheckpointError(f"{file}: tensors already in another shard: {', '.join(repeated)}")
        tensors.update(shard)
    return tensors


def _shard_names(index: Path) -> list[str]:
    """Return the shard files of an index, each a plain name inside the checkpoint's own folder."""
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: expected a weight_map, found {weight_map!r}")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{index}: expected shards in the same folder, found {name!r}")
    return names


def fill(model: nn.Module, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: str) -> None:
    """Give a model (usually on the meta device) its own copy of the tensors, in one dtype and on one device.

    Raises CheckpointError naming every tensor that is missing, unknown or misshapen; the model is then untouched.
    """
    wanted = dict(model.named_parameters())
    faults = [f"missing {name}" for name in sorted(wanted.keys() - tensors.keys())]
    faults += [f"unknown {name}" for name in sorted(tensors.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & tensors.keys()):
        expected, found = tuple(wanted[name].shape), tuple(tensors[name].shape)
        if expected != found:
            faults.append(f"misshapen {name}: expected {list(expected)}, found {list(found)}")
        elif not tensors[name].is_floating_point():
            faults.append(f"not floating point {name}: found {tensors[name].dtype}")
    if faults:
        raise CheckpointError("the tensors do not fit the config: " + "; ".join(faults))
    copies = {name: tensor.to(device=device, dtype=dtype, copy=True) for name, tensor in tensors.items()}
    model.load_state_dict(copies, strict=True, assign=True)

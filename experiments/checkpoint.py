"""Reads an official checkpoint folder: `config.json` and safetensors, whole or in shards.

Promises that a model holds exactly the checkpoint: tensors that are unknown, missing, misshapen, not finite or in
another shard than the index says are refused by name, and nothing is left at its initial value. A config field is
read, known to change nothing, or switched off; any other is refused by name. Never unpickles.
"""

import json
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from experiments.errors import ExperimentError

CONFIG_NAME = "config.json"
TENSORS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
SIZE_MAX, COUNT_MAX = 2**20, 2**10
"""The largest width, vocabulary or other size, and the most layers, loops or heads, that a config may ask for."""
FLOAT_MAX = sys.float_info.max
HARMLESS = frozenset(
    """architectures attn_implementation auto_map bad_words_ids begin_suppress_tokens bos_token_id
    chunk_size_feed_forward decoder_start_token_id diversity_penalty do_sample dtype early_stopping
    encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id gradient_checkpointing id2label initializer_range is_decoder
    keys_to_ignore_at_inference label2id length_penalty loss_type max_length max_position_embeddings
    max_window_layers min_length name_or_path no_repeat_ngram_size num_beam_groups num_beams num_return_sequences
    output_attentions output_hidden_states output_scores pad_token_id prefix problem_type remove_invalid_values
    repetition_penalty return_dict return_dict_in_generate sep_token_id suppress_tokens task_specific_params
    temperature tf_legacy_loss tokenizer_class top_k top_p torch_dtype torchscript transformers_version typical_p
    unk_token_id use_bfloat16 use_cache""".split()
)
"""Fields that official configs hold and that no loss or gradient depends on: names, initialisation, generation."""
LLAMA_LIKE: Mapping[str, object] = {
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "partial_rotary_factor": 1.0,
    "pretraining_tp": 1,
    "use_sliding_window": False,
}
"""Fields of Llama-like configs, each with the one value that is implemented."""
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}")


class CheckpointError(ExperimentError):
    """The folder is not a checkpoint of the family that was asked for."""

    hint: ClassVar[str] = "compare config.json and the safetensors files with those of the published checkpoint"


class Fields(Mapping[str, object]):
    """A config that remembers which of its fields somebody asked for, so that the rest can be refused by name."""

    def __init__(self, config: Mapping[str, object]) -> None:
        self._config = config
        self._asked: set[str] = set()

    def __getitem__(self, name: str) -> object:
        self._asked.add(name)
        return self._config[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._config)

    def __len__(self) -> int:
        return len(self._config)

    def refuse_rest(self, harmless: Collection[str]) -> None:
        """Raise CheckpointError for fields that nobody read, unless they are harmless, private or switched off."""
        rest = [name for name in self._config if name not in self._asked and name not in harmless]
        unknown = [name for name in sorted(rest) if self._config[name] and not name.startswith("_")]
        if unknown:
            found = ", ".join(f"{name} = {self._config[name]!r:.80}" for name in unknown)
            raise CheckpointError(f"config: expected only fields that are implemented or switched off, found {found}")


def read_object(path: Path) -> dict[str, object]:
    """Return the JSON object in a file; raise CheckpointError if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected a JSON object, found {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def positive_int(config: Mapping[str, object], name: str, most: int = SIZE_MAX) -> int:
    """Return a config field that must be a positive integer, at most `most`."""
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
        raise CheckpointError(f"config field {name}: expected a positive integer up to {most}, found {value!r:.80}")
    return value


def positive_float(config: Mapping[str, object], name: str) -> float:
    """Return a config field that must be a positive number."""
    value = config.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= FLOAT_MAX:
        raise CheckpointError(f"config field {name}: expected a positive number, found {value!r:.80}")
    return float(value)


def refuse_other_values(config: Mapping[str, object], understood: Mapping[str, object]) -> None:
    """Raise CheckpointError where a field is present with a value that would change the model's meaning.

    Null is as good as a value that switches something off.
    """
    for name, value in understood.items():
        found = config.get(name, value)
        if found != value and (found is not None or value):
            raise CheckpointError(f"config field {name}: only {value!r} is supported, found {found!r:.80}")


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
    query = positive_int(config, "num_attention_heads", COUNT_MAX)
    key_value = positive_int(config, "num_key_value_heads", COUNT_MAX)
    own = config.get("head_dim") is not None
    dim = positive_int(config, "head_dim") if own else positive_int(config, "hidden_size") // query
    if query % key_value:
        raise CheckpointError(f"config: {query} heads cannot share {key_value} key/value heads evenly")
    if dim % 2 or not dim:
        raise CheckpointError(f"config: rotation needs an even head dimension, found {dim}")
    return Heads(query, key_value, dim)


def read_rope_theta(config: Mapping[str, object]) -> float:
    """Return the base of a plain rotation: `rope_theta`, or its newer place in `rope_parameters`.

    Raises CheckpointError for any other kind of rotation, and where two places disagree.
    """
    found = {"rope_theta": positive_float(config, "rope_theta")} if config.get("rope_theta") is not None else {}
    for name in ("rope_scaling", "rope_parameters"):
        block = config.get(name)
        if block is None:
            continue
        plain = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1.0}
        if not isinstance(block, dict) or any(
            value != plain.get(key) for key, value in block.items() if key != "rope_theta" and value is not None
        ):
            raise CheckpointError(f"config field {name}: only a plain rotation is supported, found {block!r:.80}")
        if "rope_theta" in block:
            found[f"{name} rope_theta"] = positive_float(block, "rope_theta")
    if not found:
        positive_float(config, "rope_theta")
    if len(set(found.values())) != 1:
        raise CheckpointError(f"config field rope_theta: expected one value, found {found}")
    return next(iter(found.values()))


def refuse_windows(config: Mapping[str, object]) -> None:
    """Raise CheckpointError where a config asks for attention that does not reach back to the first token.

    A window's size alone says nothing where `use_sliding_window` says that it is not used.
    """
    types = config.get("layer_types")
    if types is not None and (not isinstance(types, list) or any(kind != "full_attention" for kind in types)):
        raise CheckpointError(f"config field layer_types: only 'full_attention' is supported, found {types!r:.80}")
    window = config.get("sliding_window")
    if window is not None and config.get("use_sliding_window") is not False:
        raise CheckpointError(f"config field sliding_window: expected null or an unused one, found {window!r:.80}")


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return every tensor of `model.safetensors`, or else of the shards that its index names, on the CPU.

    Raises CheckpointError unless each shard holds exactly the tensors that the index places there.
    """
    whole, index = folder / TENSORS_NAME, folder / INDEX_NAME
    if whole.exists() or not index.exists():
        return _read_file(whole)
    weight_map, tensors = _weight_map(index), dict[str, Tensor]()
    for file in sorted(set(weight_map.values())):
        shard = _read_file(folder / file)
        placed = {name for name, place in weight_map.items() if place == file}
        faults = [f"missing {name}" for name in sorted(placed - shard.keys())]
        for name in sorted(shard.keys() - placed):
            place = weight_map.get(name)
            faults.append(f"found {name}, which it places in {place}" if place else f"found {name}, which it omits")
        if faults:
            raise CheckpointError(f"{folder / file}: expected what {INDEX_NAME} says; {'; '.join(faults)}")
        tensors.update(shard)
    return tensors


def _read_file(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: expected a safetensors file, found {error}") from error


def _weight_map(index: Path) -> dict[str, str]:
    """Return the file of every tensor, each a plain name inside the checkpoint's own folder."""
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: expected a weight_map, found {weight_map!r:.80}")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _PLAIN_NAME.fullmatch(file):
            raise CheckpointError(f"{index}: {name}: expected a shard in the same folder, found {file!r:.80}")
    return weight_map


def mismatches(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> list[str]:
    """Say of each tensor by name that is missing, unknown or misshapen what is wrong with it."""
    faults = [f"missing {name}" for name in sorted(expected.keys() - found.keys())]
    faults += [f"unknown {name}" for name in sorted(found.keys() - expected.keys())]
    for name in sorted(expected.keys() & found.keys()):
        shapes = list(expected[name].shape), list(found[name].shape)
        if shapes[0] != shapes[1]:
            faults.append(f"misshapen {name}: expected {shapes[0]}, found {shapes[1]}")
    return faults


def fill(model: nn.Module, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: str) -> None:
    """Give a model (usually on the meta device) its own copy of the tensors, in one dtype and on one device.

    Raises CheckpointError naming every tensor that is missing, unknown, misshapen or, in that dtype, not finite; the
    model is then untouched.
    """
    faults = mismatches(dict(model.named_parameters()), tensors)
    for name in sorted(tensors):
        if not tensors[name].is_floating_point():
            faults.append(f"not floating point {name}: found {tensors[name].dtype}")
    if faults:
        raise CheckpointError("the tensors do not fit the config: " + "; ".join(faults))
    copies = {name: tensor.to(device=device, dtype=dtype, copy=True) for name, tensor in tensors.items()}
    broken = [name for name, copy in sorted(copies.items()) if not all(end.isfinite() for end in copy.aminmax())]
    if broken:
        raise CheckpointError(f"expected finite numbers in {dtype}, found others in {', '.join(broken)}")
    model.load_state_dict(copies, strict=True, assign=True)

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from experiments import ouro
from experiments.checkpoint import CheckpointError


@pytest.fixture
def folder(reference_folder, tmp_path):
    shutil.copytree(reference_folder("ouro-tiny"), tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def rewrite_config(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    config.update(fields)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}))


def rewrite_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_a_loaded_model_holds_exactly_the_checkpoint(folder):
    """Every official tensor arrives bit for bit under its own name, and none besides."""
    model = ouro.load(folder, torch.float32)
    tensors = load_file(folder / "model.safetensors")
    assert dict(model.named_parameters()).keys() == tensors.keys()
    assert all(torch.equal(parameter, tensors[name]) for name, parameter in model.named_parameters())


def test_widening_is_exact_and_total(folder):
    """An fp64 model of an fp32 checkpoint has fp64 parameters that round back to the checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    for name, parameter in ouro.load(folder, torch.float64).named_parameters():
        assert parameter.dtype == torch.float64
        assert torch.equal(parameter, tensors[name].double())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "missing model.norm.weight"),
        (lambda t: t.update({"model.extra": torch.zeros(1)}), "unknown model.extra"),
        (
            lambda t: t.update({"lm_head.weight": torch.zeros(97, 47)}),
            r"misshapen lm_head.weight: expected \[97, 48\], found \[97, 47\]",
        ),
        (
            lambda t: t.update({"lm_head.weight": torch.zeros(97, 48, dtype=torch.int8)}),
            "not floating point lm_head.weight",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(folder, change, message):
    rewrite_tensors(folder, change)
    with pytest.raises(CheckpointError, match=message):
        ouro.load(folder, torch.float32)


def test_every_fault_is_named_at_once(folder):
    def change(tensors):
        del tensors["model.norm.weight"]
        tensors["model.extra"] = torch.zeros(1)

    rewrite_tensors(folder, change)
    with pytest.raises(CheckpointError, match=r"missing model\.norm\.weight; unknown model\.extra"):
        ouro.load(folder, torch.float32)


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "llama"},
        {"model_type": "absent"},
        {"hidden_act": "gelu"},
        {"tie_word_embeddings": True},
        {"rope_scaling": {"type": "linear"}},
        {"use_sliding_window": True},
        {"attention_bias": True},
        {"total_ut_steps": 0},
        {"total_ut_steps": True},
        {"hidden_size": "48"},
        {"vocab_size": "absent"},
        {"rope_theta": -1.0},
        {"rms_norm_eps": float("nan")},
        {"num_key_value_heads": 3},
        {"head_dim": 11},
    ],
)
def test_a_config_that_means_another_model_is_refused_by_field(folder, fields):
    """The message names the field, or what two fields disagree about."""
    rewrite_config(folder, **fields)
    named = {"num_key_value_heads": "4 heads cannot share 3", "head_dim": "even head dimension"}
    (name,) = fields
    with pytest.raises(CheckpointError, match=named.get(name, name)):
        ouro.load(folder, torch.float32)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("content", [None, b"[]", b"not json"])
def test_unreadable_files_are_refused(folder, name, content):
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        ouro.load(folder, torch.float32)


def shard(folder, names=("model-1.safetensors", "model-2.safetensors")):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: names[index % 2] for index, name in enumerate(sorted(tensors))}
    for file in names:
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, folder / file)
    return tensors, weight_map


def test_shards_load_as_one(folder):
    tensors, weight_map = shard(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    model = ouro.load(folder, torch.float32)
    assert all(torch.equal(parameter, tensors[name]) for name, parameter in model.named_parameters())


def test_a_tensor_in_two_shards_is_refused(folder):
    tensors, weight_map = shard(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    save_file(tensors, folder / "model-2.safetensors")
    with pytest.raises(CheckpointError, match="already in another shard"):
        ouro.load(folder, torch.float32)


def test_an_index_never_leads_out_of_the_folder(folder):
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    index = {"weight_map": {"lm_head.weight": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="in the same folder"):
        ouro.load(folder, torch.float32)

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from experiments import families, huginn, nanbeige, ouro
from experiments.checkpoint import CheckpointError

FOLDERS = ["ouro-tiny", "nanbeige-tiny", "huginn-tiny"]


@pytest.fixture(params=FOLDERS)
def any_folder(request, reference_folder, tmp_path):
    return shutil.copytree(reference_folder(request.param), tmp_path / "any")


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


def test_a_loaded_model_holds_exactly_the_checkpoint(any_folder):
    """Every official tensor arrives bit for bit under its own name, and none besides."""
    model = families.load(any_folder, torch.float32)
    tensors = load_file(any_folder / "model.safetensors")
    assert dict(model.named_parameters()).keys() == tensors.keys()
    assert all(torch.equal(parameter, tensors[name]) for name, parameter in model.named_parameters())


def test_widening_is_exact_and_total(any_folder):
    """An fp64 model of an fp32 checkpoint has fp64 parameters that round back to the checkpoint."""
    tensors = load_file(any_folder / "model.safetensors")
    for name, parameter in families.load(any_folder, torch.float64).named_parameters():
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


@pytest.mark.parametrize(
    ("family", "missing"),
    [
        ("ouro", "model.norm.weight"),
        ("nanbeige", "model.layers.1.mlp.up_proj.weight"),
        ("huginn", "transformer.adapter.weight"),
    ],
)
def test_every_fault_is_named_at_once_in_every_family(reference_folder, tmp_path, family, missing):
    folder = shutil.copytree(reference_folder(f"{family}-tiny"), tmp_path / "checkpoint")

    def change(tensors):
        del tensors[missing]
        tensors["extra"] = torch.zeros(1)

    rewrite_tensors(folder, change)
    with pytest.raises(CheckpointError, match=rf"missing {missing}; unknown extra"):
        families.load(folder, torch.float32)


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


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "llama"},
        {"hidden_act": "gelu"},
        {"tie_word_embeddings": True},
        {"rope_scaling": {"type": "yarn"}},
        {"attention_bias": True},
        {"num_loops": "absent"},
        {"skip_loop_final_norm": "no"},
    ],
)
def test_a_nanbeige_that_means_another_model_is_refused_by_field(reference_folder, tmp_path, fields):
    folder = shutil.copytree(reference_folder("nanbeige-tiny"), tmp_path / "checkpoint")
    rewrite_config(folder, **fields)
    with pytest.raises(CheckpointError, match=next(iter(fields))):
        nanbeige.load(folder, torch.float32)


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "llama"},
        {"tie_embeddings": False},
        {"bias": True},
        {"injection_type": "add"},
        {"qk_bias": "absent"},
        {"mean_recurrence": 0},
        {"num_key_value_heads": 1},
        {"rope_base": -1},
    ],
)
def test_a_huginn_that_means_another_model_is_refused_by_field(reference_folder, tmp_path, fields):
    folder = shutil.copytree(reference_folder("huginn-tiny"), tmp_path / "checkpoint")
    rewrite_config(folder, **fields)
    with pytest.raises(CheckpointError, match=next(iter(fields))):
        huginn.load(folder, torch.float32)


@pytest.mark.parametrize("heads", [3, 8])
def test_a_width_that_does_not_split_into_even_heads_is_refused(reference_folder, tmp_path, heads):
    folder = shutil.copytree(reference_folder("huginn-tiny"), tmp_path / "checkpoint")
    rewrite_config(folder, n_heads=heads)
    with pytest.raises(CheckpointError, match="does not split"):
        huginn.load(folder, torch.float32)


class TestTiedHead:
    @pytest.fixture
    def folder(self, reference_folder, tmp_path):
        return shutil.copytree(reference_folder("huginn-tiny"), tmp_path / "checkpoint")

    def test_a_repeated_head_and_a_rotation_table_change_nothing(self, folder):
        def change(tensors):
            tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
            tensors["freqs_cis"] = torch.zeros(3)

        rewrite_tensors(folder, change)
        names = {name for name, _ in huginn.load(folder, torch.float32).named_parameters()}
        assert "transformer.wte.weight" in names
        assert "lm_head.weight" not in names

    def test_a_head_of_its_own_is_refused(self, folder):
        rewrite_tensors(folder, lambda t: t.update({"lm_head.weight": t["transformer.wte.weight"] + 1}))
        with pytest.raises(CheckpointError, match=r"lm_head\.weight: expected the tied embedding"):
            huginn.load(folder, torch.float32)

    def test_padded_rows_belong_to_the_vocabulary(self, folder):
        rewrite_config(folder, vocab_size=87, padding_multiple=89)
        assert huginn.load(folder, torch.float32).head_VC.shape[0] == 89


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


def test_shards_load_as_one(any_folder):
    tensors, weight_map = shard(any_folder)
    (any_folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    model = families.load(any_folder, torch.float32)
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

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from experiments import families, huginn, nanbeige, ouro
from experiments.checkpoint import CheckpointError
from experiments.official import OFFICIAL, config_of

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
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
def test_tensors_that_do_not_fit_are_refused_by_name(folder, change, message, sharded):
    """In one file, and in shards whose index says what they hold."""
    rewrite_tensors(folder, change)
    if sharded:
        _, weight_map = shard(folder)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
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


EVERYWHERE = [
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}},
    {"partial_rotary_factor": 0.5},
    {"sliding_window": 4096},
    {"layer_types": ["sliding_attention", "full_attention"]},
    {"attention_dropout": 0.1},
    {"hidden_activation": "gelu"},
    {"final_logit_softcapping": 30.0},
    {"embedding_multiplier": 12},
    {"use_qk_norm": True},
    {"quantization_config": {"bits": 4}},
    {"num_experts": 8},
    {"is_encoder_decoder": True},
]


@pytest.mark.parametrize("fields", EVERYWHERE, ids=lambda fields: next(iter(fields)))
def test_a_field_that_nobody_implements_is_refused_by_name_in_every_family(any_folder, fields):
    """Before a tensor is read. A name that means nothing to a family must not look as if it were honoured."""
    rewrite_config(any_folder, **fields)
    with pytest.raises(CheckpointError, match=next(iter(fields))):
        families.load(any_folder, torch.float32)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("Ouro-1.4B", {"mlp_bias": True}),
        ("Ouro-1.4B", {"attention_bias": True}),
        ("Ouro-1.4B", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
        ("Ouro-1.4B", {"rope_scaling": {"type": "default", "rope_type": "yarn"}}),
        ("Ouro-1.4B", {"rope_scaling": "yarn"}),
        ("Ouro-1.4B", {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}),
        ("Ouro-1.4B", {"layer_types": "full_attention"}),
        ("Ouro-1.4B", {"hidden_size": 10**30}),
        ("Ouro-1.4B", {"num_hidden_layers": 10**6}),
        ("Ouro-1.4B", {"rope_theta": 10**400}),
        ("Nanbeige4.2-3B", {"mlp_bias": True}),
        ("Nanbeige4.2-3B", {"loop_share_kv": True}),
        ("Nanbeige4.2-3B", {"enable_depth_attention": True}),
        ("Nanbeige4.2-3B", {"enable_double_loop_split": True}),
        ("Nanbeige4.2-3B", {"use_ngram_embedding": True}),
        ("Nanbeige4.2-3B", {"loop_loss_weights": [1.0, 0.5]}),
        ("Nanbeige4.2-3B", {"loop_loss_weights": 2}),
        ("Huginn-0125", {"nonlin_name": "GELU"}),
        ("Huginn-0125", {"state_init": "zero"}),
        ("Huginn-0125", {"test_time_noise": 0.1}),
        ("Huginn-0125", {"head_dim": 64}),
        ("Huginn-0125", {"n_layers": 9}),
        ("Huginn-0125", {"init_values": {"embed_scale": 1.0}}),
        ("Huginn-0125", {"init_values": {"std": 10**400}}),
        ("Huginn-0125", {"init_values": "takase"}),
        ("Huginn-0125", {"padded_vocab_size": 1024}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_a_field_that_means_another_model_of_the_family_is_refused_by_name(tmp_path, name, fields):
    (tmp_path / "config.json").write_text(json.dumps({**OFFICIAL[name], **fields}))
    with pytest.raises(CheckpointError, match=next(iter(fields)).replace("rope_parameters", "rope")):
        config_of(str(tmp_path))


LIBRARY = {
    "_name_or_path": "somewhere",
    "architectures": ["AnyForCausalLM"],
    "auto_map": {"AutoConfig": "configuration.Config"},
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.55.0",
    "use_cache": True,
}
LLAMA = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "max_position_embeddings": 65536,
    "rope_scaling": None,
    "tie_word_embeddings": False,
}
BESIDE_THE_SHAPE = {
    "Ouro-1.4B": {
        **LLAMA,
        "early_exit_threshold": 1.0,
        "layer_types": ["full_attention"] * 24,
        "max_window_layers": 24,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "Nanbeige4.2-3B": {
        **LLAMA,
        "enable_depth_attention": False,
        "enable_double_loop_split": False,
        "hyper_connection_rate": 4,
        "loop_loss_weights": [1.0],
        "loop_share_kv": False,
        "mlp_bias": False,
        "pad_token_id": 0,
        "pretraining_tp": 1,
        "skip_loop_final_norm": False,
        "use_ngram_embedding": False,
    },
    "Huginn-0125": {
        "activation_checkpoint_impl": "per-iteration",
        "architecture_class_name": "RecurrentGPT",
        "bias": False,
        "block_class_name": "SandwichBlock",
        "block_size": 4096,
        "effective_expected_depth": 132,
        "head_dim": 96,
        "init_orthogonal": False,
        "init_strategy": "takase",
        "init_values": {
            "embed_scale": 72.6636084983398,
            "embedding": 0.008703882797784892,
            "out_proj": 0.0005356869554443541,
            "std": 0.008703882797784892,
        },
        "injection_type": "linear",
        "mean_backprop_depth": 8,
        "mlp_class_name": "GatedMLP",
        "n_layers": 8,
        "nonlin_name": "SiLU",
        "norm_class_name": "RMSNorm_llama",
        "num_key_value_heads": 55,
        "padded_vocab_size": 65536,
        "padding_multiple": 4096,
        "rope_base": 50000,
        "sampling_scheme": "poisson-lognormal-filling",
        "state_init": "like-init",
        "test_time_noise": 0,
        "test_time_noise_type": "fixed",
        "tie_embeddings": True,
    },
}


@pytest.mark.parametrize("name", OFFICIAL)
def test_what_published_configs_say_beside_the_shape_is_accepted(tmp_path, name):
    """None of it changes what is computed, and the shape read from the whole file is that of the short one."""
    (tmp_path / "config.json").write_text(json.dumps({**LIBRARY, **BESIDE_THE_SHAPE[name], **OFFICIAL[name]}))
    assert config_of(str(tmp_path)) == config_of(name)


def test_the_newer_place_of_the_rotations_base_is_read(folder):
    """With or without the older field, and beside a window that is said to be unused."""
    block = {"rope_type": "default", "rope_theta": 1000000.0, "partial_rotary_factor": 1.0}
    rewrite_config(folder, rope_parameters=block, use_sliding_window=False, sliding_window=4096, head_dim=None)
    older = ouro.load(folder, torch.float32).config
    rewrite_config(folder, rope_theta="absent")
    assert ouro.load(folder, torch.float32).config == older
    rewrite_config(folder, rope_parameters="absent")
    with pytest.raises(CheckpointError, match="rope_theta"):
        ouro.load(folder, torch.float32)


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

    def test_a_head_in_another_dtype_is_refused(self, folder):
        rewrite_tensors(folder, lambda t: t.update({"lm_head.weight": t["transformer.wte.weight"].bfloat16()}))
        with pytest.raises(CheckpointError, match=r"lm_head\.weight: expected the tied embedding"):
            huginn.load(folder, torch.float32)

    def test_padded_rows_belong_to_the_vocabulary(self, folder):
        rewrite_config(folder, vocab_size=87, padding_multiple=89)
        assert huginn.load(folder, torch.float32).head_VC.shape[0] == 89


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("content", [None, b"[]", b"not json", b"[" * 10**5, b"\xff"])
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
    with pytest.raises(CheckpointError, match=r"found lm_head\.weight, which it places in model-1\.safetensors"):
        ouro.load(folder, torch.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda index, name: index.update({name: "model-2.safetensors"}),
            r"model-1\.safetensors: .*found NAME, which it places in model-2",
        ),
        (lambda index, name: index.pop(name), "found NAME, which it omits"),
        (lambda index, name: index.update(extra="model-1.safetensors"), r"model-1\.safetensors: .*missing extra"),
        (lambda index, name: index.update(extra="model-3.safetensors"), r"model-3\.safetensors: .*found No such file"),
        (lambda index, name: index.update({name: None}), "NAME: expected a shard in the same folder, found None"),
        (lambda index, name: index.clear(), "expected a weight_map"),
    ],
    ids=["another shard", "unnamed", "in no shard", "no shard", "null", "empty"],
)
def test_an_index_that_disagrees_with_its_shards_is_refused_by_name(any_folder, change, message):
    """Though every tensor is found somewhere: a map that is wrong in one place is not to be trusted in another."""
    _, weight_map = shard(any_folder)
    name = next(name for name, file in weight_map.items() if file == "model-1.safetensors")
    change(weight_map, name)
    (any_folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=message.replace("NAME", name)):
        families.load(any_folder, torch.float32)


@pytest.mark.parametrize("place", ["../model.safetensors", "..", ".", "/etc/passwd", "a/b", "", "a\0b", 3])
def test_an_index_never_leads_out_of_the_folder(folder, place):
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    index = {"weight_map": {"lm_head.weight": place}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: expected a shard in the same folder"):
        ouro.load(folder, torch.float32)


@pytest.mark.parametrize(
    ("value", "dtype"), [(float("nan"), "float32"), (-float("inf"), "float64"), (1e300, "float32")]
)
def test_a_value_that_is_not_finite_is_refused_by_name(any_folder, value, dtype):
    """As the model would hold it: 1e300 is a number in fp64 and none in fp32."""
    tensors = load_file(any_folder / "model.safetensors")
    name = sorted(tensors)[2]
    broken = tensors[name].double()
    broken.view(-1)[3] = value
    rewrite_tensors(any_folder, lambda t: t.update({name: broken}))
    with pytest.raises(CheckpointError, match=rf"finite numbers in torch\.{dtype}, found others in {name}$"):
        families.load(any_folder, getattr(torch, dtype))

"""`python -m experiments.reference`: one line a schedule, and an exit status that means something."""

import copy
import json
import math
import re
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from experiments import dense_oracle, full_packed, gpu_check, main_gradients, reference
from experiments.batch import Group, Response
from experiments.exactness import BF16_WHOLE_RATIO_MAX, compare, gradients
from experiments.examples import grpo
from experiments.latent import PositionLatent
from experiments.objective import Supervision, published
from experiments.schedules import SCHEDULES
from experiments.toys import toy

KEYS = {
    "schedule",
    "loss_error",
    "gradient_relative_l2",
    "worst_tensor",
    "worst_tensor_relative_l2",
    "log_prob_max_abs",
    "entropy_max_abs",
    "seconds",
    "passed",
}
METADATA = {"alpha": "1.5", "kl_coefficient": "0.01", "entropy_coefficient": "0.003", "reduction": "token_mean"}


def lines(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("microbatch", ["1", "3"])
@pytest.mark.parametrize(
    ("suffix", "dtype", "gate"),
    [("", "float32", 4e-6), ("", "float64", 4e-6), ("-f64", "float64", 1e-6), ("-f64", "float32", 4e-6)],
)
def test_every_schedule_passes_on_every_folder(reference_folder, family, capsys, suffix, dtype, gate, microbatch):
    """The gate is that of the lower precision, folder's or requested."""
    folder = str(reference_folder(f"{family}-tiny{suffix}"))
    assert reference.main([folder, "--dtype", dtype, "--microbatch", microbatch]) == 0
    found = lines(capsys)
    assert [line["schedule"] for line in found] == list(SCHEDULES)
    for line in found:
        assert set(line) == KEYS
        assert line["gradient_relative_l2"] <= gate
        assert line["worst_tensor_relative_l2"] >= line["gradient_relative_l2"]
        assert line["seconds"] > 0


def test_bf16_is_judged_beside_the_baseline(reference_folder, family, capsys):
    assert reference.main([str(reference_folder(f"{family}-tiny")), "--dtype", "bfloat16"]) == 0
    found = lines(capsys)
    assert all(set(line) == KEYS | {"noise_floor"} for line in found)
    assert all(1e-4 < line["noise_floor"] < 1e-2 < line["gradient_relative_l2"] * 2 for line in found)


def test_bf16_errors_of_right_schedules_are_the_same_on_average(family):
    """The strict gate, over seeds: one error is one draw, their geometric mean is not."""
    objective, logs = published(Supervision.ALL_LOOPS), {name: [] for name in SCHEDULES}
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        latent = PositionLatent(seed) if family == "huginn" else None
        responses = [
            Response(
                torch.randint(13, (length,), generator=generator),
                torch.randn(length, generator=generator),
                torch.rand(length, generator=generator) - 3,
                latent,
            )
            for length in (5, 1, 6)
        ]
        group = Group(torch.randint(13, (12,), generator=generator), tuple(responses))
        model = toy(family, width=64, dtype=torch.bfloat16, seed=seed)
        oracle = dense_oracle.evaluate(copy.deepcopy(model).double(), group, objective)
        errors = {}
        for name, schedule in SCHEDULES.items():
            main_gradients.widen(model)
            schedule(model, group, objective.token_weights(group.lengths), objective, microbatch=2)
            errors[name] = compare(gradients(model), oracle.gradient).whole
        for name, error in errors.items():
            logs[name].append(math.log(error / errors["full-packed"]))
    for name, values in logs.items():
        assert math.exp(sum(values) / len(values)) <= BF16_WHOLE_RATIO_MAX, name


def test_one_schedule_is_one_line(reference_folder, capsys):
    arguments = [str(reference_folder("nanbeige-tiny")), "--schedule", "prefix-packed", "--device", "cpu"]
    assert reference.main(arguments) == 0
    assert [line["schedule"] for line in lines(capsys)] == ["prefix-packed"]


@pytest.fixture
def altered(reference_folder, tmp_path):
    """Return a copy of a folder with something changed in its results."""

    def make(change, metadata=METADATA):
        folder = shutil.copytree(reference_folder("nanbeige-tiny"), tmp_path / "folder")
        tensors = load_file(folder / "expected.safetensors")
        change(tensors)
        save_file(tensors, folder / "expected.safetensors", metadata=metadata)
        return str(folder)

    return make


@pytest.mark.parametrize(
    ("name", "key", "least"),
    [
        ("loss", "loss_error", 1e-4),
        ("per_loop_log_probs", "log_prob_max_abs", 1e-4),
        ("terminal_entropy", "entropy_max_abs", 1e-4),
        ("advantages", "loss_error", 1e-5),
        ("reference_log_probs", "loss_error", 1e-7),
        ("grad.lm_head.weight", "gradient_relative_l2", 1e-5),
        ("grad.model.norm.weight", "worst_tensor_relative_l2", 1e-5),
    ],
)
def test_a_wrong_result_fails(altered, capsys, name, key, least):
    """Each published value is really compared: a change of a ten-thousandth ends with status 1."""

    def change(tensors):
        tensors[name] *= 1.0001
        tensors[name] += 1e-4

    assert reference.main([altered(change), "--schedule", "full-packed"]) == 1
    (line,) = lines(capsys)
    assert line["passed"] is False
    assert line[key] > least


def test_a_wrong_schedule_fails(reference_folder, capsys, monkeypatch):
    def off(model, group, weights, objective, *, microbatch):
        loss = full_packed.accumulate(model, group, weights, objective, microbatch=microbatch)
        model.lm_head.weight.grad.mul_(1.001)
        return loss

    monkeypatch.setattr(reference, "SCHEDULES", dict(SCHEDULES) | {"tree-packed": off})
    assert reference.main([str(reference_folder("nanbeige-tiny"))]) == 1
    found = {line["schedule"]: line for line in lines(capsys)}
    assert [name for name, line in found.items() if not line["passed"]] == ["tree-packed"]
    assert found["tree-packed"]["worst_tensor"] == "lm_head.weight"


def refused(capsys, *arguments):
    """Run the command, which must end with 2 and say what it expected and found, with a hint; return its words."""
    assert reference.main([str(argument) for argument in arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    error, hint = printed.err.splitlines()
    assert re.fullmatch(r"error: .*expected .*found .*", error)
    assert hint.startswith("hint: ")
    return error


def spoilt(tensor, value):
    """Return a copy with another last value."""
    copy = tensor.clone()
    copy.view(-1)[-1] = value
    return copy


SHAPES = {
    "short": lambda t: t[:-1].clone(),
    "long": lambda t: torch.cat((t, t[:1])),
    "deeper": lambda t: t.unsqueeze(0),
    "flat": lambda t: t.reshape(-1)[0].clone(),
    "empty": lambda t: t[:0],
}
FLOATS = {
    "integer": lambda t: t.long(),
    "half": lambda t: t.half(),
    "bfloat16": lambda t: t.bfloat16(),
    "nan": lambda t: spoilt(t, math.nan),
    "infinite": lambda t: spoilt(t, -math.inf),
}
INTEGERS = {
    "float": lambda t: t.float(),
    "int32": lambda t: t.int(),
    "negative": lambda t: spoilt(t, -1),
    "huge": lambda t: spoilt(t, 2**62),
}
COLUMNS = {"one column": lambda t: t[:, :1].clone(), "wide": lambda t: torch.cat((t, t[:, :1]), 1)}
ONLY_ITS_OWN_LENGTH = {name: SHAPES[name] for name in ("deeper", "flat", "empty")}
FORM = {
    "prompt": ONLY_ITS_OWN_LENGTH | INTEGERS | {"vocabulary": lambda t: spoilt(t, 101)},
    "responses": SHAPES | INTEGERS | {"vocabulary": lambda t: spoilt(t, 101)},
    "response_lengths": SHAPES | INTEGERS | {"none": lambda t: t * 0, "too long": lambda t: t + 1},
    "advantages": SHAPES | FLOATS,
    "reference_log_probs": SHAPES | FLOATS,
    "per_loop_log_probs": SHAPES | FLOATS | COLUMNS,
    "terminal_entropy": SHAPES | FLOATS,
    "loss": SHAPES | FLOATS,
    "grad.lm_head.weight": SHAPES | FLOATS | COLUMNS | {"transposed": lambda t: t.T.contiguous()},
    "initial_state": SHAPES | FLOATS | COLUMNS,
}
MUTATIONS = [(name, what) for name, changes in FORM.items() for what in ("absent", *changes)]


@pytest.mark.parametrize(("name", "what"), MUTATIONS, ids=lambda value: value.replace(" ", "-"))
def test_every_field_of_the_form_is_checked(reference_folder, tmp_path, capsys, name, what):
    """Whatever is wrong with a tensor, the command names it, before anything runs; nothing is broadcast."""
    family = "huginn" if name == "initial_state" else "nanbeige"
    folder = shutil.copytree(reference_folder(f"{family}-tiny"), tmp_path / "folder")
    tensors = load_file(folder / "expected.safetensors")
    original = tensors.pop(name)
    if what != "absent":
        tensors[name] = FORM[name][what](original)
    save_file(tensors, folder / "expected.safetensors", metadata=METADATA)
    error = refused(capsys, folder, "--schedule", "full-packed")
    # Lengths decide the shape that the tensors which they split must have.
    assert name in error or (name == "response_lengths" and "responses" in error)


def test_a_latent_is_not_given_to_a_family_without_one(altered, capsys):
    assert "initial_state" in refused(capsys, altered(lambda t: t.update(initial_state=torch.zeros(14, 32))))


def test_a_gradient_that_no_parameter_has_is_refused(altered, capsys):
    assert "unknown grad.more" in refused(capsys, altered(lambda t: t.update({"grad.more": torch.zeros(1)})))


def test_a_reduction_that_is_left_out_is_the_token_mean(altered, capsys):
    metadata = {name: text for name, text in METADATA.items() if name != "reduction"}
    assert reference.main([altered(lambda t: None, metadata), "--schedule", "prefix-packed"]) == 0
    assert lines(capsys)[0]["loss_error"] <= 2e-6


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (key, value)
        for key in METADATA
        for value in (None, "", "much", "nan", "inf", "1e6", "-1e999")
        if (key, value) != ("reduction", None)
    ],
)
def test_every_constant_is_checked(altered, capsys, key, value):
    metadata = {name: text for name, text in METADATA.items() if name != key}
    assert f"metadata {key}" in refused(
        capsys, altered(lambda t: None, metadata if value is None else metadata | {key: value})
    )


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "expected.safetensors"])
@pytest.mark.parametrize("keep", [None, 0, 7, 100, 0.5, 0.99, "folder", b"[1]", b"{}", b"\x00" * 64])
def test_a_file_that_is_missing_or_cut_short_is_refused_by_name(reference_folder, tmp_path, capsys, name, keep):
    path = shutil.copytree(reference_folder("huginn-tiny"), tmp_path / "folder") / name
    content = path.read_bytes()
    path.unlink()
    if keep == "folder":
        path.mkdir()
    elif isinstance(keep, bytes):
        path.write_bytes(keep)
    elif keep is not None:
        path.write_bytes(content[: int(keep * len(content)) if isinstance(keep, float) else keep])
    error = refused(capsys, path.parent)
    assert name in error or (keep == b"{}" and "model_type" in error)


def test_a_checkpoint_that_does_not_fit_is_refused(reference_folder, tmp_path, capsys):
    folder = shutil.copytree(reference_folder("ouro-tiny"), tmp_path / "folder")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][0, 0] = math.nan
    save_file(tensors, folder / "model.safetensors")
    assert "lm_head.weight" in refused(capsys, folder)


@pytest.mark.parametrize("folder", ["", "nowhere", "x" * 5000, "nul\0"])
def test_what_is_no_folder_is_refused(tmp_path, capsys, folder):
    refused(capsys, tmp_path / folder)
    (tmp_path / "file").write_text("")
    refused(capsys, tmp_path / "file")


@pytest.mark.parametrize("size", ["0", "-1", "-99999999999999999999"])
def test_no_response_at_once_is_refused(reference_folder, capsys, size):
    error = refused(capsys, reference_folder("ouro-tiny"), "--microbatch", size)
    assert error.endswith(f"--microbatch: expected at least one response, found {size}")


def test_more_responses_at_once_than_there_are_is_all_of_them(reference_folder, capsys):
    folder = str(reference_folder("nanbeige-tiny"))
    assert reference.main([folder, "--microbatch", "9" * 30, "--dtype", "bfloat16"]) in (0, 1)
    assert len(lines(capsys)) == len(SCHEDULES)


@pytest.mark.parametrize(
    "arguments",
    [["--schedule", "magic"], ["--dtype", "int8"], ["--device", "tpu"], ["--microbatch", "1.5"], ["--microbatch", ""]],
)
def test_an_argument_without_meaning_is_refused(reference_folder, capsys, arguments):
    with pytest.raises(SystemExit) as ended:
        reference.main([str(reference_folder("ouro-tiny")), *arguments])
    assert ended.value.code == 2
    assert f"argument {arguments[0]}: invalid" in capsys.readouterr().err


def test_a_device_that_is_not_there_is_refused(reference_folder, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "--device" in refused(capsys, reference_folder("ouro-tiny"), "--device", "cuda")


def test_help_gives_the_form_of_a_folder(capsys):
    with pytest.raises(SystemExit):
        reference.main(["--help"])
    assert set(FORM) - {"grad.lm_head.weight"} <= set(re.findall(r"\w+", capsys.readouterr().out))


def test_the_device_check_refuses_a_folder_in_words(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_check, "check_attention", lambda: True)
    assert gpu_check.main([str(tmp_path)]) == 2
    assert "expected.safetensors" in capsys.readouterr().err


@pytest.mark.parametrize("updates", ["0", "-3"])
def test_the_example_needs_an_update(capsys, monkeypatch, updates):
    monkeypatch.setattr(sys, "argv", ["grpo", "--updates", updates])
    with pytest.raises(SystemExit) as ended:
        grpo.main()
    assert ended.value.code == 2
    assert f"--updates: expected at least one, found {updates}" in capsys.readouterr().err


def test_the_device_check_needs_a_device(capsys):
    if torch.cuda.is_available():
        pytest.skip("has a device")
    assert gpu_check.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_the_device_check_times_the_published_layer():
    """Six physical layers of the published shape, whose limits are those of the whole model's to two digits."""
    config = gpu_check.layer_shape()
    assert (config.layers, config.loops, config.width) == (6, 4, 2048)
    assert gpu_check.OBJECTIVE.supervised_loops(config.loops) == (3,)

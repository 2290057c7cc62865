"""`python -m experiments.reference`: one line a schedule, and an exit status that means something."""

import copy
import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from experiments import dense_oracle, full_packed, gpu_check, main_gradients, reference
from experiments.batch import Group, Response
from experiments.exactness import BF16_WHOLE_RATIO_MAX, compare, gradients
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


@pytest.mark.parametrize(
    ("change", "metadata", "message"),
    [
        (lambda t: t.pop("prompt"), METADATA, "prompt"),
        (lambda t: t.update({"response_lengths": torch.tensor([1])}), METADATA, "split"),
        (lambda t: None, {}, "reduction"),
        (lambda t: None, METADATA | {"reduction": "sum"}, "expected token_mean or response_mean, found 'sum'"),
        (lambda t: t.pop("grad.lm_head.weight"), METADATA, "found only on one"),
    ],
)
def test_a_folder_that_cannot_be_used_ends_with_2(altered, capsys, change, metadata, message):
    assert reference.main([altered(change, metadata)]) == 2
    assert message in capsys.readouterr().err


def test_no_folder_and_no_microbatch_end_with_2(reference_folder, tmp_path, capsys):
    assert reference.main([str(tmp_path)]) == 2
    assert reference.main([str(reference_folder("ouro-tiny")), "--microbatch", "0"]) == 2
    assert "at least one response" in capsys.readouterr().err


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

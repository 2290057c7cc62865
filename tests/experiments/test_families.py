"""What each family computes: call order, causality, dtype purity, and the rules that make it itself."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from experiments import families, full_packed, huginn, nanbeige, toys
from experiments.attention import SegmentedCausal
from experiments.checkpoint import CheckpointError
from experiments.latent import PositionLatent, draw
from experiments.layers import rotate_adjacent, rotation
from experiments.objective import Supervision, published
from experiments.toys import ToyError, toy

NARROW = (torch.float32, torch.float16, torch.bfloat16)


def run(model, tokens, loops=None, attend=None, positions=None, seed=17):
    """Return the readout states of one sequence at positions 0, 1, ..."""
    length = len(tokens)
    latent = draw(seed, 0, length, model.head_VC.shape[1]) if model.takes_latent else None
    positions = torch.arange(length) if positions is None else positions
    loops = range(model.loops) if loops is None else loops
    return model.readout_states(tokens, positions, attend or SegmentedCausal([length]), loops, latent)


def test_an_fp64_model_computes_in_fp64_throughout(family):
    """Dtype purity: no intermediate of an fp64 forward pass, norms and rotation included, is narrower."""
    narrow = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            results = result if isinstance(result, tuple | list) else (result,)
            if any(isinstance(part, torch.Tensor) and part.dtype in NARROW for part in results):
                narrow.append(str(function))
            return result

    model = toy(family)
    latent = draw(17, 0, 5, 16).double() if model.takes_latent else None
    with Watch():
        model.readout_states(torch.arange(5), torch.arange(5), SegmentedCausal([5]), range(model.loops), latent)
    assert narrow == []


def test_a_later_token_never_reaches_an_earlier_state(family):
    model, tokens = toy(family), torch.arange(6)
    before = run(model, tokens)
    tokens[4] = 11
    for then, now in zip(before, run(model, tokens), strict=True):
        assert torch.equal(then[:4], now[:4])
        assert not torch.equal(then[4:], now[4:])


def test_only_the_positions_of_keys_relative_to_queries_matter(family):
    """Rotation is relative in both pairings. A latent belongs to the token here, not to its shifted position."""
    model, tokens = toy(family), torch.arange(6)
    here = run(model, tokens)[-1]
    torch.testing.assert_close(run(model, tokens, positions=torch.arange(6) + 900)[-1], here, atol=1e-11, rtol=0)
    assert float((run(model, tokens, positions=torch.arange(6) * 2)[-1] - here).detach().abs().max()) > 1e-4


@pytest.mark.parametrize(
    ("family", "loops", "calls"),
    [("ouro", (3,), 8), ("ouro", (0, 1, 2, 3), 8), ("nanbeige", (1,), 4), ("huginn", (2,), 8), ("huginn", (0, 2), 9)],
)
def test_calls_are_numbered_as_they_run_and_none_runs_unasked(family, loops, calls):
    """Layers times loops; Huginn's coda runs only where it is read: 1 + 2 * 3 + 1 a read loop."""
    seen = []

    def attend(call, query_THE, key_TKE, value_TKE):
        seen.append(call)
        return query_THE

    model = toy(family)
    assert len(run(model, torch.arange(5), loops, attend)) == len(loops)
    assert seen == list(range(calls))


def test_reading_fewer_loops_changes_none_of_them(family):
    """The coda, the final norm and the head feed nothing back."""
    model, tokens = toy(family), torch.arange(5)
    assert torch.equal(run(model, tokens)[-1], run(model, tokens, (model.loops - 1,))[0])


def test_adjacent_pairs_turn_as_complex_numbers():
    """(x[2i] + i x[2i+1]) * exp(i * position * theta^(-2i/E)), and lengths stay."""
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(3, 2, 6, generator=generator, dtype=torch.float64)
    positions = torch.tensor([0, 3, 50])
    found = rotate_adjacent(x, *rotation(positions, 6, 5e4, torch.float64))
    angles = positions[:, None, None] * 5e4 ** (-torch.arange(0, 6, 2, dtype=torch.float64) / 6)
    expected = torch.view_as_complex(x.unflatten(-1, (3, 2))) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(found, torch.view_as_real(expected).flatten(-2), atol=1e-14, rtol=0)


@pytest.mark.parametrize("skip", [True, False])
def test_nanbeige_reads_the_normed_state_and_feeds_on_as_configured(skip):
    """The last loop alone from the state that the loop before it left, with and without the norm between."""
    model = toy("nanbeige")
    model.config = replace(model.config, skip_loop_final_norm=skip)
    tokens = torch.arange(5)
    states = run(model, tokens)
    turn = rotation(torch.arange(5), model.config.head_dim, 7e7, torch.float64)
    x = model.model.embed_tokens(tokens)
    for loop, state in enumerate(states):
        for layer in model.model.layers:
            x = layer(x, turn, SegmentedCausal([5]), 0)
        assert torch.equal(state, model.model.norm(x)), loop
        x = x if skip else model.model.norm(x)


class TestHuginn:
    def test_another_latent_is_another_result(self, reference, reference_folder):
        """Negative control: the vectors' own latent matters, to far beyond the gate."""
        expected, group = reference("huginn-tiny")
        model = families.load(reference_folder("huginn-tiny"), torch.float32)
        others = [replace(response, latent=PositionLatent(0)) for response in group.responses]
        scores = full_packed.score_responses(model, group.prompt_P, others, range(3))
        assert float((scores.log_probs_NS - expected["per_loop_log_probs"]).detach().abs().max()) > 1e-3

    def test_a_coda_that_is_fed_back_is_another_model(self, reference, reference_folder):
        """Negative control: what the head reads must not become the next loop's state."""
        expected, group = reference("huginn-tiny")
        model = families.load(reference_folder("huginn-tiny"), torch.float32)
        core, coda = model.transformer.core_block, model.transformer.coda
        looped = torch.nn.ModuleList([*core, *coda])
        model.transformer.core_block = looped
        scores = full_packed.score_responses(model, group.prompt_P, group.responses, range(3))
        assert float((scores.log_probs_NS - expected["per_loop_log_probs"]).detach().abs().max()) > 1e-3

    def test_without_qk_bias_there_is_no_such_parameter(self, reference_folder, tmp_path):
        folder = shutil.copytree(reference_folder("huginn-tiny"), tmp_path / "checkpoint")
        config = json.loads((folder / "config.json").read_text()) | {"qk_bias": False}
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=r"unknown transformer\.coda\.0\.attn\.qk_bias"):
            huginn.load(folder, torch.float32)
        tensors = {n: t for n, t in load_file(folder / "model.safetensors").items() if "qk_bias" not in n}
        save_file(tensors, folder / "model.safetensors")
        assert huginn.load(folder, torch.float32).config.qk_bias is False

    def test_terminal_supervision_runs_the_coda_once(self):
        """What all-loop supervision adds is one coda a loop, and nothing else."""
        model = toy("huginn")
        terminal = published(Supervision.TERMINAL_ONLY).supervised_loops(model.loops)
        counts = []
        for loops in (terminal, range(model.loops)):
            calls = []
            run(model, torch.arange(4), loops, lambda call, q, k, v, seen=calls: seen.append(call) or q)
            counts.append(len(calls))
        assert counts == [1 + 3 * 2 + 1, 1 + 3 * 2 + 3]


def test_a_family_is_found_by_its_model_type(reference_folder):
    assert isinstance(families.load(reference_folder("nanbeige-tiny"), torch.float32), nanbeige.Nanbeige)
    assert isinstance(families.load(reference_folder("huginn-tiny"), torch.float32), huginn.Huginn)


def test_an_unknown_family_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match="model_type: expected one of ouro, nanbeige, huginn_raven"):
        families.load(tmp_path, torch.float32)


def test_toys_are_the_same_in_every_dtype(family):
    wide, narrow = toy(family), toy(family, dtype=torch.float32)
    for name, parameter in narrow.named_parameters():
        assert torch.equal(parameter, dict(wide.named_parameters())[name].float())
    assert set(toys.TOYS) == {"ouro", "nanbeige", "huginn"}


@pytest.mark.parametrize(("family", "width"), [("llama", 16), ("ouro", 12), ("ouro", 0)])
def test_a_toy_that_does_not_exist_is_refused(family, width):
    with pytest.raises(ToyError):
        toy(family, width=width)


def test_the_readme_names_every_file_and_no_other():
    """Its table of files, against the folder: a file in each place, and a place for each file and folder."""
    package = Path(families.__file__).parent
    table = (package / "README.md").read_text().split("## What is here")[1].split("\n## ")[0]
    named = set(re.findall(r"`([\w*]+\.py|\w+/|\w+\.md)`", table))
    files = {path.name for path in package.glob("*.py")} - {"__init__.py"}
    folders = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    documents = {path.name for path in package.glob("*.md")} - {"README.md"}
    assert named == files | folders | documents

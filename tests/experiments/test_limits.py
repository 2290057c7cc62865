"""Counts against torch's own counter, enumerated pairs, measured storages and the published table of limits."""

import dataclasses
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from experiments import costs, limits, official
from experiments.batch import Group
from experiments.checkpoint import CheckpointError
from experiments.contract import Options
from experiments.full_packed import SegmentedCausal
from experiments.latent import PositionLatent, draw
from experiments.objective import Supervision, published
from experiments.official import OFFICIAL, config_of
from experiments.schedules import SCHEDULES
from experiments.toys import toy

TERMINAL, ALL = Supervision.TERMINAL_ONLY, Supervision.ALL_LOOPS
PUBLISHED_LIMITS = {
    (512, 512, 16): (1.83, 1.77, 1.86),
    (2048, 128, 32): (10.6, 10.2, 11.1),
    (2048, 512, 16): (3.71, 3.56, 3.90),
    (8192, 512, 16): (7.49, 7.29, 8.07),
    (8192, 128, 32): (19.9, 19.4, 20.9),
    (200, 3072, 8): (1.05, 1.05, 1.05),
}


@pytest.mark.parametrize(("supervision", "rematerialise"), [(ALL, False), (ALL, True), (TERMINAL, False)])
def test_projections_and_readout_equal_torchs_flop_counter(case, supervision, rematerialise):
    """Exactly, for every schedule: ragged, with empty and one-token responses, in microbatches of two."""
    lengths, objective = (3, 0, 1), published(supervision)
    model, group = case(lengths)
    architecture = costs.describe(model.config, supervision)
    options = Options(rematerialise=rematerialise, rematerialise_prefix=rematerialise)
    again = {"rematerialise": rematerialise, "rematerialise_prefix": rematerialise}
    names = SCHEDULES if (supervision, rematerialise) == (ALL, False) else ("full-packed", "prefix-packed")
    for name in names:
        schedule = SCHEDULES[name]
        with FlopCounterMode(display=False) as counter:
            schedule(model, group, objective.token_weights(lengths), objective, microbatch=2, options=options)
        counted = costs.flops(architecture, costs.work(name, len(group.prompt_P), lengths, 2), **again)
        assert counter.get_total_flops() == counted.projections + counted.readout, name


def test_a_shared_prelude_is_counted_too(small_group):
    """Equal to torch's counter; at the published shape it never saves more than about a hundredth and a half."""
    model, lengths, objective = toy("huginn"), (3, 0, 4), published(ALL)
    group = small_group(lengths)
    responses = tuple(dataclasses.replace(r, latent=PositionLatent(i)) for i, r in enumerate(group.responses))
    with FlopCounterMode(display=False) as counter:
        SCHEDULES["prefix-packed"](
            model, Group(group.prompt_P, responses), objective.token_weights(lengths), objective, microbatch=2
        )
    counted = costs.prelude_flops(model.config, ALL, 4, lengths)
    assert counter.get_total_flops() == counted.projections + counted.readout
    config = config_of("Huginn-0125")
    full = costs.flops(costs.describe(config, TERMINAL), costs.work("full-packed", 8192, [128] * 32, 1))
    assert 1.01 < full.total / costs.prelude_flops(config, TERMINAL, 8192, [128] * 32).total < 1.016


@settings(deadline=None)
@given(
    prompt=st.integers(1, 9),
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    microbatch=st.integers(1, 5),
    name=st.sampled_from(list(SCHEDULES)),
)
def test_pairs_and_tokens_are_those_that_are_visible(prompt, lengths, microbatch, name):
    """Every (query, key) pair listed one by one."""
    filled = [length for length in lengths if length]
    whole = name.startswith("full") or (name == "prefix-packed" and len(filled) < 2)
    parts = [lengths[start : start + microbatch] for start in range(0, len(lengths), microbatch)]
    trunks = sum(any(part) for part in parts) if name == "tree-packed" else 1
    pairs = [(query, key) for _ in range(0 if whole else trunks) for query in range(prompt) for key in range(query + 1)]
    tokens = 0 if whole else trunks * prompt
    for length in filled:
        first = 0 if whole else prompt
        pairs += [(query, key) for query in range(first, prompt + length - 1) for key in range(query + 1)]
        tokens += prompt + length - 1 - first
    found = costs.work(name, prompt, lengths, microbatch)
    assert (found.pairs, found.tokens, found.scored) == (len(pairs), tokens, sum(lengths))


@pytest.mark.parametrize("shape", PUBLISHED_LIMITS)
def test_the_published_limits(shape):
    """To within 0.6 percent, with terminal supervision; the table has three digits."""
    for name, expected in zip(OFFICIAL, PUBLISHED_LIMITS[shape], strict=True):
        assert costs.speed_up_limit(config_of(name), *shape, TERMINAL) == pytest.approx(expected, rel=6e-3)


@settings(deadline=None)
@given(prompt=st.integers(1, 5000), response=st.integers(1, 5000), responses=st.integers(1, 64))
def test_no_limit_is_above_the_obvious_ones(prompt, response, responses):
    """Counting tokens and pairs together never beats the group's size, nor what full attention over P + D leaves."""
    limit = costs.speed_up_limit(config_of("Ouro-1.4B"), prompt, response, responses, TERMINAL)
    assert 1 <= limit <= min(responses, 1 + prompt / max(response - 1, 1e-9)) * (1 + 1e-12)
    if responses == 1:
        assert limit == 1


@pytest.mark.parametrize(("name", "megabytes"), [("Ouro-1.4B", 0.79), ("Nanbeige4.2-3B", 0.18), ("Huginn-0125", 2.8)])
def test_the_published_boundary_sizes(name, megabytes):
    """bf16 keys and values per prompt token."""
    elements = costs.describe(config_of(name), TERMINAL).boundary_elements
    assert 2 * elements / 1e6 == pytest.approx(megabytes, rel=1e-2)


def measured(model, loops, tokens, rematerialise):
    """Return the bytes of the distinct storages that a real forward pass keeps."""
    owned = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages = {}

    def keep(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    latent = draw(1, 0, tokens, model.head_VC.shape[1]).to(model.head_VC.dtype) if model.takes_latent else None
    places = torch.arange(tokens) % 13
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        states = model.readout_states(
            places, places, SegmentedCausal([tokens]), loops, latent, rematerialise=rematerialise
        )
    assert states
    return sum(storage.nbytes() for pointer, storage in storages.items() if pointer not in owned)


@pytest.mark.parametrize("supervision", Supervision)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_kept_bytes_are_what_a_real_forward_pass_keeps(family, supervision, dtype):
    """Counted without computing, against storages that exist, to within a rounding of the small things."""
    model = toy(family, dtype=dtype)
    loops = published(supervision).supervised_loops(model.loops)
    kept = costs.kept_bytes(model.config, supervision, dtype)
    assert 2 * kept.rematerialised < kept.plain
    for predicted, rematerialise in ((kept.plain, False), (kept.rematerialised, True)):
        longer, shorter = (measured(model, loops, tokens, rematerialise) for tokens in (48, 32))
        assert (longer - shorter) / 16 == pytest.approx(predicted, rel=0.02)


def test_a_shared_prompt_keeps_its_graph_and_adjoints():
    config, dtype = toy("ouro").config, torch.bfloat16
    kept = costs.Kept(1000, 10)
    elements = 2 * 16 * 8

    def size(schedule, shape, microbatch, **again):
        return costs.activation_bytes(config, kept, ALL, dtype, schedule, shape, microbatch, **again)

    assert size("full-serial", (20, 5, 8), 4) == 24 * 1000
    assert size("full-packed", (20, 5, 8), 4) == 4 * 24 * 1000
    assert size("tree-packed", (20, 5, 8), 4) == (20 + 4 * 4) * 1000
    assert size("prefix-packed", (20, 5, 8), 4) == 20 * (1000 + 4 * elements) + 4 * 4 * 1000
    assert size("prefix-packed", (20, 5, 8), 4, rematerialise=True, rematerialise_prefix=True) == (
        20 * (10 + 2 * elements + 4 * elements) + 4 * 4 * 10
    )
    assert size("prefix-packed", (20, 5, 1), 4) == size("full-packed", (20, 5, 1), 1)


@settings(deadline=None)
@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 9), st.integers(1, 40)),
    microbatch=st.integers(1, 9),
    plain=st.integers(1, 3000),
)
def test_an_equal_wave_keeps_no_more_and_one_more_response_would(shape, microbatch, plain):
    """The largest number of suffixes at once, found by trying all of them."""
    config, dtype, kept = config_of("Nanbeige4.2-3B"), torch.float32, costs.Kept(plain * 10**4, 1)
    size = [
        costs.activation_bytes(config, kept, ALL, dtype, "prefix-packed", shape, wave)
        for wave in range(1, shape[2] + 1)
    ]
    most = costs.activation_bytes(config, kept, ALL, dtype, "full-packed", shape, microbatch)
    expected = sum(bytes_kept <= most for bytes_kept in size)
    assert costs.equal_wave(config, kept, ALL, dtype, shape, microbatch) == expected


def test_an_unknown_schedule_is_refused():
    with pytest.raises(costs.LimitError, match="expected a schedule, found 'magic'"):
        costs.work("magic", 4, [2], 1)


class TestCommand:
    def run(self, capsys, *arguments):
        status = limits.main([*arguments])
        return status, capsys.readouterr()

    def test_it_predicts_and_says_that_sharing_can_pay(self, capsys, reference_folder):
        folder = str(reference_folder("huginn-tiny"))
        status, printed = self.run(capsys, folder, "--prompt", "64", "--response", "4", "--responses", "8")
        rows = printed.out.splitlines()
        assert status == 0
        assert [row.split()[0] for row in rows[1:5]] == [
            "full-packed",
            "prefix-packed",
            "tree-packed",
            "prefix-packed,",
        ]
        assert re.fullmatch(r"up to \d suffixes at once keep no more bytes than full-packed", rows[-3])
        assert rows[-2].startswith("Sharing can pay: up to ")
        assert re.search(r"latents of their own, the prelude alone is shared: up to 1\.\d{3}x\.$", rows[-1])

    def test_it_says_that_a_shared_prompt_can_cost_memory(self, capsys, reference_folder):
        sizes = ["--prompt", "64", "--response", "4", "--responses", "8", "--microbatch", "1"]
        status, printed = self.run(capsys, str(reference_folder("ouro-tiny")), *sizes)
        assert status == 0
        assert "even one suffix at a time keeps more bytes than full-packed" in printed.out.splitlines()[-2]

    @pytest.mark.parametrize(
        ("shape", "message"),
        [
            (("4", "400", "8"), "responses of 400 tokens outweigh a prompt of 4, so that even without any overhead"),
            (("64", "8", "1"), "one response has nobody to share its prompt with"),
        ],
    )
    def test_it_says_when_sharing_does_not_pay(self, capsys, reference_folder, shape, message):
        prompt, response, responses = shape
        sizes = ["--prompt", prompt, "--response", response, "--responses", responses]
        status, printed = self.run(capsys, str(reference_folder("ouro-tiny")), *sizes)
        assert status == 0
        assert message in printed.out.splitlines()[-1]

    def test_a_model_that_is_none_ends_with_2(self, capsys, tmp_path):
        sizes = ["--prompt", "4", "--response", "4", "--responses", "8"]
        for model in (str(tmp_path), "Ouro-9B", "", "x" * 5000):
            status, printed = self.run(capsys, model, *sizes)
            assert (status, printed.out) == (2, "")
            assert "expected Ouro-1.4B, Nanbeige4.2-3B, Huginn-0125 or a folder" in printed.err
            assert printed.err.splitlines()[-1].startswith("hint: ")

    @pytest.mark.parametrize("name", ["prompt", "response", "responses", "microbatch", "wave"])
    @pytest.mark.parametrize("value", ["0", "-1", "-" + "9" * 30, "9" * 30, str(2**30 + 1)])
    def test_a_size_that_cannot_be_counted_ends_with_2(self, capsys, name, value):
        """Zero is none, and never stands for all of them."""
        sizes = {"prompt": "4", "response": "4", "responses": "8", "microbatch": "4", name: value}
        status, printed = self.run(capsys, "Ouro-1.4B", *(f"--{key}={size}" for key, size in sizes.items()))
        assert (status, printed.out) == (2, "")
        assert re.match(rf"error: --{name}: expected a whole number from 1 to \d+, found {value}\nhint: ", printed.err)

    @pytest.mark.parametrize("value", ["1.5", "", "four", "1e3", "nan", "0x4"])
    @pytest.mark.parametrize("name", ["prompt", "response", "responses", "microbatch", "wave", "dtype", "supervision"])
    def test_what_is_no_number_is_no_size(self, capsys, name, value):
        sizes = {"prompt": "4", "response": "4", "responses": "8", name: value}
        with pytest.raises(SystemExit) as ended:
            limits.main(["Ouro-1.4B", *(f"--{key}={size}" for key, size in sizes.items())])
        assert ended.value.code == 2
        assert f"argument --{name}: invalid" in capsys.readouterr().err

    def test_a_wave_left_out_is_the_whole_group_and_none_is_larger(self, capsys, reference_folder):
        sizes = ["--prompt", "9", "--response", "4", "--responses", "8"]
        folder = str(reference_folder("nanbeige-tiny"))
        left_out = self.run(capsys, folder, *sizes)
        assert left_out == self.run(capsys, folder, *sizes, "--wave", "8")
        assert left_out == self.run(capsys, folder, *sizes, "--wave", "1000")
        assert left_out != self.run(capsys, folder, *sizes, "--wave", "1")

    def test_the_largest_sizes_are_counted(self, capsys, reference_folder):
        largest = [f"--{name}={size}" for name, size in limits.LARGEST.items()]
        assert self.run(capsys, str(reference_folder("nanbeige-tiny")), *largest)[0] == 0


def test_published_shapes_parse_as_their_checkpoints_would(reference_folder):
    for name in OFFICIAL:
        assert config_of(name).loops in (2, 4, 32)
    assert dataclasses.asdict(config_of(str(reference_folder("nanbeige-tiny"))))["width"] == 32
    assert official.OFFICIAL["Huginn-0125"]["n_heads"] == 55


def test_another_family_has_no_prediction(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match="expected one of ouro, nanbeige, huginn_raven"):
        config_of(str(tmp_path))

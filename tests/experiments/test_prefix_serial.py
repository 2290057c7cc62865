import pytest
import torch

from experiments import dense_oracle, exactness, full_packed, ouro, prefix_serial
from experiments.batch import BatchError, Group
from experiments.exactness import FP32_GATE, FP32_PAIR_GATE, FP64_GATE, compare
from experiments.objective import Mean, Objective, Supervision, published
from experiments.prefix import SharedPrefix

ALL = published(Supervision.ALL_LOOPS)
ROUNDED_FP64_GATE = exactness.Gate(1e-6, 1e-6)
"""The official modules reduce norms in fp32 even with fp64 parameters."""


def run(schedule, model, group, objective=ALL, microbatch=2):
    model.zero_grad()
    weights = objective.token_weights(group.lengths)
    loss = schedule.accumulate(model, group, weights, objective, microbatch=microbatch)
    return float(loss), exactness.gradients(model)


@pytest.mark.parametrize("mean", Mean)
@pytest.mark.parametrize("supervision", Supervision)
@pytest.mark.parametrize("lengths", [(3, 0, 1, 5, 2), (4, 4, 4), (2,)])
def test_prefix_and_full_replay_are_one_gradient(small_model, small_group, mean, supervision, lengths):
    """fp64, shared heads, ragged, one-token and empty responses, every partition."""
    objective = Objective(1.5, 0.1, 0.03, supervision, mean)
    model, group = small_model(), small_group(lengths)
    full_loss, full_gradient = run(full_packed, model, group, objective)
    for microbatch in range(1, len(lengths) + 1):
        loss, gradient = run(prefix_serial, model, group, objective, microbatch)
        agreement = compare(gradient, full_gradient)
        assert FP64_GATE.admits(agreement), agreement
        assert loss == pytest.approx(full_loss, abs=1e-13)


@pytest.mark.parametrize(("folder", "dtype"), [("ouro-tiny", torch.float32), ("ouro-tiny-f64", torch.float64)])
def test_loss_and_gradient_match_the_official_model(reference, reference_folder, folder, dtype):
    """The same vectors and gates as full replay; the exit gate's gradient is exactly zero."""
    expected, group = reference(folder)
    loss, gradient = run(prefix_serial, ouro.load(reference_folder(folder), dtype), group)
    gate = FP32_PAIR_GATE if dtype == torch.float32 else ROUNDED_FP64_GATE
    official = {name.removeprefix("grad."): tensor for name, tensor in expected.items() if name.startswith("grad.")}
    agreement = compare(gradient, official)
    assert gate.admits(agreement), agreement
    assert loss == pytest.approx(float(expected["loss"]), abs=1e-6)
    assert not gradient["model.early_exit_gate.weight"].any()


def test_fp32_is_close_to_a_pure_fp64_oracle(reference, reference_folder):
    _, group = reference("ouro-tiny")
    _, gradient = run(prefix_serial, ouro.load(reference_folder("ouro-tiny"), torch.float32), group)
    oracle = dense_oracle.evaluate(ouro.load(reference_folder("ouro-tiny"), torch.float64), group, ALL)
    agreement = compare(gradient, oracle.gradient)
    assert FP32_GATE.admits(agreement), agreement


def test_a_group_of_a_larger_logical_batch_may_be_all_empty(small_model, small_group):
    """Its gradient is zero and its phases still run to the end."""
    model, group = small_model(), small_group((0, 0))
    loss = prefix_serial.accumulate(model, group, ALL.token_weights((0, 0, 3))[:2], ALL, microbatch=2)
    assert float(loss) == 0
    assert all(not gradient.any() for gradient in exactness.gradients(model).values())


@pytest.mark.parametrize("size", [0, -1])
def test_a_microbatch_holds_a_response(small_model, small_group, size):
    with pytest.raises(BatchError, match="at least one response"):
        run(prefix_serial, small_model(), small_group(), microbatch=size)


def test_adjoints_of_a_bf16_model_add_up_in_fp32(small_model, small_group):
    """32 equal suffixes give 32 times the adjoint of one; a bf16 sum would be off by some thousandths."""
    model, one = small_model(torch.bfloat16), small_group((3,))
    many = Group(one.prompt_P, one.responses * 32)
    weights = ALL.token_weights(many.lengths)
    adjoints = []
    for group in (one, many):
        shared, slices = SharedPrefix(model, group, (0, 1, 2)), weights[: len(group.responses)]
        for index in range(len(group.responses)):
            prefix_serial.open_wave(shared, [index], slices, ALL).backward()
        leaves = (shared.boundary.keys[0], shared.boundary.values[0], shared.boundary.first[0])
        adjoints.append([leaf.grad for leaf in leaves])
    for single, total in zip(*adjoints, strict=True):
        assert total.dtype == torch.float32
        assert float((total - 32 * single).norm()) <= 1e-5 * float(total.norm())


class TestNegativeControls:
    """Each fault is small enough to train with and must fail the gate."""

    @pytest.fixture
    def case(self, small_model, small_group):
        model, group = small_model(), small_group((3, 1, 5))
        _, truth = run(full_packed, model, group)
        model.zero_grad()
        return model, group, truth

    def error(self, case, between=lambda shared: None, weights=None):
        """Run the phases with something done to the adjoints between B and C."""
        model, group, truth = case
        shared = SharedPrefix(model, group, ALL.supervised_loops(model.loops))
        for index in range(len(group.responses)):
            slices = ALL.token_weights(group.lengths) if weights is None else weights
            prefix_serial.open_wave(shared, [index], slices, ALL).backward()
        between(shared)
        shared.finish()
        agreement = compare(exactness.gradients(model), truth)
        return agreement.whole if not FP64_GATE.admits(agreement) else 0.0

    def test_the_harness_itself_passes(self, case):
        assert self.error(case) == 0

    def test_dropped_first_response_adjoint(self, case):
        def drop(shared):
            for leaf in shared.boundary.first:
                leaf.grad = None

        assert self.error(case, drop) > 1e-3

    @pytest.mark.parametrize("loop", [0, 1, 2])
    def test_one_loops_adjoints_dropped(self, case, loop):
        def drop(shared):
            calls = slice(2 * loop, 2 * loop + 2)
            for leaf in (*shared.boundary.keys[calls], *shared.boundary.values[calls]):
                assert leaf.grad.any()
                leaf.grad = None

        assert self.error(case, drop) > 1e-3

    def test_weights_of_each_microbatch_alone(self, case):
        _, group, _ = case
        alone = [ALL.token_weights([length])[0] / len(group.lengths) for length in group.lengths]
        assert self.error(case, weights=alone) > 1e-3

    def test_suffix_positions_off_by_one(self, case, monkeypatch):
        model, group, _ = case
        forward = model.readout_states

        def shifted(tokens, positions, *rest, **options):
            behind = int(positions[0]) >= len(group.prompt_P)
            return forward(tokens, positions + behind, *rest, **options)

        monkeypatch.setattr(model, "readout_states", shifted)
        assert self.error(case) > 1e-3

    def test_one_prompt_token_masked(self, case, monkeypatch):
        start = prefix_serial.PrefixedCausal.__init__

        def masked(self, keys, values, length):
            start(self, keys, values, length)
            self.mask[:, 1] = False

        monkeypatch.setattr(prefix_serial.PrefixedCausal, "__init__", masked)
        assert self.error(case) > 1e-3

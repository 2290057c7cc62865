import pytest
import torch

from experiments import dense_oracle, exactness, families, full_packed, full_serial
from experiments.batch import BatchError
from experiments.exactness import FP32_GATE, FP32_PAIR_GATE, FP64_GATE, compare
from experiments.objective import Mean, Objective, Supervision, published

FOLDERS = [
    (f"{family}-tiny{suffix}", dtype)
    for family in ("ouro", "nanbeige", "huginn")
    for suffix, dtype in (("", torch.float32), ("-f64", torch.float64))
]
ALL = published(Supervision.ALL_LOOPS)
ROUNDED_FP64_GATE = exactness.Gate(1e-6, 1e-6)
"""The official modules reduce norms in fp32 even with fp64 parameters."""


def accumulate(model, group, objective=ALL, microbatch=2, schedule=full_packed):
    model.zero_grad()
    weights = objective.token_weights(group.lengths)
    loss = schedule.accumulate(model, group, weights, objective, microbatch=microbatch)
    return float(loss), exactness.gradients(model)


def published_gradient(expected):
    return {name.removeprefix("grad."): tensor for name, tensor in expected.items() if name.startswith("grad.")}


@pytest.mark.parametrize(("folder", "dtype"), FOLDERS)
def test_scores_match_the_official_model(reference, reference_folder, folder, dtype):
    """Per-loop log-probabilities and terminal entropy of every response token, within fp32 rounding."""
    expected, group = reference(folder)
    model = families.load(reference_folder(folder), dtype)
    scores = full_packed.score_responses(model, group.prompt_P, group.responses, range(model.loops))
    torch.testing.assert_close(scores.log_probs_NS, expected["per_loop_log_probs"], atol=2e-6, rtol=0)
    torch.testing.assert_close(scores.terminal_entropy_N, expected["terminal_entropy"], atol=2e-6, rtol=0)


@pytest.mark.parametrize("microbatch", [1, 2, 3, 4])
@pytest.mark.parametrize(("folder", "dtype"), FOLDERS)
def test_loss_and_gradient_match_the_official_model(reference, reference_folder, folder, dtype, microbatch):
    """Every parameter, any partition; the exit gate's gradient is exactly zero."""
    expected, group = reference(folder)
    loss, gradient = accumulate(families.load(reference_folder(folder), dtype), group, microbatch=microbatch)
    gate = FP32_PAIR_GATE if dtype == torch.float32 else ROUNDED_FP64_GATE
    agreement = compare(gradient, published_gradient(expected))
    assert gate.admits(agreement), agreement
    assert loss == pytest.approx(float(expected["loss"]), abs=1e-6)
    assert not any(tensor.any() for name, tensor in gradient.items() if "early_exit_gate" in name)


@pytest.mark.parametrize(("folder", "dtype"), FOLDERS)
def test_one_at_a_time_matches_the_official_model_too(reference, reference_folder, folder, dtype):
    expected, group = reference(folder)
    loss, gradient = accumulate(families.load(reference_folder(folder), dtype), group, schedule=full_serial)
    gate = FP32_PAIR_GATE if dtype == torch.float32 else ROUNDED_FP64_GATE
    agreement = compare(gradient, published_gradient(expected))
    assert gate.admits(agreement), agreement
    assert loss == pytest.approx(float(expected["loss"]), abs=1e-6)


def test_fp32_is_close_to_a_pure_fp64_oracle(reference, reference_folder, family):
    _, group = reference(f"{family}-tiny")
    _, gradient = accumulate(families.load(reference_folder(f"{family}-tiny"), torch.float32), group)
    oracle = dense_oracle.evaluate(families.load(reference_folder(f"{family}-tiny"), torch.float64), group, ALL)
    agreement = compare(gradient, oracle.gradient)
    assert FP32_GATE.admits(agreement), agreement


@pytest.mark.parametrize("mean", Mean)
@pytest.mark.parametrize("supervision", Supervision)
@pytest.mark.parametrize("lengths", [(3, 0, 1, 5, 2)])
def test_every_partition_agrees_with_the_dense_oracle(case, mean, supervision, lengths):
    """fp64, shared heads, ragged, one-token and empty responses: the oracle is another algorithm."""
    objective = Objective(1.5, 0.1, 0.03, supervision, mean)
    model, group = case(lengths)
    oracle = dense_oracle.evaluate(model, group, objective)
    for microbatch in (1, 3, len(lengths)):
        loss, gradient = accumulate(model, group, objective, microbatch)
        agreement = compare(gradient, oracle.gradient)
        assert FP64_GATE.admits(agreement), agreement
        assert loss == pytest.approx(oracle.loss, abs=1e-13)
    loss, gradient = accumulate(model, group, objective, schedule=full_serial)
    assert FP64_GATE.admits(compare(gradient, oracle.gradient))
    assert loss == pytest.approx(oracle.loss, abs=1e-13)


def test_a_logical_batch_of_two_groups_is_the_sum_of_its_parts(small_model, small_group):
    """Weights computed over both groups and sliced: the loss is the token-weighted mean of the groups' own losses."""
    model, groups = small_model(), (small_group((3, 1)), small_group((2, 0), prompt=6, seed=9))
    weights = ALL.token_weights([length for group in groups for length in group.lengths])
    together = [
        float(full_packed.accumulate(model, group, part, ALL, microbatch=2))
        for group, part in zip(groups, (weights[:2], weights[2:]), strict=True)
    ]
    gradient = exactness.gradients(model)
    alone = [accumulate(model, group) for group in groups]
    assert sum(together) == pytest.approx((4 * alone[0][0] + 2 * alone[1][0]) / 6, abs=1e-13)
    mixed = {name: (4 * alone[0][1][name] + 2 * alone[1][1][name]) / 6 for name in gradient}
    agreement = compare(gradient, mixed)
    assert FP64_GATE.admits(agreement), agreement


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.k_proj.weight", "model.norm.weight", "lm_head.weight"])
def test_gradients_are_slopes(small_model, small_group, name):
    """A central difference along a random direction in fp64 finds the same derivative, without autograd."""
    model, group = small_model(), small_group()
    _, gradient = accumulate(model, group)
    parameter = dict(model.named_parameters())[name]
    generator = torch.Generator().manual_seed(5)
    direction = torch.rand(parameter.shape, generator=generator, dtype=torch.float64) - 0.5
    losses = []
    for step in (1e-5, -2e-5):
        with torch.no_grad():
            parameter.add_(direction, alpha=step)
        losses.append(accumulate(model, group)[0])
    slope = (losses[0] - losses[1]) / 2e-5
    assert slope == pytest.approx(float((gradient[name] * direction).sum()), rel=1e-6, abs=1e-9)


def test_renormalised_microbatches_fail_the_gate(small_model, small_group):
    """Negative control: weights taken from each microbatch instead of the logical batch."""
    model, group = small_model(), small_group((3, 1, 5))
    _, truth = accumulate(model, group)
    model.zero_grad()
    for response in group.responses:
        loops = ALL.supervised_loops(model.loops)
        scores = full_packed.score_responses(model, group.prompt_P, [response], loops)
        (ALL.loss(scores, [response], ALL.token_weights([len(response)]), model.loops) / 3).backward()
    assert compare(exactness.gradients(model), truth).whole > 1e-3


@pytest.mark.parametrize("size", [0, -1])
def test_a_microbatch_holds_a_response(small_model, small_group, size):
    """Never an empty partition, whose gradient would be zero without an error."""
    with pytest.raises(BatchError, match="at least one response"):
        accumulate(small_model(), small_group(), microbatch=size)


def test_the_oracle_refuses_to_judge_in_less_than_fp64(small_model, small_group):
    with pytest.raises(dense_oracle.OracleError, match="fp64"):
        dense_oracle.evaluate(small_model(torch.float32), small_group(), ALL)


def test_the_oracle_refuses_a_group_without_tokens(small_model, small_group):
    with pytest.raises(dense_oracle.OracleError, match="empty"):
        dense_oracle.evaluate(small_model(), small_group((0, 0)), ALL)

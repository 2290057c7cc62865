"""Every schedule, family, supervision, mean and partition against oracles that share no algorithm with it."""

import copy
import itertools
from dataclasses import replace

import pytest
import torch

from experiments import dense_oracle, exactness, families, plan, prefix_packed, prelude_packed
from experiments.batch import BatchError, Group
from experiments.contract import ContractError, LatentIdentityError, Options
from experiments.exactness import FP32_GATE, FP32_PAIR_GATE, FP64_GATE, compare
from experiments.latent import PositionLatent, TwoKeyLatent
from experiments.objective import Mean, Objective, ObjectiveError, Supervision, published
from experiments.plan import Plan, Sharing
from experiments.schedules import SCHEDULES
from experiments.toys import toy

ALL = published(Supervision.ALL_LOOPS)
ROUNDED_FP64_GATE = exactness.Gate(1e-6, 1e-6)
"""The official modules reduce norms in fp32 even with fp64 parameters."""
EVERYTHING = Options(rematerialise=True, rematerialise_prefix=True, checksum=True)
RAGGED = (3, 0, 1, 5, 2)
TERMINAL, EVERY_LOOP = Supervision.TERMINAL_ONLY, Supervision.ALL_LOOPS
NAMES = list(SCHEDULES)
GATES = {torch.float64: (FP64_GATE, 1e-13), torch.float32: (FP32_GATE, 2e-6)}
"""By the model's dtype: what a gradient's distance from the fp64 oracle may be, and a loss's."""
COMBINATIONS = [
    *((RAGGED, *choice) for choice in itertools.product(Supervision, Mean, GATES)),
    ((4, 4, 4), EVERY_LOOP, Mean.TOKEN, torch.float64),
    ((1, 1), TERMINAL, Mean.RESPONSE, torch.float64),
    ((0, 6), EVERY_LOOP, Mean.RESPONSE, torch.float64),
    ((2,), TERMINAL, Mean.TOKEN, torch.float64),
]


def run(schedule, model, group, objective=ALL, microbatch=2, options=None):
    model.zero_grad()
    weights = objective.token_weights(group.lengths)
    schedule = SCHEDULES[schedule] if isinstance(schedule, str) else schedule
    options = {} if options is None else {"options": options}
    loss = schedule(model, group, weights, objective, microbatch=microbatch, **options)
    return float(loss), exactness.gradients(model)


def partitions(responses):
    """Return every schedule with microbatches of one, of two and of all; `full-serial` knows only the first."""
    sizes = {name: {1} if name == "full-serial" else {1, 2, responses} for name in NAMES}
    return [(name, size) for name in NAMES for size in sorted(sizes[name])]


def distinct(group, make):
    """Give every response a latent of its own."""
    return Group(group.prompt_P, tuple(replace(r, latent=make(i)) for i, r in enumerate(group.responses)))


@pytest.mark.parametrize(("lengths", "supervision", "mean", "dtype"), COMBINATIONS)
def test_all_schedules_and_partitions_are_one_gradient(case, lengths, supervision, mean, dtype):
    """Against the fp64 dense oracle, by whole gradient and worst tensor: the whole product of what may be chosen.

    Every family, schedule, supervision, mean and dtype, in three partitions; ragged, one-token and empty responses.
    """
    objective, (gate, loss_error) = Objective(1.5, 0.1, 0.03, supervision, mean), GATES[dtype]
    model, group = case(lengths, dtype)
    oracle = dense_oracle.evaluate(copy.deepcopy(model).double(), group, objective)
    for name, microbatch in partitions(len(lengths)):
        loss, gradient = run(name, model, group, objective, microbatch)
        agreement = compare(gradient, oracle.gradient)
        assert gate.admits(agreement), (name, microbatch, agreement)
        assert loss == pytest.approx(oracle.loss, abs=loss_error), (name, microbatch)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("suffix", "dtype"), [("", torch.float32), ("-f64", torch.float64)])
def test_every_schedule_matches_the_official_models(reference, reference_folder, family, name, suffix, dtype):
    """Loss and every gradient that the families' own public modelling code computed."""
    expected, group = reference(f"{family}-tiny{suffix}")
    model = families.load(reference_folder(f"{family}-tiny{suffix}"), dtype)
    loss, gradient = run(name, model, group)
    official = {name.removeprefix("grad."): tensor for name, tensor in expected.items() if name.startswith("grad.")}
    agreement = compare(gradient, official)
    gate = FP32_PAIR_GATE if dtype == torch.float32 else ROUNDED_FP64_GATE
    assert gate.admits(agreement), agreement
    assert loss == pytest.approx(float(expected["loss"]), abs=1e-6)
    assert not any(tensor.any() for name, tensor in gradient.items() if "early_exit_gate" in name)


@pytest.mark.parametrize("name", NAMES)
def test_rematerialised_calls_compute_the_same_bits(case, name):
    """The same kernels on the same inputs a second time: not even rounding differs."""
    model, group = case()
    plain, again = run(name, model, group), run(name, model, group, options=EVERYTHING)
    assert again[0] == plain[0]
    assert all(torch.equal(again[1][key], tensor) for key, tensor in plain[1].items())


@pytest.mark.parametrize("name", NAMES)
def test_rematerialisation_saves_fewer_bytes(case, name):
    """What autograd keeps for the layers' backward passes shrinks, in every schedule."""
    model, group = case((9, 9, 9), prompt=20)
    held = []
    for options in (Options(), EVERYTHING):
        sizes = {}

        def pack(tensor, sizes=sizes):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            run(name, model, group, microbatch=3, options=options)
        held.append(sum(sizes.values()))
    assert held[1] < 0.7 * held[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_loss_scale_multiplies_the_gradient_and_not_the_loss(case, name):
    """A power of two, so that nothing is rounded; phase C is not scaled a second time."""
    model, group = case()
    plain, scaled = run(name, model, group), run(name, model, group, options=Options(loss_scale=1024.0))
    assert scaled[0] == plain[0]
    assert all(torch.equal(scaled[1][key], 1024 * tensor) for key, tensor in plain[1].items())


@pytest.mark.parametrize("mean", Mean)
@pytest.mark.parametrize("name", NAMES)
def test_several_groups_are_one_logical_batch(case, small_group, name, mean):
    """Weights over both groups, sliced; gradients add up to those of the groups' weighted mean."""
    objective = replace(ALL, mean=mean)
    model, group = case((3, 1))
    latent = group.responses[0].latent
    groups = (group, small_group((2, 0, 4), prompt=6, seed=9, latent=latent))
    weights = objective.token_weights([length for part in groups for length in part.lengths])
    model.zero_grad()
    total = sum(
        float(SCHEDULES[name](model, part, piece, objective, microbatch=2))
        for part, piece in zip(groups, (weights[:2], weights[2:]), strict=True)
    )
    gradient = exactness.gradients(model)
    shares = (0.4, 0.6) if mean is Mean.TOKEN else (0.5, 0.5)
    oracles = [dense_oracle.evaluate(model, part, objective) for part in groups]
    mixed = {key: sum(s * o.gradient[key] for s, o in zip(shares, oracles, strict=True)) for key in gradient}
    agreement = compare(gradient, mixed)
    assert FP64_GATE.admits(agreement), agreement
    assert total == pytest.approx(sum(s * o.loss for s, o in zip(shares, oracles, strict=True)), abs=1e-13)


@pytest.mark.parametrize("name", NAMES)
def test_a_group_of_a_larger_logical_batch_may_be_all_empty(case, name):
    model, group = case((0, 0))
    loss = SCHEDULES[name](model, group, ALL.token_weights((0, 0, 3))[:2], ALL, microbatch=2)
    assert float(loss) == 0
    assert all(not gradient.any() for gradient in exactness.gradients(model).values())


def test_a_logical_batch_without_a_token_is_an_error():
    with pytest.raises(ObjectiveError, match="without any token"):
        ALL.token_weights((0, 0))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [0, -1, 2.0, None])
def test_a_microbatch_holds_a_response(case, name, size):
    model, group = case()
    with pytest.raises(BatchError, match="at least one response"):
        run(name, model, group, microbatch=size)


def stepped(model, gradient, kind, **options):
    """Return every parameter's change in fp64 by one step along a gradient, and the optimizer's state of each."""
    subject = copy.deepcopy(model)
    trained = {key: parameter for key, parameter in subject.named_parameters() if parameter.requires_grad}
    for key, parameter in trained.items():
        parameter.grad = gradient[key].to(parameter.dtype)
    optimizer = kind(trained.values(), **options)
    optimizer.step()
    before = dict(model.named_parameters())
    changes = {key: p.detach().double() - before[key].detach().double() for key, p in subject.named_parameters()}
    return changes, {key: optimizer.state[parameter] for key, parameter in trained.items()}


@pytest.mark.parametrize("dtype", GATES)
@pytest.mark.parametrize("supervision", Supervision)
def test_one_sgd_and_one_adamw_step(case, supervision, dtype):
    """Every schedule and partition against updates made of the fp64 oracle: deltas, and both of Adam's moments."""
    objective, (gate, _) = published(supervision), GATES[dtype]
    model, group = case((6, 2, 1, 9), dtype, prompt=12)
    exact = copy.deepcopy(model).double()
    oracle = dense_oracle.evaluate(exact, group, objective).gradient
    sgd, adamw = (torch.optim.SGD, {"lr": 0.03}), (torch.optim.AdamW, {"lr": 1e-3, "eps": 1e-8})
    sgd_change, _ = stepped(exact, oracle, sgd[0], **sgd[1])
    adamw_change, moments = stepped(exact, oracle, adamw[0], **adamw[1])
    for name, microbatch in partitions(4):
        _, gradient = run(name, model, group, objective, microbatch)
        agreement = compare(gradient, oracle)
        assert gate.admits(agreement), (name, microbatch, agreement)
        # The change of an fp32 parameter is itself rounded to the parameter's last digit.
        found = exactness.compare_updates(stepped(model, gradient, sgd[0], **sgd[1])[0], sgd_change)
        assert found.admitted, (name, microbatch, found)
        change, state = stepped(model, gradient, adamw[0], **adamw[1])
        assert compare(change, adamw_change).whole <= 1e-4
        assert any(tensor.any() for tensor in change.values())
        for key, moment in itertools.product(moments, ("exp_avg", "exp_avg_sq")):
            expected = moments[key][moment]
            torch.testing.assert_close(state[key][moment].double(), expected, atol=1e-5, rtol=8e-5)


class Untied(torch.nn.Module):
    """Layers with a copy of their own for every time that they are run through."""

    def __init__(self, layers, times):
        super().__init__()
        self.copies = torch.nn.ModuleList(copy.deepcopy(layers) for _ in range(times))
        self.turn = 0

    def __iter__(self):
        self.turn += 1
        return iter(self.copies[(self.turn - 1) % len(self.copies)])


@pytest.mark.parametrize("name", ["full-packed", "prefix-packed", "tree-packed"])
def test_the_gradients_of_an_untied_twin_add_up(case, family, name):
    """Tying is summing: the looped layers' gradient is the sum over loops of independent copies' gradients."""
    model, group = case((3, 1, 5))
    _, gradient = run(name, model, group)
    where = {"ouro": "model.layers", "nanbeige": "model.layers", "huginn": "transformer.core_block"}[family]
    twin = copy.deepcopy(model)
    parent, child = where.split(".")
    setattr(getattr(twin, parent), child, Untied(getattr(getattr(twin, parent), child), model.loops))
    found = dense_oracle.evaluate(twin, group, ALL).gradient
    summed = {
        key: sum(found[key.replace(where, f"{where}.copies.{loop}")] for loop in range(model.loops))
        for key in gradient
        if key.startswith(where)
    }
    assert len(summed) >= 9
    agreement = compare({key: gradient[key] for key in summed}, summed)
    assert FP64_GATE.admits(agreement), agreement
    assert compare({key: gradient[key] / 2 for key in summed}, summed).whole > 0.1


@pytest.mark.parametrize("key", ["attn", "norm", "mlp", "embed"])
def test_gradients_are_slopes(case, family, key):
    """A central difference along a random direction in fp64 finds the same derivative, without autograd."""
    parts = {"embed": "wte" if family == "huginn" else "embed_tokens"}
    model, group = case((3, 1))
    _, gradient = run("prefix-packed", model, group)
    name, parameter = next((n, p) for n, p in model.named_parameters() if parts.get(key, key) in n)
    generator = torch.Generator().manual_seed(5)
    direction = torch.rand(parameter.shape, generator=generator, dtype=torch.float64) - 0.5
    losses = []
    for step in (1e-5, -2e-5):
        with torch.no_grad():
            parameter.add_(direction, alpha=step)
        losses.append(run("prefix-packed", model, group)[0])
    slope = (losses[0] - losses[1]) / 2e-5
    assert slope == pytest.approx(float((gradient[name] * direction).sum()), rel=1e-6, abs=1e-9)


class TestLatents:
    """Huginn shares a complete prompt only under one latent identity."""

    @pytest.fixture
    def huginn(self):
        return toy("huginn")

    @pytest.mark.parametrize("lengths", [(3, 0, 1, 5, 2), (4, 4)])
    @pytest.mark.parametrize("name", NAMES)
    def test_two_keys_share_the_prompt_and_keep_responses_apart(self, huginn, small_group, name, lengths):
        group = distinct(small_group(lengths), lambda index: TwoKeyLatent(5, index))
        assert plan.plan(huginn, group).sharing is Sharing.COMPLETE
        oracle = dense_oracle.evaluate(huginn, group, ALL)
        agreement = compare(run(name, huginn, group)[1], oracle.gradient)
        assert FP64_GATE.admits(agreement), agreement
        same = distinct(group, lambda index: TwoKeyLatent(5, 0))
        assert compare(run(name, huginn, same)[1], oracle.gradient).whole > 1e-4

    @pytest.mark.parametrize("schedule", ["prefix-serial", "tree-packed", prefix_packed.share])
    def test_another_identity_is_refused_by_both_names(self, huginn, small_group, schedule):
        group = distinct(small_group((3, 0, 2)), PositionLatent)
        with pytest.raises(
            LatentIdentityError, match=r"position-v1\(0\) of response 0.*position-v1\(2\) of response 2"
        ):
            run(schedule, huginn, group)

    def test_another_profile_is_another_identity(self, huginn, small_group):
        group = distinct(small_group((3, 2)), lambda index: [PositionLatent(5), TwoKeyLatent(5, 5)][index])
        with pytest.raises(LatentIdentityError, match=r"position-v1\(5\).*two-key-v1\(5\)"):
            run("tree-packed", huginn, group)

    @pytest.mark.parametrize("mean", Mean)
    @pytest.mark.parametrize("supervision", Supervision)
    @pytest.mark.parametrize("lengths", [(3, 0, 1, 5, 2), (4, 4, 4), (1, 1)])
    def test_distinct_latents_share_the_prelude(self, huginn, small_group, lengths, supervision, mean):
        """Exact in every partition, with and without rematerialisation."""
        objective = Objective(1.5, 0.1, 0.03, supervision, mean)
        group = distinct(small_group(lengths), PositionLatent)
        assert plan.plan(huginn, group).sharing is Sharing.PRELUDE
        oracle = dense_oracle.evaluate(huginn, group, objective)
        for microbatch in (1, 2, 5):
            for options in (None, EVERYTHING):
                loss, gradient = run("prefix-packed", huginn, group, objective, microbatch, options)
                agreement = compare(gradient, oracle.gradient)
                assert FP64_GATE.admits(agreement), (microbatch, agreement)
                assert loss == pytest.approx(oracle.loss, abs=1e-13)

    def test_the_plan_says_what_is_shared_and_why(self, huginn, small_group):
        group = distinct(small_group((3, 2)), PositionLatent)
        assert "position-v1(0)" in plan.plan(huginn, group).reason
        assert plan.plan(huginn, distinct(group, lambda index: PositionLatent(4))) == Plan(
            Sharing.COMPLETE, "2 responses share one prompt pass from latent position-v1(4)"
        )

    def test_a_prelude_that_saves_too_little_is_replayed(self, huginn, small_group):
        """One call in eight over the prompt alone: with long answers that is less than a hundredth."""
        group = distinct(small_group((60, 60), prompt=4), PositionLatent)
        assert plan.prelude_saving(huginn, 4, [60, 60]) == pytest.approx(4 / (126 * 8))
        found = plan.plan(huginn, group)
        assert (found.sharing, "0.4% of the work, less than" in found.reason) == (Sharing.NOTHING, True)

    def test_one_response_shares_nothing(self, case):
        model, group = case((0, 4))
        assert plan.plan(model, group) == Plan(
            Sharing.NOTHING, "1 non-empty responses share nothing; replay has one pass, not two"
        )

    def test_only_huginn_has_a_prelude(self, small_group):
        with pytest.raises(ContractError, match="Ouro, which has no prelude"):
            run(prelude_packed.accumulate, toy("ouro"), small_group())


def test_a_loss_scale_is_a_positive_number():
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ContractError, match="loss scale"):
            Options(loss_scale=wrong)

"""The way in for a trainer, and the example that goes it."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments import dense_oracle, exactness, logical_batch
from experiments.batch import Group, Origin, digest
from experiments.contract import Options, PolicyVersionError
from experiments.exactness import FP64_GATE, compare
from experiments.examples import grpo
from experiments.objective import Supervision, WeightError, published
from experiments.plan import Sharing
from experiments.schedules import SCHEDULES
from experiments.toys import toy

ALL = published(Supervision.ALL_LOOPS)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_groups_share_one_normalisation(case, small_group, schedule):
    """Two groups' gradient is the token-weighted mean of what the oracle finds for each alone."""
    model, group = case((3, 1))
    groups = (group, small_group((2, 0, 4), prompt=6, seed=9, latent=group.responses[0].latent))
    found = logical_batch.accumulate(model, groups, ALL, schedule=schedule, microbatch=2)
    oracles = [dense_oracle.evaluate(model, part, ALL) for part in groups]
    mixed = {name: 0.4 * oracles[0].gradient[name] + 0.6 * oracles[1].gradient[name] for name in oracles[0].gradient}
    assert FP64_GATE.admits(compare(exactness.gradients(model), mixed))
    assert float(found.loss) == pytest.approx(0.4 * oracles[0].loss + 0.6 * oracles[1].loss, abs=1e-13)
    expected = [Sharing.COMPLETE] * 2 if schedule == "prefix-packed" else []
    assert [plan.sharing for plan in found.plans] == expected


def test_an_unknown_schedule_is_refused(case):
    model, group = case((3,))
    with pytest.raises(logical_batch.UnknownScheduleError, match="found 'magic'"):
        logical_batch.accumulate(model, [group], ALL, schedule="magic", microbatch=1)


def test_a_wrapped_model_is_refused(case):
    """Distributed wrappers hide what a schedule asks of a family, and reduce gradients at the wrong moment."""
    model, group = case((3,))
    with pytest.raises(logical_batch.ModelError, match=r"found Sequential; .* what it wraps"):
        logical_batch.accumulate(torch.nn.Sequential(model), [group], ALL, schedule="full-packed", microbatch=1)


def test_groups_may_come_one_by_one(case):
    """A generator is read once, and every group of it counts."""
    model, group = case((3, 1))
    losses = [
        float(logical_batch.accumulate(model, groups, ALL, schedule="full-packed", microbatch=2).loss)
        for groups in ([group, group], (group for _ in range(2)))
    ]
    assert losses[0] == losses[1] != 0


def of_version(group, model, version):
    origin = Origin(digest(group.prompt_P), version, model.loops)
    return Group(group.prompt_P, tuple(replace(response, origin=origin) for response in group.responses))


@pytest.mark.parametrize("schedule", SCHEDULES)
class TestPolicies:
    """All groups of one logical batch were sampled by one policy, also where nobody says by which."""

    def test_two_versions_in_two_groups_are_refused(self, case, schedule):
        model, group = case((2, 1))
        groups = [group, of_version(group, model, "7"), group, of_version(group, model, "8")]
        with pytest.raises(PolicyVersionError, match="group 3, response 0: expected policy version 7, found 8"):
            logical_batch.accumulate(model, groups, ALL, schedule=schedule, microbatch=2)
        assert all(parameter.grad is None for parameter in model.parameters())

    def test_another_version_than_the_models_is_refused_before_anything_runs(self, case, schedule):
        model, group = case((2, 1))
        options, groups = Options(policy_version="7"), [group, of_version(group, model, "8")]
        with pytest.raises(PolicyVersionError, match="group 1, response 0: expected policy version 7, found 8"):
            logical_batch.accumulate(model, groups, ALL, schedule=schedule, microbatch=2, options=options)
        assert all(parameter.grad is None for parameter in model.parameters())

    def test_one_version_is_welcome(self, case, schedule):
        model, group = case((2, 1))
        for version in ("7", None):
            logical_batch.accumulate(
                model,
                [of_version(group, model, "7"), group],
                ALL,
                schedule=schedule,
                microbatch=2,
                options=Options(policy_version=version),
            )


class Weighing:
    """The published loss with other weights."""

    def __init__(self, change):
        self.change, self.supervised_loops, self.loss = change, ALL.supervised_loops, ALL.loss

    def token_weights(self, lengths):
        return self.change(list(ALL.token_weights(lengths)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w[:3], "expected one slice for each of 4 responses, found 3"),
        (lambda w: [*w, w[0]], "expected one slice for each of 4 responses, found 5"),
        (lambda w: [w[1], w[0], *w[2:]], r"response 0: .* of shape \[2\], found float64 \[1\]"),
        (lambda w: [*w[:3], torch.cat(w)[:3]], r"response 3: .* of shape \[1\], found float64 \[3\]"),
        (lambda w: [*w[:2], w[2] * torch.nan, w[3]], "response 2: expected finite numbers"),
        (lambda w: [*w[:3], w[3] / 0], "response 3: expected finite numbers"),
    ],
)
def test_an_objectives_weights_belong_to_its_responses(case, change, message):
    model, group = case((2, 1))
    with pytest.raises(WeightError, match=message):
        logical_batch.accumulate(model, [group, group], Weighing(change), schedule="full-packed", microbatch=2)
    assert all(parameter.grad is None for parameter in model.parameters())


class ClippedPolicyGradient:
    """A trainer's own loss: PPO's clipped surrogate on the last loop, against log-probabilities of its own."""

    def __init__(self, old_log_probs):
        self.old = old_log_probs

    def token_weights(self, lengths):
        return tuple(torch.full((length,), 1 / sum(lengths), dtype=torch.float64) for length in lengths)

    def supervised_loops(self, loops):
        return (loops - 1,)

    def loss(self, scores, responses, weights, loops):
        old = torch.cat([self.old[id(response)] for response in responses])
        advantages = torch.cat([response.advantages_D for response in responses])
        ratio = (scores.log_probs_NS[:, -1] - old).exp()
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        return -(torch.cat(list(weights)) * surrogate).sum()


def test_a_trainers_own_loss_works_with_every_schedule(case):
    """Clipping is active on both sides, and all schedules agree with one plain graph over all tokens."""
    model, group = case((3, 0, 1, 5, 2))
    generator = torch.Generator().manual_seed(8)
    objective = ClippedPolicyGradient(
        {id(r): torch.rand(len(r), generator=generator, dtype=torch.float64) - 3 for r in group.responses}
    )
    gradients = {}
    for name in SCHEDULES:
        model.zero_grad()
        logical_batch.accumulate(model, [group], objective, schedule=name, microbatch=2)
        gradients[name] = exactness.gradients(model)
    for name, gradient in gradients.items():
        agreement = compare(gradient, gradients["full-serial"])
        assert FP64_GATE.admits(agreement), (name, agreement)
    assert any(tensor.any() for tensor in gradients["full-serial"].values())


def test_options_reach_the_schedule(case):
    model, group = case((3,))
    for scale in (1.0, 8.0):
        model.zero_grad()
        logical_batch.accumulate(
            model, [group], ALL, schedule="prefix-packed", microbatch=1, options=Options(loss_scale=scale)
        )
        if scale == 1.0:
            plain = exactness.gradients(model)
    assert all(torch.equal(tensor, 8 * plain[name]) for name, tensor in exactness.gradients(model).items())


def test_the_example_is_step_for_step_the_same_with_and_without_sharing(monkeypatch):
    """Rewards (so every sampled token), losses, and the parameters after AdamW: fp64, equal to its rounding."""
    monkeypatch.setattr(grpo, "ANSWERS", 6)
    monkeypatch.setattr(grpo, "GROUPS", 2)
    runs = {}
    for schedule in ("full-packed", "prefix-packed"):
        model = toy("ouro", dtype=torch.float64)
        before = copy.deepcopy(model.state_dict())
        runs[schedule] = list(grpo.train(schedule, 5, model=model)), model
        assert not torch.equal(before["lm_head.weight"], model.lm_head.weight)
    (full, full_model), (prefix, prefix_model) = runs.values()
    for one, other in zip(full, prefix, strict=True):
        assert one.reward == other.reward
        assert one.loss == pytest.approx(other.loss, abs=1e-11)
    for name, parameter in full_model.named_parameters():
        torch.testing.assert_close(parameter, dict(prefix_model.named_parameters())[name], atol=1e-8, rtol=0)


def test_the_examples_reward_counts_right_tokens():
    """Under a policy that always repeats the last token, the reward is 1."""
    model = toy("ouro", dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    group, reward = grpo.draw_group(model, copy.deepcopy(model), generator)
    right = [float((r.tokens_D == group.prompt_P[-1]).double().mean()) for r in group.responses]
    assert reward == pytest.approx(sum(right) / len(right))
    assert 0 < reward < 0.5
    better = max(range(len(right)), key=right.__getitem__)
    assert float(group.responses[better].advantages_D[0]) > 0
    assert replace(group.responses[0]).latent is None


def test_the_readmes_program_runs(capsys):
    """The first block of Python in the package's README, as it stands."""
    root = Path(__file__).parents[2]
    text = (root / "experiments/README.md").read_text()
    program = text.split("```python\n")[1].split("```")[0].replace('Path("tests', f'Path("{root}/tests')
    exec(compile(program, "README.md", "exec"), {})
    loss, sharing = capsys.readouterr().out.split(" ", 1)
    assert abs(float(loss)) < 10
    assert sharing == "['complete-prefix', 'complete-prefix']\n"

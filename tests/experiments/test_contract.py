"""Each refusal has its own error; none leaves a gradient that looks right."""

from dataclasses import replace

import pytest
import torch

from experiments import contract, exactness
from experiments.batch import Group, Origin, digest
from experiments.contract import (
    Contract,
    DepthMismatchError,
    GradientsChangedError,
    NoGradientError,
    Options,
    ParametersChangedError,
    PolicyVersionError,
    PrefixFinishedError,
    PromptMismatchError,
    SupervisedLoopsError,
    TraceChangedError,
    VocabularyError,
)
from experiments.latent import GivenLatent, LatentError, PositionLatent, draw
from experiments.objective import ObjectiveError, Supervision, WeightError, published
from experiments.schedules import SCHEDULES
from experiments.toys import VOCABULARY, toy

ALL = published(Supervision.ALL_LOOPS)
TERMINAL = published(Supervision.TERMINAL_ONLY)
NAMES = list(SCHEDULES)
REMAT = Options(rematerialise=True)


class Meddling:
    """The published loss, and something done right after a chosen forward pass."""

    def __init__(self, meddle, at=0):
        self.meddle, self.at, self.calls = meddle, at, 0

    def supervised_loops(self, loops):
        return ALL.supervised_loops(loops)

    def loss(self, scores, responses, weights, loops):
        result = ALL.loss(scores, responses, weights, loops)
        if self.calls == self.at:
            self.meddle()
        self.calls += 1
        return result


def run(name, model, group, objective=ALL, options=contract.PLAIN):
    weights = ALL.token_weights(group.lengths)
    return SCHEDULES[name](model, group, weights, objective, microbatch=2, options=options)


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("name", NAMES)
class TestEverySchedule:
    """What happens between any forward pass and its backward pass, in the first wave or a later one."""

    def test_refuses_a_parameter_changed_in_place(self, case, name, at):
        model, group = case((3, 1, 5))
        parameter = next(model.parameters())

        def step():
            with torch.no_grad():
                parameter.mul_(1.001)

        with pytest.raises(ParametersChangedError, match="found changes in "):
            run(name, model, group, Meddling(step, at))

    def test_refuses_a_replaced_parameter(self, case, name, at):
        """The same values at another address are another parameter."""
        model, group = case((3, 1, 5))
        owner = next(module for module in model.modules() if "weight" in module._parameters)

        def replace_weight():
            owner.weight = torch.nn.Parameter(owner.weight.detach().clone())

        with pytest.raises(ParametersChangedError):
            run(name, model, group, Meddling(replace_weight, at))

    def test_refuses_a_token_changed_before_a_rematerialised_backward(self, case, name, at):
        model, group = case((3, 1, 5))
        tokens = group.responses[2].tokens_D

        def mutate():
            tokens[1] = (tokens[1] + 1) % 13

        with pytest.raises(TraceChangedError, match="the tokens of response 2"):
            run(name, model, group, Meddling(mutate, at), REMAT)

    def test_refuses_a_changed_prompt(self, case, name, at):
        model, group = case((3, 1, 5))
        with pytest.raises(TraceChangedError, match="the prompt"):
            run(name, model, group, Meddling(lambda: group.prompt_P.add_(1), at))

    def test_sees_a_write_through_data_only_with_a_checksum(self, case, name, at):
        model, group = case((3, 1, 5))
        parameter = next(model.parameters())
        meddling = Meddling(lambda: parameter.data.view(-1)[0].add_(1e-9), at)
        run(name, model, group, meddling)
        with pytest.raises(ParametersChangedError):
            run(name, model, group, Meddling(meddling.meddle, at), Options(checksum=True))


@pytest.mark.parametrize("name", NAMES)
class TestLatentTables:
    """A given latent is a part of the trace: the waves of one group must read the same rows."""

    @pytest.fixture
    def given(self, small_group):
        latent = GivenLatent(draw(5, 0, 12, 16).double())
        return toy("huginn"), small_group((3, 1, 5), latent=latent), latent.table_TC

    @pytest.mark.parametrize("at", [0, 1])
    @pytest.mark.parametrize("row", [1, 6], ids=["of the prompt", "of a response"])
    def test_a_table_changed_between_waves_is_refused(self, given, name, at, row):
        model, group, table = given
        with pytest.raises(TraceChangedError, match="the latent of response 0"):
            run(name, model, group, Meddling(lambda: table[row].mul_(2), at))

    def test_a_write_through_data_is_seen_with_a_checksum(self, given, name):
        model, group, table = given
        meddling = Meddling(lambda: table.data[6].mul_(2))
        with pytest.raises(TraceChangedError, match="the latent of response 0"):
            run(name, model, group, meddling, Options(checksum=True))


class Reading(Meddling):
    """The published loss, and other loops than it reads."""

    def __init__(self, loops):
        super().__init__(lambda: None)
        self.loops = loops

    def supervised_loops(self, loops):
        return self.loops


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("loops", [(), (0,), (1, 2, 3), (2, 1, 0), (2, 2), (-1, 2), (0, 2, 1)], ids=str)
def test_loops_that_are_not_there_or_not_in_order_are_refused(small_group, name, loops):
    """States come in ascending order, so that other loops would be read in silence; this model has three."""
    with pytest.raises(SupervisedLoopsError, match=r"counted from 0, ascending, and 2 as the last, found \("):
        run(name, toy("huginn"), small_group((3, 1), latent=PositionLatent(5)), Reading(loops))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lengths", [(3, 1), (1, 3), (3, 0, 2)], ids=str)
class TestLatents:
    """A family that starts from a latent gets one with every response, and another family gets none."""

    def swapped(self, group, latent):
        """Give the last response another latent, or none."""
        return Group(group.prompt_P, (*group.responses[:-1], replace(group.responses[-1], latent=latent)))

    def test_one_that_is_missing_is_refused(self, small_group, name, lengths):
        group = self.swapped(small_group(lengths, latent=PositionLatent(5)), None)
        with pytest.raises(LatentError, match=f"response {len(lengths) - 1}: expected a latent .* found none"):
            run(name, toy("huginn"), group)

    def test_one_that_nobody_would_read_is_refused(self, small_group, name, lengths):
        group = self.swapped(small_group(lengths), PositionLatent(5))
        with pytest.raises(LatentError, match=f"response {len(lengths) - 1}: expected no latent .* found one"):
            run(name, toy("ouro"), group)


@pytest.mark.parametrize("name", NAMES)
class TestTokens:
    """A target outside the vocabulary would be scored as if its logit were zero."""

    @pytest.mark.parametrize("token", [-100, -1, VOCABULARY])
    @pytest.mark.parametrize("place", [(0, 0), (0, 2), (2, 3), (2, 4)], ids=str)
    def test_of_a_response_are_in_the_vocabulary(self, case, name, token, place):
        model, group = case((3, 0, 5))
        index, position = place
        group.responses[index].tokens_D[position] = token
        found = rf"^response {index}: expected tokens from 0 to 12, found {token} at {position}$"
        with pytest.raises(VocabularyError, match=found):
            run(name, model, group)
        assert all(parameter.grad is None for parameter in model.parameters())

    @pytest.mark.parametrize("token", [-100, -1, VOCABULARY])
    def test_of_the_prompt_are_in_the_vocabulary(self, case, name, token):
        model, group = case((3, 0, 5))
        group.prompt_P[3] = token
        with pytest.raises(VocabularyError, match=rf"^the prompt: .* found {token} at 3$"):
            run(name, model, group)


class Shaped(Meddling):
    """The published loss in another form."""

    def __init__(self, form):
        super().__init__(lambda: None)
        self.form = form

    def loss(self, scores, responses, weights, loops):
        return self.form(super().loss(scores, responses, weights, loops))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("form", "found"),
    [
        (lambda loss: loss[None], r"shape \[1\]"),
        (lambda loss: float(loss.detach()), "float"),
        (lambda loss: (loss,), "tuple"),
    ],
)
def test_a_loss_is_a_scalar(case, name, form, found):
    model, group = case((3, 1, 2))
    with pytest.raises(ObjectiveError, match=rf"responses \[0.*\]: expected a loss .* found {found}"):
        run(name, model, group, Shaped(form))
    assert all(parameter.grad is None for parameter in model.parameters())


class Constant(Meddling):
    """A loss that does not read its scores."""

    def __init__(self):
        super().__init__(lambda: None)

    def loss(self, scores, responses, weights, loops):
        return super().loss(scores, responses, weights, loops).detach()


@pytest.mark.parametrize("name", NAMES)
class TestWithoutGradients:
    """Whatever would return a loss and leave every `.grad` empty."""

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_switched_off_is_refused(self, case, name, mode):
        model, group = case((3, 1))
        with pytest.raises(NoGradientError, match="expected gradients to be switched on"), mode():
            run(name, model, group)

    def test_a_frozen_model_is_refused(self, case, name):
        model, group = case((3, 1))
        with pytest.raises(NoGradientError, match="all are frozen"):
            run(name, model.requires_grad_(False), group)

    def test_a_constant_loss_is_refused(self, case, name):
        model, group = case((3, 1, 2))
        with pytest.raises(NoGradientError, match=r"responses \[0.*\]: expected a loss of their scores"):
            run(name, model, group, Constant())

    def test_samples_of_inference_mode_are_refused(self, case, name):
        """Torch keeps no version counter for them."""
        model, group = case((3, 1))
        with torch.inference_mode():
            sampled_D = group.responses[1].tokens_D.clone()
        responses = (group.responses[0], replace(group.responses[1], tokens_D=sampled_D))
        with pytest.raises(NoGradientError, match=r"the tokens of response 1: .* clone it"):
            run(name, model, Group(group.prompt_P, responses))


@pytest.mark.parametrize("name", NAMES)
class TestGradients:
    """From a group's first wave to its end nobody else writes to its gradient."""

    @pytest.mark.parametrize("to_none", [True, False])
    def test_zeroed_between_waves_are_refused(self, case, name, to_none):
        model, group = case((3, 1, 5))
        with pytest.raises(GradientsChangedError, match="zero_grad"):
            run(name, model, group, Meddling(lambda: model.zero_grad(set_to_none=to_none), at=1))

    @pytest.mark.parametrize("to_none", [True, False])
    def test_zeroed_before_the_first_wave_ends_are_welcome(self, case, name, to_none):
        model, group = case((3, 1, 5))
        run(name, model, group)
        once = exactness.gradients(model)
        run(name, model, group, Meddling(lambda: model.zero_grad(set_to_none=to_none)))
        assert all(torch.equal(found, once[key]) for key, found in exactness.gradients(model).items())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda w: w[:2], "expected one slice for each of 3 responses, found 2"),
        (lambda w: (w[1], w[0], w[2]), r"response 0: expected constant floats of shape \[3\], found float64 \[1\]"),
        (lambda w: (w[0], w[1], w[2][None]), r"response 2: .* found float64 \[1, 5\]"),
        (lambda w: (w[0], w[1], w[2].sum()), r"response 2: .* found float64 \[\]"),
        (lambda w: (w[0], w[1].long(), w[2]), r"response 1: .* found int64 \[1\]"),
        (lambda w: (w[0].requires_grad_(), w[1], w[2]), "response 0: expected constant floats"),
    ],
)
def test_weights_that_do_not_belong_to_the_responses_are_refused(case, name, spoil, message):
    model, group = case((3, 1, 5))
    with pytest.raises(WeightError, match=message):
        SCHEDULES[name](model, group, spoil(ALL.token_weights(group.lengths)), ALL, microbatch=3)


def sampled(group, model, version="7"):
    origin = Origin(digest(group.prompt_P), version, model.loops)
    return Group(group.prompt_P, tuple(replace(response, origin=origin) for response in group.responses))


@pytest.mark.parametrize("name", NAMES)
class TestOrigins:
    def test_of_this_prompt_policy_and_depth_are_welcome(self, case, name):
        model, group = case((3, 1))
        run(name, model, sampled(group, model), options=Options(policy_version="7"))
        run(name, model, sampled(group, model))

    def test_of_another_prompt_are_refused(self, case, name):
        model, group = case((3, 1))
        responses = list(sampled(group, model).responses)
        other = Origin(digest(group.prompt_P + 1), "7", model.loops)
        responses[1] = replace(responses[1], origin=other)
        with pytest.raises(PromptMismatchError, match=rf"response 1: expected prompt {digest(group.prompt_P)}"):
            run(name, model, Group(group.prompt_P, tuple(responses)))

    def test_of_another_policy_version_are_refused(self, case, name):
        model, group = case((3, 1))
        with pytest.raises(PolicyVersionError, match="response 0: expected policy version 8, found 7"):
            run(name, model, sampled(group, model), options=Options(policy_version="8"))

    def test_of_two_policy_versions_are_refused(self, case, name):
        model, group = case((3, 1))
        mixed = (sampled(group, model).responses[0], sampled(group, model, "8").responses[1])
        with pytest.raises(PolicyVersionError, match="response 1: expected policy version 7, found 8"):
            run(name, model, Group(group.prompt_P, mixed))

    def test_of_another_depth_are_refused(self, case, name):
        model, group = case((3, 1))
        deeper = replace(sampled(group, model).responses[0].origin, depth=model.loops + 1)
        responses = tuple(replace(response, origin=deeper) for response in group.responses)
        with pytest.raises(DepthMismatchError, match=f"expected {model.loops} loops, found {model.loops + 1}"):
            run(name, model, Group(group.prompt_P, responses))


def test_any_changed_element_changes_the_checksum():
    """Also two that swap places, and one that changes sign only."""
    tensor = torch.tensor([1.0, 2.0, -0.0, 4.0], dtype=torch.bfloat16)
    base = contract._checksum(tensor)
    assert contract._checksum(tensor.clone()) == base
    for changed in ([2.0, 1.0, -0.0, 4.0], [1.0, 2.0, 0.0, 4.0], [1.0, 2.0, -0.0, 4.03125]):
        assert contract._checksum(torch.tensor(changed, dtype=torch.bfloat16)) != base


def test_a_finished_contract_admits_nothing(case):
    model, group = case((1,))
    agreed = Contract(model, group, (model.loops - 1,))
    agreed.claim([0])
    agreed.start([0])
    agreed.cover([0])
    agreed.finish()
    for again in (agreed.check, agreed.finish, lambda: agreed.claim([0]), lambda: agreed.start([0])):
        with pytest.raises(PrefixFinishedError):
            again()

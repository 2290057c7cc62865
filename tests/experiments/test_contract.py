"""Each refusal has its own error; none leaves a gradient that looks right."""

from dataclasses import replace

import pytest
import torch

from experiments import contract, exactness, prefix_packed, prefix_serial
from experiments.batch import Group, Origin, digest
from experiments.contract import (
    Contract,
    DepthMismatchError,
    Options,
    ParametersChangedError,
    PolicyVersionError,
    PrefixFinishedError,
    PromptMismatchError,
    ResponseCoverageError,
    TraceChangedError,
)
from experiments.objective import Supervision, published
from experiments.prefix import SharedPrefix
from experiments.schedules import SCHEDULES

ALL = published(Supervision.ALL_LOOPS)
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


@pytest.mark.parametrize("schedule", [prefix_serial, prefix_packed])
class TestPhases:
    """The three phases by hand, for a trainer that runs them itself."""

    @pytest.fixture
    def shared(self, case):
        model, group = case((2, 1, 3))
        return SharedPrefix(model, group, range(model.loops))

    def cover(self, schedule, shared, *indices):
        weights = ALL.token_weights(shared.group.lengths)
        return schedule.open_wave(shared, indices, weights, ALL)

    def test_a_missing_response_is_refused(self, schedule, shared):
        self.cover(schedule, shared, 0).backward()
        with pytest.raises(ResponseCoverageError, match=r"found \[1, 2\] missing"):
            shared.finish()

    def test_a_response_twice_is_refused(self, schedule, shared):
        self.cover(schedule, shared, 0, 1).backward()
        with pytest.raises(ResponseCoverageError, match=r"response 1: .* a second time"):
            self.cover(schedule, shared, 2, 1)

    @pytest.mark.parametrize("index", [3, -1])
    def test_a_response_that_is_not_there_is_refused(self, schedule, shared, index):
        with pytest.raises(ResponseCoverageError, match="no such response"):
            self.cover(schedule, shared, index)

    def test_a_second_prompt_backward_is_refused_and_adds_nothing(self, schedule, shared):
        self.cover(schedule, shared, 0, 1, 2).backward()
        shared.finish()
        gradient = exactness.gradients(shared.model)
        with pytest.raises(PrefixFinishedError):
            shared.finish()
        assert all(torch.equal(now, gradient[name]) for name, now in exactness.gradients(shared.model).items())

    def test_a_wave_after_the_prompt_backward_is_refused(self, schedule, shared):
        self.cover(schedule, shared, 0, 1, 2).backward()
        shared.finish()
        with pytest.raises(PrefixFinishedError):
            self.cover(schedule, shared, 0)

    def test_a_wave_left_open_past_the_prompt_backward_is_refused(self, schedule, shared):
        wave = self.cover(schedule, shared, 0, 1, 2)
        shared.finish()
        with pytest.raises(PrefixFinishedError):
            wave.backward()

    def test_an_optimizer_step_before_the_prompt_backward_is_refused(self, schedule, shared):
        self.cover(schedule, shared, 0, 1, 2).backward()
        torch.optim.SGD(shared.model.parameters(), lr=0.1).step()
        with pytest.raises(ParametersChangedError):
            shared.finish()

    def test_replaced_parameter_storage_is_refused(self, schedule, shared):
        wave = self.cover(schedule, shared, 0, 1, 2)
        name, parameter = next(iter(shared.model.named_parameters()))
        parameter.data = parameter.data.clone()
        with pytest.raises(ParametersChangedError, match=rf"found changes in {name}$"):
            wave.backward()

    def test_a_wave_runs_backward_once(self, schedule, shared):
        wave = self.cover(schedule, shared, 0, 1, 2)
        wave.backward()
        with pytest.raises(PrefixFinishedError):
            wave.backward()


def test_any_changed_element_changes_the_checksum():
    """Also two that swap places, and one that changes sign only."""
    tensor = torch.tensor([1.0, 2.0, -0.0, 4.0], dtype=torch.bfloat16)
    base = contract._checksum(tensor)
    assert contract._checksum(tensor.clone()) == base
    for changed in ([2.0, 1.0, -0.0, 4.0], [1.0, 2.0, 0.0, 4.0], [1.0, 2.0, -0.0, 4.03125]):
        assert contract._checksum(torch.tensor(changed, dtype=torch.bfloat16)) != base


def test_a_finished_contract_admits_nothing(case):
    model, group = case((1,))
    agreed = Contract(model, group)
    agreed.claim(0)
    agreed.finish()
    for again in (agreed.check, agreed.finish, lambda: agreed.claim(0)):
        with pytest.raises(PrefixFinishedError):
            again()

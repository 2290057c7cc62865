"""The three phases by hand, for a trainer that runs them itself: what may follow what, and what may not."""

import pytest
import torch

from experiments import dense_oracle, exactness, prefix_packed, prefix_serial
from experiments.contract import (
    BrokenWaveError,
    GradientsChangedError,
    NoGradientError,
    OpenWaveError,
    ParametersChangedError,
    PrefixFinishedError,
    ResponseCoverageError,
    SupervisedLoopsError,
)
from experiments.exactness import FP64_GATE, compare
from experiments.objective import Supervision, published
from experiments.prefix import SharedPrefix

ALL = published(Supervision.ALL_LOOPS)
TERMINAL = published(Supervision.TERMINAL_ONLY)


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

    def test_an_open_wave_is_refused_until_it_has_run(self, schedule, shared):
        """Its forward pass alone covers nothing; once it has run the gradient is right."""
        wave = self.cover(schedule, shared, 0, 2)
        self.cover(schedule, shared, 1).backward()
        with pytest.raises(OpenWaveError, match=r"responses \[0, 2\]: .* has not run"):
            shared.finish()
        wave.backward()
        shared.finish()
        oracle = dense_oracle.evaluate(shared.model, shared.group, ALL)
        assert FP64_GATE.admits(compare(exactness.gradients(shared.model), oracle.gradient))

    def test_a_dropped_wave_is_refused(self, schedule, shared):
        self.cover(schedule, shared, 0, 1).backward()
        self.cover(schedule, shared, 2)
        with pytest.raises(OpenWaveError, match=r"\[2\]"):
            shared.finish()

    def test_a_wave_of_empty_responses_runs_too(self, case, schedule):
        model, group = case((0, 2))
        shared = SharedPrefix(model, group, range(model.loops))
        empty = self.cover(schedule, shared, 0)
        self.cover(schedule, shared, 1).backward()
        with pytest.raises(OpenWaveError, match=r"\[0\]"):
            shared.finish()
        assert float(empty.backward()) == 0
        shared.finish()

    def test_a_wave_that_failed_half_way_is_never_whole(self, schedule, shared):
        """Neither by running it again nor by going on without it."""
        first, other = self.cover(schedule, shared, 0, 2), self.cover(schedule, shared, 1)

        def fail(adjoint):
            raise RuntimeError("out of memory")

        hook = shared.boundary.keys[0].register_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            first.backward()
        hook.remove()
        assert any(parameter.grad is not None for parameter in shared.model.parameters())
        for onward in (first.backward, other.backward, shared.finish):
            with pytest.raises(BrokenWaveError, match=r"responses \[0, 2\]: .* failed half way"):
                onward()

    def test_a_refused_wave_claims_nothing(self, schedule, shared):
        self.cover(schedule, shared, 1).backward()
        for refused in ((0, 1), (2, 2), (0, 7)):
            with pytest.raises(ResponseCoverageError):
                self.cover(schedule, shared, *refused)
        self.cover(schedule, shared, 0, 2).backward()
        shared.finish()

    def test_an_optimizer_step_between_waves_is_refused(self, schedule, shared):
        self.cover(schedule, shared, 0).backward()
        torch.optim.SGD(shared.model.parameters(), lr=0.1).step()
        with pytest.raises(ParametersChangedError):
            self.cover(schedule, shared, 1)

    @pytest.mark.parametrize(("kept", "read"), [(ALL, TERMINAL), (TERMINAL, ALL)])
    def test_an_objective_on_other_loops_is_refused(self, case, schedule, kept, read):
        """A terminal objective would read the first loop's scores as the last one's."""
        model, group = case((2, 1, 3))
        shared = SharedPrefix(model, group, kept.supervised_loops(model.loops))
        with pytest.raises(SupervisedLoopsError, match=r"found one on \("):
            schedule.open_wave(shared, [0], ALL.token_weights(group.lengths), read)

    def test_a_wave_without_gradients_is_refused(self, schedule, shared):
        with pytest.raises(NoGradientError), torch.no_grad():
            self.cover(schedule, shared, 0)

    @pytest.mark.parametrize("write", ["to none", "to zero", "clip", "another loss"])
    def test_a_gradient_written_to_before_the_prompt_backward_is_refused(self, schedule, shared, write):
        model = shared.model
        self.cover(schedule, shared, 0, 1, 2).backward()
        if write == "clip":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        elif write == "another loss":
            model.head_VC.sum().backward()
        else:
            model.zero_grad(set_to_none=write == "to none")
        with pytest.raises(GradientsChangedError):
            shared.finish()

    def test_several_groups_may_be_open_at_once(self, case, small_group, schedule):
        """Waves of one are no foreign writes to the other; the sum is right."""
        model, group = case((2, 1, 3))
        groups = (group, small_group((4, 2), prompt=6, seed=9, latent=group.responses[0].latent))
        one, two = (SharedPrefix(model, part, range(model.loops)) for part in groups)
        self.cover(schedule, one, 0, 1).backward()
        self.cover(schedule, two, 0).backward()
        self.cover(schedule, one, 2).backward()
        one.finish()
        self.cover(schedule, two, 1).backward()
        two.finish()
        oracles = [dense_oracle.evaluate(model, part, ALL).gradient for part in groups]
        summed = {key: oracles[0][key] + oracles[1][key] for key in oracles[0]}
        assert FP64_GATE.admits(compare(exactness.gradients(model), summed))

    @pytest.mark.parametrize("to_none", [True, False])
    def test_another_groups_wave_hides_no_zeroing(self, case, small_group, schedule, to_none):
        """The group that lost its gradient is refused, the one that began afterwards is not."""
        model, group = case((2, 1, 3))
        other = small_group((4, 2), prompt=6, seed=9, latent=group.responses[0].latent)
        one, two = (SharedPrefix(model, part, range(model.loops)) for part in (group, other))
        self.cover(schedule, one, 0, 1, 2).backward()
        model.zero_grad(set_to_none=to_none)
        self.cover(schedule, two, 0, 1).backward()
        with pytest.raises(GradientsChangedError):
            one.finish()
        two.finish()
        oracle = dense_oracle.evaluate(model, other, ALL)
        assert FP64_GATE.admits(compare(exactness.gradients(model), oracle.gradient))

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
        gradient = exactness.gradients(shared.model)
        with pytest.raises(ResponseCoverageError, match=r"responses \[0, 1, 2\]: .* found a second"):
            wave.backward()
        assert all(torch.equal(now, gradient[name]) for name, now in exactness.gradients(shared.model).items())
        shared.finish()
        with pytest.raises(PrefixFinishedError):
            wave.backward()

import math

import pytest
import torch

from experiments.batch import Response
from experiments.objective import Mean, Objective, ObjectiveError, Supervision, published
from experiments.readout import Scores, score


def objective(**changes):
    fields = {
        "alpha": 1.5,
        "kl_coefficient": 0.01,
        "entropy_coefficient": 0.003,
        "supervision": Supervision.ALL_LOOPS,
        "mean": Mean.TOKEN,
    }
    return Objective(**(fields | changes))


def test_credit_grows_with_the_loop_and_sums_to_one():
    """softmax(alpha log l) is l^alpha over its sum."""
    assert objective(alpha=0.0).credits(4) == (0.25,) * 4
    progressive = objective().credits(4)
    assert math.fsum(progressive) == pytest.approx(1, abs=1e-15)
    assert [credit / progressive[0] for credit in progressive] == pytest.approx([1, 2**1.5, 3**1.5, 8])


def test_terminal_only_credits_and_reads_the_last_loop_alone():
    terminal = objective(supervision=Supervision.TERMINAL_ONLY)
    assert (terminal.credits(4), terminal.supervised_loops(4)) == ((1.0,), (3,))
    assert objective().supervised_loops(4) == (0, 1, 2, 3)


@pytest.mark.parametrize("mean", Mean)
def test_weights_of_a_logical_batch_sum_to_one(mean):
    weights = objective(mean=mean).token_weights([3, 0, 1, 5])
    assert [len(part) for part in weights] == [3, 0, 1, 5]
    assert float(torch.cat(weights).sum()) == pytest.approx(1, abs=1e-15)


def test_token_mean_weighs_tokens_and_response_mean_weighs_responses():
    assert torch.cat(objective().token_weights([3, 0, 1])).tolist() == [0.25] * 4
    by_response = objective(mean=Mean.RESPONSE).token_weights([4, 0, 1])
    assert [part.tolist() for part in by_response] == [[0.125] * 4, [], [0.5]]


@pytest.mark.parametrize("mean", Mean)
def test_a_logical_batch_without_tokens_is_an_error(mean):
    with pytest.raises(ObjectiveError, match="without any token"):
        objective(mean=mean).token_weights([0, 0])


@pytest.mark.parametrize("field", ["alpha", "kl_coefficient", "entropy_coefficient"])
def test_a_coefficient_that_is_no_number_is_an_error(field):
    with pytest.raises(ObjectiveError, match=field):
        objective(**{field: math.nan})


def test_the_loss_is_the_formula_worked_by_hand():
    """Two tokens, two loops, every term computed with plain arithmetic."""
    scores = Scores(
        torch.tensor([[-2.0, -1.0], [-3.0, -0.5]], dtype=torch.float64),
        torch.tensor([0.7, 0.9], dtype=torch.float64),
    )
    response = Response(
        torch.tensor([1, 2]),
        torch.tensor([1.0, -0.5], dtype=torch.float64),
        torch.tensor([-1.5, -0.2], dtype=torch.float64),
    )
    chosen = objective(alpha=1.0)
    expected = 0.0
    for logps, entropy, advantage, reference in (((-2.0, -1.0), 0.7, 1.0, -1.5), ((-3.0, -0.5), 0.9, -0.5, -0.2)):
        gap = reference - logps[1]
        credited = logps[0] / 3 + logps[1] * 2 / 3
        expected += 0.5 * (-advantage * credited + 0.01 * (math.exp(gap) - 1 - gap) - 0.003 * entropy)
    found = chosen.loss(scores, [response], chosen.token_weights([2]), loops=2)
    assert float(found) == pytest.approx(expected, abs=1e-15)


def test_scores_are_normalised_log_probabilities_and_entropy():
    """Over all targets, probabilities sum to one, and entropy is their mean surprise at the last loop."""
    generator = torch.Generator().manual_seed(1)
    head = torch.rand(5, 3, generator=generator, dtype=torch.float64)
    states = [torch.rand(1, 3, generator=generator, dtype=torch.float64).expand(5, 3) for _ in range(2)]
    scores = score(states, head, torch.arange(5))
    torch.testing.assert_close(scores.log_probs_NS.exp().sum(0), torch.ones(2, dtype=torch.float64))
    last = scores.log_probs_NS[:, 1]
    torch.testing.assert_close(scores.terminal_entropy_N[0], -(last.exp() * last).sum())


def test_the_published_constants():
    assert published(Supervision.ALL_LOOPS) == objective()

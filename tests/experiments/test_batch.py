import pytest
import torch

from experiments.batch import BatchError, Group, Response

TOKENS, FLOATS = torch.arange(3), torch.zeros(3)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ((TOKENS.int(), FLOATS, FLOATS), "tokens: expected int64"),
        ((TOKENS[None], FLOATS, FLOATS), "tokens: expected int64"),
        ((TOKENS, FLOATS[:2], FLOATS), "advantages: expected one float for each of 3"),
        ((TOKENS, FLOATS, TOKENS), "reference: expected one float for each of 3"),
        ((TOKENS, FLOATS, torch.tensor([0.0, 1.0, torch.nan])), "reference: expected finite constants"),
        ((TOKENS, torch.zeros(3, requires_grad=True), FLOATS), "advantages: expected finite constants"),
        (([0, 1, 2], FLOATS, FLOATS), "tokens: expected a tensor, found list"),
        ((TOKENS, 0.5, FLOATS), "advantages: expected a tensor, found float"),
        ((TOKENS, FLOATS, None), "reference: expected a tensor, found NoneType"),
    ],
)
def test_tensors_that_do_not_belong_together_are_refused(tensors, message):
    with pytest.raises(BatchError, match=message):
        Response(*tensors)


@pytest.mark.parametrize(
    "prompt", [torch.arange(0), torch.arange(3).int(), torch.zeros(1, 2, dtype=torch.int64), [0, 1]], ids=str
)
def test_a_prompt_is_a_row_of_tokens_and_never_empty(prompt):
    with pytest.raises(BatchError, match="prompt"):
        Group(prompt, (Response(TOKENS, FLOATS, FLOATS),))


def test_a_group_has_a_response():
    with pytest.raises(BatchError, match="at least one response"):
        Group(TOKENS, ())


def test_lengths_count_empty_responses_too(small_group):
    assert small_group((3, 0, 1)).lengths == (3, 0, 1)


def test_responses_are_kept_whatever_held_them(small_group):
    """A generator in brackets looks like a tuple, and would be empty after its first reading."""
    group = small_group((2, 0, 1))
    for held in (list(group.responses), (response for response in group.responses)):
        assert Group(group.prompt_P, held).responses == group.responses

"""The streamed readout against dense formulas in fp64, and what it never allocates."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from experiments import readout
from experiments.readout import score


def draw(rows=7, loops=3, width=5, vocabulary=23, dtype=torch.float64, offset=0.0):
    generator = torch.Generator().manual_seed(2)
    states = [
        torch.randn(rows, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for _ in range(loops)
    ]
    head = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64) + offset
    targets = torch.randint(vocabulary, (rows,), generator=generator)
    weights = torch.randn(rows, loops, generator=generator, dtype=torch.float64)
    return states, head.to(dtype).requires_grad_(), targets, weights


def dense(states, head, targets):
    """Log-probabilities and last-loop entropy from whole tables of logits, in fp64."""
    tables = [(state.double() @ head.double().T).log_softmax(-1) for state in states]
    picked = torch.stack([table.gather(1, targets[:, None]).squeeze(1) for table in tables], dim=1)
    return picked, -(tables[-1].exp() * tables[-1]).sum(-1)


def both(states, head, targets, weights, tile_elements):
    """Return values and gradients of the streamed and the dense readout under one random linear loss."""
    results = []
    scores = score(states, head, targets, tile_elements=tile_elements)
    for log_probs, entropy in ((scores.log_probs_NS, scores.terminal_entropy_N), dense(states, head, targets)):
        loss = (log_probs.double() * weights).sum() + (entropy.double() * weights[:, 0]).sum()
        results.append([log_probs, entropy, *torch.autograd.grad(loss, [*states, head])])
    return results


def error(found, expected):
    return float((found - expected).detach().double().norm() / expected.detach().double().norm())


@pytest.mark.parametrize("loops", [1, 3])
@pytest.mark.parametrize("tile_elements", [1, 40, 21 * 4, 10**6])
def test_values_and_gradients_equal_the_dense_ones(loops, tile_elements):
    """One column a tile, ragged tiles, one tile: to fp64 rounding, for states and head."""
    for found, expected in zip(*both(*draw(loops=loops), tile_elements), strict=True):
        assert error(found, expected) < 1e-14


def test_rows_are_chunked_without_a_seam(monkeypatch):
    """Chunks that end inside a loop, at its border, and inside the terminal loop."""
    monkeypatch.setattr(readout, "ROWS_MAX", 4)
    for found, expected in zip(*both(*draw(), 13), strict=True):
        assert error(found, expected) < 1e-14


def test_a_common_offset_of_the_logits_costs_no_digits_of_the_entropy():
    """Sums run relative to the largest logit: at logits near 1000 fp32 keeps what rounding the logits leaves."""
    states, head, targets, _ = draw(dtype=torch.float32)
    moved = torch.cat((head.detach(), torch.full((23, 1), 1000.0)), dim=1)
    states = [torch.cat((state.detach(), torch.ones(7, 1)), dim=1).requires_grad_() for state in states]
    found = score(states, moved, targets, tile_elements=40).terminal_entropy_N
    assert float((found.double() - dense(states, moved, targets)[1]).detach().abs().max()) < 5e-4


def test_bf16_operands_accumulate_in_fp32():
    """Values are as exact as their operands; gradients are rounded to bf16 once, at the end."""
    arguments = draw(rows=40, vocabulary=300, dtype=torch.bfloat16)
    found, expected = both(*arguments, 2000)
    assert found[0].dtype == torch.float32
    assert error(found[0], expected[0]) < 1e-6
    assert error(found[1], expected[1]) < 1e-6
    for gradient, truth in zip(found[2:], expected[2:], strict=True):
        assert gradient.dtype == torch.bfloat16
        assert error(gradient, truth) < 6e-3


def test_a_frozen_head_gets_no_gradient():
    states, head, targets, _ = draw()
    score(states, head.detach(), targets).log_probs_NS.sum().backward()
    assert head.grad is None
    assert states[0].grad.any()


def test_neither_pass_ever_holds_tokens_times_vocabulary():
    """The largest tensor of a forward and backward pass is the head, not the table of logits."""
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            for part in result if isinstance(result, tuple | list) else (result,):
                if isinstance(part, torch.Tensor):
                    largest = max(largest, part.numel())
            return result

    states, head, targets, _ = draw(rows=500, loops=2, width=3, vocabulary=2000)
    with Watch():
        scores = score(states, head, targets, tile_elements=5000)
        (scores.log_probs_NS.sum() + scores.terminal_entropy_N.sum()).backward()
    assert largest <= max(5000, head.numel())
    assert largest * 100 < 2 * 500 * 2000


@pytest.mark.parametrize("target", [-100, -1, 23])
def test_a_target_outside_the_vocabulary_has_no_probability(target):
    """Never the log-probability of a logit of zero; the other rows are as they were."""
    states, head, targets, _ = draw()
    right = score(states, head, targets, tile_elements=40).log_probs_NS
    targets[3] = target
    found = score(states, head, targets, tile_elements=40).log_probs_NS
    assert found[3].isnan().all()
    others = [0, 1, 2, 4, 5, 6]
    assert torch.equal(found[others], right[others])

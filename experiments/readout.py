"""From readout states to what the objective reads: log-probabilities of the response tokens, and entropy, in nats.

The vocabulary is streamed in tiles: neither pass ever holds [tokens, vocabulary]. The forward pass keeps one
log-sum-exp a row; the backward pass computes each tile's logits again. Gradients are of first order only.

With p = softmax(x), x the logits, y the target and H the entropy:

    d logp / dx = onehot(y) - p,    dH / dx = -p * (log p + H)

Operands stay in the model's dtype; products accumulate in fp32 (fp64 for fp64), as do reductions and both gradients.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experiments.layers import wide

TILE_ELEMENTS_MAX = 2**22
"""The most logits that exist at once."""
ROWS_MAX = 4096
LOWEST = -1e30
"""Below every logit, and finite, so that its multiples by 0 are 0."""


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Differentiable results for N response tokens: log-probabilities [N, S] and last-loop entropy [N], in nats."""

    log_probs_NS: Tensor
    terminal_entropy_N: Tensor


def score(
    states: Sequence[Tensor], head_VC: Tensor, targets_N: Tensor, *, tile_elements: int = TILE_ELEMENTS_MAX
) -> Scores:
    """Score each target from the states [N, C] of every supervised loop, ascending; the last is the terminal loop.

    A target outside the vocabulary has no probability: its log-probability is NaN. Schedules refuse it beforehand, by
    name; to raise here would make the host wait for the device once a wave.
    """
    stacked_MC = torch.cat(tuple(states)) if len(states) > 1 else states[0]
    targets_M = targets_N.repeat(len(states)) if len(states) > 1 else targets_N
    first_terminal = len(targets_M) - len(targets_N)
    log_probs_M, entropy_N = _Streamed.apply(stacked_MC, head_VC, targets_M, first_terminal, tile_elements)  # type: ignore[no-untyped-call]
    return Scores(log_probs_M.view(len(states), -1).transpose(0, 1), entropy_N)


class _Streamed(torch.autograd.Function):
    """Log-probabilities of all rows, and the entropy of the rows from `first_terminal` on."""

    @staticmethod
    def forward(
        ctx: Any, states_MC: Tensor, head_VC: Tensor, targets_M: Tensor, first_terminal: int, tile_elements: int
    ) -> tuple[Tensor, Tensor]:
        chunks = []
        for rows in _row_chunks(states_MC.shape[0]):
            terminal = max(first_terminal - rows.start, 0)
            chunks.append(_forward_rows(states_MC[rows], head_VC, targets_M[rows], terminal, tile_elements))
        log_prob_M, lse_M, entropy_N = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        ctx.save_for_backward(states_MC, head_VC, targets_M, lse_M, entropy_N)
        ctx.first_terminal, ctx.tile_elements = first_terminal, tile_elements
        return log_prob_M, entropy_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, by_log_prob_M: Tensor, by_entropy_N: Tensor) -> tuple[Tensor | None, ...]:
        states_MC, head_VC, targets_M, lse_M, entropy_N = ctx.saved_tensors
        dtype = wide(states_MC.dtype)
        by_states_MC = torch.empty_like(states_MC, dtype=dtype)
        by_head_VC = torch.zeros_like(head_VC, dtype=dtype) if ctx.needs_input_grad[1] else None
        for rows in _row_chunks(states_MC.shape[0]):
            terminal = max(ctx.first_terminal - rows.start, 0)
            ended = slice(max(rows.start - ctx.first_terminal, 0), max(rows.stop - ctx.first_terminal, 0))
            by_states_MC[rows] = _backward_rows(
                (states_MC[rows], head_VC, targets_M[rows], lse_M[rows], entropy_N[ended]),
                (by_log_prob_M[rows], by_entropy_N[ended]),
                by_head_VC,
                terminal,
                ctx.tile_elements,
            )
        by_head = None if by_head_VC is None else by_head_VC.to(head_VC.dtype)
        return by_states_MC.to(states_MC.dtype), by_head, None, None, None


def _forward_rows(
    states_MC: Tensor, head_VC: Tensor, targets_M: Tensor, terminal: int, tile_elements: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities [M], log-sum-exps [M] and the entropy of the rows from `terminal` on.

    Sums run relative to the largest logit so far: s of exp(x - m), and a of exp(x - m) * (x - m) for the entropy,
    H = log s - a / s. A new maximum m' turns a into (a + s * (m - m')) * exp(m - m') and s into s * exp(m - m').
    """
    rows, dtype = states_MC.shape[0], wide(states_MC.dtype)
    hit, total, moment, top = torch.zeros((4, rows), dtype=dtype, device=states_MC.device)
    hit = hit.masked_fill((targets_M < 0) | (targets_M >= head_VC.shape[0]), torch.nan)
    top = top + LOWEST
    moment = moment[terminal:]
    for tile in _tiles(head_VC.shape[0], rows, tile_elements):
        logits = _product(states_MC, head_VC[tile].mT)
        hit = hit + _picked(logits, targets_M, tile)
        peak = torch.maximum(top, logits.amax(dim=1))
        drop, top = top - peak, peak
        logits -= peak.unsqueeze(1)
        grown = logits.exp()
        shrink = drop.exp()
        moment = (moment + total[terminal:] * drop[terminal:]) * shrink[terminal:]
        total = total * shrink + grown.sum(dim=1)
        moment = moment + grown[terminal:].mul_(logits[terminal:]).sum(dim=1)
    log_total = total.log()
    lse = top + log_total
    return hit - lse, lse, log_total[terminal:] - moment / total[terminal:]


def _backward_rows(
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    grads: tuple[Tensor, Tensor],
    by_head_VC: Tensor | None,
    terminal: int,
    tile_elements: int,
) -> Tensor:
    """Return the gradient of the states [M, C], at least fp32, and add the head's to `by_head_VC`."""
    states_MC, head_VC, targets_M, lse_M, entropy_N = saved
    by_log_prob_M, by_entropy_N = grads
    by_states = torch.zeros_like(states_MC, dtype=wide(states_MC.dtype))
    for tile in _tiles(head_VC.shape[0], states_MC.shape[0], tile_elements):
        log_p = _product(states_MC, head_VC[tile].mT)
        log_p -= lse_M.unsqueeze(1)
        slope = -by_log_prob_M.unsqueeze(1).expand_as(log_p).clone()
        slope[terminal:] -= by_entropy_N.unsqueeze(1) * (log_p[terminal:] + entropy_N.unsqueeze(1))
        slope *= log_p.exp_()
        _add_picked(slope, targets_M, tile, by_log_prob_M)
        slope = slope.to(states_MC.dtype)
        by_states += _product(slope, head_VC[tile])
        if by_head_VC is not None:
            by_head_VC[tile] += _product(slope.mT, states_MC)
    return by_states


def _picked(logits: Tensor, targets_M: Tensor, tile: slice) -> Tensor:
    """Return each row's target logit where the target is in the tile, else 0."""
    inside = (targets_M >= tile.start) & (targets_M < tile.stop)
    columns = (targets_M - tile.start).clamp(0, logits.shape[1] - 1)
    found: Tensor = logits.gather(1, columns.unsqueeze(1)).squeeze(1) * inside
    return found


def _add_picked(slope: Tensor, targets_M: Tensor, tile: slice, values_M: Tensor) -> None:
    """Add each row's value at its target where the target is in the tile."""
    inside = (targets_M >= tile.start) & (targets_M < tile.stop)
    columns = (targets_M - tile.start).clamp(0, slope.shape[1] - 1)
    slope.scatter_add_(1, columns.unsqueeze(1), (values_M * inside).unsqueeze(1))


def _row_chunks(rows: int) -> Iterator[slice]:
    for start in range(0, rows, ROWS_MAX):
        yield slice(start, min(start + ROWS_MAX, rows))


def _tiles(vocabulary: int, rows: int, tile_elements: int) -> Iterator[slice]:
    """Yield runs of the vocabulary so that no tile has more than `tile_elements` logits (but at least one column)."""
    width = max(tile_elements // rows, 1)
    for start in range(0, vocabulary, width):
        yield slice(start, min(start + width, vocabulary))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b accumulated in, and returned in, at least fp32."""
    dtype = wide(a.dtype)
    if a.dtype == dtype:
        return a @ b
    if a.is_cuda:
        out: Tensor = torch.mm(a, b, out_dtype=dtype)
        return out
    product: Tensor = a.to(dtype) @ b.to(dtype)
    return product

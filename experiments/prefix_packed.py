"""`prefix-packed`: one prompt pass, then the suffixes of a microbatch in one packed pass against its boundary.

`plan` says what a group can share; a group that can share nothing, or whose latents differ at the prompt, is handed
to whole replay or to the prelude's own schedule.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from experiments import full_packed, prelude_packed
from experiments.attention import prefixed
from experiments.batch import Group, microbatches
from experiments.contract import PLAIN, Options
from experiments.family import LoopedModel
from experiments.objective import Loss
from experiments.plan import Sharing, plan
from experiments.prefix import SharedPrefix, Wave
from experiments.suffixes import Suffixes


def accumulate(
    model: LoopedModel,
    group: Group,
    weights: Sequence[Tensor],
    objective: Loss,
    *,
    microbatch: int,
    options: Options = PLAIN,
) -> Tensor:
    """Add the group's gradient to the parameters' `.grad` and return its detached loss, a scalar.

    `weights` is the group's part of the logical batch's token weights; a wave has at most `microbatch` responses.
    """
    sharing = plan(model, group).sharing
    if sharing is Sharing.NOTHING:
        return full_packed.accumulate(model, group, weights, objective, microbatch=microbatch, options=options)
    if sharing is Sharing.PRELUDE:
        return prelude_packed.accumulate(model, group, weights, objective, microbatch=microbatch, options=options)
    return share(model, group, weights, objective, microbatch=microbatch, options=options)


def share(
    model: LoopedModel,
    group: Group,
    weights: Sequence[Tensor],
    objective: Loss,
    *,
    microbatch: int,
    options: Options = PLAIN,
) -> Tensor:
    """Do what `accumulate` does by sharing the complete prompt, whether or not that pays."""
    parts = microbatches(len(group.responses), microbatch)
    shared = SharedPrefix(model, group, objective.supervised_loops(model.loops), options)
    total = torch.zeros((), dtype=torch.float64, device=group.prompt_P.device)
    for part in parts:
        total += open_wave(shared, part, weights, objective).backward()
    shared.finish()
    return total


def open_wave(shared: SharedPrefix, indices: Sequence[int], weights: Sequence[Tensor], objective: Loss) -> Wave:
    """Run the forward pass of phase B for some responses of the group.

    `weights` holds the whole group's slices. Empty responses count as covered and add nothing.
    """
    covered = [(shared.claim(index), weights[index]) for index in indices]
    shared.contract.check()
    filled = [pair for pair in covered if len(pair[0])]
    if not filled:
        return Wave(shared.contract, None)
    responses, slices = zip(*filled, strict=True)
    suffixes, model, boundary = Suffixes(len(shared.group.prompt_P), responses), shared.model, shared.boundary
    later = None
    if suffixes.lengths:
        later = model.readout_states(
            suffixes.tokens(),
            suffixes.positions(),
            prefixed(boundary.keys, boundary.values, suffixes.lengths),
            shared.loops,
            suffixes.latents(model),
            rematerialise=shared.options.rematerialise,
        )
    scores = suffixes.score(model, boundary.first, later)
    return Wave(shared.contract, objective.loss(scores, responses, slices, model.loops))

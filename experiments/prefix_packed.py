"""`prefix-packed`: one prompt pass, then the suffixes of a microbatch in one packed pass against its boundary.

`plan` says what a group can share; a group that can share nothing, or whose latents differ at the prompt, is handed
to whole replay or to the prelude's own schedule.
"""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from experiments import full_packed, prelude_packed, waves
from experiments.attention import prefixed
from experiments.batch import Group, Response
from experiments.contract import PLAIN, Options
from experiments.family import LoopedModel
from experiments.objective import Loss
from experiments.plan import Sharing, plan
from experiments.prefix import SharedPrefix
from experiments.readout import Scores
from experiments.suffixes import Suffixes
from experiments.waves import Wave


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
    shared = SharedPrefix(model, group, objective.supervised_loops(model.loops), options)
    total = waves.run(shared.contract, weights, objective, microbatch, partial(score_suffixes, shared))
    shared.finish()
    return total


def open_wave(shared: SharedPrefix, indices: Sequence[int], weights: Sequence[Tensor], objective: Loss) -> Wave:
    """Run the forward pass of phase B for some responses of the group; see `waves.open_wave`."""
    return waves.open_wave(shared.contract, indices, weights, objective, partial(score_suffixes, shared))


def score_suffixes(shared: SharedPrefix, responses: Sequence[Response]) -> Scores:
    """Return the scores of all tokens of some non-empty responses, in order, from one packed pass of their suffixes."""
    model, boundary = shared.model, shared.boundary
    suffixes, later = Suffixes(len(shared.group.prompt_P), responses), None
    if suffixes.lengths:
        later = model.readout_states(
            suffixes.tokens(),
            suffixes.positions(),
            prefixed(boundary.keys, boundary.values, suffixes.lengths),
            shared.loops,
            suffixes.latents(model),
            rematerialise=shared.options.rematerialise,
        )
    return suffixes.score(model, boundary.first, later)

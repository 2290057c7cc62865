"""What a group of responses can share, decided before anything runs and said in words.

A complete prompt pass is shared where every non-empty response starts from the same latent at the prompt, and there
are at least two of them. Where latents differ, only a deterministic prelude is common: it is shared where that saves
at least `PRELUDE_SAVING_MIN` of the layer work, since it costs a boundary and a wave of its own.
"""

from dataclasses import dataclass
from enum import StrEnum

from experiments.batch import Group
from experiments.contract import LatentIdentityError, shared_identity
from experiments.family import LoopedModel
from experiments.huginn import Huginn

PRELUDE_SAVING_MIN = 0.01


class Sharing(StrEnum):
    """How much of the prompt's work is done once."""

    COMPLETE = "complete-prefix"
    PRELUDE = "prelude-only"
    NOTHING = "whole-replay"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is shared, and why."""

    sharing: Sharing
    reason: str


def plan(model: LoopedModel, group: Group) -> Plan:
    """Return what `prefix-packed` will share of this group."""
    filled = [length for length in group.lengths if length]
    if len(filled) < 2:
        return Plan(Sharing.NOTHING, f"{len(filled)} non-empty responses share nothing; replay has one pass, not two")
    try:
        identity = shared_identity(group)
    except LatentIdentityError as difference:
        if not isinstance(model, Huginn):
            raise
        return _distinct(model, len(group.prompt_P), filled, str(difference))
    latent = f" from latent {identity}" if identity else ""
    return Plan(Sharing.COMPLETE, f"{len(filled)} responses share one prompt pass{latent}")


def prelude_saving(model: Huginn, prompt: int, lengths: list[int]) -> float:
    """Return the share of all layer calls on tokens that a shared prelude saves over whole replay.

    Every call costs about the same per token, so calls on tokens are counted; the readout is left out.
    """
    config = model.config
    calls = config.prelude + config.loops * config.core + config.coda
    tokens = sum(prompt + length - 1 for length in lengths)
    return (len(lengths) - 1) * prompt * config.prelude / (tokens * calls)


def _distinct(model: Huginn, prompt: int, lengths: list[int], difference: str) -> Plan:
    saving = prelude_saving(model, prompt, lengths)
    found = f"{difference}; the prelude is {saving:.1%} of the work"
    if saving < PRELUDE_SAVING_MIN:
        return Plan(Sharing.NOTHING, f"{found}, less than sharing it costs")
    return Plan(Sharing.PRELUDE, found)

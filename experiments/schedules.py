"""The schedules by name: one interface, the same objective and inputs, the same gradient."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from experiments import full_packed, full_serial, prefix_packed, prefix_serial, tree_packed
from experiments.batch import Group
from experiments.contract import PLAIN, Options
from experiments.family import LoopedModel
from experiments.objective import Loss


class Schedule(Protocol):
    """Adds a group's full gradient to the parameters' `.grad`."""

    def __call__(
        self,
        model: LoopedModel,
        group: Group,
        weights: Sequence[Tensor],
        objective: Loss,
        *,
        microbatch: int,
        options: Options = PLAIN,
    ) -> Tensor:
        """Return the detached loss, a scalar; `weights` has one slice of the logical batch's weights a response."""
        ...


SCHEDULES: Mapping[str, Schedule] = {
    "full-serial": full_serial.accumulate,
    "full-packed": full_packed.accumulate,
    "prefix-serial": prefix_serial.accumulate,
    "prefix-packed": prefix_packed.accumulate,
    "tree-packed": tree_packed.accumulate,
}

"""The schedules by name: one interface, the same objective and inputs, the same gradient."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from experiments import full_packed, full_serial, prefix_serial
from experiments.batch import Group
from experiments.family import LoopedModel
from experiments.objective import Objective


class Schedule(Protocol):
    """Adds a group's full gradient to the parameters' `.grad`."""

    def __call__(
        self,
        model: LoopedModel,
        group: Group,
        weights: Sequence[Tensor],
        objective: Objective,
        *,
        microbatch: int,
    ) -> Tensor:
        """Return the detached loss, a scalar; `weights` has one slice of the logical batch's weights a response."""
        ...


SCHEDULES: Mapping[str, Schedule] = {
    "full-serial": full_serial.accumulate,
    "full-packed": full_packed.accumulate,
    "prefix-serial": prefix_serial.accumulate,
}

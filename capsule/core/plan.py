"""The plan: every cell that a protocol promises, in the order in which it will run.

Order is drawn here, at freeze, by a shuffle that is specified in full, so that nobody can draw again: SHA-256 in
counter mode over the frozen seed and a label, rejection sampling, Fisher-Yates from the end.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from operator import eq
from typing import Any, ClassVar, TypeVar, overload

from pydantic import ConfigDict

from capsule.core.errors import ProtocolError
from capsule.core.protocol import Hypothesis, Protocol, Workload
from capsule.core.schema import STRICT, DecimalScalar, Model, Natural, Parameter, Parameters, Scalar

CELLS_MAX = 200_000
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Cell:
    """One planned observation: which arm, on what, in which process and at which place in the order.

    `process` counts the launches of the plan from zero; cells with the same `process` share one process. `excluded`
    carries the frozen reason of a cell that is not run.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    cell: str
    arm: str
    workload: str
    seed: Natural
    start: Natural
    block: Natural
    position: Natural
    process: Natural
    excluded: str | None

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of this cell."""
        return {name: getattr(self, name) for name in self.__slots__}


class PlannedWorkload(Model):
    """A workload crossed with one level of every factor."""

    name: str
    parameters: Parameters


class Plan(Sequence[Cell]):
    """Planned cells in running order; each is made anew when it is asked for, as a protocol of 2 KB plans 200,000."""

    def __init__(self, drawn: _Drawn, numbers: Sequence[int]) -> None:
        self._drawn = drawn
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, at: int) -> Cell: ...
    @overload
    def __getitem__(self, at: slice) -> Plan: ...
    def __getitem__(self, at: int | slice) -> Cell | Plan:
        return Plan(self._drawn, self._numbers[at]) if isinstance(at, slice) else self._drawn.cell(self._numbers[at])

    def __iter__(self) -> Iterator[Cell]:
        return map(self._drawn.cell, self._numbers)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    @property
    def ordinals(self) -> Iterator[int]:
        """The process of each cell."""
        return map(self._drawn.process, self._numbers)

    @property
    def names(self) -> Names:
        """The names of the cells."""
        return Names(self._numbers)

    def running(self) -> Plan:
        """Return the cells that are not excluded."""
        if not self._drawn.excludes:
            return self
        kept = (number for number in self._numbers if self._drawn.cell(number).excluded is None)
        return Plan(self._drawn, array("I", kept))


class Names(Collection[str]):
    """The names of planned cells, none of which is kept."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[str]:
        return map(_name, self._numbers)

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str) or len(name) != len(_name(0)) or not name[1:].isdecimal():
            return False
        number = int(name[1:])
        at = bisect_left(self._numbers, number)
        return at < len(self._numbers) and self._numbers[at] == number and name == _name(number)


def running(cells: Sequence[Cell]) -> Sequence[Cell]:
    """Return the cells that are not excluded."""
    return cells.running() if isinstance(cells, Plan) else tuple(cell for cell in cells if cell.excluded is None)


def cell_named(cells: Sequence[Cell], name: str) -> Cell:
    """Return the cell of that name from a whole plan, in which it stands at the place that its name tells."""
    return cells[int(name[1:])]


def _name(number: int) -> str:
    return f"c{number:06d}"


class _Drawn:
    """A protocol's plan as it was drawn, a few bytes for each cell."""

    def __init__(self, protocol: Protocol) -> None:
        design = protocol.design
        self._seeds, self._starts, self._blocks = design.seeds, design.starts, design.blocks
        self._arms = [arm.name for arm in protocol.arms]
        self._workloads = workload_names(protocol)
        reasons = Exclusions(protocol)
        self._reasons: list[str | None] = [None, *dict.fromkeys(item.reason for item in protocol.exclusions)]
        known = {reason: number for number, reason in enumerate(self._reasons)}
        self._excluded = array("I", (known[reasons.of(arm, name)] for name in self._workloads for arm in self._arms))
        self.excludes, self.excludes_all = any(self._excluded), all(self._excluded)
        self._workload_at, self._arm_at = array("I"), array("I")
        for seed, start in product(design.seeds, range(design.starts)):
            order = _ordered(range(len(self._workloads)), protocol, f"workloads/{seed}/{start}")
            self._workload_at.extend(order)
            for workload, block in product(order, range(design.blocks)):
                label = f"arms/{seed}/{start}/{self._workloads[workload]}/{block}"
                self._arm_at.extend(_block(range(len(self._arms)), protocol, label))
        self._per_block = _per_block(protocol)
        per_workload = self._per_block * design.blocks
        sizes = {"start": per_workload * len(self._workloads), "workload": per_workload, "cell": 1}
        self._per_process = sizes[design.isolation]

    def process(self, number: int) -> int:
        """Return the process of a cell by its place in the whole plan."""
        return number // self._per_process

    def cell(self, number: int) -> Cell:
        """Return a cell by its place in the whole plan."""
        arm = self._arm_at[number]
        rest, position = divmod(number, self._per_block)
        place, block = divmod(rest, self._blocks)
        workload = self._workload_at[place]
        seed, start = divmod(place // len(self._workloads), self._starts)
        return Cell(
            _name(number),
            self._arms[arm],
            self._workloads[workload],
            self._seeds[seed],
            start,
            block,
            position,
            self.process(number),
            self._reasons[self._excluded[workload * len(self._arms) + arm]],
        )


def enumerate_cells(protocol: Protocol) -> Plan:
    """Return every planned cell in running order; seeds and names are distinct, as `complaints` checks.

    Raises:
        ProtocolError: no cell would run, or there are more than 200,000.
    """
    total = count_cells(protocol)
    if total > CELLS_MAX:
        raise ProtocolError(f"expected at most {CELLS_MAX} planned cells, found {total}")
    drawn = _Drawn(protocol)
    if drawn.excludes_all:
        raise ProtocolError(
            f"expected at least one cell to run, found all {total} planned cells excluded",
            hint="an experiment that observes nothing cannot decide anything; narrow [[exclusions]]",
        )
    return Plan(drawn, range(total))


def count_cells(protocol: Protocol) -> int:
    """Return how many cells a protocol plans, without enumerating them."""
    design = protocol.design
    return len(design.seeds) * design.starts * count_workloads(protocol) * design.blocks * _per_block(protocol)


def count_workloads(protocol: Protocol) -> int:
    """Return how many crossed workloads a protocol has, without crossing them."""
    return len(protocol.workloads) * math.prod(len(factor.levels) for factor in protocol.factors)


def _per_block(protocol: Protocol) -> int:
    return len(protocol.arms) * (2 if protocol.design.order == "abba" else 1)


def base(workload: str) -> str:
    """Return the name of the workload that was crossed with factors to give `workload`."""
    return workload.split("[")[0]


def selected(protocol: Protocol, hypothesis: Hypothesis) -> list[str]:
    """Return the planned workloads that decide a hypothesis: all, or those that it names, crossed or by their base."""
    wanted = set(hypothesis.workloads)
    names = workload_names(protocol)
    return [name for name in names if name in wanted or base(name) in wanted] if wanted else names


def crossed(protocol: Protocol) -> list[PlannedWorkload]:
    """Return the workloads crossed with the factors, named `base[factor=level,…]`, parameters merged."""
    names = [factor.name for factor in protocol.factors]
    return [
        PlannedWorkload(name=name, parameters={**workload.parameters, **dict(zip(names, levels, strict=True))})
        for name, workload, levels in _crossings(protocol)
    ]


def workload_names(protocol: Protocol) -> list[str]:
    """Return the names of the workloads crossed with the factors."""
    return [name for name, _, _ in _crossings(protocol)]


def _crossings(protocol: Protocol) -> Iterator[tuple[str, Workload, tuple[Scalar, ...]]]:
    """Yield every crossed workload: its name, the workload, and the level of each factor."""
    written = [[(f"{item.name}={level_text(level)}", level) for level in item.levels] for item in protocol.factors]
    for workload in protocol.workloads:
        for choice in product(*written):
            suffix = ",".join(text for text, _ in choice)
            name = f"{workload.name}[{suffix}]" if suffix else workload.name
            yield name, workload, tuple(level for _, level in choice)


def level_text(level: Parameter) -> str:
    """Write a level as the names of crossed workloads have it."""
    return level.decimal if isinstance(level, DecimalScalar) else str(level)


def _block(arms: Sequence[T], protocol: Protocol, label: str) -> list[T]:
    order = _ordered(arms, protocol, label)
    return order + order[::-1] if protocol.design.order == "abba" else order


def _ordered(items: Sequence[T], protocol: Protocol, label: str) -> list[T]:
    if protocol.design.order == "listed":
        return list(items)
    return shuffle(items, protocol.design.order_seed, label)


class Exclusions:
    """Looks up why an arm is not run on a workload; of several exclusions the first counts."""

    def __init__(self, protocol: Protocol) -> None:
        self._first: dict[tuple[str | None, str | None], tuple[int, str]] = {}
        for index, exclusion in enumerate(protocol.exclusions):
            self._first.setdefault((exclusion.arm, exclusion.workload), (index, exclusion.reason))

    def of(self, arm: str, workload: str) -> str | None:
        """Return the frozen reason, or None where the arm is run."""
        if not self._first:
            return None
        keys = product((None, arm), (None, workload, base(workload)))
        found = [self._first[key] for key in keys if key in self._first]
        return min(found)[1] if found else None


def shuffle(items: Sequence[T], seed: int, label: str) -> list[T]:
    r"""Return `items` in the order drawn from `seed` and `label`.

    Fisher-Yates: for i from n-1 down to 1 swap i with a number below i+1, drawn from the 64-bit big-endian words of
    SHA-256("capsule.shuffle/0\n" seed "\n" label "\n" counter), words at or above the largest multiple of i+1
    skipped.
    """
    result = list(items)
    words = _words(seed, label)
    for i in range(len(result) - 1, 0, -1):
        ceiling = 2**64 - 2**64 % (i + 1)
        j = next(word for word in words if word < ceiling) % (i + 1)
        result[i], result[j] = result[j], result[i]
    return result


def _words(seed: int, label: str) -> Iterator[int]:
    counter = 0
    while True:
        block = hashlib.sha256(f"capsule.shuffle/0\n{seed}\n{label}\n{counter}".encode()).digest()
        for at in range(0, 32, 8):
            yield int.from_bytes(block[at : at + 8], "big")
        counter += 1

"""The plan: every cell that a protocol promises, in the order in which it will run.

Order is drawn here, at freeze, by a shuffle that is specified in full, so that nobody can draw again: SHA-256 in
counter mode over the frozen seed and a label, rejection sampling, Fisher-Yates from the end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import product
from typing import TypeVar

from capsule.core.errors import ProtocolError
from capsule.core.protocol import Exclusion, Protocol
from capsule.core.schema import DecimalScalar, Model, Parameter, Parameters

CELLS_MAX = 1_000_000
T = TypeVar("T")


class Cell(Model):
    """One planned observation: which arm, on what, in which process and at which place in the order.

    `process` counts the launches of the plan from zero; cells with the same `process` share one process. `excluded`
    carries the frozen reason of a cell that is not run.
    """

    cell: str
    arm: str
    workload: str
    seed: int
    start: int
    block: int
    position: int
    process: int
    excluded: str | None


class PlannedWorkload(Model):
    """A workload crossed with one level of every factor."""

    name: str
    parameters: Parameters


def enumerate_cells(protocol: Protocol) -> list[Cell]:
    """Return every planned cell in running order.

    Raises:
        ProtocolError: no cell would run, or there are more than a million.
    """
    workloads = [workload.name for workload in crossed(protocol)]
    arms = [arm.name for arm in protocol.arms]
    design = protocol.design
    per_block = len(arms) * (2 if design.order == "abba" else 1)
    total = len(design.seeds) * design.starts * len(workloads) * design.blocks * per_block
    if total > CELLS_MAX:
        raise ProtocolError(f"expected at most {CELLS_MAX} planned cells, found {total}")
    cells: list[Cell] = []
    process = -1
    last_process: tuple[object, ...] | None = None
    for seed, start in product(design.seeds, range(design.starts)):
        for workload in _ordered(workloads, protocol, f"workloads/{seed}/{start}"):
            for block in range(design.blocks):
                label = f"arms/{seed}/{start}/{workload}/{block}"
                for position, arm in enumerate(_block(arms, protocol, label)):
                    key: tuple[object, ...] = (seed, start)
                    if design.isolation == "workload":
                        key = (seed, start, workload)
                    elif design.isolation == "cell":
                        key = (len(cells),)
                    if key != last_process:
                        process, last_process = process + 1, key
                    excluded = _excluded(protocol.exclusions, arm, workload)
                    name = f"c{len(cells):06d}"
                    cells.append(
                        Cell(
                            cell=name, arm=arm, workload=workload, seed=seed, start=start, block=block,
                            position=position, process=process, excluded=excluded,
                        )
                    )  # fmt: skip
    if all(cell.excluded is not None for cell in cells):
        raise ProtocolError(
            f"expected at least one cell to run, found all {len(cells)} planned cells excluded",
            hint="an experiment that observes nothing cannot decide anything; narrow [[exclusions]]",
        )
    return cells


def crossed(protocol: Protocol) -> list[PlannedWorkload]:
    """Return the workloads crossed with the factors, named `base[factor=level,…]`, parameters merged."""
    result = []
    for workload in protocol.workloads:
        for levels in product(*(factor.levels for factor in protocol.factors)):
            names = [factor.name for factor in protocol.factors]
            suffix = ",".join(f"{name}={_level(level)}" for name, level in zip(names, levels, strict=True))
            name = f"{workload.name}[{suffix}]" if suffix else workload.name
            merged = {**workload.parameters, **dict(zip(names, levels, strict=True))}
            result.append(PlannedWorkload(name=name, parameters=merged))
    return result


def _level(level: Parameter) -> str:
    return level.decimal if isinstance(level, DecimalScalar) else str(level)


def _block(arms: Sequence[str], protocol: Protocol, label: str) -> list[str]:
    order = _ordered(arms, protocol, label)
    return order + order[::-1] if protocol.design.order == "abba" else order


def _ordered(items: Sequence[T], protocol: Protocol, label: str) -> list[T]:
    if protocol.design.order == "listed":
        return list(items)
    return shuffle(items, protocol.design.order_seed, label)


def _excluded(exclusions: Sequence[Exclusion], arm: str, workload: str) -> str | None:
    for exclusion in exclusions:
        if exclusion.arm in (None, arm) and exclusion.workload in (None, workload, workload.split("[")[0]):
            return exclusion.reason
    return None


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

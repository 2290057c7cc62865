"""The plan: every cell that a protocol promises, in the order in which it will run.

Order is drawn here, at freeze, by a shuffle that is specified in full, so that nobody can draw again: SHA-256 in
counter mode over the frozen seed and a label, rejection sampling, Fisher-Yates from the end.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from typing import TypeVar

from capsule.core.errors import ProtocolError
from capsule.core.protocol import Hypothesis, Protocol
from capsule.core.protocol_checks import Complaint, check
from capsule.core.schema import DecimalScalar, Model, Parameter, Parameters

CELLS_MAX = 200_000
COMPARISONS_MAX = 1_000_000
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
        ProtocolError: no cell would run, or there are more than 200,000.
    """
    total = count_cells(protocol)
    if total > CELLS_MAX:
        raise ProtocolError(f"expected at most {CELLS_MAX} planned cells, found {total}")
    workloads = [workload.name for workload in crossed(protocol)]
    arms = [arm.name for arm in protocol.arms]
    design = protocol.design
    reasons = _Exclusions(protocol)
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
                    excluded = reasons.of(arm, workload)
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


def count_cells(protocol: Protocol) -> int:
    """Return how many cells a protocol plans, without enumerating them."""
    design = protocol.design
    workloads = len(protocol.workloads) * math.prod(len(factor.levels) for factor in protocol.factors)
    per_block = len(protocol.arms) * (2 if design.order == "abba" else 1)
    return len(design.seeds) * design.starts * workloads * design.blocks * per_block


def complaints(protocol: Protocol) -> Iterator[Complaint]:
    """Yield every complaint about what the protocol means and plans; one without complaints can be frozen."""
    yield from check(protocol)
    total = count_cells(protocol)
    if total > CELLS_MAX:
        yield ("design",), f"expected at most {CELLS_MAX} planned cells, found {total}"
        return
    yield from _check_factors(protocol)
    workloads = [workload.name for workload in crossed(protocol)]
    arms = {arm.name for arm in protocol.arms}
    known = {*workloads, *(base(name) for name in workloads)}
    for index, exclusion in enumerate(protocol.exclusions):
        if exclusion.arm is not None and exclusion.arm not in arms:
            yield ("exclusions", index, "arm"), f"expected an arm, found {exclusion.arm!r}"
        if exclusion.workload is not None and exclusion.workload not in known:
            yield ("exclusions", index, "workload"), f"expected a workload, found {exclusion.workload!r}"
    reasons = _Exclusions(protocol)
    if all(reasons.of(arm, workload) is not None for workload in workloads for arm in arms):
        yield ("exclusions",), f"expected at least one cell to run, found all {total} planned cells excluded"
        return
    comparisons = len(protocol.hypotheses) * len(workloads)
    if comparisons > COMPARISONS_MAX:
        yield ("hypotheses",), f"expected at most {COMPARISONS_MAX} decisions over all workloads, found {comparisons}"
        return
    for index, hypothesis in enumerate(protocol.hypotheses):
        for name in hypothesis.workloads:
            if name not in known:
                yield ("hypotheses", index, "workloads"), f"expected a workload, found {name!r}"
        yield from _check_decidable(protocol, hypothesis, reasons, ("hypotheses", index, "workloads"))


def _check_factors(protocol: Protocol) -> Iterator[Complaint]:
    for index, factor in enumerate(protocol.factors):
        for workload in protocol.workloads:
            if factor.name in workload.parameters:
                words = f"expected a parameter that no workload sets, found {factor.name!r} of {workload.name}"
                yield ("factors", index, "name"), words
        twice = [level for level, count in Counter(map(_level, factor.levels)).items() if count > 1]
        if twice:
            yield ("factors", index, "levels"), f"expected levels written differently, found {twice[0]!r} twice"
    names = Counter(workload.name for workload in crossed(protocol))
    name, count = names.most_common(1)[0]
    if count > 1:
        yield ("factors",), f"expected a new name for every crossed workload, found {name!r} twice"


def _check_decidable(
    protocol: Protocol, hypothesis: Hypothesis, reasons: _Exclusions, at: tuple[str | int, ...]
) -> Iterator[Complaint]:
    """A hypothesis about cells that are not run could never be decided."""
    estimates = {estimate.name: estimate for estimate in protocol.estimates}
    estimate = estimates.get(hypothesis.estimate or "")
    for workload in selected(protocol, hypothesis):
        out = [arm.name for arm in protocol.arms if reasons.of(arm.name, workload) is not None]
        if estimate is not None and {estimate.numerator, estimate.denominator} & {*out}:
            named = next(arm for arm in out if arm in (estimate.numerator, estimate.denominator))
            yield at, f"never decided on {workload}, where {named} is excluded: name the workloads that count"
        elif len(out) == len(protocol.arms):
            yield at, f"never decided on {workload}, where every arm is excluded: name the workloads that count"


def base(workload: str) -> str:
    """Return the name of the workload that was crossed with factors to give `workload`."""
    return workload.split("[")[0]


def selected(protocol: Protocol, hypothesis: Hypothesis) -> list[str]:
    """Return the planned workloads that decide a hypothesis: all, or those that it names, crossed or by their base."""
    names = [workload.name for workload in crossed(protocol)]
    wanted = set(hypothesis.workloads)
    return [name for name in names if not wanted or name in wanted or base(name) in wanted]


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


class _Exclusions:
    """Looks up why an arm is not run on a workload; of several exclusions the first counts."""

    def __init__(self, protocol: Protocol) -> None:
        self._first: dict[tuple[str | None, str | None], tuple[int, str]] = {}
        for index, exclusion in enumerate(protocol.exclusions):
            self._first.setdefault((exclusion.arm, exclusion.workload), (index, exclusion.reason))

    def of(self, arm: str, workload: str) -> str | None:
        """Return the frozen reason, or None where the arm is run."""
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

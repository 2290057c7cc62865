"""What final rows add up to, gone through once in the order of the plan, so that none of them is kept.

In that order the rows of one workload in one start follow each other, and starts follow in the order of the design.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import ClassVar

from pydantic import ConfigDict

from capsule.core.decision import passes
from capsule.core.estimate import start_value
from capsule.core.plan import workload_names
from capsule.core.progress import Row
from capsule.core.protocol import Estimate, Gate, Protocol
from capsule.core.record import number
from capsule.core.schema import STRICT, Natural

CELLS_NAMED_MAX = 20
_JUDGED = (True, False, None)


@dataclass(frozen=True, slots=True)
class StartValue:
    """The one number of a process start, or why there is none."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    seed: Natural
    start: Natural
    value: str | None
    reason: str | None


@dataclass(slots=True)
class GateCount:
    """How many final rows passed and failed a gate, how many had nothing to judge, and the first that failed."""

    passed: int = 0
    failed: int = 0
    missing: int = 0
    named: list[str] = field(default_factory=list)

    def add(self, judged: bool | None, cell: str) -> None:
        """Count a row by how it was judged."""
        if judged is None:
            self.missing += 1
        elif judged:
            self.passed += 1
        else:
            self.failed += 1
            if len(self.named) < CELLS_NAMED_MAX:
                self.named.append(cell)


class Tally:
    """Counts of statuses, reasons and gates; the numbers of every arm; and the starts of every estimate.

    Workloads are known by their place among `workloads`. `gates` counts over all rows; for the gates that a hypothesis
    names `gates_on` has three counts for each workload, of what passed, failed and had nothing to judge. `values` are
    the numbers of a workload's arm for one observation.
    """

    def __init__(self, protocol: Protocol) -> None:
        self.workloads = workload_names(protocol)
        self.statuses = {"ok": 0, "failed": 0, "not_run": 0}
        self.reasons: dict[str, int] = {}
        self.gates = {gate.name: GateCount() for gate in protocol.gates}
        deciding = {name for hypothesis in protocol.hypotheses for name in hypothesis.gates}
        self.gates_on = {name: array("I", bytes(12 * len(self.workloads))) for name in deciding & self.gates.keys()}
        self.values: dict[tuple[int, str, str], array[float]] = {}
        self.starts: list[list[list[StartValue]]] = [[[] for _ in self.workloads] for _ in protocol.estimates]
        self._protocol = protocol
        self._numeric = [column.name for column in protocol.observations if column.type != "text"]

    def add_up(self, rows: Iterable[Row]) -> None:
        """Go through the rows."""
        places = {name: place for place, name in enumerate(self.workloads)}
        for (seed, start, workload), group in groupby(rows, key=_start_of):
            place = places[workload]
            begun = [_Start(estimate) for estimate in self._protocol.estimates]
            for row in group:
                dropped = self._add(row, place)
                for own in begun:
                    own.add(row, dropped)
            for own, starts in zip(begun, self.starts, strict=True):
                starts[place].append(own.value(seed, start))

    def _add(self, row: Row, place: int) -> bool:
        """Count a row; return whether a gate excludes it from estimates."""
        self.statuses[row.status] += 1
        if row.status != "ok":
            key = f"{row.status}: {row.reason}"
            self.reasons[key] = self.reasons.get(key, 0) + 1
        else:
            self._add_values(row, place)
        if row.cell.excluded is not None:
            return False
        dropped = False
        for gate in self._protocol.gates:
            judged = judge(gate, row)
            self.gates[gate.name].add(judged, row.cell.cell)
            if gate.name in self.gates_on:
                self.gates_on[gate.name][3 * place + _JUDGED.index(judged)] += 1
            dropped |= judged is False and gate.on_failure == "exclude"
        return dropped

    def _add_values(self, row: Row, place: int) -> None:
        for name in self._numeric:
            value = row.values[name]
            if value is not None:
                self.values.setdefault((place, row.cell.arm, name), array("d")).append(float(number(value)))


class _Start:
    """One start of an estimate on one workload; a planned cell without a usable value leaves it without a number."""

    def __init__(self, estimate: Estimate) -> None:
        self._estimate = estimate
        self._numerator: list[float] = []
        self._denominator: list[float] = []
        self._reason: str | None = None

    def add(self, row: Row, dropped: bool) -> None:
        estimate, cell = self._estimate, row.cell
        if self._reason or cell.excluded is not None or cell.arm not in (estimate.numerator, estimate.denominator):
            return
        value = row.values.get(estimate.observation)
        if row.status != "ok" or value is None or dropped:
            why = "excluded by a gate" if dropped else (row.reason or "no value")
            self._reason = f"{cell.cell}: {why}"
            return
        side = self._denominator if cell.arm == estimate.denominator else self._numerator
        side.append(float(number(value)))

    def value(self, seed: int, start: int) -> StartValue:
        if self._reason:
            return StartValue(seed, start, None, self._reason)
        found = start_value(self._estimate.rule, self._numerator, self._denominator)
        if found is None:
            return StartValue(seed, start, None, "values for which the rule is not defined")
        return StartValue(seed, start, text(found), None)


def _start_of(row: Row) -> tuple[int, int, str]:
    return row.cell.seed, row.cell.start, row.cell.workload


def judge(gate: Gate, row: Row) -> bool | None:
    """Whether a row passes a gate; None where it has no value to judge."""
    if row.status != "ok":
        return None
    value = row.values.get(gate.observation)
    return None if value is None else passes(gate, number(value))


def text(value: float | int) -> str:
    """Write a number with the shortest digits that give it back."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else repr(float(value))

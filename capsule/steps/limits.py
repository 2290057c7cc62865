"""Gates as people read them: what is demanded, beside the values that were seen."""

from __future__ import annotations

import math

from capsule.core.protocol import Gate, Protocol
from capsule.core.results import Results

HEAD = ("gate", "demands", "values seen", "passed", "failed", "no value")


def gate_rows(protocol: Protocol, results: Results) -> list[tuple[str, ...]]:
    """Return a row for every gate, under `HEAD`; values are those of all final rows, with four significant digits."""
    gates = {gate.name: gate for gate in protocol.gates}
    return [
        (
            item.gate,
            demand(gates[item.gate]),
            _seen(gates[item.gate].observation, results),
            str(item.passed),
            str(item.failed),
            str(item.missing),
        )
        for item in results.gates
    ]


def demand(gate: Gate) -> str:
    """Say what a gate demands of its observation: `loss at most 0.5`, with the limit as its author wrote it."""
    return f"{gate.observation} {gate.rule.replace('_', ' ')}{f' {gate.limit}' if gate.limit is not None else ''}"


def _seen(observation: str, results: Results) -> str:
    ends = [
        float(value)
        for item in results.summaries
        if item.observation == observation
        for value in (item.minimum, item.maximum)
    ]
    if not ends:
        return "none"
    if any(map(math.isnan, ends)):
        return "not all are numbers"
    low, high = min(ends), max(ends)
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"

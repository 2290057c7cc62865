"""What a protocol may not plan: too much to verify, names that point nowhere, and what could never be decided."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from capsule.core.plan import (
    CELLS_MAX,
    Exclusions,
    base,
    count_cells,
    count_workloads,
    level_text,
    selected,
    workload_names,
)
from capsule.core.protocol import Estimate, Hypothesis, Protocol
from capsule.core.protocol_checks import Complaint, check

RESULTS_MAX = 200_000
"""Starts, estimates, decisions and summaries, of all workloads."""

OBSERVATIONS_MAX = 400
"""Columns of the table; each takes room in its footer for every row group, and in the memory of whoever reads it."""

VALUES_MAX = 10_000_000
"""Observations, gates and estimates, of all cells."""

TEXT_MAX = 1 << 25
"""Characters of the names of workloads in all cells, and of the reasons why cells are excluded."""


def complaints(protocol: Protocol) -> Iterator[Complaint]:
    """Yield every complaint about what the protocol means and plans; one without complaints can be frozen."""
    yield from check(protocol)
    total = count_cells(protocol)
    if total > CELLS_MAX:
        yield ("design",), f"expected at most {CELLS_MAX} planned cells, found {total}"
        return
    too_large = list(_check_size(protocol, total))
    if too_large:
        yield from too_large
        return
    yield from _check_factors(protocol)
    workloads = workload_names(protocol)
    arms = [arm.name for arm in protocol.arms]
    known_arms = {None, *arms}
    known = {*workloads, *(base(name) for name in workloads)}
    for index, exclusion in enumerate(protocol.exclusions):
        if exclusion.arm not in known_arms:
            yield ("exclusions", index, "arm"), f"expected an arm, found {exclusion.arm!r}"
        if exclusion.workload is not None and exclusion.workload not in known:
            yield ("exclusions", index, "workload"), f"expected a workload, found {exclusion.workload!r}"
    reasons = Exclusions(protocol)
    pairs = ((workload, arm, reasons.of(arm, workload)) for workload in workloads for arm in arms)
    excluded = [(workload, arm, reason) for workload, arm, reason in pairs if reason is not None]
    if len(excluded) == len(workloads) * len(arms):
        yield ("exclusions",), f"expected at least one cell to run, found all {total} planned cells excluded"
        return
    characters = sum(len(reason) for _, _, reason in excluded) * total // (len(workloads) * len(arms))
    if characters > TEXT_MAX:
        yield ("exclusions",), f"expected at most {TEXT_MAX} characters of reasons in all cells, found {characters}"
        return
    out: dict[str, list[str]] = {}
    for workload, arm, _ in excluded:
        out.setdefault(workload, []).append(arm)
    estimates = {estimate.name: estimate for estimate in protocol.estimates}
    for index, hypothesis in enumerate(protocol.hypotheses):
        for name in hypothesis.workloads:
            if name not in known:
                yield ("hypotheses", index, "workloads"), f"expected a workload, found {name!r}"
        estimate = estimates.get(hypothesis.estimate or "")
        for words in _undecidable(protocol, hypothesis, estimate, out) if out else ():
            yield ("hypotheses", index, "workloads"), words


def _check_size(protocol: Protocol, cells: int) -> Iterator[Complaint]:
    """A plan and its results are gone through whole by everyone who verifies them."""
    workloads = count_workloads(protocol)
    starts = len(protocol.design.seeds) * protocol.design.starts
    decisions = sum(max(1, len(hypothesis.gates)) for hypothesis in protocol.hypotheses)
    summaries = len(protocol.arms) * len(protocol.observations)
    results = workloads * (len(protocol.estimates) * (starts + 1) + decisions + summaries)
    if results > RESULTS_MAX:
        kinds = "starts, estimates, decisions and summaries of all workloads"
        yield ("design",), f"expected at most {RESULTS_MAX} {kinds}, found {results}"
    columns = len(protocol.observations)
    if columns > OBSERVATIONS_MAX:
        yield ("observations",), f"expected at most {OBSERVATIONS_MAX} observations, found {columns}"
    values = cells * (columns + len(protocol.gates) + len(protocol.estimates))
    if values > VALUES_MAX:
        kinds = "observations, gates and estimates of all cells"
        yield ("design",), f"expected at most {VALUES_MAX} {kinds}, found {values}"
    characters = _name_characters(protocol) * (cells // workloads)
    if characters > TEXT_MAX:
        words = f"expected at most {TEXT_MAX} characters of workloads' names in all cells, found {characters}"
        yield ("factors",), words


def _name_characters(protocol: Protocol) -> int:
    """Return how many characters the names of all crossed workloads have, without making them."""
    levels = math.prod(len(factor.levels) for factor in protocol.factors)
    suffixes = sum(
        (len(f"{factor.name}=,") * len(factor.levels) + sum(map(len, map(level_text, factor.levels))))
        * (levels // len(factor.levels))
        for factor in protocol.factors
    )
    suffixes += len("[]") * levels - levels if protocol.factors else 0
    return sum(len(workload.name) * levels + suffixes for workload in protocol.workloads)


def _check_factors(protocol: Protocol) -> Iterator[Complaint]:
    for index, factor in enumerate(protocol.factors):
        for workload in protocol.workloads:
            if factor.name in workload.parameters:
                words = f"expected a parameter that no workload sets, found {factor.name!r} of {workload.name}"
                yield ("factors", index, "name"), words
        twice = [level for level, count in Counter(map(level_text, factor.levels)).items() if count > 1]
        if twice:
            yield ("factors", index, "levels"), f"expected levels written differently, found {twice[0]!r} twice"
    names = Counter(workload_names(protocol))
    name, count = names.most_common(1)[0]
    if count > 1:
        yield ("factors",), f"expected a new name for every crossed workload, found {name!r} twice"


def _undecidable(
    protocol: Protocol, hypothesis: Hypothesis, estimate: Estimate | None, out: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """Say where a hypothesis is about cells that are not run; `out` are the arms that are excluded on a workload."""
    needed = {estimate.numerator, estimate.denominator} if estimate is not None else set()
    for workload in selected(protocol, hypothesis):
        named = next((arm for arm in out.get(workload, ()) if arm in needed), None)
        if named is not None:
            yield f"never decided on {workload}, where {named} is excluded: name the workloads that count"
        elif len(out.get(workload, ())) == len(protocol.arms):
            yield f"never decided on {workload}, where every arm is excluded: name the workloads that count"

"""The check of the telemetry, V-19: samples against the ledger that adds them up, and against their table.

A sample is read, added and forgotten; what is held is the sums of one attempt and a few rows of the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from capsule.core.attempt import COMPLETED, Attempt, Settled
from capsule.core.evidence import NotChecked, Reading
from capsule.core.ledger_checks import Checking
from capsule.core.lines import Content
from capsule.core.manifest import Manifest
from capsule.core.protocol import Budget
from capsule.core.table import telemetry_row
from capsule.core.telemetry import DeviceTelemetry, Sample, Tally, read_samples, torn_bytes, worst

TABLE = "4-records/telemetry.parquet"


def check_telemetry(reading: Reading) -> Checking:
    """V-19: what the ledger says of a device follows from the samples, outcomes fit it, and the table is theirs."""
    if not reading.chain.events:
        raise NotChecked("the ledger could not be read")
    manifests = {manifest.identity: manifest for manifest in reading.manifests}
    rows = TableRows(reading.evidence.telemetry_table)
    sampled = 0
    for attempt in reading.account.attempts.values():
        sampled += attempt.id in reading.evidence.telemetry
        summaries = reading.ledger.telemetry(attempt.id)
        yield from _attempt_faults(attempt, summaries, reading.evidence.telemetry.get(attempt.id), rows)
        if isinstance(attempt.end, Settled):
            yield from (f"{attempt.id}: {words}" for words in _outcome_faults(attempt, attempt.end, manifests))
    if TABLE not in reading.evidence.members:
        if rows.expected:
            raise NotChecked(f"the table of {rows.expected} samples is absent")
    elif not rows.expected:
        yield f"{TABLE}: expected no table without samples, found one"
    else:
        yield from rows.faults()
    ends = [item.end.exclusivity for item in reading.account.attempts.values() if isinstance(item.end, Settled)]
    doubts = [f"{ends.count(word)} {word}" for word in ("contaminated", "unverifiable") if word in ends]
    said = f"{rows.expected} samples of {sampled} attempts added up again" if sampled else "no attempt was sampled"
    return "; ".join([said, *([f"of {len(ends)} settled: {', '.join(doubts)}"] if doubts else [])])


class TableRows:
    """The packed table, gone through beside the samples that it should be of."""

    def __init__(self, table: Iterable[Mapping[str, Any]] | str) -> None:
        self._unread = table if isinstance(table, str) else None
        self._found = iter(()) if isinstance(table, str) else iter(table)
        self._wrong: str | None = None
        self.expected = 0

    def expect(self, row: Mapping[str, Any]) -> None:
        """Compare the next row with that of the next sample; the first difference is kept."""
        self.expected += 1
        if self._unread is not None or self._wrong is not None:
            return
        found = next(self._found, None)
        if found is None:
            self._wrong = f"expected a row for each sample, found {self.expected - 1} rows"
        elif found != row:
            names = sorted(name for name in row.keys() | found.keys() if found.get(name, ...) != row.get(name, ...))
            self._wrong = f"row {self.expected - 1}: {', '.join(names)}: not what the samples give"

    def faults(self) -> Iterator[str]:
        """Yield what is wrong with the table once every sample has passed."""
        if self._unread is not None:
            yield self._unread
        elif self._wrong is not None:
            yield f"{TABLE}: {self._wrong}"
        elif next(self._found, None) is not None:
            yield f"{TABLE}: expected {self.expected} rows, found more"


def _attempt_faults(
    attempt: Attempt, said: Mapping[str, DeviceTelemetry], data: Content | None, rows: TableRows
) -> Iterator[str]:
    """Read one attempt's samples: yield what is wrong with them, and where what the ledger `said` is not their sum."""
    place = f"3-attempts/{attempt.id}/telemetry.jsonl"
    settled = attempt.end if isinstance(attempt.end, Settled) else None
    leased = attempt.intent.leased.boottime_ms if attempt.intent else 0
    released = attempt.released.boottime_ms if attempt.released else leased
    tallies: dict[str, Tally] = {}
    last_ms: dict[str, int] = {}
    devices = attempt.reserved.devices if attempt.reserved else ()
    for number, sample in enumerate(read_samples(data or b""), start=1):
        if not isinstance(sample, Sample):
            yield f"{place}:{number}: {sample}"
            continue
        rows.expect(telemetry_row(attempt.id, sample))
        if sample.device not in devices:
            yield f"{place}:{number}: expected a device that the attempt reserved, found {sample.device[:100]!r}"
            continue
        if sample.at_ms < last_ms.get(sample.device, 0):
            yield f"{place}:{number}: expected samples in the order of their time, found an earlier one"
        last_ms[sample.device] = sample.at_ms
        tallies.setdefault(sample.device, Tally(leased, released)).add(sample)
    if settled is None:
        return
    if data is not None and torn_bytes(data):
        yield f"{place}: expected whole lines of an attempt that was observed to its end, found a torn one"
    if data is None and said:
        yield f"{place}: expected the samples that the ledger adds up, found none"
        return
    none = Tally(leased, released)
    summaries = {device: tallies.get(device, none).summary() for device in devices} if tallies else {}
    for device in sorted(summaries.keys() | said.keys()):
        found, expected = said.get(device), summaries.get(device)
        if found is None or expected is None:
            yield f"{attempt.id}: {device[:100]!r}: expected a summary exactly where there are samples"
        elif found != expected:
            names = [name for name in type(found).model_fields if getattr(found, name) != getattr(expected, name)]
            yield f"{attempt.id}: {device[:100]!r}: {', '.join(names)}: not what its samples add up to"
    exclusivity = worst(summaries.values())
    if settled.exclusivity != exclusivity:
        yield f"{attempt.id}: expected {exclusivity} by its samples, found {settled.exclusivity}"


def _outcome_faults(attempt: Attempt, settled: Settled, manifests: Mapping[str, Manifest]) -> Iterator[str]:
    """Judge an outcome beside how exclusive the device was and what the budget makes of that."""
    manifest = manifests.get(attempt.reserved.manifest) if attempt.reserved else None
    if manifest is None:
        return
    budget = manifest.protocol.budget
    outcome, exclusivity = settled.outcome, settled.exclusivity
    if budget.exclusivity == "required" and exclusivity != "exclusive" and outcome in COMPLETED:
        yield f"expected no result of an attempt that is {exclusivity} where exclusivity is required, found {outcome}"
    if outcome in ("contaminated", "unverifiable") and not _follows(outcome, exclusivity, budget):
        yield f"{outcome} does not follow from samples that are {exclusivity} and a budget with {_rules(budget)}"


def _follows(outcome: str, exclusivity: str, budget: Budget) -> bool:
    stops = outcome == "contaminated" and budget.on_contamination == "stop"
    return outcome == exclusivity and (budget.exclusivity == "required" or stops)


def _rules(budget: Budget) -> str:
    return f'exclusivity = "{budget.exclusivity}" and on_contamination = "{budget.on_contamination}"'

"""The tables of a capsule, of its records and of its telemetry.

The record table has one row for every planned cell, and one for every observation that did not become final; the table
of telemetry one for every sample. Packing writes them for people and their tools; verifying derives them again from the
journals and the samples and compares. Those are the evidence, the tables are views of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from capsule.core.account import Account
from capsule.core.canonical import canonical
from capsule.core.lines import Content
from capsule.core.manifest import Manifest
from capsule.core.plan import Cell, cell_named
from capsule.core.progress import final_rows
from capsule.core.protocol import Observation
from capsule.core.record import Journal
from capsule.core.telemetry import Sample, read_samples

ColumnType = Literal["text", "int64", "bool"]

FIXED_COLUMNS: tuple[tuple[str, ColumnType], ...] = (
    ("cell", "text"),
    ("arm", "text"),
    ("workload", "text"),
    ("seed", "int64"),
    ("start", "int64"),
    ("block", "int64"),
    ("position", "int64"),
    ("process", "int64"),
    ("status", "text"),
    ("reason", "text"),
    ("attempt", "text"),
    ("final", "bool"),
    ("pilot", "bool"),
)


TELEMETRY_COLUMNS: tuple[tuple[str, ColumnType], ...] = (
    ("attempt", "text"),
    ("device", "text"),
    ("at_ms", "int64"),
    ("exclusivity", "text"),
    ("words", "text"),
    ("own", "text"),
    ("foreign", "text"),
    ("memory_used_bytes", "int64"),
    ("utilization_percent", "int64"),
    ("sm_clock_mhz", "int64"),
    ("memory_clock_mhz", "int64"),
    ("temperature_celsius", "int64"),
    ("power_mw", "int64"),
    ("energy_mj", "int64"),
    ("throttle", "int64"),
    ("ecc_corrected", "int64"),
    ("ecc_uncorrected", "int64"),
    ("remapped_rows", "int64"),
    ("xid", "int64"),
    ("driver", "text"),
    ("layout", "text"),
    ("missing", "text"),
    ("error", "text"),
    ("lost", "bool"),
)


def table_columns(observations: Sequence[Observation]) -> list[tuple[str, str]]:
    """Return name and type of every column, the fixed ones first."""
    return [*FIXED_COLUMNS, *((column.name, column.type) for column in observations)]


def table_rows(
    manifest: Manifest, cells: Sequence[Cell], account: Account, journals: Mapping[str, Journal]
) -> Iterator[dict[str, Any]]:
    """Yield the rows: final ones in the order of the plan, then the others in the order of their attempts."""
    decided = set()
    """Attempts that completed and decided their process, so all their rows are final."""
    for row in final_rows(manifest, cells, account, journals):
        if row.status == "ok" or row.reason == "trial_error":
            decided.add(row.attempt)
        yield _row(row.cell, row.status, row.reason, row.attempt, True, False, row.values)
    identity = manifest.identity
    for name, attempt in account.attempts.items():
        journal = journals.get(name)
        if journal is None or name in decided or attempt.reserved is None or attempt.reserved.manifest != identity:
            continue
        outcome = attempt.end.outcome if attempt.end else "open"
        for raw in journal.rows.values():
            status, reason = ("failed", "trial_error") if raw.error is not None else ("ok", None)
            words = "pilot" if attempt.pilot else f"void: {outcome}"
            yield _row(cell_named(cells, raw.cell), status, reason or words, name, False, attempt.pilot, raw.values)


def _row(
    cell: Cell,
    status: str,
    reason: str | None,
    attempt: str | None,
    final: bool,
    pilot: bool,
    values: Mapping[str, Any],
) -> dict[str, Any]:
    fixed = {
        "cell": cell.cell, "arm": cell.arm, "workload": cell.workload, "seed": cell.seed, "start": cell.start,
        "block": cell.block, "position": cell.position, "process": cell.process, "status": status, "reason": reason,
        "attempt": attempt, "final": final, "pilot": pilot,
    }  # fmt: skip
    return {**fixed, **values}


def telemetry_rows(files: Iterable[tuple[str, Content]]) -> Iterator[dict[str, Any]]:
    """Yield a row for every sample of the attempts' telemetry files, in their order; other lines have none."""
    for attempt, data in files:
        for sample in read_samples(data):
            if isinstance(sample, Sample):
                yield telemetry_row(attempt, sample)


def telemetry_row(attempt: str, sample: Sample) -> dict[str, Any]:
    """Return the row of one sample: process ids joined by spaces, reasons as canonical JSON, the rest as it is."""
    flat = {
        "attempt": attempt,
        "own": " ".join(map(str, sample.own)),
        "foreign": " ".join(map(str, sample.foreign)),
        "missing": canonical(sample.missing).decode(),
    }
    return {name: flat[name] if name in flat else getattr(sample, name) for name, _ in TELEMETRY_COLUMNS}

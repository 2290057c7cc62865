"""The record table: one row for every planned cell, and one for every observation that did not become final.

Packing writes it for people and their tools; verifying derives it again from the journals and compares. Journals are
the evidence, the table is a view of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from capsule.core.attempt import Account
from capsule.core.manifest import Manifest
from capsule.core.plan import Cell
from capsule.core.progress import final_rows
from capsule.core.protocol import Observation
from capsule.core.record import Journal

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


def table_columns(observations: Sequence[Observation]) -> list[tuple[str, str]]:
    """Return name and type of every column, the fixed ones first."""
    return [*FIXED_COLUMNS, *((column.name, column.type) for column in observations)]


def table_rows(
    manifest: Manifest, cells: Sequence[Cell], account: Account, journals: Mapping[str, Journal]
) -> Iterator[dict[str, Any]]:
    """Yield the rows: final ones in the order of the plan, then the others in the order of their attempts."""
    by_name = {cell.cell: cell for cell in cells}
    final = final_rows(manifest, cells, account, journals)
    for row in final:
        yield _row(row.cell, row.status, row.reason, row.attempt, True, False, row.values)
    decided = {(row.attempt, row.cell.cell) for row in final if row.status == "ok" or row.reason == "trial_error"}
    identity = manifest.identity
    for name, attempt in account.attempts.items():
        journal = journals.get(name)
        if journal is None or attempt.reserved is None or attempt.reserved.manifest != identity:
            continue
        outcome = attempt.end.outcome if attempt.end else "open"
        for raw in journal.rows.values():
            if (name, raw.cell) in decided:
                continue
            status, reason = ("failed", "trial_error") if raw.error is not None else ("ok", None)
            words = "pilot" if attempt.pilot else f"void: {outcome}"
            yield _row(by_name[raw.cell], status, reason or words, name, False, attempt.pilot, raw.values)


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

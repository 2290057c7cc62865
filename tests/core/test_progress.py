"""From a ledger and journals to exactly one final row of every planned cell."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from builders import History, appended, edited, generation, honest, journal_bytes, observed
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.core.attempt import INTERRUPTED, OUTCOMES
from capsule.core.progress import Row, counts, final_rows, processes, remaining, tries
from capsule.core.table import table_rows

FAILURES = sorted(set(OUTCOMES) - INTERRUPTED - {"completed", "trial_error"})


def rows_of(history: History) -> list[Row]:
    """Return the final rows of a history."""
    return list(final_rows(history.manifest, history.cells, history.account, history.read_journals()))


def failing_row(history: History, process: int) -> bytes:
    """Return a whole journal of which the first cell raised."""
    cells = processes(history.cells)[process].cells
    return journal_bytes([{"cell": cells[0].cell, "error": "no"}, *map(observed, cells[1:])])


@st.composite
def histories(draw: st.DrawFn) -> History:
    """Give any history that a host could have lived through, over one or two manifests."""
    history = History().opened()
    for _ in range(draw(st.integers(0, 9))):
        process = draw(st.integers(0, 2))
        how = draw(
            st.sampled_from(["well", "trial_error", "fails", "lost", "refused", "late", "open", "pilot", "amend"])
        )
        if how == "well":
            history.attempt(process)
        elif how == "trial_error":
            history.attempt(process, "trial_error", journal=failing_row(history, process))
        elif how == "fails":
            history.attempt(process, draw(st.sampled_from(FAILURES)), journal=b"", status=1)
        elif how == "lost":
            history.lose(process, draw(st.sampled_from(sorted(INTERRUPTED))), rows=draw(st.integers(0, 8)))
        elif how == "pilot":
            history.attempt(process, pilot=True)
        elif how == "amend":
            history.amended(edited(("numbers = 20", f"numbers = {len(history.generations) + 20}")))
        elif how == "open":
            history.start(history.reserve(process))
        else:
            history.refuse(process, draw(st.sampled_from(["busy", "budget", "machine"])), reserved=how == "late")
    return history


@given(histories())
@settings(max_examples=80)
def test_every_planned_cell_has_exactly_one_final_row(history: History) -> None:
    """R-08: whatever happened, the final rows are the planned cells, in their order, each once."""
    rows = rows_of(history)
    assert [row.cell for row in rows] == history.cells
    assert sum(counts(rows).values()) == len(history.cells)
    for row in rows:
        assert (row.status == "ok") == (row.reason is None)
        assert (row.attempt is not None) == (row.status != "not_run")
        assert set(row.values) == {"seconds", "total", "note"}
    for process in processes(history.cells):
        mine = {row.cell.cell for row in rows if row.cell.process == process.ordinal}
        assert mine == {cell.cell for cell in process.cells}
        assert len({row.attempt for row in rows if row.cell.process == process.ordinal}) == 1


@given(histories())
@settings(max_examples=40)
def test_what_remains_is_what_has_no_final_row(history: History) -> None:
    """R-08: a process is still to run exactly while its cells are `not_run`; a durable row is never run again."""
    rows = rows_of(history)
    waiting = {row.cell.process for row in rows if row.status == "not_run"}
    assert {process.ordinal for process in remaining(history.manifest, history.cells, history.account)} == waiting


@given(histories())
@settings(max_examples=40)
def test_the_table_holds_every_row_once(history: History) -> None:
    """R-09: the table has a final row for every cell, and every row that a journal holds, exactly once."""
    journals = history.read_journals()
    rows = list(table_rows(history.manifest, history.cells, history.account, journals))
    final = [row for row in rows if row["final"]]
    assert [row["cell"] for row in final] == [cell.cell for cell in history.cells]
    assert rows[: len(final)] == final
    written = Counter((name, cell) for name, journal in journals.items() for cell in journal.rows)
    observed_rows = Counter((row["attempt"], row["cell"]) for row in rows if row["status"] == "ok" or not row["final"])
    failed = Counter((row["attempt"], row["cell"]) for row in final if row["reason"] == "trial_error")
    assert set(observed_rows + failed) == set(written)
    assert max((observed_rows + failed).values(), default=1) == 1
    attempts = [row["attempt"] for row in rows[len(final) :]]
    assert attempts == sorted(attempts)
    assert all(row["pilot"] == history.account.attempts[row["attempt"]].pilot for row in rows[len(final) :])


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([], ("not_run", "pending")),
        (["well"], ("ok", None)),
        (["lost"], ("not_run", "interrupted")),
        (["lost", "lost", "well"], ("ok", None)),
        (["refuse"], ("not_run", "busy")),
        (["refuse", "lost"], ("not_run", "interrupted")),
        (["lost", "refuse"], ("not_run", "busy")),
        (["refuse late"], ("not_run", "busy")),
        (["exit_nonzero"], ("not_run", "pending")),
        (["exit_nonzero", "exit_nonzero"], ("failed", "exit_nonzero")),
        (["exit_nonzero", "well"], ("ok", None)),
        (["exit_nonzero", "lost", "well"], ("ok", None)),
        (["signalled"], ("failed", "signalled")),
        (["exit_nonzero", "signalled"], ("failed", "signalled")),
        (["signalled", "well"], ("failed", "signalled")),
        (["well", "well"], ("ok", None)),
        (["pilot"], ("not_run", "pending")),
        (["pilot", "refuse", "pilot"], ("not_run", "busy")),
    ],
)
def test_the_final_row_of_a_process(steps: list[str], expected: tuple[str, str | None]) -> None:
    """P-17 R-08: interruptions are repeated, failures retried as frozen, pilots and what came too late do not count."""
    history = History().opened()
    for step in steps:
        if step == "well":
            history.attempt(0)
        elif step == "lost":
            history.lose(0)
        elif step == "pilot":
            history.attempt(0, pilot=True)
        elif step.startswith("refuse"):
            history.refuse(0, reserved=step.endswith("late"))
        else:
            history.attempt(0, step, journal=b"", status=1)
    row = rows_of(history)[0]
    assert (row.status, row.reason) == expected


def test_the_first_whole_process_counts() -> None:
    """R-08: nobody can run again until the numbers please: the first complete attempt is the final one."""
    history = History().opened()
    first = history.attempt(0, ratio=2.0)
    history.attempt(0, ratio=9.0)
    rows = rows_of(history)[:8]
    assert {row.attempt for row in rows} == {first}
    assert all(row.values["seconds"] == observed(row.cell)["seconds"] for row in rows)


def test_a_trial_that_raises_fails_its_own_cell_only() -> None:
    """R-08: in a process that ran to its end, a cell that raised is `failed` and the others are `ok`."""
    history = History().opened()
    history.attempt(0, "trial_error", journal=failing_row(history, 0))
    assert [(row.status, row.reason) for row in rows_of(history)[:3]] == [
        ("failed", "trial_error"),
        ("ok", None),
        ("ok", None),
    ]


def test_a_failed_process_fails_every_cell_also_those_with_rows() -> None:
    """R-08: rows of a process that failed are kept in the table and are not final."""
    history = History().opened()
    partial = journal_bytes([observed(cell) for cell in history.cells[:3]], ended=False)
    name = history.attempt(0, "signalled", journal=partial, status=1)
    assert {(row.status, row.reason) for row in rows_of(history)[:8]} == {("failed", "signalled")}
    others = list(table_rows(history.manifest, history.cells, history.account, history.read_journals()))[24:]
    assert [(row["attempt"], row["reason"], row["final"]) for row in others] == [(name, "void: signalled", False)] * 3


def test_excluded_cells_stay_in_every_table() -> None:
    """R-08 R-09 P-06: an excluded cell is `not_run` with its frozen reason, and its process runs without it."""
    text = appended(
        '[[exclusions]]\narm = "loop"\nworkload = "large"\nreason = "needs too long"',
        to=edited(("threshold = 0", 'threshold = 0\nworkloads = ["small"]')),
    )
    history = History([generation(text)]).opened()
    assert [len(process.cells) for process in processes(history.cells)] == [6, 6, 6]
    for process in range(3):
        history.attempt(process)
    found = Counter((row.status, row.reason) for row in rows_of(history))
    assert found == {("ok", None): 18, ("not_run", "excluded: needs too long"): 6}
    assert not remaining(history.manifest, history.cells, history.account)


def test_a_process_of_excluded_cells_never_runs() -> None:
    """R-08: where all cells of a process are excluded there is nothing to launch."""
    text = appended('[[exclusions]]\nworkload = "large"\nreason = "x"', to=edited(
        ("threshold = 0", 'threshold = 0\nworkloads = ["small"]'), ('isolation = "start"', 'isolation = "workload"'),
        ('gates = ["summed"]', 'gates = ["summed"]\nworkloads = ["small"]'),
    ))  # fmt: skip
    history = History([generation(text)]).opened()
    assert sorted(len(process.cells) for process in processes(history.cells)) == [0, 0, 0, 4, 4, 4]
    assert len(remaining(history.manifest, history.cells, history.account)) == 3


def test_an_amendment_starts_anew_and_keeps_the_cost() -> None:
    """R-08 L-08: attempts of a superseded manifest give no rows of the new one, and stay charged."""
    history = History().opened()
    history.attempt(0)
    before = history.account.held_ms("cpu", pilot=False)
    old = history.manifest.identity
    history.amended(edited(("numbers = 20", "numbers = 21")))
    assert {row.status for row in rows_of(history)} == {"not_run"}
    assert history.account.held_ms("cpu", pilot=False) == before > 0
    assert len(tries(history.account, old, 0)) == 1
    assert tries(history.account, history.manifest.identity, 0) == []


def test_the_honest_history_is_whole() -> None:
    """R-09: the table of the example history has a row for every cell and the nine that are not final."""
    history = honest()
    rows: list[dict[str, Any]] = list(
        table_rows(history.manifest, history.cells, history.account, history.read_journals())
    )
    assert Counter((row["final"], row["reason"]) for row in rows) == {
        (True, None): 24,
        (False, "pilot"): 8,
        (False, "void: lost"): 1,
    }
    assert list(rows[0])[:5] == ["cell", "arm", "workload", "seed", "start"]

"""What an observed end means: the exit as the kernel told it, the outcome, and the charge."""

from __future__ import annotations

import json
import os
import resource
import signal
from pathlib import Path

from capsule.core.attempt import Charge, Clock, Exit, Outcome
from capsule.core.manifest import read_sources
from capsule.core.progress import Process, outcome_of
from capsule.core.record import Journal, read_journal
from capsule.host.durable import write_durably
from capsule.host.launch import IMPORTS, JOURNAL, LaunchOrder
from capsule.host.provenance import Imported, SnapshotTree, judge_imports

PROVENANCE = "provenance.jsonl"

Cause = tuple[Outcome, str]
"""Why the supervisor itself ended a trial, and its evidence."""


def failed_exit(words: str) -> Exit:
    """Return the exit of a program that could not be executed."""
    return Exit(
        wait_status=None, exit_code=None, signal=None, core_dumped=False, cause="exec_failed", evidence=words,
        user_ms=0, system_ms=0, max_rss_bytes=0,
    )  # fmt: skip


def observed_exit(status: int, usage: resource.struct_rusage, cause: Cause | None) -> Exit:
    """Return the exit of a collected process: its raw wait status and what that says."""
    by_signal = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
    words = f"exit status {code}" if by_signal is None else f"ended by {signal_name(by_signal)}"
    return Exit(
        wait_status=status,
        exit_code=code,
        signal=by_signal,
        core_dumped=os.WCOREDUMP(status),
        cause=cause[0] if cause else "exited" if by_signal is None else "signalled",
        evidence=f"{words}; {cause[1]}" if cause else words,
        user_ms=int(usage.ru_utime * 1000),
        system_ms=int(usage.ru_stime * 1000),
        max_rss_bytes=usage.ru_maxrss * 1024,
    )


def signal_name(number: int) -> str:
    """Return the name of a signal, real-time ones by their number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def judge(
    order: LaunchOrder,
    exited: Exit,
    journal: Journal,
    *,
    cause: Cause | None,
    leaked: str | None,
    drift: str | None,
    foreign: str | None,
) -> tuple[Outcome, str]:
    """Judge an attempt: the supervisor's own reason first, then how the trial ended, then what it recorded."""
    if cause is not None:
        return cause
    if exited.wait_status is None:
        return "exec_failed", exited.evidence
    if exited.signal is not None:
        unknown = ", which this supervisor did not send" if exited.signal == signal.SIGKILL else ""
        return "signalled", exited.evidence + unknown
    if exited.exit_code:
        return "exit_nonzero", exited.evidence
    if leaked is not None:
        return "leaked_descendants", leaked
    if drift is not None:
        return "source_changed", drift
    if foreign is not None:
        return "provenance", foreign
    outcome, evidence = outcome_of(Process(0, order.cells), journal)
    return outcome, evidence  # type: ignore[return-value]


def foreign_imports(order: LaunchOrder) -> str | None:
    """Write where every module that the trial reported came from; words on those that nobody vouches for."""
    reported = Path(order.attempt_dir) / IMPORTS
    if not reported.exists():
        return None
    try:
        items = [json.loads(line) for line in reported.read_bytes().splitlines()]
        imported = [Imported(item["module"], item["file"], item["sha256"]) for item in items]
    except (ValueError, TypeError, KeyError):
        return "the report of imported modules cannot be read"
    trees = [
        SnapshotTree(Path(tree.root), read_sources(Path(tree.sources).read_bytes(), tree.sources))
        for tree in order.trees
    ]
    judgement = judge_imports(imported, trees)
    write_durably(Path(order.attempt_dir) / PROVENANCE, judgement.to_bytes())
    found = [str(finding) for finding in judgement.findings]
    more = f"; {len(found) - 5} more" if len(found) > 5 else ""
    return "; ".join(found[:5]) + more if found else None


def read_rows(order: LaunchOrder) -> Journal:
    """Read the journal of an attempt; one that was never made is empty."""
    path = Path(order.attempt_dir) / JOURNAL
    data = path.read_bytes() if path.exists() else b""
    return read_journal(data, order.observations, [cell.cell for cell in order.cells])


def write_end_record(order: LaunchOrder, journal: int) -> None:
    """Write the end record of a command that exited with 0, after its last line even without a newline."""
    data = (Path(order.attempt_dir) / JOURNAL).read_bytes()
    newline = b"\n" if data and not data.endswith(b"\n") else b""
    os.write(journal, newline + b'{"end":true}\n')


def observed_charge(devices: int, leased: Clock, released: Clock) -> Charge:
    """Return the exact charge of an attempt whose lease and release were observed under one boot."""
    charged = devices * max(0, released.boottime_ms - leased.boottime_ms)
    return Charge(lower_ms=charged, upper_ms=charged, debited_ms=charged, observed=True)


def suspended_ms(leased: Clock, released: Clock) -> int:
    """Return how long the machine slept: time that only the boot-time clock counts."""
    slept = (released.boottime_ms - leased.boottime_ms) - (released.monotonic_ms - leased.monotonic_ms)
    return max(0, slept)

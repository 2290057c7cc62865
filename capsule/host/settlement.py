"""What an observed end means: the exit as the kernel told it, the outcome, and the charge."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

from capsule.core.attempt import Charge, Clock, Exit, Outcome
from capsule.core.errors import MalformedError
from capsule.core.manifest import read_sources
from capsule.core.progress import Process, outcome_of
from capsule.core.record import Journal, read_journal
from capsule.host import launch
from capsule.host.attempt_files import make_way
from capsule.host.durable import read_regular, write_durably
from capsule.host.launch import IMPORTS, JOURNAL, LaunchOrder
from capsule.host.provenance import SnapshotTree, judge_imports, read_imports

PROVENANCE = "provenance.jsonl"
UNREPORTED = "its process ended without the report of imported modules that precedes the end record"
CUT_ROOM = 100
"""Bytes of a journal's limit that are left to the line which says that it was cut."""

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
    cut: str | None = None,
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
    if cut is not None:
        return "bad_records", cut
    outcome, evidence = outcome_of(Process(0, order.cells), journal)
    return outcome, evidence  # type: ignore[return-value]


def foreign_imports(order: LaunchOrder, journal: Journal) -> str | None:
    """Write where every module that the trial reported came from; words on those that nobody vouches for.

    A Python trial whose journal has its end record and that reported nothing wrote that record itself.
    """
    data = read_regular(Path(order.attempt_dir) / IMPORTS, launch.JOURNAL_BYTES_MAX)
    if data is None:
        return UNREPORTED if order.kind == "python" and journal.ended else None
    trees = [
        SnapshotTree(Path(tree.root), read_sources(Path(tree.sources).read_bytes(), tree.sources))
        for tree in order.trees
    ]
    try:
        judgement = judge_imports(read_imports(data, IMPORTS), trees)
        lines = judgement.to_bytes()
    except (MalformedError, ValueError):
        return "the report of imported modules cannot be read"
    make_way(Path(order.attempt_dir) / PROVENANCE)
    write_durably(Path(order.attempt_dir) / PROVENANCE, lines)
    found = [str(finding) for finding in judgement.findings]
    more = f"; {len(found) - 5} more" if len(found) > 5 else ""
    return "; ".join(found[:5]) + more if found else None


def read_rows(order: LaunchOrder) -> Journal:
    """Read the journal of an attempt; one that was never made, or is no regular file, is empty."""
    data = read_regular(Path(order.attempt_dir) / JOURNAL) or b""
    return read_journal(data, order.observations, [cell.cell for cell in order.cells])


def cut_journal(attempt_dir: Path) -> str | None:
    """Cut a journal that is too long for a capsule after a whole line; words on what was left out.

    The line that is put there instead says so too. It is no record, so that whoever reads the journal finds
    `bad_records`, as the ledger says.
    """
    path = attempt_dir / JOURNAL
    data = read_regular(path, launch.JOURNAL_BYTES_MAX + 1)
    if data is None or len(data) <= launch.JOURNAL_BYTES_MAX:
        return None
    kept = data[: data.rfind(b"\n", 0, launch.JOURNAL_BYTES_MAX - CUT_ROOM) + 1]
    left_out = path.lstat().st_size - len(kept)
    write_durably(path, kept + f"[capsule: {left_out} bytes left out here]\n".encode())
    return f"the journal is longer than {launch.JOURNAL_BYTES_MAX} bytes; its last {left_out} were left out"


def write_end_record(journal: int) -> None:
    """Write the end record of a command that exited with 0, after its last line even without a newline."""
    size = os.fstat(journal).st_size
    newline = b"\n" if size and os.pread(journal, 1, size - 1) != b"\n" else b""
    os.write(journal, newline + b'{"end":true}\n')


def observed_charge(devices: int, leased: Clock, released: Clock) -> Charge:
    """Return the exact charge of an attempt whose lease and release were observed under one boot."""
    charged = devices * max(0, released.boottime_ms - leased.boottime_ms)
    return Charge(lower_ms=charged, upper_ms=charged, debited_ms=charged, observed=True)


def suspended_ms(leased: Clock, released: Clock) -> int:
    """Return how long the machine slept: time that only the boot-time clock counts."""
    slept = (released.boottime_ms - leased.boottime_ms) - (released.monotonic_ms - leased.monotonic_ms)
    return max(0, slept)

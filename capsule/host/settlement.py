"""What an observed end means: the exit as the kernel told it, the outcome, and the charge."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from capsule.core.attempt import COMPLETED, Charge, Clock, Exit, Outcome
from capsule.core.errors import MalformedError
from capsule.core.manifest import read_sources
from capsule.core.progress import Process, outcome_of
from capsule.core.record import Journal, read_journal
from capsule.host import launch, oom
from capsule.host.attempt_files import make_way, set_aside
from capsule.host.cgroup import Cgroup
from capsule.host.child import Usage
from capsule.host.clock import realtime_ms
from capsule.host.durable import read_regular, read_tail, write, write_durably
from capsule.host.launch import IMPORTS, JOURNAL, LaunchOrder
from capsule.host.provenance import SnapshotTree, judge_imports, read_imports

PROVENANCE = "provenance.jsonl"
UNREPORTED = "its process ended without the report of imported modules that precedes the end record"
CUT_ROOM = 100
"""Bytes of a journal's limit that are left to the line which says that it was cut."""

Cause = tuple[Outcome, str]
"""Why the supervisor itself ended a trial, and its evidence."""


def failed_exit(cause: str, words: str) -> Exit:
    """Return the exit of a program that was not started, or of which that is not known."""
    return Exit(
        wait_status=None, exit_code=None, signal=None, core_dumped=False, cause=cause, evidence=words,
        user_ms=0, system_ms=0, max_rss_bytes=0,
    )  # fmt: skip


def observed_exit(status: int, usage: Usage, cause: Cause | None) -> Exit:
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
        user_ms=usage.user_ms,
        system_ms=usage.system_ms,
        max_rss_bytes=usage.max_rss_bytes,
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
    device: Cause | None = None,
    shared: Cause | None = None,
    killed: Cause | None = None,
    leaked: str | None = None,
    drift: str | None = None,
    foreign: str | None = None,
    cut: str | None = None,
) -> tuple[Outcome, str]:
    """Judge an attempt: the supervisor's own reason first, then its device, how the trial ended, and what it recorded.

    `device` is a fault of a device, `killed` what is known of a SIGKILL that the supervisor did not send, `shared` that
    exclusivity was not as required: it takes the place of an outcome that would count.
    """
    if cause is not None:
        return cause
    if device is not None:
        return device
    if exited.wait_status is None:
        return exited.cause, exited.evidence  # type: ignore[return-value]  # the supervisor's own word
    if exited.signal is not None:
        return killed or ("signalled", exited.evidence)
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
    if shared is not None and outcome in COMPLETED:
        return shared
    return outcome, evidence  # type: ignore[return-value]


def cause_of_sigkill(exited: Exit, cgroup: Cgroup | None, pids: Sequence[int], leased: Clock) -> Cause | None:
    """Say who sent a SIGKILL that the supervisor did not send, by evidence alone; None for any other end."""
    if exited.signal != signal.SIGKILL or exited.cause != "signalled":
        return None
    kills = cgroup.oom_kills() if cgroup is not None else None
    if kills:
        return "oom_cgroup", f"{exited.evidence}; its cgroup ran out of memory and {kills} processes were killed"
    found = oom.find(pids, leased.boottime_ms)
    if found is not None:
        return found[0], f"{exited.evidence}; {found[1]}"
    return "sigkill_unattributed", f"{exited.evidence}, which this supervisor did not send"


DEVICE_MEMORY = (b"CUDA out of memory", b"CUDA_ERROR_OUT_OF_MEMORY", b"cudaErrorMemoryAllocation")


def memory_hint(order: LaunchOrder, exited: Exit, journal: Journal) -> str | None:
    """Return a hint that device memory ran out: a reading of what the trial printed or recorded, and no excuse."""
    if exited.exit_code == 0 and all(row.error is None for row in journal.rows.values()):
        return None
    text = read_tail(Path(order.attempt_dir) / "stderr", 1 << 16)
    if any(words in text for words in DEVICE_MEMORY):
        return "hint: its output says that device memory ran out (device_oom)"
    return None


CLOCK_STEP_MS = 2_000


def clock_step(leased: Clock, released: Clock) -> str | None:
    """Return words if the wall clock did not move with the boot-time clock, by which alone an attempt is charged."""
    wall_ms = realtime_ms(released.realtime) - realtime_ms(leased.realtime)
    step_ms = wall_ms - (released.boottime_ms - leased.boottime_ms)
    if abs(step_ms) < CLOCK_STEP_MS:
        return None
    return f"clock_step: the wall clock moved by {step_ms / 1000:+.1f} s against the boot-time clock"


def foreign_imports(order: LaunchOrder, journal: Journal) -> str | None:
    """Write where every module that the trial reported came from; words on those that nobody vouches for.

    A Python trial whose journal has its end record and that reported nothing wrote that record itself.
    """
    if order.kind == "command":
        return None
    data = read_regular(Path(order.attempt_dir) / IMPORTS, launch.JOURNAL_BYTES_MAX)
    if data is None:
        return UNREPORTED if journal.ended else None
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


def stray_provenance(attempt_dir: Path) -> list[str]:
    """Put aside a report on modules that its trial wrote itself; words on it.

    To be called before `foreign_imports`, or where that is not called at all.
    """
    if not os.path.lexists(attempt_dir / PROVENANCE):
        return []
    set_aside(attempt_dir / PROVENANCE)
    return [f"{PROVENANCE} was written by somebody else and counts as absent"]


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
    write(journal, newline + b'{"end":true}\n')


def observed_charge(devices: int, leased: Clock, released: Clock) -> Charge:
    """Return the exact charge of an attempt whose lease and release were observed under one boot."""
    charged = devices * max(0, released.boottime_ms - leased.boottime_ms)
    return Charge(lower_ms=charged, upper_ms=charged, debited_ms=charged, observed=True)


def suspended_ms(leased: Clock, released: Clock) -> int:
    """Return how long the machine slept: time that only the boot-time clock counts."""
    slept = (released.boottime_ms - leased.boottime_ms) - (released.monotonic_ms - leased.monotonic_ms)
    return max(0, slept)

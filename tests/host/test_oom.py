"""Out-of-memory kills: only what the kernel's log says of these processes, in its own voice, since that moment."""

import errno
import os
from pathlib import Path

import pytest

from capsule.core.attempt import Clock
from capsule.host import oom
from capsule.host.clock import read_clock

LOG = """\
6,344,1322579,-;EXT4-fs (vda): mounted filesystem r/w without journal. Quota mode: none.
4,1000,50000000,-;python invoked oom-killer: gfp_mask=0x140cca(GFP_HIGHUSER_MOVABLE|__GFP_COMP), order=0
3,1001,50000900,-;Out of memory: Killed process 41 (python) total-vm:218804kB, anon-rss:40704kB, UID:0
 SUBSYSTEM=memory
3,1002,60000000,-,caller=T99;Memory cgroup out of memory: Killed process 42 (py: Killed process 77) total-vm:1kB
3,1003,61000000,c;Out of memory (oom_kill_allocating_task): Killed process 43 (x) total-vm:1kB
12,1004,62000000,-;Out of memory: Killed process 44 (forged) total-vm:1kB
6,1005,63000000,-;x: Out of memory: Killed process 45 (no) total-vm:1kB
6,1006,64000000,-;Out of memory: Kill process 46 (no) score 900 or sacrifice child
torn
"""


def awake() -> Clock:
    return Clock(realtime="2026-01-01T00:00:00.000Z", boottime_ms=100_000, monotonic_ms=100_000, boot_id="b")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "kmsg"
    path.write_text(LOG)
    (tmp_path / "pid").symlink_to(oom.FIRST_PID_NAMESPACE)
    return path


def find(log: Path, pids: set[int], since_ms: int = 0) -> tuple[str, str] | None:
    return oom.find(pids, since_ms, log, namespace=log.with_name("pid"), clock=awake)


def test_the_kind_of_kill_is_that_of_the_log(log: Path) -> None:
    assert find(log, {7, 41}) == (
        "oom_host",
        "kernel log at 50.000900 s: "
        "Out of memory: Killed process 41 (python) total-vm:218804kB, anon-rss:40704kB, UID:0",
    )
    for pid, kind in ((42, "oom_cgroup"), (43, "oom_host")):
        found = find(log, {pid})
        assert found is not None
        assert found[0] == kind


@pytest.mark.parametrize("pid", [1, 4, 44, 45, 46, 77, 99, 412])
def test_what_the_kernel_did_not_say_of_a_process_is_no_evidence(log: Path, pid: int) -> None:
    """44 was written by a program, 77 is in a program's name, 46 was chosen and perhaps not killed."""
    assert find(log, {pid}) is None


def test_a_kill_before_that_moment_was_of_another_process(log: Path) -> None:
    assert find(log, {41}, 50_000) is not None
    assert find(log, {41}, 50_001) is None
    assert find(log, set()) is None


def test_the_log_did_not_count_while_the_machine_slept(log: Path) -> None:
    def slept() -> Clock:
        return awake().model_copy(update={"boottime_ms": 150_000})

    assert oom.find({41}, 100_000, log, namespace=log.with_name("pid"), clock=slept) is not None
    assert oom.find({41}, 100_001, log, namespace=log.with_name("pid"), clock=slept) is None


def test_a_log_of_other_pids_or_that_cannot_be_read_is_no_evidence(log: Path, tmp_path: Path) -> None:
    namespace = tmp_path / "another"
    namespace.symlink_to("pid:[4026532500]")
    assert oom.find({41}, 0, log, namespace=namespace, clock=awake) is None
    assert oom.find({41}, 0, log, namespace=tmp_path / "missing", clock=awake) is None
    for unreadable in (tmp_path / "missing", tmp_path):
        assert find_in(unreadable, log) is None


def find_in(path: Path, log: Path) -> tuple[str, str] | None:
    return oom.find({41}, 0, path, namespace=log.with_name("pid"), clock=awake)


def test_reading_does_not_wait_and_goes_on_behind_dropped_records(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[bytes | int] = [b"6,1,1,-;a\n", errno.EPIPE, LOG.splitlines(keepends=True)[2].encode(), errno.EAGAIN]

    def read(descriptor: int, size: int) -> bytes:
        answer = answers.pop(0)
        if isinstance(answer, int):
            raise OSError(answer, os.strerror(answer))
        return answer

    monkeypatch.setattr(os, "read", read)
    found = find(log, {41})
    monkeypatch.undo()
    assert found is not None
    assert answers == []


def test_the_log_of_this_machine_names_nobody_killed_after_now() -> None:
    """Whether it can be read here or not; a reader that waited would never come back."""
    assert oom.find(range(1, 1 << 22), read_clock().boottime_ms + 3_600_000) is None

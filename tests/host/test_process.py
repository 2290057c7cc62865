"""Processes: exact names, whole trees, and output that is kept within its limit."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from capsule.host import process
from capsule.host.output import CappedOutput, assemble, half_of, segment_path
from capsule.host.process import descendants, identify, is_alive, read_stat, send, with_environment
from tests.host.conftest import eventually


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(["sleep", "60"], env={**os.environ, "CAPSULE_TREE": "test-of-process"})
    yield child
    child.kill()
    child.wait()


def test_a_process_is_alive_only_under_its_exact_name(sleeper: subprocess.Popen[bytes]) -> None:
    identity = identify(sleeper.pid)
    assert is_alive(identity)
    assert not is_alive(identity.model_copy(update={"start_ticks": identity.start_ticks + 1}))
    assert not is_alive(identity.model_copy(update={"boot_id": "another"}))
    sleeper.kill()
    eventually(lambda: not is_alive(identity))
    assert read_stat(sleeper.pid) is not None, "a zombie is there and not alive"


def test_a_signal_reaches_exactly_the_process_that_was_seen(sleeper: subprocess.Popen[bytes]) -> None:
    seen = read_stat(sleeper.pid)
    assert seen is not None
    earlier = process.Stat(seen.pid, seen.parent, seen.state, seen.start_ticks - 1, seen.threads)
    assert send(earlier, signal.SIGKILL) is False
    assert sleeper.poll() is None
    assert send(seen, signal.SIGTERM) is True
    assert sleeper.wait(10) == -signal.SIGTERM
    assert send(seen, signal.SIGTERM) is False


def test_a_tree_holds_children_and_grandchildren_and_no_stranger(sleeper: subprocess.Popen[bytes]) -> None:
    parent = subprocess.Popen(["sh", "-c", "sleep 60 & wait"], stdout=subprocess.DEVNULL)
    try:
        (grandchild,) = eventually(lambda: descendants(parent.pid))
        assert grandchild.parent == parent.pid
        mine = {item.pid for item in descendants(os.getpid())}
        assert {parent.pid, grandchild.pid, sleeper.pid} <= mine
        assert os.getppid() not in mine
        send(grandchild, signal.SIGKILL)
    finally:
        parent.wait(10)


def test_a_process_is_found_by_the_environment_it_was_started_with(sleeper: subprocess.Popen[bytes]) -> None:
    assert [item.pid for item in with_environment("CAPSULE_TREE", "test-of-process")] == [sleeper.pid]
    assert with_environment("CAPSULE_TREE", "test-of") == []


def test_a_process_whose_first_thread_has_left_still_counts() -> None:
    code = (
        "import ctypes, threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code])
    try:
        found = eventually(lambda: (stat := read_stat(child.pid)) and stat.state == "Z" and stat)
        assert found.alive
        assert [item.pid for item in descendants(os.getpid()) if item.pid == child.pid] == [child.pid]
        assert send(found, signal.SIGKILL)
    finally:
        child.wait(10)


def test_a_name_with_brackets_and_blanks_is_read(tmp_path: Path) -> None:
    program = tmp_path / "a) R 1 (b"
    program.symlink_to("/bin/sleep")
    child = subprocess.Popen([program, "60"])
    try:
        found = eventually(lambda: read_stat(child.pid))
        assert (found.pid, found.parent) == (child.pid, os.getpid())
    finally:
        child.kill()
        child.wait()


# Output.


@pytest.mark.parametrize("limit", [1, 2, 7, 100, 101])
@pytest.mark.parametrize("size", [0, 1, 3, 50, 51, 99, 100, 101, 149, 150, 151, 1_000])
@pytest.mark.parametrize("chunk", [1, 13, 5_000])
def test_both_ends_are_kept_and_the_gap_is_counted(tmp_path: Path, limit: int, size: int, chunk: int) -> None:
    data = bytes(number % 251 for number in range(size))
    output = CappedOutput(tmp_path / "stdout", limit)
    for start in range(0, size, chunk):
        output.write(data[start : start + chunk])
    output.close()
    assemble(tmp_path / "stdout", limit)
    half = half_of(limit)
    gap = max(0, size - 2 * half)
    marker = f"\n[capsule: {gap} bytes left out here]\n".encode() if gap else b""
    assert (tmp_path / "stdout").read_bytes() == data[:half] + marker + data[half:][-half:]
    assert [path.name for path in tmp_path.iterdir()] == ["stdout"]
    assemble(tmp_path / "stdout", limit)
    assert [path.name for path in tmp_path.iterdir()] == ["stdout"]


def test_assembling_that_crashed_after_the_file_was_whole_loses_nothing(tmp_path: Path) -> None:
    output = CappedOutput(tmp_path / "stdout", 20)
    output.write(bytes(range(100)))
    output.close()
    left = segment_path(tmp_path / "stdout", 8)
    kept = left.read_bytes()
    assemble(tmp_path / "stdout", 20)
    whole = (tmp_path / "stdout").read_bytes()
    left.write_bytes(kept)
    assemble(tmp_path / "stdout", 20)
    assert (tmp_path / "stdout").read_bytes() == whole
    assert not left.exists()


def test_a_full_disk_ends_keeping_not_the_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capsule.host.output._create", lambda path: os.open("/dev/full", os.O_WRONLY))
    output = CappedOutput(tmp_path / "stdout", 100)
    output.write(b"x" * 10)
    output.write(b"y" * 10)
    assert "No space left" in (output.failure or "")
    output.close()


def test_a_pipe_that_a_trial_planted_holds_nobody_up(tmp_path: Path) -> None:
    """What stands where the overflow is to go is not followed and not waited for: keeping ends, not the trial."""
    os.mkfifo(segment_path(tmp_path / "stdout", 0))
    output = CappedOutput(tmp_path / "stdout", 4)
    output.write(b"123456")
    assert output.failure is not None
    output.close()

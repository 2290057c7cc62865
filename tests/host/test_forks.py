"""Processes forked off this one: what they print, what they hold back, and how they end."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from capsule.core.errors import MachineError
from capsule.host.forks import fork_helper, name_process


def status_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_what_a_helper_prints_is_appended_to_its_log_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the parent has put something else in the place of its streams, and left text in their buffers."""
    log = tmp_path / "log"
    log.write_text("before\n")
    with (tmp_path / "other").open("w") as other:
        monkeypatch.setattr(sys, "stdout", other)
        monkeypatch.setattr(sys, "stderr", other)
        other.write("of the parent\n")

        def speak() -> int:
            print("printed")
            print("said", file=sys.stderr)
            os.write(2, b"written\n")
            assert os.read(0, 1) == b""
            return 7

        assert status_of(fork_helper(speak, keep=(), dies_with_parent=False, log=log)) == 7
    monkeypatch.undo()
    assert log.read_text() == "before\nprinted\nsaid\nwritten\n"
    assert (tmp_path / "other").read_text() == "of the parent\n"
    assert capfd.readouterr() == ("", "")


def test_a_helper_that_fails_leaves_its_traceback_in_its_log(tmp_path: Path) -> None:
    def fail() -> None:
        raise MachineError("no luck")

    assert status_of(fork_helper(fail, keep=(), dies_with_parent=False, log=tmp_path / "log")) == 1
    assert "MachineError: no luck" in (tmp_path / "log").read_text()


def test_a_log_that_cannot_be_written_starts_nothing(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        fork_helper(lambda: None, keep=(), dies_with_parent=False, log=tmp_path)


def test_signals_held_back_come_once_they_are_asked_for(tmp_path: Path) -> None:
    def wait() -> int:
        until = time.monotonic() + 10
        while signal.SIGTERM not in signal.sigpending() and time.monotonic() < until:
            time.sleep(0.005)
        (tmp_path / "pending").touch()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        return 3

    pid = fork_helper(wait, keep=(), dies_with_parent=False, held=(signal.SIGTERM,))
    os.kill(pid, signal.SIGTERM)
    assert status_of(pid) == -signal.SIGTERM
    assert (tmp_path / "pending").exists()


def test_a_helper_is_not_taken_for_the_command_that_forked_it(tmp_path: Path) -> None:
    def tell() -> None:
        for words in ("capsule supervisor of a000001", "x" * 10**6, "short"):
            name_process(words)
            with (tmp_path / "shown").open("ab") as shown:
                shown.write(Path("/proc/self/cmdline").read_bytes().rstrip(b"\0") + b"\n")

    before = Path("/proc/self/cmdline").read_bytes()
    assert status_of(fork_helper(tell, keep=(), dies_with_parent=False)) == 0
    shown = (tmp_path / "shown").read_bytes().split()
    assert b" ".join(shown[:4]) == b"capsule supervisor of a000001"
    assert shown[4].strip(b"x") == b""
    assert 0 < len(shown[4]) < 10**6
    assert shown[5:] == [b"short"]
    assert Path("/proc/self/cmdline").read_bytes() == before

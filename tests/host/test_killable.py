"""Work in a process that can be given up: what comes back, what does not stay, and how long a caller is held."""

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from capsule.core.errors import BusyError, CapsuleError, MachineError
from capsule.host import killable
from capsule.host.devices.base import DeviceLostError
from capsule.host.forks import fork_helper
from capsule.host.killable import call
from capsule.host.process import descendants, read_stat

LONG = 60.0


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """No test leaves a process or a descriptor behind."""
    before = descriptors()
    yield
    assert descriptors() == before
    until = time.monotonic() + 5
    while killable._left and time.monotonic() < until:
        killable._reap_left()
        time.sleep(0.01)
    assert not killable._left


def descriptors() -> dict[int, str]:
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found[int(path.name)] = str(path.readlink())
    return {number: target for number, target in found.items() if not target.startswith("/proc/")}


def gone(pid: int) -> bool:
    until = time.monotonic() + 5
    while time.monotonic() < until:
        stat = read_stat(pid)
        if stat is None or not stat.alive:
            return True
        time.sleep(0.01)
    return False


def fail(error: BaseException) -> Any:
    raise error


def test_the_value_comes_back_from_another_process() -> None:
    here = os.getpid()
    value, pid, parent = call(lambda: ({"a": (1, None)}, os.getpid(), os.getppid()), LONG)
    assert value == {"a": (1, None)}
    assert pid != here == parent
    assert read_stat(pid) is None


def test_a_value_larger_than_a_channel_comes_back_whole() -> None:
    data = call(lambda: os.urandom(5_000_000), LONG)
    assert len(data) == 5_000_000
    assert len(set(data)) == 256


def test_what_the_work_changes_stays_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CAPSULE_TEST_WORD", "ours")

    def work() -> str:
        os.environ.clear()
        os.environ["CAPSULE_TEST_WORD"] = "theirs"
        os.chdir("/")
        return os.environ["CAPSULE_TEST_WORD"]

    where = Path.cwd()
    assert call(work, LONG) == "theirs"
    assert os.environ["CAPSULE_TEST_WORD"] == "ours"
    assert Path.cwd() == where


@pytest.mark.parametrize(
    "error", [MachineError("no", hint="do"), BusyError("held"), DeviceLostError("gone", hint="look")]
)
def test_an_error_of_ours_is_raised_as_it_was(error: CapsuleError) -> None:
    with pytest.raises(type(error)) as raised:
        call(lambda: fail(error), LONG)
    assert (raised.value.message, raised.value.hint) == (error.message, error.hint)


@pytest.mark.parametrize("error", [ZeroDivisionError("x"), KeyboardInterrupt(), SystemExit(0)])
def test_any_other_error_is_a_defect_with_its_traceback(error: BaseException) -> None:
    with pytest.raises(RuntimeError, match=f"(?s)in fail.*{type(error).__name__}"):
        call(lambda: fail(error), LONG)


def test_a_value_that_cannot_be_sent_is_a_defect() -> None:
    with pytest.raises(RuntimeError, match="pickle"):
        call(lambda: threading.Lock(), LONG)


def test_work_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    noted = tmp_path / "pid"

    def work() -> None:
        noted.write_text(str(os.getpid()))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        time.sleep(LONG)

    began = time.monotonic()
    with pytest.raises(MachineError, match=r"the driver did not answer within 0\.5 s") as late:
        call(work, 0.5)
    assert 0.5 <= time.monotonic() - began < 5
    assert late.value.hint
    assert gone(int(noted.read_text()))


def test_a_child_that_cannot_be_killed_does_not_hold_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that sleeps in the kernel outlives SIGKILL: it is left to itself and collected when it ends."""
    real = os.kill
    spared: list[int] = []
    monkeypatch.setattr(killable.os, "kill", lambda pid, number: spared.append(pid))
    began = time.monotonic()
    with pytest.raises(MachineError, match="did not answer"):
        call(lambda: time.sleep(LONG), 0.1)
    assert time.monotonic() - began < 5
    assert killable._left == set(spared)
    assert call(lambda: 7, LONG) == 7
    assert killable._left == set(spared)
    real(spared[0], signal.SIGKILL)
    assert gone(spared[0])


def test_a_child_that_answers_and_then_hangs_does_not_hold_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may hang closing a driver's descriptors after the answer was written."""
    monkeypatch.setattr(killable.os, "_exit", lambda status: time.sleep(LONG))
    began = time.monotonic()
    assert call(lambda: os.getpid(), LONG) > 0
    assert time.monotonic() - began < 5
    (left,) = killable._left
    os.kill(left, signal.SIGKILL)
    assert gone(left)


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (lambda: os._exit(3), "exited with status 3"),
        (lambda: os._exit(0), "exited with status 0"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was ended by SIGKILL"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "was ended by SIGSEGV"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "was ended by SIGTERM"),
    ],
)
def test_a_child_that_dies_is_an_error_of_the_machine(end: Callable[[], None], words: str) -> None:
    began = time.monotonic()
    with pytest.raises(MachineError, match=words):
        call(end, LONG)
    assert time.monotonic() - began < 10


def test_a_child_that_was_collected_by_somebody_else_is_no_trouble() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel collects
    try:
        assert call(lambda: 5, LONG) == 5
        with pytest.raises(MachineError, match="went away before it answered"):
            call(lambda: os._exit(0), LONG)
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_the_child_holds_nothing_of_its_parents(tmp_path: Path) -> None:
    """A hung child keeps no lease, no pipe and no terminal."""
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    one, other = socket.socketpair()
    try:
        kept = call(descriptors, LONG)
        assert {number: kept.pop(number) for number in range(3)} == dict.fromkeys(range(3), "/dev/null")
        assert [target.partition(":")[0] for target in kept.values()] == ["socket"]
    finally:
        for number in (lock, reader, writer):
            os.close(number)
        one.close()
        other.close()


def test_what_the_driver_prints_goes_nowhere(capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> int:
        os.write(1, b"from the driver\n")
        os.write(2, b"from the driver\n")
        return 1

    assert call(work, LONG) == 1
    assert capfd.readouterr() == ("", "")


def test_standard_streams_may_be_closed() -> None:
    """A daemon has none; the answer's channel may then have one of their numbers."""
    code = (
        "import os; [os.close(n) for n in (0, 1, 2)]\n"
        "from capsule.host.killable import call\n"
        "os._exit(call(lambda: 9, 60))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9


def test_output_that_waits_in_the_parents_buffer_is_written_once() -> None:
    code = "from capsule.host.killable import call\nprint('once')\ncall(lambda: print('never'), 60)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout == b"once\n"


def test_the_child_takes_signals_as_a_new_process_does() -> None:
    """No handler of the parent's runs in it, and none of its signals wakes the parent's loop."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    heard: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, lambda number, frame: heard.append(number)) for number in numbers}
    wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:

        def work() -> tuple[list[Any], int, set[int]]:
            handlers = [signal.getsignal(number) for number in (*numbers, signal.SIGINT)]
            return handlers, signal.set_wakeup_fd(-1), signal.pthread_sigmask(signal.SIG_BLOCK, ())

        handlers, theirs, blocked = call(work, LONG)
        assert handlers == [signal.SIG_DFL] * 3
        assert (theirs, blocked) == (-1, set())
        with pytest.raises(MachineError, match="SIGUSR1"):
            call(lambda: os.kill(os.getpid(), signal.SIGUSR1), LONG)
        assert heard == []
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == [signal.SIGUSR1]
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        reader.close()
        writer.close()


def test_a_signal_of_the_callers_does_not_end_the_wait_or_change_its_limit() -> None:
    ticks: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: ticks.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    try:
        assert call(lambda: time.sleep(0.4) or 3, LONG) == 3
        began = time.monotonic()
        with pytest.raises(MachineError, match="did not answer"):
            call(lambda: time.sleep(LONG), 0.4)
        assert 0.4 <= time.monotonic() - began < 5
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert ticks


def test_a_caller_that_is_interrupted_leaves_no_child() -> None:
    def work() -> None:
        os.kill(os.getppid(), signal.SIGUSR1)
        time.sleep(LONG)

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    others = {item.pid for item in descendants(os.getpid())}
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        for _ in range(50):
            with pytest.raises(KeyboardInterrupt):
                call(work, LONG)
            assert [item for item in descendants(os.getpid()) if item.alive and item.pid not in others] == []
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_caller_that_is_interrupted_before_it_knows_its_child_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """No mask of the caller's prevents it: another of its threads can take the signal."""
    children = []

    def interrupted(*arguments: Any, **options: Any) -> int:
        children.append(fork_helper(*arguments, **options))
        raise KeyboardInterrupt

    monkeypatch.setattr(killable, "fork_helper", interrupted)
    with pytest.raises(KeyboardInterrupt):
        call(lambda: time.sleep(LONG), LONG)
    assert gone(children[0])
    os.waitpid(children[0], 0)


def test_the_child_dies_with_its_parent(tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    code = (
        "import os, pathlib, sys, time\nfrom capsule.host.killable import call\n"
        "def work():\n    pathlib.Path(sys.argv[1]).write_text(str(os.getpid()) + ' ')\n    time.sleep(60)\n"
        "call(work, 60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(noted)])
    while not (noted.exists() and noted.read_text().endswith(" ")):
        time.sleep(0.01)
    child = int(noted.read_text())
    assert read_stat(child) is not None
    parent.kill()
    parent.wait()
    assert gone(child)


def test_calls_nest_and_run_in_threads() -> None:
    assert call(lambda: call(lambda: 4, LONG) + 1, LONG) == 5
    found: list[int] = []
    threads = [threading.Thread(target=lambda n=n: found.append(call(lambda: n * n, LONG))) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [0, 1, 4, 9, 16, 25]


def test_a_machine_without_room_for_a_process_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(killable.os, "fork", lambda: fail(BlockingIOError(11, "Resource temporarily unavailable")))
    with pytest.raises(MachineError, match="temporarily unavailable"):
        call(lambda: 1, LONG)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()

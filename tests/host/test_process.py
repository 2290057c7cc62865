"""Processes: exact names, whole trees, and output that is kept within its limit."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from capsule.host import process
from capsule.host.attempt_tree import AttemptTree
from capsule.host.output import CappedOutput, assemble, half_of, segment_path
from capsule.host.process import (
    Stat,
    TreeRecorder,
    descendants,
    end_tree,
    identify,
    is_alive,
    read_stat,
    recorded,
    send,
    survivors,
    with_environment,
)
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


@pytest.fixture(params=["listed", "all"])
def walk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to walk: children as the kernel lists them, if it does, and every process of the machine."""
    if request.param == "all":
        monkeypatch.setattr(process, "CHILDREN", Path("/missing"))


@pytest.mark.usefixtures("walk")
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


@pytest.mark.usefixtures("walk")
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


# Trees that change while they are looked at.


class FakeProc:
    """A `/proc` of a few processes, and what happens in it before and after the nth look at one of them."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.children: dict[int, list[int]] = {}
        self.before: dict[tuple[int, int], list[tuple[int, int, int, str]]] = {}
        self.after: dict[tuple[int, int], list[tuple[int, int, int, str]]] = {}
        self.looks: dict[int, int] = {}
        (root / "children").touch()
        monkeypatch.setattr(process, "PROC", root)
        monkeypatch.setattr(process, "CHILDREN", root / "children")
        real = process.read_stat

        def look(pid: int) -> Stat | None:
            self.looks[pid] = self.looks.get(pid, 0) + 1
            for changed in self.before.get((pid, self.looks[pid]), ()):
                self.put(*changed)
            found = real(pid)
            for changed in self.after.get((pid, self.looks[pid]), ()):
                self.put(*changed)
            return found

        monkeypatch.setattr(process, "read_stat", look)

    def put(self, pid: int, parent: int, start: int, state: str = "S") -> None:
        """Make or change a process; only its present parent lists it."""
        (self.root / str(pid) / "task" / str(pid)).mkdir(parents=True, exist_ok=True)
        fields = [state, parent, *[0] * 15, 1, 0, start, 0]
        (self.root / str(pid) / "stat").write_text(f"{pid} (x) {' '.join(map(str, fields))}\n")
        self.children = {key: [item for item in below if item != pid] for key, below in self.children.items()}
        self.children.setdefault(parent, []).append(pid)
        for key in {*self.children, pid}:
            if (self.root / str(key) / "task" / str(key)).exists():
                text = " ".join(map(str, self.children.get(key, ())))
                (self.root / str(key) / "task" / str(key) / "children").write_text(text)


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeProc:
    made = FakeProc(tmp_path, monkeypatch)
    made.put(10, 1, 100)
    return made


def pids(found: list[Stat]) -> list[int]:
    return [item.pid for item in found]


def test_one_that_hands_its_child_over_and_ends_does_not_hide_it(proc: FakeProc) -> None:
    """20 lives when the root's children are read, and is dead and childless when it is looked at itself."""
    proc.put(20, 10, 200)
    proc.put(30, 20, 300)
    proc.before[20, 1] = [(20, 10, 200, "Z"), (30, 10, 300, "S")]
    assert pids(descendants(10)) == [30]


def test_a_tree_of_the_dead_is_empty(proc: FakeProc) -> None:
    proc.put(20, 10, 200, "Z")
    proc.put(21, 10, 200, "X")
    assert descendants(10) == []
    assert descendants(999) == []


def test_a_pid_that_became_a_strangers_is_not_of_the_tree(proc: FakeProc) -> None:
    proc.put(20, 10, 200)
    proc.put(30, 20, 300)
    proc.put(50, 1, 500)
    (proc.root / "10/task/10/children").write_text("20 50")
    assert pids(descendants(10)) == [20, 30], "50 is the child of another"


def test_the_children_of_a_pids_next_owner_are_not_of_the_tree(proc: FakeProc) -> None:
    """After its first look 20 is gone, and its pid belongs to a stranger with a child of its own."""
    proc.put(20, 10, 200)
    proc.after[20, 1] = [(20, 1, 900, "S"), (60, 20, 901, "S")]
    assert pids(descendants(10)) == [20]
    assert descendants(10) == []


def test_one_older_than_its_parent_is_the_child_of_an_earlier_owner_of_that_pid(proc: FakeProc) -> None:
    (proc.root / "children").unlink()
    proc.put(20, 10, 200)
    proc.put(30, 20, 300)
    proc.put(31, 20, 199)
    assert pids(descendants(10)) == [20, 30]


# Ending.

COMET = """
import os, sys, time
for _ in range(400):
    if os.fork() > 0:
        os._exit(0)
open(sys.argv[1], "w").close()
time.sleep(60)
"""


def below_a_subreaper(code: str, *arguments: str) -> object:
    """Run code in a subreaper of a session of its own, as a supervisor is one, and return the JSON that it prints."""
    start = (
        "import json, os, signal, subprocess, sys, time\n"
        "from capsule.host.process import *\n"
        "become_subreaper()\n"
        "me = os.getpid()\n"
        "def collect():\n"
        "    try:\n"
        "        while os.waitpid(-1, os.WNOHANG)[0]: pass\n"
        "    except ChildProcessError: pass\n"
    )
    argv = [sys.executable, "-c", start + code, *arguments]
    done = subprocess.run(argv, stdout=subprocess.PIPE, timeout=120, start_new_session=True, check=True)
    return json.loads(done.stdout)


def test_a_tree_that_is_one_step_ahead_never_looks_empty(tmp_path: Path) -> None:
    """Each process starts the next one and ends; the last one stays: a live one is in the tree at every moment."""
    code = (
        "comet, landed = sys.argv[1:]\n"
        "subprocess.Popen([sys.executable, '-c', comet, landed], start_new_session=True)\n"
        "looks = []\n"
        "while not os.path.exists(landed):\n"
        "    looks.append(len(descendants(me)))\n"
        "    collect()\n"
        "left = end_tree(lambda: descendants(me), seconds=10)\n"
        "print(json.dumps([len(looks) > 10, 0 in looks, len(left)]))\n"
    )
    assert below_a_subreaper(code, COMET, str(tmp_path / "landed")) == [True, False, 0]


STORM = """
import mmap, os, signal, sys, time

until = time.monotonic() + 40
spent = mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 8)

def fork():
    # Whoever finds the budget spent ends: a storm that nobody ends is over when this is used up.
    count = int.from_bytes(spent[:8], "little") + 1
    spent[:8] = count.to_bytes(8, "little")
    if count > int(sys.argv[2]) or time.monotonic() > until:
        os._exit(0)
    try:
        pid = os.fork()
    except OSError:
        os._exit(0)
    if pid == 0:
        signal.alarm(40)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if count % 3 == 0:
            os.setsid()
    return pid

def orphaned(parent):
    return os.getppid() != parent

def member(depth):
    parent, children = os.getppid(), set()
    while True:
        while len(children) < 6:
            pid = fork()
            if pid == 0:
                return member(depth + 1) if depth < 2 else leaf()
            children.add(pid)
        ended = os.waitpid(-1, os.WNOHANG)[0]
        children.discard(ended)
        if not ended:
            time.sleep(0.002)
        if orphaned(parent):
            parent = os.getppid()
            if fork() == 0:
                return member(0)

def leaf():
    parent = os.getppid()
    while True:
        pid = fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        if orphaned(parent):
            parent = os.getppid()
            if fork() == 0:
                return member(2)

member(0)
"""


@pytest.mark.parametrize("helper", ["sampler", "watchdog"])
def test_a_helpers_pid_belongs_to_the_tree_once_the_helper_was_collected(tmp_path: Path, helper: str) -> None:
    """Whoever of the tree got it since is seen like all others, or nobody would end it."""
    child = subprocess.Popen(["sleep", "60"])
    tree = AttemptTree(tmp_path, "t", 5)
    setattr(tree, helper, child.pid)
    try:
        assert child.pid not in [item.pid for item in tree.live()]
        tree.collected(child.pid)
        assert child.pid in [item.pid for item in tree.live()]
    finally:
        child.kill()
        child.wait()


def test_a_fork_storm_is_ended_whole(tmp_path: Path) -> None:
    """More than 200 members, which ignore SIGTERM, fork all the time and replace whoever is killed.

    Killing one after another lets it grow into the thousands. It would end by itself after 30 000 forks: that it was
    ended before is part of what is shown.
    """
    spent = tmp_path / "spent"
    spent.write_bytes(bytes(8))
    code = (
        "storm, spent, budget = sys.argv[1:]\n"
        "subprocess.Popen([sys.executable, '-c', storm, spent, budget], start_new_session=True)\n"
        "until = time.monotonic() + 20\n"
        "while len(before := descendants(me)) < 150 and time.monotonic() < until: time.sleep(0.1)\n"
        "left = end_tree(lambda: (collect(), descendants(me))[1], seconds=15)\n"
        "forks = int.from_bytes(open(spent, 'rb').read(), 'little')\n"
        "time.sleep(0.3)\n"
        "print(json.dumps([len(before) >= 150, forks <= int(budget), len(left), len(descendants(me))]))\n"
    )
    assert below_a_subreaper(code, STORM, str(spent), "30000") == [True, True, 0, 0]


def test_one_that_left_the_tree_after_it_was_seen_is_ended_too(sleeper: subprocess.Popen[bytes]) -> None:
    seen = read_stat(sleeper.pid)
    assert seen is not None
    lists = [[seen]]
    assert end_tree(lambda: lists.pop() if lists else [], seconds=10) == []
    assert sleeper.wait(10) == -signal.SIGKILL


def test_a_stranger_with_the_pid_of_one_that_was_seen_is_neither_stopped_nor_killed(
    sleeper: subprocess.Popen[bytes],
) -> None:
    """The list never gets empty: what is left is returned when the time is over, as with one that cannot be killed."""
    seen = eventually(lambda: (stat := read_stat(sleeper.pid)) and stat.state == "S" and stat)
    earlier = Stat(seen.pid, seen.parent, seen.state, seen.start_ticks - 1, seen.threads)
    start = time.monotonic()
    assert end_tree(lambda: [earlier], seconds=0.2) == [earlier]
    assert 0.2 <= time.monotonic() - start < 5
    now = read_stat(sleeper.pid)
    assert now is not None
    assert (now.state, sleeper.poll()) == ("S", None)


def test_there_is_one_round_without_any_time(sleeper: subprocess.Popen[bytes]) -> None:
    end_tree(lambda: [item for item in descendants(os.getpid()) if item.pid == sleeper.pid], seconds=0)
    assert sleeper.wait(10) == -signal.SIGKILL


# The record of a tree.


def some(*starts: int) -> list[Stat]:
    return [Stat(1_000 + start, 1, "S", start, 1) for start in starts]


def test_a_tree_is_written_only_when_it_changed(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    path = tmp_path / "tree.json"
    recorder = TreeRecorder(path)
    seen = read_stat(sleeper.pid)
    assert seen is not None
    assert recorder.record([seen]) is True
    assert recorded(path) == [identify(sleeper.pid)]
    first = path.stat()
    assert recorder.record([seen]) is False
    assert path.stat().st_mtime_ns == first.st_mtime_ns
    assert recorder.record([]) is False, "it lives, so it is kept although it is in the tree no more"
    sleeper.kill()
    sleeper.wait(10)
    assert recorder.record([]) is True
    assert recorded(path) == []
    assert [left.name for left in tmp_path.iterdir()] == ["tree.json"]


def test_the_newest_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "RECORDED_MAX", 2)
    path = tmp_path / "tree.json"
    TreeRecorder(path).record(some(30, 10, 20))
    assert [item.start_ticks for item in recorded(path)] == [20, 30]


def test_a_whole_record_is_within_what_is_read(tmp_path: Path) -> None:
    path = tmp_path / "tree.json"
    TreeRecorder(path).record([Stat(4_194_304, 1, "S", 10**14 + start, 1) for start in range(process.RECORDED_MAX)])
    assert path.stat().st_size < process.RECORDED_BYTES_MAX
    assert len(recorded(path)) == process.RECORDED_MAX


def test_no_record_or_a_damaged_one_names_nobody(tmp_path: Path) -> None:
    path = tmp_path / "tree.json"
    assert recorded(path) == []
    TreeRecorder(path).record(some(1))
    whole = path.read_bytes()
    for damaged in (b"", whole[:-1], whole.replace(b"start_ticks", b"start"), b"\xff" + whole, b"[]"):
        path.write_bytes(damaged)
        assert recorded(path) == []
    path.unlink()
    os.mkfifo(path)
    assert recorded(path) == []


def test_a_record_that_cannot_be_written_leaves_the_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "tree.json"
    recorder = TreeRecorder(path)
    with pytest.raises(FileNotFoundError):
        recorder.record(some(1))
    path.parent.mkdir()
    assert recorder.record(some(1)) is True, "it is tried again"
    (tmp_path / "taken" / "below").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        TreeRecorder(tmp_path / "taken").record(some(1))
    assert sorted(left.name for left in tmp_path.iterdir()) == ["folder", "taken"]


def test_survivors_are_exactly_those_recorded_and_what_is_below_them(sleeper: subprocess.Popen[bytes]) -> None:
    identity = identify(sleeper.pid)
    assert [item.pid for item in survivors([identity, identity])] == [sleeper.pid]
    assert survivors([identity.model_copy(update={"start_ticks": identity.start_ticks - 1})]) == []
    assert survivors([identity.model_copy(update={"boot_id": "another"})]) == []
    assert {sleeper.pid, os.getpid()} <= {item.pid for item in survivors([identify(os.getpid())])}
    sleeper.kill()
    eventually(lambda: survivors([identity]) == [])


def test_a_runaway_is_found_by_its_record_after_all_above_it_was_killed(tmp_path: Path) -> None:
    """It was forked twice, has a session of its own, an empty environment and no descriptor: nothing else names it."""
    path = tmp_path / "tree.json"
    code = (
        "from pathlib import Path\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        os.closerange(0, 100)\n"
        "        os.execve('/bin/sleep', ['sleep', '60'], {})\n"
        "    os._exit(0)\n"
        "while not [item for item in descendants(me) if item.parent == me and open(f'/proc/{item.pid}/comm').read() == "
        "'sleep\\n']: collect()\n"
        "TreeRecorder(Path(sys.argv[1])).record(descendants(me))\n"
        "os.kill(me, signal.SIGKILL)\n"
    )
    with pytest.raises(subprocess.CalledProcessError):
        below_a_subreaper(code, str(path))
    (identity,) = recorded(path)
    (runaway,) = survivors([identity])
    assert runaway.pid == identity.pid
    assert (Path("/proc") / str(runaway.pid) / "environ").read_bytes() == b""
    assert end_tree(lambda: survivors(recorded(path)), seconds=10) == []
    assert not is_alive(identity)


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

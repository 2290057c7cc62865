"""A cgroup of one's own: real where this machine allows it, stood in for by a folder where a controller is needed."""

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from capsule.host.cgroup import Cgroup, create, create_below, own_folders
from tests.host.conftest import eventually

RUNAWAY = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 100)
        os.execve("/bin/sleep", ["sleep", "60"], {})
    os._exit(0)
time.sleep(60)
"""


def possible() -> bool:
    """Whether a cgroup can be made below this process's own, found out by other means than the code under test."""
    own = [line[4:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::/")]
    points = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines() if line.split()[2] == "cgroup2"]
    for parent in (Path(point) / inside for point in points for inside in own):
        probe = parent / f"capsule-probe-{secrets.token_hex(8)}"
        try:
            probe.mkdir()
        except OSError:
            continue
        there = (probe / "cgroup.kill").exists()
        probe.rmdir()
        if there and f"\n{os.getpid()}\n" in "\n" + (parent / "cgroup.procs").read_text():
            return True
    return False


def runs_sleep(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text() == "sleep\n"
    except OSError:
        return False


def test_a_cgroup_ends_what_left_its_session_its_parent_and_its_environment() -> None:
    """Where no cgroup can be made, none is made, and nothing is raised: that is then all there is to promise."""
    made = create(f"capsule-test-{secrets.token_hex(8)}")
    assert (made is not None) == possible()
    if made is None:
        return
    trial = None
    try:
        assert made.processes() == []
        trial = subprocess.Popen([sys.executable, "-c", RUNAWAY], preexec_fn=made.join)
        runaway = eventually(lambda: [pid for pid in made.processes() if runs_sleep(pid)])
        assert set(made.processes()) >= {trial.pid, *runaway}
        assert os.getpid() not in made.processes()
        assert create(made.path.name) is None, "the name is taken"
        assert made.remove() is False, "a cgroup with live processes stays"
        assert made.kill() is True
        assert trial.wait(10) == -9
        eventually(lambda: made.processes() == [])
    finally:
        made.kill()
        if trial is not None:
            trial.wait(10)
        assert eventually(made.remove)
    assert not made.path.exists()
    assert (made.processes(), made.kill(), made.join(), made.remove()) == ([], False, False, True)


def test_what_moved_into_a_cgroup_further_down_is_found_and_ended() -> None:
    made = create(f"capsule-test-{secrets.token_hex(8)}")
    assert (made is not None) == possible()
    if made is None:
        return
    below = Cgroup(made.path / "a" / "b")
    below.path.mkdir(parents=True)
    trial = subprocess.Popen(["sleep", "60"], preexec_fn=below.join)
    try:
        assert made.processes() == [trial.pid]
        assert made.kill() is True
        assert trial.wait(10) == -9
    finally:
        trial.kill()
        trial.wait()
        assert eventually(made.remove)
    assert not made.path.exists()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/tmp", "cgroup.procs", "a\0b"])
def test_a_name_that_cannot_be_made_makes_nothing(name: str) -> None:
    assert create(name) is None


def test_a_folder_that_is_no_cgroup_makes_none(tmp_path: Path) -> None:
    (tmp_path / "cgroup.procs").write_text("")
    assert create_below(tmp_path, "attempt") is None
    assert [path.name for path in tmp_path.iterdir()] == ["cgroup.procs"], "nothing is left behind"
    assert create_below(tmp_path / "missing", "attempt") is None


def test_limits_and_counts_are_those_of_the_controllers(tmp_path: Path) -> None:
    stand_in = Cgroup(tmp_path)
    assert stand_in.limit_processes(300) is False
    assert (stand_in.denied_forks(), stand_in.oom_kills()) == (None, None)
    (tmp_path / "pids.max").write_text("max\n")
    (tmp_path / "pids.events").write_text("max 17\n")
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 5\noom 2\noom_kill 1\noom_group_kill 0\n")
    assert stand_in.limit_processes(300) is True
    assert (tmp_path / "pids.max").read_text().startswith("300")
    assert (stand_in.denied_forks(), stand_in.oom_kills()) == (17, 1)
    (tmp_path / "memory.events").write_text("oom_kill many\noom_kill\n")
    assert stand_in.oom_kills() is None


def test_the_members_of_every_folder_are_counted_once(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "cgroup.procs").write_text("12\n7\n0\n")
    (tmp_path / "below" / "cgroup.procs").write_text("12\n9\n")
    assert Cgroup(tmp_path).processes() == [7, 9, 12]
    assert Cgroup(tmp_path / "missing").processes() == []


UNIFIED = "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
HYBRID = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
38 31 0:36 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
CONTAINER = "812 800 0:26 /docker/abc /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw"
BLANK = r"30 24 0:26 / /mnt/a\040b rw - cgroup2 cgroup2 rw"


@pytest.mark.parametrize(
    ("mounts", "own", "found"),
    [
        (UNIFIED, "0::/user.slice/x.scope\n", ["/sys/fs/cgroup/user.slice/x.scope"]),
        (UNIFIED, "0::/\n", ["/sys/fs/cgroup"]),
        (HYBRID, "8:pids:/a\n1:cpu:/\n0::/b\n", ["/sys/fs/cgroup/unified/b"]),
        (CONTAINER, "0::/docker/abc/d\n", ["/sys/fs/cgroup/d"]),
        (CONTAINER, "0::/docker/abcd\n", []),
        (UNIFIED, "0::/../other\n", []),
        (BLANK, "0::/c\n", ["/mnt/a b/c"]),
        (UNIFIED, "8:pids:/a\n", []),
        ("", "0::/\n", []),
        (UNIFIED, "", []),
        ("torn - cgroup2", "0::/\n", []),
    ],
)  # fmt: skip
def test_the_own_cgroup_is_found_through_its_mount(mounts: str, own: str, found: list[str]) -> None:
    assert own_folders(mounts, own) == [Path(path) for path in found]

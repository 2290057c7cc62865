"""Packing and reading where things go wrong: interrupts, a full disk, little memory, another process beside."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from container_forge import pack_with_writer
from container_vectors import LONG, RANDOM

from capsule.archive import layout, writer
from capsule.archive.reader import examine
from capsule.archive.writer import CapsuleWriter
from tests.conftest import Capsule
from tests.study import make_study

ROOT = Path(__file__).parents[2]
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc or limits a process as Linux does")


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study that ran, with 16 MiB of sources that do not compress; tests must not change it."""
    folder = tmp_path_factory.mktemp("study")
    protocol = make_study(folder / "study")
    (protocol.parent / "noise.bin").write_bytes(random.Random(7).randbytes(16 << 20))
    environment = {**os.environ, "CAPSULE_LEASE_DIR": str(folder / "leases")}
    for command in ("freeze", "run"):
        subprocess.run([*COMMAND, command, protocol], env=environment, check=True, capture_output=True)
    return protocol


COMMAND = (sys.executable, "-m", "capsule")


def pack_command(protocol: Path, output: Path) -> list[str]:
    return [*COMMAND, "pack", str(protocol), "--output", str(output)]


def is_writing(process: subprocess.Popen[bytes], folder: Path) -> bool:
    """Whether the process has a file of the folder open that already holds a frame, whatever its name is."""
    descriptors = Path("/proc", str(process.pid), "fd")
    try:
        opened = [item for item in descriptors.iterdir() if folder in item.readlink().parents]
        return any(item.stat().st_size > layout.FRAME_SIZE for item in opened)
    except OSError:
        return False


@LINUX
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)], ids=["int", "term", "kill"]
)
def test_an_interrupted_pack_leaves_nothing(study: Path, tmp_path: Path, number: signal.Signals, code: int) -> None:
    """A signal in the midst of writing, and one at any moment: no capsule and no part of one is left."""
    with CapsuleWriter(tmp_path / "probe.capsule") as probe:
        has_unnamed = list(tmp_path.iterdir()) == []
        probe.abort()
    if number == signal.SIGKILL and not has_unnamed:
        pytest.skip("this file system has no unnamed files: a kill leaves a part that says so in its name")
    for attempt in range(9):
        process = subprocess.Popen(pack_command(study, tmp_path / "x.capsule"), stderr=subprocess.DEVNULL)
        while not is_writing(process, tmp_path):
            assert process.poll() is None, "packed before it was seen to write"
        time.sleep(random.random() / 20 if attempt else 0)
        process.send_signal(number)
        ended = process.wait()
        left = [*tmp_path.iterdir()]
        if left:  # the signal came after the capsule was whole
            assert left == [tmp_path / "x.capsule"]
            assert examine(left[0].open("rb")).sealed is not None
            left[0].unlink()
        elif attempt:
            assert ended == code
            return
    raise AssertionError("no signal came in time")


@pytest.mark.parametrize("named", [False, True], ids=["unnamed", "named"])
def test_no_part_is_left_with_and_without_unnamed_files(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new file, one in the place of another, and one given up; the mode follows the umask."""
    if named:
        monkeypatch.setattr(writer, "_open_unnamed", lambda _: None)
    path = tmp_path / "x.capsule"
    for level in (1, 3):
        with CapsuleWriter(path, level=level) as target:
            for name, content in LONG:
                target.add(name, len(content), content)
            target.close()
        assert [*tmp_path.iterdir()] == [path]
        assert path.read_bytes() == pack_with_writer(LONG, level=level)
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask
    with CapsuleWriter(path):
        assert len([*tmp_path.iterdir()]) == 1 + bool(named or writer._open_unnamed(tmp_path) is None)
    assert [*tmp_path.iterdir()] == [path]
    assert path.read_bytes() == pack_with_writer(LONG, level=3)


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """Mount a disk of so many bytes, or skip the test."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small disk needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def assert_full(run: subprocess.CompletedProcess[str], folder: Path) -> None:
    assert run.returncode == 5, run
    assert "cannot write the capsule" in run.stderr
    assert "hint: nothing was left behind" in run.stderr
    assert "Traceback" not in run.stderr
    assert [*folder.iterdir()] == []


@LINUX
@pytest.mark.parametrize("size", [1 << 16, 12 << 20], ids=["64-KiB", "12-MiB"])
def test_a_full_disk_ends_packing_cleanly(study: Path, tmp_path: Path, size: int) -> None:
    with small_disk(tmp_path / "disk", size) as disk:
        run = subprocess.run(pack_command(study, disk / "x.capsule"), capture_output=True, text=True, check=False)
        assert_full(run, disk)


@LINUX
def test_a_limit_of_file_size_ends_packing_cleanly(study: Path, tmp_path: Path) -> None:
    command = ["bash", "-c", 'ulimit -f 4096; exec "$@"', "bash", *pack_command(study, tmp_path / "x.capsule")]
    assert_full(subprocess.run(command, capture_output=True, text=True, check=False), tmp_path)


@LINUX
def test_verify_needs_far_less_memory_than_the_capsule_holds(tmp_path: Path) -> None:
    """A capsule of 302 MiB is judged, from a file and a pipe, where 64 MiB more than at the start can be had."""
    path = tmp_path / "x.capsule"
    misnamed = "5-sources/" + "a" * 64
    with CapsuleWriter(path, self_check=False) as target:
        target.add("3-attempts/a000001/stdout", 200 << 20, (RANDOM[: 1 << 20] for _ in range(200)))
        target.add("4-records/rows.parquet", 2 << 20, RANDOM[: 2 << 20])
        target.add(misnamed, 100 << 20, (bytes(1 << 20) for _ in range(100)))
        target.close()
    code = (
        "import io, resource, sys\n"
        "import pyarrow.parquet\n"
        "from capsule.steps.verify import verify\n"
        f"verify(io.BytesIO({pack_with_writer(LONG)[:1000]!r}))\n"
        "used = 1024 * [int(line.split()[1]) for line in open('/proc/self/status') if line.startswith('VmSize')][0]\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)\n"
        "try: bytearray(96 << 20); sys.exit('no limit')\n"
        "except MemoryError: pass\n"
        "verdict = verify(sys.stdin.buffer)\n"
        "print(verdict.integrity, *(finding for check in verdict.checks for finding in check.findings))"
    )

    def run(stdin: object) -> str:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "MALLOC_ARENA_MAX": "1"}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, stdin=stdin, env=environment, capture_output=True, text=True, check=False)  # type: ignore[call-overload]
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    with path.open("rb") as stream, subprocess.Popen(["cat", path], stdout=subprocess.PIPE) as cat:
        found = run(stream)
        assert run(cat.stdout) == found
    assert found.startswith("broken")
    assert f"{misnamed}: expected content with the digest of its name" in found


def test_verify_reads_a_pipe_and_a_file_that_nobody_may_write(study: Path, tmp_path: Path) -> None:
    folder = tmp_path / "shelf"
    folder.mkdir()
    path = folder / "x.capsule"
    subprocess.run(pack_command(study, path), check=True, capture_output=True)
    path.chmod(0o444)
    folder.chmod(0o555)
    try:
        whole = subprocess.run([*COMMAND, "verify", "--json", str(path)], check=True, capture_output=True).stdout
        with subprocess.Popen(["cat", path], stdout=subprocess.PIPE) as cat:
            command = [*COMMAND, "verify", "--json", "-"]
            piped = subprocess.run(command, stdin=cat.stdout, check=True, capture_output=True).stdout
    finally:
        folder.chmod(0o755)
    assert json.loads(whole)["integrity"] == "intact"
    assert json.loads(piped) == json.loads(whole)
    assert [*folder.iterdir()] == [path]


def test_verify_while_another_process_packs_over_the_file(study: Path, tmp_path: Path) -> None:
    """A reader sees the capsule of before or of after, never a part."""
    path = tmp_path / "x.capsule"
    subprocess.run(pack_command(study, path), check=True, capture_output=True)
    places = {path.stat().st_ino}
    process = subprocess.Popen([*pack_command(study, path), "--force"], stdout=subprocess.DEVNULL)
    while process.poll() is None:
        with path.open("rb") as stream:
            found = os.fstat(stream.fileno()).st_ino
            command = [*COMMAND, "verify", "--json", "-"]
            run = subprocess.run(command, stdin=stream, capture_output=True, text=True, check=False)
        assert json.loads(run.stdout)["integrity"] == "intact", run
        places.add(found)
    assert process.returncode == 0
    assert path.stat().st_ino not in places or len(places) == 2
    assert [*tmp_path.iterdir()] == [path]


def test_the_command_writes_the_same_bytes_wherever_it_runs(study: Path, tmp_path: Path) -> None:
    """Zone, locale, hash seed, umask, working folder, and a copy of the workspace in another place and order."""
    first, second = tmp_path / "first.capsule", tmp_path / "second.capsule"
    copy = tmp_path / "elsewhere"
    shutil.copytree(study.parent, copy, symlinks=True)
    subprocess.run(pack_command(study, first), check=True, capture_output=True)
    environment = {**os.environ, "TZ": "Asia/Tokyo", "LC_ALL": "C", "PYTHONHASHSEED": "3", "PYTHONPATH": str(ROOT)}
    relative = pack_command(Path(study.name), Path("..", second.name))
    command = ["bash", "-c", 'umask 077; exec "$@"', "bash", *relative]
    subprocess.run(command, check=True, capture_output=True, env=environment, cwd=copy)
    assert second.read_bytes() == first.read_bytes()


def test_another_capsule_is_replaced_only_by_force(capsule: Capsule, tmp_path: Path) -> None:
    """The same capsule stays untouched; another, shorter or longer one is refused, then replaced."""
    protocol = make_study(tmp_path / "s")
    path = protocol.with_suffix(".capsule")
    for command in ("freeze", "run"):
        assert capsule(command, protocol).code == 0
    assert json.loads(capsule("pack", protocol, "--json").out)["unchanged"] is False
    whole, before = path.read_bytes(), path.stat()
    said = json.loads(capsule("pack", protocol, "--json").out)
    assert (said["unchanged"], said["replaced"]) == (True, False)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert "held the same already" in capsule("pack", protocol).out
    for other in (pack_with_writer(LONG), whole[:-1], whole + b"x"):
        path.write_bytes(other)
        refused = capsule("pack", protocol)
        assert refused.code == 4
        assert "--force" in refused.err
        assert path.read_bytes() == other
    said = json.loads(capsule("pack", protocol, "--force", "--json").out)
    assert (said["unchanged"], said["replaced"]) == (False, True)
    assert path.read_bytes() == whole
    assert sorted(item.name for item in tmp_path.joinpath("s").glob("*.part")) == []

"""What is said where a disk takes no more: the file, its file system, what is left of it, and what to do."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import run

import pytest

from capsule.host import durable
from capsule.host.disk import cannot_write, hint_where_full, is_full, says_full
from tests.conftest import Capsule
from tests.study import make_study


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 2 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(place)]
    if os.getuid() or run(mount, capture_output=True, check=False).returncode:
        pytest.skip("expected the right to mount a file system")
    yield place
    run(["umount", "-l", str(place)], check=True)


def fill(disk: Path, left: int) -> None:
    """Leave so many pages of 4 KiB free."""
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_bsize
    (disk / "fill").write_bytes(bytes(free - left * 4096))


@pytest.mark.parametrize("left", [0, 2, 5, 8, 12, 14])
def test_a_run_on_a_full_disk_says_what_to_free(capsule: Capsule, small_disk: Path, left: int) -> None:
    """At each early moment: exit code 5, a file on the disk, the disk by its place, and then the run goes on."""
    protocol = make_study(small_disk / "study")
    assert capsule("freeze", protocol).code == 0
    fill(small_disk, left)
    said = run(
        [sys.executable, "-m", "capsule", "run", protocol, "--from-frozen"], capture_output=True, text=True, check=False
    )
    assert said.returncode == 5, said
    errors = [line for line in said.stderr.splitlines() if line.startswith("capsule: error: ")]
    assert len(errors) == 1, said.stderr
    assert f"{small_disk}/study/.capsule/study" in errors[0]
    assert "No space left on device" in errors[0] or "no room for its log" in errors[0]
    assert f"capsule: hint: free space on the file system at {small_disk} (0.0 MB left" in said.stderr
    (small_disk / "fill").unlink()
    assert capsule("run", protocol, "--from-frozen").code == 0


@pytest.mark.parametrize("at", ["1", "3", "8", "11", "20+"])
def test_a_supervisor_that_could_not_write_is_quoted(
    capsule: Capsule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """What it said in its log is said by the command, and that space is to be freed; its log is never empty then."""
    protocol = make_study(tmp_path / "study")
    assert capsule("freeze", protocol).code == 0
    monkeypatch.setenv("CAPSULE_FAIL_AT", f"{at}:ENOSPC")
    said = capsule("run", protocol)
    assert said.code == 5
    assert f"{tmp_path}/study/.capsule/study/" in said.err
    assert "No space left on device" in said.err
    assert "capsule: hint: free space on the file system at " in said.err
    if "supervisor.log" in said.err:
        assert (tmp_path / "study/.capsule/study/attempts/a000001/supervisor.log").stat().st_size
    durable.disarm()


def test_errors_name_the_file_that_a_descriptor_is_of(tmp_path: Path) -> None:
    path = tmp_path / "file"
    descriptor = os.open(path, os.O_CREAT | os.O_RDONLY)
    try:
        for action in (lambda: durable.write(descriptor, b"x"), lambda: durable.pwrite(descriptor, b"x", 0)):
            with pytest.raises(OSError, match=f"Bad file descriptor: '{path}'"):
                action()
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "free space on the file system at "),
        (errno.EDQUOT, "a quota may allow less"),
        (errno.EFBIG, "ulimit -f"),
        (errno.EROFS, "mounted read-only"),
        (errno.EACCES, "must be writable"),
        (errno.EIO, "its kernel log says more"),
    ],
)
def test_each_failure_has_its_hint(tmp_path: Path, number: int, words: str) -> None:
    error = cannot_write(tmp_path / "absent" / "file", OSError(number, os.strerror(number)))
    assert error.message == f"{tmp_path}/absent/file: cannot be written: {os.strerror(number)}"
    assert words in str(error.hint)
    assert "/other: cannot" in cannot_write(tmp_path, OSError(number, os.strerror(number), "/other")).message
    assert says_full(os.strerror(number)) == (number in (errno.ENOSPC, errno.EDQUOT))


def test_a_disk_is_full_when_no_bytes_or_no_files_are_left(small_disk: Path) -> None:
    assert not is_full(small_disk / "absent")
    fill(small_disk, 2)
    assert is_full(small_disk / "absent")
    (small_disk / "fill").unlink()
    run(["mount", "-o", "remount,nr_inodes=3", str(small_disk)], check=True)
    (small_disk / "one").touch()
    (small_disk / "two").touch()
    assert is_full(small_disk)
    assert f"at {small_disk} (no more files left" in hint_where_full(small_disk / "absent" / "file")
    assert shutil.disk_usage(small_disk).free > 1 << 20

"""Files put in place by many at once, and read only where they are regular files."""

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from capsule.host.durable import read_regular, write_durably, write_output


def test_writers_at_once_do_not_collide(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom capsule.host.durable import write_durably\n"
        "for _ in range(200):\n    write_durably(Path(sys.argv[1]), sys.argv[2].encode() * 1000)\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "file"), word]) for word in "abcd"]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0, 0]
    assert (tmp_path / "file").read_bytes() in [word * 1000 for word in (b"a", b"b", b"c", b"d")]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_durably(tmp_path / "folder", b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("over", [True, False])
def test_a_disk_that_fills_up_leaves_what_was_there(
    over: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(descriptor: int, data: bytes) -> None:
        os.write(descriptor, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("capsule.host.durable.write", half)
    (tmp_path / "before").write_bytes(b"before")
    for name in ("before", "new"):
        with pytest.raises(OSError, match="No space left"):
            write_durably(tmp_path / name, b"afterwards", over=over)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"before": b"before"}


@pytest.mark.parametrize("links", [True, False])
def test_nothing_is_written_over(links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a file system has no hard links."""

    def refused(self: Path, target: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    if not links:
        monkeypatch.setattr(Path, "hardlink_to", refused)
    write_durably(tmp_path / "file", b"first", mode=0o444, over=False)
    with pytest.raises(OSError, match="File exists" if links else "not permitted"):
        write_durably(tmp_path / "file", b"second", over=False)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"first"}
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o444


def test_an_output_goes_through_links_and_into_devices(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    write_output(tmp_path / "link", b"x")
    write_output(Path("/dev/null"), b"x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"x"
    assert Path("/dev/null").is_char_device()


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "around").symlink_to("around")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    assert read_regular(tmp_path / "file") == b"abc"
    assert read_regular(tmp_path / "file", 2) == b"ab"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        for name in ("link", "around", "folder", "pipe", "socket", "nothing", "file/below"):
            assert read_regular(tmp_path / name) is None, name
    assert read_regular(Path("/dev/null")) is None

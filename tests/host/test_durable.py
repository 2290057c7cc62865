"""Files put in place by many at once, and read only where they are regular files."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from capsule.host.durable import read_regular, write_durably


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

"""Readers of strangers' bytes: a bounded run, what longer runs found, and that faults of every kind would be seen."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("files in memory and audit of effects as on Linux", allow_module_level=True)

from tests.fuzz import guard
from tests.fuzz.guard import ForbiddenEffectError, HangError, only_reading, within_time
from tests.fuzz.targets import HERE, ROOT, TARGETS

FOUND = sorted(path for path in (HERE / "found").glob("*/*"))
MEMORY_BYTES = 128 << 20


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments], capture_output=True, text=True, check=False, cwd=ROOT, timeout=300
    )


def test_a_bounded_run() -> None:
    """Some thousand mutations, the same each time, within bounded time and memory, and without an effect."""
    done = python("tests.fuzz.sample")
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout)
    assert said["executions"].keys() == TARGETS.keys()
    assert sum(said["executions"].values()) > 1500
    assert said["grown_bytes"] < MEMORY_BYTES


def test_a_run_guided_by_coverage() -> None:
    """The driver of the long runs works: it sees new code and ends well."""
    if importlib.util.find_spec("atheris") is None:
        pytest.skip("atheris is for some versions of Python on Linux only")
    done = python("tests.fuzz", "token", "-runs=300", "-seed=1")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Done 300 runs" in done.stderr
    assert "NEW" in done.stderr


@pytest.mark.parametrize("path", FOUND, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_what_was_found(path: Path) -> None:
    """Inputs over which a reader failed once."""
    with within_time():
        TARGETS[path.parent.name].run(path.read_bytes())


def test_there_are_findings() -> None:
    assert {path.parent.name for path in FOUND} <= TARGETS.keys()
    assert FOUND


def test_every_target_has_seeds() -> None:
    for name, target in TARGETS.items():
        assert target.seeds(), name
        assert all(isinstance(seed, bytes) for seed in target.seeds()), name


def test_effects_are_seen(tmp_path: Path) -> None:
    effects = [
        lambda: (tmp_path / "x").write_bytes(b"x"),
        lambda: os.close(os.open(tmp_path / "x", os.O_WRONLY | os.O_CREAT)),
        lambda: (tmp_path / "x").mkdir(),
        lambda: (tmp_path / "x").symlink_to("y"),
        lambda: os.unlink(tmp_path / "y"),  # noqa: PTH108 - as the product could
        lambda: subprocess.run(["true"], check=True),
        lambda: socket.create_connection(("127.0.0.1", 1)),
    ]
    for effect in effects:
        with pytest.raises(ForbiddenEffectError), only_reading():
            effect()
    with only_reading():
        assert list(tmp_path.iterdir()) == []
    with only_reading(folder=str(tmp_path / "a")):
        (tmp_path / "a").mkdir()
        (tmp_path / "a/b").write_bytes(b"allowed")
    outside = tmp_path / "a/../b"
    with pytest.raises(ForbiddenEffectError), only_reading(folder=str(tmp_path / "a")):
        outside.write_bytes(b"outside")
    (tmp_path / "after").write_bytes(b"the guard is gone")


def test_a_hang_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "SECONDS_MAX", 0.05)
    with pytest.raises(HangError), within_time():
        spin()


def spin() -> None:
    while True:
        pass

"""Leases: one holder a device, named to whoever asks, and lost only when its file is."""

import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from capsule.core.errors import BusyError, MachineError
from capsule.host import lease as lease_module
from capsule.host.lease import Holder, lease_directory, lease_path, network_file_system, read_holder, take
from capsule.host.process import lock_owners

ME = Holder(
    protocol="0001-x", attempt="a000003", pid=os.getpid(), since="2026-01-02T03:04:05.678Z", token="t", baseline={}
)


def test_a_busy_device_says_who_holds_it_and_since_when(tmp_path: Path) -> None:
    held = take(tmp_path, ["CPU-0"], ME)
    with pytest.raises(BusyError) as busy:
        take(tmp_path, ["CPU-0"], ME.model_copy(update={"attempt": "a000009"}))
    expected = f"device CPU-0 is held by attempt a000003 of 0001-x, pid {os.getpid()}, since 2026-01-02T03:04:05.678Z"
    assert busy.value.message == expected
    assert "--wait" in (busy.value.hint or "")
    held.release()
    take(tmp_path, ["CPU-0"], ME).release()


def test_several_devices_are_taken_all_or_none(tmp_path: Path) -> None:
    held = take(tmp_path, ["GPU-b"], ME)
    with pytest.raises(BusyError, match="GPU-b"):
        take(tmp_path, ["GPU-a", "GPU-b", "GPU-c"], ME)
    others = take(tmp_path, ["GPU-a", "GPU-c"], ME)
    others.release()
    held.release()


def test_waiting_takes_the_device_once_it_is_free(tmp_path: Path) -> None:
    held = take(tmp_path, ["CPU-0"], ME)
    threading.Timer(0.3, held.release).start()
    began = time.monotonic()
    take(tmp_path, ["CPU-0"], ME, wait_ms=10_000).release()
    assert 0.2 < time.monotonic() - began < 5
    held = take(tmp_path, ["CPU-0"], ME)
    with pytest.raises(BusyError):
        take(tmp_path, ["CPU-0"], ME, wait_ms=250)
    held.release()


@pytest.mark.parametrize("replaced", [False, True])
def test_an_unlinked_or_replaced_file_is_noticed(tmp_path: Path, replaced: bool) -> None:
    held = take(tmp_path, ["CPU-0"], ME)
    assert held.loss() is None
    lease_path(tmp_path, "CPU-0").unlink()
    if replaced:
        lease_path(tmp_path, "CPU-0").touch()
    assert ("was replaced" if replaced else "is gone") in (held.loss() or "")
    held.release()


def test_what_a_holder_left_is_handed_to_the_next_and_cleared_only_in_order(tmp_path: Path) -> None:
    take(tmp_path, ["CPU-0"], ME).release()
    held = take(tmp_path, ["CPU-0"], ME)
    assert held.inherited == {"CPU-0": ME}
    held.clear()
    held.release()
    assert take(tmp_path, ["CPU-0"], ME).inherited == {}


def test_the_lease_outlives_its_taker_in_a_descendant(tmp_path: Path) -> None:
    held = take(tmp_path, ["CPU-0"], ME)
    child = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[*held.descriptors.values()]
    )
    held.release()
    with pytest.raises(BusyError):
        take(tmp_path, ["CPU-0"], ME)
    assert [item.pid for item in lock_owners(lease_path(tmp_path, "CPU-0"))] == [child.pid]
    child.communicate(b"\n")
    take(tmp_path, ["CPU-0"], ME).release()


def test_the_folder_and_files_are_for_every_user(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    take(folder, ["CPU-0"], ME).release()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777
    assert stat.S_IMODE(lease_path(folder, "CPU-0").stat().st_mode) == 0o666


def test_links_are_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("data")
    (tmp_path / "leases").mkdir()
    (tmp_path / "leases/CPU-0.lease").symlink_to(target)
    with pytest.raises(MachineError, match="cannot hold a device lease"):
        take(tmp_path / "leases", ["CPU-0"], ME)
    (tmp_path / "link").symlink_to(tmp_path / "leases")
    with pytest.raises(MachineError, match="is a link"):
        take(tmp_path / "link", ["GPU-a"], ME)
    assert target.read_text() == "data"


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".", "a b"])
def test_a_device_name_cannot_leave_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(MachineError, match="expected a device name"):
        take(tmp_path, [name], ME)


def test_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert network_file_system(tmp_path) is None
    monkeypatch.setattr(lease_module, "network_file_system", lambda path: "NFS")
    with pytest.raises(MachineError, match="found NFS") as refused:
        take(tmp_path, ["CPU-0"], ME)
    assert "CAPSULE_LEASE_DIR" in (refused.value.hint or "")


def test_the_kind_of_a_file_system_is_read_from_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "NETWORK_FILE_SYSTEMS", {0x9FA0: "proc"})
    assert network_file_system(Path("/proc/self")) == "proc"
    assert network_file_system(tmp_path) is None


def test_every_user_arrives_at_the_same_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CAPSULE_LEASE_DIR", str(tmp_path))
    assert lease_directory() == tmp_path
    monkeypatch.delenv("CAPSULE_LEASE_DIR")
    assert lease_directory() in (Path("/run/lock/capsule"), Path("/tmp/capsule-leases"))
    assert lease_directory() == lease_directory()


def test_a_relative_folder_of_leases_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CAPSULE_LEASE_DIR", "leases")
    assert lease_directory() == tmp_path / "leases"


def test_a_pipe_in_place_of_a_lease_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "CPU-0.lease")
    assert read_holder(tmp_path / "CPU-0.lease") is None
    with pytest.raises(MachineError, match="cannot hold a device lease"):
        take(tmp_path, ["CPU-0"], ME)

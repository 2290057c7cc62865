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
from capsule.host.lease import (
    Holder,
    Quarantine,
    is_held,
    known_devices,
    lease_directory,
    lease_path,
    network_file_system,
    quarantine,
    quarantine_path,
    quarantined,
    read_holder,
    readmit,
    take,
)
from capsule.host.process import lock_owners

ME = Holder(
    protocol="0001-x",
    attempt="a000003",
    pid=os.getpid(),
    since="2026-01-02T03:04:05.678Z",
    boot_id="b",
    token="t",
    baseline={},
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


def test_several_devices_are_locked_in_one_order_whatever_the_order_of_asking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    original = lease_module.open_shared
    monkeypatch.setattr(lease_module, "open_shared", lambda path: opened.append(path.name) or original(path))
    take(tmp_path, ["GPU-c", "GPU-a", "GPU-b"], ME).release()
    assert opened == ["GPU-a.lease", "GPU-b.lease", "GPU-c.lease"]


def test_many_who_race_for_two_devices_get_both_or_neither(tmp_path: Path) -> None:
    """Whoever asks in whatever order, one at a time holds both, and all of them come to their turn."""
    inside: list[int] = []
    seen: list[int] = []

    def work(number: int) -> None:
        devices = ["GPU-a", "GPU-b"] if number % 2 else ["GPU-b", "GPU-a"]
        held = take(tmp_path, devices, ME, wait_ms=30_000)
        inside.append(number)
        seen.append(len(inside))
        time.sleep(0.02)
        inside.remove(number)
        held.release()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert seen == [1] * 6


def test_looking_at_a_lease_takes_it_from_nobody(tmp_path: Path) -> None:
    """However often somebody looks whether a device is held, a free one can be taken."""
    take(tmp_path, ["GPU-a"], ME).release()
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            is_held(lease_path(tmp_path, "GPU-a"))

    looking = [threading.Thread(target=look) for _ in range(2)]
    for thread in looking:
        thread.start()
    for _ in range(50):
        take(tmp_path, ["GPU-a"], ME).release()
    over.set()
    for thread in looking:
        thread.join()
    held = take(tmp_path, ["GPU-a"], ME)
    assert is_held(lease_path(tmp_path, "GPU-a"))
    held.release()
    assert not is_held(lease_path(tmp_path, "GPU-a"))
    assert not is_held(lease_path(tmp_path, "GPU-z"))


# Quarantine.

WHY = Quarantine(words="4096 bytes in use", attempt="a000003", protocol="0001-x", since="2026-01-02T03:04:05.678Z")


def put_aside(directory: Path, device: str, quarantined: Quarantine = WHY) -> None:
    quarantine(directory, device, **quarantined.to_json())


def test_a_quarantine_is_kept_until_it_is_lifted(tmp_path: Path) -> None:
    assert quarantined(tmp_path, "GPU-a") is None
    assert not readmit(tmp_path, "GPU-a")
    put_aside(tmp_path / "new", "GPU-a")
    assert quarantined(tmp_path / "new", "GPU-a") == WHY
    assert quarantined(tmp_path / "new", "GPU-b") is None
    assert stat.S_IMODE(quarantine_path(tmp_path / "new", "GPU-a").stat().st_mode) == 0o666
    newer = WHY.model_copy(update={"words": "gone"})
    put_aside(tmp_path / "new", "GPU-a", newer)
    assert quarantined(tmp_path / "new", "GPU-a") == newer
    assert readmit(tmp_path / "new", "GPU-a")
    assert quarantined(tmp_path / "new", "GPU-a") is None


def test_another_users_quarantine_can_be_lifted_though_its_file_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a sticky folder only the owner removes a file; whoever may write it can empty it."""
    put_aside(tmp_path, "GPU-a")

    def refuse(path: Path) -> None:
        raise PermissionError(1, "not yours", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        assert readmit(tmp_path, "GPU-a")
    assert quarantine_path(tmp_path, "GPU-a").exists()
    assert quarantined(tmp_path, "GPU-a") is None
    put_aside(tmp_path, "GPU-a")
    assert quarantined(tmp_path, "GPU-a") == WHY


@pytest.mark.parametrize("data", [b"{", b"[]", b'{"words": 1}', b"\xff"])
def test_a_damaged_quarantine_still_keeps_the_device_away(tmp_path: Path, data: bytes) -> None:
    quarantine_path(tmp_path, "GPU-a").write_bytes(data)
    found = quarantined(tmp_path, "GPU-a")
    assert found is not None
    assert "damaged" in found.words
    assert readmit(tmp_path, "GPU-a")
    assert quarantined(tmp_path, "GPU-a") is None


def test_a_link_or_pipe_in_place_of_a_quarantine_is_not_followed_and_counts(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    quarantine_path(tmp_path, "GPU-a").symlink_to(tmp_path / "empty")
    os.mkfifo(quarantine_path(tmp_path, "GPU-b"))
    for device in ("GPU-a", "GPU-b"):
        assert quarantined(tmp_path, device) is not None
        with pytest.raises(MachineError):
            put_aside(tmp_path, device)
        assert readmit(tmp_path, device)


def test_devices_are_known_by_what_runs_left_about_them(tmp_path: Path) -> None:
    assert known_devices(tmp_path / "nowhere") == []
    take(tmp_path, ["GPU-b"], ME).release()
    put_aside(tmp_path, "GPU-a")
    put_aside(tmp_path, "GPU-b")
    assert known_devices(tmp_path) == ["GPU-a", "GPU-b"]

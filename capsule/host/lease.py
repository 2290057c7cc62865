"""Device leases: one attempt a device at a time on this machine, held by a lock that dies with its last holder.

Each device has one fixed file, never unlinked, in a folder shared by the whole machine; whoever holds its `flock` has
the device. The descriptor is passed into the trial's process tree, so that the lease outlives a killed supervisor
while a descendant keeps it. What the file says is for people and for the next holder: who holds it, since when, and
what the last one left behind if it did not end in order.

Beside it stands the device's quarantine: words on why nobody may use it until a person has looked at it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from capsule.core.errors import BusyError, MachineError
from capsule.core.schema import Model, Natural
from capsule.host.durable import read_regular, sync, sync_directory

SHARED = 0o1777
NETWORK_FILE_SYSTEMS = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFE534D42: "SMB2",
    0xFF534D42: "CIFS",
    0x01021997: "9P",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x00C36400: "Ceph",
    0x013111A8: "IBRIX",
    0x5346414F: "AFS",
}
"""File systems by their magic number whose `flock` may not hold between processes or machines."""
GLANCE_SECONDS = 0.1
"""How long a lock that is wanted may be held by somebody who only looks whether it is held."""


class Holder(Model):
    """What a lease file says about its holder; `baseline` is that of the device when it was taken, under that boot."""

    protocol: str
    attempt: str
    pid: Natural
    since: str
    boot_id: str
    token: str
    baseline: dict[str, int | str | None]


class Quarantine(Model):
    """Why a device may not be used, by which attempt that was found, and since when."""

    words: str
    attempt: str
    protocol: str
    since: str


@dataclass
class Lease:
    """The leases of one attempt; `inherited` is what earlier holders left in the files, by device."""

    paths: dict[str, Path]
    descriptors: dict[str, int]
    inherited: dict[str, Holder] = field(default_factory=dict)

    def write(self, holder: Holder) -> None:
        """Say in every file who holds the device."""
        for descriptor in self.descriptors.values():
            data = holder.to_bytes()
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, data, 0)

    def loss(self) -> str | None:
        """Return words if a lease file was unlinked or replaced; the lock on it then guards nothing."""
        for device, descriptor in self.descriptors.items():
            own = os.fstat(descriptor)
            try:
                there = self.paths[device].lstat()
            except OSError as error:
                return f"the lease file {self.paths[device]} is gone: {error.strerror}"
            if (own.st_dev, own.st_ino) != (there.st_dev, there.st_ino):
                return f"the lease file {self.paths[device]} was replaced"
            with contextlib.suppress(OSError):
                os.utime(descriptor)
        return None

    def clear(self) -> None:
        """Leave nothing behind: the tree is empty and the device back at its baseline."""
        for descriptor in self.descriptors.values():
            os.ftruncate(descriptor, 0)

    def release(self) -> None:
        """Give the leases back; what the files say stays for the next holder unless `clear` was called."""
        for descriptor in self.descriptors.values():
            os.close(descriptor)
        self.descriptors = {}


def lease_directory() -> Path:
    """Return the machine-wide folder of leases: `CAPSULE_LEASE_DIR`, else one that every user arrives at.

    It is absolute, since the processes that use it do not share a working folder.
    """
    chosen = os.environ.get("CAPSULE_LEASE_DIR")
    if chosen:
        return Path(chosen).absolute()
    try:
        if Path("/run/lock").stat().st_mode & stat.S_IWOTH:
            return Path("/run/lock/capsule")
    except OSError:
        pass
    return Path("/tmp/capsule-leases")


def lease_path(directory: Path, device: str) -> Path:
    """Return the lease file of a device."""
    return directory / f"{_checked(device)}.lease"


def quarantine_path(directory: Path, device: str) -> Path:
    """Return the quarantine file of a device."""
    return directory / f"{_checked(device)}.quarantine.json"


def _is_name(device: str) -> bool:
    return bool(re.fullmatch(r"[A-Za-z0-9_.-]{1,200}", device)) and not device.startswith(".")


def _checked(device: str) -> str:
    if not _is_name(device):
        raise MachineError(f"expected a device name of letters, digits, `-`, `_` and `.`, found {device!r}")
    return device


def take(
    directory: Path,
    devices: Sequence[str],
    holder: Holder,
    *,
    wait_ms: int = 0,
    cancelled: Callable[[], bool] = lambda: False,
) -> Lease:
    """Take the leases of all devices or of none, waiting up to `wait_ms` for a holder to go unless `cancelled`.

    Raises:
        BusyError: a device is held; the message says by whom.
        MachineError: the folder cannot be used, or is on a network file system.
    """
    check_directory(directory)
    until = time.monotonic() + wait_ms / 1000
    while True:
        try:
            return _take(directory, devices, holder)
        except BusyError:
            if time.monotonic() >= until or cancelled():
                raise
            time.sleep(0.2)


def _take(directory: Path, devices: Sequence[str], holder: Holder) -> Lease:
    lease = Lease({}, {})
    try:
        for device in sorted(devices):
            path = lease.paths[device] = lease_path(directory, device)
            descriptor = lease.descriptors[device] = open_shared(path)
            if not lock(descriptor):
                raise BusyError(_busy_words(device, read_holder(path)), hint=_HINT_BUSY)
            left = read_holder(path)
            if left is not None:
                lease.inherited[device] = left
        if not lease.inherited:
            lease.write(holder)
        loss = lease.loss()
        if loss is not None:
            raise BusyError(f"{loss} while it was being taken", hint="lease files are never deleted; try again")
    except BaseException:
        lease.release()
        raise
    return lease


def lock(descriptor: int) -> bool:
    """Take the lock, also from under somebody who only looks at it; whether it was had."""
    import fcntl

    until = time.monotonic() + GLANCE_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(0.005)
        else:
            return True


def is_held(path: Path) -> bool:
    """Whether somebody holds the lock of a file; a file that is not there, or cannot be read, is held by nobody."""
    import fcntl

    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(descriptor)


def read_holder(path: Path) -> Holder | None:
    """Return what a lease file says about its holder, or None if it says nothing that can be read."""
    try:
        return Holder.model_validate(json.loads(read_regular(path) or b""))
    except (OSError, ValueError, ValidationError):
        return None


_HINT_BUSY = "wait for it with --wait, or choose another device; `capsule reconcile` settles what a crash left open"


def _busy_words(device: str, holder: Holder | None) -> str:
    if holder is None:
        return f"device {device} is held by another process, which has not said who it is"
    who = f"attempt {holder.attempt} of {holder.protocol}, pid {holder.pid}"
    return f"device {device} is held by {who}, since {holder.since}"


# Quarantine.


def quarantine(directory: Path, device: str, *, words: str, attempt: str, protocol: str, since: str) -> None:
    """Keep a device from being used until it is readmitted; durable when this returns, newer words replace older.

    The file is written in place, since other users may not replace or remove it in a folder that all share.

    Raises:
        MachineError: it cannot be written.
    """
    check_directory(directory)
    path = quarantine_path(directory, device)
    data = Quarantine(words=words, attempt=attempt, protocol=protocol, since=since).to_bytes()
    descriptor = open_shared(path)
    try:
        os.pwrite(descriptor, data, 0)
        os.ftruncate(descriptor, len(data))
        sync(descriptor)
        sync_directory(directory)
    except OSError as error:
        raise MachineError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        os.close(descriptor)


def quarantined(directory: Path, device: str) -> Quarantine | None:
    """Return why a device may not be used, or None; a file that cannot be read counts, an empty one does not."""
    path = quarantine_path(directory, device)
    try:
        data = read_regular(path)
        if data is None and os.path.lexists(path):
            raise OSError(errno.EACCES, "not a regular file that can be read")
        return Quarantine.model_validate(json.loads(data)) if data else None
    except (OSError, ValueError, ValidationError) as error:
        words = error.strerror if isinstance(error, OSError) else "it is damaged"
        return Quarantine(words=f"{path} cannot be read: {words}", attempt="?", protocol="?", since="?")


def readmit(directory: Path, device: str) -> bool:
    """Lift a device's quarantine; whether there was one.

    Raises:
        MachineError: it cannot be lifted.
    """
    if quarantined(directory, device) is None:
        return False
    path = quarantine_path(directory, device)
    try:
        try:
            path.unlink()
        except PermissionError:
            os.truncate(path, 0)
        sync_directory(directory)
    except OSError as error:
        raise MachineError(f"{path}: cannot be removed: {error.strerror}", hint="its owner or root may") from error
    return True


def known_devices(directory: Path) -> list[str]:
    """Return the devices that have a lease or a quarantine file, also those that are not there any more."""
    names = [path.name for pattern in ("*.lease", "*.quarantine.json") for path in directory.glob(pattern)]
    devices = {name.removesuffix(".lease").removesuffix(".quarantine.json") for name in names}
    return sorted(device for device in devices if _is_name(device))


# Folder and files.


def check_directory(directory: Path) -> None:
    """Make the folder of leases as every user of the machine needs it.

    Raises:
        MachineError: it cannot be made, or is on a network file system, where locks do not hold.
    """
    try:
        try:
            directory.mkdir(parents=True)
            directory.chmod(SHARED)
        except FileExistsError:
            if not stat.S_ISDIR(directory.lstat().st_mode):
                raise NotADirectoryError(f"{directory} is a link or a file") from None
    except OSError as error:
        raise MachineError(
            f"{directory}: cannot hold device leases: {error.strerror or error}",
            hint="set CAPSULE_LEASE_DIR to a folder on a local disk that every user of the devices shares",
        ) from error
    network = network_file_system(directory)
    if network is not None:
        raise MachineError(
            f"{directory}: expected a local file system for device leases, found {network}",
            hint="set CAPSULE_LEASE_DIR to a folder on a local disk that every user of the devices shares",
        )


def open_shared(path: Path) -> int:
    """Open a file that every user may write; creating comes last: sticky folders refuse it for another user's file."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        try:
            return _plain_file(os.open(path, flags))
        except FileNotFoundError:
            try:
                descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
            except FileExistsError:
                return _plain_file(os.open(path, flags))
            os.fchmod(descriptor, 0o666)
            return descriptor
    except OSError as error:
        raise MachineError(
            f"{path}: cannot hold a device lease or a lock: {error.strerror}",
            hint="the file must be a plain one that everyone may read and write",
        ) from error


def _plain_file(descriptor: int) -> int:
    """Return a descriptor of a regular file; another is closed."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileExistsError(errno.EEXIST, "it is no plain file")
    return descriptor


def network_file_system(path: Path) -> str | None:
    """Return the name of the network file system that a path is on, or None for a local one."""
    buffer = ctypes.create_string_buffer(512)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.statfs(os.fsencode(path), buffer) != 0:
        return None
    magic = int.from_bytes(buffer.raw[: ctypes.sizeof(ctypes.c_long)], "little") & 0xFFFFFFFF
    return NETWORK_FILE_SYSTEMS.get(magic)

"""Doctor: what this machine offers a run, and who has it; lifts a device's quarantine, and changes nothing else."""

from __future__ import annotations

import platform
import shutil
from dataclasses import dataclass

from capsule.core.errors import CapsuleError, UsageError
from capsule.host import lease
from capsule.host.clock import read_clock
from capsule.steps.slots import DeviceState, Machine

TOOLS = {
    "git": "lists sources and reads revisions",
    "ssh-keygen": "signs",
    "openssl": "checks timestamps, signs exports",
    "zstd": "stock checks",
}
"""Programs of others, and what they are for."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    good: bool
    words: str


@dataclass(frozen=True)
class Examined:
    """What was found, and the state of every device."""

    findings: list[Finding]
    devices: list[DeviceState]


def doctor() -> Examined:
    """Look at interpreter, clocks, tools, the lease folder and the devices."""
    clock = read_clock()
    findings = [
        Finding("python", True, platform.python_version()),
        Finding("clock", bool(clock.boot_id), f"boot {clock.boot_id}, {clock.boottime_ms / 1000:.0f} s ago"),
    ]
    for tool, use in TOOLS.items():
        path = shutil.which(tool)
        findings.append(Finding(tool, path is not None, f"{use}: {path or 'not found'}"))
    findings.append(_leases())
    devices, missing = Machine(lease.lease_directory()).look()
    if missing is not None:
        findings.append(Finding("devices", False, missing))
    return Examined(findings, devices)


def _leases() -> Finding:
    folder = lease.lease_directory()
    try:
        lease.check_directory(folder)
    except CapsuleError as error:
        return Finding("leases", False, error.message)
    return Finding("leases", True, str(folder))


@dataclass(frozen=True)
class Readmitted:
    """A device whose quarantine was lifted, and what that had been."""

    device: str
    quarantine: lease.Quarantine


def readmit(name: str) -> Readmitted:
    """Lift the quarantine of the device of that UUID; a beginning that fits one device in quarantine is enough.

    Raises:
        UsageError: no such device is in quarantine, or several are.
        MachineError: the quarantine cannot be lifted.
    """
    folder = lease.lease_directory()
    found = {device: item for device in lease.known_devices(folder) if (item := lease.quarantined(folder, device))}
    fitting = [name] if name in found else [device for device in found if len(name) > 3 and device.startswith(name)]
    if len(fitting) != 1:
        several = (
            f"{', '.join(fitting)} begin with it" if fitting else f"{', '.join(found) or 'none'} in quarantine here"
        )
        raise UsageError(
            f"expected a device in quarantine, found {name!r}; {several}", hint="`capsule doctor` lists devices"
        )
    lease.readmit(folder, fitting[0])
    return Readmitted(fitting[0], found[fitting[0]])

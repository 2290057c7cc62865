"""Doctor: what this machine offers a run, read and never changed."""

from __future__ import annotations

import platform
import shutil
from dataclasses import dataclass

from capsule.core.errors import CapsuleError
from capsule.host import lease
from capsule.host.clock import read_clock
from capsule.host.devices import all_devices


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    good: bool
    words: str


def doctor() -> list[Finding]:
    """Look at interpreter, clocks, tools, the lease folder and the devices."""
    clock = read_clock()
    findings = [
        Finding("python", True, platform.python_version()),
        Finding("clock", bool(clock.boot_id), f"boot {clock.boot_id}, {clock.boottime_ms / 1000:.0f} s ago"),
    ]
    for tool, use in (("git", "lists sources and reads revisions"), ("ssh-keygen", "signs"), ("zstd", "stock checks")):
        path = shutil.which(tool)
        findings.append(Finding(tool, path is not None, f"{use}: {path or 'not found'}"))
    findings.append(_leases())
    findings += [Finding("device", True, f"{device.uuid} ({device.unit}): {device.name}") for device in all_devices()]
    return findings


def _leases() -> Finding:
    folder = lease.lease_directory()
    try:
        lease.check_directory(folder)
    except CapsuleError as error:
        return Finding("leases", False, error.message)
    return Finding("leases", True, str(folder))

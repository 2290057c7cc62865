"""The CPU as one device: it is clean as soon as the attempt's process tree is empty."""

from __future__ import annotations

import platform
from collections.abc import Collection
from pathlib import Path

from capsule.core.telemetry import READINGS, Sample
from capsule.host.devices.base import Baseline, Device, Occupancy, boottime_ms

UUID = "CPU-0"
SHARED = "other programs may use the CPU at any time"


class CpuBackend:
    """All cores of this machine as the one device `CPU-0`, charged in its own unit."""

    sampled = False
    started = False

    def devices(self) -> tuple[Device, ...]:
        """Return the one device."""
        return (Device(UUID, "cpu", _name()),)

    def baseline(self, uuid: str) -> Baseline:
        """Return nothing: an idle CPU keeps no state that a later run would meet."""
        return {}

    def occupancy(self, uuid: str, own: Collection[int]) -> Occupancy:
        """Say that other processes always share a CPU: it is leased among attempts, not among programs."""
        return Occupancy("unverifiable", (), SHARED)

    def unclean(self, uuid: str, baseline: Baseline) -> str | None:
        """Return None: see `baseline`."""
        return None

    def environment(self, uuids: Collection[str]) -> dict[str, str]:
        """Hide accelerators, which were not leased."""
        return {"CUDA_VISIBLE_DEVICES": ""}

    def sample(self, uuid: str, own: Collection[int], baseline: Baseline, *, whole: bool = True) -> Sample:
        """Return a sample without readings: a CPU is not watched."""
        return Sample(
            at_ms=boottime_ms(),
            device=uuid,
            exclusivity="unverifiable",
            words=SHARED,
            own=tuple(sorted(own)),
            foreign=(),
            missing=dict.fromkeys(READINGS, "a CPU is not watched"),
        )

    def visible(self) -> tuple[str, ...] | None:
        """Return the one device, which nothing can hide."""
        return (UUID,)


def _name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "CPU"

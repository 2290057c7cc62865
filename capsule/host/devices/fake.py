"""Devices that are folders, for trying every fault without an accelerator.

`CAPSULE_FAKE_DEVICES=<folder>`: each folder in it that holds `device.json` (`{"name": …}`) is a device of unit `gpu`
whose UUID is the folder's name. A trial "uses memory" by writing a number of bytes to `<device>/allocations/<pid>`.

`<folder>/scenario.json` maps a UUID to what is to go wrong; every key may be left out:

    foreign            [{"pid": 77, "from_ms": 2000, "to_ms": 3000}], times since the device was first looked at
    exclusivity        "unverifiable": no process is ever listed
    keeps_memory_ms    how long memory stays in use after the process that used it is gone
    errors             {"baseline": "words"}: the call of that name fails
    delay_ms           how long every call takes
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from capsule.core.errors import MachineError
from capsule.host.devices.base import Baseline, Device, Occupancy
from capsule.host.process import read_stat

IDLE_BYTES = 615 * 2**20


class FakeBackend:
    """The folders of one directory as devices."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._since: dict[str, float] = {}
        self._gone: dict[Path, float] = {}
        self._keeps_ms = 0

    def devices(self) -> tuple[Device, ...]:
        """Return a device for each folder with a `device.json`."""
        homes = sorted(self.directory.glob("*/device.json"))
        return tuple(Device(path.parent.name, "gpu", json.loads(path.read_bytes())["name"]) for path in homes)

    def baseline(self, uuid: str) -> Baseline:
        """Measure memory in use."""
        self._begin(uuid, "baseline")
        return {"memory_used_bytes": self._used(uuid), "driver": "fake"}

    def occupancy(self, uuid: str, own: Collection[int]) -> Occupancy:
        """Look for allocations and the scenario's processes that are not `own`."""
        scenario = self._begin(uuid, "occupancy")
        if scenario.get("exclusivity") == "unverifiable":
            return Occupancy("unverifiable", (), f"{uuid}: processes are not listed")
        since = self._since.setdefault(uuid, time.monotonic())
        now = (time.monotonic() - since) * 1000
        listed = {int(path.name) for path in self._allocations(uuid)}
        for item in scenario.get("foreign", []):
            if item.get("from_ms", 0) <= now <= item.get("to_ms", float("inf")):
                listed.add(item["pid"])
        foreign = tuple(sorted(listed - set(own)))
        if foreign:
            return Occupancy("contaminated", foreign, f"{uuid} is in use by pid {', '.join(map(str, foreign))}")
        return Occupancy("exclusive", (), f"{uuid}: no foreign process listed")

    def unclean(self, uuid: str, baseline: Baseline) -> str | None:
        """Compare memory in use with the baseline."""
        self._begin(uuid, "unclean")
        used, before = self._used(uuid), baseline["memory_used_bytes"]
        assert isinstance(before, int), before
        return f"{uuid}: {used} bytes in use, {before} when idle" if used > before else None

    def environment(self, uuids: Collection[str]) -> dict[str, str]:
        """Name the leased devices as a real backend does, and their folders for the trial."""
        folders = ":".join(str(self.directory / uuid) for uuid in uuids)
        return {"CUDA_VISIBLE_DEVICES": ",".join(uuids), "CAPSULE_FAKE_DEVICE_FOLDERS": folders}

    def _begin(self, uuid: str, call: str) -> dict[str, Any]:
        """Return the device's scenario after the delay and error that it asks for."""
        try:
            scenario = json.loads((self.directory / "scenario.json").read_bytes()).get(uuid, {})
        except FileNotFoundError:
            scenario = {}
        time.sleep(scenario.get("delay_ms", 0) / 1000)
        if call in scenario.get("errors", {}):
            raise MachineError(f"{uuid}: {scenario['errors'][call]}")
        if not (self.directory / uuid / "device.json").exists():
            raise MachineError(f"expected the device {uuid}, found that it is gone")
        self._keeps_ms = scenario.get("keeps_memory_ms", 0)
        return dict(scenario)

    def _used(self, uuid: str) -> int:
        return IDLE_BYTES + sum(int(path.read_text() or 0) for path in self._allocations(uuid))

    def _allocations(self, uuid: str) -> list[Path]:
        """Return the allocations of live processes, and of dead ones for as long as the scenario keeps them."""
        return [path for path in (self.directory / uuid / "allocations").glob("*") if self._is_kept(path)]

    def _is_kept(self, path: Path) -> bool:
        user = read_stat(int(path.name))
        if user is not None and user.alive:
            return True
        gone = self._gone.setdefault(path, time.monotonic())
        return (time.monotonic() - gone) * 1000 < self._keeps_ms

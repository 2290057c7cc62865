"""Devices that are folders, for trying every fault without an accelerator.

`CAPSULE_FAKE_DEVICES=<folder>`: each folder in it that holds `device.json` (`{"name": …}`) is a device of unit `gpu`
whose UUID is the folder's name. A trial "uses memory" by writing a number of bytes to `<device>/allocations/<pid>`.

`<folder>/scenario.json` maps a UUID, or `*` for every device, to what is to go wrong; every key may be left out:

    foreign            [{"pid": 77}, {"pid": 78, "elsewhere": true}]: listed processes of others, here or in another
                       pid namespace; 0 and 4294967295 are pids that the driver does not tell
    exclusivity        "unverifiable": no process is ever listed
    keeps_memory_ms    how long memory stays in use after the process that used it is gone
    keeps_utilization_ms  how long utilization stays after it
    errors             {"baseline": "words"}: the call of that name fails
    delay_ms           how long every call takes
    delays             {"sample": 60000}: how long that call takes besides; `devices` and `visible` under `*`
    lost_from_ms       the time from which the driver takes the device for gone
    sample             [{"throttle": 4}, {"ecc_uncorrected": 1}, {"energy_mj": null}]: readings in place of the usual
    sees               ["GPU-b"]: what a program would be able to use; null: nobody can say

Items of `foreign` and `sample`, and those of `errors` and `delays` when written as `{"words": …}` and `{"ms": …}`, may
have `from_ms` and `to_ms`: times since this object was made (the sampler makes its own).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from capsule.core.errors import MachineError
from capsule.core.telemetry import READINGS, Sample
from capsule.host.devices.base import Baseline, Device, DeviceLostError, Occupancy, boottime_ms, unanswered
from capsule.host.devices.occupancy import Judge, Look, exists
from capsule.host.process import read_stat

IDLE_BYTES = 615 * 2**20
POWER_MW = 100_000
EVERY = "*"
MISSING = {"xid": "none was reported"}


class FakeBackend:
    """The folders of one directory as devices."""

    sampled = True
    started = False

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._since = time.monotonic()
        self._judge = Judge()

    def devices(self) -> tuple[Device, ...]:
        """Return a device for each folder with a `device.json`."""
        self._delay(self._scenario(EVERY), "devices")
        homes = sorted(self.directory.glob("*/device.json"))
        return tuple(Device(path.parent.name, "gpu", json.loads(path.read_bytes())["name"]) for path in homes)

    def baseline(self, uuid: str) -> Baseline:
        """Measure memory in use."""
        scenario = self._begin(uuid, "baseline")
        return {"memory_used_bytes": self._used(uuid, scenario), "driver": "fake"}

    def occupancy(self, uuid: str, own: Collection[int]) -> Occupancy:
        """Look for allocations and the scenario's processes that are not `own`."""
        scenario = self._begin(uuid, "occupancy")
        return self._judge.sampled(uuid, lambda: self._look(uuid, scenario), own, None, self._exists(scenario))

    def unclean(self, uuid: str, baseline: Baseline) -> str | None:
        """Compare memory in use with the baseline."""
        used, before = self._used(uuid, self._begin(uuid, "unclean")), baseline["memory_used_bytes"]
        assert isinstance(before, int), before
        return f"{uuid}: {used} bytes in use, {before} when idle" if used > before else None

    def environment(self, uuids: Collection[str]) -> dict[str, str]:
        """Name the leased devices as a real backend does, and their folders for the trial."""
        folders = ":".join(str(self.directory / uuid) for uuid in uuids)
        return {"CUDA_VISIBLE_DEVICES": ",".join(uuids), "CAPSULE_FAKE_DEVICE_FOLDERS": folders}

    def sample(self, uuid: str, own: Collection[int], baseline: Baseline, *, whole: bool = True) -> Sample:
        """Return the readings of a device at ease, but for what the scenario says."""
        at_ms = boottime_ms()
        try:
            scenario = self._begin(uuid, "sample")
        except MachineError as error:
            return unanswered(uuid, at_ms, error)
        idle = baseline.get("memory_used_bytes")
        idle_bytes = idle if isinstance(idle, int) else None
        judged = self._judge.sampled(uuid, lambda: self._look(uuid, scenario), own, idle_bytes, self._exists(scenario))
        readings = self._readings(uuid, scenario)
        seldom = {"energy_mj"} if not whole else set()
        values = {name: value for name, value in readings.items() if value is not None and name not in seldom}
        why = MISSING | dict.fromkeys(seldom, "the sample is not a whole one")
        return Sample(
            at_ms=at_ms,
            device=uuid,
            exclusivity=judged.exclusivity,
            words=judged.words,
            own=judged.own,
            foreign=judged.foreign,
            missing={name: why.get(name, "the scenario hides it") for name in READINGS if name not in values},
            **values,
        )

    def visible(self) -> tuple[str, ...] | None:
        """Return what the scenario of any device says, else the devices that the environment names, as CUDA does."""
        every = self._scenario(EVERY)
        self._delay(every, "visible")
        present = [path.parent.name for path in sorted(self.directory.glob("*/device.json"))]
        for scenario in (every, *map(self._scenario, present)):
            if "sees" in scenario:
                return None if scenario["sees"] is None else tuple(scenario["sees"])
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        if named is None:
            return tuple(present)
        found = []
        for uuid in named.split(","):
            if uuid not in present:
                break  # CUDA takes no name after the first that it does not know
            found.append(uuid)
        return tuple(found)

    # The scenario.

    def _scenario(self, uuid: str) -> dict[str, Any]:
        try:
            every: dict[str, dict[str, Any]] = json.loads((self.directory / "scenario.json").read_bytes())
        except FileNotFoundError:
            return {}
        return every.get(EVERY, {}) | every.get(uuid, {})

    def _begin(self, uuid: str, call: str) -> dict[str, Any]:
        """Return the device's scenario after the delay and error that it asks for."""
        scenario = self._scenario(uuid)
        self._delay(scenario, call)
        for item in self._due(scenario.get("errors", {}).get(call, []), "words"):
            raise MachineError(f"{uuid}: {item['words']}")
        if not (self.directory / uuid / "device.json").exists():
            raise DeviceLostError(f"expected the device {uuid}, found that it is gone")
        if self._elapsed_ms() >= scenario.get("lost_from_ms", float("inf")):
            raise DeviceLostError(f"{uuid}: GPU is lost")
        return scenario

    def _delay(self, scenario: dict[str, Any], call: str) -> None:
        delays = [item["ms"] for item in self._due(scenario.get("delays", {}).get(call, []), "ms")]
        time.sleep((scenario.get("delay_ms", 0) + sum(delays)) / 1000)

    def _due(self, items: Any, key: str) -> Iterator[dict[str, Any]]:
        """Yield what holds now of a list of items with times, of one such item, or of a plain value for `key`."""
        now = self._elapsed_ms()
        for item in items if isinstance(items, list) else [items]:
            whole = item if isinstance(item, dict) else {key: item}
            if whole.get("from_ms", 0) <= now <= whole.get("to_ms", float("inf")):
                yield whole

    def _elapsed_ms(self) -> float:
        return (time.monotonic() - self._since) * 1000

    # The device.

    def _look(self, uuid: str, scenario: dict[str, Any]) -> Look:
        readings = self._readings(uuid, scenario)
        used, utilization = readings["memory_used_bytes"], readings["utilization_percent"]
        if scenario.get("exclusivity") == "unverifiable":
            return Look(None, "the scenario hides them", used, utilization)
        listed = {int(path.name) for path in self._allocations(uuid) if _is_alive(path)}
        listed |= {item["pid"] for item in self._due(scenario.get("foreign", []), "pid")}
        return Look(frozenset(listed), "", used, utilization)

    def _exists(self, scenario: dict[str, Any]) -> Any:
        """Return what tells whether a pid is of a process here: the scenario's are, unless they are elsewhere."""
        items = {item["pid"]: not item.get("elsewhere", False) for item in scenario.get("foreign", [])}
        return lambda pid: items[pid] if pid in items else exists(pid)

    def _readings(self, uuid: str, scenario: dict[str, Any]) -> dict[str, Any]:
        busy = self._allocations(uuid, scenario.get("keeps_utilization_ms", 0))
        readings = {
            "memory_used_bytes": self._used(uuid, scenario),
            "utilization_percent": 50 if busy else 0,
            "sm_clock_mhz": 1980,
            "memory_clock_mhz": 3201,
            "temperature_celsius": 40,
            "power_mw": POWER_MW,
            "energy_mj": int(self._elapsed_ms() * POWER_MW / 1000),
            "throttle": 0,
            "ecc_corrected": 0,
            "ecc_uncorrected": 0,
            "remapped_rows": 0,
            "xid": None,
            "driver": "fake",
            "layout": "whole",
        }
        for item in self._due(scenario.get("sample", []), ""):
            readings |= {name: value for name, value in item.items() if name not in ("from_ms", "to_ms")}
        return readings

    def _used(self, uuid: str, scenario: dict[str, Any]) -> int:
        kept = self._allocations(uuid, scenario.get("keeps_memory_ms", 0))
        return IDLE_BYTES + sum(int(path.read_text() or 0) for path in kept)

    def _allocations(self, uuid: str, keeps_ms: float = 0) -> list[Path]:
        """Return the allocations of live processes, and of dead ones for as long as they are kept."""
        home = self.directory / uuid
        return [path for path in (home / "allocations").glob("*") if _is_alive(path) or _is_kept(home, path, keeps_ms)]


def _is_alive(path: Path) -> bool:
    user = read_stat(int(path.name))
    return user is not None and user.alive


def _is_kept(home: Path, path: Path, keeps_ms: float) -> bool:
    """Whether the memory of a dead process stays; a file tells every observer when it was first seen to be dead."""
    if not keeps_ms:
        return False
    seen = home / "gone" / path.name
    seen.parent.mkdir(exist_ok=True)
    if not seen.exists():
        seen.touch()
    return (time.time() - seen.stat().st_mtime) * 1000 < keeps_ms

"""NVIDIA devices through NVML, which is loaded on first use and reads only: no setting is ever changed.

NVML's process ids are those of the host: inside a container they may be unknown, zero or all ones. Then, and when
memory is in use that no listed process explains, exclusivity is `unverifiable`, never `exclusive`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from capsule.core.errors import MachineError
from capsule.host.devices.base import Baseline, Device, Occupancy

IDLE_BYTES_MAX = 2 * 2**30
"""More memory in use than this, with no process listed, is somebody's; idle drivers keep some hundred MiB."""
MEMORY_TOLERANCE_BYTES = 64 * 2**20
UNKNOWN_PIDS = frozenset({0, 2**32 - 1})


class NvmlBackend:
    """The machine's NVIDIA devices by UUID; none where the driver or its library is absent."""

    def __init__(self, library: Any = None) -> None:
        self._library = library
        self._started = False

    def devices(self) -> tuple[Device, ...]:
        """Return every device that NVML lists, MIG instances left to their parent."""
        if self._start() is None:
            return ()
        found = []
        for index in range(self._ask("nvmlDeviceGetCount")):
            handle = self._ask("nvmlDeviceGetHandleByIndex", index)
            uuid, name = self._ask("nvmlDeviceGetUUID", handle), self._ask("nvmlDeviceGetName", handle)
            found.append(Device(_text(uuid), "gpu", _text(name)))
        return tuple(found)

    def baseline(self, uuid: str) -> Baseline:
        """Measure memory in use, and name the driver."""
        handle = self._handle(uuid)
        used = self._ask("nvmlDeviceGetMemoryInfo", handle).used
        driver = _text(self._ask("nvmlSystemGetDriverVersion"))
        return {"memory_used_bytes": int(used), "driver": driver}

    def occupancy(self, uuid: str, own: Collection[int]) -> Occupancy:
        """List compute processes, and doubt the list where memory says otherwise."""
        handle = self._handle(uuid)
        listed = {int(item.pid) for item in self._ask("nvmlDeviceGetComputeRunningProcesses", handle)}
        used = int(self._ask("nvmlDeviceGetMemoryInfo", handle).used)
        unknown = listed & UNKNOWN_PIDS
        foreign = tuple(sorted(listed - UNKNOWN_PIDS - set(own)))
        if foreign:
            return Occupancy("contaminated", foreign, f"{uuid} is in use by pid {', '.join(map(str, foreign))}")
        if unknown:
            return Occupancy("unverifiable", (), f"{uuid} is in use by a process whose id the driver does not tell")
        if not listed and used > IDLE_BYTES_MAX:
            words = f"{uuid} has {used / 2**20:.0f} MiB in use and the driver lists no process"
            return Occupancy("unverifiable", (), words)
        return Occupancy("exclusive", (), f"{uuid}: no foreign process listed, {used / 2**20:.0f} MiB in use")

    def unclean(self, uuid: str, baseline: Baseline) -> str | None:
        """Compare memory in use with the baseline, 64 MiB of jitter allowed."""
        handle = self._handle(uuid)
        used = int(self._ask("nvmlDeviceGetMemoryInfo", handle).used)
        before = baseline.get("memory_used_bytes")
        if not isinstance(before, int):
            return f"{uuid}: no idle baseline to compare {used / 2**20:.0f} MiB in use with"
        if used > before + MEMORY_TOLERANCE_BYTES:
            return f"{uuid}: {used / 2**20:.0f} MiB in use, {before / 2**20:.0f} MiB when idle"
        return None

    def environment(self, uuids: Collection[str]) -> dict[str, str]:
        """Let a child see the leased devices only."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(uuids)}

    def _start(self) -> Any:
        if self._library is None:
            try:
                import pynvml
            except ImportError:
                return None
            self._library = pynvml
        if not self._started:
            try:
                self._library.nvmlInit()
            except self._library.NVMLError:
                return None
            self._started = True
        return self._library

    def _handle(self, uuid: str) -> Any:
        if self._start() is None:
            raise MachineError(f"expected the device {uuid}, found no NVIDIA driver", hint=_HINT)
        return self._ask("nvmlDeviceGetHandleByUUID", uuid)

    def _ask(self, function: str, *arguments: Any) -> Any:
        try:
            return getattr(self._library, function)(*arguments)
        except self._library.NVMLError as error:
            raise MachineError(f"the NVIDIA driver does not answer {function}: {error}", hint=_HINT) from error


_HINT = "`nvidia-smi` says more about the driver and the device"


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value

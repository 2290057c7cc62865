"""NVIDIA devices through NVML, which is loaded on first use and reads only: no setting is ever changed.

A device in MIG mode is shown as its instances, each a device of its own; what only the whole device knows stays unknown
of them. One process must not use NVML on both sides of a fork, and a call may hang: see `Backend.started`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Collection, Iterator
from typing import Any
from weakref import WeakKeyDictionary

from capsule.core.canonical import INTEGER_LIMIT
from capsule.core.errors import MachineError
from capsule.core.telemetry import READINGS, Sample
from capsule.host.devices.base import Baseline, Device, DeviceLostError, Occupancy, boottime_ms, unanswered
from capsule.host.devices.cuda import visible_uuids
from capsule.host.devices.occupancy import MEMORY_TOLERANCE_BYTES, Judge, Look, exists

NOT_SUPPORTED = 3
NOT_FOUND = 6
TIMEOUT = 10
FUNCTION_NOT_FOUND = 13
LOST = frozenset({15, 28})  # GPU_IS_LOST, GPU_NOT_FOUND
UNSUPPORTED = frozenset({NOT_SUPPORTED, FUNCTION_NOT_FOUND})
CLOCK_SM, CLOCK_MEMORY = 1, 2
TEMPERATURE_GPU = 0
ECC_CORRECTED, ECC_UNCORRECTED = 0, 1
ECC_VOLATILE = 0
EVENT_XID = 0x8
EVENTS_MAX = 64
MIG_ENABLED = 1

PROCESSES = (
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses",
    "nvmlDeviceGetMPSComputeRunningProcesses",
)
NOT_ASKED = "read less often than the rest, as the driver takes long for it"
WHOLE_ONLY = "only the whole GPU has it, of which this is a MIG instance"

_started_in: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""The process in which each library was started: it must not be used in one forked from that."""


class _DriverError(MachineError):
    """The driver answered with an error of this number; None where the call does not exist or makes no sense."""

    def __init__(self, message: str, number: int | None) -> None:
        super().__init__(message, hint=_HINT)
        self.number = number


def is_installed() -> bool:
    """Whether NVML's library is here; the driver is not asked."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
        import pynvml  # noqa: F401 - loaded here once, not in every process that is forked to ask the driver
    except (OSError, ImportError):
        return False
    return True


class NvmlBackend:
    """The machine's NVIDIA devices by UUID; none where the driver or its library is absent.

    `library` stands in for `pynvml`, `cuda` for the CUDA driver's library.
    """

    sampled = True

    def __init__(self, library: Any = None, cuda: Any = None) -> None:
        self._library = library
        self._cuda = cuda
        self._judge = Judge()
        self._events: dict[str, Any] = {}

    @property
    def started(self) -> bool:
        """Whether this process talks to the driver already."""
        library = self._load()
        return library is not None and _started_in.get(library) == os.getpid()

    def devices(self) -> tuple[Device, ...]:
        """Return every device that NVML lists and that answers, and of one in MIG mode its instances."""
        try:
            if self._start() is None:
                return ()
            count = self._ask("nvmlDeviceGetCount")
        except MachineError:
            return ()
        found: list[Device] = []
        for index in range(count):
            with contextlib.suppress(MachineError):
                gpu = self._ask("nvmlDeviceGetHandleByIndex", index)
                instances = self._instances(gpu)
                found += [self._device(handle) for handle in ([gpu] if instances is None else instances)]
        return tuple(found)

    def baseline(self, uuid: str) -> Baseline:
        """Measure memory in use, and name the driver."""
        handle = self._handle(uuid)
        used = self._ask("nvmlDeviceGetMemoryInfo", handle).used
        driver = _text(self._ask("nvmlSystemGetDriverVersion"))
        return {"memory_used_bytes": int(used), "driver": driver}

    def occupancy(self, uuid: str, own: Collection[int]) -> Occupancy:
        """List compute, graphics and MPS processes, and doubt the list where memory or utilization says otherwise."""
        handle = self._handle(uuid)
        return self._judge.sampled(uuid, lambda: self._look(uuid, handle, _Readings(self._ask)), own, None, exists)

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

    def sample(self, uuid: str, own: Collection[int], baseline: Baseline, *, whole: bool = True) -> Sample:
        """Read everything that the driver tells of the device, each reading on its own; energy only if `whole`."""
        at_ms = boottime_ms()
        try:
            handle = self._handle(uuid)
            readings = _Readings(self._ask)
            listed = False

            def look() -> Look:
                nonlocal listed
                found = self._look(uuid, handle, readings)
                listed = listed or found.listed is not None
                return found

            idle = baseline.get("memory_used_bytes")
            judged = self._judge.sampled(uuid, look, own, idle if isinstance(idle, int) else None, exists)
            self._read(uuid, handle, readings, whole)
        except MachineError as error:
            return unanswered(uuid, at_ms, error)
        if not listed and not readings.values.keys() - {"driver", "layout"}:
            words = f"{uuid} answers nothing: {readings.missing['memory_used_bytes']}"
            return unanswered(uuid, at_ms, MachineError(words))
        return Sample(
            at_ms=at_ms,
            device=uuid,
            exclusivity=judged.exclusivity,
            words=judged.words,
            own=judged.own,
            foreign=judged.foreign,
            missing=readings.missing,
            **readings.values,
        )

    def visible(self) -> tuple[str, ...] | None:
        """Ask the CUDA driver, without making a context."""
        return visible_uuids(self._cuda)

    # Readings.

    def _look(self, uuid: str, handle: Any, readings: _Readings) -> Look:
        """Ask for what tells whose the device is."""
        unlisted = ""
        listed: set[int] = set()
        for function in PROCESSES:
            try:
                listed |= {int(item.pid) for item in self._ask(function, handle)}
            except DeviceLostError:
                raise
            except MachineError as error:
                optional = function != PROCESSES[0] and getattr(error, "number", 0) in (*UNSUPPORTED, None)
                unlisted = unlisted if optional else error.message
        readings.take("memory_used_bytes", lambda info: int(info.used), "nvmlDeviceGetMemoryInfo", handle)
        if _is_instance(uuid):
            readings.miss("utilization_percent", WHOLE_ONLY)
        else:
            readings.take("utilization_percent", lambda rates: int(rates.gpu), "nvmlDeviceGetUtilizationRates", handle)
        values = readings.values
        used, utilization = values.get("memory_used_bytes"), values.get("utilization_percent")
        return Look(None if unlisted else frozenset(listed), unlisted, used, utilization)

    def _read(self, uuid: str, handle: Any, readings: _Readings, whole: bool) -> None:
        """Ask for the rest."""
        readings.take("driver", _text, "nvmlSystemGetDriverVersion")
        readings.attempt("layout", lambda: self._layout(uuid, handle))
        if _is_instance(uuid):
            for name in READINGS:
                if name not in readings.values and name not in readings.missing:
                    readings.miss(name, WHOLE_ONLY)
            return
        take = readings.take
        take("sm_clock_mhz", int, "nvmlDeviceGetClockInfo", handle, CLOCK_SM)
        take("memory_clock_mhz", int, "nvmlDeviceGetClockInfo", handle, CLOCK_MEMORY)
        take("temperature_celsius", int, "nvmlDeviceGetTemperature", handle, TEMPERATURE_GPU)
        take("power_mw", int, "nvmlDeviceGetPowerUsage", handle)
        if whole:
            take("energy_mj", int, "nvmlDeviceGetTotalEnergyConsumption", handle)
        else:
            readings.miss("energy_mj", NOT_ASKED)
        take("throttle", int, "nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        take("ecc_corrected", int, "nvmlDeviceGetTotalEccErrors", handle, ECC_CORRECTED, ECC_VOLATILE)
        take("ecc_uncorrected", int, "nvmlDeviceGetTotalEccErrors", handle, ECC_UNCORRECTED, ECC_VOLATILE)
        take("remapped_rows", lambda rows: int(rows[0]) + int(rows[1]), "nvmlDeviceGetRemappedRows", handle)
        readings.attempt("xid", lambda: self._xid(uuid, handle))

    def _xid(self, uuid: str, handle: Any) -> int:
        """Return the first Xid that the driver reported since the sample before; raises MachineError if none was."""
        if uuid not in self._events:
            self._events[uuid] = self._register(handle)
        events = self._events[uuid]
        if isinstance(events, MachineError):
            raise events
        first = None
        for _ in range(EVENTS_MAX):
            try:
                event = self._ask("nvmlEventSetWait", events, 0)
            except _DriverError as error:
                if error.number != TIMEOUT and first is None:
                    raise
                break
            if first is None and int(event.eventType) & EVENT_XID:
                first = int(event.eventData)
        if first is None:
            raise MachineError("none was reported")
        return first

    def _register(self, handle: Any) -> Any:
        """Return a set of events that receives Xids of the device, or the error that says why there is none."""
        try:
            if not int(self._ask("nvmlDeviceGetSupportedEventTypes", handle)) & EVENT_XID:
                return MachineError("the driver reports no Xid of this device")
            events = self._ask("nvmlEventSetCreate")
            self._ask("nvmlDeviceRegisterEvents", handle, EVENT_XID, events)
        except _DriverError as error:
            return error
        return events

    def _layout(self, uuid: str, handle: Any) -> str:
        gpu = self._ask("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle) if _is_instance(uuid) else handle
        instances = self._instances(gpu)
        if instances is None:
            return "whole"
        return f"mig:{','.join(sorted(_text(self._ask('nvmlDeviceGetUUID', item)) for item in instances))}"

    def _instances(self, gpu: Any) -> list[Any] | None:
        """Return the handles of a device's MIG instances, None if it is not in MIG mode."""
        try:
            mode, _ = self._ask("nvmlDeviceGetMigMode", gpu)
        except _DriverError as error:
            if error.number in (*UNSUPPORTED, None):
                return None
            raise
        if mode != MIG_ENABLED:
            return None
        return list(self._present(gpu))

    def _present(self, gpu: Any) -> Iterator[Any]:
        for index in range(self._ask("nvmlDeviceGetMaxMigDeviceCount", gpu)):
            try:
                yield self._ask("nvmlDeviceGetMigDeviceHandleByIndex", gpu, index)
            except _DriverError as error:
                if error.number != NOT_FOUND:
                    raise

    def _device(self, handle: Any) -> Device:
        uuid, name = self._ask("nvmlDeviceGetUUID", handle), self._ask("nvmlDeviceGetName", handle)
        return Device(_text(uuid), "gpu", _text(name))

    # The library.

    def _load(self) -> Any:
        if self._library is None:
            with contextlib.suppress(ImportError):
                import pynvml

                self._library = pynvml
        return self._library

    def _start(self) -> Any:
        library = self._load()
        if library is None:
            return None
        started_in = _started_in.get(library)
        if started_in not in (None, os.getpid()):
            raise MachineError(f"the NVIDIA driver is in use by process {started_in}, from which this one was forked")
        if started_in is None:
            try:
                library.nvmlInit()
            except library.NVMLError:
                return None
            _started_in[library] = os.getpid()
        return library

    def _handle(self, uuid: str) -> Any:
        if self._start() is None:
            raise MachineError(f"expected the device {uuid}, found no NVIDIA driver that answers", hint=_HINT)
        try:
            return self._ask("nvmlDeviceGetHandleByUUID", uuid)
        except _DriverError as error:
            if error.number == NOT_FOUND:
                raise DeviceLostError(f"expected the device {uuid}, found that it is gone", hint=_HINT) from error
            raise

    def _ask(self, function: str, *arguments: Any) -> Any:
        try:
            return getattr(self._library, function)(*arguments)
        except self._library.NVMLError as error:
            number = getattr(error, "value", None)
            number = number if isinstance(number, int) else -1
            message = f"the NVIDIA driver does not answer {function}: {error}"
            if number in LOST:
                raise DeviceLostError(message, hint=_HINT) from error
            raise _DriverError(message, number) from error
        except (AttributeError, TypeError, ValueError) as error:
            raise _DriverError(f"nvidia-ml-py cannot ask {function}: {error}", None) from error


class _Readings:
    """What could be read of a device, and why the rest could not; a lost device ends the reading."""

    def __init__(self, ask: Callable[..., Any]) -> None:
        self.values: dict[str, Any] = {}
        self.missing: dict[str, str] = {}
        self._ask = ask

    def take(self, name: str, pick: Callable[[Any], int | str], function: str, *arguments: Any) -> None:
        """Read one value by one call."""
        self.attempt(name, lambda: pick(self._ask(function, *arguments)))

    def attempt(self, name: str, read: Callable[[], int | str]) -> None:
        """Read one value; a number that no format holds, as drivers use for unknown, is missing too."""
        self.values.pop(name, None)
        self.missing.pop(name, None)
        try:
            value = read()
        except DeviceLostError:
            raise
        except MachineError as error:
            self.miss(name, error.message)
            return
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            self.miss(name, f"an answer that makes no sense: {error}")
            return
        if isinstance(value, int) and not 0 <= value < INTEGER_LIMIT:
            self.miss(name, f"the driver says {value:#x}, which is out of range")
        else:
            self.values[name] = value

    def miss(self, name: str, why: str) -> None:
        """Say why a value is null."""
        self.missing[name] = why


_HINT = "`nvidia-smi` says more about the driver and the device"


def _is_instance(uuid: str) -> bool:
    return uuid.startswith("MIG-")


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value

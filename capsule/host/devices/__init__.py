"""Devices by their UUID, behind one interface with three homes: NVML, the CPU, and folders that pretend for tests.

`find_devices` answers what a protocol requires; `backend_for` gives the home of a leased device. Neither waits long for
a driver that hangs: devices are listed in a process that can be killed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from capsule.core.errors import MachineError
from capsule.host.devices.base import Backend, Device, DeviceLostError
from capsule.host.devices.cpu import CpuBackend
from capsule.host.killable import call

__all__ = [
    "Backend",
    "Device",
    "DeviceLostError",
    "all_devices",
    "ask",
    "backend_for",
    "backends",
    "find_device",
    "find_devices",
]

DRIVER_SECONDS = 20.0

Value = TypeVar("Value")


def backends() -> list[Backend]:
    """Return the homes of devices on this machine, accelerators first; no driver is asked.

    With `CAPSULE_FAKE_DEVICES=<folder>` the folders in it take the place of the machine's accelerators.
    """
    fake = os.environ.get("CAPSULE_FAKE_DEVICES")
    if fake:
        from capsule.host.devices.fake import FakeBackend

        return [FakeBackend(Path(fake)), CpuBackend()]
    from capsule.host.devices.nvml import NvmlBackend, is_installed

    return [NvmlBackend(), CpuBackend()] if is_installed() else [CpuBackend()]


def ask(backend: Backend, question: Callable[[], Value]) -> Value:
    """Return what `question`, a call of the backend, answers; a driver that may hang is asked by a process of its own.

    Where this process talks to the driver already, a process forked from it could not, and it asks itself.

    Raises:
        MachineError: the driver did not answer in time, or the question raised it.
    """
    return call(question, DRIVER_SECONDS) if backend.sampled and not backend.started else question()


def all_devices() -> list[Device]:
    """Return every device of this machine, accelerators first.

    Raises:
        MachineError: a driver hangs.
    """
    return [device for backend in backends() for device in ask(backend, backend.devices)]


def backend_for(device: str) -> Backend:
    """Return the home of a device, by its UUID.

    Raises:
        MachineError: this machine has no such device, or a driver hangs.
    """
    cpu = CpuBackend()
    for backend in [cpu] if device == cpu.devices()[0].uuid else backends():
        if any(device == known.uuid for known in ask(backend, backend.devices)):
            return backend
    raise MachineError(f"expected the device {device}, found none of that name", hint="`capsule doctor` lists devices")


def find_device(required: str, choice: str | None = None) -> Device:
    """Return one device that a protocol's requirement and the caller's choice allow; see `find_devices`."""
    return find_devices(required, [choice] if choice else [], 1)[0]


def find_devices(required: str, choices: Sequence[str], count: int) -> tuple[Device, ...]:
    """Return `count` devices of one unit.

    `required` is the protocol's: `any` (an accelerator if there is one, else the CPU), `cpu`, `gpu`, or a part of the
    device's name. `choices` are the caller's: `cpu`, `gpu`, or UUIDs (a beginning that fits one device is enough).

    Raises:
        MachineError: there are too few such devices here, or a driver hangs that has to be asked.
    """
    only_cpu = set(choices) == {"cpu"} if choices else required == "cpu"
    present: Sequence[Device] = CpuBackend().devices() if only_cpu else ()
    if not (len(present) >= count and all(fits(device, required) for device in present)):
        present = all_devices()
    allowed = [device for device in present if fits(device, required)]
    if choices:
        allowed = [device for device in allowed if any(_chosen(device, choice) for choice in choices)]
    if required == "any" and allowed and not choices:
        allowed = [device for device in allowed if device.unit == allowed[0].unit]
    if len(allowed) < count or len({device.unit for device in allowed[:count]}) > 1:
        wanted = f"{count} x {required}" if count > 1 else required
        chosen = f" among {', '.join(choices)}" if choices else ""
        raise MachineError(
            f"expected the device {wanted!r}{chosen}, found {_listed(present)}",
            hint="`capsule doctor` says what each device needs; another requirement is an amendment of the protocol",
        )
    return tuple(allowed[:count])


def fits(device: Device, required: str) -> bool:
    """Whether a device meets a protocol's requirement."""
    if required == "any":
        return True
    if required in ("cpu", "gpu"):
        return device.unit == required
    return required.lower() in device.name.lower()


def _chosen(device: Device, choice: str) -> bool:
    return choice == device.unit or (len(choice) > 3 and device.uuid.startswith(choice))


def _listed(devices: Sequence[Device]) -> str:
    return ", ".join(f"{device.uuid} ({device.name})" for device in devices)

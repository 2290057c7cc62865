"""Slots: the devices of this machine that a run may use, in groups of as many as one attempt takes.

With as many devices chosen as one attempt takes there is one slot; with k times as many, k attempts go side by side.
Devices are chosen by name, or, where the caller leaves them open, the first that are not in quarantine, free ones
before held ones. Whether a device can be had is decided by its lease alone; what is looked at here saves a refusal.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from capsule.core.attempt import Unit
from capsule.core.errors import CapsuleError, MachineError, RefusedError, UsageError
from capsule.core.protocol import Budget
from capsule.host.devices import Device, all_devices, find_devices
from capsule.host.devices import fits as device_fits
from capsule.host.lease import (
    Holder,
    Quarantine,
    is_held,
    known_devices,
    lease_path,
    quarantined,
    read_holder,
)

UNITS = ("cpu", "gpu")
ANSWER_SECONDS = 5.0
"""How long the driver may take to list devices for people; a run waits for it."""

Slot = tuple[Device, ...]


def choose_slots(budget: Budget, choices: Sequence[str], lease_dir: Path) -> list[Slot]:
    """Return the slots of a run: `choices` are a unit, or UUIDs (a beginning that fits one device is enough).

    Raises:
        MachineError: there is no such device here, or too few.
        RefusedError: a device is in quarantine.
        UsageError: a choice fits several devices, or their number is not a multiple of what an attempt takes.
    """
    named = [choice for choice in choices if choice not in (*UNITS, "any")]
    if not named:
        return [_free(budget, [choice for choice in choices if choice in UNITS], lease_dir)]
    devices = _named(budget, named)
    count = budget.devices
    if len(devices) % count:
        raise UsageError(
            f"expected a multiple of {count} devices, as many as the protocol gives one attempt, "
            f"found {len(devices)}: {', '.join(device.uuid for device in devices)}",
            hint=f"name {count} for one attempt at a time, {2 * count} for two side by side",
        )
    for device in devices:
        found = quarantined(lease_dir, device.uuid)
        if found is not None:
            raise quarantine_error(device.uuid, found)
    units = {device.unit for device in devices}
    if len(units) > 1:
        raise UsageError(f"expected devices of one unit, found {' and '.join(sorted(units))}")
    return [tuple(devices[first : first + count]) for first in range(0, len(devices), count)]


def _named(budget: Budget, names: Sequence[str]) -> list[Device]:
    """Return the devices of these names, each once, in the order of the names."""
    present = all_devices()
    found: dict[str, Device] = {}
    for name in names:
        fitting = [device for device in present if device.uuid == name] or [
            device for device in present if len(name) > 3 and device.uuid.startswith(name)
        ]
        if len(fitting) > 1:
            raise UsageError(
                f"expected a name that one device has, found {name!r}, with which "
                f"{', '.join(device.uuid for device in fitting)} begin",
                hint="write more of the UUID; several devices are several options: --gpu UUID --gpu UUID",
            )
        if not fitting or not device_fits(fitting[0], budget.device):
            listed = ", ".join(f"{device.uuid} ({device.name})" for device in present)
            raise MachineError(
                f"expected a device {name!r} that the protocol allows ({budget.device}), found {listed}",
                hint="`capsule doctor` lists devices; another requirement is an amendment of the protocol",
            )
        found[fitting[0].uuid] = fitting[0]
    return list(found.values())


def _free(budget: Budget, units: Sequence[str], lease_dir: Path) -> Slot:
    """Return the first devices that the protocol allows: free before held, none in quarantine."""
    first = find_devices(budget.device, units, budget.devices)[0]
    allowed = [device for device in all_devices() if device_fits(device, budget.device) and device.unit == first.unit]
    aside = {device.uuid: found for device in allowed if (found := quarantined(lease_dir, device.uuid)) is not None}
    usable = [device for device in allowed if device.uuid not in aside]
    if len(usable) < budget.devices:
        name = next(iter(aside))
        raise quarantine_error(name, aside[name])
    usable.sort(key=lambda device: is_held(lease_path(lease_dir, device.uuid)))
    return tuple(usable[: budget.devices])


def quarantine_error(device: str, found: Quarantine) -> RefusedError:
    """Return the refusal of a device in quarantine."""
    return RefusedError(
        f"expected a device that may be used, found {device} in quarantine since {found.since}: {found.words} "
        f"(attempt {found.attempt} of {found.protocol})",
        hint=f"choose another device; once it is sound again: {readmit_hint(device)}",
    )


def readmit_hint(device: str) -> str:
    """Return the command that lifts a quarantine."""
    return f"capsule doctor --readmit {device}"


# What people are shown.


@dataclass(frozen=True)
class DeviceState:
    """One device: what it is, where the driver lists it; who holds it; whether and why it is in quarantine.

    `left` is what a holder that did not end in order left in the lease file of a device that nobody holds.
    """

    device: str
    unit: Unit | None
    name: str | None
    held: bool
    holder: Holder | None
    left: Holder | None
    quarantine: Quarantine | None


class Machine:
    """The devices of this machine; the driver is asked once, and not waited for if it does not answer."""

    def __init__(self, lease_dir: Path) -> None:
        self._lease_dir = lease_dir
        self._listed: tuple[list[Device], str | None] | None = None

    def look(self) -> tuple[list[DeviceState], str | None]:
        """Return the state of every device at this moment, and words if the driver did not list them."""
        if self._listed is None:
            self._listed = _list()
        listed, words = self._listed
        found = [self._state(device.uuid, device) for device in listed]
        names = {device.uuid for device in listed}
        others = [self._state(name, None) for name in known_devices(self._lease_dir) if name not in names]
        return [*found, *(state for state in others if state.held or state.quarantine)], words

    def _state(self, uuid: str, device: Device | None) -> DeviceState:
        path = lease_path(self._lease_dir, uuid)
        held, said = is_held(path), read_holder(path)
        return DeviceState(
            device=uuid,
            unit=device.unit if device else None,
            name=device.name if device else None,
            held=held,
            holder=said if held else None,
            left=None if held else said,
            quarantine=quarantined(self._lease_dir, uuid),
        )


def _list() -> tuple[list[Device], str | None]:
    """Ask the driver in a thread of its own: its calls can hang for ever."""
    found: list[Device] = []
    words = [f"the driver has not listed its devices within {ANSWER_SECONDS:g} s"]

    def ask() -> None:
        try:
            found.extend(all_devices())
            words.clear()
        except CapsuleError as error:
            words[:] = [error.message]

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(ANSWER_SECONDS)
    return list(found), words[0] if words else None

"""What every home of devices can say: what there is, how it looks when idle, and who else is on it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, Protocol

from capsule.core.attempt import Unit

Exclusivity = Literal["exclusive", "contaminated", "unverifiable"]
Baseline = dict[str, int | str | None]
"""What an idle device looked like; a value that could not be read is None."""


@dataclass(frozen=True)
class Device:
    """One device: its UUID, the unit in which its time is charged, and its name as the vendor gives it."""

    uuid: str
    unit: Unit
    name: str


@dataclass(frozen=True)
class Occupancy:
    """Whether a device is ours alone, the foreign processes on it, and words on how that is known."""

    exclusivity: Exclusivity
    foreign: tuple[int, ...]
    words: str


class Backend(Protocol):
    """A home of devices. Any method but `devices` raises MachineError when the device cannot be asked."""

    def devices(self) -> tuple[Device, ...]:
        """Return the devices that are here; none where the home does not exist."""

    def baseline(self, uuid: str) -> Baseline:
        """Measure the idle device."""

    def occupancy(self, uuid: str, own: Collection[int]) -> Occupancy:
        """Look for processes on the device other than `own`."""

    def unclean(self, uuid: str, baseline: Baseline) -> str | None:
        """Return words on how the device differs from its idle baseline, or None if it is back to it."""

    def environment(self, uuids: Collection[str]) -> dict[str, str]:
        """Return the environment by which a child sees these devices only."""

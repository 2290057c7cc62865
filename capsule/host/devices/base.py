"""What every home of devices can say: what there is, how it looks when idle, and who else is on it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from capsule.core.attempt import Unit
from capsule.core.errors import MachineError
from capsule.core.telemetry import Exclusivity, Sample
from capsule.host.clock import read_clock

Baseline = dict[str, int | str | None]
"""What an idle device looked like; a value that could not be read is None."""


class DeviceLostError(MachineError):
    """The driver takes the device for gone."""


@dataclass(frozen=True)
class Device:
    """One device: its UUID, the unit in which its time is charged, and its name as the vendor gives it."""

    uuid: str
    unit: Unit
    name: str


@dataclass(frozen=True)
class Occupancy:
    """Whether a device is ours alone, the foreign processes on it, words on how that is known, and our processes.

    `settling` says that utilization alone is in doubt, as a process leaves it behind that has just ended.
    """

    exclusivity: Exclusivity
    foreign: tuple[int, ...]
    words: str
    own: tuple[int, ...] = ()
    settling: bool = False


class Backend(Protocol):
    """A home of devices. Where a device cannot be asked, methods raise MachineError, but `devices` and `sample` do not.

    A lost device is a DeviceLostError. Where `sampled`, any method but `environment` may hang in the driver.
    """

    @property
    def sampled(self) -> bool:
        """Whether a separate process, which can be killed, must watch its devices."""

    @property
    def started(self) -> bool:
        """Whether this process talks to the driver already, so that a process forked from it cannot."""

    def devices(self) -> tuple[Device, ...]:
        """Return the devices that are here and answer; none where the home does not exist."""

    def baseline(self, uuid: str) -> Baseline:
        """Measure the idle device."""

    def occupancy(self, uuid: str, own: Collection[int]) -> Occupancy:
        """Look for processes on the device other than `own` and what descends from them, with no idle baseline."""

    def unclean(self, uuid: str, baseline: Baseline) -> str | None:
        """Return words on how the device differs from its idle baseline, or None if it is back to it."""

    def environment(self, uuids: Collection[str]) -> dict[str, str]:
        """Return the environment by which a child sees these devices only."""

    def sample(self, uuid: str, own: Collection[int], baseline: Baseline, *, whole: bool = True) -> Sample:
        """Look at the device once, while an attempt whose processes are `own` runs, or after it.

        `own` is read after the driver's list, so a collection that looks anew each time is never behind it. What could
        not be read is null with its reason; a device that does not answer gives a sample with `error`. Unless it
        shall be `whole`, what the driver takes long for may be left out.
        """

    def visible(self) -> tuple[str, ...] | None:
        """Return the UUIDs that a program with this process's environment can use; None where nobody can say.

        To be asked in a process forked for it: the driver reads the environment once.
        """


def unanswered(uuid: str, at_ms: int, error: MachineError) -> Sample:
    """Return the sample of a device that did not answer."""
    return Sample(
        at_ms=at_ms,
        device=uuid,
        exclusivity="unverifiable",
        words=error.message,
        own=(),
        foreign=(),
        error=error.message,
        lost=isinstance(error, DeviceLostError),
    )


def boottime_ms() -> int:
    """Return the boot-time clock, in milliseconds."""
    return read_clock().boottime_ms

"""Whose a device is, judged from what its driver lists; the driver's list alone is not believed.

Process ids are the driver's: inside a container they may be those of the host, zero or all ones, or the list may be
empty. A process that exists here and is not ours makes the device `contaminated`. An id that names no process here, and
use that no listed process explains, make it `unverifiable`, never `exclusive`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from capsule.host.devices.base import Occupancy
from capsule.host.process import read_stat

IDLE_BYTES_MAX = 2 * 2**30
"""Where no idle baseline is known, more memory in use than this with no process listed is somebody's."""
MEMORY_TOLERANCE_BYTES = 64 * 2**20
UNKNOWN_PIDS = frozenset({0, 2**32 - 1})
ECHO_SECONDS = 3.0
"""For so long after our process was last listed, memory and utilization without a process are what it left: the driver
averages utilization over up to a second, and samples lie up to two seconds apart."""


@dataclass(frozen=True)
class Look:
    """What a driver says at one moment; None where it does not say.

    `listed` are the ids of the processes that use the device, `unlisted` says why they are None.
    """

    listed: frozenset[int] | None
    unlisted: str
    used_bytes: int | None
    utilization_percent: int | None


class Judge:
    """Judges the devices of one home, and remembers when our own processes were last listed on each."""

    def __init__(self) -> None:
        self._own_seen: dict[str, float] = {}

    def sampled(
        self,
        uuid: str,
        look: Callable[[], Look],
        own: Collection[int],
        idle_bytes: int | None,
        exists: Callable[[int], bool],
    ) -> Occupancy:
        """Judge a device, where `idle_bytes` is None without its idle baseline; a doubt is looked at twice."""
        found = self._judge(uuid, look(), own, idle_bytes, exists)
        if found.exclusivity == "unverifiable":
            found = self._judge(uuid, look(), own, idle_bytes, exists)
        if found.own:
            self._own_seen[uuid] = time.monotonic()
        return found

    def _judge(
        self, uuid: str, look: Look, own: Collection[int], idle_bytes: int | None, exists: Callable[[int], bool]
    ) -> Occupancy:
        if look.listed is None:
            return Occupancy("unverifiable", (), f"{uuid}: processes are not listed: {look.unlisted}")
        ours = {pid for pid in look.listed - UNKNOWN_PIDS if _is_ours(pid, frozenset(own))}
        strangers = look.listed - ours
        foreign = tuple(sorted(pid for pid in strangers - UNKNOWN_PIDS if exists(pid)))
        mine = tuple(sorted(ours))
        if foreign:
            return Occupancy("contaminated", foreign, f"{uuid} is in use by pid {_joined(foreign)}", mine)
        unnamed = tuple(sorted(strangers - UNKNOWN_PIDS))
        if unnamed:
            words = f"{uuid} is in use by pid {_joined(unnamed)}, which names no process here"
            return Occupancy("unverifiable", (), words, mine)
        if strangers:
            words = f"{uuid} is in use by a process whose id the driver does not tell"
            return Occupancy("unverifiable", (), words, mine)
        use = _unexplained(look, idle_bytes) if not ours else None
        if use is None:
            return Occupancy("exclusive", (), f"{uuid}: no foreign process listed, {_mebibytes(look)}", mine)
        if time.monotonic() - self._own_seen.get(uuid, float("-inf")) < ECHO_SECONDS:
            words = f"{uuid}: no process listed, {use} from the attempt's own, which was listed just before"
            return Occupancy("exclusive", (), words)
        words = f"{uuid} has {use} and the driver lists no process"
        return Occupancy("unverifiable", (), words, settling=not _is_filled(look.used_bytes, idle_bytes))


def exists(pid: int) -> bool:
    """Whether a process of this id can be seen from here, one that is hidden from our user too."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _is_ours(pid: int, own: frozenset[int]) -> bool:
    """Whether the process is among `own` or was started, after these were collected, by one that is."""
    seen: set[int] = set()
    while pid > 0 and pid not in seen:
        if pid in own:
            return True
        seen.add(pid)
        stat = read_stat(pid) if own else None
        if stat is None:
            return False
        pid = stat.parent
    return False


def _unexplained(look: Look, idle_bytes: int | None) -> str | None:
    """Return words on use that nobody listed explains, or None."""
    if _is_filled(look.used_bytes, idle_bytes):
        idle = "" if idle_bytes is None else f", {idle_bytes / 2**20:.0f} MiB when idle,"
        return f"{_mebibytes(look)}{idle}"
    return f"{look.utilization_percent} % utilization" if look.utilization_percent else None


def _is_filled(used_bytes: int | None, idle_bytes: int | None) -> bool:
    limit = IDLE_BYTES_MAX if idle_bytes is None else idle_bytes + MEMORY_TOLERANCE_BYTES
    return used_bytes is not None and used_bytes > limit


def _mebibytes(look: Look) -> str:
    return "memory unknown" if look.used_bytes is None else f"{look.used_bytes / 2**20:.0f} MiB in use"


def _joined(pids: Collection[int]) -> str:
    return ", ".join(map(str, pids))

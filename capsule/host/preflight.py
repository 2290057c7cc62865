"""What must hold before a trial starts: the frozen sources, idle devices, and nothing left of an earlier attempt."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal

from capsule.core.errors import DriftError, MachineError
from capsule.core.manifest import read_sources
from capsule.host.clock import BOOT_UNKNOWN, read_boot_id
from capsule.host.devices import Backend
from capsule.host.devices.base import Baseline, Occupancy
from capsule.host.launch import SourceTree
from capsule.host.lease import Holder
from capsule.host.process import with_environment
from capsule.host.store import verify_tree

TREE = "CAPSULE_TREE"
"""The environment variable whose value every process of one attempt's tree was started with."""
SETTLE_SECONDS = 1.5
"""How long utilization alone may outlive a process that ended before we looked."""
SETTLE_TURN_SECONDS = 0.25


class Refusal(Exception):
    """Nothing may be started; `reason` is the word for the ledger."""

    def __init__(self, reason: str, words: str) -> None:
        super().__init__(words)
        self.reason = reason


def inspect_devices(
    backends: Mapping[str, Backend],
    inherited: Mapping[str, Holder],
    exclusivity: Literal["required", "best_effort"],
    meanwhile: Callable[[Collection[str]], None] = lambda uuids: None,
) -> Baseline:
    """Look at leased devices; returns how they look when idle, every key begun with the device's UUID.

    Utilization alone is given time to settle; `meanwhile` is called every so often with the devices that are waited
    for.

    Raises:
        Refusal: a device is not idle, or not known to be where that is required.
        MachineError: a device is not there or does not answer.
    """
    for uuid, backend in backends.items():
        if uuid in inherited:
            _check_inherited(uuid, inherited[uuid], backend)
    for found in _settled(backends, meanwhile):
        if found.exclusivity == "unverifiable" and exclusivity == "required":
            raise Refusal("unverifiable", f"exclusivity is required and cannot be proven: {found.words}")
    baseline: Baseline = {}
    for uuid, backend in backends.items():
        baseline |= {f"{uuid}.{key}": value for key, value in backend.baseline(uuid).items()}
    return baseline


def _settled(backends: Mapping[str, Backend], meanwhile: Callable[[Collection[str]], None]) -> list[Occupancy]:
    """Look at every device until none has utilization that nobody explains, for a moment at most."""
    until = time.monotonic() + SETTLE_SECONDS
    while True:
        found = {uuid: backend.occupancy(uuid, own=()) for uuid, backend in backends.items()}
        for item in found.values():
            if item.exclusivity == "contaminated":
                raise Refusal("foreign_process", item.words)
        settling = [uuid for uuid, item in found.items() if item.settling]
        if not settling or time.monotonic() > until:
            return list(found.values())
        meanwhile(settling)
        time.sleep(SETTLE_TURN_SECONDS)


def _check_inherited(uuid: str, left: Holder, backend: Backend) -> None:
    """What a holder left that did not end in order: its processes, or a device that did not come back.

    No process outlives a boot, and a device is reset by it: how it looked before is no measure any more.
    """
    if left.boot_id not in (BOOT_UNKNOWN, read_boot_id()):
        return
    who = f"attempt {left.attempt} of {left.protocol}"
    alive = with_environment(TREE, left.token)
    if alive:
        pids = ", ".join(str(item.pid) for item in alive)
        raise Refusal("busy", f"device {uuid} is still used by what {who} left running, pid {pids}")
    words = backend.unclean(uuid, baseline_of(left.baseline, uuid)) if left.baseline else None
    if words:
        raise Refusal("device_unclean", f"{words}; {who} left it so")


def baseline_of(baseline: Baseline, uuid: str) -> Baseline:
    """Return one device's part of a baseline of several."""
    start = f"{uuid}."
    return {key.removeprefix(start): value for key, value in baseline.items() if key.startswith(start)}


def source_drifts(trees: Sequence[SourceTree]) -> str | None:
    """Hash every snapshot again; words on what is not as it was frozen."""
    drifts: list[str] = []
    for tree in trees:
        entries = read_sources(Path(tree.sources).read_bytes(), tree.sources)
        try:
            drifts += [f"{drift} in the snapshot" for drift in verify_tree(entries, Path(tree.root))]
        except (DriftError, MachineError) as error:
            drifts.append(f"the snapshot cannot be read: {error.message}")
    more = f"; {len(drifts) - 5} more" if len(drifts) > 5 else ""
    return "; ".join(drifts[:5]) + more if drifts else None

"""Processes of this machine: who they are, whose descendants, and ending them without ever hitting a stranger.

A process is named by pid and start time together, under one boot: pids are reused. A signal goes through a pidfd that
was opened before that name was checked once more, so it cannot reach whoever got the pid since. A supervisor is a
subreaper: whatever its trial started, `setsid` and double forks included, stays below it in the tree.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from capsule.core.errors import MachineError
from capsule.core.schema import Model, Natural
from capsule.host.clock import read_boot_id, same_boot

PROC = Path("/proc")
PR_SET_CHILD_SUBREAPER = 36
DEAD = ("Z", "X")


class Identity(Model):
    """What names one process for ever: pid, start time in clock ticks since boot, and the boot."""

    pid: Natural
    start_ticks: Natural
    boot_id: str


@dataclass(frozen=True)
class Stat:
    """What the kernel says about a process."""

    pid: int
    parent: int
    state: str
    start_ticks: int
    threads: int

    @property
    def alive(self) -> bool:
        """Whether it can still do something: a zombie without other threads only waits to be collected."""
        return self.state not in DEAD or self.threads > 1


def read_stat(pid: int) -> Stat | None:
    """Return what the kernel says about a process, or None if there is none."""
    try:
        text = (PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    fields = text[text.rindex(b")") + 2 :].split()
    return Stat(pid, int(fields[1]), fields[0].decode(), int(fields[19]), int(fields[17]))


def identify(pid: int) -> Identity:
    """Return the identity of a process that is known to exist."""
    found = read_stat(pid)
    return Identity(pid=pid, start_ticks=found.start_ticks if found else 0, boot_id=read_boot_id())


def is_alive(identity: Identity) -> bool:
    """Whether exactly this process still runs."""
    found = read_stat(identity.pid)
    same = found is not None and found.start_ticks == identity.start_ticks
    return same and found is not None and found.alive and same_boot(identity.boot_id, read_boot_id())


def every_process() -> Iterator[Stat]:
    """Yield every process that can be seen."""
    for path in PROC.iterdir():
        if path.name.isdigit() and (found := read_stat(int(path.name))) is not None:
            yield found


def descendants(root: int) -> list[Stat]:
    """Return the live descendants of a process, parents before children."""
    children: dict[int, list[Stat]] = {}
    for item in every_process():
        children.setdefault(item.parent, []).append(item)
    found: list[Stat] = []
    generation = [root]
    while generation:
        below = [child for pid in generation for child in children.get(pid, ())]
        found.extend(below)
        generation = [child.pid for child in below]
    return [item for item in found if item.alive]


def send(process: Stat, number: int) -> bool:
    """Signal exactly this process; whether it was there to be signalled."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        now = read_stat(process.pid)
        if now is None or now.start_ticks != process.start_ticks or not now.alive:
            return False
        signal.pidfd_send_signal(descriptor, number)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(descriptor)


def become_subreaper() -> None:
    """Make orphaned descendants ours, so that none leaves the tree.

    Raises:
        MachineError: this system has no such thing (it is Linux's).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "prctl") or libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise MachineError(
            "expected a system on which a process can adopt its orphaned descendants, found none",
            hint="attempts run on Linux; verify, replay and report run everywhere",
        )


def with_environment(name: str, value: str) -> list[Stat]:
    """Return the live processes that were started with this environment variable."""
    needle = f"{name}={value}".encode()
    found = []
    for item in every_process():
        try:
            environment = (PROC / str(item.pid) / "environ").read_bytes()
        except OSError:
            continue
        if item.alive and needle in environment.split(b"\0"):
            found.append(item)
    return found


def lock_owners(path: Path) -> list[Stat]:
    """Return the live processes that hold the `flock` on a file: those whose descriptor carries the lock."""
    try:
        wanted = path.stat()
    except OSError:
        return []
    return [item for item in every_process() if item.alive and _owns_lock(item.pid, wanted)]


def _owns_lock(pid: int, wanted: os.stat_result) -> bool:
    try:
        for path in (PROC / str(pid) / "fd").iterdir():
            there = path.stat()
            if (there.st_dev, there.st_ino) == (wanted.st_dev, wanted.st_ino):
                details = (PROC / str(pid) / "fdinfo" / path.name).read_text()
                if "lock:" in details and "FLOCK" in details:
                    return True
    except OSError:
        return False
    return False

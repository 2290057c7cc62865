"""Processes of this machine: who they are, whose descendants, and ending them without ever hitting a stranger.

A process is named by pid and start time together, under one boot: pids are reused. A signal goes through a pidfd that
was opened before that name was checked once more, so it cannot reach whoever got the pid since. A supervisor is a
subreaper: whatever its trial started, `setsid` and double forks included, stays below it in the tree.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from capsule.core.errors import CapsuleError, MachineError
from capsule.core.schema import Model, Natural
from capsule.host.clock import read_boot_id, same_boot
from capsule.host.durable import read_regular

PROC = Path("/proc")
CHILDREN = PROC / "thread-self" / "children"
"""There if this kernel lists the children of a thread (CONFIG_PROC_CHILDREN)."""
PR_SET_CHILD_SUBREAPER = 36
DEAD = ("Z", "X")
WALKS_MAX = 1_000
STOP_ROUNDS_MAX = 50
KILL_PAUSE_SECONDS = 0.005
RECORDED_MAX = 10_000
RECORDED_BYTES_MAX = 1 << 22


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

    @property
    def name(self) -> tuple[int, int]:
        """What tells it from every other process of this boot: pid and start time in clock ticks."""
        return self.pid, self.start_ticks


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
    """Return the live descendants of a process, parents before children.

    Its cost is that of the tree, not of the machine, where the kernel lists children. While a tree forks and ends, a
    single answer can miss some of its members; an empty answer is one in which nothing ended while it was looked for,
    so that nothing can have changed parents unseen (the root being a subreaper and one thread).
    """
    if not CHILDREN.exists():
        return _descendants_among_all(root)
    known: set[tuple[int, int]] = set()
    for _ in range(WALKS_MAX):
        found, ended, moved = _descendants_by_children(root)
        if found or (not moved and ended <= known):
            return found
        known |= ended
    return _descendants_among_all(root)


def _descendants_by_children(root: int) -> tuple[list[Stat], set[tuple[int, int]], bool]:
    """Walk once: those that live, those that had ended, and whether any vanished or changed parents meanwhile."""
    top = read_stat(root)
    queue = [] if top is None else [top]
    seen = {root}
    ended: set[tuple[int, int]] = set()
    moved = False
    for parent in queue:
        below = []
        for pid in _children(parent.pid):
            child = read_stat(pid)
            if child is None or child.parent != parent.pid:
                moved = True
            elif pid not in seen:
                below.append(child)
        again = read_stat(parent.pid) if below else None
        if below and (again is None or again.name != parent.name):
            # It was gone before its children were read: its pid may be a stranger's by now, and so may these.
            moved = True
            continue
        seen.update(child.pid for child in below)
        ended.update(child.name for child in below if not child.alive)
        queue.extend(child for child in below if child.alive)
    return queue[1:], ended, moved


def _children(pid: int) -> list[int]:
    """Return the pids of the children that the kernel lists, ended ones included."""
    found: list[int] = []
    try:
        for thread in (PROC / str(pid) / "task").iterdir():
            try:
                found += map(int, (thread / "children").read_bytes().split())
            except OSError:
                continue  # this thread has ended
    except OSError:
        return found
    return found


def _descendants_among_all(root: int) -> list[Stat]:
    """Look through every process of the machine."""
    children: dict[int, list[Stat]] = {}
    for item in every_process():
        children.setdefault(item.parent, []).append(item)
    found: list[Stat] = []
    generation = [(root, 0)]
    while generation:
        # What is older than its parent is the child of an earlier process of that pid.
        below = [child for pid, since in generation for child in children.get(pid, ()) if child.start_ticks >= since]
        found.extend(below)
        generation = [child.name for child in below]
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


def end_tree(list_tree: Callable[[], Sequence[Stat]], *, seconds: float) -> list[Stat]:
    """Kill a whole tree, however fast it forks, and return what still lives after that many seconds, or none.

    Killing one process after another loses against a tree whose members replace each other. So everything is stopped
    first (SIGSTOP, which none can ignore) until nothing new appears, and then killed; again and again until nothing is
    left. `list_tree` returns the processes that must end, never the caller or its helpers. It may collect the caller's
    dead children. What it has returned once is ended even if it is not below the same root any more. There is at
    least one round; one that cannot be killed (it hangs in the kernel) is among what is returned.
    """
    until = time.monotonic() + seconds
    known: dict[tuple[int, int], Stat] = {}
    while True:
        for _ in range(STOP_ROUNDS_MAX):
            new = _take_in(known, list_tree())
            for item in new:
                send(item, signal.SIGSTOP)
            if not new or time.monotonic() >= until:
                break
        for item in known.values():
            send(item, signal.SIGKILL)
        time.sleep(KILL_PAUSE_SECONDS)
        left = {item.name: item for item in (*list_tree(), *filter(_lives, known.values()))}
        if not left or time.monotonic() >= until:
            return list(left.values())


def _take_in(known: dict[tuple[int, int], Stat], listed: Sequence[Stat]) -> list[Stat]:
    """Add what is listed to what is known, forget what has ended, and return what is new."""
    new = [item for item in listed if item.name not in known]
    names = {item.name for item in listed}
    for item in [item for item in known.values() if item.name not in names and not _lives(item)]:
        del known[item.name]
    known.update((item.name, item) for item in new)
    return new


def _lives(process: Stat) -> bool:
    now = read_stat(process.pid)
    return now is not None and now.name == process.name and now.alive


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


class Tree(Model):
    """Those who were alive below a supervisor when this was written."""

    processes: tuple[Identity, ...]


class TreeRecorder:
    """Keeps a file that names the live processes of a tree, for whoever must end them when all above it was killed.

    The file is replaced as a whole and not synced: it serves this boot only. It holds the newest 10 000 processes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._boot_id = read_boot_id()
        self._known: dict[tuple[int, int], Stat] = {}
        self._written: list[tuple[int, int]] | None = None

    def record(self, tree: Sequence[Stat]) -> bool:
        """Write down the tree as it is now, and who left it alive since it was recorded; whether anything had changed.

        Raises:
            OSError: the file cannot be written; the earlier one stays.
        """
        _take_in(self._known, tree)
        newest = sorted(self._known, key=lambda name: (name[1], name[0]))[-RECORDED_MAX:]
        if newest == self._written:
            return False
        named = (Identity(pid=pid, start_ticks=start, boot_id=self._boot_id) for pid, start in newest)
        _replace(self._path, Tree(processes=tuple(named)).to_bytes())
        self._written = newest
        return True


def recorded(path: Path) -> list[Identity]:
    """Return the processes that a `TreeRecorder` wrote down last; none if there is no such file, or it is damaged."""
    try:
        data = read_regular(path, RECORDED_BYTES_MAX)
        return [] if data is None else list(Tree.from_bytes(data, str(path)).processes)
    except (OSError, CapsuleError):
        return []


def survivors(identities: Iterable[Identity]) -> list[Stat]:
    """Return those of these very processes that still live, and all that lives below them now."""
    boot_id = read_boot_id()
    found: dict[tuple[int, int], Stat] = {}
    for identity in identities:
        now = read_stat(identity.pid)
        if now is None or now.name != (identity.pid, identity.start_ticks) or not same_boot(identity.boot_id, boot_id):
            continue
        if now.alive and now.name not in found:
            found.update((item.name, item) for item in (now, *descendants(now.pid)))
    return list(found.values())


def _replace(path: Path, data: bytes) -> None:
    """Put a file in its place whole or not at all, as `write_durably` does, but without waiting for the disk."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
        temporary.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)
        temporary.unlink(missing_ok=True)
        raise


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

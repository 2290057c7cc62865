"""One attempt's own cgroup: a folder of the cgroup v2 hierarchy in which everything that a trial starts stays.

Membership is inherited: double forks, new sessions and cleared environments do not leave it. Only who may write to the
hierarchy's files can leave, so a trial that runs as root could. Where there is no such hierarchy, or it cannot be
written, there is no cgroup, and attempts are ended by walking the process tree.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
OWN = Path("/proc/self/cgroup")
PROCESSES = "cgroup.procs"
KILL = "cgroup.kill"


class Cgroup:
    """The cgroup of this folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def join(self) -> bool:
        """Move the calling process here, to be called by a forked child on itself; whether it worked."""
        return _write(self.path / PROCESSES, "0")

    def processes(self) -> list[int]:
        """Return the pids of the live processes here and below, ascending, as far as this pid namespace has one."""
        found: set[int] = set()
        for folder in self._folders():
            found.update(int(word) for word in (_read(folder / PROCESSES) or "").split())
        return sorted(found - {0})

    def kill(self) -> bool:
        """Kill everything here and below, whatever it forks meanwhile (SIGKILL); whether the kernel took the order.

        It does not wait for the end of what it kills.
        """
        return _write(self.path / KILL, "1")

    def limit_processes(self, count: int) -> bool:
        """Let at most `count` tasks (threads too) exist here and below; False where the pids controller is missing."""
        return _write(self.path / "pids.max", str(count))

    def denied_forks(self) -> int | None:
        """Return how many forks that limit has denied, or None where this is not counted."""
        return self._count("pids.events", "max")

    def oom_kills(self) -> int | None:
        """Return how many processes here and below any kind of out-of-memory killer ended; None if not counted."""
        return self._count("memory.events", "oom_kill")

    def remove(self) -> bool:
        """Remove the folder and those below it, as far as no live process is in them; whether all of it is gone."""
        for folder in reversed(list(self._folders())):
            try:
                folder.rmdir()
            except OSError:
                continue
        return not self.path.exists()

    def _folders(self) -> Iterator[Path]:
        """Yield this folder and those below it, each before what it holds."""
        for folder, _, _ in os.walk(self.path):
            yield Path(folder)

    def _count(self, name: str, key: str) -> int | None:
        for line in (_read(self.path / name) or "").splitlines():
            match line.split():
                case [found, number] if found == key and number.isdecimal():
                    return int(number)
        return None


def create(name: str) -> Cgroup | None:
    """Make an empty cgroup of this name below the one of this process.

    None where that is impossible for whatever reason: no cgroup v2, no right to write, no `cgroup.kill` (before Linux
    5.14), no room for processes below this one's cgroup, or a name that is taken already or is no file name.
    """
    if Path(name).name != name:
        return None
    for place in places(name):
        if str(os.getpid()) in (_read(place.parent / PROCESSES) or "").split():
            return create_below(place.parent, name)
    return None


def places(name: str) -> list[Path]:
    """Return where `create` makes a cgroup of this name; it need not be there."""
    return [parent / name for parent in own_folders(_read(MOUNTS) or "", _read(OWN) or "")]


def create_below(parent: Path, name: str) -> Cgroup | None:
    """Make an empty cgroup below this one; None where that is impossible, as for `create`."""
    path = parent / name
    try:
        path.mkdir()
    except (OSError, ValueError):
        return None
    made = Cgroup(path)
    writable = all(os.access(file, os.W_OK) for file in (parent / PROCESSES, path / PROCESSES, path / KILL))
    if not writable or "invalid" in (_read(path / "cgroup.type") or ""):
        made.remove()
        return None
    return made


def own_folders(mounts: str, own: str) -> list[Path]:
    """Return where the cgroup v2 of a process can be seen, from its `mountinfo` and `cgroup` in `/proc`."""
    for line in own.splitlines():
        if line.startswith("0::/"):
            inside = Path(line[3:])
            break
    else:
        return []
    found = []
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split()
        if right.split()[:1] == ["cgroup2"] and len(fields) > 4 and ".." not in inside.parts:
            root, point = Path(_unescaped(fields[3])), Path(_unescaped(fields[4]))
            if inside.is_relative_to(root):
                found.append(point / inside.relative_to(root))
    return found


def _unescaped(word: str) -> str:
    """Undo what the kernel does to blanks, line ends and backslashes in a mount's paths."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), word)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return None


def _write(path: Path, text: str) -> bool:
    """Write to a file that is there already; with plain system calls, fit for a child between fork and exec."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.write(descriptor, text.encode()) == len(text)
    except OSError:
        return False
    finally:
        os.close(descriptor)

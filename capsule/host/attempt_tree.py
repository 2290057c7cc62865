"""The process tree of one attempt as its supervisor sees it: who lives in it, and ending all of it."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from capsule.host import cgroup
from capsule.host.process import Stat, TreeRecorder, descendants, end_tree, send
from capsule.host.traces import SEEN

KILL_SECONDS = 1.0
"""How long one round of killing may take before the supervisor looks at its other duties again."""
TASKS_A_PROCESS = 16
"""A cgroup's limit counts threads; it is to protect the machine, so it leaves room for that many a process."""


class AttemptTree:
    """Everything below this process but its helpers: `watchdog` itself, and `sampler` with whatever it forked."""

    def __init__(self, directory: Path, token: str, processes_max: int) -> None:
        self.sampler = 0
        self.watchdog = 0
        self.seen: set[int] = set()
        self.cgroup: cgroup.Cgroup | None = None
        self._token = token
        self._processes_max = processes_max
        self._recorder = TreeRecorder(directory / SEEN)

    def enclose(self) -> None:
        """Make a cgroup for what is to be started, where this machine lets us."""
        self.cgroup = cgroup.create(f"capsule-{self._token}")
        if self.cgroup is not None:
            self.cgroup.limit_processes(self._processes_max * TASKS_A_PROCESS)

    def collected(self, pid: int) -> None:
        """Take in that a child was collected: if it was a helper, its pid may be that of any process from now on."""
        self.sampler = 0 if pid == self.sampler else self.sampler
        self.watchdog = 0 if pid == self.watchdog else self.watchdog

    def live(self) -> list[Stat]:
        """Return its live processes, parents before children."""
        hidden = {self.sampler}
        found = []
        for item in descendants(os.getpid()):
            if item.pid in hidden or item.parent in hidden:
                hidden.add(item.pid)
            elif item.pid != self.watchdog:
                found.append(item)
        return found

    def look(self) -> str | None:
        """Record who is there; words if there are more than the protocol allows, or the kernel refused to make more."""
        tree = self.live()
        self.seen |= {item.pid for item in tree[: self._processes_max]}
        with contextlib.suppress(OSError):  # a full disk ends no attempt; the file before stays
            self._recorder.record(tree)
        if len(tree) > self._processes_max:
            return f"{len(tree)} processes at once, {self._processes_max} allowed"
        denied = self.cgroup.denied_forks() if self.cgroup is not None else None
        return f"its cgroup refused {denied} new tasks" if denied else None

    def ask_to_end(self) -> None:
        """Ask every process to end; parents come first, so that they start nothing new meanwhile."""
        for item in self.live():
            send(item, signal.SIGTERM)

    def kill(self) -> None:
        """Kill every process: through the cgroup where there is one, and whatever is still below this process."""
        if self.cgroup is not None:
            self.cgroup.kill()
        end_tree(self.live, seconds=KILL_SECONDS)

    def forget(self) -> None:
        """Remove the cgroup; nothing is left in it."""
        if self.cgroup is not None:
            self.cgroup.remove()

"""The trial's process as its parent sees it: started in a session of its own, its output kept, its end collected."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from capsule.host.loop import Loop
from capsule.host.output import CappedOutput

CHUNK = 1 << 16


class Usage(NamedTuple):
    """What a collected process used, its collected descendants included."""

    user_ms: int
    system_ms: int
    max_rss_bytes: int


def collect() -> list[tuple[int, int, Usage]]:
    """Collect every exited child of this process: pid, raw wait status and usage of each."""
    collected: list[tuple[int, int, Usage]] = []
    while True:
        try:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return collected
        if pid == 0:
            return collected
        used = Usage(int(usage.ru_utime * 1000), int(usage.ru_stime * 1000), usage.ru_maxrss * 1024)
        collected.append((pid, status, used))


class Child:
    """A started trial whose output goes into files."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        directory: Path,
        environment: Mapping[str, str],
        inherited: Sequence[int],
        outputs: tuple[CappedOutput, CappedOutput],
        loop: Loop,
        join: Callable[[], object] | None = None,
    ) -> None:
        """Start the trial; `join` is called in its process before the program is executed.

        Raises:
            OSError: there is no such program or folder, or it cannot be executed.
            ValueError: an argument holds a byte that none can hold.
        """
        self._loop = loop
        self._popen = subprocess.Popen(
            list(argv),
            cwd=directory,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=list(inherited),
            start_new_session=True,
            preexec_fn=join,
            bufsize=0,
        )
        self.pid = self._popen.pid
        self._pipes: dict[int, CappedOutput] = {}
        for pipe, output in zip((self._popen.stdout, self._popen.stderr), outputs, strict=True):
            assert pipe is not None
            descriptor = pipe.fileno()
            os.set_blocking(descriptor, False)
            self._pipes[descriptor] = output
            loop.watch(descriptor, partial(self._read, descriptor))

    def drain(self, seconds: float) -> None:
        """Take in the output that is left, for at most that long if somebody outside the tree still holds a pipe."""
        until = time.monotonic() + seconds
        while self._pipes and time.monotonic() < until:
            self._loop.turn(50)

    def _read(self, descriptor: int) -> None:
        try:
            data = os.read(descriptor, CHUNK)
        except BlockingIOError:
            return
        if data:
            self._pipes[descriptor].write(data)
        else:
            self._loop.forget(descriptor)
            del self._pipes[descriptor]

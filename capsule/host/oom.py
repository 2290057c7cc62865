"""Whether the kernel's log says that its out-of-memory killer ended a process: evidence, or nothing at all."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Literal

from capsule.host.clock import ClockSource, read_clock

KMSG = Path("/dev/kmsg")
PID_NAMESPACE = Path("/proc/self/ns/pid")
FIRST_PID_NAMESPACE = "pid:[4026531836]"
"""The pid namespace that the kernel's log counts in; its number is fixed (PROC_PID_INIT_INO)."""
RECORD_BYTES = 1 << 14
LOG_BYTES_MAX = 1 << 26

RECORD = re.compile(r"(\d+),\d+,(\d+),[^;]*;(.*)")
KILLED = re.compile(
    r"(Memory cgroup out of memory|Out of memory(?: \(oom_kill_allocating_task\))?): Killed process (\d+)\b"
)


def find(
    pids: Collection[int],
    since_ms: int,
    path: Path = KMSG,
    *,
    namespace: Path = PID_NAMESPACE,
    clock: ClockSource = read_clock,
) -> tuple[Literal["oom_host", "oom_cgroup"], str] | None:
    """Return which kind of out-of-memory kill ended one of these processes, and the words of the kernel's log.

    `since_ms` is on the boot-time clock, in milliseconds: kills before it were of earlier owners of a pid. The log's
    own clock stands still while the machine sleeps, which is accounted for, and is not corrected by the network's time,
    which is not: on a machine that is up for months it can be some seconds off, and a kill right after `since_ms` be
    missed.

    None is no evidence, whatever the reason: no such kill, a log that may not be read or has dropped it, or a process
    that counts pids in a namespace of its own (most containers), where the numbers of the log are those of others.
    """
    try:
        if os.readlink(namespace) != FIRST_PID_NAMESPACE:  # noqa: PTH115 - it names no file
            return None
        log = _read_log(path)
    except OSError:
        return None
    now = clock()
    since_us = (since_ms - (now.boottime_ms - now.monotonic_ms)) * 1000
    for line in log.split(b"\n"):
        record = RECORD.match(line.decode(errors="replace"))
        # Whoever may write to the log has a facility above zero there: that is not the kernel speaking.
        if record is None or int(record[1]) >> 3 != 0 or int(record[2]) < since_us:
            continue
        killed = KILLED.match(record[3])
        if killed is not None and int(killed[2]) in pids:
            words = f"kernel log at {int(record[2]) / 1e6:.6f} s: {record[3][:400]}"
            return ("oom_cgroup" if killed[1].startswith("Memory cgroup") else "oom_host"), words
    return None


def _read_log(path: Path) -> bytes:
    """Read what the log holds now, one record a read, without waiting; every reader has a place of its own in it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    log = bytearray()
    try:
        while len(log) < LOG_BYTES_MAX:
            try:
                record = os.read(descriptor, RECORD_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                # Records were dropped before they were read: the next read goes on behind the gap.
                if error.errno == errno.EPIPE:
                    continue
                raise
            if not record:
                break
            log += record
    finally:
        os.close(descriptor)
    return bytes(log)

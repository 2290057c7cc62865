"""Every clock of this machine in one reading; durations are differences of `boottime_ms` under one boot id."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from capsule.core.attempt import Clock

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
BOOT_UNKNOWN = "unknown"
"""The boot id of a system that gives none. Two of them are never taken for the same boot."""


class ClockSource(Protocol):
    """What reads the clocks: `read_clock`, or a test's own."""

    def __call__(self) -> Clock:
        """Return one reading of every clock."""


def read_clock() -> Clock:
    """Read every clock now, in whole milliseconds.

    Where the system has no CLOCK_BOOTTIME, `boottime_ms` is the monotonic clock, which may stand still while the
    machine sleeps; where it names no boot, the boot id is `unknown`.
    """
    monotonic = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    boottime = time.clock_gettime_ns(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else monotonic
    return Clock(
        realtime=realtime_text(time.time_ns() // 1_000_000),
        boottime_ms=boottime // 1_000_000,
        monotonic_ms=monotonic // 1_000_000,
        boot_id=read_boot_id(),
    )


def read_boot_id() -> str:
    """Return the id of this boot, or `unknown`."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip() or BOOT_UNKNOWN
    except OSError:
        return BOOT_UNKNOWN


def same_boot(one: str, other: str) -> bool:
    """Whether two boot ids certainly name one boot."""
    return one == other != BOOT_UNKNOWN


def realtime_text(milliseconds: int) -> str:
    """Write milliseconds since 1970 as RFC 3339 in UTC with `Z`."""
    seconds, rest = divmod(milliseconds, 1000)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest:03d}Z"


def realtime_ms(text: str) -> int:
    """Return the milliseconds since 1970 of a clock's `realtime`; the inverse of `realtime_text`."""
    moment = datetime.fromisoformat(text)
    return int(moment.replace(microsecond=0).timestamp()) * 1000 + moment.microsecond // 1000

"""What an attempt is charged when clocks do odd things, and which of several findings names its outcome."""

from types import SimpleNamespace
from typing import Any

import pytest

from capsule.core.attempt import Clock
from capsule.core.record import Journal, RawRow
from capsule.host.child import Usage
from capsule.host.settlement import failed_exit, judge, observed_charge, observed_exit, suspended_ms

LEASED = Clock(realtime="2026-01-01T00:00:00.000Z", boottime_ms=1_000, monotonic_ms=1_000, boot_id="b")


def later(boottime_ms: int, monotonic_ms: int, realtime: str = "2026-01-01T00:00:09.000Z") -> Clock:
    return Clock(realtime=realtime, boottime_ms=boottime_ms, monotonic_ms=monotonic_ms, boot_id="b")


def test_time_asleep_is_charged_and_named() -> None:
    released = later(61_000, 6_000)
    assert observed_charge(2, LEASED, released).debited_ms == 120_000
    assert suspended_ms(LEASED, released) == 55_000


@pytest.mark.parametrize("realtime", ["2025-12-31T23:00:00.000Z", "2026-01-01T01:00:00.000Z"])
def test_a_step_of_the_wall_clock_changes_nothing(realtime: str) -> None:
    released = later(6_000, 6_000, realtime)
    assert observed_charge(1, LEASED, released).debited_ms == 5_000
    assert suspended_ms(LEASED, released) == 0


USAGE = Usage(user_ms=1, system_ms=2, max_rss_bytes=3)
ORDER: Any = SimpleNamespace(cells=(SimpleNamespace(cell="c0"),))
GOOD = Journal(rows={"c0": RawRow("c0", {})}, ended=True)
NOTHING: dict[str, Any] = {"cause": None, "leaked": None, "drift": None, "foreign": None}
SHARED = ("contaminated", "pid 9 used the device")
EVERYTHING = NOTHING | {"leaked": "pid 7", "drift": "changed: a.py", "foreign": "module x", "shared": SHARED}
KILLED = {"killed": ("sigkill_unattributed", "ended by SIGKILL")}


@pytest.mark.parametrize(
    ("status", "found", "outcome"),
    [
        (9, EVERYTHING | {"cause": ("wall_limit", "20 s")}, "wall_limit"),
        (0, EVERYTHING | {"cause": ("user", "SIGINT")}, "user"),
        (None, EVERYTHING, "exec_failed"),
        (None, EVERYTHING | {"device": ("device_lost", "gone")}, "device_lost"),
        (0, NOTHING | {"device": ("device_suspect", "ecc moved")}, "device_suspect"),
        (11, EVERYTHING, "signalled"),
        (9, EVERYTHING | KILLED, "sigkill_unattributed"),
        (1 << 8, EVERYTHING, "exit_nonzero"),
        (0, EVERYTHING, "leaked_descendants"),
        (0, EVERYTHING | {"leaked": None}, "source_changed"),
        (0, EVERYTHING | {"leaked": None, "drift": None}, "provenance"),
        (0, NOTHING | {"shared": SHARED}, "contaminated"),
        (0, NOTHING, "completed"),
    ],
)
def test_the_nearest_cause_names_the_outcome(status: int | None, found: dict[str, Any], outcome: str) -> None:
    failed = failed_exit("exec_failed", "no such file")
    exited = failed if status is None else observed_exit(status, USAGE, found["cause"])
    assert judge(ORDER, exited, GOOD, **found)[0] == outcome


def test_real_time_signals_and_core_dumps_keep_their_raw_status() -> None:
    exited = observed_exit(40, USAGE, None)
    assert (exited.signal, exited.wait_status, exited.core_dumped) == (40, 40, False)
    exited = observed_exit(11 | 0x80, USAGE, None)
    assert (exited.signal, exited.wait_status, exited.core_dumped) == (11, 0x8B, True)
    assert "SIGSEGV" in exited.evidence

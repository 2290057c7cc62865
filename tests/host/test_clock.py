"""One reading of every clock, and its text form."""

from hypothesis import given
from hypothesis import strategies as st

from capsule.host import clock


def test_a_reading_is_of_this_boot_and_never_goes_back() -> None:
    first, second = clock.read_clock(), clock.read_clock()
    assert first.boot_id == second.boot_id == clock.read_boot_id()
    assert clock.same_boot(first.boot_id, second.boot_id)
    assert first.boottime_ms <= second.boottime_ms
    assert first.monotonic_ms <= second.monotonic_ms
    assert first.boottime_ms >= first.monotonic_ms


def test_each_clock_is_the_systems_of_that_name(monkeypatch) -> None:
    """A machine that slept has a boot-time clock ahead of the monotonic one."""
    clocks = {clock.time.CLOCK_MONOTONIC: 5_000_000_000, clock.time.CLOCK_BOOTTIME: 9_000_000_000}
    monkeypatch.setattr(clock.time, "clock_gettime_ns", clocks.__getitem__)
    monkeypatch.setattr(clock.time, "time_ns", lambda: 1_500_000_000_123_456_789)
    found = clock.read_clock()
    assert (found.monotonic_ms, found.boottime_ms) == (5_000, 9_000)
    assert found.realtime == "2017-07-14T02:40:00.123Z"


@given(st.integers(0, 4_102_444_800_000))
def test_wall_clock_text_keeps_every_millisecond(milliseconds: int) -> None:
    text = clock.realtime_text(milliseconds)
    assert text.endswith("Z")
    assert clock.realtime_ms(text) == milliseconds


def test_a_system_without_boot_ids_never_claims_the_same_boot(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(clock, "BOOT_ID", tmp_path / "absent")
    monkeypatch.delattr(clock.time, "CLOCK_BOOTTIME")
    reading = clock.read_clock()
    assert reading.boot_id == "unknown"
    assert reading.boottime_ms == reading.monotonic_ms
    assert not clock.same_boot(reading.boot_id, reading.boot_id)

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

"""Samples and their sums, held against a second reading of the rules; the checks on evidence have their own file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from capsule.core.canonical import INTEGER_LIMIT
from capsule.core.errors import MalformedError
from capsule.core.telemetry import (
    GAP_INTERVALS,
    READINGS,
    SAMPLE_MS,
    SAMPLE_MS_MAX,
    THROTTLE_REASONS,
    DeviceTelemetry,
    Exclusivity,
    Sample,
    interval_ms,
    sample_faults,
    summarize,
    throttle_names,
    worst,
)

DEVICE = "GPU-1"
VERDICTS: tuple[Exclusivity, ...] = ("exclusive", "contaminated", "unverifiable")


def seen(at_ms: int, verdict: Exclusivity = "exclusive", device: str = DEVICE, **readings: Any) -> Sample:
    """Return a sample of a device that answered with these readings and no others."""
    foreign = (77,) if verdict == "contaminated" else ()
    given_reasons = readings.pop("missing", {})
    missing = {name: given_reasons.get(name, "hidden") for name in READINGS if readings.get(name) is None}
    return Sample(
        at_ms=at_ms,
        device=device,
        exclusivity=verdict,
        words=f"{verdict} at {at_ms}",
        own=(3,),
        foreign=foreign,
        missing=missing,
        **readings,
    )


def failed(at_ms: int, device: str = DEVICE) -> Sample:
    """Return the sample of a device that did not answer."""
    return Sample(
        at_ms=at_ms, device=device, exclusivity="unverifiable", words="timed out", own=(), foreign=(), error="timed out"
    )


# One sample.


@pytest.mark.parametrize("sample", [seen(0), seen(1, "contaminated"), seen(2, "unverifiable", throttle=0), failed(3)])
def test_a_sample_survives_its_bytes(sample: Sample) -> None:
    assert list(sample_faults(sample)) == []
    assert Sample.from_bytes(sample.to_bytes(), "x") == sample
    with pytest.raises(MalformedError):
        Sample.from_bytes(json.dumps(sample.to_json()).encode(), "x")


@pytest.mark.parametrize("name", [name for name in READINGS if name not in ("driver", "layout")])
def test_a_reading_is_a_whole_number_that_every_reader_can_hold(name: str) -> None:
    assert getattr(seen(1, **{name: INTEGER_LIMIT - 1}), name) == INTEGER_LIMIT - 1
    assert getattr(seen(1, **{name: 0}), name) == 0
    for value in (-1, INTEGER_LIMIT, 1.0, "1", True):
        with pytest.raises(ValidationError):
            seen(1, **{name: value})


def test_zero_is_a_reading_and_null_is_none() -> None:
    """A missing value is never zero: the two are told apart in the sample and in what samples add up to."""
    zeros = dict.fromkeys((name for name in READINGS if name not in ("driver", "layout")), 0)
    assert set(seen(1, **zeros).missing) == {"driver", "layout"}
    found = summarize(DEVICE, [seen(1, energy_mj=0), seen(2, energy_mj=0)], 0, 3)
    assert (found.energy_mj, found.energy_missing) == (0, None)
    found = summarize(DEVICE, [seen(1), seen(2)], 0, 3)
    assert (found.energy_mj, found.energy_missing) == (None, "hidden")


def test_what_a_sample_may_not_say_is_refused() -> None:
    for changes in ({"exclusivity": "ours"}, {"own": [3]}, {"own": (-1,)}, {"lost": 1}, {"words": None}, {"gpu": 1}):
        with pytest.raises(ValidationError):
            Sample(**{**seen(1).model_dump(), **changes})


# Parts of the rules.


@given(st.integers(0, INTEGER_LIMIT - 1))
def test_the_names_of_a_mask_are_the_mask(mask: int) -> None:
    """No bit is dropped, known or not, and each has a name of its own."""
    values = {name: bit for bit, name in THROTTLE_REASONS.items()}
    names = list(throttle_names(mask))
    assert len(names) == len(set(names)) == mask.bit_count()
    assert sum(values.get(name) or int(name.removeprefix("bit_"), 16) for name in names) == mask


@given(st.integers(0, 10**12), st.integers(0, 10**12))
def test_samples_become_rarer_within_their_bounds(one: int, other: int) -> None:
    low, high = sorted((one, other))
    assert SAMPLE_MS <= interval_ms(low) <= interval_ms(high) <= SAMPLE_MS_MAX


def test_the_worst_device_is_the_attempts() -> None:
    def found(verdict: Exclusivity) -> DeviceTelemetry:
        return summarize(DEVICE, [seen(0, verdict)], 0, 0)

    assert [worst([found(verdict)]) for verdict in VERDICTS] == list(VERDICTS)
    assert worst([found("exclusive"), found("unverifiable"), found("contaminated")]) == "contaminated"
    assert worst([found("exclusive"), found("unverifiable")]) == "unverifiable"
    assert worst([found("exclusive")] * 2) == "exclusive"
    assert worst([]) == "unverifiable"


# Sums.


def test_other_devices_samples_say_nothing() -> None:
    mine = [seen(100, energy_mj=1, throttle=4), seen(200, energy_mj=2)]
    others = [seen(50, "contaminated", "GPU-2", energy_mj=9, driver="9"), failed(150, "GPU-2")]
    mixed = sorted([*mine, *others], key=lambda item: item.at_ms)
    assert summarize(DEVICE, mixed, 0, 300) == summarize(DEVICE, mine, 0, 300)
    assert summarize(DEVICE, iter(mixed), 0, 300) == summarize(DEVICE, mine, 0, 300)
    assert summarize(DEVICE, others, 0, 300).evidence == "no sample was taken"


def test_an_attempt_without_duration_needs_a_sample_all_the_same() -> None:
    assert summarize(DEVICE, [], 5, 5).exclusivity == "unverifiable"
    assert summarize(DEVICE, [failed(5)], 5, 5).exclusivity == "unverifiable"
    found = summarize(DEVICE, [seen(5), seen(5, throttle=1)], 5, 5)
    assert (found.exclusivity, found.elapsed_ms, found.observed_ms, found.throttled_ms) == ("exclusive", 0, 0, {})


def test_a_release_before_the_lease_is_no_time() -> None:
    """Clocks of two boots may be compared by mistake; nothing negative comes of it."""
    found = summarize(DEVICE, [seen(4), seen(9)], 10, 3)
    assert (found.samples, found.elapsed_ms, found.observed_ms, found.exclusivity) == (0, 0, 0, "unverifiable")


@pytest.mark.parametrize("at_ms", [99, 1_101])
def test_samples_outside_the_lease_do_not_count(at_ms: int) -> None:
    """Whoever used the device before or afterwards did not disturb this attempt; nor did anything watch it then."""
    inside = [seen(100, energy_mj=5), seen(600, energy_mj=6), seen(1_100, energy_mj=7)]
    outside = seen(at_ms, "contaminated", energy_mj=0, driver="other", throttle=4)
    mixed = sorted([*inside, outside], key=lambda item: item.at_ms)
    assert summarize(DEVICE, mixed, 100, 1_100) == summarize(DEVICE, inside, 100, 1_100)
    assert summarize(DEVICE, inside, 100, 1_100).samples == 3


def test_each_gap_is_judged_by_the_interval_due_at_its_end() -> None:
    late = 4_000_000
    for elapsed, interval in ((0, 500), (1_500_000, 750), (late, 2_000)):
        limit = GAP_INTERVALS * interval
        for more, missed in ((0, 0), (1, limit + 1)):
            end = elapsed + limit + more
            if GAP_INTERVALS * interval_ms(end) != limit:
                continue
            found = summarize(DEVICE, [seen(elapsed), seen(end)], 0, end)
            assert found.observed_ms == end - missed - (elapsed if elapsed > 1_500 else 0)


def test_time_that_a_hung_driver_left_is_not_observed() -> None:
    """Samples that failed hold no gap together, however many there are."""
    hung = [failed(at) for at in range(500, 10_000, 500)]
    found = summarize(DEVICE, [seen(0, throttle=4), *hung, seen(10_000, throttle=4)], 0, 10_000)
    assert (found.observed_ms, found.throttled_ms, found.samples) == (0, {}, 21)
    assert (found.exclusivity, found.evidence) == ("unverifiable", "timed out (in 19 of 21 samples)")


@pytest.mark.parametrize(
    ("samples", "energy_mj", "why"),
    [
        ([seen(1, energy_mj=3), seen(2), seen(3, energy_mj=9)], 6, None),
        ([seen(1, energy_mj=3), failed(2), seen(3, energy_mj=9)], 6, None),
        ([seen(1), seen(2, energy_mj=3), seen(3, energy_mj=9)], 6, None),
        ([seen(1, energy_mj=3, driver="1"), seen(2, energy_mj=9)], 6, None),
        ([seen(1, energy_mj=0), seen(2, energy_mj=INTEGER_LIMIT - 1)], INTEGER_LIMIT - 1, None),
        ([seen(1, energy_mj=9), seen(2, energy_mj=3), seen(3, energy_mj=99)], None, "the counter fell"),
        ([seen(1, energy_mj=9), seen(2), seen(3, energy_mj=3)], None, "the counter fell"),
        (
            [seen(1, energy_mj=1, driver="1"), seen(2, driver="2"), seen(3, energy_mj=9, driver="1")],
            None,
            "the driver changed: 1, 2",
        ),
        ([seen(1, energy_mj=1), seen(2, missing={"energy_mj": "Not Supported"})], None, "Not Supported"),
        ([failed(1), seen(2, energy_mj=1)], None, "fewer than two readings"),
        ([failed(1), failed(2)], None, "fewer than two readings"),
    ],
)
def test_energy_is_what_a_counter_rose_that_nobody_touched(
    samples: list[Sample], energy_mj: int | None, why: str | None
) -> None:
    found = summarize(DEVICE, samples, 0, 10)
    assert (found.energy_mj, found.energy_missing) == (energy_mj, why)


def moments(samples: Sequence[Sample], leased_ms: int, released_ms: int) -> tuple[list[Sample], list[int]]:
    """Return the samples that count, and how much of the time before each answer, and before the end, was observed."""
    within = [item for item in samples if item.device == DEVICE and leased_ms <= item.at_ms <= released_ms]
    answers = [item.at_ms for item in within if item.error is None]
    times = [leased_ms, *answers, released_ms] if answers else [leased_ms]
    gaps = []
    for index in range(1, len(times)):
        gap = times[index] - times[index - 1]
        due = max(500, min((times[index] - leased_ms) // 2000, 2000))
        gaps.append(gap if gap <= 3 * due else 0)
    return within, gaps


def reference(samples: Sequence[Sample], leased_ms: int, released_ms: int) -> DeviceTelemetry:
    """Add samples up by the letter of the specification, T-06 to T-09, all of them held at once."""
    within, gaps = moments(samples, leased_ms, released_ms)
    elapsed, observed = released_ms - leased_ms, sum(gaps)
    throttled: dict[str, int] = {}
    for item, gap in zip([item for item in within if item.error is None], gaps, strict=False):
        for bit in range(53):
            if (item.throttle or 0) >> bit & 1 and gap:
                name = THROTTLE_REASONS.get(1 << bit, f"bit_{1 << bit:#x}")
                throttled[name] = throttled.get(name, 0) + gap
    readings = [item.energy_mj for item in within if item.energy_mj is not None]
    drivers = sorted({item.driver for item in within if item.driver is not None})
    reasons = [item.missing["energy_mj"] for item in within if "energy_mj" in item.missing]
    energy, why = None, None
    if len(readings) < 2:
        why = [*reasons, "fewer than two readings"][0]
    elif len(drivers) > 1:
        why = f"the driver changed: {', '.join(drivers)}"
    elif readings != sorted(readings):
        why = "the counter fell"
    else:
        energy = readings[-1] - readings[0]
    verdicts = [item.exclusivity for item in within]
    verdict: Exclusivity
    if not within:
        verdict, evidence = "unverifiable", "no sample was taken"
    elif "contaminated" in verdicts or "unverifiable" in verdicts:
        verdict = "contaminated" if "contaminated" in verdicts else "unverifiable"
        first = next(item for item in within if item.exclusivity == verdict)
        evidence = f"{first.words} (in {verdicts.count(verdict)} of {len(within)} samples)"
    elif observed < elapsed:
        verdict, evidence = "unverifiable", f"{elapsed - observed} of {elapsed} ms were not observed"
    else:
        verdict, evidence = "exclusive", f"no foreign process in {len(within)} samples"
    return DeviceTelemetry(
        samples=len(within),
        elapsed_ms=elapsed,
        observed_ms=observed,
        exclusivity=verdict,
        evidence=evidence,
        energy_mj=energy,
        energy_missing=why,
        throttled_ms=dict(sorted(throttled.items())),
    )


READ = st.fixed_dictionaries(
    {},
    optional={
        "energy_mj": st.integers(0, 50) | st.just(1 << 40),
        "driver": st.sampled_from(["1", "1", "1", "2"]),
        "throttle": st.sampled_from([0, 1, 4, 5, 1 << 45, 0x600]),
    },
)
VERDICT = st.sampled_from([*["exclusive"] * 6, "contaminated", "unverifiable"])
STEP = st.sampled_from([0, 1, 400, 500, 1_400, 1_500, 1_501, 5_999, 6_000, 6_001, 3_000_000])
KIND = st.sampled_from([*["seen"] * 8, "failed", "other"])


@given(st.lists(st.tuples(STEP, KIND, VERDICT, READ), max_size=12), st.integers(0, 2_000), STEP)
def test_sums_are_those_of_the_specification(
    steps: list[tuple[int, str, Exclusivity, dict[str, Any]]], leased_ms: int, rest_ms: int
) -> None:
    """Whatever was seen: T-06 to T-09 hold, nothing is negative, and no device that was not watched is exclusive."""
    samples, at_ms = [], 1_000
    for step, kind, verdict, readings in steps:
        at_ms += step
        item = seen(at_ms, verdict, **readings)
        samples.append({"seen": item, "failed": failed(at_ms), "other": failed(at_ms, "GPU-2")}[kind])
    released_ms = max(leased_ms, at_ms - 1_000 + rest_ms)
    found = summarize(DEVICE, samples, leased_ms, released_ms)
    assert found == reference(samples, leased_ms, released_ms)
    assert found.observed_ms <= found.elapsed_ms
    assert all(value <= found.observed_ms for value in found.throttled_ms.values())
    assert (found.energy_mj is None) != (found.energy_missing is None)
    if found.exclusivity == "exclusive":
        assert found.observed_ms == found.elapsed_ms
        assert found.samples
    assert DeviceTelemetry.from_bytes(found.to_bytes(), "x") == found


@given(st.lists(st.tuples(STEP, VERDICT), min_size=1, max_size=8), st.data())
def test_a_sample_taken_away_never_makes_a_device_exclusive(
    steps: list[tuple[int, Exclusivity]], data: st.DataObject
) -> None:
    """Unless it is one that doubted it: the others only ever watched."""
    samples, at_ms = [], 0
    for step, verdict in steps:
        at_ms += step
        samples.append(seen(at_ms, verdict))
    index = data.draw(st.integers(0, len(samples) - 1))
    if samples[index].exclusivity == "exclusive":
        fewer = samples[:index] + samples[index + 1 :]
        before, after = (summarize(DEVICE, items, 0, at_ms) for items in (samples, fewer))
        assert after.observed_ms <= before.observed_ms
        assert after.exclusivity != "exclusive" or before.exclusivity == "exclusive"

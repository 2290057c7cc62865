"""What a leased device was seen doing while an attempt ran: samples, and what they add up to.

Whatever could not be read is null with its reason, never zero. A stretch of time without samples is not observed, and a
device that was not observed throughout is never called `exclusive`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Literal

from capsule.core.schema import Model, Natural

Exclusivity = Literal["exclusive", "contaminated", "unverifiable"]
WORST_FIRST: tuple[Exclusivity, ...] = ("contaminated", "unverifiable", "exclusive")

SAMPLE_MS = 500
SAMPLE_MS_MAX = 2_000
SAMPLE_GROWTH = 2_000
GAP_INTERVALS = 3
"""Neighbouring samples that are further apart than that many intervals leave the time between them unobserved."""

THROTTLE_REASONS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
"""The driver's bits for why clocks are lower than they could be (NVML's `nvmlClocksThrottleReasons`)."""


class Sample(Model):
    """One look at one leased device, `at_ms` on the boot-time clock.

    `foreign` are processes of others, `own` the attempt's. `missing` says of each null reading why it is null. Where the
    device did not answer at all, `error` says so, `lost` that the driver takes it for gone, and the rest is null.
    `throttle` is the driver's bit mask, unknown bits kept; `energy_mj` counts since the driver was loaded; `layout`
    names how the device is partitioned.
    """

    at_ms: Natural
    device: str
    exclusivity: Exclusivity
    words: str
    own: tuple[Natural, ...]
    foreign: tuple[Natural, ...]
    memory_used_bytes: Natural | None = None
    utilization_percent: Natural | None = None
    sm_clock_mhz: Natural | None = None
    memory_clock_mhz: Natural | None = None
    temperature_celsius: Natural | None = None
    power_mw: Natural | None = None
    energy_mj: Natural | None = None
    throttle: Natural | None = None
    ecc_corrected: Natural | None = None
    ecc_uncorrected: Natural | None = None
    remapped_rows: Natural | None = None
    xid: Natural | None = None
    driver: str | None = None
    layout: str | None = None
    missing: dict[str, str] = {}
    error: str | None = None
    lost: bool = False


class DeviceTelemetry(Model):
    """What the samples of one device say about one attempt.

    `observed_ms` of `elapsed_ms`, the time from lease to release, lie between samples that are close enough. `energy_mj` is
    what the counter rose from the first sample to the last, null for the reason beside it. `throttled_ms` is the observed
    time under each reason.
    """

    samples: Natural
    elapsed_ms: Natural
    observed_ms: Natural
    exclusivity: Exclusivity
    evidence: str
    energy_mj: Natural | None
    energy_missing: str | None
    throttled_ms: dict[str, Natural]


def interval_ms(elapsed_ms: int) -> int:
    """Return how long after a sample the next is due: 0.5 s, growing to a 2000th of the time elapsed, at most 2 s."""
    return max(SAMPLE_MS, min(elapsed_ms // SAMPLE_GROWTH, SAMPLE_MS_MAX))


def throttle_names(mask: int) -> Iterator[str]:
    """Yield the name of every bit that is set, unknown ones by their value."""
    bit = 1
    while bit <= mask:
        if mask & bit:
            yield THROTTLE_REASONS.get(bit, f"bit_{bit:#x}")
        bit <<= 1


def summarize(device: str, samples: Iterable[Sample], leased_ms: int, released_ms: int) -> DeviceTelemetry:
    """Add up one device's samples, in the order of their time, over an attempt from its lease to its release."""
    own = [item for item in samples if item.device == device]
    times = [leased_ms, *(item.at_ms for item in own if item.error is None), max(leased_ms, released_ms)]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    seen = [
        0 <= gap <= GAP_INTERVALS * interval_ms(max(0, at - leased_ms)) for gap, at in zip(gaps, times[1:], strict=True)
    ]
    observed = sum(gap for gap, ok in zip(gaps, seen, strict=True) if ok) if own else 0
    elapsed = max(0, released_ms - leased_ms)
    exclusivity, evidence = _exclusivity(own, elapsed, observed)
    energy, why = _energy(own)
    throttled: dict[str, int] = {}
    good = [item for item in own if item.error is None]
    for item, gap, ok in zip(good, gaps, seen, strict=False):
        for name in throttle_names(item.throttle or 0) if ok else ():
            throttled[name] = throttled.get(name, 0) + gap
    return DeviceTelemetry(
        samples=len(own),
        elapsed_ms=elapsed,
        observed_ms=observed,
        exclusivity=exclusivity,
        evidence=evidence,
        energy_mj=energy,
        energy_missing=why,
        throttled_ms=dict(sorted(throttled.items())),
    )


def _exclusivity(samples: Sequence[Sample], elapsed_ms: int, observed_ms: int) -> tuple[Exclusivity, str]:
    if not samples:
        return "unverifiable", "no sample was taken"
    for verdict in WORST_FIRST[:2]:
        found = [item for item in samples if item.exclusivity == verdict]
        if found:
            return verdict, f"{found[0].words} (in {len(found)} of {len(samples)} samples)"
    if observed_ms < elapsed_ms:
        return "unverifiable", f"{elapsed_ms - observed_ms} of {elapsed_ms} ms were not observed"
    return "exclusive", f"no foreign process in {len(samples)} samples"


def _energy(samples: Sequence[Sample]) -> tuple[int | None, str | None]:
    readings = [item.energy_mj for item in samples if item.energy_mj is not None]
    if len(readings) < 2:
        reasons = [item.missing["energy_mj"] for item in samples if "energy_mj" in item.missing]
        return None, reasons[0] if reasons else "fewer than two readings"
    drivers = {item.driver for item in samples if item.driver is not None}
    if len(drivers) > 1:
        return None, f"the driver changed: {', '.join(sorted(drivers))}"
    if any(later < earlier for earlier, later in pairwise(readings)):
        return None, "the counter fell"
    return readings[-1] - readings[0], None


def worst(found: Iterable[DeviceTelemetry]) -> Exclusivity:
    """Return the exclusivity of an attempt on several devices; none were sampled: `unverifiable`."""
    verdicts = {item.exclusivity for item in found}
    return next((verdict for verdict in WORST_FIRST if verdict in verdicts), "unverifiable")

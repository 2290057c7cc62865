"""What a leased device was seen doing while an attempt ran: samples, and what they add up to.

Whatever could not be read is null with its reason, never zero. A stretch of time without samples is not observed, and a
device that was not observed throughout is never called `exclusive`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Literal

from capsule.core.canonical import refuse_long, whole_lines
from capsule.core.errors import MalformedError
from capsule.core.lines import LINE_BYTES_MAX, Blocks, Content
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

    `foreign` are processes of others, `own` the attempt's. `missing` says of each null reading why it is null. Where
    the device did not answer at all, `error` says so, `lost` that the driver takes it for gone, and the rest is null.
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


READINGS = (
    "memory_used_bytes", "utilization_percent", "sm_clock_mhz", "memory_clock_mhz", "temperature_celsius", "power_mw",
    "energy_mj", "throttle", "ecc_corrected", "ecc_uncorrected", "remapped_rows", "xid", "driver", "layout",
)  # fmt: skip
"""The fields of a sample that were read from the device, each null where that could not be done."""


class DeviceTelemetry(Model):
    """What the samples of one device say about one attempt.

    `samples` are those from lease to release; `observed_ms` of `elapsed_ms`, the time between these two, lie between
    samples that are close enough. `energy_mj` is what the counter rose from the first sample to the last, null for the
    reason beside it. `throttled_ms` is the observed time that ended in a sample with each reason.
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


def read_samples(content: Content) -> Iterator[Sample | str]:
    """Yield each whole line of `telemetry.jsonl` as a sample, or words for why it is none; one is held at a time."""
    for block in Blocks(content):
        yield from map(_sample, whole_lines(block))


def _sample(line: bytes) -> Sample | str:
    """Read one line; bytes that the value gives back exactly are canonical, others are judged for the right words."""
    sample = None
    with suppress(ValueError):
        sample = Sample.model_validate_json(line) if len(line) <= LINE_BYTES_MAX else None
    if sample is None or sample.to_bytes() != line:
        try:
            refuse_long(line, "sample")
            sample = Sample.from_bytes(line, "sample")
        except MalformedError as error:
            return error.message
    return next(sample_faults(sample), sample)


def torn_bytes(content: Content) -> int:
    """Return how many bytes follow the last newline."""
    blocks = Blocks(content)
    deque(blocks, maxlen=0)
    return blocks.torn


def sample_faults(sample: Sample) -> Iterator[str]:
    """Yield where a sample contradicts itself (T-03, T-04)."""
    null = {name for name in READINGS if getattr(sample, name) is None}
    if not sample.missing.keys() <= null or (sample.error is None and sample.missing.keys() != null):
        yield "expected in `missing` a reason for every reading that is null and for no other"
    if (sample.exclusivity == "contaminated") != bool(sample.foreign):
        yield f"expected `contaminated` exactly where a foreign process is named, found {sample.exclusivity}"
    if sample.error is not None and (len(null) < len(READINGS) or sample.own or sample.exclusivity != "unverifiable"):
        yield "expected no reading and no process of a device that did not answer"
    if sample.lost and sample.error is None:
        yield "expected the error of a device that is lost, found none"


class Tally:
    """Adds up the samples of one device, in the order of their time, over an attempt from its lease to its release.

    It holds sums and never a sample. Samples outside the lease say nothing about the attempt and are left out.
    """

    def __init__(self, leased_ms: int, released_ms: int) -> None:
        self._leased_ms = leased_ms
        self._released_ms = max(leased_ms, released_ms)
        self._at_ms = leased_ms
        self._count = 0
        self._answers = 0
        self._observed_ms = 0
        self._found: dict[Exclusivity, tuple[str, int]] = {}
        self._throttled_ms: dict[str, int] = {}
        self._energy_mj: list[int] = []
        self._energy_fell = False
        self._energy_missing: str | None = None
        self._drivers: set[str] = set()

    def add(self, sample: Sample) -> None:
        """Add the next sample of the device."""
        if not self._leased_ms <= sample.at_ms <= self._released_ms:
            return
        self._count += 1
        words, count = self._found.get(sample.exclusivity, (sample.words, 0))
        self._found[sample.exclusivity] = words, count + 1
        if sample.driver is not None:
            self._drivers.add(sample.driver)
        if sample.energy_mj is not None:
            self._energy_fell |= bool(self._energy_mj) and sample.energy_mj < self._energy_mj[-1]
            self._energy_mj = [*self._energy_mj[:1], sample.energy_mj]
        if self._energy_missing is None:
            self._energy_missing = sample.missing.get("energy_mj")
        if sample.error is None:
            self._answers += 1
            gap_ms = self._gap_ms(sample.at_ms)
            self._observed_ms += gap_ms
            self._at_ms = sample.at_ms
            for name in throttle_names(sample.throttle or 0) if gap_ms else ():
                self._throttled_ms[name] = self._throttled_ms.get(name, 0) + gap_ms

    def _gap_ms(self, until_ms: int) -> int:
        """Return the time since the last answer if it counts as observed, else 0."""
        gap_ms = until_ms - self._at_ms
        return gap_ms if 0 <= gap_ms <= GAP_INTERVALS * interval_ms(until_ms - self._leased_ms) else 0

    def summary(self) -> DeviceTelemetry:
        """Return what the samples so far add up to."""
        elapsed_ms = self._released_ms - self._leased_ms
        observed_ms = self._observed_ms + self._gap_ms(self._released_ms) if self._answers else 0
        exclusivity, evidence = self._exclusivity(elapsed_ms, observed_ms)
        energy_mj, energy_missing = self._energy()
        return DeviceTelemetry(
            samples=self._count,
            elapsed_ms=elapsed_ms,
            observed_ms=observed_ms,
            exclusivity=exclusivity,
            evidence=evidence,
            energy_mj=energy_mj,
            energy_missing=energy_missing,
            throttled_ms=dict(sorted(self._throttled_ms.items())),
        )

    def _exclusivity(self, elapsed_ms: int, observed_ms: int) -> tuple[Exclusivity, str]:
        if not self._count:
            return "unverifiable", "no sample was taken"
        for verdict in WORST_FIRST[:2]:
            if verdict in self._found:
                words, count = self._found[verdict]
                return verdict, f"{words} (in {count} of {self._count} samples)"
        if observed_ms < elapsed_ms:
            return "unverifiable", f"{elapsed_ms - observed_ms} of {elapsed_ms} ms were not observed"
        return "exclusive", f"no foreign process in {self._count} samples"

    def _energy(self) -> tuple[int | None, str | None]:
        if len(self._energy_mj) < 2:
            return None, "fewer than two readings" if self._energy_missing is None else self._energy_missing
        if len(self._drivers) > 1:
            return None, f"the driver changed: {', '.join(sorted(self._drivers))}"
        if self._energy_fell:
            return None, "the counter fell"
        return self._energy_mj[-1] - self._energy_mj[0], None


def summarize(device: str, samples: Iterable[Sample], leased_ms: int, released_ms: int) -> DeviceTelemetry:
    """Add up one device's samples, in the order of their time, over an attempt from its lease to its release."""
    tally = Tally(leased_ms, released_ms)
    for sample in samples:
        if sample.device == device:
            tally.add(sample)
    return tally.summary()


def worst(found: Iterable[DeviceTelemetry]) -> Exclusivity:
    """Return the exclusivity of an attempt on several devices; none were sampled: `unverifiable`."""
    verdicts = {item.exclusivity for item in found}
    return next((verdict for verdict in WORST_FIRST if verdict in verdicts), "unverifiable")

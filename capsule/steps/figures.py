"""The plots of a report: intervals per workload, charges by outcome, what devices were seen doing over time.

Figures are drawn from derived results and from the ledger of an intact capsule. How many are drawn is bounded; the
words of the last say how many were left away.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from capsule.core.attempt import COMPLETED, Attempt, Settled
from capsule.core.document import Figure
from capsule.core.lines import Content
from capsule.core.plots import LEFT, RIGHT, WIDTH, Plot, Scale, linear, ratios, short
from capsule.core.protocol import Estimate, Hypothesis, Protocol
from capsule.core.results import EstimateResult, Results
from capsule.core.telemetry import (
    GAP_INTERVALS,
    DeviceTelemetry,
    Sample,
    interval_ms,
    read_samples,
    throttle_names,
)

WORKLOADS_MAX = 60
"""Workloads of one plot; all are in the tables."""
TRACES_MAX = 12
"""Devices of attempts whose telemetry is drawn."""
BUCKETS = 240
"""Stretches of time that one trace is drawn in."""
ROW = 30
"""Pixels of one line of a plot with names at its left."""


def estimate_figures(protocol: Protocol, results: Results) -> list[Figure]:
    """Draw every estimate: interval, mean and starts for each workload, and the thresholds that decide."""
    return [
        figure
        for estimate in protocol.estimates
        if (figure := _estimate_figure(protocol, estimate, results)) is not None
    ]


def _estimate_figure(protocol: Protocol, estimate: Estimate, results: Results) -> Figure | None:
    items = [item for item in results.estimates if item.estimate == estimate.name]
    drawn = items[:WORKLOADS_MAX]
    thresholds = [limit for hypothesis in protocol.hypotheses for limit in _limits(hypothesis, estimate.name)]
    values = [float(value) for item in drawn for value in (item.low, item.high, item.mean) if value is not None]
    values += [float(start.value) for item in drawn for start in item.starts if start.value is not None]
    ratio = estimate.rule == "log_ratio"
    bottom = 30.0 + ROW * len(drawn)
    limits = [value for value, _ in thresholds]
    scale = (ratios if ratio else linear)([*values, *limits], LEFT, WIDTH - RIGHT) if values else None
    if scale is None:
        return None
    plot = Plot(bottom + 50)
    plot.axis_below(scale, 20, bottom, _quantity(protocol, estimate))
    for row, item in enumerate(drawn):
        _draw_interval(plot, scale, item, 20 + ROW * (row + 0.5) + 5)
    for value, name in thresholds:
        plot.line(scale.at(value), 14, scale.at(value), bottom, "threshold")
        plot.label(scale.at(value), 11, name, anchor="middle")
    title = f"{estimate.name}: {_quantity(protocol, estimate)}, by workload"
    words = _estimate_words(items, thresholds, ratio)
    return Figure(title, words, plot.svg(title, words))


def _draw_interval(plot: Plot, scale: Scale, item: EstimateResult, y: float) -> None:
    plot.label(LEFT - 12, y + 4, item.workload, anchor="end")
    if item.mean is None or item.low is None or item.high is None:
        plot.label(LEFT + 8, y + 4, f"withheld: {item.withheld}", kind="faint")
    else:
        low, high = scale.at(float(item.low)), scale.at(float(item.high))
        plot.line(low, y, high, y, "interval")
        for end in (low, high):
            plot.line(end, y - 6, end, y + 6, "interval")
    for start in item.starts:
        if start.value is not None:
            plot.dot(scale.at(float(start.value)), y, 3.5, "start", f"seed {start.seed}, start {start.start}")
    if item.mean is not None:
        plot.dot(scale.at(float(item.mean)), y, 5, "bar", f"mean of {item.workload}")


def _limits(hypothesis: Hypothesis, estimate: str) -> Iterator[tuple[float, str]]:
    """Yield the values at which a hypothesis is decided, in the estimate's own unit."""
    if hypothesis.estimate == estimate:
        for limit in (hypothesis.threshold, hypothesis.low, hypothesis.high):
            if limit is not None:
                yield float(limit), hypothesis.name


def _quantity(protocol: Protocol, estimate: Estimate) -> str:
    unit = protocol.observation(estimate.observation).unit
    match estimate.rule:
        case "log_ratio":
            return f"ratio of {estimate.observation}, {estimate.numerator} to {estimate.denominator}"
        case "difference":
            sides = f"difference of {estimate.observation}, {estimate.numerator} less {estimate.denominator}"
        case _:
            sides = f"mean of {estimate.observation} of {estimate.numerator}"
    return f"{sides}, in {unit}" if unit else sides


def _estimate_words(items: Sequence[EstimateResult], thresholds: Sequence[tuple[float, str]], ratio: bool) -> str:
    def number(value: str | float) -> str:
        return short(math.exp(min(float(value), 700.0)) if ratio else float(value))

    said = []
    for item in items[:WORKLOADS_MAX]:
        if item.mean is None or item.low is None or item.high is None:
            said.append(f"{item.workload}: withheld, {item.withheld}")
        else:
            interval = f"{number(item.mean)}, interval {number(item.low)} to {number(item.high)}"
            values = [number(start.value) for start in item.starts if start.value is not None]
            said.append(f"{item.workload}: mean {interval}, starts {', '.join(values)}")
    words = "; ".join(said)
    if len(items) > WORKLOADS_MAX:
        words += f"; {len(items) - WORKLOADS_MAX} more workloads are in the table only"
    return words + "".join(f". The dashed line of {name} is at {number(value)}" for value, name in thresholds) + "."


def charge_figures(attempts: Mapping[str, Attempt]) -> list[Figure]:
    """Draw what attempts of each outcome took from the budget."""
    spent: dict[tuple[str, str], list[int]] = {}
    for attempt in attempts.values():
        if attempt.reserved is not None and attempt.refused is None:
            outcome: str = attempt.end.outcome if attempt.end else "open"
            key = (attempt.reserved.unit, f"{outcome} (pilot)" if attempt.pilot else outcome)
            spent.setdefault(key, []).append(attempt.held_ms)
    rows = sorted(spent.items(), key=lambda item: (-sum(item[1]), item[0]))
    scale = linear((sum(held) / 1000 for _, held in rows), LEFT, WIDTH - 120, zero=True) if rows else None
    if scale is None:
        return []
    bottom = 20.0 + ROW * len(rows)
    plot = Plot(bottom + 50)
    plot.axis_below(scale, 10, bottom, "device-seconds charged, and attempts")
    said = []
    for row, ((unit, name), held) in enumerate(rows):
        seconds, y = sum(held) / 1000, 10 + ROW * (row + 0.5) + 3
        counts = name in COMPLETED
        plot.label(LEFT - 12, y + 4, f"{name}, {unit}", anchor="end")
        plot.bar(LEFT, y - 8, scale.at(seconds) - LEFT, 16, "bar" if counts else "lost")
        plot.label(scale.at(seconds) + 6, y + 4, f"{seconds:.1f} s in {len(held)}")
        said.append(f"{name} on {unit}: {seconds:.3f} device-seconds in {len(held)} attempts")
    title = "Charges by outcome"
    words = "; ".join(said) + ". Attempts whose rows count are in the first colour, all others in the second."
    return [Figure(title, words, plot.svg(title, words))]


@dataclass
class Trace:
    """The samples of one device during one attempt, added up in stretches of equal time."""

    attempt: str
    device: str
    leased_ms: int
    summary: DeviceTelemetry
    power: list[list[float]] = field(default_factory=lambda: [[] for _ in range(BUCKETS)])
    clock: list[list[float]] = field(default_factory=lambda: [[] for _ in range(BUCKETS)])
    throttled: dict[str, set[int]] = field(default_factory=dict)
    _last_ms: int = 0

    @property
    def elapsed_ms(self) -> int:
        """The time from lease to release."""
        return self.summary.elapsed_ms

    def add(self, sample: Sample) -> None:
        """Add a sample; one outside the lease says nothing about the attempt."""
        after = sample.at_ms - self.leased_ms
        if not 0 <= after <= self.elapsed_ms or sample.error is not None:
            return
        bucket = self._bucket(after)
        if sample.power_mw is not None:
            self.power[bucket].append(sample.power_mw / 1000)
        if sample.sm_clock_mhz is not None:
            self.clock[bucket].append(float(sample.sm_clock_mhz))
        observed = after - self._last_ms <= GAP_INTERVALS * interval_ms(after)
        since = self._bucket(self._last_ms) if observed else bucket
        for name in throttle_names(sample.throttle or 0):
            if name != "gpu_idle":
                self.throttled.setdefault(name, set()).update(range(since, bucket + 1))
        self._last_ms = after

    def _bucket(self, after_ms: int) -> int:
        return min(after_ms * BUCKETS // max(self.elapsed_ms, 1), BUCKETS - 1)

    def seconds(self, bucket: float) -> float:
        """Return when a stretch begins, in seconds after the lease."""
        return bucket * self.elapsed_ms / BUCKETS / 1000


def telemetry_figures(attempts: Mapping[str, Attempt], telemetry: Mapping[str, Content]) -> list[Figure]:
    """Draw power, clock and throttling over time for the first devices that were sampled."""
    figures: list[Figure] = []
    sampled = [
        (attempt, device)
        for attempt in attempts.values()
        if isinstance(attempt.end, Settled) and attempt.intent and attempt.id in telemetry
        for device in attempt.end.telemetry
    ]
    for attempt, device in sampled[:TRACES_MAX]:
        assert attempt.intent is not None
        assert isinstance(attempt.end, Settled)
        trace = Trace(attempt.id, device, attempt.intent.leased.boottime_ms, attempt.end.telemetry[device])
        for sample in read_samples(telemetry[attempt.id]):
            if isinstance(sample, Sample) and sample.device == device:
                trace.add(sample)
        left_away = len(sampled) - TRACES_MAX if len(figures) == TRACES_MAX - 1 else 0
        figure = _trace_figure(trace, max(left_away, 0))
        figures += [figure] if figure else []
    return figures


PANELS = (("power", "power in W", True), ("clock", "SM clock in MHz", False))
"""Readings that are drawn over time, with their labels, and whether their axis begins at zero."""
PANEL_TOP, PANEL_HEIGHT, PANEL_STEP = 30, 90, 130
TRACE_LEFT = 190


def _trace_figure(trace: Trace, left_away: int) -> Figure | None:
    time = linear((0.0, trace.elapsed_ms / 1000), TRACE_LEFT, WIDTH - RIGHT, zero=True)
    panels = [(label, zero, getattr(trace, name)) for name, label, zero in PANELS if any(getattr(trace, name))]
    if time is None or not (panels or trace.throttled):
        return None
    bottom = PANEL_TOP + PANEL_STEP * len(panels) + 20 * len(trace.throttled)
    plot = Plot(bottom + 60)
    said = []
    for row, (label, zero, buckets) in enumerate(panels):
        top = PANEL_TOP + PANEL_STEP * row
        every = [value for found in buckets for value in found]
        scale = linear(every, top + PANEL_HEIGHT, top, zero=zero)
        if scale is not None:
            plot.axis_left(scale, TRACE_LEFT, WIDTH - RIGHT, label)
            for points in _pieces(trace, buckets, time, scale):
                if len(points) > 1:
                    plot.curve(points, "line")
                else:
                    plot.dot(*points[0], 2, "bar", label)
        said.append(f"{label}: {short(min(every))} to {short(max(every))}, mean {short(fmean(every))}")
    for row, (name, found) in enumerate(sorted(trace.throttled.items())):
        y = PANEL_TOP + PANEL_STEP * len(panels) + 20.0 * row
        plot.label(TRACE_LEFT - 12, y + 4, name, anchor="end")
        for bucket in sorted(found):
            begin, end = time.at(trace.seconds(bucket)), time.at(trace.seconds(bucket + 1))
            plot.bar(begin, y - 5, end - begin, 10, "lost")
    plot.axis_below(time, bottom, bottom + 10, "seconds since the lease")
    held = [(name, spent) for name, spent in trace.summary.throttled_ms.items() if name != "gpu_idle"]
    said += [f"held back by {name} for {spent / 1000:.1f} s" for name, spent in held]
    if not held:
        said.append("no reason for throttling was seen")
    title = f"{trace.attempt} on {trace.device}: power, clock and throttling over time"
    more = f" {left_away} more devices of attempts were sampled and are not drawn." if left_away else ""
    words = "; ".join(said) + f", over {trace.elapsed_ms / 1000:.1f} s.{more}"
    return Figure(title, words, plot.svg(title, words))


def _pieces(
    trace: Trace, buckets: Sequence[Sequence[float]], time: Scale, scale: Scale
) -> Iterator[list[tuple[float, float]]]:
    """Yield the runs of stretches whose neighbours are close; time that nobody observed is a gap, never a line."""
    gap = max(2, math.ceil(2_000 * BUCKETS / max(trace.elapsed_ms, 1)) + 1)
    points: list[tuple[float, float]] = []
    last = -gap
    for bucket, found in enumerate(buckets):
        if not found:
            continue
        if points and bucket - last > gap:
            yield points
            points = []
        points.append((time.at(trace.seconds(bucket + 0.5)), scale.at(fmean(found))))
        last = bucket
    if points:
        yield points

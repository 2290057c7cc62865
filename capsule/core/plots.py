"""Plots as SVG elements: a scale, axes and marks, with a title and the same in words; texts are escaped here.

Coordinates are rounded to tenths, so that the same figures give the same bytes. Colours are classes of the page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from capsule.core.page import text

WIDTH = 760
LEFT, RIGHT = 190, 24
LABEL_CHARACTERS = 28
TICKS = 6
DECADES_MAX = 12
"""Beyond that many powers of ten a logarithmic axis is labelled by powers alone."""

Tick = tuple[float, str]


@dataclass(frozen=True)
class Scale:
    """A range of values laid out from `start` to `stop` in pixels, with its ticks."""

    low: float
    high: float
    start: float
    stop: float
    ticks: Sequence[Tick]

    def at(self, value: float) -> float:
        """Return the pixel of a value, held inside the range."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return self.start + share * (self.stop - self.start)


def linear(values: Iterable[float], start: float, stop: float, *, zero: bool = False) -> Scale | None:
    """Return a scale that holds all values with a margin; None where there is none, or they span too much to draw."""
    low, high = _span(values, zero)
    if not math.isfinite(high - low) or max(abs(low), abs(high)) > 1e300:
        return None
    step = _step((high - low) / TICKS)
    first, last = math.floor(low / step), math.ceil(high / step)
    ticks = [(number * step, short(number * step)) for number in range(first, last + 1)]
    return Scale(first * step, last * step, start, stop, ticks)


def ratios(logarithms: Iterable[float], start: float, stop: float) -> Scale | None:
    """Return a scale of natural logarithms, labelled with the ratios that they are logarithms of."""
    low, high = _span(logarithms, zero=False)
    if not math.isfinite(high - low) or max(abs(low), abs(high)) > 600:
        return None
    if high - low < math.log(4):
        step = _step((math.exp(high) - math.exp(low)) / TICKS)
        first = max(1, math.floor(math.exp(low) / step))
        numbers = [number * step for number in range(first, math.ceil(math.exp(high) / step) + 1)]
    else:
        first, last = math.floor(low / math.log(10)), math.ceil(high / math.log(10))
        every = max(1, (last - first) // TICKS)
        heads = (1, 2, 5) if last - first <= 4 else (1,)
        numbers = [head * 10.0**power for power in range(first, last + 1, every) for head in heads]
    ticks = [(math.log(number), short(number)) for number in numbers if number > 0]
    inner = [tick for tick in ticks if low <= tick[0] <= high]
    return Scale(low, high, start, stop, inner or ticks[:1])


def _span(values: Iterable[float], zero: bool) -> tuple[float, float]:
    found = [value for value in values if math.isfinite(value)]
    if zero:
        found.append(0.0)
    if not found:
        return math.nan, math.nan
    low, high = min(found), max(found)
    margin = (high - low) * 0.08 or max(abs(high) * 0.1, 0.1)
    return (low if zero and low == 0 else low - margin), high + margin


def _step(rough: float) -> float:
    """Return 1, 2 or 5 times a power of ten, at least `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next((head * power for head in (1, 2, 5) if head * power >= rough), 10 * power)


def short(value: float) -> str:
    """Write a number with at most four significant digits."""
    return f"{value:.4g}" if abs(value) > 1e-300 else "0"


class Plot:
    """One SVG element that grows mark by mark."""

    def __init__(self, height: float) -> None:
        self._height = height
        self._marks: list[str] = []

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        """Draw a line."""
        self._marks.append(f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')

    def bar(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        """Draw a filled rectangle, at least half a pixel wide so that it is seen."""
        width = max(width, 0.5)
        self._marks.append(f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>')

    def dot(self, x: float, y: float, radius: float, kind: str, words: str) -> None:
        """Draw a point that says what it is when it is pointed at."""
        circle = f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}">'
        self._marks.append(f"{circle}<title>{text(words)}</title></circle>")

    def curve(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        """Draw a line through points."""
        listed = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._marks.append(f'<polyline class="{kind}" points="{listed}"/>')

    def label(self, x: float, y: float, words: str, *, anchor: str = "start", kind: str = "name") -> None:
        """Write words, cut to what fits beside a plot; the whole of them is shown when they are pointed at."""
        cut = words if len(words) <= LABEL_CHARACTERS or anchor != "end" else words[: LABEL_CHARACTERS - 1] + "…"
        whole = f"<title>{text(words)}</title>" if cut != words else ""
        start = f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
        self._marks.append(f"{start}{whole}{text(cut)}</text>")

    def axis_below(self, scale: Scale, top: float, bottom: float, words: str) -> None:
        """Draw the horizontal axis of a plot with grid lines, tick labels and its name."""
        for value, shown in scale.ticks:
            self.line(scale.at(value), top, scale.at(value), bottom, "grid")
            self.label(scale.at(value), bottom + 16, shown, anchor="middle", kind="faint")
        self.line(scale.start, bottom, scale.stop, bottom, "axis")
        self.label((scale.start + scale.stop) / 2, bottom + 36, words, anchor="middle")

    def axis_left(self, scale: Scale, left: float, right: float, words: str) -> None:
        """Draw the vertical axis of a plot with grid lines, tick labels and its name above it."""
        for value, shown in scale.ticks:
            self.line(left, scale.at(value), right, scale.at(value), "grid")
            self.label(left - 8, scale.at(value) + 4, shown, anchor="end", kind="faint")
        self.label(left, scale.stop - 10, words)

    def svg(self, title: str, words: str) -> str:
        """Return the element, which names and describes itself to whoever cannot see it."""
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {WIDTH} {self._height:.0f}">',
                f"<title>{text(title)}</title>",
                f"<desc>{text(words)}</desc>",
                *self._marks,
                "</svg>",
            ]
        )

"""Progress on long work: a line on a terminal's stderr, nothing anywhere else."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from capsule.cli.words import safe

if TYPE_CHECKING:
    from capsule.steps.attempts import Progress

REFRESH_SECONDS = 0.2


def duration(seconds: float) -> str:
    """Write a duration as a person says it: `8 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def width() -> int:
    """Return how many characters fit into a line of the terminal without wrapping."""
    return shutil.get_terminal_size().columns - 1


class Line:
    """One line of a terminal that is rewritten in place."""

    def __init__(self) -> None:
        self.enabled = sys.stderr.isatty()
        self._shown = 0.0

    def show(self, text: str, *, now: bool = False) -> None:
        """Show `text` instead of what was there, at most every fifth of a second unless `now`."""
        if self.enabled and (now or time.monotonic() - self._shown >= REFRESH_SECONDS):
            self._shown = time.monotonic()
            with suppress(OSError):
                sys.stderr.write(f"\r\x1b[K{text[: width()]}")
                sys.stderr.flush()

    def say(self, text: str) -> None:
        """Write a line that stays; a terminal that was closed keeps nobody from going on."""
        self.clear()
        with suppress(OSError):
            print(text, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Leave the line empty."""
        if self.enabled:
            with suppress(OSError):
                sys.stderr.write("\r\x1b[K")
                sys.stderr.flush()


@contextmanager
def bar(verb: str) -> Iterator[Callable[[int, int], None]]:
    """Give a function that shows how much of a whole is done, and how long the rest will take."""
    line = Line()
    began = time.monotonic()

    def progress(done: int, total: int) -> None:
        spent = time.monotonic() - began
        rest = f", {duration(spent / done * (total - done))} left" if done and spent > 1 else ""
        line.show(f"capsule: {verb} {100 * done // max(total, 1)} %{rest}")

    try:
        yield progress
    finally:
        line.clear()


class RunDisplay:
    """What a run shows while it goes on: one line for the attempts at hand, one that stays for each that ended."""

    def __init__(self, line: Line) -> None:
        self._line = line

    @property
    def shows(self) -> bool:
        """Whether anybody sees `going_on`."""
        return self._line.enabled

    def note(self, words: str) -> None:
        """Say something that stays."""
        self._line.say(f"capsule: {safe(words)}")

    def going_on(self, attempts: Sequence[Progress], done: int, processes: int, left: float | None) -> None:
        """Show where the attempts at hand are; `left` is the time that all the rest will take, in seconds."""
        rest = f", about {duration(left)} left" if left is not None else ""
        text = f"capsule: {done} of {processes} processes{rest}; "
        at_hand = ", ".join(f"{item.attempt} {item.rows}/{item.cells}" for item in attempts)
        if len(text) + len(at_hand) >= width():
            rows, cells = sum(item.rows for item in attempts), sum(item.cells for item in attempts)
            at_hand = f"{len(attempts)} attempts, {rows} of {cells} cells"
        self._line.show(text + at_hand)

    def ended(self, attempt: str, outcome: str, evidence: str, seconds: float, unit: str) -> None:
        """Say how an attempt ended and what it cost."""
        self.note(f"{attempt} {outcome} ({evidence}), charged {seconds:.1f} {unit}-seconds")


@contextmanager
def run_display() -> Iterator[RunDisplay]:
    """Give the display of a run."""
    line = Line()
    try:
        yield RunDisplay(line)
    finally:
        line.clear()

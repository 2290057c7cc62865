"""Watching: say where things stand again and again, until nobody is at work any more."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from capsule.cli.words import emit, safe

TURN_SECONDS = 1.5


@dataclass(frozen=True)
class View:
    """What a command that can watch says: its object, its words, the same in one line, and whether it can change.

    `news` is given the objects of before and now, and returns what a reader of a pipe is told: objects, and lines.
    """

    value: dict[str, Any]
    text: str
    active: bool


News = Callable[[dict[str, Any] | None, View], tuple[list[dict[str, Any]], list[str]]]


def show(read: Callable[[], View], wants_json: bool, repeat: bool, news: News) -> None:
    """Say it once; or redraw it on a terminal, and on a pipe print one object or line for each change."""
    if not repeat:
        view = read()
        emit(wants_json, view.value, view.text)
        return
    before: dict[str, Any] | None = None
    while True:
        view = read()
        if sys.stdout.isatty() and not wants_json:
            sys.stdout.write("\x1b[H\x1b[2J")
            emit(False, view.value, view.text)
        elif view.value != before:
            objects, lines = news(before, view)
            for item in objects if wants_json else lines:
                print(json.dumps(item, ensure_ascii=False) if isinstance(item, dict) else safe(item))
        sys.stdout.flush()
        before = view.value
        if not view.active:
            return
        time.sleep(TURN_SECONDS)


def note(words: str) -> None:
    """Say something about the reading itself."""
    print(f"capsule: {safe(words)}", file=sys.stderr, flush=True)

"""What an attempt leaves on this machine for whoever must settle it: who looks after it, and notes of what they saw."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from capsule.core.attempt import Clock
from capsule.core.errors import CapsuleError
from capsule.core.schema import Model, Natural
from capsule.host.durable import read_regular, write_durably
from capsule.host.launch import LAUNCHER, ORDER, LaunchOrder
from capsule.host.process import Identity

WHEREABOUTS = "whereabouts.json"
FAILURE = "ledger_failed.json"
NOTE = "watchdog.json"
ENGINE = "engine.json"
"""What is known of the job that an attempt is, where an engine of another machine runs it."""
SEEN = "tree.json"
"""The processes that were seen in the attempt's tree; see `process.TreeRecorder`."""

T = TypeVar("T", bound=Model)


class Whereabouts(Model):
    """Who looks after an attempt, and its cgroup where it has one of its own."""

    supervisor: Identity
    watchdog: Identity | None
    cgroup: str | None


class Failure(Model):
    """The note of a supervisor that could not write its ledger: why, and when the tree was empty."""

    words: str
    emptied: Clock


class Note(Model):
    """The note of a watchdog without a supervisor: what it saw of the end, and when the tree was empty."""

    words: str
    wait_status: Natural | None
    emptied: Clock


@dataclass(frozen=True)
class Traces:
    """What is there and can be read; None for everything else."""

    directory: Path
    order: LaunchOrder | None
    launcher: Identity | None
    whereabouts: Whereabouts | None
    failure: Failure | None
    note: Note | None


def read_traces(directory: Path) -> Traces:
    """Read an attempt's traces; nothing that stands in their place can hold this up or make it fail."""

    def read(model: type[T], name: str) -> T | None:
        try:
            data = read_regular(directory / name)
            return model.from_bytes(data, name) if data is not None else None
        except (OSError, CapsuleError):
            return None

    return Traces(
        directory,
        read(LaunchOrder, ORDER),
        read(Identity, LAUNCHER),
        read(Whereabouts, WHEREABOUTS),
        read(Failure, FAILURE),
        read(Note, NOTE),
    )


def leave(directory: Path, name: str, trace: Model) -> None:
    """Write a trace durably."""
    write_durably(directory / name, trace.to_bytes())

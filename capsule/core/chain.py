"""The ledger's bytes: one canonical JSON line an event, each holding the hash of the line before it.

`read` is pure and never raises for damage: a verifier wants every finding, and the host decides what to refuse.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field, ValidationError

from capsule.core.attempt import DATA, Clock, Event, EventLine, EventName
from capsule.core.canonical import COMMAS_MAX, canonical, whole_lines
from capsule.core.digest import Digest, digest_of
from capsule.core.errors import MalformedError
from capsule.core.schema import Model, first_error

FAULTS_MAX = 1_000
"""Faults after which a ledger is not read on."""


class Head(Model):
    """Count and hash of the last line, kept outside the ledger; written second, so one event behind is legal."""

    count: Annotated[int, Field(ge=0)]
    sha256: Digest | None


@dataclass
class Chain:
    """A ledger read: its events, its head, the bytes of a torn last line, and every fault found."""

    events: list[Event] = field(default_factory=list)
    hashes: list[str] = field(default_factory=list)
    tail: bytes = b""
    faults: list[str] = field(default_factory=list)

    @property
    def head(self) -> Head:
        """Count and hash of the last whole line."""
        return Head(count=len(self.hashes), sha256=self.hashes[-1] if self.hashes else None)


def encode(seq: int, prev: str | None, name: EventName, attempt: str | None, at: Clock, data: Model) -> bytes:
    """Return the line of one event, without its newline."""
    assert isinstance(data, DATA[name]), (name, type(data))
    line = EventLine(seq=seq, prev=prev, event=name, attempt=attempt, at=at, data=data.to_json())
    return canonical(line.to_json())


def read(data: bytes, where: str) -> Chain:
    """Read a ledger; a last line without newline is its torn tail, every other damage a fault."""
    chain = Chain()
    chain.tail = data[data.rfind(b"\n") + 1 :]
    for number, line in enumerate(whole_lines(data)):
        place = f"{where}:{number + 1}"
        if len(chain.faults) >= FAULTS_MAX:
            chain.faults.append(f"{place}: not read on after {FAULTS_MAX} faults")
            break
        try:
            entry = _entry(line, place)
            parsed = DATA[entry.event].model_validate_json(json.dumps(entry.data))
            if parsed.to_json() != entry.data:
                raise MalformedError(f"{place}: expected every field of {entry.event} written out")
        except MalformedError as error:
            chain.faults.append(error.message)
            chain.hashes.append(digest_of(line))
            continue
        except ValidationError as error:
            chain.faults.append(f"{place}: {first_error(error)}")
            chain.hashes.append(digest_of(line))
            continue
        previous = chain.hashes[-1] if chain.hashes else None
        if entry.seq != number or entry.prev != previous:
            chain.faults.append(
                f"{place}: expected event {number} after {previous}, found event {entry.seq} after {entry.prev}"
            )
        chain.hashes.append(digest_of(line))
        chain.events.append(Event(entry.seq, entry.event, entry.attempt, entry.at, parsed))
    return chain


def _entry(line: bytes, place: str) -> EventLine:
    """Read one line; bytes that the value gives back exactly are canonical, others are judged for the right words."""
    with suppress(ValueError):
        entry = EventLine.model_validate_json(line) if line.count(b",") <= COMMAS_MAX else None
        if entry is not None and entry.to_bytes() == line:
            return entry
    return EventLine.from_bytes(line, place)


def head_faults(chain: Chain, head: Head) -> list[str]:
    """Compare a chain with the head kept outside: equal, or the head exactly one event behind."""
    count = len(chain.hashes)
    if head.count > count:
        return [f"expected {head.count} events by the head kept outside, found {count}: the ledger's tail is missing"]
    if head.count < count - 1:
        return [f"expected at most one event after the head kept outside ({head.count}), found {count}"]
    if head.count and chain.hashes[head.count - 1] != head.sha256:
        return [f"expected event {head.count - 1} to have the hash of the head kept outside, found another"]
    return []

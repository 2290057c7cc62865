"""The ledger's bytes: one canonical JSON line an event, each holding the hash of the line before it.

`Walk` is pure and never raises for damage: a verifier wants every finding, and the host decides what to refuse.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, ValidationError, create_model

from capsule.core.attempt import DATA, Clock, Event, EventLine, EventName
from capsule.core.canonical import canonical, canonical_checked, whole_lines
from capsule.core.digest import Digest, digest_of
from capsule.core.errors import MalformedError, shortened
from capsule.core.lines import Blocks, Content
from capsule.core.schema import Model, first_error

FAULTS_MAX = 1_000
"""Faults after which a ledger is not read on."""

LINE_BYTES_MAX = 4 << 20
"""Bytes of one line that is `sealed`, without its newline."""

EVENT_BYTES_MAX = LINE_BYTES_MAX // 2 - 1024
"""Bytes of any other line, so that a torn one can be sealed: in twice its bytes, and some."""

LINE_COMMAS_MAX = 50_000
"""Commas in one line, which bound what it becomes in memory."""


class Head(Model):
    """Count and hash of the last line, kept outside the ledger; written second, so one event behind is legal."""

    count: Annotated[int, Field(ge=0)]
    sha256: Digest | None


class Walk:
    """One way through a ledger's lines: yields its events and keeps none of them.

    Afterwards, and meanwhile as far as it has come: `lines` counts whole lines, `events` those that are events, `last`
    and `before` are the hashes of the last line and of the one before it, and `torn` counts the bytes behind the last
    newline. `hashes` says for each of the wanted numbers of lines that the ledger has which hash its last line has.
    """

    def __init__(self, content: Content = b"", where: str = "", wanted: Iterable[int] = ()) -> None:
        self._content = content
        self._where = where
        self._wanted = set(wanted)
        self.lines = 0
        self.events = 0
        self.last: str | None = None
        self.before: str | None = None
        self.torn = 0
        self.hashes: dict[int, str | None] = {0: None}
        self.faults: list[str] = []

    @property
    def head(self) -> Head:
        """Count and hash of the last whole line."""
        return Head(count=self.lines, sha256=self.last)

    def __iter__(self) -> Iterator[Event]:
        blocks = Blocks(self._content, LINE_BYTES_MAX)
        for block in blocks:
            yield from self._events(block)
        self.torn = blocks.torn

    def _events(self, block: bytes) -> Iterator[Event]:
        for line in whole_lines(block):
            if len(self.faults) > FAULTS_MAX:
                break
            place = f"{self._where}:{self.lines + 1}"
            if len(self.faults) == FAULTS_MAX:
                self.faults.append(f"{place}: not read on after {FAULTS_MAX} faults")
                break
            event = self._event(line, place)
            self.before, self.last = self.last, digest_of(line) if len(line) <= LINE_BYTES_MAX else None
            self.lines += 1
            if self.lines in self._wanted:
                self.hashes[self.lines] = self.last
            if event is not None:
                self.events += 1
                yield event

    def _event(self, line: bytes, place: str) -> Event | None:
        """Read one line; None, and a fault, if it is no event."""
        try:
            entry, data = _entry(line, place)
        except MalformedError as error:
            self.faults.append(error.message)
            return None
        except ValidationError as error:
            self.faults.append(shortened(f"{place}: {first_error(error)}"))
            return None
        if entry.seq != self.lines or entry.prev != self.last:
            self.faults.append(
                f"{place}: expected event {self.lines} after {self.last}, found event {entry.seq} after {entry.prev}"
            )
        return Event(entry.seq, entry.event, entry.attempt, entry.at, data)


@dataclass
class Chain:
    """A ledger read whole: its events, the way through them, and the bytes of a torn last line."""

    events: list[Event]
    walk: Walk
    tail: bytes

    @property
    def head(self) -> Head:
        """Count and hash of the last whole line."""
        return self.walk.head

    @property
    def faults(self) -> list[str]:
        """Every fault found."""
        return self.walk.faults


def encode(seq: int, prev: str | None, name: EventName, attempt: str | None, at: Clock, data: Model) -> bytes:
    """Return the line of one event, without its newline."""
    assert isinstance(data, DATA[name]), (name, type(data))
    line = EventLine(seq=seq, prev=prev, event=name, attempt=attempt, at=at, data=data.to_json())
    return canonical(line.to_json())


def read(data: bytes, where: str) -> Chain:
    """Read a ledger whole; a last line without newline is its torn tail, every other damage a fault."""
    walk = Walk(data, where)
    return Chain([*walk], walk, data[data.rfind(b"\n") + 1 :])


_NAME = re.compile(rb',"event":"([a-z_]{1,20})","prev":(?:null|"[a-z0-9:]{71}"),"seq":[0-9]{1,16}\}\Z')
"""What follows the data of an event in canonical form."""

_LINES: dict[bytes, Any] = {
    name.encode(): create_model(f"Line_{name}", __base__=EventLine, data=(data, ...)) for name, data in DATA.items()
}
"""By event the form of a whole line with its data."""


def _entry(line: bytes, place: str) -> tuple[EventLine, Model]:
    """Read one line and its data.

    Bytes that its values give back exactly are an event in canonical form; others are judged step by step, for the
    right words.
    """
    name = _NAME.search(line)
    refuse_large(line, name[1].decode() if name is not None else "", place)
    shape = _LINES.get(name[1]) if name is not None else None
    if shape is not None:
        with suppress(ValueError):
            found = shape.model_validate_json(line)
            if canonical_checked(found.to_json()) == line:
                return found, found.data
    entry = EventLine.from_bytes(line, place)
    data = DATA[entry.event].model_validate_json(json.dumps(entry.data))
    if data.to_json() != entry.data:
        raise MalformedError(f"{place}: expected every field of {entry.event} written out")
    return entry, data


def refuse_large(line: bytes, name: str, place: str) -> None:
    """Refuse the line of an event of this name that is too large to be read.

    Raises:
        MalformedError: it has too many bytes or commas.
    """
    most = LINE_BYTES_MAX if name == "sealed" and line.isascii() else EVENT_BYTES_MAX
    if len(line) > most:
        raise MalformedError(f"{place}: expected at most {most} bytes in an event, found more")
    if line.count(b",") > LINE_COMMAS_MAX:
        raise MalformedError(f"{place}: expected at most {LINE_COMMAS_MAX} commas in an event, found more")


def head_faults(walk: Walk, head: Head) -> list[str]:
    """Compare a ledger with the head kept outside: equal, or the head exactly one event behind."""
    count = walk.lines
    if head.count > count:
        return [f"expected {head.count} events by the head kept outside, found {count}: the ledger's tail is missing"]
    if head.count < count - 1:
        return [f"expected at most one event after the head kept outside ({head.count}), found {count}"]
    if head.count and head.sha256 != (walk.last if head.count == count else walk.before):
        return [f"expected event {head.count - 1} to have the hash of the head kept outside, found another"]
    return []

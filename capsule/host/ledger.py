"""The ledger file: append-only, hash-chained, one writer at a time, safe against a crash at every instruction.

An append holds a lock on a file beside the ledger, checks the tail against the head that is kept outside, seals a torn
tail, writes one line with one write, syncs it, and only then replaces the head. So a crash leaves the ledger either
without the event, with a torn tail, or whole with the head one event behind; all three are legal and the next append
puts them right. A ledger that is damaged in the middle or went backwards is refused, never repaired.

A write or sync that failed is never taken for success: the append raises, and the next one starts from what is really
in the file. When the head is one event behind, the last line may never have reached the disk, so its bytes are written
again before anything follows them.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field

from capsule.core.account import Account, add_up, apply
from capsule.core.attempt import DATA, Clock, Event, EventLine, EventName, Sealed
from capsule.core.canonical import canonical
from capsule.core.chain import Chain, Head, encode, head_faults, read, refuse_large
from capsule.core.digest import Digest, digest_of
from capsule.core.errors import BusyError, MalformedError, RefusedError
from capsule.core.schema import Model, Natural
from capsule.host.disk import cannot_write
from capsule.host.durable import create, pwrite, sync, sync_directory, write_durably

T = TypeVar("T")
EMPTY = Head(count=0, sha256=None)
PATIENCE_SECONDS = 60.0
"""How long a writer waits for the lock; it is held for milliseconds, unless its holder was stopped."""


class Position(Model):
    """A place between two lines: the bytes and events before it and the hash of the last of them."""

    offset: Natural
    count: Annotated[int, Field(ge=0)]
    sha256: Digest | None


START = Position(offset=0, count=0, sha256=None)


@dataclass
class _Known:
    """What this object has read: up to where, and its events added up (`whole` if from the first one)."""

    position: Position
    account: Account
    whole: bool
    tail: bytes = b""
    behind: bool = False


class Ledger:
    """One ledger and the head kept outside it; each operation takes the lock for itself.

    The file is read once; later operations read only what was added since. `resumed` starts at a known place, so that
    a long ledger costs a supervisor nothing.
    """

    def __init__(self, path: Path, head_path: Path, *, resumed: Position | None = None) -> None:
        self.path = path
        self.head_path = head_path
        self._known = _Known(resumed, Account(), whole=False) if resumed else None

    def read(self) -> tuple[Chain, Account]:
        """Read and check the whole ledger; one that was never written is empty.

        Raises:
            RefusedError: the ledger is damaged, or went backwards.
        """
        with self._lock(shared=True):
            data = self.path.read_bytes() if self.path.exists() else b""
            return self._checked(data)

    def append(self, name: EventName, attempt: str | None, data: Model, clock: Clock) -> Event:
        """Append one event durably; it is on the disk when this returns.

        Raises:
            MachineError: the event could not be written; whether it is in the ledger is not known.
            RefusedError: the ledger is damaged or went backwards, or the attempt's state does not allow the event.
        """
        with self._opened() as descriptor:
            self._load(descriptor, whole=False)
            return self._append(descriptor, name, attempt, data, clock)

    def transaction(self, work: Callable[[Transaction], T]) -> T:
        """Call `work` under the lock with the ledger added up; what it appends is decided on what it saw."""
        with self._opened() as descriptor:
            self._load(descriptor, whole=True)
            return work(Transaction(self, descriptor))

    def seal(self, clock: Clock) -> bool:
        """Seal a torn tail, if there is one; whether there was."""
        with self._opened() as descriptor:
            torn = bool(self._load(descriptor, whole=False).tail)
            self._settle_tail(descriptor, clock)
            return torn

    # Locks and descriptors.

    @contextmanager
    def _lock(self, *, shared: bool) -> Iterator[None]:
        """Hold the lock file; a reader does without where it cannot be had (a read-only copy, a stopped writer)."""
        path = self.path.with_name(self.path.name + ".lock")
        try:
            if not shared:
                path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            if not shared:
                raise cannot_write(self.path, error) from error
            yield
            return
        try:
            if not _locked(descriptor, shared) and not shared:
                raise BusyError(
                    f"{self.path}: expected the ledger's lock within {PATIENCE_SECONDS:g} s, found it held",
                    hint="a process that writes this ledger is stopped or stuck; continue or end it",
                )
            yield
        finally:
            os.close(descriptor)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        with self._lock(shared=False):
            try:
                descriptor = self._open()
            except OSError as error:
                raise cannot_write(self.path, error) from error
            try:
                yield descriptor
            finally:
                os.close(descriptor)

    def _open(self) -> int:
        try:
            return os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            descriptor = create(self.path, os.O_RDWR | os.O_EXCL)
            sync_directory(self.path.parent)
            return descriptor

    # Reading.

    def _read_head(self) -> Head:
        try:
            return Head.from_bytes(self.head_path.read_bytes(), str(self.head_path))
        except FileNotFoundError:
            return EMPTY
        except MalformedError as error:
            raise RefusedError(error.message, hint=_HINT_DAMAGED) from error
        except OSError as error:
            raise cannot_write(self.head_path, error) from error

    def _checked(self, data: bytes) -> tuple[Chain, Account]:
        chain = read(data, str(self.path))
        if chain.faults:
            raise RefusedError(f"the ledger is damaged: {_some(chain.faults)}", hint=_HINT_DAMAGED)
        faults = head_faults(chain.walk, self._read_head())
        if faults:
            raise RefusedError(f"ledger_regressed: {self.path}: {_some(faults)}", hint=_HINT_REGRESSED)
        account = add_up(chain.events)
        if account.faults:
            raise RefusedError(f"the ledger contradicts itself: {_some(account.faults)}", hint=_HINT_DAMAGED)
        return chain, account

    def _load(self, descriptor: int, *, whole: bool) -> _Known:
        """Bring what is known up to the file's end: by the new lines alone where everything is as expected."""
        known = self._known
        self._known = None
        try:
            if known is not None and (known.whole or not whole) and self._catch_up(descriptor, known):
                self._known = known
                return known
            size = os.fstat(descriptor).st_size
            chain, account = self._checked(_pread(descriptor, 0, size))
        except OSError as error:
            raise cannot_write(self.path, error) from error
        position = Position(offset=size - len(chain.tail), count=chain.head.count, sha256=chain.head.sha256)
        behind = self._read_head() != chain.head
        self._known = _Known(position, account, True, chain.tail, behind)
        return self._known

    def _catch_up(self, descriptor: int, known: _Known) -> bool:
        """Read the lines added since; False when anything is unusual, so that the whole ledger is judged."""
        added = os.fstat(descriptor).st_size - known.position.offset
        if added < 0:
            return False
        *lines, known.tail = _pread(descriptor, known.position.offset, added).split(b"\n")
        offset, count, previous = known.position.offset, known.position.count, known.position.sha256
        for line in lines:
            try:
                entry = EventLine.from_bytes(line, str(self.path))
                data = DATA[entry.event].model_validate_json(canonical(entry.data))
            except (MalformedError, ValueError):
                return False
            if entry.seq != count or entry.prev != previous:
                return False
            apply(known.account, Event(entry.seq, entry.event, entry.attempt, entry.at, data))
            offset, count, previous = offset + len(line) + 1, count + 1, digest_of(line)
        known.position = Position(offset=offset, count=count, sha256=previous)
        known.behind = False
        return self._read_head() == Head(count=count, sha256=previous)

    # Writing.

    def _append(self, descriptor: int, name: EventName, attempt: str | None, data: Model, clock: Clock) -> Event:
        self._settle_tail(descriptor, clock)
        known = self._known
        assert known is not None
        event = Event(known.position.count, name, attempt, clock, data)
        faults = len(known.account.faults)
        apply(known.account, event)
        if len(known.account.faults) > faults:
            self._known = None
            raise RefusedError(
                f"expected an event that the ledger allows, found {known.account.faults[-1]}",
                hint="another command has settled this attempt; look at `capsule ledger`",
            )
        self._put(descriptor, known, event)
        return event

    def _settle_tail(self, descriptor: int, clock: Clock) -> None:
        """Before anything is appended: make the last line durable and turn a torn tail into evidence."""
        known = self._known
        assert known is not None
        if known.behind:
            self._write_again(descriptor, known)
        if known.tail:
            sealed = Sealed(size=len(known.tail), sha256=digest_of(known.tail), hex=known.tail.hex())
            event = Event(known.position.count, "sealed", None, clock, sealed)
            apply(known.account, event)
            self._put(descriptor, known, event)

    def _write_again(self, descriptor: int, known: _Known) -> None:
        """Write the last line once more: after a failed sync only a new write is sure to reach the disk."""
        end = known.position.offset
        with self._writing():
            line = _last_line(descriptor, end)
            pwrite(descriptor, line, end - len(line))
            sync(descriptor)
            self._write_head(Head(count=known.position.count, sha256=known.position.sha256))
        known.behind = False

    def _put(self, descriptor: int, known: _Known, event: Event) -> None:
        """Write one line over what follows the last whole one (a torn tail, which a sealed line is longer than)."""
        position = known.position
        line = encode(position.count, position.sha256, event.name, event.attempt, event.at, event.data)
        try:
            refuse_large(line, event.name, f"{self.path}:{position.count + 1}")
        except MalformedError as error:
            self._known = None
            raise RefusedError(error.message, hint="no reader would take such an event") from error
        assert len(line) >= len(known.tail), "a torn tail must vanish under the line that seals it"
        following = Position(offset=position.offset + len(line) + 1, count=position.count + 1, sha256=digest_of(line))
        with self._writing():
            pwrite(descriptor, line + b"\n", position.offset)
            sync(descriptor)
            self._write_head(Head(count=following.count, sha256=following.sha256))
        known.position = following
        known.tail = b""

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """On a failure forget what is known: the next operation reads the file as it is."""
        try:
            yield
        except OSError as error:
            self._known = None
            raise cannot_write(self.path, error) from error

    def _write_head(self, head: Head) -> None:
        write_durably(self.head_path, head.to_bytes())


class Transaction:
    """The ledger under its lock: its account, and appends that belong together."""

    def __init__(self, ledger: Ledger, descriptor: int) -> None:
        self._ledger = ledger
        self._descriptor = descriptor

    @property
    def account(self) -> Account:
        """The ledger added up, with what this transaction appended."""
        assert self._ledger._known is not None, "a transaction ends with its first failure"
        return self._ledger._known.account

    @property
    def position(self) -> Position:
        """The end of the ledger's whole lines."""
        assert self._ledger._known is not None, "a transaction ends with its first failure"
        return self._ledger._known.position

    def append(self, name: EventName, attempt: str | None, data: Model, clock: Clock) -> Event:
        """Append one event durably; see `Ledger.append`."""
        return self._ledger._append(self._descriptor, name, attempt, data, clock)


_HINT_DAMAGED = "evidence is never repaired; restore the ledger and its head together from a sound copy"
_HINT_REGRESSED = "an older or shortened copy stands in its place; restore the newest ledger and head together"


def _locked(descriptor: int, shared: bool) -> bool:
    """Take the lock within the patience; whether it was had."""
    until = time.monotonic() + (PATIENCE_SECONDS / 20 if shared else PATIENCE_SECONDS)
    while True:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                return False
            time.sleep(0.005)
        else:
            return True


def _pread(descriptor: int, offset: int, size: int) -> bytes:
    parts = []
    while size > 0 and (part := os.pread(descriptor, size, offset)):
        parts.append(part)
        offset, size = offset + len(part), size - len(part)
    return b"".join(parts)


def _last_line(descriptor: int, end: int) -> bytes:
    """Return the line that ends at `end`, with its newline."""
    size = 4096
    while True:
        start = max(0, end - size)
        block = _pread(descriptor, start, end - start)
        at = block.rfind(b"\n", 0, len(block) - 1)
        if at >= 0 or start == 0:
            return block[at + 1 :]
        size *= 2


def _some(faults: list[str]) -> str:
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return faults[0] + more

"""What the events of a ledger add up to: its attempts, sums over them, and every rule that an event broke."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from capsule.core.attempt import (
    TRANSITIONS,
    WITHOUT_ATTEMPT,
    Attempt,
    Correction,
    DeviceClean,
    Event,
    Exit,
    Heartbeat,
    Intent,
    ManifestAdopted,
    Opened,
    Reconciled,
    Refused,
    Reserved,
    Sealed,
    Settled,
    Spawned,
)
from capsule.core.digest import digest_of


@dataclass
class Account:
    """A ledger added up: its attempts in order, sums over them, and every rule of the state table that an event broke.

    Sums are kept as events come, so that asking for them takes no time however many attempts there are.
    """

    protocol: str | None = None
    manifests: list[str] = field(default_factory=list)
    attempts: dict[str, Attempt] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    _held_ms: dict[tuple[str, bool], int] = field(default_factory=dict)
    _reservations: dict[bool, int] = field(default_factory=dict)
    _seen: tuple[int, int, int] = (0, 0, 0)

    def held_ms(self, unit: str, *, pilot: bool) -> int:
        """Device-milliseconds that attempts of this unit take from the budget."""
        return self._held_ms.get((unit, pilot), 0)

    def reservations(self, *, pilot: bool) -> int:
        """Reservations that were not refused, which `attempts_max` limits."""
        return self._reservations.get(pilot, 0)

    @property
    def seen(self) -> tuple[int, int, int]:
        """What has been seen: attempts that ended, pilot attempts that ended, and the rows of both."""
        return self._seen

    def next_attempt(self) -> str:
        """Return the id of the next attempt."""
        return f"a{len(self.attempts) + 1:06d}"


def add_up(events: Iterable[Event]) -> Account:
    """Walk the state table over a ledger's events."""
    account = Account()
    for event in events:
        apply(account, event)
    return account


def apply(account: Account, event: Event) -> None:
    """Walk the state table by one event."""
    data = event.data
    if (event.attempt is None) != (event.name in WITHOUT_ATTEMPT):
        account.faults.append(f"event {event.seq} ({event.name}): attempt {event.attempt} does not belong there")
    elif isinstance(data, Opened):
        if event.seq != 0 or account.protocol is not None:
            account.faults.append(f"event {event.seq}: a ledger is opened once, by its first event")
        account.protocol = data.protocol
    elif isinstance(data, ManifestAdopted):
        previous = account.manifests[-1] if account.manifests else None
        if data.supersedes != previous:
            account.faults.append(f"event {event.seq}: manifest {data.manifest} does not supersede the one before it")
        account.manifests.append(data.manifest)
    elif isinstance(data, Sealed):
        tail = bytes.fromhex(data.hex)
        if (len(tail), digest_of(tail)) != (data.size, data.sha256):
            account.faults.append(f"event {event.seq}: the sealed bytes do not have the size and digest beside them")
    elif event.attempt is not None:
        _advance(account, event, event.attempt)
    if event.seq == 0 and not isinstance(data, Opened):
        account.faults.append("event 0: expected `opened`")


def _advance(account: Account, event: Event, name: str) -> None:
    attempt = account.attempts.get(name)
    if attempt is None:
        if name != account.next_attempt():
            account.faults.append(f"event {event.seq}: expected attempt {account.next_attempt()}, found {name}")
        attempt = account.attempts.setdefault(name, Attempt(name, first=event.at))
    attempt.last = event.at
    held_ms = attempt.held_ms
    _step(account, attempt, event)
    if attempt.reserved is not None and attempt.held_ms != held_ms:
        key = (attempt.reserved.unit, attempt.pilot)
        account._held_ms[key] = account._held_ms.get(key, 0) + attempt.held_ms - held_ms


def _step(account: Account, attempt: Attempt, event: Event) -> None:
    """Walk an attempt's state by one event."""
    data = event.data
    if isinstance(data, Correction):
        if attempt.open:
            account.faults.append(f"event {event.seq}: a correction of {attempt.id}, which has not ended")
        attempt.corrections_ms += data.debited_ms
        return
    following = TRANSITIONS[attempt.state].get(event.name)
    if following is None:
        account.faults.append(
            f"event {event.seq}: {event.name} cannot follow state {attempt.state or 'none'} of {attempt.id}"
        )
        return
    attempt.state = following
    match data:
        case Reserved():
            attempt.reserved = data
            account._reservations[data.pilot] = account.reservations(pilot=data.pilot) + 1
            if not data.pilot and data.manifest not in account.manifests[-1:]:
                account.faults.append(
                    f"event {event.seq}: {attempt.id} is reserved under a manifest that is not the current one"
                )
        case Refused():
            attempt.refused = data
            if attempt.reserved is not None:
                account._reservations[attempt.pilot] -= 1
        case Intent():
            attempt.intent = data
        case Spawned():
            attempt.spawned = data
        case Heartbeat():
            attempt.heartbeat_ms = data.elapsed_ms
        case Exit():
            attempt.exit = data
        case DeviceClean():
            attempt.released = data.released
        case Settled() | Reconciled():
            attempt.end = data
            attempts, pilots, rows = account.seen
            account._seen = (attempts + (not attempt.pilot), pilots + attempt.pilot, rows + data.rows)
        case _:
            pass

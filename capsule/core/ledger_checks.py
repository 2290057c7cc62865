"""The checks of the ledger, V-10 to V-14: its chain and head, its states, its charges, and the files that it names."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from datetime import datetime

from capsule.core.attempt import Account, Attempt, Reconciled, Reserved, Settled, add_up, apply
from capsule.core.chain import Head, head_faults, read
from capsule.core.evidence import NotChecked, Reading
from capsule.core.manifest import Manifest
from capsule.core.protocol import Budget, milliseconds, reserved_ms

Checking = Generator[str, None, str]
"""A check: yields findings, returns words for a pass."""


def check_ledger_chain(reading: Reading) -> Checking:
    """V-10: the ledger is whole lines, each holding the hash of the line before it."""
    if "2-ledger.jsonl" not in reading.evidence.members:
        raise NotChecked("the ledger is absent")
    reading.chain = read(reading.evidence.ledger, "2-ledger.jsonl")
    yield from reading.chain.faults
    if reading.chain.tail:
        yield f"2-ledger.jsonl: {len(reading.chain.tail)} bytes after the last whole line"
    if not reading.chain.events:
        yield "2-ledger.jsonl: expected at least the event `opened`, found none"
    reading.account = add_up(reading.chain.events)
    return f"{len(reading.chain.events)} events"


def check_ledger_head(reading: Reading) -> Checking:
    """V-11: the head kept outside the ledger is that of the ledger, or one event behind it."""
    if "2-ledger.head.json" not in reading.evidence.members:
        raise NotChecked("the head is absent")
    head = Head.from_bytes(reading.evidence.head, "2-ledger.head.json")
    yield from head_faults(reading.chain, head)
    return f"{head.count} events by the head"


def check_attempt_states(reading: Reading) -> Checking:
    """V-12: every event is allowed by the state table, every attempt ended once, amendments name what had been seen."""
    if not reading.chain.events:
        raise NotChecked("the ledger could not be read")
    account = reading.account
    yield from account.faults
    for attempt in account.attempts.values():
        if attempt.open:
            yield f"attempt {attempt.id} has not ended: state {attempt.state}"
    if reading.manifest and account.protocol != reading.manifest.protocol.name:
        yield f"the ledger is that of {account.protocol}, the manifest that of {reading.manifest.protocol.name}"
    adopted = account.manifests
    chain = [manifest.identity for manifest in reading.manifests]
    if adopted != chain[: len(adopted)]:
        yield f"expected the manifests {chain}, found {adopted} in the ledger"
    yield from _seen_faults(reading)
    return f"{len(account.attempts)} attempts, each ended once"


def _seen_faults(reading: Reading) -> Iterator[str]:
    """Derive again what each amendment says had been seen, from the ledger as it was by then."""
    hashes = reading.chain.hashes
    for number, manifest in enumerate(reading.manifests, start=1):
        said = manifest.supersedes
        if said is None:
            continue
        count = said.ledger_events
        if count > len(hashes) or said.ledger_head != (hashes[count - 1] if count else None):
            yield f"manifest {number}: the ledger never had {count} events with the head that it names"
            continue
        account = add_up(event for event in reading.chain.events if event.seq < count)
        ended = [(attempt, attempt.end) for attempt in account.attempts.values() if attempt.end is not None]
        pilots = sum(attempt.pilot for attempt, _ in ended)
        seen = (len(ended) - pilots, pilots, sum(end.rows for _, end in ended))
        if seen != (said.attempts_seen, said.pilot_attempts_seen, said.rows_seen):
            yield f"manifest {number}: expected {seen} attempts, pilot attempts and rows seen, found other numbers"


def check_charges(reading: Reading) -> Checking:
    """V-13: charges follow from the events, every reservation is the frozen worst case and fitted the budget."""
    if reading.manifest is None or not reading.chain.events:
        raise NotChecked("the manifest or the ledger could not be read")
    manifests = {manifest.identity: manifest for manifest in reading.manifests}
    for attempt in reading.account.attempts.values():
        reserved = attempt.reserved
        if reserved is None:
            continue
        manifest = manifests.get(reserved.manifest)
        if manifest is not None:
            yield from (f"{attempt.id}: {words}" for words in _reservation_faults(attempt, manifest.protocol.budget))
        yield from (f"{attempt.id}: {words}" for words in _charge_faults(attempt, reserved))
    yield from _budget_faults(reading, manifests)
    debited = sum(attempt.held_ms for attempt in reading.account.attempts.values())
    return f"{debited / 1000:.1f} device-seconds debited, added up again"


def _reservation_faults(attempt: Attempt, budget: Budget) -> Iterator[str]:
    """Compare a reservation with the frozen budget: worst case, devices, unit, and the time after which none starts."""
    reserved = attempt.reserved
    assert reserved is not None
    if reserved.reserved_ms != reserved_ms(budget):
        yield f"expected {reserved_ms(budget)} ms reserved, found {reserved.reserved_ms}"
    if len(set(reserved.devices)) != budget.devices or len(reserved.devices) != budget.devices:
        yield f"expected {budget.devices} devices, found {', '.join(reserved.devices)}"
    if budget.device in ("cpu", "gpu") and reserved.unit != budget.device:
        yield f"expected a {budget.device}, found a {reserved.unit}"
    started = datetime.fromisoformat(attempt.first.realtime) if attempt.first else None
    if budget.not_after and started and not attempt.pilot and started > datetime.fromisoformat(budget.not_after):
        yield f"expected no attempt after {budget.not_after}, found one reserved at {started.isoformat()}"


def _charge_faults(attempt: Attempt, reserved: Reserved) -> Iterator[str]:
    """Derive a charge again from the attempt's own clocks."""
    end = attempt.end
    if end is None:
        return
    charge = end.charge
    if isinstance(end, Settled) and not charge.observed:
        yield "expected an observed end of a settled attempt, found one that was not"
    if isinstance(end, Settled) and attempt.intent and attempt.released:
        start, stop = attempt.intent.leased, attempt.released
        expected = len(reserved.devices) * (stop.boottime_ms - start.boottime_ms)
        if start.boot_id != stop.boot_id or (charge.lower_ms, charge.upper_ms, charge.debited_ms) != (expected,) * 3:
            yield f"expected a charge of {expected} ms from lease to release, found {charge.debited_ms}"
        overrun = max(0, expected - reserved.reserved_ms)
        if end.overrun_ms != overrun:
            yield f"expected {overrun} ms beyond the reservation, found {end.overrun_ms}"
    if isinstance(end, Reconciled):
        lower = attempt.heartbeat_ms * len(reserved.devices)
        if charge.debited_ms != charge.upper_ms or not lower <= charge.lower_ms <= charge.upper_ms:
            yield f"expected the upper bound debited and a lower one of at least {lower} ms, found {charge}"


def _budget_faults(reading: Reading, manifests: Mapping[str, Manifest]) -> Iterator[str]:
    """Walk the ledger once more: at every reservation, what was held before and the new one fit the budget."""
    account = Account()
    for event in reading.chain.events:
        if isinstance(event.data, Reserved) and event.data.manifest in manifests:
            own = event.data
            budget = manifests[own.manifest].protocol.budget
            limit = milliseconds(budget.pilot_device_seconds if own.pilot else budget.device_seconds)
            held = account.held_ms(own.unit, pilot=own.pilot)
            if held + own.reserved_ms > limit:
                yield f"{event.attempt}: reserved {own.reserved_ms} ms over {held} ms held, of a budget of {limit} ms"
            before = [a for a in account.attempts.values() if a.reserved and not a.refused and a.pilot == own.pilot]
            if len(before) >= budget.attempts_max:
                yield f"{event.attempt}: reserved after {len(before)} attempts, of at most {budget.attempts_max}"
        apply(account, event)


def check_attempt_files(reading: Reading) -> Checking:
    """V-14: the files of every attempt that started are those whose digests its last event recorded."""
    if not reading.chain.events:
        raise NotChecked("the ledger could not be read")
    found = dict(reading.evidence.attempt_files)
    started = 0
    for attempt in reading.account.attempts.values():
        files = found.pop(attempt.id, {})
        if attempt.end is None:
            yield from (f"3-attempts/{attempt.id}/{name}: of an attempt that never started" for name in sorted(files))
            continue
        started += 1
        if files != attempt.end.files:
            names = sorted(
                name
                for name in files.keys() | attempt.end.files.keys()
                if files.get(name) != attempt.end.files.get(name)
            )
            yield f"3-attempts/{attempt.id}: {', '.join(names)}: not the bytes that the ledger recorded"
    yield from (f"3-attempts/{name}: no attempt of the ledger" for name in found)
    return f"{started} attempts"

"""The checks of the ledger, V-10 to V-14: its chain and head, its states, its charges, and the files that it names."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from datetime import datetime

from capsule.core.attempt import Attempt, Reconciled, Reserved, Settled
from capsule.core.chain import Head, head_faults
from capsule.core.evidence import NotChecked, Reading
from capsule.core.ledger_pass import LedgerPass
from capsule.core.protocol import Budget, reserved_ms

LEDGER = "2-ledger.jsonl"

Checking = Generator[str, None, str]
"""A check: yields findings, returns words for a pass."""


def check_ledger_chain(reading: Reading) -> Checking:
    """V-10: the ledger is whole lines, each holding the hash of the line before it."""
    evidence = reading.evidence
    if LEDGER not in evidence.members:
        raise NotChecked("the ledger is absent")
    reading.ledger = LedgerPass(evidence.ledger, LEDGER, reading.manifests, evidence.attempt_files)
    chain = reading.chain
    yield from chain.faults
    if chain.torn:
        yield f"{LEDGER}: {chain.torn} bytes after the last whole line"
    if not chain.events:
        yield f"{LEDGER}: expected at least the event `opened`, found none"
    return f"{chain.events} events"


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
    """Compare what each amendment says had been seen with the ledger as it was by then."""
    for number, manifest in enumerate(reading.manifests, start=1):
        said = manifest.supersedes
        if said is None:
            continue
        count = said.ledger_events
        if reading.chain.hashes.get(count, ...) != said.ledger_head:
            yield f"manifest {number}: the ledger never had {count} events with the head that it names"
            continue
        seen = reading.ledger.seen[count]
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
    yield from reading.ledger.over
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


def check_attempt_files(reading: Reading) -> Checking:
    """V-14: the files of every attempt that started are those whose digests its last event recorded."""
    if not reading.chain.events:
        raise NotChecked("the ledger could not be read")
    found = reading.evidence.attempt_files
    account, wrong = reading.account, reading.ledger.wrong_files
    started = 0
    for attempt in account.attempts.values():
        if attempt.end is not None:
            started += 1
            if attempt.id in wrong:
                yield f"3-attempts/{attempt.id}: {wrong[attempt.id]}: not the bytes that the ledger recorded"
        elif attempt.id in found:
            files = sorted(found[attempt.id])
            yield from (f"3-attempts/{attempt.id}/{name}: of an attempt that never started" for name in files)
    yield from (f"3-attempts/{name}: no attempt of the ledger" for name in found if name not in account.attempts)
    return f"{started} attempts"

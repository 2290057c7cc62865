"""Taking the worst case of an attempt from the budget, before anything starts, by one command of a protocol at a time.

Who may reserve is decided by a lock that dies with its holder; what may be reserved by the ledger under its own lock.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pydantic import ValidationError

from capsule.core.account import Account
from capsule.core.attempt import Clock, Refused, Reserved
from capsule.core.errors import BudgetError, RefusedError
from capsule.core.schema import Model, Natural
from capsule.host.clock import ClockSource, read_clock
from capsule.host.disk import cannot_write
from capsule.host.durable import read_regular
from capsule.host.lease import is_held, lock, open_shared
from capsule.host.ledger import Ledger, Position, Transaction

LOCK = "run.lock"
"""The file in a protocol's folder whose lock lets one command at a time work on it."""


class Worker(Model):
    """The command that works on a protocol, as its lock file says."""

    pid: Natural
    since: str


@contextmanager
def alone(path: Path, worker: Worker) -> Iterator[Worker | None]:
    """Give None while this process has a protocol to itself, by the lock of the file `path`; else who has it.

    Raises:
        MachineError: the file cannot be used.
    """
    descriptor = open_shared(path)
    try:
        if not lock(descriptor):
            yield at_work(path) or Worker(pid=0, since="?")
            return
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, worker.to_bytes(), 0)
        except OSError as error:
            raise cannot_write(path, error) from error
        yield None
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def at_work(path: Path) -> Worker | None:
    """Return who has a protocol to itself; None when nobody has."""
    if not is_held(path):
        return None
    try:
        return Worker.model_validate(json.loads(read_regular(path) or b""))
    except (OSError, ValueError, ValidationError):
        return Worker(pid=0, since="?")


@dataclass(frozen=True)
class Reservation:
    """An attempt whose worst case was taken from the budget; `position` is the ledger's end before its first event."""

    attempt: str
    reserved: Reserved
    position: Position


def reserve(
    ledger: Ledger,
    asked: Reserved,
    *,
    budget_ms: int,
    attempts_max: int,
    not_after: str | None = None,
    clock: ClockSource = read_clock,
    admit: Callable[[Account], None] = lambda account: None,
    before: Callable[[str], None] = lambda attempt: None,
) -> Reservation:
    """Take the worst case of an attempt from the budget; of several who race for the last of it one wins.

    `budget_ms` is the frozen budget of the attempt's unit, for pilots the pilots' own. `admit` sees
    the ledger under its lock and may raise to reserve nothing. `before` is called with the
    attempt's id before the event is written, so that whoever finds the reservation also finds what it left.

    Raises:
        BudgetError: budget, number of attempts or frozen time do not allow it; the refusal is in the ledger.
        RefusedError: the manifest is not the one in force.
    """

    def work(transaction: Transaction) -> Reservation:
        account = transaction.account
        admit(account)
        if not asked.pilot and asked.manifest not in account.manifests[-1:]:
            raise RefusedError(
                f"expected to reserve under the manifest in force, found {asked.manifest}",
                hint="the protocol was amended meanwhile; start again",
            )
        attempt = account.next_attempt()
        now = clock()
        refusal = refusal_of(account, asked, budget_ms, attempts_max) or _late(now, not_after)
        if refusal is not None:
            reason, words = refusal
            refused = Refused(
                manifest=asked.manifest, process=asked.process, pilot=asked.pilot, reason=reason, words=words
            )
            transaction.append("refused", attempt, refused, now)
            raise BudgetError(words, hint="`capsule ledger` shows what was spent; another budget is an amendment")
        position = transaction.position
        before(attempt)
        transaction.append("reserved", attempt, asked, now)
        return Reservation(attempt, asked, position)

    return ledger.transaction(work)


def _late(now: Clock, not_after: str | None) -> tuple[str, str] | None:
    if not_after is None or datetime.fromisoformat(now.realtime) <= datetime.fromisoformat(not_after):
        return None
    return "not_after", f"the protocol allows no attempt after {not_after}"


def refusal_of(account: Account, asked: Reserved, budget_ms: int, attempts_max: int) -> tuple[str, str] | None:
    """Return why a ledger allows no such reservation now, as a word and in words; None if it does."""
    held = account.held_ms(asked.unit, pilot=asked.pilot)
    kind = "pilot " if asked.pilot else ""
    if held + asked.reserved_ms > budget_ms:
        return "budget", (
            f"expected {asked.reserved_ms / 1000:g} {asked.unit}-seconds left of the {kind}budget for the worst case "
            f"of one attempt, found {max(0, budget_ms - held) / 1000:g} of {budget_ms / 1000:g}"
        )
    counted = account.reservations(pilot=asked.pilot)
    if counted >= attempts_max:
        return "attempts_max", f"expected fewer than {attempts_max} {kind}attempts so far, found {counted}"
    return None

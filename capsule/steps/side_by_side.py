"""Attempts side by side: at most one a slot, each process at most once at a time, all of one budget.

A slot that is free takes the next process that has no final rows and is not running. A failed stop gate, the end of
the budget, a refusal or an error lets what is running come to its end and starts no more. If the worst case of another
attempt does not fit beside those that are running, the slot waits: what they did not use is given back as they end.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence

from capsule.core.attempt import Refused
from capsule.core.errors import BudgetError, CapsuleError
from capsule.core.progress import Process, final_rows, processes, remaining
from capsule.core.results import failing_stop_gate
from capsule.host import disk, launch
from capsule.host.clock import read_clock
from capsule.host.durable import read_regular
from capsule.host.ledger import Transaction
from capsule.steps.attempts import Going, LaterError, Progress, TakenError, Work, begin, prepare, report
from capsule.steps.pace import pace_ms
from capsule.steps.reconcile import settle_open
from capsule.steps.slots import Slot
from capsule.steps.standing import Standing, standing
from capsule.steps.stops import Stops

POLL_SECONDS = 0.1
SHOW_SECONDS = 0.5


class SideBySide:
    """The attempts of one call, from the first that starts to the last that ends."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.going: list[Going] = []
        self.stops = Stops(self._pass_on)
        self._said = 0
        self._began = time.monotonic()
        self._shown = 0.0
        self._pace_ms: float | None = None
        self._waiting: list[Process] = []

    def run(self) -> None:
        """Run what remains, as far as the frozen rules allow, or one pilot process.

        Raises:
            KeyboardInterrupt: a signal asked to stop; every attempt has ended.
            CapsuleError: an attempt was refused, or could not be started or settled; the others have ended.
        """
        with self.stops.taken_in():
            self._fill()
            while self.going:
                self._watch()
            if self.work.error is not None:
                raise self.work.error

    # Starting.

    def _fill(self) -> None:
        """Start an attempt on every slot that is free, while there is something to start."""
        try:
            while not self._closed() and (slot := self._free_slot()) is not None and self._start(slot):
                pass
        except BudgetError as error:
            self.work.stopped = error.message
        except CapsuleError as error:
            if error.hint is None and disk.says_full(error.message):
                error.hint = disk.hint_where_full(self.work.workspace.state)
            self._fail(error)
        except OSError as error:
            self._fail(disk.cannot_write(self.work.workspace.state, error))
        except KeyboardInterrupt:
            assert self.stops.asked

    def _closed(self) -> bool:
        work = self.work
        return bool(self.stops.asked) or work.stopped is not None or work.error is not None

    def _free_slot(self) -> Slot | None:
        taken = [going.slot for going in self.going]
        return next((slot for slot in self.work.slots if slot not in taken), None)

    def _start(self, slot: Slot) -> bool:
        """Start the next process on a slot; False if there is none now."""
        process = self._next()
        if process is None:
            return False
        with self.stops.breakable():
            try:
                snapshot = prepare(self.work, process, alone=not self.going)
            except LaterError:
                return False
        try:
            going = begin(self.work, process, slot, snapshot, [going.supervision.attempt for going in self.going])
        except LaterError:
            return False
        except TakenError:
            if self.going:
                return False
            with self.stops.breakable():
                settle_open(self.work.workspace, wait=self.work.request.wait)
            return True
        self.going.append(going)
        self._waiting = self._waiting[1:]
        if self.stops.asked:
            going.supervision.stop(self.stops.asked[0], now=len(self.stops.asked) > 1)
        if len(self.work.attempts) + len(self.going) == 1:
            for words in going.supervision.notes:
                self.work.display.note(words)
        return True

    def _next(self) -> Process | None:
        """Return the process to start next, looking anew; a pilot is one process, once."""
        now = standing(self.work.workspace, self.work.generation)
        if self.work.request.pilot:
            first = next(process for process in processes(now.cells) if process.cells)
            return None if self.going or self.work.attempts else first
        manifest = self.work.generation.manifest
        self._pace_ms = pace_ms(manifest, now.cells, now.account)
        running = {going.process.ordinal for going in self.going}
        todo = [item for item in remaining(manifest, now.cells, now.account) if item.ordinal not in running]
        if todo and (words := _failed_gate(self.work, now)) is not None:
            self.work.stopped = words
            _refuse(self.work, todo[0], "gate", words)
            return None
        self._waiting = todo
        return todo[0] if todo else None

    # Watching.

    def _watch(self) -> None:
        """Wait a moment, show how it goes, and take the place of what has ended."""
        self.going[0].supervision.wait(POLL_SECONDS)
        self._say_stopping()
        ended = [going for going in self.going if going.supervision.poll() is not None]
        for going in ended:
            self.going.remove(going)
            try:
                report(self.work, going)
            except CapsuleError as error:
                self._fail(error)
        if ended:
            self._fill()
        elif self.work.display.shows and time.monotonic() - self._shown >= SHOW_SECONDS:
            self._show()

    def _fail(self, error: CapsuleError) -> None:
        """Keep the first error for the end; whoever is stopped on request was not refused."""
        if self.stops.asked:
            return
        if self.work.error is None:
            self.work.error = error
            if self.going:
                self.work.display.note(f"{error.message}; what is running comes to its end, no more is started")
        else:
            self.work.display.note(error.message)

    def _pass_on(self, number: signal.Signals, now: bool) -> None:
        for going in self.going:
            going.supervision.stop(number, now=now)

    def _say_stopping(self) -> None:
        count = len(self.stops.asked)
        if count > self._said:
            self._said = count
            self.work.display.note("stopping; interrupt again to kill at once" if count == 1 else "killing")

    def _show(self) -> None:
        work = self.work
        self._shown = time.monotonic()
        found = [self._progress(going) for going in self.going]
        total = 1 if work.request.pilot else len(processes(work.generation.cells))
        work.display.going_on(found, total - len(self._waiting) - len(self.going), total, self._left(found))

    def _progress(self, going: Going) -> Progress:
        journal = self.work.workspace.attempts / going.supervision.attempt / launch.JOURNAL
        rows = (read_regular(journal) or b"").count(b"\n")
        return Progress(going.supervision.attempt, min(rows, len(going.process.cells)), len(going.process.cells))

    def _left(self, found: Sequence[Progress]) -> float | None:
        """Estimate the seconds that all remaining cells take, by what ended before or else by what is at hand."""
        spent, rows = time.monotonic() - self._began, sum(item.rows for item in found)
        if self._pace_ms is not None:
            seconds = self._pace_ms / self.work.generation.manifest.protocol.budget.devices / 1000
        elif rows and spent > 1:
            seconds = spent * len(found) / rows
        else:
            return None
        own = [item.cells - item.rows for item in found]
        cells = sum(own) + sum(len(process.cells) for process in self._waiting)
        return seconds * max(max(own), cells / len(self.work.slots))


def _failed_gate(work: Work, now: Standing) -> str | None:
    """Return words if a gate failed whose failure stops the experiment."""
    manifest = work.generation.manifest
    failing = failing_stop_gate(manifest, final_rows(manifest, now.cells, now.account, now.journals))
    if failing is None:
        return None
    gate, row = failing
    return f"gate {gate.name} failed in cell {row.cell.cell}, and its failure stops the experiment"


def _refuse(work: Work, process: Process, reason: str, words: str) -> None:
    """Write once why nothing more is started, so that what was not run has its reason."""
    manifest = work.generation.manifest.identity

    def write(transaction: Transaction) -> None:
        attempts = list(transaction.account.attempts.values())
        if not attempts or attempts[-1].refused is None or attempts[-1].refused.reason != reason:
            refused = Refused(manifest=manifest, process=process.ordinal, pilot=False, reason=reason, words=words)
            transaction.append("refused", transaction.account.next_attempt(), refused, read_clock())

    work.ledger.transaction(write)

"""One pass over a ledger, from which all of its checks are made: no event is kept, and of attempts what is asked for.

What a check finds where an event stands is found as the event passes: a reservation that does not fit the budget, the
files that an attempt left, and what had been seen when a manifest was amended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from capsule.core.attempt import (
    Account,
    Attempt,
    Event,
    Exit,
    Intent,
    ManifestAdopted,
    Reconciled,
    Refused,
    Reserved,
    Settled,
    apply,
)
from capsule.core.chain import Walk
from capsule.core.errors import shortened
from capsule.core.lines import Content
from capsule.core.manifest import FileDigest, Manifest
from capsule.core.protocol import milliseconds
from capsule.core.schema import Model

FINDINGS_MAX = 10_001
"""One more than the findings that a check counts, which are `verdict.FINDINGS_COUNTED_MAX`."""

Files = Mapping[str, FileDigest]


class LedgerPass:
    """What a ledger leaves behind once it has been gone through.

    `over` are words on reservations that did not fit; `seen` says by number of events what an amendment could know of;
    `adopted` and `begun` are the first adoption and first reservation, pilots aside, under each manifest of the chain;
    `wrong_files` names by attempt the files that are not those which the ledger recorded.
    """

    def __init__(
        self,
        content: Content = b"",
        where: str = "",
        manifests: Sequence[Manifest] = (),
        files: Mapping[str, Files] | None = None,
    ) -> None:
        wanted = sorted({item.supersedes.ledger_events for item in manifests if item.supersedes}, reverse=True)
        self.walk = Walk(content, where, wanted)
        self.account = Account()
        self.over: list[str] = []
        self.seen: dict[int, tuple[int, int, int]] = {}
        self.adopted: dict[str, Event] = {}
        self.begun: dict[str, Event] = {}
        self.wrong_files: dict[str, str] = {}
        self._manifests = {manifest.identity: manifest for manifest in manifests}
        self._files = files or {}
        for event in self.walk:
            while wanted and wanted[-1] < self.walk.lines:
                self.seen[wanted.pop()] = self.account.seen
            self._take(event)
        self.seen |= dict.fromkeys(wanted, self.account.seen)

    def _take(self, event: Event) -> None:
        data = event.data
        if isinstance(data, ManifestAdopted) and data.manifest in self._manifests:
            self.adopted.setdefault(data.manifest, event)
        if isinstance(data, Reserved) and data.manifest in self._manifests:
            self._weigh(event, data)
            if not data.pilot:
                self.begun.setdefault(data.manifest, event)
        kept = Event(event.seq, event.name, event.attempt, event.at, lightened(data))
        apply(self.account, kept)
        del self.account.faults[FINDINGS_MAX:]
        attempt = self.account.attempts.get(event.attempt or "")
        if attempt is not None and attempt.end is kept.data and isinstance(data, Settled | Reconciled):
            self._compare(attempt, data.files)

    def _weigh(self, event: Event, own: Reserved) -> None:
        """Judge a reservation beside what is held: both fit the budget of its manifest, and so does the number."""
        budget = self._manifests[own.manifest].protocol.budget
        limit = milliseconds(budget.pilot_device_seconds if own.pilot else budget.device_seconds)
        held = self.account.held_ms(own.unit, pilot=own.pilot)
        words = f"{event.attempt}: reserved"
        if held + own.reserved_ms > limit:
            self.over.append(f"{words} {own.reserved_ms} ms over {held} ms held, of a budget of {limit} ms")
        before = self.account.reservations(pilot=own.pilot)
        if before >= budget.attempts_max:
            self.over.append(f"{words} after {before} attempts, of at most {budget.attempts_max}")
        del self.over[FINDINGS_MAX:]

    def _compare(self, attempt: Attempt, recorded: Files) -> None:
        """Compare the files of an attempt that has ended with those that its end recorded."""
        files = self._files.get(attempt.id, {})
        if files != recorded:
            wrong = sorted(name for name in files.keys() | recorded.keys() if files.get(name) != recorded.get(name))
            self.wrong_files[attempt.id] = shortened(", ".join(wrong))


def lightened(data: Model) -> Model:
    """Return what the checks ask for of an event that an attempt remembers, without what only people read."""
    match data:
        case Intent():
            return data.model_copy(update={"argv": (), "device_baseline": {}})
        case Exit():
            return data.model_copy(update={"evidence": ""})
        case Refused():
            return data.model_copy(update={"words": ""})
        case Settled() | Reconciled():
            return data.model_copy(update={"evidence": "", "files": {}})
        case _:
            return data

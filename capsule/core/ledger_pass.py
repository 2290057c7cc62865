"""One pass over a ledger, from which all of its checks are made: no event is kept, and of attempts what is asked for.

What a check finds where an event stands is found as the event passes: a reservation that does not fit the budget, the
files that an attempt left, and what had been seen when a manifest was amended.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter

from capsule.core.account import Account, apply
from capsule.core.attempt import (
    Attempt,
    DeviceClean,
    Event,
    Exit,
    Intent,
    ManifestAdopted,
    Reconciled,
    Refused,
    Reserved,
    Settled,
)
from capsule.core.chain import Walk
from capsule.core.errors import shortened
from capsule.core.lines import Content
from capsule.core.manifest import FileDigest, Manifest
from capsule.core.protocol import milliseconds
from capsule.core.schema import Model, compact
from capsule.core.telemetry import DeviceTelemetry

FINDINGS_MAX = 10_001
"""One more than the findings that a check counts, which are `verdict.FINDINGS_COUNTED_MAX`."""

Files = Mapping[str, FileDigest]
Shared = TypeVar("Shared", bound=Hashable)

_TELEMETRY = TypeAdapter(dict[str, DeviceTelemetry])


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
        self._shared: dict[Hashable, Any] = {}
        self._telemetry: dict[str, bytes] = {}
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
        light = self._lightened(data)
        apply(self.account, Event(event.seq, event.name, event.attempt, event.at, light))
        del self.account.faults[FINDINGS_MAX:]
        attempt = self.account.attempts.get(event.attempt or "")
        if attempt is None:
            return
        attempt.last = attempt.spawned = None
        if attempt.first is event.at:
            compact(event.at)
        if attempt.end is light and isinstance(data, Settled | Reconciled):
            self._compare(attempt, data.files)
            if isinstance(data, Settled) and data.telemetry:
                self._telemetry[attempt.id] = zlib.compress(_TELEMETRY.dump_json(data.telemetry))

    def telemetry(self, attempt: str) -> dict[str, DeviceTelemetry]:
        """Return what the end of an attempt says of its devices, which is packed meanwhile."""
        packed = self._telemetry.get(attempt)
        return _TELEMETRY.validate_json(zlib.decompress(packed)) if packed is not None else {}

    def _lightened(self, data: Model) -> Model:
        """Return what the checks ask for of an event that an attempt remembers, without what only people read."""
        update: dict[str, Any]
        match data:
            case Reserved():
                devices = tuple(map(self._share, data.devices))
                update = {"manifest": self._share(data.manifest), "devices": self._share(devices)}
            case Intent():
                update = {"argv": (), "device_baseline": {}, "snapshot": self._share(data.snapshot)}
            case Exit():
                update = {"evidence": ""}
            case Refused():
                update = {"manifest": self._share(data.manifest), "words": ""}
            case Settled():
                update = {"evidence": "", "files": {}, "telemetry": {}}
            case Reconciled():
                update = {"evidence": "", "files": {}}
            case DeviceClean():
                update = {"evidence": ""}
            case _:
                return data
        light = data.model_copy(update=update)
        compact(light)
        return light

    def _share(self, value: Shared) -> Shared:
        """Return the first of all equal values."""
        return cast(Shared, self._shared.setdefault(value, value))

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

"""What a supervisor writes down of its one attempt, none of which shows a secret, and what it says to its log."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from capsule.core.attempt import Clock, EventName
from capsule.core.schema import Model
from capsule.host import lease, traces
from capsule.host.attempt_files import forget_secrets, keep_secrets, secrets_of, without_secrets
from capsule.host.clock import ClockSource
from capsule.host.launch import LaunchOrder
from capsule.host.ledger import Ledger


def say(words: str) -> None:
    """Write to the log, which may be on a disk that is full: what must be done next is done all the same."""
    with contextlib.suppress(OSError):
        print(words, file=sys.stderr, flush=True)


class AttemptLedger:
    """The ledger, for the events of one attempt, and the values that must not get into it."""

    def __init__(self, order: LaunchOrder, clock: ClockSource) -> None:
        self.secrets = secrets_of(order.secrets)
        self._order = order
        self._directory = Path(order.attempt_dir)
        self._clock = clock
        self._ledger = Ledger(Path(order.ledger), Path(order.ledger_head), resumed=order.ledger_position)

    def append(self, name: EventName, data: Model, at: Clock | None = None) -> None:
        """Append an event durably, of now if not of another moment; see `Ledger.append`."""
        self._ledger.append(name, self._order.attempt, data, at or self._clock())

    def shown(self, words: str) -> str:
        """Return words as the ledger may have them: a trial's messages and paths can hold secrets."""
        return without_secrets(words, self.secrets)

    def quarantine(self, device: str, words: str, since: Clock) -> None:
        """Bar a device of the attempt until a person readmits it.

        Raises:
            MachineError: it cannot be written.
        """
        order = self._order
        lease.quarantine(
            Path(order.lease_dir),
            device,
            words=self.shown(words),
            attempt=order.attempt,
            protocol=order.protocol,
            since=since.realtime,
        )

    def leave_failure(self, words: str) -> None:
        """Leave a note for `reconcile` that the ledger could not be written, and that the tree is empty now."""
        failure = traces.Failure(words=self.shown(words), emptied=self._clock())
        try:
            traces.leave(self._directory, traces.FAILURE, failure)
        except OSError as error:
            say(f"no note of it could be left: {error}")

    def keep_secrets(self) -> None:
        """Keep the secret values for whoever has to end this attempt in another environment.

        Raises:
            OSError: they cannot be written.
        """
        keep_secrets(self._directory, self.secrets)

    def forget_secrets(self) -> None:
        """Remove the values that were kept; a disk that fails keeps no attempt open."""
        try:
            forget_secrets(self._directory)
        except OSError as error:
            say(f"the values of its secrets could not be removed: {error}")

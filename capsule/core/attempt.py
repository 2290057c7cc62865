"""Attempts as data: the event vocabulary, the state table, and what is known of one attempt.

An attempt is one launch of one process of the plan. Its state is never stored: it is the state table walked over its
events (`capsule.core.account`), so a crash cannot leave a stale "running" behind. Everything here is pure; writing is
`capsule.host.ledger`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, StringConstraints

from capsule.core.digest import Digest
from capsule.core.manifest import FileDigest
from capsule.core.schema import Model, Natural, Whole
from capsule.core.telemetry import DeviceTelemetry, Exclusivity

EventName = Literal[
    "opened", "manifest_adopted", "sealed", "correction",
    "reserved", "refused", "intent", "spawned", "heartbeat", "stopping", "exit", "tree_empty", "device_clean",
    "settled", "held_unknown", "reconciled",
]  # fmt: skip
State = Literal[
    "reserved", "intent", "running", "stopping", "exited", "emptied", "clean", "held",
    "settled", "reconciled", "refused",
]  # fmt: skip

TRANSITIONS: Mapping[State | None, Mapping[EventName, State]] = {
    None: {"reserved": "reserved", "refused": "refused"},
    "reserved": {"intent": "intent", "refused": "refused", "held_unknown": "held"},
    "intent": {"spawned": "running", "exit": "exited", "held_unknown": "held"},
    "running": {"heartbeat": "running", "stopping": "stopping", "exit": "exited", "held_unknown": "held"},
    "stopping": {"heartbeat": "stopping", "stopping": "stopping", "exit": "exited", "held_unknown": "held"},
    "exited": {"tree_empty": "emptied", "stopping": "exited", "heartbeat": "exited", "held_unknown": "held"},
    "emptied": {"device_clean": "clean", "heartbeat": "emptied", "held_unknown": "held"},
    "clean": {"settled": "settled", "held_unknown": "held"},
    "held": {"reconciled": "reconciled", "held_unknown": "held"},
    "settled": {},
    "reconciled": {},
    "refused": {},
}
"""The state table: from a state, by an event, to a state; what is not listed is a broken ledger."""

TERMINAL: frozenset[State | None] = frozenset({"settled", "reconciled", "refused"})

INTERRUPTED = frozenset({"user", "lost", "host_crash", "lease_lost", "ledger_failed", "never_started"})
"""Outcomes that are nobody's result: the start is void and is run again whole."""

COMPLETED = frozenset({"completed", "trial_error"})
"""Outcomes whose rows are final: the process ran to its end record with a row for every planned cell."""

Outcome = Literal[
    "completed", "trial_error",
    "bad_records", "config_changed", "contaminated", "device_lost", "device_mismatch", "device_suspect", "exec_failed",
    "exit_nonzero", "fork_storm", "incomplete", "leaked_descendants", "oom_cgroup", "oom_host", "provenance",
    "sigkill_unattributed", "signalled", "source_changed", "unverifiable", "wall_limit",
    "user", "lost", "host_crash", "lease_lost", "ledger_failed", "never_started",
]  # fmt: skip
OUTCOMES: tuple[str, ...] = get_args(Outcome)

AttemptId = Annotated[str, StringConstraints(pattern=r"^a[0-9]{6}$")]
Unit = Literal["cpu", "gpu"]

DEVICES_MAX = 1_000
"""Devices of one attempt."""


_REALTIME = r"^[0-9]{4}(-[0-9]{2}){2}T([01][0-9]|2[0-3])(:[0-9]{2}){2}\.[0-9]{3}Z$"


def _real(text: str) -> str:
    datetime.fromisoformat(text)  # a day and an hour that exist
    return text


Word = Annotated[str, StringConstraints(max_length=100)]
"""A short name: of a device, of a boot, of a reason."""


EVIDENCE_MAX = 20_000
"""Characters of what an end is judged by: a trial's own words can be of any length, an event cannot."""


class Clock(Model):
    """One reading of every clock; durations are differences of `boottime_ms` under one `boot_id`."""

    realtime: Annotated[str, StringConstraints(pattern=_REALTIME), AfterValidator(_real)]
    boottime_ms: Natural
    monotonic_ms: Natural
    boot_id: Word


class Charge(Model):
    """Device-milliseconds of one attempt; `debited_ms` is the upper bound, and exact when the end was observed."""

    lower_ms: Natural
    upper_ms: Natural
    debited_ms: Natural
    observed: bool


class Opened(Model):
    """First event of a ledger."""

    format: Literal["capsule.ledger/1"]
    protocol: str


class ManifestAdopted(Model):
    """A manifest of the chain whose attempts this ledger charges from here on."""

    manifest: Digest
    supersedes: Digest | None


class Sealed(Model):
    """A torn tail that was found before an append: kept as evidence, never fused with the next event."""

    size: Natural
    sha256: Digest
    hex: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{2})*$")]


class Correction(Model):
    """A later finding about an attempt's charge; it adds to what was debited and edits nothing."""

    debited_ms: Natural
    reason: str


class Reserved(Model):
    """The worst case, written before anything starts."""

    manifest: Digest
    process: Natural
    pilot: bool
    from_frozen: bool
    unit: Unit
    devices: Annotated[tuple[Word, ...], Field(min_length=1, max_length=DEVICES_MAX)]
    reserved_ms: Natural


class Refused(Model):
    """Nothing was started and nothing is charged; `reason` is a word, `words` are for people."""

    manifest: Digest
    process: Natural
    pilot: bool
    reason: Word
    words: str


class Intent(Model):
    """The device is leased and the child is about to start; the charge runs from `leased`.

    In `argv` the interpreter is `python`; `{sources}`, `{attempt}` and `{capsule}` stand for this machine's folders.
    """

    leased: Clock
    supervisor_pid: Natural
    argv: tuple[str, ...]
    snapshot: Digest
    device_baseline: dict[str, Whole | str | None]


class Spawned(Model):
    """The child exists; pid, start time and boot id together name it."""

    pid: Natural
    start_ticks: Natural


class Heartbeat(Model):
    """The attempt was alive; the last one is the lower bound of an unobserved charge."""

    elapsed_ms: Natural


class Stopping(Model):
    """Why the supervisor is about to signal, written before it signals."""

    cause: Outcome
    evidence: str


class Exit(Model):
    """The raw wait status and what it says; 1, 11, 139, 255 and SIGSEGV stay five different things."""

    wait_status: Whole | None
    exit_code: Whole | None
    signal: Whole | None
    core_dumped: bool
    cause: Word
    evidence: str
    user_ms: Natural
    system_ms: Natural
    max_rss_bytes: Natural


class TreeEmpty(Model):
    """No descendant is left; `killed` were found alive after the leader's end."""

    killed: Natural
    level: Literal["cgroup", "subreaper"]


class DeviceClean(Model):
    """Whether the device came back to its measured baseline within the grace; the charge ends at `released`."""

    clean: bool
    released: Clock
    evidence: str


class Settled(Model):
    """The end of an attempt that was observed to its end.

    `telemetry` is what the samples of each device add up to, empty where none was taken; `exclusivity` is the worst of
    them.
    """

    outcome: Outcome
    evidence: str
    charge: Charge
    overrun_ms: Natural
    suspended_ms: Natural
    exclusivity: Exclusivity
    telemetry: dict[str, DeviceTelemetry]
    rows: Natural
    files: dict[str, FileDigest]


class HeldUnknown(Model):
    """The attempt's holder is gone and its end was not observed."""

    evidence: str


class Reconciled(Model):
    """The end of an attempt whose end was not observed: bounds, the upper one debited."""

    outcome: Outcome
    evidence: str
    charge: Charge
    rows: Natural
    files: dict[str, FileDigest]


DATA: Mapping[EventName, type[Model]] = {
    "opened": Opened, "manifest_adopted": ManifestAdopted, "sealed": Sealed, "correction": Correction,
    "reserved": Reserved, "refused": Refused, "intent": Intent, "spawned": Spawned, "heartbeat": Heartbeat,
    "stopping": Stopping, "exit": Exit, "tree_empty": TreeEmpty, "device_clean": DeviceClean, "settled": Settled,
    "held_unknown": HeldUnknown, "reconciled": Reconciled,
}  # fmt: skip

WITHOUT_ATTEMPT: frozenset[EventName] = frozenset({"opened", "manifest_adopted", "sealed"})


class EventLine(Model):
    """One line of the ledger: sequence number, hash of the previous line, event, attempt, clocks and data."""

    seq: Natural
    prev: Digest | None
    event: EventName
    attempt: AttemptId | None
    at: Clock
    data: dict[str, Any]


@dataclass(frozen=True)
class Event:
    """An event whose data was parsed into its own model."""

    seq: int
    name: EventName
    attempt: str | None
    at: Clock
    data: Model


@dataclass(slots=True)
class Attempt:
    """What the events so far say about one attempt."""

    id: str
    state: State | None = None
    reserved: Reserved | None = None
    refused: Refused | None = None
    intent: Intent | None = None
    spawned: Spawned | None = None
    exit: Exit | None = None
    end: Settled | Reconciled | None = None
    last: Clock | None = None
    first: Clock | None = None
    released: Clock | None = None
    heartbeat_ms: int = 0
    corrections_ms: int = 0

    @property
    def open(self) -> bool:
        """Whether no terminal event was written yet."""
        return self.state not in TERMINAL

    @property
    def pilot(self) -> bool:
        """Whether the attempt is exploratory."""
        source = self.reserved or self.refused
        return source is not None and source.pilot

    @property
    def held_ms(self) -> int:
        """What the attempt takes from the budget now: the reservation while open, then the debit."""
        if self.refused is not None:
            return 0
        if self.end is not None:
            return self.end.charge.debited_ms + self.corrections_ms
        return self.reserved.reserved_ms if self.reserved else 0


OF_EXIT_ZERO = COMPLETED | {"bad_records", "incomplete", "leaked_descendants", "provenance", "source_changed"}
"""Outcomes of a process that exited with status 0 and was not stopped."""

OF_DEVICE = frozenset(
    {"config_changed", "contaminated", "device_lost", "device_mismatch", "device_suspect", "unverifiable"}
)
"""Outcomes that a device decides, however the process ended."""

SIGKILL = 9
OF_SIGKILL = frozenset({"oom_cgroup", "oom_host", "sigkill_unattributed"})
"""Outcomes of a process that was killed by a signal which can be neither caught nor explained by the process itself."""


def exit_faults(ended: Exit, outcome: str) -> Iterator[str]:
    """Yield where an exit contradicts its own wait status, or the outcome that was settled contradicts the exit."""
    status = ended.wait_status
    code = status >> 8 & 0xFF if status is not None and not status & 0x7F else None
    by_signal = status & 0x7F if status is not None and status & 0x7F else None
    if (ended.exit_code, ended.signal) != (code, by_signal):
        yield f"expected exit code {code} and signal {by_signal} by wait status {status}, found others"
    if ended.cause not in ("exited", "signalled"):
        expected = {ended.cause}
    elif by_signal is not None:
        expected = set(OF_SIGKILL) if by_signal == SIGKILL else {"signalled"}
    elif code is not None:
        expected = {"exit_nonzero"} if code else set(OF_EXIT_ZERO)
    else:
        expected = {"exec_failed"}
    if outcome not in expected | OF_DEVICE:
        yield f"expected {' or '.join(sorted(expected))} of this exit, found {outcome}"

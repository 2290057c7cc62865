"""Attempts: the state table, walked; what a ledger's events add up to."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from builders import BOOT, History
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from capsule.core.account import Account, add_up, apply
from capsule.core.attempt import (
    COMPLETED,
    DATA,
    INTERRUPTED,
    OUTCOMES,
    TERMINAL,
    TRANSITIONS,
    WITHOUT_ATTEMPT,
    Charge,
    Clock,
    Correction,
    DeviceClean,
    Event,
    EventName,
    Exit,
    Heartbeat,
    HeldUnknown,
    Intent,
    ManifestAdopted,
    Opened,
    Reconciled,
    Refused,
    Reserved,
    Settled,
    Spawned,
    State,
    Stopping,
    TreeEmpty,
    exit_faults,
)
from capsule.core.digest import digest_of
from capsule.core.schema import Model

AT = Clock(realtime="2030-01-01T00:00:00.000Z", boottime_ms=1, monotonic_ms=1, boot_id=BOOT)
FIRST, SECOND = digest_of(b"first"), digest_of(b"second")

DIAGRAM = """
-        reserved:reserved refused:refused
reserved intent:intent refused:refused held_unknown:held
intent   spawned:running exit:exited held_unknown:held
running  heartbeat:running stopping:stopping exit:exited held_unknown:held
stopping heartbeat:stopping stopping:stopping exit:exited held_unknown:held
exited   heartbeat:exited stopping:exited tree_empty:emptied held_unknown:held
emptied  heartbeat:emptied device_clean:clean held_unknown:held
clean    settled:settled held_unknown:held
held     held_unknown:held reconciled:reconciled
settled
reconciled
refused
"""
MODEL = {
    row.split()[0]: dict(pair.split(":") for pair in row.split()[1:]) for row in DIAGRAM.strip().split("\n")
}  # fmt: skip
ENDS = {"settled", "reconciled", "refused"}


def data_of(name: str, *, ms: int = 10, pilot: bool = False, manifest: str = FIRST) -> Model:
    """Return data for an event."""
    charge = Charge(lower_ms=ms, upper_ms=ms, debited_ms=ms, observed=True)
    end = {"outcome": "completed", "evidence": "", "charge": charge, "rows": 3, "files": {}}
    made: dict[str, Any] = {
        "reserved": lambda: Reserved(
            manifest=manifest, process=0, pilot=pilot, from_frozen=False, unit="cpu", devices=("cpu",), reserved_ms=100
        ),
        "refused": lambda: Refused(manifest=manifest, process=0, pilot=pilot, reason="busy", words=""),
        "intent": lambda: Intent(leased=AT, supervisor_pid=1, argv=(), snapshot=FIRST, device_baseline={}),
        "spawned": lambda: Spawned(pid=1, start_ticks=1),
        "heartbeat": lambda: Heartbeat(elapsed_ms=ms),
        "stopping": lambda: Stopping(cause="user", evidence=""),
        "exit": lambda: Exit(
            wait_status=0, exit_code=0, signal=None, core_dumped=False, cause="exited", evidence="", user_ms=0,
            system_ms=0, max_rss_bytes=0,
        ),
        "tree_empty": lambda: TreeEmpty(killed=0, level="cgroup"),
        "device_clean": lambda: DeviceClean(clean=True, released=AT, evidence=""),
        "settled": lambda: Settled(overrun_ms=0, suspended_ms=0, exclusivity="unverifiable", telemetry={}, **end),
        "held_unknown": lambda: HeldUnknown(evidence=""),
        "reconciled": lambda: Reconciled(**end),
        "correction": lambda: Correction(debited_ms=ms, reason="x"),
    }  # fmt: skip
    return made[name]()  # type: ignore[no-any-return]


def opened() -> Account:
    """Return the account of a ledger that was opened under a manifest."""
    account = Account()
    apply(account, Event(0, "opened", None, AT, Opened(format="capsule.ledger/1", protocol="p")))
    apply(account, Event(1, "manifest_adopted", None, AT, ManifestAdopted(manifest=FIRST, supersedes=None)))
    assert not account.faults
    return account


def test_the_state_table_is_the_diagram() -> None:
    """L-05: the table in the code is the diagram of the specification, state by state and event by event."""
    found = {state or "-": dict(row) for state, row in TRANSITIONS.items()}
    assert found == MODEL
    assert {state or "-" for state in TERMINAL} == ENDS
    assert set(get_args(State)) == set(MODEL) - {"-"}


def test_every_event_has_a_model_and_a_place() -> None:
    """L-04: every event of the vocabulary has data, and a place in the table or outside any attempt."""
    names = set(get_args(EventName))
    assert set(DATA) == names
    placed = {event for row in TRANSITIONS.values() for event in row}
    assert placed | WITHOUT_ATTEMPT | {"correction"} == names
    assert not placed & WITHOUT_ATTEMPT


def test_outcomes_are_of_three_kinds() -> None:
    """L-10: an outcome is final, void or a failure; the kinds do not overlap."""
    assert not COMPLETED & INTERRUPTED
    assert set(OUTCOMES) > COMPLETED | INTERRUPTED
    assert len(OUTCOMES) == len(set(OUTCOMES))


STATUSES = [
    ("exited", 0, {*COMPLETED, "bad_records", "incomplete", "leaked_descendants", "provenance", "source_changed"}),
    ("exited", 1 << 8, {"exit_nonzero"}),
    ("exited", 137 << 8, {"exit_nonzero"}),
    ("signalled", 9, {"oom_cgroup", "oom_host", "sigkill_unattributed"}),
    ("signalled", 9 | 0x80, {"oom_cgroup", "oom_host", "sigkill_unattributed"}),
    ("signalled", 15, {"signalled"}),
    ("signalled", 11 | 0x80, {"signalled"}),
    ("fork_storm", 9, {"fork_storm"}),
    ("wall_limit", 0, {"wall_limit"}),
    ("exec_failed", None, {"exec_failed"}),
]
OF_ANY_EXIT = {
    "config_changed", "contaminated", "device_lost", "device_mismatch", "device_suspect", "unverifiable"
}  # fmt: skip


@pytest.mark.parametrize(("cause", "status", "outcomes"), STATUSES)
def test_outcomes_follow_from_exits(cause: str, status: int | None, outcomes: set[str]) -> None:
    """L-10: an exit allows these outcomes and those that a device decides, and no other."""
    by = status & 0x7F or None if status is not None else None
    ended = Exit(
        wait_status=status, exit_code=None if by or status is None else status >> 8, signal=by, core_dumped=False,
        cause=cause, evidence="", user_ms=0, system_ms=0, max_rss_bytes=0,
    )  # fmt: skip
    assert {outcome for outcome in OUTCOMES if not list(exit_faults(ended, outcome))} == outcomes | OF_ANY_EXIT


class Ledger(RuleBasedStateMachine):
    """Appends events, legal or not, and compares the account with a model that only knows the diagram."""

    names: Bundle[str] = Bundle("names")

    def __init__(self) -> None:
        super().__init__()
        self.account = opened()
        self.seq = 2
        self.states: dict[str, str] = {}
        self.pilots: dict[str, bool] = {}
        self.takes: dict[str, int] = {}

    def put(self, name: str, attempt: str, data: Model) -> bool:
        """Apply an event; whether it was without fault."""
        before = len(self.account.faults)
        apply(self.account, Event(self.seq, name, attempt, AT, data))  # type: ignore[arg-type]
        self.seq += 1
        return len(self.account.faults) == before

    @rule(target=names, pilot=st.booleans(), refused=st.booleans())
    def begin(self, pilot: bool, refused: bool) -> str:
        """The next attempt is reserved, or refused at once."""
        name = f"a{len(self.states) + 1:06d}"
        assert self.account.next_attempt() == name
        event = "refused" if refused else "reserved"
        assert self.put(event, name, data_of(event, pilot=pilot))
        self.states[name], self.pilots[name] = event, pilot
        self.takes[name] = 0 if refused else 100
        return name

    @rule(
        name=names,
        event=st.sampled_from(sorted({event for row in MODEL.values() for event in row})),
        ms=st.integers(0, 99),
    )
    def step(self, name: str, event: str, ms: int) -> None:
        """Any event: allowed where the diagram says so, else a fault that changes nothing."""
        following = MODEL[self.states[name]].get(event)
        assert self.put(event, name, data_of(event, ms=ms, pilot=self.pilots[name])) == (following is not None)
        if following is None:
            return
        self.states[name] = following
        if event in ("settled", "reconciled"):
            self.takes[name] = ms
        elif event == "refused":
            self.takes[name] = 0

    @rule(name=names, ms=st.integers(0, 9))
    def correct(self, name: str, ms: int) -> None:
        """A correction is legal after the end only, and adds to what was debited."""
        if self.states[name] in ENDS:
            assert self.put("correction", name, data_of("correction", ms=ms))
            if self.states[name] != "refused":
                self.takes[name] += ms

    @rule(names=st.lists(st.sampled_from(["a000000", "a000099", "a000001"]), min_size=1, max_size=1))
    def skip_ids(self, names: list[str]) -> None:
        """An attempt that is not the next one is a fault (tried on a copy, so that the model stays simple)."""
        copy = Account(self.account.protocol, [*self.account.manifests], {}, [])
        apply(copy, Event(5, "reserved", names[0], AT, data_of("reserved")))
        assert bool(copy.faults) == (names[0] != "a000001")

    @invariant()
    def agrees(self) -> None:
        """States, open attempts and what is taken from the budget follow from the events alone."""
        for name, state in self.states.items():
            attempt = self.account.attempts[name]
            assert attempt.state == state
            assert attempt.open == (state not in ENDS)
            assert attempt.pilot == self.pilots[name]
            assert attempt.held_ms == self.takes[name]
        for pilot in (False, True):
            taken = sum(
                self.takes[n] for n, p in self.pilots.items() if p == pilot and self.account.attempts[n].reserved
            )
            assert self.account.held_ms("cpu", pilot=pilot) == taken
            kept = [n for n, p in self.pilots.items() if p == pilot and self.states[n] != "refused"]
            assert self.account.reservations(pilot=pilot) == len(kept)
        ended = [self.pilots[n] for n, state in self.states.items() if state in ("settled", "reconciled")]
        assert self.account.seen == (ended.count(False), ended.count(True), 3 * len(ended))
        assert self.account.held_ms("gpu", pilot=False) == 0


Ledger.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestLedger = Ledger.TestCase


@pytest.mark.parametrize(
    ("name", "attempt", "data"),
    [
        ("opened", None, Opened(format="capsule.ledger/1", protocol="p")),
        ("opened", "a000001", Opened(format="capsule.ledger/1", protocol="p")),
        ("manifest_adopted", None, ManifestAdopted(manifest=SECOND, supersedes=None)),
        ("manifest_adopted", None, ManifestAdopted(manifest=SECOND, supersedes=SECOND)),
        ("reserved", None, data_of("reserved")),
        ("reserved", "a000002", data_of("reserved")),
        ("reserved", "a000001", data_of("reserved", manifest=SECOND)),
        ("intent", "a000001", data_of("intent")),
        ("correction", "a000001", data_of("correction")),
    ],
)
def test_events_that_do_not_belong(name: str, attempt: str | None, data: Model) -> None:
    """L-06 L-07 L-08: opening twice, skipping a manifest or an id, or reserving under another manifest is a fault."""
    account = opened()
    apply(account, Event(2, name, attempt, AT, data))  # type: ignore[arg-type]
    assert len(account.faults) == 1
    assert "event 2" in account.faults[0]


def test_a_ledger_begins_by_being_opened() -> None:
    """L-06: the first event is `opened`; a ledger whose beginning was cut off shows it."""
    account = add_up([Event(0, "manifest_adopted", None, AT, ManifestAdopted(manifest=FIRST, supersedes=None))])
    assert account.faults == ["event 0: expected `opened`"]


def test_pilots_run_under_any_manifest_and_amendments_move_the_rest() -> None:
    """L-06 L-08: after an amendment attempts are reserved under the new manifest; pilots may be under any."""
    account = opened()
    apply(account, Event(2, "manifest_adopted", None, AT, ManifestAdopted(manifest=SECOND, supersedes=FIRST)))
    apply(account, Event(3, "reserved", "a000001", AT, data_of("reserved", manifest=SECOND)))
    apply(account, Event(4, "reserved", "a000002", AT, data_of("reserved", pilot=True, manifest=digest_of(b"none"))))
    assert not account.faults
    apply(account, Event(5, "reserved", "a000003", AT, data_of("reserved", manifest=FIRST)))
    assert account.faults == ["event 5: a000003 is reserved under a manifest that is not the current one"]


def test_what_an_attempt_remembers() -> None:
    """L-09: leases, heartbeats, release and end are those of the attempt's own events."""
    history = History().opened()
    name = history.attempt(0)
    attempt = history.account.attempts[name]
    assert attempt.intent is not None
    assert attempt.released is not None
    assert attempt.end is not None
    assert attempt.heartbeat_ms == 5
    assert attempt.end.charge.debited_ms == attempt.released.boottime_ms - attempt.intent.leased.boottime_ms
    assert attempt.first is not None
    assert attempt.last is not None
    assert attempt.first.boottime_ms < attempt.last.boottime_ms

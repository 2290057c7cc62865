"""Kill -9 and SIGSTOP of every process of an attempt, alone and together, at every state that its ledger can show."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Iterator

import pytest

from capsule.core.attempt import Settled
from capsule.host import launch
from capsule.host.clock import read_clock
from capsule.host.lease import is_held, lease_path
from capsule.host.reconcile import reconcile
from tests.host.conftest import Bench, eventually
from tests.host.crashes import (
    FAKE,
    LONG,
    STATES,
    Nursery,
    Observer,
    alive,
    chance,
    fake_device,
    held,
    hold,
    kill,
    nursery,
    order_of,
    roles,
    settle,
)

pytestmark = pytest.mark.slow

ROLES = ("cli", "supervisor", "watchdog", "sampler", "trial")
SUBSETS = [victims for size in range(1, 6) for victims in itertools.combinations(ROLES, size)]


@pytest.fixture(scope="module")
def forks() -> Iterator[Nursery]:
    with nursery() as found:
        yield found


@pytest.fixture(params=["cpu", "fake"])
def place(bench: Bench, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A bench with the CPU, or with a fake device that keeps memory a while after its user is gone."""
    monkeypatch.delenv("CAPSULE_FAKE_DEVICES", raising=False)
    if request.param == "fake":
        fake_device(bench, monkeypatch, keeps_memory_ms=400)
    return bench


def test_whoever_is_killed_at_whatever_state(place: Bench, forks: Nursery) -> None:
    """Every set of victims once and every state at least twice; CAPSULE_TEST_LONG=1 tries each set at each state."""
    chosen = chance("kills", place.device)
    cases = [(state, victims) for state in STATES for victims in SUBSETS]
    if not LONG:
        states = itertools.cycle(chosen.sample(list(STATES), len(STATES)))
        cases = list(zip(states, chosen.sample(SUBSETS, len(SUBSETS)), strict=False))
    for state, victims in cases:
        print(state, victims)
        observer = Observer(place)
        started = held(place, forks, state)
        time.sleep(chosen.random() * 0.05)
        there = roles(place, started)
        for role in chosen.sample(victims, len(victims)):
            kill(*there[role])
        if "supervisor" not in victims:
            time.sleep(chosen.random() * 0.05)
            kill(started.supervisor, number=signal.SIGCONT)
        eventually(lambda pid=started.supervisor: not alive(pid))
        if chosen.random() < 0.2:
            eventually(lambda pids=there["watchdog"]: not any(map(alive, pids)))
        found = hold(place, started.order, observer)
        if set(victims) <= {"cli", "sampler"} and STATES[state] == "ordinary" and state != "before lease":
            assert isinstance(found.end, Settled), (found.end, place.log(started.order.attempt))
            assert found.end.outcome == "completed", found.end
            assert found.released is not None
    started = forks.start(order_of(place, "ordinary"))
    assert started.wait() == launch.SETTLED
    assert hold(place, started.order, None).end is not None


@pytest.mark.parametrize("state", list(STATES))
def test_a_stopped_supervisor_keeps_its_lease_and_its_attempt(
    bench: Bench, forks: Nursery, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """D6: nobody steals from a silent holder, and when it goes on it settles as if nothing had been."""
    fake_device(bench, monkeypatch, keeps_memory_ms=50)
    observer = Observer(bench)
    started = held(bench, forks, state)
    before = bench.ledger.path.read_bytes()
    later = read_clock()
    later = later.model_copy(update={"boottime_ms": later.boottime_ms + 60_000})
    (finding,) = reconcile(bench.ledger, bench.attempts, bench.leases, clock=lambda: later)
    assert finding.state == "silent"
    assert "is stopped" in finding.words
    assert bench.ledger.path.read_bytes() == before
    leased = state != "before lease"
    assert is_held(lease_path(bench.leases, FAKE)) == leased
    if leased:
        other = forks.start(order_of(bench, "ordinary"))
        assert other.wait() == launch.REFUSED
        refused = bench.account().attempts[other.order.attempt].refused
        assert refused is not None
        assert refused.reason == "busy"
        assert started.order.attempt in refused.words
    kill(started.supervisor, number=signal.SIGCONT)
    assert started.wait() == launch.SETTLED, bench.log(started.order.attempt)
    hold(bench, started.order, observer)


@pytest.mark.parametrize("role", ["cli", "watchdog", "sampler", "trial"])
def test_a_helper_that_is_stopped_and_resumed_costs_nothing_but_time(
    bench: Bench, forks: Nursery, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    """D6 for the others: reconciling leaves them alone, and they go on."""
    fake_device(bench, monkeypatch)
    observer = Observer(bench)
    started = held(bench, forks, "after spawned")
    there = roles(bench, started)
    kill(*there[role], number=signal.SIGSTOP)
    kill(started.supervisor, number=signal.SIGCONT)
    time.sleep(0.3)
    before = bench.names(started.order.attempt)
    assert [finding.state for finding in settle(bench)] in (["running"], [])
    assert started.status is None or role == "cli"
    assert bench.names(started.order.attempt)[: len(before)] == before
    kill(*there[role], number=signal.SIGCONT)
    eventually(lambda: not alive(started.supervisor))
    found = hold(bench, started.order, observer)
    assert isinstance(found.end, Settled)
    assert found.end.outcome == "completed"

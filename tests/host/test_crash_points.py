"""A supervisor killed at every boundary of its durable writes, and a reconciliation at every boundary of its own."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from capsule.host import launch
from tests.host.conftest import Bench
from tests.host.crashes import (
    FAKE,
    LONG,
    Nursery,
    Observer,
    Started,
    chance,
    fake_device,
    hold,
    nursery,
    order_of,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def forks() -> Iterator[Nursery]:
    with nursery() as found:
        yield found


@pytest.fixture
def place(bench: Bench, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A bench with the CPU, or with a fake device that keeps memory a while after its user is gone."""
    monkeypatch.delenv("CAPSULE_FAKE_DEVICES", raising=False)
    if request.param == "fake":
        fake_device(bench, monkeypatch, keeps_memory_ms=60)
    return bench


def crash(bench: Bench, forks: Nursery, kind: str, boundary: int) -> tuple[Started, list[str]]:
    """Run one attempt whose supervisor dies at a boundary, and hold what must hold."""
    observer = Observer(bench)
    started = forks.start(order_of(bench, kind), CAPSULE_CRASH_AT=str(boundary))
    status = started.wait()
    assert status in (-signal.SIGKILL, launch.SETTLED), bench.log(started.order.attempt)
    before = bench.names(started.order.attempt)
    found = hold(bench, started.order, observer)
    assert found.intent is None or found.held_ms > 0
    assert "exit" not in before or found.end is not None
    return started, before


@pytest.mark.parametrize("kind", ["ordinary", "wall", "daemon"])
@pytest.mark.parametrize("place", ["cpu", "fake"], indirect=True)
def test_a_supervisor_killed_at_any_boundary_is_charged_and_settled_once(
    place: Bench, forks: Nursery, kind: str
) -> None:
    """All boundaries of an ordinary attempt on a fake device, a choice of the others'; CAPSULE_TEST_LONG=1 for all."""
    chosen = chance(kind, place.device)
    boundary, seen = 0, set()
    while True:
        boundary += 1
        whole = LONG or (kind, place.device) == ("ordinary", FAKE)
        if not whole and boundary < 38 and chosen.random() < 0.8:
            continue
        started, before = crash(place, forks, kind, boundary)
        seen.add(before[-1])
        if started.status == launch.SETTLED:
            break
    assert boundary > 4 * 7, "each of seven events has four boundaries"
    if whole and kind == "ordinary":
        assert {"reserved", "intent", "spawned", "exit", "tree_empty", "device_clean", "settled"} <= seen

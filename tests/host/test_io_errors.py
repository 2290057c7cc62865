"""C5: a disk that fails at any single write, sync or rename, or from there on, of a supervisor or a reconciliation."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from capsule.core.attempt import Reconciled, Settled
from capsule.core.errors import CapsuleError
from capsule.host import durable, launch
from tests.host.conftest import Bench, eventually
from tests.host.crashes import (
    LONG,
    Nursery,
    Observer,
    Started,
    alive,
    chance,
    fake_device,
    held,
    hold,
    kill,
    left_of,
    nursery,
    order_of,
    roles,
    settle,
)

pytestmark = pytest.mark.slow

ERRORS = ("ENOSPC", "EIO", "EROFS")
NOTED = """
from capsule.host import durable
operate = durable._operate
def noted(*place):
    try:
        operate(*place)
    except OSError:
        open(FILE, "w").close()
        raise
durable._operate = noted
"""


@pytest.fixture(scope="module")
def forks() -> Iterator[Nursery]:
    with nursery() as found:
        yield found


def fail(bench: Bench, forks: Nursery, kind: str, at: str) -> tuple[Started, bool]:
    """Run one attempt whose supervisor's disk fails, and hold what must hold; whether it did fail."""
    noted = bench.root / "failed"
    noted.unlink(missing_ok=True)
    observer = Observer(bench)
    started = forks.start(order_of(bench, kind), f"FILE = {str(noted)!r}\n{NOTED}", CAPSULE_FAIL_AT=at)
    status = started.wait()
    log = bench.log(started.order.attempt)
    assert status in (launch.SETTLED, launch.REFUSED, launch.MACHINE, launch.LEDGER_FAILED), (at, status, log)
    assert left_of(started.order) == [], "the trial does not outlive a supervisor that gives up"
    found = hold(bench, started.order, observer)
    if status == launch.SETTLED and noted.exists():
        assert isinstance(found.end, Settled)
        assert "telemetry could not be kept whole" in found.end.evidence, "only samples may be lost silently"
    if status == launch.LEDGER_FAILED and isinstance(found.end, Reconciled) and found.intent is not None:
        assert found.end.outcome in ("ledger_failed", "lost")
        assert found.end.charge.debited_ms == found.end.charge.upper_ms > 0
    return started, noted.exists()


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_a_disk_that_fails_at_any_operation_stops_the_trial_and_lowers_no_charge(
    bench: Bench, forks: Nursery, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """A choice of operations and errors; CAPSULE_TEST_LONG=1 tries every error at each, once and lasting."""
    if device == "fake":
        fake_device(bench, monkeypatch, keeps_memory_ms=60)
    chosen = chance("errors", device)
    failed, number, statuses = True, 0, set()
    while failed:
        number += 1
        cases = [f"{number}{mark}:{name}" for name in ERRORS for mark in ("", "+")]
        if not LONG:
            share = 1 if number > 60 else 0.6 if device == "cpu" else 0.2
            cases = [chosen.choice(cases)] if chosen.random() < share else []
        for at in cases:
            print(at)
            started, failed = fail(bench, forks, chosen.choice(["ordinary", "ordinary", "wall"]), at)
            statuses.add(started.status)
    assert number > 7 * 7, "each of seven events has seven operations"
    assert {launch.LEDGER_FAILED, launch.SETTLED} <= statuses


def test_a_watchdog_whose_note_cannot_be_written_still_ends_the_trial(bench: Bench, forks: Nursery) -> None:
    observer = Observer(bench)
    changes = "from capsule.host import durable\ndurable.disarm = lambda: durable.fail_at(1, 28, lasting=True)\n"
    started = held(bench, forks, "before spawned", changes)
    there = roles(bench, started)
    kill(started.supervisor)
    eventually(lambda: not any(map(alive, [*there["watchdog"], *there["trial"]])))
    assert "No space left" in bench.log(started.order.attempt)
    found = hold(bench, started.order, observer)
    assert isinstance(found.end, Reconciled)
    assert not found.end.charge.observed


def reconcile_with(bench: Bench, change: str, number: int) -> int:
    """Reconcile in a process of its own that crashes or fails at a boundary or operation; its exit status."""
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            if change == "crash":
                durable.crash_at(number)
            else:
                durable.fail_at(number, errno.ENOSPC)
            settle(bench)
            status = 0
        except (CapsuleError, OSError):
            status = 5
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("change", ["crash", "fail"])
def test_a_reconciliation_that_crashes_or_fails_anywhere_is_done_again(
    bench: Bench, forks: Nursery, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    fake_device(bench, monkeypatch, keeps_memory_ms=60)
    number, status = 0, 1
    while status:
        number += 1
        observer = Observer(bench)
        started = held(bench, forks, "after spawned" if number % 2 else "after exit")
        kill(*(pid for role, pids in roles(bench, started).items() for pid in pids if role != "trial" or number % 3))
        eventually(lambda pid=started.supervisor: not alive(pid))
        status = reconcile_with(bench, change, number)
        assert status in (0, -signal.SIGKILL if change == "crash" else 5)
        found = hold(bench, started.order, observer)
        assert found.held_ms > 0
    assert number > 8


# Real ones.

FILLER = """
import os, sys, time
time.sleep(0.2)
with open(os.path.join(os.path.dirname(os.environ["CAPSULE_RECORDS"]), "filler"), "wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError:
        pass
time.sleep(60)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system of its own needs root")
def test_a_disk_that_a_trial_filled_stops_it(bench: Bench, forks: Nursery, tmp_path: Path) -> None:
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", place], check=False).returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        small = Bench(place)
        small.open()
        from tests.host import crashes

        crashes.KINDS["filler"], crashes.LIMITS["filler"] = crashes.START + FILLER, "20"
        observer = Observer(small)
        started = forks.start(order_of(small, "filler"), "attempt_run.HEARTBEAT_MS = 200\n")
        assert started.wait() == launch.LEDGER_FAILED, small.log(started.order.attempt)
        assert left_of(started.order) == []
        (small.attempts / started.order.attempt / "filler").unlink()
        time.sleep(0.2)
        found = hold(small, started.order, observer)
        assert isinstance(found.end, Reconciled)
        assert found.end.charge.debited_ms == found.end.charge.upper_ms
        again = forks.start(order_of(small, "ordinary"))
        assert again.wait() == launch.SETTLED
    finally:
        subprocess.run(["umount", "-l", place], check=True)

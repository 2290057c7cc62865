"""Attempts that are crashed on purpose, an observer of the time their device was really used, and what must hold after.

Supervisors are forked off one process that has loaded everything, so that hundreds of attempts cost seconds. Each has
a launcher of its own above it, which stands for the command that started it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from capsule.core.account import add_up
from capsule.core.attempt import Attempt
from capsule.core.chain import Head, head_faults, read
from capsule.core.ledger_checks import _charge_faults
from capsule.host.cgroup import places
from capsule.host.devices.fake import IDLE_BYTES, FakeBackend
from capsule.host.launch import LaunchOrder
from capsule.host.lease import is_held, lease_path
from capsule.host.preflight import TREE
from capsule.host.process import Stat, descendants, end_tree, read_stat, with_environment
from capsule.host.reconcile import Finding, reconcile
from capsule.host.traces import read_traces
from tests.host.conftest import DAEMONIZE, Bench, eventually, protocol_of

SEED = os.environ.get("CAPSULE_TEST_SEED", "1")
"""Chooses the cases of a run; every failure names it."""
LONG = bool(os.environ.get("CAPSULE_TEST_LONG"))
"""Set: all cases instead of a choice."""
FAKE = "FAKE-0"
TERMINAL = ("settled", "reconciled", "refused")


def chance(*what: object) -> random.Random:
    """Return the random numbers of one test; pytest shows what is printed when it fails."""
    print(f"CAPSULE_TEST_SEED={SEED}", *what)
    return random.Random(f"{SEED} {what}")


# Trials.

START = """
import os, signal, sys, time
users, devices = sys.argv[1], os.environ.get("CAPSULE_FAKE_DEVICE_FOLDERS")
def use():
    began = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    if devices:
        with open(f"{devices}/allocations/{os.getpid()}", "w") as file:
            file.write("1000000")
    with open(f"{users}/{os.getpid()}", "w") as file:
        file.write(f"{began}.")
use()
"""
RECORD = """
with open(os.environ["CAPSULE_RECORDS"], "a") as file:
    file.write('{"x": 1.0}\\n')
"""
KINDS = {
    "ordinary": START + "time.sleep(0.1)\n" + RECORD,
    "long": START + "time.sleep(1)\n" + RECORD,
    "wall": START + "time.sleep(60)\n",
    "daemon": START + RECORD + DAEMONIZE + "time.sleep(0.1)\n",
}
LIMITS = {"ordinary": "20", "long": "20", "wall": "0.25", "daemon": "20"}


# The process that supervisors are forked off.

NURSERY = """
import contextlib, json, os, select, signal, sys
from pathlib import Path
from capsule.host import attempt_run, durable, launch, supervisor, watchdog
from capsule.host.process import become_subreaper, identify
become_subreaper()
attempt_run.FIRST_HEARTBEAT_MS, attempt_run.WATCHDOG_MS = 40, 1000
attempt_run.LINGER_MS = watchdog.LINGER_MS = 100
def say(**what):
    os.write(1, json.dumps(what).encode() + b"\\n")
def supervise(asked, path):
    os.setsid()
    log = os.open(path.with_name("supervisor.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(asked["environment"])
    exec(asked["changes"], globals())
    code = 70
    try:
        code = supervisor.main([str(path)])
    except BaseException:
        import traceback
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(code)
def launcher(asked):
    os.setsid()
    path = Path(asked["order"])
    order = launch.LaunchOrder.from_bytes(path.read_bytes(), "order")
    me = identify(os.getpid())
    (path.with_name(launch.LAUNCHER)).write_bytes(me.to_bytes())
    path.write_bytes(order.model_copy(update={"launcher": me}).to_bytes())
    pid = os.fork()
    if pid == 0:
        supervise(asked, path)
    say(launcher=os.getpid(), supervisor=pid)
    say(ended=pid, status=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os._exit(0)
while True:
    if select.select([0], [], [], 0.005)[0]:
        line = sys.stdin.readline()
        if not line:
            break
        if os.fork() == 0:
            launcher(json.loads(line))
    try:
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            say(ended=found[0], status=os.waitstatus_to_exitcode(found[1]))
    except ChildProcessError:
        pass
"""


@dataclass
class Started:
    """One attempt under way: its launcher, its supervisor, and how that ended."""

    order: LaunchOrder
    launcher: int
    supervisor: int
    nursery: Nursery

    @property
    def status(self) -> int | None:
        return self.nursery.ended.get(self.supervisor)

    def wait(self, seconds: float = 30) -> int:
        eventually(lambda: self.status is not None, seconds)
        status = self.status
        assert status is not None
        return status


class Nursery:
    """The handle on the process that supervisors are forked off."""

    def __init__(self) -> None:
        self.ended: dict[int, int] = {}
        self._born: dict[int, int] = {}
        self._process = subprocess.Popen(
            [sys.executable, "-c", NURSERY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def start(self, order: LaunchOrder, changes: str = "", **environment: str) -> Started:
        path = Path(order.attempt_dir) / "order.json"
        path.write_bytes(order.to_bytes())
        asked = {
            "order": str(path),
            "changes": changes,
            "environment": {name: value for name, value in os.environ.items() if name.startswith("CAPSULE_")}
            | environment,
        }
        before = set(self._born)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        (launcher,) = eventually(lambda: set(self._born) - before)
        return Started(order, launcher, self._born[launcher], self)

    def stop(self) -> None:
        """End it, and what a failed test left below it."""
        assert self._process.stdin is not None
        end_tree(lambda: descendants(self._process.pid), seconds=5)
        self._process.stdin.close()
        self._process.wait(10)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            match json.loads(line):
                case {"launcher": launcher, "supervisor": supervisor}:
                    self.ended.pop(supervisor, None)  # a pid that was had before
                    self._born[launcher] = supervisor
                case {"ended": pid, "status": status}:
                    self.ended[pid] = status


# The observer.


@dataclass
class Observer:
    """Watches from outside when an attempt's processes lived and its fake device was in use."""

    bench: Bench
    first_ns: int | None = None
    last_ns: int = 0
    _over: bool = field(default=False)

    def __post_init__(self) -> None:
        users(self.bench).mkdir(exist_ok=True)
        for path in users(self.bench).iterdir():
            path.unlink()
        self._fake = FakeBackend(self.bench.root / "devices") if self.bench.device == FAKE else None
        self._thread = threading.Thread(target=self._observe, daemon=True)
        self._thread.start()

    def used_ms(self) -> float:
        """Return for how long the device was used, once it is not used any more."""
        self._over = True
        self._thread.join()
        return (self.last_ns - self.first_ns) / 1e6 if self.first_ns is not None else 0

    def _observe(self) -> None:
        used = True
        while used or not self._over:
            now, used = time.clock_gettime_ns(time.CLOCK_BOOTTIME), False
            for path in users(self.bench).iterdir():
                text = path.read_text()
                if text.endswith("."):
                    began = int(text[:-1])
                    self.first_ns = min(began, self.first_ns or began)
                    used |= alive(int(path.name))
            if self.first_ns is not None and self._fake is not None:
                used |= bool(self._fake.unclean(FAKE, {"memory_used_bytes": IDLE_BYTES}))
            if used:
                self.last_ns = now
            self.last_ns = max(self.last_ns, self.first_ns or 0)
            time.sleep(0.004)


def users(bench: Bench) -> Path:
    return bench.root / "users"


def fake_device(bench: Bench, monkeypatch: pytest.MonkeyPatch, keeps_memory_ms: int = 0) -> None:
    """Make the bench's device a fake one that keeps memory for that long after its user is gone."""
    home = bench.root / "devices" / FAKE
    (home / "allocations").mkdir(parents=True)
    (home / "device.json").write_text('{"name": "Fake H200"}')
    (home.parent / "scenario.json").write_text(json.dumps({FAKE: {"keeps_memory_ms": keeps_memory_ms}}))
    monkeypatch.setenv("CAPSULE_FAKE_DEVICES", str(home.parent))
    bench.device = FAKE


def order_of(bench: Bench, kind: str, **limits: Any) -> LaunchOrder:
    users(bench).mkdir(exist_ok=True)
    trial = bench.root / f"{kind}.py"
    trial.write_text(KINDS[kind])
    command = ["python", "-I", "-S", str(trial), str(users(bench))]
    budget = {"wall_limit_seconds": LIMITS[kind], "kill_grace_seconds": "0.1", "release_grace_seconds": "2"} | limits
    return bench.order(protocol_of(command=command, **budget), trees=[])


# What must hold after any crash.


def settle(bench: Bench) -> list[Finding]:
    return reconcile(bench.ledger, bench.attempts, bench.leases)


def left_of(order: LaunchOrder) -> list[Stat]:
    """Return the live processes of an attempt's tree."""
    return with_environment(TREE, order.token)


def hold(bench: Bench, order: LaunchOrder, observer: Observer | None) -> Attempt:
    """Reconcile, and hold that nothing is left, everything is charged, and a second look changes nothing."""
    deadline = time.monotonic() + 20
    while [finding for finding in settle(bench) if finding.state != "reconciled"]:
        assert time.monotonic() < deadline, settle(bench)
        time.sleep(0.02)
    before = bench.ledger.path.read_bytes(), bench.ledger.head_path.read_bytes()
    assert settle(bench) == []
    assert (bench.ledger.path.read_bytes(), bench.ledger.head_path.read_bytes()) == before
    chain = read(before[0], "ledger")
    account = add_up(chain.events)
    assert (chain.faults, chain.tail, account.faults) == ([], b"", [])
    assert head_faults(chain.walk, Head.from_bytes(before[1], "head")) == []
    for attempt in account.attempts.values():
        ends = [event.name for event in chain.events if event.attempt == attempt.id and event.name in TERMINAL]
        assert len(ends) == 1, (attempt.id, ends)
        assert attempt.reserved is not None
        assert list(_charge_faults(attempt, attempt.reserved)) == []
    assert left_of(order) == []
    assert not any(path.exists() for path in places(f"capsule-{order.token}"))
    assert not any(is_held(lease_path(bench.leases, device)) for device in order.reserved.devices)
    found = account.attempts[order.attempt]
    if observer is not None:
        used_ms = observer.used_ms()
        assert found.held_ms >= used_ms, (found.held_ms, used_ms, found.end)
    return found


@contextlib.contextmanager
def nursery() -> Iterator[Nursery]:
    found = Nursery()
    try:
        yield found
    finally:
        found.stop()


def names(bench: Bench, order: LaunchOrder) -> list[str]:
    return [name for name in bench.names(order.attempt) if name != "heartbeat"]


def kill(*pids: int, number: int = signal.SIGKILL) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


# Holding a supervisor at a state, and who is there then.

HOLD = """
import os, signal
from capsule.host.ledger import Ledger
moment, event = WHEN.split()
def stop():
    if os.getpid() == OWN:
        os.kill(OWN, signal.SIGSTOP)
OWN, real, take = os.getpid(), Ledger.append, supervisor.take
def append(self, name, *rest):
    if (moment, event) == ("before", name):
        stop()
    found = real(self, name, *rest)
    if (moment, event) == ("after", name):
        stop()
    return found
def taken(*rest, **more):
    if event == "lease":
        stop()
    return take(*rest, **more)
Ledger.append, supervisor.take = append, taken
"""
STATES = {
    "before lease": "ordinary",
    "before intent": "ordinary",
    "after intent": "ordinary",
    "before spawned": "wall",
    "after spawned": "ordinary",
    "after heartbeat": "ordinary",
    "after stopping": "wall",
    "before exit": "ordinary",
    "after exit": "daemon",
    "after tree_empty": "ordinary",
    "after device_clean": "ordinary",
}
"""Where a supervisor can be held, and the kind of trial that gets there."""


def held(bench: Bench, forks: Nursery, state: str, changes: str = "", trial: str = "", **limits: Any) -> Started:
    """Start an attempt whose supervisor stops itself at a state; returns once it has.

    A wall limit leaves its trial the time to be started on a busy machine.
    """
    kind = trial or STATES[state]
    limits = ({"wall_limit_seconds": "1.5"} if kind == "wall" else {}) | limits
    started = forks.start(order_of(bench, kind, **limits), f"WHEN = {state!r}\n{HOLD}{changes}")
    eventually(lambda: (found := read_stat(started.supervisor)) is not None and found.state == "T")
    return started


def roles(bench: Bench, started: Started) -> dict[str, list[int]]:
    """Return the processes of an attempt by their role."""
    whereabouts = read_traces(bench.attempts / started.order.attempt).whereabouts
    watchdog = whereabouts.watchdog.pid if whereabouts and whereabouts.watchdog else 0
    below = descendants(started.supervisor)
    return {
        "cli": [started.launcher],
        "supervisor": [started.supervisor],
        "watchdog": [item.pid for item in below if item.pid == watchdog],
        "sampler": [item.pid for item in below if item.parent == started.supervisor and item.pid != watchdog],
        "trial": [item.pid for item in descendants(watchdog)] if watchdog else [],
    }


def alive(pid: int) -> bool:
    found = read_stat(pid)
    return found is not None and found.alive

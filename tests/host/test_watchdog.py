"""The watchdog ends what its supervisor cannot, whoever of them is killed or stopped, and in whatever order."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from capsule.core.attempt import Attempt, Reconciled, Settled, exit_faults
from capsule.host import launch
from capsule.host.clock import read_clock
from capsule.host.lease import lease_path
from capsule.host.process import identify, is_alive, lock_owners
from capsule.host.reconcile import Finding, liveness, reconcile
from capsule.host.supervision import Supervision
from capsule.host.traces import SEEN, read_traces
from tests.host.conftest import Bench, eventually, protocol_of
from tests.host.crashes import Nursery, Observer, fake_device, held, hold, kill, left_of, nursery, order_of, roles

SLEEPER = "import os, time\nprint('up', flush=True)\nopen('PIDFILE', 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
HIDDEN = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    os.closerange(0, 256)
    os.execve(sys.executable, [sys.executable, '-c', \"\"\"if 1:
        import os, time
        open('PIDFILE', 'w').write(str(os.getpid()))
        time.sleep(600)
        \"\"\"], {})
time.sleep(600)
"""


def started(bench: Bench, source: str, **limits: str) -> tuple[Supervision, int]:
    """Start a trial that writes the pid of interest into a file; returns once it has."""
    pidfile = bench.root / "pid"
    protocol = protocol_of(command=["python", "-c", source.replace("PIDFILE", str(pidfile))], **limits)
    supervision = bench.start(protocol)
    pid = int(eventually(lambda: pidfile.exists() and pidfile.read_text()))
    eventually(lambda: "spawned" in bench.names(supervision.attempt))
    return supervision, pid


def watchdog_of(bench: Bench, attempt: str) -> int:
    whereabouts = read_traces(bench.attempts / attempt).whereabouts
    assert whereabouts is not None
    assert whereabouts.watchdog is not None
    return whereabouts.watchdog.pid


def gone(pid: int) -> bool:
    return not is_alive(identify(pid))


def settle(bench: Bench) -> list[Finding]:
    return reconcile(bench.ledger, bench.attempts, bench.leases)


def attempt_of(bench: Bench, supervision: Supervision) -> Attempt:
    return bench.account().attempts[supervision.attempt]


def alive_says(bench: Bench, attempt: Attempt) -> str:
    assert attempt.last is not None
    return liveness(attempt, bench.attempts, attempt.last, read_clock())


def test_a_trial_whose_supervisor_was_killed_ends_at_its_wall_limit_and_its_output_is_kept(bench: Bench) -> None:
    source = SLEEPER.replace("time.sleep(600)", "time.sleep(1); print('still here', flush=True); time.sleep(600)")
    supervision, pid = started(bench, source, wall_limit_seconds="3", kill_grace_seconds="1")
    os.kill(supervision.pid, signal.SIGKILL)
    supervision.wait(5)
    assert alive_says(bench, attempt_of(bench, supervision)) == "watched"
    watchdog = watchdog_of(bench, supervision.attempt)
    eventually(lambda: gone(watchdog), 15)
    assert gone(pid)
    before = read_clock()
    (finding,) = settle(bench)
    assert finding.state == "reconciled"
    found = attempt_of(bench, supervision)
    assert isinstance(found.end, Reconciled)
    assert found.end.outcome == "lost"
    assert "its watchdog saw that its wall limit was reached" in found.end.evidence
    assert found.intent is not None
    assert 3_000 <= found.end.charge.debited_ms <= before.boottime_ms - found.intent.leased.boottime_ms
    assert found.end.charge.debited_ms < 8_000, "its watchdog did not keep to the limit"
    assert (bench.attempts / supervision.attempt / "stdout").read_text() == "up\nstill here\n"
    assert settle(bench) == []


def test_the_next_command_ends_what_a_watchdog_still_keeps_and_charges_to_its_end(bench: Bench) -> None:
    supervision, pid = started(bench, HIDDEN)
    os.kill(supervision.pid, signal.SIGKILL)
    supervision.wait(5)
    watchdog = watchdog_of(bench, supervision.attempt)
    assert not gone(pid)
    assert watchdog in [item.pid for item in lock_owners(lease_path(bench.leases, bench.device))]
    (finding,) = settle(bench)
    assert finding.state == "reconciled"
    assert gone(pid)
    assert gone(watchdog)
    found = attempt_of(bench, supervision)
    assert isinstance(found.end, Reconciled)
    assert found.end.charge.observed


def test_what_hid_from_everything_is_found_by_the_recorded_tree_when_all_above_it_were_killed(bench: Bench) -> None:
    supervision, pid = started(bench, HIDDEN)
    seen = bench.attempts / supervision.attempt / SEEN
    eventually(lambda: seen.exists() and f'"pid":{pid},' in seen.read_text())
    watchdog = watchdog_of(bench, supervision.attempt)
    leader = attempt_of(bench, supervision).spawned
    assert leader is not None
    for target in (supervision.pid, watchdog, leader.pid):
        os.kill(target, signal.SIGKILL)
    supervision.wait(5)
    assert not gone(pid)
    settle(bench)
    assert gone(pid)


def test_a_killed_watchdog_ends_the_trial_and_the_attempt_is_void(bench: Bench) -> None:
    supervision, pid = started(bench, SLEEPER)
    os.kill(watchdog_of(bench, supervision.attempt), signal.SIGKILL)
    assert supervision.wait(20) == launch.SETTLED, bench.log(supervision.attempt)
    assert gone(pid)
    found = attempt_of(bench, supervision)
    assert isinstance(found.end, Settled)
    assert found.end.outcome == "lost"
    assert "its watchdog" in found.end.evidence
    assert found.exit is not None
    assert found.exit.signal == signal.SIGTERM


def test_a_signal_to_a_watchdog_whose_supervisor_lives_changes_nothing(bench: Bench) -> None:
    source = "import os, time\nopen('PIDFILE', 'w').write(str(os.getpid()))\ntime.sleep(1.5)\n"
    supervision, _ = started(bench, source)
    os.kill(watchdog_of(bench, supervision.attempt), signal.SIGTERM)
    assert supervision.wait(20) == launch.SETTLED, bench.log(supervision.attempt)
    found = attempt_of(bench, supervision)
    assert found.exit is not None
    assert found.exit.exit_code == 0


@pytest.mark.parametrize("order", [("supervisor", "watchdog", "trial"), ("trial", "watchdog", "supervisor")])
def test_all_of_them_killed_leaves_bounds_and_one_end(bench: Bench, order: tuple[str, ...]) -> None:
    supervision, pid = started(bench, SLEEPER)
    pids = {"supervisor": supervision.pid, "watchdog": watchdog_of(bench, supervision.attempt), "trial": pid}
    began = time.monotonic()
    for name in order:
        os.kill(pids[name], signal.SIGKILL)
    supervision.wait(10)
    settle(bench)
    found = attempt_of(bench, supervision)
    assert found.end is not None
    assert found.end.charge.upper_ms >= found.end.charge.lower_ms
    assert found.end.charge.debited_ms == found.end.charge.upper_ms
    assert time.monotonic() - began < 20
    names = bench.names(supervision.attempt)
    assert sum(name in ("settled", "reconciled", "refused") for name in names) == 1
    assert settle(bench) == []
    assert bench.names(supervision.attempt) == names


def test_no_helper_outlives_an_attempt(bench: Bench) -> None:
    attempt = bench.go(protocol_of(command=["true"]))
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            found = path.read_bytes()
        except OSError:
            continue
        assert f"CAPSULE_ATTEMPT={attempt.id}\0".encode() not in found or str(bench.root).encode() not in found
    assert gone(watchdog_of(bench, attempt.id))


# Helpers that end or stop at the worst moment.

DIES_WHEN_IT_KNOWS = """
from capsule.host import watchdog
real = watchdog.collect
def collect():
    found = real()
    if any(pid == KEEPER.leader for pid, _, _ in found):
        os.kill(os.getpid(), 9)
    return found
def run(self, real_run=watchdog._Keeper.run):
    global KEEPER
    KEEPER = self
    real_run(self)
watchdog.collect, watchdog._Keeper.run = collect, run
"""
STOPS_FIRST = """
from capsule.host import watchdog
def run(self, real_run=watchdog._Keeper.run):
    os.kill(os.getpid(), 19)
    real_run(self)
watchdog._Keeper.run = run
"""


@pytest.fixture(scope="module")
def forks() -> Iterator[Nursery]:
    with nursery() as found:
        yield found


def test_a_stopped_supervisor_does_not_stop_the_clock_of_the_wall_limit(bench: Bench, forks: Nursery) -> None:
    """The watchdog gives it a moment more, ends the trial in its place, and says so once the supervisor goes on."""
    backstop = "from capsule.host import watchdog\nwatchdog.BACKSTOP_MS = 600\n"
    started = held(bench, forks, "after spawned", backstop, trial="wall")
    (trial,) = roles(bench, started)["trial"]
    eventually(lambda: gone(trial), 15)
    kill(started.supervisor, number=signal.SIGCONT)
    assert started.wait() == launch.SETTLED, bench.log(started.order.attempt)
    found = hold(bench, started.order, None)
    assert isinstance(found.end, Settled)
    assert found.end.outcome == "wall_limit"
    assert found.end.charge.debited_ms >= 1_500 + 100 + 600


def test_a_stopped_watchdog_does_not_keep_a_trial_beyond_its_wall_limit(bench: Bench, forks: Nursery) -> None:
    started = held(bench, forks, "after spawned", trial="wall")
    there = roles(bench, started)
    kill(*there["watchdog"], number=signal.SIGSTOP)
    kill(started.supervisor, number=signal.SIGCONT)
    assert started.wait() == launch.SETTLED, bench.log(started.order.attempt)
    assert all(gone(pid) for pid in (*there["watchdog"], *there["trial"]))
    found = hold(bench, started.order, None)
    assert isinstance(found.end, Settled)
    assert found.end.outcome == "wall_limit"


def test_a_watchdog_killed_before_it_tells_the_end_does_not_hold_the_supervisor_for_ever(
    bench: Bench, forks: Nursery
) -> None:
    observer = Observer(bench)
    started = forks.start(order_of(bench, "ordinary"), DIES_WHEN_IT_KNOWS)
    assert started.wait(15) == launch.SETTLED, bench.log(started.order.attempt)
    found = hold(bench, started.order, observer)
    assert isinstance(found.end, Settled)
    assert found.end.outcome == "lost"
    assert found.exit is not None
    assert "how it ended was lost with its watchdog" in found.exit.evidence
    assert list(exit_faults(found.exit, found.end.outcome)) == []


@pytest.mark.parametrize("asked", [False, True])
def test_a_watchdog_that_is_stopped_before_it_starts_the_trial_is_given_up(
    bench: Bench, forks: Nursery, asked: bool
) -> None:
    """At the wall limit, or a moment after somebody asked the supervisor to stop."""
    order = order_of(bench, "ordinary", wall_limit_seconds="60" if asked else "0.5")
    started = forks.start(order, STOPS_FIRST)
    eventually(lambda: "intent" in bench.names(order.attempt))
    if asked:
        os.kill(started.supervisor, signal.SIGTERM)
    assert started.wait(15) == launch.SETTLED, bench.log(order.attempt)
    found = hold(bench, order, None)
    assert isinstance(found.end, Settled)
    assert found.end.outcome == "lost"
    assert found.end.charge.observed


def test_a_supervisor_that_gives_up_while_its_watchdog_starts_leaves_no_trial(bench: Bench, forks: Nursery) -> None:
    """The trial did not exist yet when the whereabouts could not be written, and was started all the same."""
    changes = """
from capsule.host import traces, watchdog
real_leave, real_run = traces.leave, watchdog._Keeper.run
def leave(directory, name, trace):
    if name == traces.WHEREABOUTS and trace.watchdog is not None:
        raise OSError(28, "No space left on device")
    real_leave(directory, name, trace)
def run(self):
    import time
    time.sleep(0.3)
    real_run(self)
traces.leave, watchdog._Keeper.run = leave, run
"""
    observer = Observer(bench)
    started = forks.start(order_of(bench, "wall", wall_limit_seconds="20"), changes)
    assert started.wait(15) == launch.LEDGER_FAILED, bench.log(started.order.attempt)
    assert left_of(started.order) == []
    hold(bench, started.order, observer)


def test_a_sampler_that_is_killed_is_replaced_and_the_device_is_still_looked_at(
    bench: Bench, forks: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_device(bench, monkeypatch, keeps_memory_ms=300)
    observer = Observer(bench)
    started = held(bench, forks, "after spawned", "attempt_run.LOOK_MS = 20\n", trial="long")
    (sampler,) = roles(bench, started)["sampler"]
    os.kill(sampler, signal.SIGKILL)
    os.kill(started.supervisor, signal.SIGCONT)
    (following,) = eventually(lambda: set(roles(bench, started)["sampler"]) - {sampler})
    assert started.wait() == launch.SETTLED, bench.log(started.order.attempt)
    assert following != sampler
    found = hold(bench, started.order, observer)
    assert isinstance(found.end, Settled)
    assert found.end.outcome == "completed"
    assert "not clean" not in found.end.evidence


def test_an_answer_that_comes_too_late_is_not_taken_for_the_next_one(
    bench: Bench, forks: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_device(bench, monkeypatch)
    scenario = bench.root / "devices/scenario.json"
    scenario.write_text(json.dumps({"*": {"delays": {"visible": 700}}}))
    changes = (
        "attempt_run.Sampler.visible = lambda self, environment, cancelled: "
        "self._ask({'ask': 'visible', 'environment': dict(environment)}, 0.1, cancelled)['visible']\n"
    )
    started = forks.start(order_of(bench, "ordinary"), changes)
    assert started.wait() == launch.SETTLED, bench.log(started.order.attempt)
    found = hold(bench, started.order, None)
    assert isinstance(found.end, Settled)
    assert found.end.outcome == "completed"
    assert "is not known" in bench.log(started.order.attempt)


def test_a_lease_file_that_cannot_be_written_is_a_refusal(bench: Bench, forks: Nursery) -> None:
    changes = "def take(*rest, **more):\n    raise OSError(28, 'No space left on device')\nsupervisor.take = take\n"
    started = forks.start(order_of(bench, "ordinary"), changes)
    assert started.wait() == launch.REFUSED, bench.log(started.order.attempt)
    found = hold(bench, started.order, None)
    assert found.refused is not None
    assert (found.refused.reason, found.held_ms) == ("machine", 0)
    assert "No space left" in found.refused.words

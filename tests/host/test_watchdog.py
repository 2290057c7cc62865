"""The watchdog ends what its supervisor cannot, whoever of them is killed or stopped, and in whatever order."""

import os
import signal
import time
from pathlib import Path

import pytest

from capsule.core.attempt import Attempt, Reconciled, Settled
from capsule.host import launch
from capsule.host.clock import read_clock
from capsule.host.process import identify, is_alive
from capsule.host.reconcile import Finding, liveness, reconcile
from capsule.host.traces import SEEN, read_traces
from tests.host.conftest import Bench, eventually, protocol_of

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


def started(bench: Bench, source: str, **limits: str) -> tuple[launch.Supervision, int]:
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


def attempt_of(bench: Bench, supervision: launch.Supervision) -> Attempt:
    return bench.account().attempts[supervision.attempt]


def alive_says(bench: Bench, attempt: Attempt) -> str:
    assert attempt.last is not None
    return liveness(attempt, bench.attempts, attempt.last, read_clock())


def test_a_trial_whose_supervisor_was_killed_ends_at_its_wall_limit_and_its_output_is_kept(bench: Bench) -> None:
    source = SLEEPER.replace("time.sleep(600)", "time.sleep(1); print('still here', flush=True); time.sleep(600)")
    supervision, pid = started(bench, source, wall_limit_seconds="4", kill_grace_seconds="1")
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
    assert 4_000 <= found.end.charge.debited_ms <= before.boottime_ms - found.intent.leased.boottime_ms
    assert (bench.attempts / supervision.attempt / "stdout").read_text() == "up\nstill here\n"
    assert settle(bench) == []


def test_the_next_command_ends_what_a_watchdog_still_keeps_and_charges_to_its_end(bench: Bench) -> None:
    supervision, pid = started(bench, HIDDEN)
    os.kill(supervision.pid, signal.SIGKILL)
    supervision.wait(5)
    watchdog = watchdog_of(bench, supervision.attempt)
    assert not gone(pid)
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


def test_a_stopped_supervisor_does_not_stop_the_clock_of_the_wall_limit(bench: Bench) -> None:
    supervision, pid = started(bench, SLEEPER, wall_limit_seconds="2", kill_grace_seconds="1")
    os.kill(supervision.pid, signal.SIGSTOP)
    try:
        eventually(lambda: gone(pid), 15)
    finally:
        os.kill(supervision.pid, signal.SIGCONT)
    assert supervision.wait(20) == launch.SETTLED, bench.log(supervision.attempt)
    found = attempt_of(bench, supervision)
    assert isinstance(found.end, Settled)
    assert found.end.outcome == "wall_limit"
    assert found.end.charge.debited_ms >= 5_000


def test_a_stopped_watchdog_does_not_keep_a_trial_beyond_its_wall_limit(bench: Bench) -> None:
    supervision, pid = started(bench, SLEEPER, wall_limit_seconds="2", kill_grace_seconds="1")
    os.kill(watchdog_of(bench, supervision.attempt), signal.SIGSTOP)
    assert supervision.wait(30) == launch.SETTLED, bench.log(supervision.attempt)
    assert gone(pid)
    found = attempt_of(bench, supervision)
    assert isinstance(found.end, Settled)
    assert found.end.outcome == "wall_limit"


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

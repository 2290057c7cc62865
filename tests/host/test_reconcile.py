"""After any crash: one terminal event an attempt, no less debited than used, and a second look changes nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from capsule.core.attempt import Attempt, Clock, Heartbeat, HeldUnknown, Intent, Reconciled, Spawned
from capsule.core.ledger_checks import _charge_faults
from capsule.host import launch
from capsule.host import reconcile as reconcile_module
from capsule.host.clock import read_clock, realtime_ms, realtime_text
from capsule.host.lease import lease_path
from capsule.host.process import identify, is_alive, lock_owners, read_stat
from capsule.host.reconcile import Finding, liveness, reconcile
from capsule.host.supervision import Supervision, start
from capsule.host.traces import NOTE, Note, leave, read_traces
from capsule.steps.status import status
from tests.conftest import Capsule
from tests.host.conftest import SNAPSHOT, Bench, eventually, protocol_of
from tests.study import make_study


def look(bench: Bench, clock: Any = read_clock) -> list[Finding]:
    return reconcile(bench.ledger, bench.attempts, bench.leases, clock=clock)


def look_twice(bench: Bench, clock: Any = read_clock) -> list[Finding]:
    """Reconcile, and hold that a second time appends nothing and finds nothing."""
    findings = look(bench, clock)
    before = bench.ledger.path.read_bytes()
    assert look(bench, clock) == []
    assert bench.ledger.path.read_bytes() == before
    return findings


def end(bench: Bench, attempt: str) -> Reconciled:
    found = bench.account().attempts[attempt].end
    assert isinstance(found, Reconciled)
    return found


def charge_faults(attempt: Attempt) -> list[str]:
    assert attempt.reserved is not None
    return list(_charge_faults(attempt, attempt.reserved))


def kill_supervisor(bench: Bench, supervision: Supervision) -> None:
    os.kill(supervision.pid, signal.SIGKILL)
    supervision.wait(10)


def kill_watchdog(bench: Bench, supervision: Supervision) -> None:
    whereabouts = read_traces(bench.attempts / supervision.attempt).whereabouts
    assert whereabouts is not None
    assert whereabouts.watchdog is not None
    os.kill(whereabouts.watchdog.pid, signal.SIGKILL)
    eventually(lambda: not is_alive(whereabouts.watchdog))


def state(pid: int) -> str:
    found = read_stat(pid)
    return found.state if found else ""


def gone(pid: int) -> bool:
    """Whether a process is gone, or only waits to be collected by init."""
    found = read_stat(pid)
    return found is None or not found.alive


SLEEPER = ["python", "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"]


def started(bench: Bench, command: list[str] = SLEEPER, **limits: Any) -> tuple[Supervision, int]:
    """Start an attempt and return it with the pid that its trial printed."""
    supervision = bench.start(protocol_of(command=command, **limits))
    stdout = bench.attempts / supervision.attempt / "stdout"
    text = eventually(lambda: stdout.exists() and (text := stdout.read_text()).endswith("\n") and text)
    eventually(lambda: "spawned" in bench.names(supervision.attempt))
    return supervision, int(text)


# A4: nothing was started.


def test_a_reservation_whose_launcher_died_is_free(bench: Bench, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom capsule.core.attempt import Reserved\n"
        "from capsule.host.launch import announce\nfrom capsule.host.ledger import Ledger\n"
        "from capsule.host.reservation import reserve\n"
        "reserve(Ledger(Path(sys.argv[1]), Path(sys.argv[2])), Reserved.model_validate_json(sys.argv[3]),\n"
        "        budget_ms=10**9, attempts_max=9, before=lambda attempt: announce(Path(sys.argv[4]) / attempt))\n"
        "sys.stdin.read()\n"
    )
    asked = bench.asked(protocol_of(command=["true"])).model_dump_json()
    paths = [str(bench.ledger.path), str(bench.ledger.head_path)]
    command = [sys.executable, "-c", code, *paths, asked, str(bench.attempts)]
    launcher = subprocess.Popen(command, stdin=subprocess.PIPE)
    eventually(lambda: bench.account().attempts)
    (finding,) = look(bench)
    assert finding.state == "starting"
    assert bench.account().held_ms("cpu", pilot=False) == 23_000
    launcher.kill()
    launcher.communicate()
    assert bench.account().held_ms("cpu", pilot=False) == 23_000, "held until somebody has looked"
    (finding,) = look_twice(bench)
    assert finding.state == "reconciled"
    assert (end(bench, "a000001").outcome, end(bench, "a000001").charge.debited_ms) == ("never_started", 0)


def test_a_supervisor_that_comes_too_late_starts_nothing(bench: Bench, tmp_path: Path) -> None:
    order = bench.order(protocol_of(command=["touch", str(tmp_path / "ran")]))
    (bench.attempts / order.attempt / launch.LAUNCHER).unlink()
    assert look_twice(bench)[0].state == "reconciled"
    supervision = start(order)
    assert supervision.wait(20) == launch.REFUSED
    assert not (tmp_path / "ran").exists()
    assert bench.account().faults == []


# D4, D5, D6.


def test_a_live_attempt_is_left_alone(bench: Bench) -> None:
    supervision, _ = started(bench)
    before = bench.names(supervision.attempt)
    (finding,) = look(bench)
    assert (finding.attempt, finding.state) == (supervision.attempt, "running")
    assert str(supervision.pid) in finding.words
    assert bench.names(supervision.attempt) == before


def test_a_stopped_supervisor_is_silent_and_its_lease_not_stolen(bench: Bench) -> None:
    supervision, child = started(bench)
    os.kill(supervision.pid, signal.SIGSTOP)
    try:
        eventually(lambda: state(supervision.pid) == "T")
        later = read_clock().model_copy(update={"boottime_ms": read_clock().boottime_ms + 60_000})
        (finding,) = look(bench, lambda: later)
        assert finding.state == "silent"
        assert "is stopped" in finding.words
        assert not gone(child)
    finally:
        os.kill(supervision.pid, signal.SIGCONT)


def test_what_a_killed_supervisor_left_is_ended_and_charged_to_its_end(bench: Bench) -> None:
    source = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "os.setsid() if os.fork() == 0 else None\n"
        "time.sleep(60)\n"
    )
    supervision = bench.start(protocol_of(command=["python", "-c", source], kill_grace_seconds="0.3"))
    eventually(lambda: "spawned" in bench.names(supervision.attempt))
    spawned = bench.account().attempts[supervision.attempt].spawned
    assert spawned is not None
    eventually(lambda: len(Path(f"/proc/{spawned.pid}/task/{spawned.pid}/children").read_text().split()) == 1)
    (grandchild,) = map(int, Path(f"/proc/{spawned.pid}/task/{spawned.pid}/children").read_text().split())
    time.sleep(0.2)
    kill_supervisor(bench, supervision)
    tree = [identify(spawned.pid), identify(grandchild)]
    assert all(is_alive(item) for item in tree)
    (finding,) = look_twice(bench)
    assert finding.state == "reconciled"
    assert not any(is_alive(item) for item in tree)
    charge = end(bench, supervision.attempt).charge
    attempt = bench.account().attempts[supervision.attempt]
    assert attempt.intent is not None
    assert charge.observed
    assert charge.debited_ms >= 300
    assert bench.names(supervision.attempt)[-2:] == ["held_unknown", "reconciled"]
    assert end(bench, supervision.attempt).outcome == "lost"


def test_a_daemon_that_cleared_its_environment_is_found_by_the_lease_it_holds(bench: Bench, tmp_path: Path) -> None:
    clean = f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)"
    source = (
        "import os, sys, time\n"
        "print(os.getpid(), flush=True)\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        f"    os.execve(sys.executable, [sys.executable, '-c', {clean!r}], {{'A': 'b'}})\n"
        "time.sleep(60)\n"
    )
    supervision, child = started(bench, ["python", "-c", source], kill_grace_seconds="0.2")
    eventually(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    daemon = identify(int((tmp_path / "pid").read_text()))
    kill_supervisor(bench, supervision)
    kill_watchdog(bench, supervision)
    os.kill(child, signal.SIGKILL)
    eventually(lambda: gone(child))
    assert is_alive(daemon)
    assert [item.pid for item in lock_owners(lease_path(bench.leases, bench.device))] == [daemon.pid]
    (finding,) = look_twice(bench)
    assert finding.state == "reconciled"
    assert not is_alive(daemon)
    assert end(bench, supervision.attempt).charge.observed


def test_all_killed_under_one_boot_is_charged_to_the_first_proof_of_death(bench: Bench) -> None:
    supervision, child = started(bench)
    kill_supervisor(bench, supervision)
    kill_watchdog(bench, supervision)
    os.kill(child, signal.SIGKILL)
    eventually(lambda: gone(child))
    time.sleep(0.3)
    (finding,) = look_twice(bench)
    found = end(bench, supervision.attempt)
    assert finding.state == "reconciled"
    assert (found.outcome, found.charge.observed) == ("lost", False)
    assert found.charge.lower_ms + 300 <= found.charge.upper_ms == found.charge.debited_ms
    assert found.files["stdout"].size == len(f"{child}\n")


def test_the_next_attempt_takes_the_device_after_a_crash(bench: Bench) -> None:
    supervision, child = started(bench)
    kill_supervisor(bench, supervision)
    refused = bench.start(protocol_of(command=["true"]))
    assert refused.wait(20) == launch.REFUSED
    words = bench.account().attempts[refused.attempt].refused
    assert words is not None
    assert words.reason == "busy"
    look_twice(bench)
    assert gone(child)
    assert bench.go(protocol_of(command=["true"])).end is not None


def test_a_daemon_that_dropped_the_lease_is_found_by_the_environment_it_was_started_with(
    bench: Bench, tmp_path: Path
) -> None:
    source = (
        "import os, time\n"
        "print(os.getpid(), flush=True)\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    os.closerange(0, 100)\n"
        f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "time.sleep(60)\n"
    )
    supervision, child = started(bench, ["python", "-c", source], kill_grace_seconds="0.2")
    eventually(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    daemon = identify(int((tmp_path / "pid").read_text()))
    kill_supervisor(bench, supervision)
    kill_watchdog(bench, supervision)
    os.kill(child, signal.SIGKILL)
    eventually(lambda: gone(child))
    late = bench.start(protocol_of(command=["true"]))
    assert late.wait(20) == launch.REFUSED
    refused = bench.account().attempts[late.attempt].refused
    assert refused is not None
    assert f"what attempt {supervision.attempt} of 0001-x left running, pid {daemon.pid}" in refused.words
    (finding,) = look_twice(bench)
    assert finding.state == "reconciled"
    assert not is_alive(daemon)
    assert end(bench, supervision.attempt).charge.observed


def test_of_two_who_reconcile_at_once_one_writes(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt, _ = written(bench, beats=1)
    real = reconcile_module.finish_files
    inner: list[list[Finding]] = []

    def finish_after_another(*arguments: Any) -> Any:
        monkeypatch.setattr(reconcile_module, "finish_files", real)
        inner.append(look(bench))
        return real(*arguments)

    monkeypatch.setattr(reconcile_module, "finish_files", finish_after_another)
    (outer,) = look(bench)
    assert ([finding.state for finding in inner[0]], outer.state) == (["reconciled"], "running")
    assert bench.names(attempt).count("reconciled") == 1
    assert bench.account().faults == []


# D11: a reused pid.


def test_a_process_that_got_the_pid_since_is_never_signalled(bench: Bench) -> None:
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        found = read_stat(stranger.pid)
        assert found is not None
        written(bench, spawned=Spawned(pid=stranger.pid, start_ticks=found.start_ticks - 1))
        look_twice(bench)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


# Bounds, on events that are written by hand.


def written(
    bench: Bench,
    *,
    leased: Clock | None = None,
    spawned: Spawned | None = None,
    beats: int = 0,
    held: bool = False,
    devices: int = 1,
) -> tuple[str, Clock]:
    """Write an attempt that was leased ten seconds ago, with a heartbeat a second; return it and its lease's clock."""
    asked = bench.asked(protocol_of(command=["true"]))
    names = (bench.device, "CPU-1")[:devices]
    asked = asked.model_copy(update={"devices": names, "reserved_ms": devices * asked.reserved_ms})
    reservation = bench.reserve(asked)
    (bench.attempts / reservation.attempt / launch.LAUNCHER).unlink()
    now = read_clock()
    leased = leased or now.model_copy(update={"boottime_ms": now.boottime_ms - 10_000})
    ledger = bench.ledger
    intent = Intent(leased=leased, supervisor_pid=1, argv=("x",), snapshot=SNAPSHOT, device_baseline={})
    ledger.append("intent", reservation.attempt, intent, leased)
    ledger.append("spawned", reservation.attempt, spawned or Spawned(pid=2**22 + 1, start_ticks=1), leased)
    for beat in range(1, beats + 1):
        at = leased.model_copy(update={"boottime_ms": leased.boottime_ms + beat * 1_000})
        ledger.append("heartbeat", reservation.attempt, Heartbeat(elapsed_ms=beat * 1_000), at)
    if held:
        at = leased.model_copy(update={"boottime_ms": leased.boottime_ms + 7_000})
        ledger.append("held_unknown", reservation.attempt, HeldUnknown(evidence="a reconciliation that crashed"), at)
    return reservation.attempt, leased


@pytest.mark.parametrize("devices", [1, 2])
def test_the_bounds_are_the_last_heartbeat_and_now(bench: Bench, devices: int) -> None:
    """Of every device; no second party enforced the deadline, so that the reservation of 23 s is no bound."""
    attempt, leased = written(bench, beats=4, devices=devices)
    now = leased.model_copy(update={"boottime_ms": leased.boottime_ms + 90_000})
    look_twice(bench, lambda: now)
    charge = end(bench, attempt).charge
    assert (charge.lower_ms, charge.upper_ms, charge.debited_ms) == (devices * 4_000, *[devices * 90_000] * 2)
    assert (charge.observed, bench.account().attempts[attempt].held_ms) == (False, devices * 90_000)
    assert bench.names(attempt)[-2:] == ["held_unknown", "reconciled"]
    assert charge_faults(bench.account().attempts[attempt]) == []


@pytest.mark.parametrize(
    ("device", "known", "upper_ms"), [("CPU-0", True, 5_000), ("GPU-a", True, 6_000), ("GPU-a", False, 28_000)]
)
def test_a_note_of_when_the_tree_was_empty_is_a_bound_with_the_time_that_its_device_may_take(
    bench: Bench, device: str, known: bool, upper_ms: int
) -> None:
    """A watchdog saw no device: the release grace is added, or the whole reservation where that is not known."""
    bench.device = device
    order = bench.order(protocol_of(command=["true"]), trees=[]) if known else None
    if order is not None:
        (bench.attempts / order.attempt / launch.LAUNCHER).unlink()
        look(bench)
    attempt, leased = written(bench, beats=4)
    at = leased.model_copy(update={"boottime_ms": leased.boottime_ms + 5_000})
    leave(bench.attempts / attempt, NOTE, Note(words="it ended", wait_status=0, emptied=at))
    if order is not None:
        leave(bench.attempts / attempt, launch.ORDER, order.model_copy(update={"attempt": attempt}))
    now = leased.model_copy(update={"boottime_ms": leased.boottime_ms + 90_000})
    look_twice(bench, lambda: now)
    charge = end(bench, attempt).charge
    assert (charge.lower_ms, charge.upper_ms, charge.debited_ms) == (4_000, upper_ms, upper_ms)


def test_the_first_proof_of_death_stands_when_reconciling_crashed(bench: Bench) -> None:
    attempt, leased = written(bench, beats=4, held=True)
    now = leased.model_copy(update={"boottime_ms": leased.boottime_ms + 90_000})
    look_twice(bench, lambda: now)
    charge = end(bench, attempt).charge
    assert (charge.lower_ms, charge.upper_ms) == (4_000, 7_000)
    assert bench.names(attempt).count("held_unknown") == 1


@pytest.mark.parametrize(
    ("boot_after_ms", "upper_ms"), [(6_000, 6_000), (1_000_000, 23_000), (-5_000, 23_000), (2_000, 4_000)]
)
@pytest.mark.parametrize("devices", [1, 2])
def test_after_a_new_boot_the_wall_clock_bounds_the_end(
    bench: Bench, boot_after_ms: int, upper_ms: int, devices: int
) -> None:
    """No process outlives a boot; a wall clock that went back, or says less than a heartbeat, lowers nothing."""
    attempt, leased = written(bench, beats=4, devices=devices)
    uptime_ms = 33_000
    boot_ms = realtime_ms(leased.realtime) + boot_after_ms
    now = Clock(
        realtime=realtime_text(boot_ms + uptime_ms), boottime_ms=uptime_ms, monotonic_ms=uptime_ms, boot_id="another"
    )
    look_twice(bench, lambda: now)
    found = end(bench, attempt)
    assert found.outcome == "host_crash"
    bounds = devices * 4_000, devices * upper_ms, devices * upper_ms
    assert (found.charge.lower_ms, found.charge.upper_ms, found.charge.debited_ms) == bounds


def test_files_are_hashed_as_they_were_found_with_a_torn_row(bench: Bench) -> None:
    attempt, _ = written(bench)
    folder = bench.attempts / attempt
    (folder / "journal.jsonl").write_bytes(b'{"cell":"c000000","x":1}\n{"cell":"c0')
    (folder / "stdout").write_bytes(b"partial")
    look_twice(bench)
    found = end(bench, attempt)
    assert found.files["journal.jsonl"].size == 36
    assert (folder / "journal.jsonl").read_bytes().endswith(b'{"cell":"c0')
    assert found.files["stdout"].size == 7


def test_a_torn_ledger_tail_is_sealed_by_the_way(bench: Bench) -> None:
    with bench.ledger.path.open("ab") as file:
        file.write(b'{"torn')
    assert look_twice(bench) == []
    assert [event.name for event in bench.ledger.read()[0].events][-1] == "sealed"


# C5: the ledger could not be written while the trial ran.


def test_a_ledger_that_cannot_be_written_stops_the_trial_and_leaves_the_attempt_open(bench: Bench) -> None:
    supervision, child = started(bench)
    head = bench.ledger.head_path
    content = head.read_bytes()
    head.unlink()
    head.mkdir()
    assert supervision.wait(20) == launch.LEDGER_FAILED
    assert gone(child)
    note = json.loads((bench.attempts / supervision.attempt / "ledger_failed.json").read_bytes())
    head.rmdir()
    head.write_bytes(content)
    time.sleep(0.5)
    (finding,) = look_twice(bench)
    found = end(bench, supervision.attempt)
    intent = bench.account().attempts[supervision.attempt].intent
    assert intent is not None
    assert (finding.state, found.outcome) == ("reconciled", "ledger_failed")
    assert found.charge.debited_ms == note["emptied"]["boottime_ms"] - intent.leased.boottime_ms
    seqs = [event.seq for event in bench.ledger.read()[0].events]
    assert seqs == list(range(len(seqs)))


# What a trial put where its files belong.


@pytest.mark.parametrize("make", ["os.mkfifo(path)", "os.mkdir(path)", "os.symlink('/etc/passwd', path)"])
def test_a_dead_attempt_is_settled_whatever_stands_where_its_files_were(bench: Bench, make: str) -> None:
    source = (
        "import os, time\nfolder = os.path.dirname(os.environ['CAPSULE_RECORDS'])\n"
        "print(os.getpid(), flush=True)\ntime.sleep(0.5)\n"
        "for name in ('journal.jsonl', 'stdout', 'stderr', 'stdout.tail-000000000', 'redactions.jsonl',\n"
        "             'imports.jsonl', 'provenance.jsonl', 'ledger_failed.json', 'launcher.json'):\n"
        "    path = os.path.join(folder, name)\n    if os.path.exists(path): os.unlink(path)\n"
        f"    {make}\nopen(os.path.join(folder, 'done'), 'w').close()\ntime.sleep(60)\n"
    )
    supervision, _ = started(bench, ["python", "-c", source], kill_grace_seconds="0.2")
    eventually(lambda: (bench.attempts / supervision.attempt / "done").exists())
    kill_supervisor(bench, supervision)
    (finding,) = look_twice(bench)
    assert finding.state == "reconciled"
    settled = end(bench, supervision.attempt)
    assert (settled.outcome, settled.rows, settled.files) == ("lost", 0, {})
    assert "journal.jsonl is no regular file" in settled.evidence


def test_a_dead_attempt_s_journal_is_cut_too(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "JOURNAL_BYTES_MAX", 300)
    code = "import os, time\nopen(os.environ['CAPSULE_RECORDS'], 'w').write('{\"x\": 1}\\n' + '\\n' * 500)\n"
    supervision, _ = started(bench, ["python", "-c", code + SLEEPER[2]])
    kill_supervisor(bench, supervision)
    look_twice(bench)
    settled = end(bench, supervision.attempt)
    assert (settled.outcome, settled.rows) == ("lost", 1)
    assert "its last 309 were left out" in settled.evidence
    assert settled.files["journal.jsonl"].size <= 300


# Who looks after an open attempt, without changing anything.


def life(bench: Bench, attempt: str, later_ms: int = 0) -> str:
    found = bench.account().attempts[attempt]
    assert found.last is not None
    now = read_clock()
    now = now.model_copy(update={"boottime_ms": now.boottime_ms + later_ms})
    before = bench.ledger.path.read_bytes()
    word = liveness(found, bench.attempts, found.last, now)
    assert bench.ledger.path.read_bytes() == before
    return word


def test_liveness_is_derived_from_who_lives(bench: Bench) -> None:
    reserved = bench.order(protocol_of(command=["true"])).attempt
    assert life(bench, reserved) == "starting"
    (bench.attempts / reserved / launch.LAUNCHER).unlink()
    assert life(bench, reserved) == "lost"
    supervision, _ = started(bench)
    assert life(bench, supervision.attempt) == "running"
    assert life(bench, supervision.attempt, 16_000) == "silent"
    kill_supervisor(bench, supervision)
    assert life(bench, supervision.attempt) == "watched"
    kill_watchdog(bench, supervision)
    assert life(bench, supervision.attempt) == "lost"
    look(bench)


def test_a_long_attempt_is_not_silent_between_its_rare_heartbeats(bench: Bench) -> None:
    supervision, _ = started(bench)
    found = bench.account().attempts[supervision.attempt]
    assert found.last is not None
    last = found.last.model_copy(update={"boottime_ms": found.last.boottime_ms + 3_600_000})
    words = []
    for silence in (50_000, 107_000, 110_000):
        now = last.model_copy(update={"boottime_ms": last.boottime_ms + silence})
        words.append(liveness(found, bench.attempts, last, now))
    assert words == ["running", "running", "silent"]


def test_a_status_says_that_nobody_looks_after_an_attempt(capsule: Capsule, tmp_path: Path) -> None:
    trial = "import time\ndef measure(cell):\n    time.sleep(60)\n"
    protocol = make_study(tmp_path / "s", trial=trial)
    assert capsule("freeze", protocol).code == 0
    run = subprocess.Popen([sys.executable, "-m", "capsule", "run", str(protocol)], stdout=-3, stderr=-3)
    try:
        eventually(lambda: run.poll() is not None or status(protocol).liveness == {"a000001": "running"})
        eventually(lambda: status(protocol).attempts[0].spawned)
        (attempt,) = status(protocol).attempts
        assert attempt.intent is not None
        os.kill(attempt.intent.supervisor_pid, signal.SIGKILL)
    finally:
        run.kill()
        run.wait(10)
    eventually(lambda: status(protocol).liveness == {"a000001": "watched"})
    whereabouts = read_traces(protocol.parent / ".capsule/study/attempts/a000001").whereabouts
    assert whereabouts is not None
    assert whereabouts.watchdog is not None
    os.kill(whereabouts.watchdog.pid, signal.SIGTERM)
    eventually(lambda: status(protocol).liveness == {"a000001": "lost"})
    assert status(protocol).attempts[0].open
    assert capsule("reconcile", protocol).code == 0
    assert status(protocol).liveness == {}

"""The fault table on fake devices: whole attempts, each with what its row says is charged and recorded.

However an attempt ends here, the core's own checks of the ledger and of the samples must find nothing wrong with it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from capsule.core.attempt import COMPLETED, INTERRUPTED, Attempt, Settled
from capsule.core.digest import digest_of
from capsule.core.evidence import Evidence, Reading
from capsule.core.ledger_checks import (
    Checking,
    check_attempt_files,
    check_attempt_states,
    check_charges,
    check_ledger_chain,
    check_ledger_head,
)
from capsule.core.manifest import FileDigest, Manifest
from capsule.core.protocol import Protocol, milliseconds
from capsule.core.table import telemetry_row
from capsule.core.telemetry import DeviceTelemetry, Sample, summarize, worst
from capsule.core.telemetry_checks import TABLE, check_telemetry
from capsule.host import launch
from capsule.host.clock import read_boot_id
from capsule.host.devices.fake import IDLE_BYTES, FakeBackend
from capsule.host.lease import Holder, lease_path, quarantined, read_holder, readmit, take
from capsule.host.reconcile import reconcile
from tests.host.conftest import DAEMONIZE, MANIFEST, Bench, eventually, protocol_of
from tests.host.test_cgroup import possible
from tests.host.test_devices import Machine

GPU = "GPU-a"
MIB = 2**20
USE = """
import os, signal, subprocess, sys, time
def use():
    with open(os.environ["CAPSULE_FAKE_DEVICE_FOLDERS"] + f"/allocations/{os.getpid()}", "w") as file:
        file.write(str(900 * 2**20))
def record():
    with open(os.environ["CAPSULE_RECORDS"], "a") as file:
        file.write('{"x": 1.0}\\n')
use()
"""
QUICK = USE + "record()\n"
A_WHILE = USE + "time.sleep(1.3)\nrecord()\n"
STUBBORN = USE + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)\n"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    folder = tmp_path / "devices"
    folder.mkdir()
    monkeypatch.setenv("CAPSULE_FAKE_DEVICES", str(folder))
    return Machine(folder)


@pytest.fixture
def gpu(bench: Bench, machine: Machine) -> Bench:
    machine.add(GPU)
    bench.device = GPU
    return bench


def protocol(source: str, **budget: Any) -> Protocol:
    """A protocol whose one command is a Python script; `on_contamination` and every limit may be given."""
    limits = {"kill_grace_seconds": "0.5", "release_grace_seconds": "1"} | budget
    return protocol_of(command=["python", "-I", "-S", "-c", source], **limits)


class Observer:
    """Watches a fake device from outside: for how long it was in use."""

    def __init__(self, machine: Machine) -> None:
        self._fake = FakeBackend(machine.folder)
        self._seen: list[float] = []
        self._over = False
        self._thread = threading.Thread(target=self._observe, daemon=True)
        self._thread.start()

    def _observe(self) -> None:
        while not self._over:
            if self._fake._used(GPU, self._fake._scenario(GPU)) > IDLE_BYTES:
                self._seen.append(time.clock_gettime(time.CLOCK_BOOTTIME))
            time.sleep(0.01)

    def used_ms(self) -> float:
        self._over = True
        self._thread.join()
        return (self._seen[-1] - self._seen[0]) * 1000 if self._seen else 0


@contextmanager
def changed(order: launch.LaunchOrder, changes: str) -> Iterator[subprocess.Popen[bytes]]:
    """A supervisor of its own process in which `changes` were made before it began."""
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom capsule.host import launch, supervisor\n"
        f"{changes}\nsys.exit(supervisor.main(sys.argv[1:]))"
    )
    path = Path(order.attempt_dir) / launch.ORDER
    path.write_bytes(order.to_bytes())
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], stderr=subprocess.PIPE, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGQUIT)
        process.communicate(timeout=30)


def run(bench: Bench, wanted: Protocol, changes: str = "") -> Attempt:
    """Run one attempt to its settlement, and hold what must hold of every ledger."""
    if changes:
        order = bench.order(wanted)
        with changed(order, changes) as process:
            assert process.wait(60) == launch.SETTLED, process.stderr and process.stderr.read()
        attempt = bench.account().attempts[order.attempt]
    else:
        attempt = bench.go(wanted)
    hold(bench, wanted)
    return attempt


def refused(bench: Bench, wanted: Protocol, changes: str = "") -> tuple[str, str]:
    """Run into a refusal, which costs nothing and starts nothing; returns its reason and words."""
    order = bench.order(wanted)
    with changed(order, changes) as process:
        assert process.wait(60) == launch.REFUSED, process.stderr and process.stderr.read()
    attempt = bench.account().attempts[order.attempt]
    assert attempt.refused is not None
    assert bench.names(attempt.id) == ["reserved", "refused"]
    assert attempt.held_ms == 0
    assert not (bench.attempts / attempt.id / "stdout").exists()
    if not any(other.open for other in bench.account().attempts.values()):
        hold(bench, wanted)
    return attempt.refused.reason, attempt.refused.words


def end(attempt: Attempt) -> Settled:
    assert isinstance(attempt.end, Settled)
    return attempt.end


def telemetry(attempt: Attempt) -> DeviceTelemetry:
    (found,) = end(attempt).telemetry.values()
    return found


def samples(bench: Bench, attempt: str) -> list[Sample]:
    path = bench.attempts / attempt / "telemetry.jsonl"
    return [Sample.from_bytes(line, "sample") for line in path.read_bytes().splitlines()] if path.exists() else []


def is_clean(bench: Bench, attempt: Attempt) -> bool:
    (event,) = [event for event in bench.events(attempt.id) if event.name == "device_clean"]
    return bool(event.data.to_json()["clean"])


def emptied(bench: Bench, attempt: Attempt) -> dict[str, Any]:
    (event,) = [event for event in bench.events(attempt.id) if event.name == "tree_empty"]
    return event.data.to_json()


def findings(checking: Checking) -> list[str]:
    """Make one check of the core."""
    return list(checking)


def hold(bench: Bench, wanted: Protocol) -> None:
    """Hold the ledger, its charges and files, and the sums of its samples, to the core's own checks."""
    account = bench.account()
    files: dict[str, dict[str, FileDigest]] = {}
    for attempt in account.attempts.values():
        if isinstance(attempt.end, Settled):
            folder = bench.attempts / attempt.id
            found = {name: (folder / name).read_bytes() for name in attempt.end.files}
            files[attempt.id] = {name: FileDigest(size=len(d), sha256=digest_of(d)) for name, d in found.items()}
    seen = {name: samples(bench, name) for name in files}
    rows = [telemetry_row(name, sample) for name, found in seen.items() for sample in found]
    evidence = Evidence(
        members={"2-ledger.jsonl", "2-ledger.head.json"} | ({TABLE} if rows else set()),
        ledger=bench.ledger.path.read_bytes(),
        head=bench.ledger.head_path.read_bytes(),
        attempt_files=files,
        telemetry={
            name: (bench.attempts / name / "telemetry.jsonl").read_bytes() for name, found in seen.items() if found
        },
        telemetry_table=rows,
    )
    manifest = SimpleNamespace(identity=MANIFEST, protocol=wanted, supersedes=None)
    reading = Reading(evidence, manifests=[cast(Manifest, manifest)])
    for check in (
        check_ledger_chain,
        check_ledger_head,
        check_attempt_states,
        check_charges,
        check_attempt_files,
        check_telemetry,
    ):
        assert findings(check(reading)) == [], check.__doc__
    for attempt in account.attempts.values():
        if isinstance(attempt.end, Settled):
            assert attempt.intent is not None
            assert attempt.released is not None
            span = attempt.intent.leased.boottime_ms, attempt.released.boottime_ms
            sums = {GPU: summarize(GPU, seen[attempt.id], *span)} if seen[attempt.id] else {}
            assert attempt.end.telemetry == sums
            assert attempt.end.exclusivity == worst(sums.values())
            assert attempt.end.charge.observed
            assert attempt.end.charge.debited_ms == span[1] - span[0]


# A2: foreign, or not known to be exclusive, before anything starts.

UNTOLD = [
    ({"foreign": [{"pid": 0}]}, "a process whose id the driver does not tell"),
    ({"foreign": [{"pid": 2**32 - 1}]}, "a process whose id the driver does not tell"),
    ({"foreign": [{"pid": 77, "elsewhere": True}]}, "pid 77, which names no process here"),
    ({"sample": [{"memory_used_bytes": 9 * 2**30}]}, "9216 MiB in use"),
    ({"exclusivity": "unverifiable"}, "processes are not listed"),
]


@pytest.mark.parametrize("exclusivity", ["required", "best_effort"])
def test_a_foreign_process_before_the_start_is_refused_whatever_the_protocol_asks(
    gpu: Bench, machine: Machine, exclusivity: str
) -> None:
    machine.scenario(GPU, foreign=[{"pid": 4242}])
    reason, words = refused(gpu, protocol(QUICK, exclusivity=exclusivity))
    assert (reason, words) == ("foreign_process", f"{GPU} is in use by pid 4242")
    assert read_holder(lease_path(gpu.leases, GPU)) is None


@pytest.mark.parametrize(("scenario", "words"), UNTOLD)
def test_what_the_driver_does_not_tell_is_refused_where_exclusivity_is_required(
    gpu: Bench, machine: Machine, scenario: dict[str, Any], words: str
) -> None:
    machine.scenario(GPU, **scenario)
    reason, found = refused(gpu, protocol(QUICK, exclusivity="required"))
    assert reason == "unverifiable"
    assert "exclusivity is required and cannot be proven" in found
    assert words in found


@pytest.mark.parametrize(("scenario", "words"), UNTOLD)
def test_what_the_driver_does_not_tell_is_a_label_where_the_best_is_done(
    gpu: Bench, machine: Machine, scenario: dict[str, Any], words: str
) -> None:
    machine.scenario(GPU, **scenario)
    attempt = run(gpu, protocol(QUICK))
    assert (end(attempt).outcome, end(attempt).exclusivity) == ("completed", "unverifiable")
    assert words in telemetry(attempt).evidence


# A7: what the trial would see.


@pytest.mark.parametrize("sees", [["GPU-b"], [], ["GPU-a", "GPU-b"]])
def test_a_trial_that_would_see_other_devices_is_not_started(gpu: Bench, machine: Machine, sees: list[str]) -> None:
    machine.add("GPU-b")
    machine.scenario("*", sees=sees)
    attempt = run(gpu, protocol(f"open({str(gpu.root / 'ran')!r}, 'w')"))
    assert end(attempt).outcome == "device_mismatch"
    assert end(attempt).evidence.startswith(f"expected a program to see GPU-a, found {', '.join(sees) or 'no device'}")
    assert "spawned" not in gpu.names(attempt.id)
    assert not (gpu.root / "ran").exists()
    assert end(attempt).charge.debited_ms > 0
    assert is_clean(gpu, attempt)


def test_where_nobody_can_say_what_a_trial_sees_it_runs(gpu: Bench, machine: Machine) -> None:
    machine.scenario("*", sees=None)
    assert end(run(gpu, protocol(QUICK))).outcome == "completed"


# B3, B4: what a trial leaves on its device.

DAEMON = QUICK + DAEMONIZE + "time.sleep(0.2)\n"


NO_CGROUP = "from capsule.host import attempt_tree\nattempt_tree.cgroup.create = lambda name: None\n"


@pytest.mark.parametrize("changes", ["", NO_CGROUP], ids=["any", "without"])
def test_a_grandchild_that_keeps_the_device_is_charged_until_it_is_gone(
    gpu: Bench, machine: Machine, changes: str
) -> None:
    """By its cgroup where one can be had, and by the tree of processes where none can."""
    observer = Observer(machine)
    attempt = run(gpu, protocol(DAEMON, kill_grace_seconds="0.3"), changes)
    used_ms = observer.used_ms()
    assert end(attempt).outcome == "leaked_descendants"
    assert "outlived the trial: pid" in end(attempt).evidence
    assert attempt.exit is not None
    assert (attempt.exit.exit_code, end(attempt).rows) == (0, 1)
    assert emptied(gpu, attempt) == {"killed": 1, "level": "subreaper" if changes or not possible() else "cgroup"}
    assert end(attempt).charge.debited_ms >= used_ms > 1_000
    assert is_clean(gpu, attempt)
    assert read_holder(lease_path(gpu.leases, GPU)) is None
    assert end(attempt).exclusivity == "exclusive"


def test_memory_that_stays_beyond_the_grace_is_charged_to_the_grace_and_the_device_quarantined(
    gpu: Bench, machine: Machine
) -> None:
    """And readmitted by mistake it is refused until it is back at its baseline."""
    machine.scenario(GPU, keeps_memory_ms=3_000)
    wanted = protocol(QUICK, release_grace_seconds="0.5")
    attempt = run(gpu, wanted)
    assert end(attempt).charge.debited_ms >= 500
    assert f"the device is not clean: {GPU}: {IDLE_BYTES + 900 * MIB} bytes in use" in end(attempt).evidence
    assert not is_clean(gpu, attempt)
    barred = quarantined(gpu.leases, GPU)
    assert barred is not None
    assert (barred.attempt, "not clean after its last attempt" in barred.words) == (attempt.id, True)
    assert refused(gpu, wanted)[0] == "quarantined"
    machine.scenario(GPU)
    assert refused(gpu, wanted)[0] == "quarantined", "memory that comes back later lifts nothing"
    machine.scenario(GPU, keeps_memory_ms=10_000)
    assert readmit(gpu.leases, GPU)
    reason, words = refused(gpu, wanted)
    assert (reason, f"attempt {attempt.id} of 0001-x left it so" in words) == ("device_unclean", True)
    machine.scenario(GPU)
    fake = FakeBackend(machine.folder)
    eventually(lambda: fake.unclean(GPU, {"memory_used_bytes": IDLE_BYTES}) is None)
    assert end(run(gpu, wanted)).outcome == "completed"
    assert read_holder(lease_path(gpu.leases, GPU)) is None


@pytest.mark.parametrize("same", [True, False])
def test_how_a_device_looked_before_a_new_boot_is_no_measure(gpu: Bench, same: bool) -> None:
    """Another driver may need more memory; what a crash left in the lease's file would bar the device for ever."""
    holder = Holder(
        protocol="0002-y", attempt="a000007", pid=1, since="then", boot_id=read_boot_id() if same else "another",
        token="t", baseline={f"{GPU}.memory_used_bytes": IDLE_BYTES - 100 * MIB, f"{GPU}.driver": "older"},
    )  # fmt: skip
    lease = take(gpu.leases, [GPU], holder)
    lease.release()
    if same:
        reason, words = refused(gpu, protocol(QUICK))
        assert (reason, "attempt a000007 of 0002-y left it so" in words) == ("device_unclean", True)
    else:
        assert end(run(gpu, protocol(QUICK))).outcome == "completed"


def test_a_device_that_a_stranger_keeps_in_use_is_not_clean_and_not_quarantined(gpu: Bench, machine: Machine) -> None:
    """Its memory has a reason that can be seen; it is lent again once it is back at its baseline."""
    machine.scenario(GPU, keeps_memory_ms=3_000, foreign=[{"pid": 4242, "from_ms": 700}])
    first, next_one = (protocol(text, release_grace_seconds="0.5") for text in (USE + "time.sleep(1.1)\n", QUICK))
    attempt = run(gpu, first)
    assert not is_clean(gpu, attempt)
    assert quarantined(gpu.leases, GPU) is None
    assert refused(gpu, next_one)[0] in ("foreign_process", "device_unclean")
    machine.scenario(GPU)
    assert end(run(gpu, next_one)).outcome == "completed"


def test_a_device_that_is_not_clean_when_an_attempt_is_reconciled_is_quarantined(gpu: Bench, machine: Machine) -> None:
    machine.scenario(GPU, keeps_memory_ms=60_000)
    order = gpu.order(protocol(USE + "time.sleep(60)", release_grace_seconds="0.5", kill_grace_seconds="0.1"))
    with changed(order, "") as process:
        eventually(lambda: "spawned" in gpu.names(order.attempt) and list((machine.folder / GPU).glob("allocations/*")))
        process.kill()
        process.wait()
        (finding,) = reconcile(gpu.ledger, gpu.attempts, gpu.leases)
    assert finding.state == "reconciled"
    barred = quarantined(gpu.leases, GPU)
    assert barred is not None
    assert (barred.attempt, "not clean after its last attempt" in barred.words) == (order.attempt, True)


# C4: somebody comes while it runs.


def test_a_stranger_from_the_second_second_to_the_third_is_in_the_samples_and_the_label(
    gpu: Bench, machine: Machine
) -> None:
    machine.scenario(GPU, foreign=[{"pid": 4242, "from_ms": 2_000, "to_ms": 3_000}])
    attempt = run(gpu, protocol(USE + "time.sleep(3.4)\nrecord()\n"))
    found = samples(gpu, attempt.id)
    verdicts = [sample.exclusivity for sample in found]
    assert (verdicts[0], verdicts[-1]) == ("exclusive", "exclusive")
    assert {sample.foreign for sample in found if sample.exclusivity == "contaminated"} == {(4242,)}
    assert 2 <= verdicts.count("contaminated") <= 3
    assert attempt.intent is not None
    since = [s.at_ms - attempt.intent.leased.boottime_ms for s in found if s.foreign]
    assert since[0] >= 1_500
    assert since[-1] <= 3_100
    assert (end(attempt).outcome, end(attempt).exclusivity) == ("completed", "contaminated")
    assert f"contaminated: {GPU} is in use by pid 4242 (in " in end(attempt).evidence


def test_where_exclusivity_is_required_a_stranger_takes_the_result(gpu: Bench, machine: Machine) -> None:
    machine.scenario(GPU, foreign=[{"pid": 4242, "from_ms": 600, "to_ms": 1_200}])
    attempt = run(gpu, protocol(A_WHILE, exclusivity="required"))
    assert (end(attempt).outcome, end(attempt).exclusivity, end(attempt).rows) == ("contaminated", "contaminated", 1)
    assert attempt.exit is not None
    assert attempt.exit.cause == "exited"
    assert end(attempt).charge.debited_ms >= 1_300


def test_a_stranger_stops_a_trial_whose_protocol_says_so(gpu: Bench, machine: Machine) -> None:
    machine.scenario(GPU, foreign=[{"pid": 4242, "from_ms": 1_000, "to_ms": 2_000}])
    attempt = run(gpu, protocol(STUBBORN, on_contamination="stop"))
    assert (end(attempt).outcome, end(attempt).exclusivity) == ("contaminated", "contaminated")
    names = gpu.names(attempt.id)
    assert names.index("stopping") < names.index("exit")
    assert attempt.exit is not None
    assert (attempt.exit.cause, attempt.exit.signal) == ("contaminated", signal.SIGKILL)
    assert end(attempt).charge.debited_ms < 5_000


# D1, D2: out of memory.

STAND_IN = """
from capsule.host import attempt_tree
from capsule.host.cgroup import Cgroup
attempt_tree.cgroup.create = lambda name: Cgroup(Path({folder!r}))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files of a cgroup: nothing but what a test writes into them happens there."""
    made = tmp_path / "cgroup"
    made.mkdir()
    (made / "cgroup.procs").write_text("")
    (made / "cgroup.kill").write_text("")
    (made / "pids.max").write_text("max\n")
    (made / "pids.events").write_text("max 0\n")
    (made / "memory.events").write_text("low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\n")
    return made


def test_a_kill_by_the_cgroups_memory_limit_is_told_from_others(gpu: Bench, machine: Machine, folder: Path) -> None:
    source = USE + (
        f"open({str(folder / 'memory.events')!r}, 'w').write('max 9\\noom 1\\noom_kill 1\\n')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    observer = Observer(machine)
    attempt = run(gpu, protocol(source), STAND_IN.format(folder=str(folder)))
    assert end(attempt).outcome == "oom_cgroup"
    assert "its cgroup ran out of memory and 1 processes were killed" in end(attempt).evidence
    assert end(attempt).charge.debited_ms >= observer.used_ms()
    assert is_clean(gpu, attempt)


def test_a_kill_in_a_cgroup_that_counts_none_is_nobodys(gpu: Bench, folder: Path) -> None:
    attempt = run(gpu, protocol(USE + "os.kill(os.getpid(), 9)"), STAND_IN.format(folder=str(folder)))
    assert end(attempt).outcome == "sigkill_unattributed"


LOG = """
import functools
from capsule.host import oom
oom.find = functools.partial(oom.find, path=Path({log!r}), namespace=Path({namespace!r}))
"""


@pytest.mark.parametrize(
    ("words", "outcome"),
    [
        ("Out of memory: Killed process %d (python) total-vm:1kB", "oom_host"),
        ("Memory cgroup out of memory: Killed process %d (python) total-vm:1kB", "oom_cgroup"),
        ("Out of memory: Killed process 1%d (other) total-vm:1kB", "sigkill_unattributed"),
    ],
)
def test_a_kill_by_the_host_needs_the_kernels_word_for_it(gpu: Bench, tmp_path: Path, words: str, outcome: str) -> None:
    """Also of a trial that did not live until the first look at its tree."""
    (tmp_path / "kmsg").write_text("")
    (tmp_path / "ns").symlink_to("pid:[4026531836]")
    source = USE + (
        f"now = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000\n"
        f"line = '3,1001,%d,-;{words}\\n' % (now, os.getpid())\n"
        f"open({str(tmp_path / 'kmsg')!r}, 'w').write(line)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    changes = LOG.format(log=str(tmp_path / "kmsg"), namespace=str(tmp_path / "ns"))
    attempt = run(gpu, protocol(source), changes)
    assert end(attempt).outcome == outcome
    assert ("kernel log at" in end(attempt).evidence) == (outcome != "sigkill_unattributed")


# D7, D8: trees that do not end, and trees that grow.

UNKILLABLE = """
from capsule.host import attempt_run, attempt_tree, process, watchdog
real = process.send
def send(item, number):
    return Path(DELIVERED).exists() and real(item, number)
process.send = attempt_tree.send = watchdog.send = send
attempt_tree.cgroup.create = lambda name: None
attempt_run.UNKILLABLE_MS = 500
"""


def test_a_process_that_no_signal_ends_is_charged_for_as_long_as_it_lives_and_bars_the_device(
    gpu: Bench, machine: Machine, tmp_path: Path
) -> None:
    """A process that hangs in the kernel is stood in for by one that no signal is delivered to for a while."""
    delivered = tmp_path / "delivered"
    wanted = protocol(
        USE + "time.sleep(60)", wall_limit_seconds="1", kill_grace_seconds="0.2", release_grace_seconds="0.1"
    )
    order = gpu.order(wanted)
    observer = Observer(machine)
    with changed(order, f"DELIVERED = {str(delivered)!r}\n{UNKILLABLE}") as process:
        eventually(lambda: "stopping" in gpu.names(order.attempt))
        reason, words = refused(gpu, wanted)
        assert (reason, f"held by attempt {order.attempt} of 0001-x" in words) == ("busy", True)
        eventually(lambda: quarantined(gpu.leases, GPU))
        delivered.touch()
        assert process.wait(30) == launch.SETTLED
    attempt = gpu.account().attempts[order.attempt]
    hold(gpu, wanted)
    assert end(attempt).outcome == "wall_limit"
    assert end(attempt).charge.debited_ms >= observer.used_ms() > 500
    assert end(attempt).overrun_ms == end(attempt).charge.debited_ms - 1_300 > 0
    assert "heartbeat" in gpu.names(order.attempt)
    reason, words = refused(gpu, wanted)
    assert (reason, "could not be killed for 0.5 s" in words) == ("quarantined", True)


STORM = (
    STUBBORN.removesuffix("time.sleep(60)\n")
    + "for _ in range(150):\n    if os.fork() == 0:\n        time.sleep(60)\ntime.sleep(60)\n"
)


def test_a_fork_storm_is_ended_whole_within_the_grace(gpu: Bench) -> None:
    attempt = run(gpu, protocol(STORM, processes_max=20, kill_grace_seconds="10"), NO_CGROUP)
    assert end(attempt).outcome == "fork_storm"
    assert "processes at once, 20 allowed" in end(attempt).evidence
    assert end(attempt).charge.debited_ms < 9_000, "it was killed at once"
    assert attempt.exit is not None
    assert attempt.exit.cause == "fork_storm"
    assert emptied(gpu, attempt)["level"] == "subreaper"
    assert is_clean(gpu, attempt)


def test_forks_that_a_cgroup_denied_are_a_storm_too(gpu: Bench, folder: Path) -> None:
    source = USE + f"open({str(folder / 'pids.events')!r}, 'w').write('max 17\\n')\ntime.sleep(60)\n"
    attempt = run(gpu, protocol(source, processes_max=30), STAND_IN.format(folder=str(folder)))
    assert (folder / "pids.max").read_text().strip() == "480"
    assert end(attempt).outcome == "fork_storm"
    assert "its cgroup refused 17 new tasks" in end(attempt).evidence
    assert (emptied(gpu, attempt)["level"], (folder / "cgroup.kill").read_text()) == ("cgroup", "1")


# D9, D10, D13: clocks that jump.

JUMP = """
from capsule.host import clock
from capsule.host.devices import base
real, born = clock.read_clock, time.monotonic()
def jumped():
    now = real()
    if time.monotonic() < born + 0.8:
        return now
    wall = clock.realtime_text(clock.realtime_ms(now.realtime) + {wall_ms})
    return now.model_copy(update=dict(realtime=wall, boottime_ms=now.boottime_ms + {boottime_ms}))
supervisor.Supervisor.__init__.__defaults__ = (jumped,)
base.read_clock = jumped
"""


def test_time_asleep_is_charged_and_named(gpu: Bench) -> None:
    attempt = run(gpu, protocol(A_WHILE, wall_limit_seconds=100), JUMP.format(wall_ms=55_000, boottime_ms=55_000))
    assert end(attempt).outcome == "completed"
    assert end(attempt).charge.debited_ms >= 56_300
    assert 54_990 <= end(attempt).suspended_ms <= 55_010
    assert "clock_step" not in end(attempt).evidence
    assert end(attempt).exclusivity == "unverifiable"
    assert telemetry(attempt).elapsed_ms - telemetry(attempt).observed_ms >= 55_000


def test_time_asleep_beyond_the_wall_limit_ends_the_trial(gpu: Bench) -> None:
    wanted = protocol(USE + "time.sleep(60)", wall_limit_seconds=30)
    attempt = run(gpu, wanted, JUMP.format(wall_ms=55_000, boottime_ms=55_000))
    assert end(attempt).outcome == "wall_limit"
    assert end(attempt).overrun_ms == end(attempt).charge.debited_ms - 31_500 > 0


@pytest.mark.parametrize("wall_ms", [3_600_000, -3_600_000, 30 * 86_400_000])
def test_a_step_of_the_wall_clock_moves_no_charge_and_is_named(gpu: Bench, wall_ms: int) -> None:
    """The clocks were set, or the machine was put back from a snapshot or moved to another host under one boot id."""
    began = time.monotonic()
    attempt = run(gpu, protocol(A_WHILE), JUMP.format(wall_ms=wall_ms, boottime_ms=0))
    assert end(attempt).outcome == "completed"
    assert 1_300 <= end(attempt).charge.debited_ms <= (time.monotonic() - began) * 1000
    assert end(attempt).suspended_ms == 0
    assert f"clock_step: the wall clock moved by {wall_ms / 1000:+.1f} s" in end(attempt).evidence
    assert end(attempt).exclusivity == "exclusive"


# E1: the trial's own errors on the device.


def test_a_device_out_of_memory_and_an_xid_are_hints_and_no_excuse(gpu: Bench, machine: Machine) -> None:
    machine.scenario(GPU, sample=[{"xid": 31, "from_ms": 300}])
    source = USE + "time.sleep(0.8)\nsys.exit('torch.OutOfMemoryError: CUDA out of memory. Tried to allocate')\n"
    attempt = run(gpu, protocol(source))
    assert end(attempt).outcome == "exit_nonzero"
    assert end(attempt).outcome not in INTERRUPTED
    assert "hint: its output says that device memory ran out (device_oom)" in end(attempt).evidence
    assert f"{GPU}: the driver reported Xid 31" in end(attempt).evidence
    assert end(attempt).charge.debited_ms >= 800
    assert quarantined(gpu.leases, GPU) is None


# E2, E3: a device that is not to be trusted.


@pytest.mark.parametrize(("counter", "moved"), [("ecc_uncorrected", 1), ("remapped_rows", 2)])
def test_a_device_whose_memory_failed_is_suspect_and_barred_until_it_is_readmitted(
    gpu: Bench, machine: Machine, counter: str, moved: int
) -> None:
    machine.scenario(GPU, sample=[{counter: moved, "from_ms": 700}])
    wanted = protocol(A_WHILE)
    attempt = run(gpu, wanted)
    words = f"{counter} moved from 0 to {moved}"
    assert (end(attempt).outcome, end(attempt).rows) == ("device_suspect", 1)
    assert f"{GPU}: {words}" in end(attempt).evidence
    barred = quarantined(gpu.leases, GPU)
    assert barred is not None
    assert (barred.words, barred.attempt, barred.protocol) == (words, attempt.id, "0001-x")
    machine.scenario(GPU)
    assert refused(gpu, wanted) == ("quarantined", f"device {GPU} is quarantined: {words}")
    assert readmit(gpu.leases, GPU)
    assert end(run(gpu, protocol(QUICK))).outcome == "completed"


def test_errors_that_the_memory_made_good_are_recorded_only(gpu: Bench, machine: Machine) -> None:
    machine.scenario(GPU, sample=[{"ecc_corrected": 7, "from_ms": 700}])
    attempt = run(gpu, protocol(A_WHILE))
    assert (end(attempt).outcome, end(attempt).exclusivity) == ("completed", "exclusive")
    assert {sample.ecc_corrected for sample in samples(gpu, attempt.id)} == {0, 7}
    assert quarantined(gpu.leases, GPU) is None


def test_a_device_that_is_lost_stops_the_trial_and_is_barred(gpu: Bench, machine: Machine) -> None:
    machine.scenario(GPU, lost_from_ms=900)
    wanted = protocol(STUBBORN)
    observer = Observer(machine)
    attempt = run(gpu, wanted)
    assert end(attempt).outcome == "device_lost"
    assert f"{GPU}: GPU is lost" in end(attempt).evidence
    assert attempt.exit is not None
    assert attempt.exit.cause == "device_lost"
    names = gpu.names(attempt.id)
    assert names.index("stopping") < names.index("exit")
    assert observer.used_ms() <= end(attempt).charge.debited_ms < 6_000
    assert not is_clean(gpu, attempt)
    assert end(attempt).exclusivity == "unverifiable"
    machine.scenario(GPU)
    reason, words = refused(gpu, wanted)
    assert (reason, "lost: " in words) == ("quarantined", True)


# E4: a driver that hangs.


@pytest.mark.parametrize("exclusivity", ["required", "best_effort"])
def test_a_run_goes_on_beside_a_driver_that_hangs_and_is_unverifiable(
    gpu: Bench, machine: Machine, exclusivity: str
) -> None:
    machine.scenario(GPU, delays={"sample": {"ms": 60_000, "from_ms": 700}})
    wanted = protocol(A_WHILE, exclusivity=exclusivity)
    began = time.monotonic()
    attempt = run(gpu, wanted)
    took_ms = (time.monotonic() - began) * 1000
    assert end(attempt).outcome == ("completed" if exclusivity == "best_effort" else "unverifiable")
    assert (end(attempt).exclusivity, end(attempt).rows) == ("unverifiable", 1)
    seen = telemetry(attempt)
    assert 0 < seen.observed_ms < seen.elapsed_ms
    assert f"{seen.elapsed_ms - seen.observed_ms} of {seen.elapsed_ms} ms were not observed" == seen.evidence
    assert not is_clean(gpu, attempt)
    assert "the device is not clean: the driver did not answer within" in end(attempt).evidence
    assert 2_300 <= end(attempt).charge.debited_ms <= took_ms
    assert end(attempt).charge.debited_ms < 8_000
    machine.scenario(GPU)
    assert end(run(gpu, protocol(QUICK, exclusivity=exclusivity))).outcome == "completed"


def test_a_driver_that_hung_for_a_while_costs_coverage_only(gpu: Bench, machine: Machine) -> None:
    machine.scenario(GPU, delays={"sample": {"ms": 2_000, "from_ms": 700, "to_ms": 1_300}})
    attempt = run(gpu, protocol(USE + "time.sleep(3)\nrecord()\n"))
    assert (end(attempt).outcome, end(attempt).exclusivity) == ("completed", "unverifiable")
    assert telemetry(attempt).elapsed_ms - telemetry(attempt).observed_ms >= 1_900
    assert is_clean(gpu, attempt)


@pytest.mark.parametrize("stopped", [False, True])
def test_wall_limit_and_stop_hold_while_the_driver_hangs(gpu: Bench, machine: Machine, stopped: bool) -> None:
    machine.scenario(GPU, delays={"sample": {"ms": 60_000, "from_ms": 300}})
    wanted = protocol(STUBBORN, wall_limit_seconds=20 if stopped else "1.5")
    if stopped:
        supervision = gpu.start(wanted)
        eventually(lambda: "spawned" in gpu.names(supervision.attempt))
        time.sleep(0.5)
        supervision.stop()
        assert supervision.wait(20) == launch.SETTLED
        attempt = gpu.account().attempts[supervision.attempt]
        hold(gpu, wanted)
    else:
        attempt = run(gpu, wanted)
    assert end(attempt).outcome == ("user" if stopped else "wall_limit")
    (stopping,) = [event for event in gpu.events(attempt.id) if event.name == "stopping"]
    (exited,) = [event for event in gpu.events(attempt.id) if event.name == "exit"]
    assert exited.at.boottime_ms - stopping.at.boottime_ms < 500 + 1_500


@pytest.mark.parametrize("call", ["occupancy", "baseline", "sample"])
def test_a_driver_that_hangs_before_the_start_is_refused_in_time(gpu: Bench, machine: Machine, call: str) -> None:
    machine.scenario(GPU, delays={call: 60_000})
    began = time.monotonic()
    reason, words = refused(gpu, protocol(QUICK), "supervisor.DRIVER_SECONDS = 0.5")
    assert time.monotonic() - began < 10
    assert (reason, words) == ("machine", "the driver did not answer within 0.5 s")
    machine.scenario(GPU)
    assert end(run(gpu, protocol(QUICK))).outcome == "completed"


def test_a_driver_may_take_half_a_minute_before_the_start_and_no_more() -> None:
    from capsule.host import supervisor

    assert supervisor.DRIVER_SECONDS == 30


def test_a_driver_that_hangs_when_asked_what_a_trial_sees_delays_it_within_bounds(gpu: Bench, machine: Machine) -> None:
    machine.scenario("*", delays={"visible": 60_000})
    attempt = run(gpu, protocol(QUICK), "from capsule.host import sampler\nsampler.VISIBLE_SECONDS = 0.5")
    assert end(attempt).outcome == "completed"
    assert end(attempt).charge.debited_ms >= 500


# E5, E6, E7: what a device did meanwhile.


@pytest.mark.parametrize(
    ("reading", "why"),
    [
        ({"energy_mj": 5}, "the counter fell"),
        ({"driver": "fake 2"}, "the driver changed: fake, fake 2"),
    ],
)
def test_energy_is_null_where_its_counter_cannot_be_believed(
    gpu: Bench, machine: Machine, reading: dict[str, Any], why: str
) -> None:
    machine.scenario(GPU, sample=[{**reading, "from_ms": 600}])
    attempt = run(gpu, protocol(A_WHILE))
    assert end(attempt).outcome in COMPLETED
    assert (telemetry(attempt).energy_mj, telemetry(attempt).energy_missing) == (None, why)


def test_energy_is_read_at_both_ends_and_seldom_between(gpu: Bench) -> None:
    attempt = run(gpu, protocol(A_WHILE))
    known = [item.energy_mj is not None for item in samples(gpu, attempt.id)]
    assert (known[0], known[-1], False in known) == (True, True, True)
    assert (telemetry(attempt).energy_mj or 0) > 0


def test_a_reading_that_the_driver_does_not_give_is_null_with_its_reason(gpu: Bench, machine: Machine) -> None:
    machine.scenario(GPU, sample=[{"energy_mj": None}])
    attempt = run(gpu, protocol(QUICK))
    assert (telemetry(attempt).energy_mj, telemetry(attempt).energy_missing) == (None, "the scenario hides it")


def test_throttling_is_flagged_with_its_share_of_time_and_unknown_bits_are_kept(gpu: Bench, machine: Machine) -> None:
    machine.scenario(GPU, sample=[{"throttle": 0x4 | 0x800, "from_ms": 700, "to_ms": 1_800}])
    attempt = run(gpu, protocol(USE + "time.sleep(2.5)\nrecord()\n"))
    assert (end(attempt).outcome, end(attempt).exclusivity) == ("completed", "exclusive")
    throttled = telemetry(attempt).throttled_ms
    assert set(throttled) == {"sw_power_cap", "bit_0x800"}
    assert 900 <= throttled["sw_power_cap"] == throttled["bit_0x800"] <= 1_700
    assert {sample.throttle for sample in samples(gpu, attempt.id)} == {0, 0x804}


def test_a_layout_that_others_changed_takes_the_result_and_bars_nothing(gpu: Bench, machine: Machine) -> None:
    machine.scenario(GPU, sample=[{"layout": "mig:MIG-1,MIG-2", "from_ms": 700}])
    attempt = run(gpu, protocol(A_WHILE))
    assert (end(attempt).outcome, end(attempt).rows) == ("config_changed", 1)
    assert f"{GPU}: the layout changed from whole to mig:MIG-1,MIG-2" in end(attempt).evidence
    assert quarantined(gpu.leases, GPU) is None
    assert milliseconds("1") <= end(attempt).charge.debited_ms


# Back to back.


def test_of_two_attempts_back_to_back_both_are_exclusive(gpu: Bench, machine: Machine) -> None:
    """What the first one's utilization leaves is waited for, and samples are taken meanwhile."""
    machine.scenario(GPU, keeps_utilization_ms=1_000)
    wanted = protocol(USE + "time.sleep(0.8)\nrecord()\n", exclusivity="required")
    for attempt in (run(gpu, wanted), run(gpu, wanted)):
        assert (end(attempt).outcome, end(attempt).exclusivity) == ("completed", "exclusive")
        assert telemetry(attempt).observed_ms == telemetry(attempt).elapsed_ms


def test_time_in_which_a_device_settles_is_observed_however_long(gpu: Bench, machine: Machine) -> None:
    machine.scenario(GPU, sample=[{"utilization_percent": 30, "to_ms": 2_500}])
    attempt = run(
        gpu, protocol(QUICK, exclusivity="required"), "from capsule.host import preflight\npreflight.SETTLE_SECONDS = 6"
    )
    found = samples(gpu, attempt.id)
    assert (end(attempt).outcome, end(attempt).exclusivity) == ("completed", "exclusive")
    assert end(attempt).charge.debited_ms >= 2_000
    left = f"{GPU} has 30 % utilization and the driver lists no process, which it had left before anything was started"
    assert (found[0].words, found[0].utilization_percent) == (left, 30)


def test_utilization_that_does_not_settle_labels_all_of_the_attempt(gpu: Bench, machine: Machine) -> None:
    machine.scenario(GPU, sample=[{"utilization_percent": 30}])
    attempt = run(gpu, protocol(QUICK), "from capsule.host import preflight\npreflight.SETTLE_SECONDS = 0.6")
    assert (end(attempt).outcome, end(attempt).exclusivity) == ("completed", "unverifiable")
    assert "had left" not in "".join(sample.words for sample in samples(gpu, attempt.id))


def test_time_in_which_a_driver_says_what_a_trial_sees_is_observed(gpu: Bench, machine: Machine) -> None:
    machine.scenario("*", delays={"visible": 2_000})
    attempt = run(gpu, protocol(QUICK, exclusivity="required"))
    assert (end(attempt).outcome, end(attempt).exclusivity) == ("completed", "exclusive")
    assert end(attempt).charge.debited_ms >= 2_000


def test_a_driver_that_is_slow_to_open_is_not_charged_and_one_that_hangs_refused(gpu: Bench, machine: Machine) -> None:
    machine.scenario("*", delays={"devices": 700})
    attempt = run(gpu, protocol(QUICK))
    assert attempt.first is not None
    assert attempt.intent is not None
    assert attempt.intent.leased.boottime_ms - attempt.first.boottime_ms >= 700, "the lease comes after the opening"
    machine.scenario("*", delays={"devices": 60_000})
    reason, words = refused(gpu, protocol(QUICK), "supervisor.DRIVER_SECONDS = 0.5")
    assert (reason, words) == ("machine", "the driver did not answer within 0.5 s")

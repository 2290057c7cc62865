"""Attempts as jobs of a real Slurm: what its commands say, and rows F1 to F6 of the fault table."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from capsule.core.attempt import Clock, Correction, Settled
from capsule.core.errors import MachineError, RefusedError
from capsule.host import launch
from capsule.host.clock import read_clock, realtime_ms, realtime_text
from capsule.host.process import is_alive, read_stat
from capsule.host.slurm.commands import NoAnswerError, inspect_cluster, jobs_named
from capsule.host.slurm.job import SlurmSupervision, accounting, cancel, read_engine, rehearse, submit
from capsule.host.slurm.settle import Standing, account, look, unaccounted
from capsule.host.traces import read_traces
from tests.host.conftest import Bench, eventually, protocol_of
from tests.slurm.cluster import Cluster

SLEEPER = ["python", "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"]


def later(seconds: float) -> Callable[[], Clock]:
    """Return a clock that is ahead."""

    def read() -> Clock:
        now = read_clock()
        ahead = {"boottime_ms": now.boottime_ms + round(seconds * 1000)}
        return now.model_copy(
            update={**ahead, "realtime": realtime_text(realtime_ms(now.realtime) + round(seconds * 1000))}
        )

    return read


def begin(bench: Bench, command: list[str], arguments: list[str] | None = None, **limits: Any) -> SlurmSupervision:
    """Submit an attempt of one command."""
    order = bench.order(protocol_of(command=command, **limits))
    supervision = submit(order, inspect_cluster(), arguments or [])
    supervision.ask_seconds = 0.3
    return supervision


def running(bench: Bench, **limits: Any) -> tuple[SlurmSupervision, int]:
    """Submit an attempt that sleeps and wait for its trial; returns it with the trial's pid."""
    supervision = begin(bench, SLEEPER, **limits)
    out = bench.attempts / supervision.attempt / "stdout"
    pid = int(eventually(lambda: out.exists() and out.read_text(), 40))
    eventually(lambda: "spawned" in bench.names(supervision.attempt))
    return supervision, pid


def gone(pid: int) -> bool:
    """Whether a process has ended, perhaps without anybody who has asked how."""
    found = read_stat(pid)
    return found is None or not found.alive


def stand(bench: Bench, name: str, **more: Any) -> Standing:
    attempt = bench.account().attempts[name]
    return look(attempt, bench.attempts / name, **more)


def over(bench: Bench, name: str) -> Standing:
    """Wait until an open attempt's job is over and the accounting has said so."""

    def ask() -> Standing | None:
        found = stand(bench, name, clock=later(60))
        return found if found.state == "over" else None

    found = eventually(ask, 60)
    assert isinstance(found, Standing)
    return found


def accounted(bench: Bench, name: str) -> list[Correction]:
    """Compare with the accounting once that is complete, hold that a second look writes nothing; the corrections."""
    folder = bench.attempts / name

    def ask() -> bool:
        account(bench.ledger, bench.account().attempts[name], folder)
        return not unaccounted(bench.account().attempts[name], folder)

    eventually(ask, 40)
    before = bench.ledger.path.read_bytes()
    (folder / "accounting.json").unlink()
    assert account(bench.ledger, bench.account().attempts[name], folder) is None
    assert bench.ledger.path.read_bytes() == before
    return [event.data for event in bench.events(name) if isinstance(event.data, Correction)]


def rows_ms(bench: Bench, name: str) -> list[int]:
    engine = read_engine(bench.attempts / name)
    assert engine is not None
    return [row.elapsed_seconds * 1000 for row in accounting(engine)]


def test_an_attempt_runs_as_a_job_and_is_charged_by_both_witnesses(slurm: Cluster, bench: Bench) -> None:
    """Recorded before it was let go; settled by its own supervisor; debited at least what either witness says."""
    source = "import time; time.sleep(2); print('done')"
    supervision = begin(bench, ["python", "-c", source])
    engine = read_engine(bench.attempts / supervision.attempt)
    assert engine is not None
    assert (engine.cluster, engine.released) == ("capsuletest", True)
    assert engine.job is not None
    assert supervision.wait(60) == launch.SETTLED, bench.log(supervision.attempt)
    end = bench.account().attempts[supervision.attempt].end
    assert isinstance(end, Settled)
    assert (bench.attempts / supervision.attempt / "stdout").read_text() == "done\n"
    corrections = accounted(bench, supervision.attempt)
    held = bench.account().attempts[supervision.attempt].held_ms
    assert held == max(end.charge.debited_ms, *rows_ms(bench, supervision.attempt))
    assert held - end.charge.debited_ms == sum(item.debited_ms for item in corrections)


def test_a_job_that_waits_or_runs_is_alive_though_no_process_here_looks_after_it(slurm: Cluster, bench: Bench) -> None:
    waiting = begin(bench, SLEEPER, ["--begin=now+1hour"])
    assert stand(bench, waiting.attempt).state == "queued"
    assert "PENDING" in stand(bench, waiting.attempt).words
    going, _ = running(bench)
    assert stand(bench, going.attempt).state == "running"
    assert (waiting.poll(), going.poll()) == (None, None)


def test_asked_to_stop_the_supervisor_writes_why_first(slurm: Cluster, bench: Bench) -> None:
    supervision, pid = running(bench)
    supervision.stop(signal.SIGTERM)
    assert supervision.wait(40) == launch.SETTLED
    assert bench.names(supervision.attempt)[-5:] == ["stopping", "exit", "tree_empty", "device_clean", "settled"]
    end = bench.account().attempts[supervision.attempt].end
    assert end is not None
    assert (end.outcome, "SIGTERM" in end.evidence) == ("user", True)
    assert gone(pid)
    accounted(bench, supervision.attempt)


def test_a_waiting_job_that_is_stopped_never_starts(slurm: Cluster, bench: Bench) -> None:
    supervision = begin(bench, SLEEPER, ["--begin=now+1hour"])
    supervision.stop()
    supervision.poll()
    found = over(bench, supervision.attempt)
    assert found.ending is not None
    assert (found.ending.outcome, found.ending.charge.debited_ms) == ("never_started", 0)
    assert supervision.wait(20) is not None


def test_a_killed_supervisor_takes_its_trial_with_it(slurm: Cluster, bench: Bench) -> None:
    """The batch step ends with its process, and Slurm then kills all that is left in the job's cgroup."""
    supervision, pid = running(bench)
    whereabouts = read_traces(bench.attempts / supervision.attempt).whereabouts
    assert whereabouts is not None
    os.kill(whereabouts.supervisor.pid, signal.SIGKILL)
    found = over(bench, supervision.attempt)
    assert found.ending is not None
    assert (found.ending.outcome, gone(pid)) == ("lost", True)
    assert found.ending.charge.debited_ms >= max(rows_ms(bench, supervision.attempt))


# F1.

LOSING = '#!/bin/sh\n/usr/bin/sbatch "$@" >/dev/null\nkill -9 $$\n'


def test_f1_a_job_whose_submission_was_not_answered_is_found_and_not_submitted_again(
    slurm: Cluster, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sbatch").write_text(LOSING)
    (tmp_path / "bin/sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{slurm.environment['PATH']}")
    order = bench.order(protocol_of(command=["true"]))
    supervision = submit(order, inspect_cluster())
    supervision.ask_seconds = 0.3
    assert len(jobs_named(supervision.engine.name)) == 1
    assert supervision.wait(60) == launch.SETTLED
    again = submit(order, inspect_cluster())
    assert again.engine.job == supervision.engine.job
    assert len({job.id for job in jobs_named(supervision.engine.name)}) == 1


def test_f1_a_job_that_nobody_let_go_is_cancelled_and_costs_nothing(
    slurm: Cluster, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller goes away with the answer, and whoever submitted is gone when it is back."""
    order = bench.order(protocol_of(command=["true"]))
    monkeypatch.setattr("capsule.host.slurm.job.jobs_named", lambda name: ())
    with pytest.raises(MachineError, match="found none"):
        submit(order, inspect_cluster(), found_seconds=0.5)
    monkeypatch.undo()
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, slurm.environment[name])
    assert stand(bench, order.attempt, act=True).state == "queued"  # this process, its launcher, still lives
    (bench.attempts / order.attempt / launch.LAUNCHER).unlink()
    found = eventually(lambda: (f := stand(bench, order.attempt, act=True, clock=later(60))).state == "over" and f, 30)
    assert (found.ending.outcome, found.ending.charge.debited_ms) == ("never_started", 0)
    assert [job.state for job in jobs_named(f"capsule-{order.attempt}-{order.token}")] == ["CANCELLED"]


# F2.


def test_f2_an_attempt_whose_accounting_is_late_stays_open(slurm: Cluster, bench: Bench) -> None:
    supervision, pid = running(bench)
    slurm.kill("slurmdbd")
    whereabouts = read_traces(bench.attempts / supervision.attempt).whereabouts
    assert whereabouts is not None
    os.kill(whereabouts.supervisor.pid, signal.SIGKILL)
    eventually(lambda: gone(pid))
    eventually(lambda: all(job.over for job in jobs_named(supervision.engine.name)), 40)
    assert stand(bench, supervision.attempt, clock=later(3600)).state == "unknown"
    assert supervision.wait(2) is None
    assert bench.account().attempts[supervision.attempt].open
    slurm.start_accounting()
    assert over(bench, supervision.attempt).ending is not None
    assert supervision.wait(40) is not None


def test_f2_a_settled_attempt_waits_for_its_accounting(slurm: Cluster, bench: Bench) -> None:
    supervision = begin(bench, ["true"])
    slurm.kill("slurmdbd")
    assert supervision.wait(60) == launch.SETTLED
    attempt = bench.account().attempts[supervision.attempt]
    with pytest.raises(NoAnswerError):
        eventually(lambda: not account(bench.ledger, attempt, bench.attempts / attempt.id))
    assert unaccounted(attempt, bench.attempts / attempt.id)
    slurm.start_accounting()
    accounted(bench, supervision.attempt)


# F3.


def test_f3_every_start_of_a_requeued_job_is_charged_once(slurm: Cluster, bench: Bench) -> None:
    """`--no-requeue` holds until an administrator overrides it; the second start begins nothing and costs its time."""
    supervision, _ = running(bench)
    job = str(supervision.engine.job)
    time.sleep(2)
    slurm.call("scontrol", "update", f"jobid={job}", "requeue=1")
    slurm.call("scontrol", "requeue", job)
    assert supervision.wait(40) == launch.SETTLED
    end = bench.account().attempts[supervision.attempt].end
    assert end is not None
    assert end.outcome == "user"

    def restarted() -> bool:
        slurm.answers("scontrol", "update", f"jobid={job}", "StartTime=now")
        return all(found.over for found in jobs_named(supervision.engine.name))

    eventually(restarted, 60)
    corrections = accounted(bench, supervision.attempt)
    first, second = rows_ms(bench, supervision.attempt)
    assert second > 0
    assert bench.account().attempts[supervision.attempt].held_ms == max(end.charge.debited_ms, first) + second
    assert "of another start" in corrections[-1].reason
    assert bench.names(supervision.attempt).count("intent") == 1


# F4 and F5.


def test_f4_a_dead_node_is_charged_by_the_larger_witness(slurm: Cluster, bench: Bench) -> None:
    supervision, pid = running(bench)
    time.sleep(7)  # two heartbeats
    slurm.lose_node()
    eventually(lambda: gone(pid))
    assert stand(bench, supervision.attempt).state in ("running", "unknown")  # nobody has noticed
    found = over(bench, supervision.attempt)
    assert found.ending is not None
    beats = [event.data.elapsed_ms for event in bench.events(supervision.attempt) if event.name == "heartbeat"]
    (row_ms,) = rows_ms(bench, supervision.attempt)
    assert found.ending.outcome == "host_crash"
    assert found.ending.charge.lower_ms >= max(beats)
    assert found.ending.charge.debited_ms == max(row_ms, found.ending.charge.lower_ms)
    slurm.start_node()


def test_f5_a_repair_of_a_settled_attempt_lowers_nothing_and_is_written_down(slurm: Cluster, bench: Bench) -> None:
    supervision = begin(bench, ["python", "-c", "import time; time.sleep(3)"])
    assert supervision.wait(60) == launch.SETTLED
    repair(slurm, supervision)
    before = bench.account().attempts[supervision.attempt].held_ms
    (correction,) = accounted(bench, supervision.attempt)
    assert correction.debited_ms == 0
    assert "which stays" in correction.reason
    assert "0 s" in correction.reason
    assert bench.account().attempts[supervision.attempt].held_ms == before > 3_000


def test_f5_a_repair_of_a_lost_attempt_is_no_proof_of_its_end(slurm: Cluster, bench: Bench) -> None:
    supervision, _ = running(bench)
    time.sleep(4)
    whereabouts = read_traces(bench.attempts / supervision.attempt).whereabouts
    assert whereabouts is not None
    os.kill(whereabouts.supervisor.pid, signal.SIGKILL)
    eventually(lambda: not is_alive(whereabouts.supervisor))
    repair(slurm, supervision)
    found = over(bench, supervision.attempt)
    attempt = bench.account().attempts[supervision.attempt]
    assert found.ending is not None
    assert attempt.reserved is not None
    assert found.ending.charge.debited_ms == attempt.reserved.reserved_ms  # an hour ahead, so the whole reservation
    assert 0 < found.ending.charge.lower_ms < found.ending.charge.debited_ms


def repair(slurm: Cluster, supervision: SlurmSupervision) -> None:
    """Let the accounting miss the end of a job that is over and unknown to the controller, and repair that."""
    eventually(lambda: all(job.over for job in jobs_named(supervision.engine.name)), 40)
    (row,) = eventually(lambda: [row for row in accounting(supervision.engine) if row.final], 40)
    slurm.forget_jobs()
    slurm.lose_end(row.id)
    slurm.repair_accounting()
    (row,) = accounting(supervision.engine)
    assert (row.state, row.elapsed_seconds) == ("COMPLETED", 0)


# F6.


def test_f6_a_job_id_that_comes_again_is_not_mistaken(slurm: Cluster, bench: Bench) -> None:
    """Ids count from one again; each attempt keeps its own rows, and neither can cancel the other's job."""
    slurm.forget_jobs()
    first = begin(bench, ["python", "-c", "import time; time.sleep(2)"])
    assert first.wait(60) == launch.SETTLED
    eventually(lambda: all(job.over for job in jobs_named(first.engine.name)), 40)
    eventually(lambda: all(row.final for row in accounting(first.engine)), 40)
    slurm.forget_jobs()
    second, pid = running(bench)
    assert second.engine.job == first.engine.job
    cancel(first.engine)
    time.sleep(1)
    assert not gone(pid)
    accounted(bench, first.attempt)
    assert len(rows_ms(bench, first.attempt)) == len(rows_ms(bench, second.attempt)) == 1
    second.stop()
    assert second.wait(40) == launch.SETTLED
    accounted(bench, second.attempt)
    ids = {row.id for engine in (first.engine, second.engine) for row in accounting(engine)}
    assert len(ids) == 2


# The cluster.


def test_a_cluster_that_loses_processes_is_refused(slurm: Cluster) -> None:
    assert inspect_cluster().name == "capsuletest"
    slurm.kill("slurmd")
    slurm.kill("slurmctld")
    slurm.configure(proctrack="proctrack/linuxproc")
    slurm.start_controller()
    try:
        with pytest.raises(RefusedError, match="linuxproc"):
            rehearse([], 1000)
    finally:
        slurm.kill("slurmctld")
        slurm.configure()


def test_limits_of_the_accounting_are_shown_as_a_backstop(slurm: Cluster) -> None:
    slurm.call("sacctmgr", "-i", "modify", "account", "science", "set", "GrpTRESMins=gres/gpu=100")
    try:
        assert any("GrpTRESMins=gres/gpu=100" in note for note in inspect_cluster().notes)
    finally:
        slurm.call("sacctmgr", "-i", "modify", "account", "science", "set", "GrpTRESMins=gres/gpu=-1")

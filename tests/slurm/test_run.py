"""`capsule run --slurm` and the commands beside it, as people call them, on a real Slurm of one node."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from capsule.host.slurm.answers import Row
from capsule.host.slurm.commands import jobs_named
from capsule.host.slurm.job import accounting, known_engine
from capsule.host.slurm.settle import ACCOUNTED
from tests.host.conftest import eventually
from tests.slurm.cluster import Cluster
from tests.steps.machine import (
    TRIAL,
    at_once_at_most,
    check_no_device_twice,
    events_of,
    make_devices,
    make_gpu_study,
    named,
    start,
)
from tests.study import make_study

LATER = "--sbatch=--begin=now+1hour"
ENDED = "completed"


@dataclass(frozen=True)
class Study:
    """A frozen protocol of two processes, and the commands on it as processes of their own."""

    protocol: Path

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Begin a run."""
        return start("run", self.protocol, "--slurm", "--json", *arguments)

    def call(self, command: str, *arguments: str, code: int = 0) -> dict[str, Any]:
        """Return the object that a command prints."""
        return ended(start(command, self.protocol, "--json", *arguments), code)

    def states(self) -> list[str]:
        """Return the states of all attempts by `status`."""
        return [attempt["state"] for attempt in self.call("status")["attempts"]]

    def held_ms(self, attempt: str) -> int:
        """Return what an attempt takes from the budget."""
        return next(a["held_ms"] for a in self.call("status")["attempts"] if a["attempt"] == attempt)

    def folder(self, attempt: str) -> Path:
        """Return an attempt's folder."""
        return self.protocol.parent / ".capsule" / self.protocol.stem / "attempts" / attempt

    def rows(self, attempt: str) -> tuple[Row, ...]:
        """Return what the accounting has of an attempt."""
        return accounting(known_engine(self.folder(attempt)))

    def job(self, attempt: str = "a000001") -> str:
        """Return the id of an attempt's job, once it was let go."""
        wanted = self.folder(attempt)
        eventually(lambda: (wanted / "engine.json").exists() and known_engine(wanted).released, 40)
        return str(known_engine(wanted).job)

    def running(self, attempt: str = "a000001") -> str:
        """Wait until an attempt's trial runs; returns the id of its job."""
        job = self.job(attempt)
        eventually(lambda: any(event["attempt"] == attempt for event in named(self.protocol, "spawned")), 40)
        return job

    def accounted(self, attempt: str) -> None:
        """Reconcile until the accounting was compared; then the charge is what the larger witness says."""
        eventually(lambda: self.call("reconcile") and (self.folder(attempt) / ACCOUNTED).exists(), 60)
        before = events_of(self.protocol)
        assert self.call("reconcile") == {"attempts": []}
        assert events_of(self.protocol) == before
        assert self.held_ms(attempt) >= max(row.elapsed_seconds * 1000 for row in self.rows(attempt))


def ended(process: subprocess.Popen[str], code: int) -> dict[str, Any]:
    """Wait for a command's end and return its object."""
    out, err = process.communicate(timeout=180)
    assert process.returncode == code, (process.returncode, out, err)
    assert "Traceback" not in err
    value: dict[str, Any] = json.loads(out)
    return value


def study_of(folder: Path, seconds: float = 0.1, **changes: str) -> Study:
    study = Study(make_study(folder, trial=TRIAL.replace("@SECONDS@", str(seconds)), changes=changes))
    study.call("freeze")
    return study


@pytest.fixture
def quick(slurm: Cluster, tmp_path: Path) -> Study:
    """Give a study whose attempts take a second or two."""
    return study_of(tmp_path / "a study, 100%j")


@pytest.fixture
def slow(slurm: Cluster, tmp_path: Path) -> Study:
    """Give a study whose attempts take longer than any test waits."""
    changes = {"wall_limit_seconds = 15": "wall_limit_seconds = 80", "= 40": "= 90", "= 200": "= 400"}
    return study_of(tmp_path / "study", 30, **changes)


def test_a_protocol_runs_as_jobs_and_is_packed_with_what_slurm_says_it_cost(quick: Study) -> None:
    assert ended(quick.start("--dry-run"), 0)["remaining_processes"] == 2
    assert events_of(quick.protocol) == []
    value = ended(quick.start("--sbatch=--mem=200"), 0)
    assert [attempt["outcome"] for attempt in value["attempts"]] == [ENDED, ENDED]
    assert value["held_ms"] == sum(attempt["debited_ms"] for attempt in value["attempts"])
    for attempt in value["attempts"]:
        (row,) = quick.rows(attempt["attempt"])
        assert attempt["debited_ms"] >= row.elapsed_seconds * 1000
        quick.accounted(attempt["attempt"])
    assert quick.call("pack")["outcome"] is not None
    capsule = quick.protocol.with_suffix(".capsule")
    assert ended(start("verify", capsule, "--json"), 0)["integrity"] == "intact"


def test_a_run_whose_shell_was_killed_goes_on_in_the_cluster(slurm: Cluster, quick: Study) -> None:
    """Queued, it is nobody's process here; the next commands say where it is, leave it alone, and go on after it."""
    run = quick.start(LATER)
    job = quick.job()
    assert quick.states() == ["queued"]
    run.kill()
    run.communicate()
    before = events_of(quick.protocol)
    assert quick.states() == ["queued"]
    (found,) = quick.call("reconcile")["attempts"]
    assert (found["state"], f"Slurm job {job}" in found["words"], "PENDING" in found["words"]) == ("queued", True, True)
    error = ended(quick.start(), 4)["error"]
    assert (error["code"], f"Slurm job {job}" in error["message"]) == ("busy", True)
    assert events_of(quick.protocol) == before
    slurm.call("scontrol", "update", f"jobid={job}", "StartTime=now")
    value = ended(quick.start("--wait"), 0)
    assert ([attempt["attempt"] for attempt in value["attempts"]], value["remaining_processes"]) == (["a000002"], 0)
    quick.accounted("a000001")
    assert quick.states() == ["settled", "settled"]


def test_jobs_go_side_by_side_on_devices_with_names(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two pretended devices of this machine, which is the node too; Slurm has two to give as well."""
    names = ("GPU-aaaa", "GPU-bbbb")
    monkeypatch.setenv("CAPSULE_FAKE_DEVICES", str(make_devices(tmp_path / "devices", *names)))
    study = Study(make_gpu_study(tmp_path / "study", seeds=2, seconds=2))
    study.call("freeze")
    value = ended(study.start("--gpu=GPU-aaaa", "--gpu=GPU-bbbb", "--sbatch=--gres=gpu:1"), 0)
    assert sorted(attempt["devices"] for attempt in value["attempts"]) == [["GPU-aaaa"], ["GPU-bbbb"]]
    assert at_once_at_most(study.protocol) == 2
    check_no_device_twice(study.protocol)
    for attempt in value["attempts"]:
        study.accounted(attempt["attempt"])


def test_stopping_a_run_cancels_its_job_that_waits(quick: Study) -> None:
    run = quick.start(LATER)
    quick.job()
    run.send_signal(signal.SIGTERM)
    ended(run, 143)
    assert quick.states() == ["reconciled"]
    assert quick.held_ms("a000001") == 0
    (event,) = named(quick.protocol, "reconciled")
    assert event["data"]["outcome"] == "never_started"
    assert [job.state for job in jobs_named(known_engine(quick.folder("a000001")).name)] == ["CANCELLED"]


def test_stopping_a_run_stops_its_job_in_order(slow: Study) -> None:
    run = slow.start()
    slow.running()
    run.send_signal(signal.SIGTERM)
    ended(run, 143)
    (event,) = named(slow.protocol, "settled")
    assert (event["data"]["outcome"], "SIGTERM" in event["data"]["evidence"]) == ("user", True)
    slow.accounted("a000001")


def test_a_job_that_somebody_cancels_stops_the_run(slurm: Cluster, slow: Study) -> None:
    run = slow.start()
    job = slow.running()
    eventually(lambda: slow.states() == ["running"])
    slurm.call("scancel", job)
    value = ended(run, 4)
    assert [attempt["outcome"] for attempt in value["attempts"]] == ["user"]
    assert "SIGTERM" in value["stopped"]
    assert [event["event"] for event in events_of(slow.protocol)].count("stopping") == 1
    slow.accounted("a000001")


def test_a_time_limit_that_slurm_enforces_is_charged_with_what_it_takes(slurm: Cluster, slow: Study) -> None:
    """An administrator shortened the job's time: Slurm asks it to end, and the supervisor still writes its end."""
    run = slow.start()
    job = slow.running()
    slurm.call("scontrol", "update", f"jobid={job}", "EndTime=now+1seconds")
    value = ended(run, 4)
    assert [attempt["outcome"] for attempt in value["attempts"]] == ["user"]
    slow.accounted("a000001")
    (row,) = slow.rows("a000001")
    assert row.state == "TIMEOUT"
    assert "DUE TO TIME LIMIT" in (slow.folder("a000001") / "supervisor.log").read_text()


def test_the_wall_limit_of_the_protocol_comes_before_that_of_slurm(slurm: Cluster, tmp_path: Path) -> None:
    study = study_of(tmp_path / "study", 30, **{"wall_limit_seconds = 15": "wall_limit_seconds = 2"})
    value = ended(study.start("--pilot"), 0)
    assert [attempt["outcome"] for attempt in value["attempts"]] == ["wall_limit"]
    study.accounted("a000001")


def test_a_node_that_starts_again_ends_the_attempt_and_the_next_run_goes_on(slurm: Cluster, tmp_path: Path) -> None:
    study = study_of(tmp_path / "study", 2)
    run = study.start()
    study.running()
    time.sleep(2)
    slurm.lose_node()
    slurm.start_node()
    value = ended(run, 4)
    assert [attempt["outcome"] for attempt in value["attempts"]] == ["host_crash"]
    study.accounted("a000001")
    value = ended(study.start(), 0)
    assert [attempt["outcome"] for attempt in value["attempts"]] == [ENDED, ENDED]


def test_a_job_that_was_put_back_in_the_queue_is_one_attempt_with_two_charges(slurm: Cluster, slow: Study) -> None:
    run = slow.start()
    job = slow.running()
    time.sleep(2)
    slurm.call("scontrol", "update", f"jobid={job}", "requeue=1")
    slurm.call("scontrol", "requeue", job)

    def again() -> bool:
        slurm.answers("scontrol", "update", f"jobid={job}", "StartTime=now")
        return len(slow.rows("a000001")) > 1

    value = ended(run, 4)
    assert [attempt["outcome"] for attempt in value["attempts"]] == ["user"]
    eventually(again, 60)
    slow.accounted("a000001")
    first, second = slow.rows("a000001")
    (end,) = named(slow.protocol, "settled")
    both = max(end["data"]["charge"]["debited_ms"], first.elapsed_seconds * 1000) + second.elapsed_seconds * 1000
    assert slow.held_ms("a000001") == both
    assert len(named(slow.protocol, "intent")) == 1


def test_a_controller_that_is_away_takes_nothing_from_a_job_that_runs(slurm: Cluster, tmp_path: Path) -> None:
    study = study_of(tmp_path / "study", 1.5)
    run = study.start("--pilot")
    study.running()
    slurm.kill("slurmctld", signal.SIGTERM)
    assert study.states() == ["unknown"]
    value = ended(run, 0)
    assert [attempt["outcome"] for attempt in value["attempts"]] == [ENDED]
    (found,) = study.call("reconcile")["attempts"]
    assert found["state"] == "unaccounted"
    assert "not known" in found["words"]
    slurm.start_controller()
    study.accounted("a000001")


def test_accounting_that_is_late_is_added_by_a_later_command(slurm: Cluster, quick: Study) -> None:
    run = quick.start("--pilot")
    quick.job()
    slurm.kill("slurmdbd")
    out, err = run.communicate(timeout=120)
    assert run.returncode == 0, (out, err)
    (attempt,) = json.loads(out)["attempts"]
    assert attempt["outcome"] == ENDED
    assert not (quick.folder("a000001") / ACCOUNTED).exists()
    assert "a000001: " in err
    slurm.start_accounting()
    quick.accounted("a000001")


def test_of_two_runs_that_race_one_works_and_the_other_is_told(quick: Study) -> None:
    runs = [quick.start(), quick.start()]
    said = {run.communicate(timeout=120)[0]: run.returncode for run in runs}
    assert sorted(said.values()) == [0, 4]
    assert [json.loads(out)["error"]["code"] for out, code in said.items() if code == 4] == ["busy"]
    assert sorted(event["attempt"] for event in named(quick.protocol, "reserved")) == ["a000001", "a000002"]
    assert len({known_engine(quick.folder(name)).job for name in ("a000001", "a000002")}) == 2


def test_a_script_that_somebody_submits_again_begins_nothing(slurm: Cluster, slow: Study) -> None:
    """By hand and under the same name: the attempt, its end and its charge stay those of the first job."""
    run = slow.start()
    slow.running()
    name, script = known_engine(slow.folder("a000001")).name, slow.folder("a000001") / "job.sh"
    other = slurm.call("sbatch", "--parsable", f"--job-name={name}", "--output=/dev/null", str(script)).strip()
    eventually(lambda: any(str(job.id) == other and job.over for job in jobs_named(name)), 40)
    assert slow.states() == ["running"]
    run.send_signal(signal.SIGTERM)
    ended(run, 143)
    slow.accounted("a000001")
    assert [row.job for row in slow.rows("a000001")] == [known_engine(slow.folder("a000001")).job]
    assert len(named(slow.protocol, "intent")) == len(named(slow.protocol, "settled")) == 1


def test_a_workspace_that_the_node_does_not_have_is_named(slurm: Cluster, quick: Study) -> None:
    slurm.kill("slurmd")
    slurm.start_node(without=quick.protocol.parent)
    try:
        value = ended(quick.start(), 4)
    finally:
        slurm.kill("slurmd")
    assert "does not have the workspace" in value["stopped"]
    assert [attempt["outcome"] for attempt in value["attempts"]] == ["never_started"]
    assert named(quick.protocol, "intent") == []


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--slurm", "--sbatch=--partition=nowhere"], 4, "Invalid partition"),
        (["--slurm", "--sbatch=--mem=9999G"], 4, "not available"),
        (["--slurm", "--sbatch=--array=0-3"], 2, "--array"),
        (["--slurm", "--sbatch=-pmain"], 2, "long form"),
        (["--sbatch=--mem=1G"], 2, "--slurm"),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_is_reserved(
    quick: Study, options: list[str], code: int, words: str
) -> None:
    value = quick.call("run", *options, code=code)
    assert words in value["error"]["message"]
    assert value["error"]["hint"]
    assert events_of(quick.protocol) == []


def test_a_device_that_only_the_node_may_have_is_refused_with_the_reason(slurm: Cluster, tmp_path: Path) -> None:
    study = Study(make_gpu_study(tmp_path / "study"))
    study.call("freeze")
    assert "submit where they are" in ended(study.start(), 5)["error"]["hint"]
    assert events_of(study.protocol) == []


def test_a_machine_without_slurm_is_told_so(slurm: Cluster, quick: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_CONF")
    assert "scontrol failed" in ended(quick.start(), 5)["error"]["message"]
    monkeypatch.setenv("PATH", str(quick.protocol.parent))
    assert "on the PATH" in ended(quick.start(), 5)["error"]["message"]

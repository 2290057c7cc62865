"""Slurm's answers and its accounting as a second witness: what needs no Slurm. The rest is in tests/slurm."""

import contextlib
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule.core.attempt import Clock
from capsule.core.errors import MalformedError, RefusedError, UsageError
from capsule.host import launch
from capsule.host.clock import read_boot_id, realtime_text
from capsule.host.slurm import commands
from capsule.host.slurm.answers import Row, parse_configuration, parse_jobs, parse_rows, parse_submitted
from capsule.host.slurm.commands import NoAnswerError, call, kill_wait_ms, required
from capsule.host.slurm.job import check_arguments, job_name, submit, time_limit_minutes
from capsule.host.slurm.witness import compare, complete, end_of, row_of_charge, rows_of_attempt
from capsule.host.supervision import start
from tests.host.conftest import Bench, protocol_of

T0 = 1_900_000_000
NAME = "capsule-a000001-0123"


def clock(seconds: float) -> Clock:
    """Return a clock that many seconds after `T0`."""
    ms = round(seconds * 1000)
    return Clock(realtime=realtime_text(T0 * 1000 + ms), boottime_ms=ms, monotonic_ms=ms, boot_id="node")


def row(
    number: int = 1, *, at: int = 0, seconds: int = 10, state: str = "COMPLETED", name: str = NAME, ended: bool = True
) -> Row:
    """Return a row that started `at` seconds after `T0`."""
    return Row(
        id=number, job=7, name=name, uid=0, submitted=T0 + at - 1, started=T0 + at,
        ended=T0 + at + seconds if ended else None, elapsed_seconds=seconds, state=state, exit_code=0, signal=0,
    )  # fmt: skip


# Answers.


def test_jobs_of_the_queue_are_parsed() -> None:
    (job,) = parse_jobs("12|1796074748|PENDING|1000|JobHeldUser\n")
    assert (job.id, job.submitted, job.state, job.uid, job.reason) == (12, 1796074748, "PENDING", 1000, "JobHeldUser")
    assert not job.over


def test_a_job_that_is_completing_is_not_over() -> None:
    """The accounting says CANCELLED at once; its processes live for up to KillWait."""
    (job,) = parse_jobs("12|1796074748|COMPLETING|1000|None\n")
    assert not job.over


def test_rows_of_the_accounting_are_parsed() -> None:
    text = (
        "6|3|trap|0|1796074777|1796074836|1796074837|1|CANCELLED by 0|0:15\n"
        "9|3|x|0|1796074777|Unknown|Unknown|0|PENDING|0:0\n"
    )
    ended, waiting = parse_rows(text)
    assert (ended.id, ended.state, ended.elapsed_seconds, ended.signal, ended.final) == (6, "CANCELLED", 1, 15, True)
    assert (waiting.started, waiting.ended, waiting.final) == (None, None, False)


@pytest.mark.parametrize(
    "text",
    [
        "1|2|3\n",
        "x|1|PENDING|0|None\n",
        "12_3|1|PENDING|0|None\n",
        "1|1|pending?|0|None\n",
        "1|2030-01-01|PENDING|0|None\n",
    ],
)
def test_jobs_in_another_form_are_refused(text: str) -> None:
    with pytest.raises(MalformedError):
        parse_jobs(text)


@given(st.text())
def test_no_text_is_parsed_by_accident(text: str) -> None:
    """Whatever Slurm prints is parsed or called malformed."""
    for parse in (parse_jobs, parse_rows):
        with contextlib.suppress(MalformedError):
            parse(text)


def test_the_id_of_a_submitted_job() -> None:
    assert (parse_submitted("12\n"), parse_submitted("12;cluster\n")) == (12, 12)
    assert parse_submitted("Submitted batch job 12\n") is None


# The cluster.

CONFIG = """\
Configuration data as of 2026-11-30T21:40:00
AccountingStorageType   = accounting_storage/slurmdbd
KillWait                = 10 sec
ProctrackType           = proctrack/cgroup

Slurmctld(primary) at vm is UP
"""


def test_a_cluster_with_cgroups_and_accounting_will_do() -> None:
    found = parse_configuration(CONFIG)
    assert kill_wait_ms(found) == 10_000
    assert required(found) == ["Slurm ends what it stops after KillWait, 10 s"]


@pytest.mark.parametrize(
    ("old", "new"),
    [("proctrack/cgroup", "proctrack/linuxproc"), ("accounting_storage/slurmdbd", "accounting_storage/none")],
)
def test_another_cluster_is_refused_with_words(old: str, new: str) -> None:
    with pytest.raises(RefusedError, match=new):
        required(parse_configuration(CONFIG.replace(old, new)))


def test_a_command_that_is_not_there_or_too_slow_gives_no_answer() -> None:
    with pytest.raises(NoAnswerError, match="on the PATH"):
        call("squeue-of-nobody")
    with pytest.raises(NoAnswerError, match=r"within 0\.1 s"):
        call(sys.executable, "-c", "import time; time.sleep(9)", timeout=0.1)
    with pytest.raises(NoAnswerError, match="status 3: words"):
        call(sys.executable, "-c", "import sys; sys.exit(print('words', file=sys.stderr) or 3)")


def test_variables_that_steer_slurm_do_not_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SQUEUE_FORMAT", "SACCT_FORMAT", "SLURM_TIME_FORMAT"):
        monkeypatch.setenv(name, "mine")
    monkeypatch.setenv("SBATCH_ARRAY_INX", "0-9")
    source = "import os; print([os.environ.get(n) for n in ('SQUEUE_FORMAT', 'SACCT_FORMAT', 'SLURM_TIME_FORMAT')])"
    assert call(sys.executable, "-c", source) == "[None, None, '%s']\n"
    assert "SBATCH_ARRAY_INX" not in commands.submission_environment()
    assert commands.submission_environment()["SQUEUE_FORMAT"] == "mine"  # the trial's own environment stays


# Submission.


@pytest.mark.parametrize("argument", ["--partition=gpu", "--gres=gpu:2", "--exclusive", "--mem=50", "--account=a"])
def test_arguments_that_leave_the_job_as_it_is_are_passed_on(argument: str) -> None:
    check_arguments([argument])


@pytest.mark.parametrize(
    "argument",
    ["-a0-9", "--array=0-9", "--arr=0-9", "--time=1", "--requeue", "--hold", "--job-name=x", "script.sh", "--"],
)
def test_arguments_that_would_make_it_another_job_are_refused(argument: str) -> None:
    with pytest.raises(UsageError):
        check_arguments([argument])


def test_the_time_limit_covers_the_graces_and_the_start(bench: Bench) -> None:
    order = bench.order(protocol_of(command=["true"], wall_limit_seconds=60, kill_grace_seconds=2))
    assert time_limit_minutes(order.reserved.reserved_ms) == 2
    assert time_limit_minutes(30_001) == 2
    assert job_name(order) == f"capsule-a000001-{order.token}"


CLUSTER = commands.Cluster("c", 30_000, ())
FAKE_SBATCH = """\
#!/bin/sh
echo "$@" >>{log}
case $0 in
*/scontrol) echo "ProctrackType = proctrack/cgroup"; echo "AccountingStorageType = accounting_storage/slurmdbd" ;;
*/sbatch) {sbatch} ;;
*/squeue) cat {queue} ;;
esac
"""


def fake_slurm(folder: Path, monkeypatch: pytest.MonkeyPatch, sbatch: str) -> Path:
    """Put commands on the PATH that log their arguments; returns the log."""
    folder.mkdir()
    (folder / "queue").touch()
    for name in ("sbatch", "squeue", "scontrol", "sacct", "scancel", "sacctmgr"):
        text = FAKE_SBATCH.format(log=folder / "log", queue=folder / "queue", sbatch=sbatch)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder / "log"


def test_a_submission_that_is_not_answered_is_looked_up_and_never_repeated(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F1: `sbatch` fails after its job was taken; a second call finds the job and submits nothing."""
    log = fake_slurm(tmp_path / "bin", monkeypatch, "exit 1")
    order = bench.order(protocol_of(command=["true"]))
    with pytest.raises(commands.MachineError, match="expected Slurm to have the job"):
        submit(order, CLUSTER, found_seconds=0.1)
    assert log.read_text().count("--hold") == 1
    (tmp_path / "bin/queue").write_text(f"12|{T0}|PENDING|{os.getuid()}|JobHeldUser\n")
    supervision = submit(order, CLUSTER)
    assert (supervision.engine.job, supervision.engine.released) == (12, True)
    assert log.read_text().count("--hold") == 1
    assert "release 12" in log.read_text()


def test_a_job_of_somebody_else_is_not_taken_for_ours(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = fake_slurm(tmp_path / "bin", monkeypatch, "echo 12")
    (tmp_path / "bin/queue").write_text(f"12|{T0}|PENDING|{os.getuid() + 1}|JobHeldUser\n")
    with pytest.raises(commands.MachineError, match="found none"):
        submit(bench.order(protocol_of(command=["true"])), CLUSTER, found_seconds=0.1)
    assert "release" not in log.read_text()


def test_a_command_on_another_machine_is_not_called_lost(bench: Bench) -> None:
    """On the node where its job runs nobody can say whether the process that submitted it lives."""
    for boot_id, lost in ((read_boot_id(), True), ("another", False)):
        order = bench.order(protocol_of(command=["true"]))
        gone = order.launcher.model_copy(update={"boot_id": boot_id, "start_ticks": 1})
        bench.supervisions.append(start(order.model_copy(update={"launcher": gone})))
        assert bench.supervisions[-1].wait(60) == launch.SETTLED
        end = bench.account().attempts[order.attempt].end
        assert end is not None
        assert ("cli_lost" in end.evidence) == lost


# Witnesses.


def test_rows_of_other_jobs_with_the_same_id_are_left_out() -> None:
    """F6: ids come again; name, user and time of submission tell them apart, and a row counts once."""
    rows = [row(1, name="capsule-a000001-other"), row(2), row(2), row(3, at=-1000)]
    assert [item.id for item in rows_of_attempt(rows, name=NAME, uid=0, submitted=T0 - 1)] == [2]
    assert rows_of_attempt(rows, name=NAME, uid=1, submitted=0) == ()


def test_late_rows_leave_an_attempt_open() -> None:
    """F2: no row, one without an end, and one that was requeued are all incomplete."""
    assert not complete([])
    assert not complete([row(ended=False, state="RUNNING")])
    assert not complete([row(state="REQUEUED")])
    assert complete([row(1, state="REQUEUED"), row(2, at=20)])


def test_the_larger_of_two_witnesses_is_due() -> None:
    more = compare([row(seconds=10)], debited_ms=9_400, devices=2, leased=clock(0.5))
    assert more.due_ms == 20_000
    assert "the ledger says 9.4" in more.words
    same = compare([row(seconds=10)], debited_ms=20_900, devices=2, leased=clock(0.5))
    assert (same.due_ms, same.words) == (20_900, "")


def test_a_repair_never_lowers_a_charge() -> None:
    """F5: the row was set to no time at all; the ledger's charge stays, and the disagreement is put into words."""
    found = compare([row(seconds=0)], debited_ms=9_400, devices=1, leased=clock(0.5))
    assert found.due_ms == 9_400
    assert "which stays" in found.words


def test_every_start_is_one_charge() -> None:
    """F3: a requeued job has a row for each start; the ledger's own charge stands for one of them."""
    rows = [row(1, seconds=10, state="REQUEUED"), row(2, at=200, seconds=3)]
    found = compare(rows, debited_ms=9_400, devices=1, leased=clock(1))
    assert row_of_charge(rows, clock(1)) is rows[0]
    assert found.due_ms == 13_000


def test_a_node_whose_clock_is_behind_is_not_charged_twice() -> None:
    found = compare([row(at=60, seconds=10)], debited_ms=9_400, devices=1, leased=clock(1))
    assert found.due_ms == 10_000


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 100)), max_size=4),
    st.integers(0, 10**6),
    st.integers(1, 8),
    st.integers(0, 500),
)
def test_no_witness_lowers_the_other(stays: list[tuple[int, int]], debited_ms: int, devices: int, at: int) -> None:
    rows = [row(number, at=100 * number, seconds=seconds) for number, (_, seconds) in enumerate(stays)]
    found = compare(rows, debited_ms=debited_ms, devices=devices, leased=clock(at))
    assert found.due_ms >= max(debited_ms, sum(1000 * devices * item.elapsed_seconds for item in rows))


def ending(rows: list[Row], *, last: float = 5, now: float = 100, leased: float | None = 0.5):
    return end_of(
        rows, devices=1, reserved_ms=60_000, kill_wait_ms=30_000,
        leased=None if leased is None else clock(leased), last=clock(last), now=clock(now),
    )  # fmt: skip


def test_a_dead_node_is_charged_to_what_both_witnesses_saw() -> None:
    """F4: from lease to the end that Slurm saw, at least to the last event."""
    found = ending([row(seconds=12, state="NODE_FAIL")])
    assert found.outcome == "host_crash"
    assert (found.charge.lower_ms, found.charge.debited_ms, found.charge.observed) == (4_500, 12_000, False)


def test_a_row_that_ends_before_the_last_event_proves_nothing() -> None:
    """F5: a repaired row; the upper bound is the reservation, or until now."""
    assert ending([row(seconds=0)]).charge.debited_ms == 60_000
    assert ending([row(seconds=0)], now=20.5).charge.debited_ms == 20_000


def test_what_slurm_killed_is_charged_until_it_was_dead() -> None:
    """The accounting of a cancelled job ends when it was asked to end."""
    found = ending([row(seconds=6, state="CANCELLED")])
    assert (found.outcome, found.charge.debited_ms) == ("user", 36_000)


def test_a_job_that_never_began_its_attempt_is_charged_what_it_had_of_the_devices() -> None:
    assert ending([row(seconds=3, state="FAILED")], leased=None).charge.debited_ms == 3_000
    never = ending([], leased=None)
    assert (never.outcome, never.charge.debited_ms) == ("never_started", 0)


def test_a_debit_that_was_made_from_the_rows_is_not_made_again() -> None:
    rows = [row(1, seconds=10, state="REQUEUED"), row(2, at=200, seconds=3)]
    debited_ms = ending(rows, now=300).charge.debited_ms
    found = compare(rows, debited_ms=debited_ms, devices=1, leased=clock(1), by_rows=True)
    assert (found.due_ms, found.words) == (debited_ms, "")

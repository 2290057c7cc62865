"""One attempt as one Slurm job: submitted held, recorded, then released; and the handle on its supervisor.

What was submitted is written beside the attempt before the job may run. If the answer of `sbatch` is lost, the job is
looked up by its name, which no other job has, and never submitted a second time: one that nobody knows of stays held.
"""

from __future__ import annotations

import math
import os
import platform
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from capsule import guest
from capsule.core.attempt import Clock
from capsule.core.errors import CapsuleError, MachineError, RefusedError, UsageError
from capsule.core.schema import Model, Natural
from capsule.host import launch
from capsule.host.clock import read_clock, realtime_ms
from capsule.host.durable import read_regular, write_durably
from capsule.host.launch import LaunchOrder
from capsule.host.ledger import Ledger
from capsule.host.loop import STOP_NOW
from capsule.host.slurm.answers import Job, Row, parse_submitted
from capsule.host.slurm.commands import (
    Cluster,
    FailedError,
    NoAnswerError,
    call,
    inspect_cluster,
    jobs_named,
    rows_of,
    submission_environment,
)
from capsule.host.slurm.witness import complete, rows_of_attempt, still_writes
from capsule.host.traces import ENGINE

SCRIPT = "job.sh"
STARTUP_MS = 30_000
"""What a job is given for its start and its last words, beside the frozen limits."""
MINUTE_MS = 60_000
FOUND_SECONDS = 20.0
"""How long a job whose submission was not answered is looked for."""
ASK_SECONDS = 5.0
"""How often the controller is asked about a job: it answers everybody on the cluster."""
DAY_SECONDS = 86_400

OURS = frozenset(
    "array chdir clusters comment error export export-file gid help hold input job-name kill-on-invalid-dep no-requeue "
    "open-mode output parsable quiet requeue test-only time time-min uid usage version wait wrap".split()
)
"""Options of `sbatch` that decide which job is submitted, where, whose, how often and for how long."""


class Engine(Model):
    """What is known of an attempt's job; `asked` is when it was about to be submitted, on which host by whom.

    `job`, `cluster` and `submitted` (seconds since 1970) are None until Slurm has been heard to have it; `released`
    is whether it was let go.
    """

    engine: str
    name: str
    host: str
    asked: Clock
    cluster: str
    kill_wait_ms: Natural
    job: Natural | None
    submitted: Natural | None
    released: bool


def job_name(order: LaunchOrder) -> str:
    """Return the name of an attempt's job: its id alone would come again in another protocol."""
    return f"capsule-{order.attempt}-{order.token}"


def time_limit_minutes(reserved_ms: int) -> int:
    """Return the time limit of a job that reserves so much of each device, and its start, in whole minutes."""
    return -(-(reserved_ms + STARTUP_MS) // MINUTE_MS)


def rehearse(arguments: Sequence[str], reserved_ms: int) -> Cluster:
    """Look at the cluster and ask it whether it would take such a job, before anything is reserved.

    Raises:
        UsageError: an argument is not allowed.
        RefusedError: the cluster cannot be used, see `inspect_cluster`, or would not take the job.
        NoAnswerError: Slurm is not here or does not answer.
    """
    check_arguments(arguments)
    cluster = inspect_cluster()
    options = [f"--time={time_limit_minutes(reserved_ms)}", *arguments]
    try:
        call("sbatch", "--test-only", *options, "--wrap=:", environment=submission_environment())
    except FailedError as error:
        raise RefusedError(
            f"expected cluster {cluster.name} to take a job with {' '.join(options)}, found {error.message}",
            hint="options of sbatch are given as --sbatch=--partition=gpu --sbatch=--account=physics",
        ) from error
    return cluster


def check_arguments(arguments: Sequence[str]) -> None:
    """Hold a person's own arguments of `sbatch` to those that leave the job one job of this attempt.

    Raises:
        UsageError: one is not in the long form, or sets what only we may.
    """
    for argument in arguments:
        option = argument.partition("=")[0]
        if not option.startswith("--") or len(option) < 4:
            raise UsageError(
                f"expected an option of sbatch in its long form, found {argument!r}",
                hint="for instance --sbatch=--partition=gpu --sbatch=--gres=gpu:1",
            )
        found = sorted(name for name in OURS if name.startswith(option[2:]))
        if found:
            raise UsageError(
                f"expected an option of sbatch that a run leaves open, found --{found[0]}",
                hint="one attempt is one job, once, for as long as the protocol allows, so that it can be charged",
            )


def read_engine(attempt_dir: Path) -> Engine | None:
    """Return what is known of an attempt's job; None if it is no attempt of an engine.

    Raises:
        MachineError: it cannot be read.
    """
    try:
        data = read_regular(attempt_dir / ENGINE)
        return Engine.from_bytes(data, str(attempt_dir / ENGINE)) if data is not None else None
    except (OSError, CapsuleError) as error:
        raise MachineError(f"{attempt_dir / ENGINE}: cannot be read: {error}") from error


def known_engine(attempt_dir: Path) -> Engine:
    """Return what is known of an attempt's job.

    Raises:
        MachineError: nothing is, or it cannot be read.
    """
    engine = read_engine(attempt_dir)
    if engine is None:
        raise MachineError(f"expected {attempt_dir / ENGINE} to say which job it is, found no such regular file")
    return engine


def submit(
    order: LaunchOrder, cluster: Cluster, arguments: Sequence[str] = (), *, found_seconds: float = FOUND_SECONDS
) -> SlurmSupervision:
    """Submit an attempt's order as a job, record it and let it go; the second call for an attempt submits nothing.

    `cluster` and `arguments` are those of a `rehearse`.

    Raises:
        MachineError: whether there is a job is not known, or the order cannot be written; `reconcile` looks again.
    """
    directory = Path(order.attempt_dir)
    engine = read_engine(directory)
    failure: NoAnswerError | None = None
    if engine is None:
        engine = _announce(order, directory, cluster)
        try:
            _sbatch(order, engine, arguments)
        except NoAnswerError as error:
            failure = error
    if engine.job is None:
        engine = _find(directory, engine, failure, found_seconds)
    if not engine.released:
        call("scontrol", "release", str(engine.job))
        engine = write_engine(directory, engine.model_copy(update={"released": True}))
    return SlurmSupervision(order, engine)


def _announce(order: LaunchOrder, directory: Path, cluster: Cluster) -> Engine:
    engine = Engine(
        engine="slurm", name=job_name(order), host=platform.node(), asked=read_clock(), cluster=cluster.name,
        kill_wait_ms=cluster.kill_wait_ms, job=None, submitted=None, released=False,
    )  # fmt: skip
    package = str(Path(guest.__file__).parent.parent)
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-P", "-m", "capsule.host.supervisor", str(directory / launch.ORDER)]
    script = f"#!/bin/sh\nPYTHONPATH={shlex.quote(path)}\nexport PYTHONPATH\nexec {shlex.join(command)}\n"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_durably(directory / launch.ORDER, order.to_bytes())
        write_durably(directory / SCRIPT, script.encode())
    except OSError as error:
        raise MachineError(f"{directory}: an attempt cannot be started: {error.strerror}") from error
    return write_engine(directory, engine)


def _sbatch(order: LaunchOrder, engine: Engine, arguments: Sequence[str]) -> None:
    directory = Path(order.attempt_dir)
    log = str(directory / launch.LOG).replace("%", "%%")
    answer = call(
        "sbatch", "--parsable", "--hold", "--no-requeue", f"--job-name={engine.name}",
        f"--comment={order.reserved.manifest}", f"--time={_limit(order)}", "--chdir=/", "--export=ALL",
        f"--output={log}", "--open-mode=append", *arguments, str(directory / SCRIPT),
        environment=submission_environment(),
    )  # fmt: skip
    if parse_submitted(answer) is None:
        raise NoAnswerError(f"expected a job id from sbatch, found {answer.strip()!r}")


def _limit(order: LaunchOrder) -> int:
    return time_limit_minutes(order.reserved.reserved_ms // len(order.reserved.devices))


def _find(directory: Path, engine: Engine, failure: NoAnswerError | None, seconds: float) -> Engine:
    """Find the job by its name and record it, also if `sbatch` failed: what it was to do may be done all the same."""
    until = time.monotonic() + seconds
    while True:
        try:
            found = job_of(engine)
        except NoAnswerError as error:
            failure = failure or error
            found = None
        if found is not None:
            return record(directory, engine, found)
        if time.monotonic() >= until:
            words = failure.message if failure else "it is not in the queue"
            raise MachineError(
                f"expected Slurm to have the job {engine.name}, found none: {words}",
                hint="it is not submitted again; capsule reconcile looks for it and settles the attempt",
            )
        time.sleep(0.5)


def job_of(engine: Engine) -> Job | None:
    """Return an attempt's job as the controller knows it; None if it does not.

    Somebody may have submitted the script again by hand: the first one is ours.

    Raises:
        NoAnswerError: Slurm did not answer.
    """
    jobs = [job for job in jobs_named(engine.name) if engine.job in (None, job.id)]
    return min(jobs, key=lambda job: (job.submitted, job.id), default=None)


def record(directory: Path, engine: Engine, job: Job) -> Engine:
    """Write down which job it is."""
    return write_engine(directory, engine.model_copy(update={"job": job.id, "submitted": job.submitted}))


def write_engine(directory: Path, engine: Engine) -> Engine:
    """Write durably what is known of an attempt's job.

    Raises:
        MachineError: it cannot be written.
    """
    try:
        write_durably(directory / ENGINE, engine.to_bytes())
    except OSError as error:
        raise MachineError(f"{directory / ENGINE}: cannot be written: {error.strerror}") from error
    return engine


def accounting(engine: Engine) -> tuple[Row, ...]:
    """Return the rows that the accounting has of an attempt, in order; those that are late are not among them.

    Raises:
        NoAnswerError: the accounting did not answer.
    """
    asked = realtime_ms(engine.asked.realtime) // 1000
    rows = rows_of(engine.job, engine.name, asked - DAY_SECONDS)
    since = engine.submitted if engine.submitted is not None else asked - DAY_SECONDS
    return rows_of_attempt(rows, name=engine.name, uid=os.getuid(), submitted=since)


def cancel(engine: Engine, *options: str) -> None:
    """Cancel or signal an attempt's job; its name is given too, since another job may have its id by now.

    Raises:
        NoAnswerError: Slurm did not answer.
    """
    call("scancel", f"--name={engine.name}", *options, str(engine.job))


class SlurmSupervision:
    """The handle on the supervisor of an attempt that is a Slurm job, with the methods of `supervision.Supervision`."""

    def __init__(self, order: LaunchOrder, engine: Engine, *, ask_seconds: float = ASK_SECONDS) -> None:
        self.attempt = order.attempt
        self.engine = engine
        self.notes = (f"Slurm job {engine.job} of cluster {engine.cluster}",)
        self.ask_seconds = ask_seconds
        self._ledger = Ledger(Path(order.ledger), Path(order.ledger_head))
        self._size = -1
        self._status: int | None = None
        self._asked_at = time.monotonic()
        self._wishes: list[signal.Signals] = []

    def poll(self) -> int | None:
        """Return the supervisor's exit status, or None while it waits, runs, or nobody can say.

        The ledger is looked at first: a supervisor that has settled its attempt is done. The controller is asked
        every so often; a job that is over without the accounting's row is still open.
        """
        if self._status is None:
            self._status = self._by_ledger()
        if self._status is None and time.monotonic() - self._asked_at >= self.ask_seconds:
            self._asked_at = time.monotonic()
            self._pass_on()
            self._status = self._by_slurm()
        return self._status

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the supervisor's end and return its exit status; None after `timeout` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            left = 0.1 if until is None else min(0.1, until - time.monotonic())
            if left <= 0:
                return None
            time.sleep(left)
        return status

    def stop(self, number: signal.Signals = signal.SIGTERM, *, now: bool = False) -> None:
        """Have the next `poll` ask the supervisor to end the trial, after the kill grace or at once.

        It may be called in a signal's handler. A job that waits is cancelled. Of one that runs only the batch step's
        own process is signalled, which is the supervisor, so that it can write why before it signals its trial. If
        Slurm does not answer it is asked again.
        """
        self._wishes.append(STOP_NOW if now else number)
        self._asked_at = -math.inf

    def _pass_on(self) -> None:
        while self._wishes:
            name = self._wishes[0].name.removeprefix("SIG")
            try:
                cancel(self.engine, "--state=PENDING")
                cancel(self.engine, "--batch", f"--signal={name}", "--state=RUNNING")
            except NoAnswerError:
                return
            del self._wishes[0]

    def _by_ledger(self) -> int | None:
        try:
            size = self._ledger.path.stat().st_size
        except OSError:
            return None
        if size == self._size:
            return None
        attempt = self._ledger.read()[1].attempts[self.attempt]
        self._size = size
        if attempt.open:
            return None
        return launch.REFUSED if attempt.refused is not None else launch.SETTLED

    def _by_slurm(self) -> int | None:
        try:
            job = job_of(self.engine)
            if job is not None and not job.over:
                return None
            rows = accounting(self.engine)
        except NoAnswerError:
            return None
        if not complete(rows):
            return None
        status = self._by_ledger()
        if status is not None:
            return status
        attempt = self._ledger.read()[1].attempts[self.attempt]
        leased = attempt.intent.leased if attempt.intent else None
        if attempt.last is not None and still_writes(leased, attempt.last, read_clock()):
            return None
        last = rows[-1]
        return 128 + last.signal if last.signal else last.exit_code or launch.DEFECT

"""Slurm's own commands, called directly through one function with a time limit; and what a cluster must be like."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from capsule.core.errors import MachineError, MalformedError, RefusedError
from capsule.host.slurm.answers import JOB_FORMAT, ROW_FIELDS, Job, Row, parse_configuration, parse_jobs, parse_rows

SECONDS = 30.0
"""How long a command may take to answer."""
WORDS_MAX = 400
STEERING = ("SACCT_", "SACCTMGR_", "SCANCEL_", "SCONTROL_", "SQUEUE_", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT")
"""Beginnings of variables that change what a command prints or does."""
SUBMITTING = frozenset(
    "SBATCH_ARRAY_INX SBATCH_CLUSTERS SBATCH_COMMENT SBATCH_EXPORT SBATCH_HOLD SBATCH_INPUT SBATCH_JOB_NAME "
    "SBATCH_NO_REQUEUE SBATCH_OPEN_MODE SBATCH_OUTPUT SBATCH_ERROR SBATCH_REQUEUE SBATCH_TIMELIMIT SBATCH_WAIT "
    "SLURM_CLUSTERS".split()
)
"""Variables that change what is submitted, as options do that are ours alone."""


class NoAnswerError(MachineError):
    """Slurm did not answer, or not in a form that is known: what it was asked is not known, and not denied either."""


class FailedError(NoAnswerError):
    """A command answered that it failed; what it was to do may be done all the same."""


@dataclass(frozen=True)
class Cluster:
    """What matters of a cluster's configuration; `notes` are for people."""

    name: str
    kill_wait_ms: int
    notes: tuple[str, ...]


def call(program: str, *arguments: str, timeout: float = SECONDS, environment: Mapping[str, str] | None = None) -> str:
    """Run one of Slurm's commands in a session of its own and return what it printed.

    Raises:
        NoAnswerError: it is not there, or did not end in time.
        FailedError: it failed.
    """
    if environment is None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(STEERING)}
        environment = kept | {"LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}
    try:
        done = subprocess.run(
            [program, *arguments],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
            start_new_session=True,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise NoAnswerError(f"expected an answer of {program} within {timeout:g} s, found none") from error
    except FileNotFoundError as error:
        raise NoAnswerError(
            f"expected Slurm's command {program} on the PATH, found none",
            hint="submit on a machine of the cluster, perhaps after `module load slurm`; without --slurm it runs here",
        ) from error
    except OSError as error:
        raise NoAnswerError(f"{program}: cannot be called: {error.strerror}") from error
    if done.returncode:
        words = "; ".join(done.stderr.decode(errors="replace").strip().splitlines()) or "it said nothing"
        raise FailedError(f"{program} failed with status {done.returncode}: {words[:WORDS_MAX]}")
    return done.stdout.decode(errors="replace")


def jobs_named(name: str) -> tuple[Job, ...]:
    """Return this user's jobs of that name which the controller knows, ended ones included for as long as it does.

    Raises:
        NoAnswerError: see `call`.
    """
    text = call("squeue", "--states=all", "--noheader", f"--name={name}", f"--format={JOB_FORMAT}")
    try:
        return tuple(job for job in parse_jobs(text) if job.uid == os.getuid())
    except MalformedError as error:
        raise NoAnswerError(error.message) from error


def rows_of(job: int | None, name: str, since_seconds: int) -> tuple[Row, ...]:
    """Return the accounting's rows of a job id, else of a name since a time; other jobs' rows may be among them.

    Raises:
        NoAnswerError: see `call`.
    """
    if job is not None:
        which = [f"--jobs={job}"]
    else:
        began = datetime.fromtimestamp(since_seconds).astimezone()
        which = [f"--name={name}", f"--starttime={began:%Y-%m-%dT%H:%M:%S}"]
    text = call("sacct", "--duplicates", "--parsable2", "--noheader", "--allocations", f"--format={ROW_FIELDS}", *which)
    try:
        return parse_rows(text)
    except MalformedError as error:
        raise NoAnswerError(error.message) from error


def inspect_cluster() -> Cluster:
    """Look at the cluster before anything is submitted.

    Raises:
        NoAnswerError: see `call`.
        RefusedError: attempts cannot be charged there.
    """
    found = parse_configuration(call("scontrol", "show", "config"))
    return Cluster(found.get("ClusterName", "?"), kill_wait_ms(found), (*required(found), *backstops()))


def required(found: Mapping[str, str]) -> list[str]:
    """Hold a configuration to what is needed; returns words on what is only worth knowing.

    Raises:
        RefusedError: something that is needed is not there.
    """
    tracked = found.get("ProctrackType", "nothing")
    if tracked != "proctrack/cgroup":
        raise RefusedError(
            f"expected a cluster with ProctrackType=proctrack/cgroup, found {tracked}",
            hint="another way loses processes that leave their session, and what they cost; ask the cluster's people",
        )
    accounting = found.get("AccountingStorageType", "nothing")
    if accounting != "accounting_storage/slurmdbd":
        raise RefusedError(
            f"expected a cluster with AccountingStorageType=accounting_storage/slurmdbd, found {accounting}",
            hint="its accounting is the second witness of every attempt's cost; ask the cluster's people",
        )
    return [f"Slurm ends what it stops after KillWait, {kill_wait_ms(found) / 1000:g} s"]


def kill_wait_ms(found: Mapping[str, str]) -> int:
    """Return how long Slurm waits between asking a job to end and killing it."""
    number = found.get("KillWait", "").partition(" ")[0]
    return int(number) * 1000 if number.isdigit() else 30_000


def backstops() -> list[str]:
    """Return words on the limits that this user's accounts have: a backstop only, held to whole minutes."""
    try:
        own = [cells[0] for cells in _associations(f"user={_user()}", "format=Account") if cells[0]]
        found = _associations(f"account={','.join(own)}", "format=Account,User,GrpTRESMins") if own else []
    except NoAnswerError:
        return []
    return [
        f"backstop: account {account} has GrpTRESMins={limit}, which Slurm holds to whole minutes"
        for account, user, limit in found
        if limit and user in ("", _user())
    ]


def _associations(*arguments: str) -> list[list[str]]:
    text = call("sacctmgr", "--noheader", "--parsable2", "show", "associations", *arguments)
    fields = arguments[-1].count(",") + 1
    return [cells for line in text.splitlines() if len(cells := line.split("|")) == fields]


def _user() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def submission_environment() -> dict[str, str]:
    """Return the environment for `sbatch`, which goes on to the job: ours, without what would change the submission."""
    return {name: value for name, value in os.environ.items() if name not in SUBMITTING}

"""What Slurm's commands print, parsed strictly: jobs of the queue, rows of the accounting, the configuration. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from capsule.core.errors import MalformedError

JOB_FORMAT = "%i|%V|%T|%U|%r"
"""The format for `squeue` that `parse_jobs` reads."""
ROW_FIELDS = "DBIndex,JobIDRaw,JobName,UID,Submit,Start,End,ElapsedRaw,State,ExitCode"
"""The fields for `sacct -P` that `parse_rows` reads."""
CELLS = ROW_FIELDS.count(",") + 1

OVER = frozenset(
    "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED REVOKED TIMEOUT".split()
)
"""States of a job none of whose processes is left. COMPLETING is not among them, though accounting calls it over."""
REQUEUED = "REQUEUED"
"""The state of an accounting row whose job was put back in the queue; another row follows."""
HELD = "JobHeldUser"


@dataclass(frozen=True)
class Job:
    """A job as the controller knows it; `submitted` is in seconds since 1970 and changes when it is requeued."""

    id: int
    submitted: int
    state: str
    uid: int
    reason: str

    @property
    def over(self) -> bool:
        """Whether it has ended and nothing of it runs any more."""
        return self.state in OVER


@dataclass(frozen=True)
class Row:
    """One row of the accounting: one stay of one job on its nodes; times in seconds since 1970, None if not yet."""

    id: int
    job: int
    name: str
    uid: int
    submitted: int
    started: int | None
    ended: int | None
    elapsed_seconds: int
    state: str
    exit_code: int
    signal: int

    @property
    def final(self) -> bool:
        """Whether its end is known."""
        return self.ended is not None and (self.state in OVER or self.state == REQUEUED)

    def __str__(self) -> str:
        return f"Slurm job {self.job}, row {self.id} ({self.state}, {self.elapsed_seconds} s)"


def parse_jobs(text: str) -> tuple[Job, ...]:
    """Parse what `squeue --noheader --format=JOB_FORMAT` printed.

    Raises:
        MalformedError: a line is not of that form.
    """
    return tuple(
        Job(_whole(job, "job"), _whole(submitted, "submit time"), _state(state), _whole(uid, "user id"), reason)
        for job, submitted, state, uid, reason in _lines(text, 5, "squeue")
    )


def parse_rows(text: str) -> tuple[Row, ...]:
    """Parse what `sacct -P -n -X --format=ROW_FIELDS` printed.

    Raises:
        MalformedError: a line is not of that form.
    """
    rows = []
    for index, job, name, uid, submitted, started, ended, elapsed, state, code in _lines(text, CELLS, "sacct"):
        exit_code, _, number = code.partition(":")
        row = Row(
            id=_whole(index, "row"),
            job=_whole(job, "job"),
            name=name,
            uid=_whole(uid, "user id"),
            submitted=_whole(submitted, "submit time"),
            started=_time(started),
            ended=_time(ended),
            elapsed_seconds=_whole(elapsed, "elapsed seconds"),
            state=_state(state.partition(" by ")[0]),
            exit_code=_whole(exit_code, "exit code"),
            signal=_whole(number, "signal"),
        )
        rows.append(row)
    return tuple(rows)


def parse_configuration(text: str) -> Mapping[str, str]:
    """Parse what `scontrol show config` printed; lines of another form (its titles) are left out."""
    found = (re.fullmatch(r"(\w+)\s*= (.*)", line) for line in text.splitlines())
    return {match[1]: match[2].strip() for match in found if match}


def parse_submitted(text: str) -> int | None:
    """Return the job id in the answer of `sbatch --parsable`; None if there is none."""
    match = re.fullmatch(r"([0-9]+)(;[^\n]*)?\n?", text)
    return int(match[1]) if match else None


def _lines(text: str, cells: int, program: str) -> Iterator[list[str]]:
    for line in text.splitlines():
        found = line.split("|")
        if len(found) != cells:
            raise MalformedError(f"expected {cells} cells in each line of {program}, found {line!r}")
        yield found


def _whole(text: str, what: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise MalformedError(f"expected the {what} as a whole number from Slurm, found {text!r}")
    return int(text)


def _time(text: str) -> int | None:
    return None if text in ("Unknown", "None", "N/A", "0") else _whole(text, "time")


def _state(text: str) -> str:
    if not re.fullmatch(r"[A-Z_]{1,40}", text):
        raise MalformedError(f"expected a state of a Slurm job, found {text!r}")
    return text

"""The conformance kit: run any verifier over every golden and every vector, and compare what it says.

    python -m tests.conformance.kit --verifier 'COMMAND {file} {options}'

`{file}` is a capsule and `{options}` what it is looked at with; without `{options}` the cases that need some are left
out. README.md beside this file says what the command must print. Exit code 0 if every answer is the expected one.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

GOLDENS = Path(__file__).parents[1] / "golden"
SECONDS_MAX = 60
REFUSED = "refused"
"""The answer for a file that is no capsule: no verdict, and an exit code that is not 0."""


@dataclass(frozen=True)
class Answer:
    """Integrity (or that the file was refused), outcome, and the checks that failed."""

    integrity: str
    outcome: str = "withheld"
    failed: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join([self.integrity, self.outcome, *self.failed])


@dataclass(frozen=True)
class Case:
    """A capsule with options, and what any verifier must say of it.

    Of a golden the whole `answer` is known. A vector has one fault: `integrity` is known, and one of `checks` must be
    among those that failed; a file that is no capsule may be refused or broken.
    """

    name: str
    build: Callable[[], bytes] | Path
    options: tuple[str, ...] = ()
    answer: Answer | None = None
    integrity: str = ""
    checks: tuple[str, ...] = ()

    @property
    def expected(self) -> str:
        """What is expected, in words."""
        if self.answer:
            return str(self.answer)
        return " ".join([self.integrity, "withheld", *([" or ".join(self.checks)] if self.checks else [])])

    def agrees(self, found: Answer) -> bool:
        """Whether an answer is the expected one."""
        if self.answer:
            return found == self.answer
        if self.integrity == REFUSED:
            return found.integrity in (REFUSED, "broken")
        one = not self.checks or bool(set(self.checks) & set(found.failed))
        return found.integrity == self.integrity and found.outcome == "withheld" and one


def goldens() -> Iterator[Case]:
    """Yield every golden, `NAME`, and every other look at one, `NAME@VARIANT`; their options name files beside them."""
    for path in sorted(GOLDENS.glob("*.expected.json")):
        said = json.loads(path.read_text(encoding="utf-8"))
        name = path.name.removesuffix(".expected.json")
        file = GOLDENS / f"{name.partition('@')[0]}.capsule"
        answer = Answer(said["integrity"], said["outcome"], tuple(said["failed"]))
        yield Case(name, file, tuple(said.get("options", ())), answer)


def vectors() -> Iterator[Case]:
    """Yield every vector: a file that is sound but for the one fault that its name says."""
    from tests.attacks.items import vectors as every
    from tests.attacks.vectors import BROKEN

    for vector in every():
        no_capsule = vector.exit_code != BROKEN and vector.clause.startswith("C-")
        integrity = "broken" if vector.exit_code == BROKEN else REFUSED if no_capsule else "incomplete"
        yield Case(vector.name, vector.build, integrity=integrity, checks=vector.checks)


def ask(command: str, case: Case, folder: Path) -> Answer:
    """Run a verifier on one case, in the folder of the goldens, and read its answer."""
    if isinstance(case.build, Path):
        file = case.build
    else:
        file = folder / f"{case.name}.capsule"
        file.write_bytes(case.build())
    options = shlex.join(case.options)
    line = command.replace("{file}", shlex.quote(str(file))).replace("{options}", options)
    try:
        done = subprocess.run(line, shell=True, cwd=GOLDENS, capture_output=True, timeout=SECONDS_MAX, check=False)
    except subprocess.TimeoutExpired:
        return Answer(f"no answer in {SECONDS_MAX} s")
    finally:
        if file.parent == folder:
            file.unlink()
    return read_answer(done.stdout, done.returncode)


def read_answer(said: bytes, code: int) -> Answer:
    """Read `integrity`, `outcome` and `failed`, or `checks` with their status, from one JSON object."""
    try:
        verdict = json.loads(said)
        failed = verdict["failed"] if "failed" in verdict else [
            check["id"] for check in verdict["checks"] if check["status"] == "failed"
        ]  # fmt: skip
        return Answer(str(verdict["integrity"]), str(verdict["outcome"]), tuple(map(str, failed)))
    except (ValueError, KeyError, TypeError):
        return Answer(REFUSED if code in (1, 2, 3) else f"no verdict, exit code {code}")


def report(cases: Sequence[Case], answers: Sequence[Answer]) -> int:
    """Print the table and return how many answers are not the expected ones."""
    width = max(len(case.name) for case in cases)
    wrong = 0
    for case, found in zip(cases, answers, strict=True):
        agrees = case.agrees(found)
        wrong += not agrees
        more = "" if agrees else f"; found {found}"
        print(f"{'ok' if agrees else 'DIFFERENT':9}  {case.name.ljust(width)}  {case.expected}{more}")
    print(f"{len(cases) - wrong} of {len(cases)} answers are the expected ones")
    return wrong


def write(cases: Sequence[Case], folder: Path) -> None:
    """Write every vector as a file, and what is expected of each, for whoever wants them without this program."""
    folder.mkdir(parents=True)
    listed = {}
    for case in cases:
        if not isinstance(case.build, Path):
            (folder / f"{case.name}.capsule").write_bytes(case.build())
            listed[case.name] = {"integrity": case.integrity, "one_failed_of": list(case.checks)}
    (folder / "expected.json").write_text(json.dumps(listed, indent=2) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the kit."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.kit", description="Try a verifier.")
    parser.add_argument("--verifier", metavar="COMMAND", help="a shell command with {file} and {options}")
    parser.add_argument("--only", default="", metavar="PREFIX", help="only cases whose names begin so")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only each N-th case")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="so many at once")
    parser.add_argument("--write", type=Path, metavar="DIR", help="write the vectors to a new folder instead")
    chosen = parser.parse_args(arguments)
    cases = [case for case in [*goldens(), *vectors()] if case.name.startswith(chosen.only)]
    if chosen.write:
        write(cases, chosen.write)
        return 0
    if not chosen.verifier or "{file}" not in chosen.verifier:
        parser.error("expected --verifier with {file} in it")
    if "{options}" not in chosen.verifier:
        cases = [case for case in cases if not case.options]
    cases = cases[:: chosen.every]
    if not cases:
        parser.error("no case has such a name")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(chosen.jobs) as pool:
        answers = list(pool.map(partial(ask, chosen.verifier, folder=Path(folder)), cases))
    return int(report(cases, answers) > 0)


if __name__ == "__main__":
    sys.exit(main())

"""The conformance kit by command line: both verifiers pass it, and one that lies, fails or says nothing does not."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.conformance.kit import Answer, Case, goldens, main, read_answer, vectors

ROOT = Path(__file__).parents[2]
PRODUCT = f"{shlex.quote(sys.executable)} -m capsule verify {{file}} {{options}} --json"
SECOND = (
    f"{shlex.quote(sys.executable)} {shlex.quote(str(ROOT / 'tests/conformance/verifier.py'))} {{file}} {{options}}"
)


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("verifier", [PRODUCT, SECOND], ids=["product", "second"])
def test_both_verifiers_pass(verifier: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A sample of goldens, looks with options and vectors; `make conformance` runs all."""
    assert main(["--verifier", verifier, "--every", "160"]) == 0
    told = lines(capsys)
    assert len(told) > 3
    assert {line.split()[0] for line in told[:-1]} == {"ok"}
    assert main(["--verifier", verifier, "--only", "signed@expired-since-"]) == 0


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ('{"integrity": "intact", "outcome": "refuted", "failed": []}', 0),
        ('{"integrity": "broken", "outcome": "withheld", "failed": []}', 1),
        ("", 0),
        ("", 70),
    ],
)
def test_one_that_says_the_same_of_all_does_not(said: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    command = f"echo {shlex.quote(said)} # {{file}} {{options}}\nexit {code}"
    assert main(["--verifier", command, "--only", "signed"]) == 1
    *table, summary = lines(capsys)
    different = [line for line in table if line.startswith("DIFFERENT")]
    assert summary == f"{len(table) - len(different)} of {len(table)} answers are the expected ones"
    assert len(different) > len(table) / 3


def test_one_that_knows_no_signatures_is_not_asked_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    command = SECOND.replace(" {options}", "")
    assert main(["--verifier", command, "--only", "signed"]) == 0
    assert [line.split()[1] for line in lines(capsys)[:-1]] == ["signed@nobody-trusted"]


def test_what_it_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--verifier", "true"], ["--verifier", "true {file}", "--only", "no-such-case"]):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 2
    assert "no case has such a name" in capsys.readouterr().err


def test_answers() -> None:
    """One object with `failed`, or with `checks`; everything else is a refusal or no verdict."""
    checks = [{"id": "V-01", "status": "passed"}, {"id": "V-02", "status": "failed"}]
    said = {"integrity": "broken", "outcome": "withheld"}
    for more in ({"failed": ["V-02"]}, {"checks": checks}):
        assert read_answer(json.dumps(said | more).encode(), 1) == Answer("broken", "withheld", ("V-02",))
    assert read_answer(b'{"error": "malformed"}', 3).integrity == "refused"
    for data in (b"", b"[]", b"\xff", b"1"):
        assert read_answer(data, 70).integrity == "no verdict, exit code 70"


def test_a_vector_needs_its_check() -> None:
    case = Case("x", bytes, integrity="broken", checks=("V-01", "V-02"))
    assert case.agrees(Answer("broken", "withheld", ("V-02", "V-18")))
    assert not case.agrees(Answer("broken", "withheld", ("V-18",)))
    assert not case.agrees(Answer("incomplete", "withheld", ("V-01",)))
    assert not case.agrees(Answer("broken", "supported", ("V-01",)))


def test_names_are_unique() -> None:
    names = [case.name for case in [*goldens(), *vectors()]]
    assert len(set(names)) == len(names) > 500


def test_vectors_are_written(tmp_path: Path) -> None:
    """For whoever has no Python: the files, and what is expected of each."""
    assert main(["--only", "s1-", "--write", str(tmp_path / "vectors")]) == 0
    expected = json.loads((tmp_path / "vectors" / "expected.json").read_text())
    assert {f"{name}.capsule" for name in expected} == set(os.listdir(tmp_path / "vectors")) - {"expected.json"}  # noqa: PTH208
    assert all(item == {"integrity": "broken", "one_failed_of": ["V-08"]} for item in expected.values())


def test_the_commands_of_the_readme_and_of_make(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two commands that the README gives are those of `make conformance`, and run."""
    readme = (ROOT / "tests/conformance/README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^    python -m tests\.conformance\.kit (--verifier '[^C].*')$", readme, re.MULTILINE)
    assert len(commands) == 2
    target = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\nconformance:")[2].partition("\n\n")[0]
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    for command in commands:
        arguments = shlex.split(command)
        assert arguments[1].partition(" ")[2] in target
        assert main([*arguments, "--only", "supported@d"]) == 0

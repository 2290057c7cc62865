"""The product and the second verifier say the same of every golden, and it is what was expected."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import verifier

from tests.conformance.kit import GOLDENS, Case, goldens
from tests.conftest import Capsule

VERIFIER = Path(__file__).parent / "verifier.py"
EXIT = {"intact": 0, "broken": 1, "incomplete": 3}


def answer(said: dict[str, Any]) -> tuple[str, str, list[str]]:
    failed = said.get("failed") or [c["id"] for c in said.get("checks", ()) if c["status"] == "failed"]
    return said["integrity"], said["outcome"], failed


@pytest.fixture
def product(capsule: Capsule, monkeypatch: pytest.MonkeyPatch) -> Callable[[Case], tuple[dict[str, Any], int]]:
    """What the product says of a golden, and its exit code."""
    monkeypatch.chdir(GOLDENS)

    def call(case: Case) -> tuple[dict[str, Any], int]:
        said = capsule("verify", str(case.build), *case.options, "--json")
        return json.loads(said.out), said.code

    return call


def second(case: Case) -> dict[str, Any]:
    """What the second verifier says of a golden, in this process."""
    said: dict[str, Any] = verifier.answer([str(case.build), *case.options])
    return said


def test_there_are_goldens() -> None:
    assert {"supported", "refuted", "budget-ended", "signed", "amended"} <= {case.name for case in goldens()}
    assert {path.name for path in GOLDENS.glob("*.capsule")} == {
        f"{c.name}.capsule" for c in goldens() if "@" not in c.name
    }


@pytest.mark.parametrize("case", list(goldens()), ids=lambda case: case.name)
def test_golden(case: Case, product: Callable[[Case], tuple[dict[str, Any], int]]) -> None:
    """Both give the expected answer, and say the same of signatures, tokens, order in time and what it rests on."""
    assert case.answer is not None
    expected = (case.answer.integrity, case.answer.outcome, list(case.answer.failed))
    (left, code), right = product(case), second(case)
    assert answer(left) == answer(right) == expected
    assert code == EXIT[case.answer.integrity]
    for key in ("signatures", "tokens", "order"):
        bare = [{name: value for name, value in item.items() if name != "words"} for item in left[key]]
        assert bare == right[key], key
    assert [item["ground"] for item in left["rests_on"]] == right["rests_on"]


@pytest.mark.parametrize("name", ["supported", "signed@expired-key", "bit-flipped"])
def test_it_is_a_program_of_its_own(name: str) -> None:
    """The second verifier runs apart from everything else, prints its answer and ends with its code."""
    case = next(case for case in goldens() if case.name == name)
    assert case.answer is not None
    command = [sys.executable, "-I", str(VERIFIER), str(case.build), *case.options]
    done = subprocess.run(command, cwd=GOLDENS, capture_output=True, check=False, text=True)
    assert not done.stderr
    assert answer(json.loads(done.stdout))[0] == case.answer.integrity
    assert done.returncode == EXIT[case.answer.integrity]


def test_against(product: Callable[[Case], tuple[dict[str, Any], int]]) -> None:
    """Both take the identity of the capsule and of its manifest, and nothing else."""
    golden = GOLDENS / "supported.capsule"
    verdict = product(Case("supported", golden))[0]
    other = "sha256:" + "0" * 64
    for digests, failed in (
        ([verdict["manifest"]], []),
        ([verdict["capsule"]], []),
        ([verdict["manifest"], other], ["V-07"]),
    ):
        case = Case("supported", golden, tuple(word for digest in digests for word in ("--against", digest)))
        assert answer(product(case)[0])[2] == answer(second(case))[2] == failed


def test_it_shares_no_code_with_the_product() -> None:
    imported = set()
    for node in ast.walk(ast.parse(VERIFIER.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(str(node.module).partition(".")[0])
    assert imported - set(sys.stdlib_module_names) == {"zstandard", "pyarrow"}

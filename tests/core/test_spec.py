"""The specification and the code hold each other: no clause without a test, no check without a clause."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from capsule.core.attempt import DATA, OUTCOMES, TRANSITIONS
from capsule.core.canonical import canonical
from capsule.core.checks import CHECK_FUNCTIONS
from capsule.core.plan import enumerate_cells
from capsule.core.telemetry import THROTTLE_REASONS, Sample, read_samples
from capsule.core.toml import read_protocol
from capsule.core.verdict import CHECKS

HERE = Path(__file__).parent
SPEC = HERE.parents[1] / "docs" / "spec"
DOCUMENTS = {
    "P": "protocol.md",
    "M": "manifest.md",
    "L": "ledger.md",
    "R": "records.md",
    "K": "capsule.md",
    "T": "telemetry.md",
    "S": "signatures.md",
    "V": "verdict.md",
    "F": "versions.md",
}
CLAUSE = re.compile(r"^- \*\*([A-Z]-[0-9]{2})\*\* ", re.MULTILINE)


def clauses(letter: str) -> list[str]:
    """Return the ids of a document's clauses in their order."""
    return CLAUSE.findall((SPEC / DOCUMENTS[letter]).read_text(encoding="utf-8"))


def held() -> set[str]:
    """Return every id that the docstring of a test names."""
    found: set[str] = set()
    for path in HERE.parent.glob("*/test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found |= set(re.findall(r"\b[A-Z]-[0-9]{2}\b", ast.get_docstring(node) or ""))
    return found


@pytest.mark.parametrize("letter", DOCUMENTS)
def test_ids_are_unique_and_consecutive(letter: str) -> None:
    """A clause has one id, and no id was left away."""
    found = clauses(letter)
    assert found == [f"{letter}-{number:02d}" for number in range(1, len(found) + 1)]
    assert len(found) >= (5 if letter == "F" else 8)


@pytest.mark.parametrize("letter", sorted(set(DOCUMENTS) - {"V"}))
def test_every_clause_is_held_by_a_test(letter: str) -> None:
    """A clause that no test names is a promise that nobody keeps."""
    assert set(clauses(letter)) <= held()


def test_tests_name_clauses_that_exist() -> None:
    """A test that names a clause names one of the specification."""
    known = {clause for letter in DOCUMENTS for clause in clauses(letter)}
    assert {clause for clause in held() if clause[0] in DOCUMENTS} <= known


def test_the_checks_are_the_clauses_of_the_verdict() -> None:
    """Every check has its clause, with its name, in the same order, and every clause its check."""
    text = (SPEC / DOCUMENTS["V"]).read_text(encoding="utf-8")
    named = re.findall(r"^- \*\*(V-[0-9]{2})\*\* \*([a-z ]+)\*:", text, re.MULTILINE)
    assert tuple(named) == CHECKS
    assert clauses("V") == list(CHECK_FUNCTIONS)


def test_clauses_that_are_referred_to_exist() -> None:
    """A reference from one document to another points at a clause."""
    known = {clause for letter in DOCUMENTS for clause in clauses(letter)}
    for name in DOCUMENTS.values():
        text = (SPEC / name).read_text(encoding="utf-8")
        assert set(re.findall(r"\b[PMLRKTSV]-[0-9]{2}\b", text)) <= known, name


def test_every_document_begins_with_an_example() -> None:
    """A reader sees the thing before the rules."""
    for name in DOCUMENTS.values():
        headings = re.findall(r"^## (.*)$", (SPEC / name).read_text(encoding="utf-8"), re.MULTILINE)
        assert headings[0] == "Example", name


def test_the_example_protocol_is_one() -> None:
    """P-01: the example of the protocol's document can be frozen, and plans what the document says."""
    text = (SPEC / "protocol.md").read_text(encoding="utf-8").split("```toml\n")[1].split("```")[0]
    cells = enumerate_cells(read_protocol(text.encode(), "protocol.md"))
    assert (len(cells), len({cell.process for cell in cells})) == (12, 3)


def test_the_state_table_of_the_document_is_the_codes() -> None:
    """L-05: the table in the document has the states and transitions of the code and no others."""
    found: dict[str, dict[str, str]] = {}
    for row in re.findall(r"^\| (.*) \| (.*) \|$", (SPEC / "ledger.md").read_text(encoding="utf-8"), re.MULTILINE):
        if row[0].startswith("`") or row[0] in ("state", "event"):
            continue
        for state in row[0].split(", "):
            moves: dict[str, str] = {}
            waiting: list[str] = []
            for part in row[1].split(", ") if row[1] != "(ended)" else []:
                event, _, target = part.partition(" → ")
                waiting.append(event)
                if target:
                    moves |= dict.fromkeys(waiting, target)
                    waiting = []
            found[state] = moves
    assert found == {state or "(none)": dict(moves) for state, moves in TRANSITIONS.items()}


def test_the_events_of_the_document_are_the_codes() -> None:
    """L-04: the document lists every event with the fields of its data, in their order."""
    text = (SPEC / "ledger.md").read_text(encoding="utf-8")
    found = {
        event: re.findall(r"`([a-z0-9_]+)`", data)
        for event, data in re.findall(r"^\| `([a-z_]+)` \| (.*) \|$", text, re.MULTILINE)
    }
    assert found == {name: list(model.model_fields) for name, model in DATA.items()}


def test_the_outcomes_of_the_document_are_the_codes() -> None:
    """L-10: the document says of every outcome what it says, and names no other."""
    text = (SPEC / "ledger.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^- `([a-z_]+)`: ", text, re.MULTILINE)) == sorted(OUTCOMES)


def test_the_samples_of_the_document_are_the_codes() -> None:
    """T-01 T-05: the document describes every field of a sample and every named bit, and its example is a sample."""
    text = (SPEC / "telemetry.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*`) \| .* \|$", text, re.MULTILINE)
    assert [name for row in rows for name in re.findall(r"`([a-z_]+)`", row)] == list(Sample.model_fields)
    example = json.loads(text.split("laid out:\n")[1].split("\nand what")[0])
    assert isinstance(next(read_samples(canonical(example) + b"\n")), Sample)
    bits = re.findall(r"(0x[0-9]+)\s+`([a-z_]+)`", text)
    assert {int(bit, 16): name for bit, name in bits} == THROTTLE_REASONS


def test_the_index_names_every_document() -> None:
    """A document that the index does not name is not found."""
    index = (SPEC / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\(([a-z]+\.md)\)", index)) == {path.name for path in SPEC.glob("*.md")} - {"README.md"}

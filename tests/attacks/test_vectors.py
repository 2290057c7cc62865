"""Every vector is found by both verifiers, by the check and with the exit code that it names, and so is every item."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from capsule.core.errors import MalformedError
from capsule.steps.verify import verify
from tests.attacks.items import ITEMS, table, vectors, vectors_of
from tests.attacks.records import parquet, with_room
from tests.attacks.vectors import MALFORMED, ROOT, Members, Vector
from tests.conformance import verifier
from tests.conftest import Capsule
from tests.golden.make import seal

EXIT = {"intact": 0, "broken": 1, "incomplete": 3}
PARTS = 24
"""Vectors are tried in parts, so that they can be spread over processes."""


def part(number: int) -> tuple[Vector, ...]:
    return vectors()[number::PARTS]


@pytest.mark.parametrize("number", range(PARTS))
def test_vectors(number: int) -> None:
    """Both verifiers give the same answer, and the check that is named finds the fault and says which clause."""
    for vector in part(number):
        data = vector.build()
        start = time.process_time()
        try:
            verdict = verify(io.BytesIO(data))
        except MalformedError:
            assert (vector.exit_code, vector.checks) == (MALFORMED, ()), vector.name
            assert verifier.verify(data)["integrity"] == "broken", vector.name
            continue
        assert time.process_time() - start < 2, vector.name
        failed = {check.id: check for check in verdict.checks if check.status == "failed"}
        assert EXIT[verdict.integrity] == vector.exit_code, (vector.name, verdict.integrity, [*failed])
        assert verdict.outcome == "withheld", vector.name
        found = [check for name, check in failed.items() if name in vector.checks]
        assert bool(found) == bool(vector.checks), (vector.name, [*failed])
        if vector.clause.startswith("C-"):
            words = [words for check in found for words in check.findings]
            assert any(item.startswith(f"{vector.clause}: ") for item in words), (vector.name, words)
        second = verifier.verify(data)
        answer = second["integrity"], second["outcome"], second["failed"]
        assert answer == (verdict.integrity, verdict.outcome, [*failed]), vector.name


@pytest.mark.parametrize("build", [with_room((8 << 20) - 4096), parquet(row_group_size=1)])
def test_tables_that_are_just_allowed(build: Callable[[], Members]) -> None:
    """R-09: a large row group, and many small ones, are the same table to both verifiers."""
    data = seal(build())
    assert verify(io.BytesIO(data)).integrity == "intact"
    assert verifier.verify(data)["integrity"] == "intact"


@pytest.mark.parametrize("vector", vectors()[::40], ids=lambda vector: vector.name)
def test_command(vector: Vector, tmp_path: Path, capsule: Capsule) -> None:
    """The command ends with the code of the vector, says words only, and writes nothing."""
    path = tmp_path / "x.capsule"
    path.write_bytes(vector.build())
    said = capsule("verify", path, "--json")
    assert said.code == vector.exit_code
    answer = json.loads(said.out)
    assert answer.get("integrity", "malformed") in {1: ["broken"], 3: ["incomplete", "malformed"]}[vector.exit_code]
    assert os.listdir(tmp_path) == ["x.capsule"]  # noqa: PTH208


def test_there_are_many_and_each_has_a_name() -> None:
    names = [vector.name for vector in vectors()]
    assert len(set(names)) == len(names) > 500
    items = {item.id for item in ITEMS}
    assert {name.partition("-")[0] for name in names} <= items
    assert len({vector.build for vector in vectors()}) == len(names)


def test_every_item_is_tried() -> None:
    """No item is without a vector or a test, and the tests that it names are there."""
    for item in ITEMS:
        assert vectors_of(item) or item.tests, item
        for file, names in item.tests.items():
            assert not set(names) - names_of(file), (item.id, file)
    assert len("\n".join(table())) > 20_000


@cache
def names_of(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / f"{file}.py").read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_clause_of_a_packed_document_has_a_vector() -> None:
    """Clauses that no vector breaks are those that a capsule cannot break; each is tried elsewhere, as said here."""
    elsewhere = {
        "M-02", "M-03",  # how an identity is made: core/test_manifest
        "R-06",  # what is kept, not refused: core/test_record
        "R-10", "K-09",  # what is replaced before anything is packed: steps/test_redaction
        "T-05", "T-11",  # names of bits, and outcomes that a budget allows: core/test_telemetry, conformance
        "K-03", "K-05",  # the whole ledger and the view of the journals: L-05 to L-07 and R-09
        "S-01", "S-02", "S-06", "S-07", "S-10", "S-11", "S-12", "S-13",  # need keys or authorities: steps/test_signing
    }  # fmt: skip
    for letter, name in {
        "M": "manifest", "L": "ledger", "R": "records", "T": "telemetry", "K": "capsule", "S": "signatures"
    }.items():  # fmt: skip
        text = (ROOT / f"docs/spec/{name}.md").read_text(encoding="utf-8")
        clauses = set(re.findall(rf"\*\*({letter}-[0-9]{{2}})\*\*", text))
        tried = {vector.clause for vector in vectors()}
        assert clauses - tried - elsewhere == set(), name
        assert elsewhere & tried == set()

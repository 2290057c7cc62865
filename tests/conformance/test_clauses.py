"""CLAUSES.md names every clause of the specification once, and functions that the second verifier has."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
TABLE, _, ABSENT = (HERE / "CLAUSES.md").read_text(encoding="utf-8").partition("## Not in it")
ROWS = re.findall(r"^\| ([A-Z]-.*) \| (`.*`) \|$", TABLE, re.MULTILINE)
PARTLY = {"F-04", "S-13"}
"""Clauses of which the verifier implements a part."""


def test_every_clause_is_named_once() -> None:
    documents = (HERE.parents[1] / "docs" / "spec").glob("*.md")
    text = "\n".join(path.read_text(encoding="utf-8") for path in documents)
    clauses = set(re.findall(r"^- \*\*([A-Z]-[0-9]{2})\*\*", text, re.MULTILINE))
    held = Counter(clause for names, _ in ROWS for clause in names.split())
    absent = set(re.findall(r"\*\*([A-Z]-[0-9]{2})\*\*", ABSENT))
    assert set(held.values()) == {1}
    assert held.keys() | absent == clauses
    assert held.keys() & absent == PARTLY


def test_every_function_is_there() -> None:
    tree = ast.parse((HERE / "verifier.py").read_text(encoding="utf-8"))
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    named = {name for _, words in ROWS for name in re.findall(r"`([a-z0-9_]+)`", words)}
    assert named <= functions, named - functions

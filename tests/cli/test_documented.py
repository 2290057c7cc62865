"""What docs/spec/cli.md says of exit codes and JSON objects is what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from capsule.core import errors

DOCUMENT = (Path(__file__).parents[2] / "docs" / "spec" / "cli.md").read_text(encoding="utf-8")
README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def classes(root: type[errors.CapsuleError]) -> list[type[errors.CapsuleError]]:
    return [root, *(found for child in root.__subclasses__() for found in classes(child))]


def test_every_error_code_is_documented_with_its_exit_code() -> None:
    """The table of exit codes names the code word of every error class in the row of its exit code."""
    rows = {int(row[1]): row[0] for row in re.finditer(r"^\| (\d) \|.*$", DOCUMENT, re.MULTILINE)}
    for error in classes(errors.CapsuleError):
        assert f"`{error.code}`" in rows[error.exit_code], error


def test_the_readme_has_the_same_exit_codes() -> None:
    """README and specification list the same codes."""
    for number in range(6):
        assert re.search(rf"^\| {number} \| ", README, re.MULTILINE)
        assert re.search(rf"^\| {number} \| ", DOCUMENT, re.MULTILINE)

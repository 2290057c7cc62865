"""Transcripts: commands and what they say, word for word; `...` stands for what differs from run to run."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.study import make_study

FOLDER = Path(__file__).parents[1] / "transcripts"
CHECKER = doctest.OutputChecker()


def steps(path: Path) -> list[tuple[str, str]]:
    """Return each command of a transcript with everything that it is to say and its exit code if not zero."""
    blocks = re.split(r"^\$ ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return [(command, said.strip() + "\n") for command, _, said in (block.partition("\n") for block in blocks)]


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.txt")))
def test_transcript(name: str, tmp_path: Path) -> None:
    """Every command says what its transcript says."""
    make_study(tmp_path)
    (tmp_path / "empty.capsule").touch()
    make_study(tmp_path / "other", changes={"device_seconds = 200": "device_second = 200"}).rename(
        tmp_path / "unknown-key.toml"
    )
    if name == "whole-way":
        (tmp_path / ".capsule").rmdir()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "COLUMNS": "200", "PATH": path, "PYTHONUNBUFFERED": "1"}  # in order, as a terminal has
    for command, expected in steps(FOLDER / f"{name}.txt"):
        line = re.sub(r"^capsule ", f"{sys.executable} -m capsule ", command)
        said = subprocess.run(
            line,
            shell=True,
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        found = said.stdout.strip() + (f"\n[exit {said.returncode}]" if said.returncode else "") + "\n"
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        assert CHECKER.check_output(expected, found, flags), f"$ {command}\nexpected:\n{expected}\nfound:\n{found}"

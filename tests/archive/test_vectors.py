"""Every clause of the container has vectors that break it, and a file and a pipe give the same findings."""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path

import pytest
from container_vectors import FAULTY, SOUND, Vector

from capsule.archive import layout
from capsule.archive.reader import Examination, examine

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SPEC = ROOT / "docs" / "spec" / "container.md"


def from_file(vector: Vector, data: bytes, folder: Path) -> Examination:
    path = folder / "x.capsule"
    path.write_bytes(data)
    with path.open("rb") as stream:
        return examine(stream, limits=vector.limits, threads=0)


def from_pipe(vector: Vector, data: bytes) -> Examination:
    out, into = os.pipe()

    def feed() -> None:
        with os.fdopen(into, "wb", buffering=0) as stream:
            try:
                for start in range(0, len(data), 1 << 15):
                    stream.write(data[start : start + (1 << 15)])
            except BrokenPipeError:
                return

    thread = threading.Thread(target=feed)
    thread.start()
    with os.fdopen(out, "rb", buffering=0) as stream:
        result = examine(stream, limits=vector.limits)
    thread.join()
    return result


@pytest.mark.parametrize("vector", FAULTY, ids=lambda vector: vector.name)
def test_faulty(vector: Vector, tmp_path: Path) -> None:
    data = vector.build()
    start = time.process_time()
    found = from_file(vector, data, tmp_path)
    assert time.process_time() - start < 2
    assert found.sealed is None
    wanted = [finding for finding in found.findings if finding.code == vector.clause]
    assert wanted, [str(finding) for finding in found.findings]
    if vector.member is not None:
        assert vector.member in {finding.member for finding in wanted}, wanted
    assert all(0 <= finding.offset <= len(data) for finding in found.findings)
    assert found == from_pipe(vector, data)


@pytest.mark.parametrize("vector", SOUND, ids=lambda vector: vector.name)
def test_sound(vector: Vector, tmp_path: Path) -> None:
    data = vector.build()
    found = from_file(vector, data, tmp_path)
    assert found.findings == ()
    assert found.sealed is not None
    assert found.sealed.size_bytes == len(data)
    assert found == from_pipe(vector, data)


def test_every_clause_has_code_and_a_vector() -> None:
    """The clauses of the specification, those that the code names, and those with vectors are the same."""
    clauses = re.findall(r"^- \*\*(C-[0-9]{2})\*\*", SPEC.read_text(), re.MULTILINE)
    assert clauses == [f"C-{number:02}" for number in range(1, len(clauses) + 1)]
    code = "".join(path.read_text() for path in (ROOT / "capsule" / "archive").glob("*.py"))
    assert set(re.findall(r"C-[0-9]{2}", code)) == set(clauses)
    tests = {vector.clause for vector in [*FAULTY, *SOUND]} | set(
        re.findall(r"C-21", (HERE / "test_container.py").read_text())
    )
    assert tests == set(clauses)
    assert len({vector.name for vector in FAULTY}) == len(FAULTY)


def test_names_of_the_specification_are_those_of_the_code() -> None:
    block = SPEC.read_text().split("**C-11**")[1].split("- **C-12**")[0]
    names = []
    for line in re.findall(r"^      (\S+)$", block, re.MULTILINE):
        before, braces, after = re.fullmatch(r"([^{]*)(?:\{(.*)\})?(.*)", line).groups()  # type: ignore[union-attr]
        names += [before + choice + after for choice in (braces or "").split(",")]
    names = [re.sub("N(?=N*/)", "0", name).replace("/H", "/" + "0a" * 32) for name in names]
    names = [name.replace(".K.", ".9.").replace("-R.", f"-{'0a' * 20}.") for name in names]
    assert names == sorted(names)
    assert all(layout.is_allowed(name) for name in names), names
    assert len(names) == 27

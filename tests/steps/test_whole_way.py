"""The whole way once, on a small study: freeze, run, pack, verify, replay, report, show, extract."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Capsule
from tests.study import make_study


@pytest.fixture
def protocol(tmp_path: Path) -> Path:
    return make_study(tmp_path / "study")


def whole(capsule: Capsule, protocol: Path) -> Path:
    for command in ("freeze", "run", "pack"):
        said = capsule(command, protocol)
        assert said.code == 0, said
    return protocol.with_suffix(".capsule")


def test_the_whole_way(capsule: Capsule, protocol: Path, tmp_path: Path) -> None:
    """A study goes the whole way and its capsule is intact, supports its claims, and replays exactly."""
    file = whole(capsule, protocol)
    verified = json.loads(capsule("verify", file, "--json").out)
    assert (verified["integrity"], verified["outcome"], verified["signed"]) == ("intact", "supported", False)
    replayed = capsule(
        "replay", file, "--execute", "--cells", "c000001,c000004", "--output", tmp_path / "again", "--json"
    )
    assert replayed.code == 0, replayed
    answers = {(o["observation"], o["answer"]) for o in json.loads(replayed.out)["observations"]}
    assert answers == {("amount", "exact"), ("seconds", "not_verified")}
    report = capsule("report", file).out
    assert all(f"c{number:06d}" in report for number in range(8))
    assert "supported" in report


def test_every_planned_cell_is_charged_and_final(capsule: Capsule, protocol: Path) -> None:
    """Two starts are two attempts, both charged, and all eight cells are ok."""
    whole(capsule, protocol)
    status = json.loads(capsule("status", protocol, "--json").out)
    assert status["cells"] == {"ok": 8, "failed": 0, "not_run": 0}
    assert [attempt["outcome"] for attempt in status["attempts"]] == ["completed", "completed"]
    assert all(attempt["held_ms"] > 0 for attempt in status["attempts"])
    assert status["budgets"][0]["held_ms"] == sum(attempt["held_ms"] for attempt in status["attempts"])


def test_run_again_does_nothing(capsule: Capsule, protocol: Path) -> None:
    """No cell with a final row runs again."""
    whole(capsule, protocol)
    before = capsule("ledger", protocol, "--json").out
    assert json.loads(capsule("run", protocol, "--json").out)["attempts"] == []
    assert capsule("ledger", protocol, "--json").out == before


def test_packing_twice_gives_the_same_bytes(capsule: Capsule, protocol: Path, tmp_path: Path) -> None:
    """The same content gives the same file."""
    file = whole(capsule, protocol)
    assert capsule("pack", protocol, "--output", tmp_path / "second.capsule").code == 0
    assert (tmp_path / "second.capsule").read_bytes() == file.read_bytes()


def test_stock_tools_list_and_check_it(capsule: Capsule, protocol: Path, tmp_path: Path) -> None:
    """zstd, tar and sha256sum list and check a capsule, and give the manifest's identity."""
    file = whole(capsule, protocol)
    folder = tmp_path / "checked"
    folder.mkdir()
    subprocess.run(f"zstd -dc {file} | tar -x -C {folder}", shell=True, check=True)
    subprocess.run(["sha256sum", "--quiet", "-c", "9-SHA256SUMS"], cwd=folder, check=True)
    identity = json.loads(capsule("verify", file, "--json").out)["manifest"]
    manifest = (folder / "1-manifest" / "001" / "manifest.json").read_bytes()
    assert identity == f"sha256:{hashlib.sha256(manifest).hexdigest()}"


def test_extract_gives_members_and_sources(capsule: Capsule, protocol: Path, tmp_path: Path) -> None:
    """Members and the frozen source tree come out below a fresh folder, byte for byte."""
    file = whole(capsule, protocol)
    assert capsule("extract", file, tmp_path / "members").code == 0
    assert capsule("extract", file, tmp_path / "sources", "--sources").code == 0
    assert (tmp_path / "sources" / "trial.py").read_bytes() == (protocol.parent / "trial.py").read_bytes()
    shown = capsule("show", file, "7-results/results.json").out
    assert (tmp_path / "members" / "7-results" / "results.json").read_text() == shown
    again = capsule("extract", file, tmp_path / "members")
    assert again.code == 4
    assert "empty or new folder" in again.err


def test_verify_reads_a_pipe(capsule: Capsule, protocol: Path) -> None:
    """From a pipe the verdict is the same as from a file."""
    file = whole(capsule, protocol)
    piped = subprocess.run(
        [sys.executable, "-m", "capsule", "verify", "-", "--json"],
        stdin=file.open("rb"),
        capture_output=True,
        check=False,
    )
    assert piped.returncode == 0, piped.stderr
    assert json.loads(piped.stdout) == json.loads(capsule("verify", file, "--json").out)


def test_against_another_identity_is_broken(capsule: Capsule, protocol: Path) -> None:
    """An expected identity decides: the manifest's and the capsule's pass, any other fails with exit code 1."""
    file = whole(capsule, protocol)
    verified = json.loads(capsule("verify", file, "--json").out)
    assert capsule("verify", file, "--against", verified["manifest"], "--against", verified["capsule"]).code == 0
    assert capsule("verify", file, "--against", "sha256:" + "0" * 64).code == 1
    assert capsule("verify", file, "--against", "nonsense").code == 2
    assert capsule("verify", file, "--require-signature").code == 3


def test_a_refuted_hypothesis_is_a_success_of_the_tool(capsule: Capsule, tmp_path: Path) -> None:
    """The outcome changes the exit code only when asked."""
    protocol = make_study(tmp_path / "study", changes={"threshold = 0": "threshold = 5"})
    file = whole(capsule, protocol)
    said = capsule("verify", file, "--json")
    assert said.code == 0
    assert json.loads(said.out)["outcome"] == "refuted"
    assert capsule("verify", file, "--fail-on-outcome").code == 1

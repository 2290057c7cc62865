"""The whole way once, on a small study: freeze, run, pack, verify, replay, report, show, extract."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Capsule
from tests.study import TRIAL, make_study


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
    signers = protocol.parent / "signers"
    signers.write_text(
        "me@example.org ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIBrGbtTQ2n7ooWHGRlH1mjHK2LPvlIYq0ydqX2PuQMBt\n"
    )
    assert capsule("verify", file, "--require-signature", signers).code == 3


def test_a_refuted_hypothesis_is_a_success_of_the_tool(capsule: Capsule, tmp_path: Path) -> None:
    """The outcome changes the exit code only when asked."""
    protocol = make_study(tmp_path / "study", changes={"threshold = 0": "threshold = 5"})
    file = whole(capsule, protocol)
    said = capsule("verify", file, "--json")
    assert said.code == 0
    assert json.loads(said.out)["outcome"] == "refuted"
    assert capsule("verify", file, "--fail-on-outcome").code == 1


def test_secrets_never_reach_the_capsule(capsule: Capsule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token in the environment that a trial prints is in no member; what was redacted where is listed."""
    secret = "correct-horse-" + "battery"
    token = "ghp_" + "x7Yz" * 9
    monkeypatch.setenv("STUDY_API_TOKEN", secret)
    trial = (
        "import os\nfrom trial_base import measure as base\n"
        "def measure(cell):\n    print('using', os.environ['STUDY_API_TOKEN'], 'gh' + 'p_' + 'x7Yz' * 9)\n"
        "    return base(cell)\n"
    )
    protocol = make_study(tmp_path / "study", trial=trial)
    (protocol.parent / "trial_base.py").write_text(TRIAL)
    file = whole(capsule, protocol)
    folder = tmp_path / "out"
    assert capsule("extract", file, folder).code == 0
    for path in folder.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert secret.encode() not in data, path
            assert token.encode() not in data, path
    assert b"[redacted]" in (folder / "3-attempts" / "a000001" / "stdout").read_bytes()
    listed = (folder / "3-attempts" / "a000001" / "redactions.jsonl").read_text().splitlines()
    assert len(listed) == 8


def test_a_repository_of_twenty_thousand_files_freezes(capsule: Capsule, tmp_path: Path) -> None:
    """Size is no obstacle: 20,000 files are frozen, and freezing again finds them equal."""
    protocol = make_study(tmp_path / "study")
    for folder in range(100):
        (protocol.parent / f"d{folder:02d}").mkdir()
        for number in range(200):
            (protocol.parent / f"d{folder:02d}" / f"f{number:03d}.txt").write_bytes(b"%d %d\n" % (folder, number))
    said = json.loads(capsule("freeze", protocol, "--json").out)
    assert said["sources"] == 20_002
    assert json.loads(capsule("freeze", protocol, "--json").out)["written"] is False

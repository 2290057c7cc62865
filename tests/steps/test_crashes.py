"""Kill -9 at any moment: nothing that counts is lost, nothing that counts runs twice, everything is charged."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from capsule.host.reservation import LOCK, Worker, alone
from capsule.host.workspace import find_workspace
from tests.conftest import Capsule
from tests.host.conftest import eventually
from tests.host.crashes import LONG
from tests.host.crashes import chance as chance_of
from tests.steps.machine import ROLES, kill, pids_of
from tests.study import make_study

pytestmark = pytest.mark.slow

TRIAL = """\
import time
def measure(cell):
    time.sleep(0.15)
    return {"amount": float(cell.parameters["factor"]), "seconds": 0.0}
"""


def events_of(capsule: Capsule, protocol: Path) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = json.loads(capsule("ledger", protocol, "--json").out)["events"]
    return listed


VICTIMS = [("cli",), ("supervisor",), ("trial",), ("supervisor", "watchdog"), ROLES]
if LONG:
    VICTIMS = [victims for size in range(1, 6) for victims in itertools.combinations(ROLES, size)]
"""Every set of victims at every state of an attempt: `tests/host/test_kills.py`."""


def targets(protocol: Path, victims: tuple[str, ...]) -> list[int]:
    """Return who of the victims lives, the command left out, once anybody of them does."""
    found = pids_of(protocol)
    return [pid for role in victims for pid in found[role]] or ([0] if victims == ("cli",) else [])


@pytest.mark.parametrize("victims", VICTIMS)
@pytest.mark.parametrize("number", range(3 if LONG else 1))
def test_killed_at_random_moments(capsule: Capsule, tmp_path: Path, victims: tuple[str, ...], number: int) -> None:
    """Whoever is killed when, the next run finishes the plan, and the capsule is intact with every attempt charged."""
    chance = chance_of("study", victims, number)
    retry = "[retry]\nsignalled = 3\nsigkill_unattributed = 3"
    protocol = make_study(tmp_path / "s", trial=TRIAL, changes={"[retry]": retry})
    assert capsule("freeze", protocol).code == 0
    kills = 0
    for _ in range(2):
        run = subprocess.Popen(
            [sys.executable, "-m", "capsule", "run", str(protocol)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        eventually(lambda run=run: run.poll() is not None or pids_of(protocol)["supervisor"])
        time.sleep(chance.random())
        there = eventually(lambda run=run: (run.poll() is not None and [0]) or targets(protocol, victims))
        if run.poll() is not None:
            break
        kills += 1
        if "cli" in victims:
            run.kill()
        kill(filter(None, there))
        run.wait(30)
    assert kills, "the run was over before anything was killed"
    finished = capsule("run", protocol, "--wait")
    assert finished.code == 0, finished
    status = json.loads(capsule("status", protocol, "--json").out)
    assert status["cells"] == {"ok": 8, "failed": 0, "not_run": 0}
    assert not any(pids_of(protocol).values())
    _check_ledger(events_of(capsule, protocol))
    before = capsule("ledger", protocol, "--json").out
    assert capsule("reconcile", protocol).code == 0
    assert capsule("ledger", protocol, "--json").out == before
    assert capsule("pack", protocol).code == 0
    verdict = json.loads(capsule("verify", protocol.with_suffix(".capsule"), "--json").out)
    assert (verdict["integrity"], verdict["outcome"]) == ("intact", "supported"), verdict


def _check_ledger(events: list[dict[str, Any]]) -> None:
    """One terminal event an attempt, a charge for each that started, and no process completed twice."""
    ended = [e for e in events if e["event"] in ("settled", "reconciled", "refused")]
    started = {e["attempt"] for e in events if e["event"] == "reserved"}
    assert sorted(e["attempt"] for e in ended) == sorted(started)
    spawned = {e["attempt"] for e in events if e["event"] == "spawned"}
    charged = {e["attempt"]: e["data"]["charge"]["debited_ms"] for e in ended if e["event"] != "refused"}
    assert all(charged[attempt] > 0 for attempt in spawned)
    process = {e["attempt"]: e["data"]["process"] for e in events if e["event"] == "reserved"}
    completed = [process[e["attempt"]] for e in ended if e["data"].get("outcome") == "completed"]
    assert len(completed) == len(set(completed))


def test_interrupted_once_stops_in_order(capsule: Capsule, tmp_path: Path) -> None:
    """Ctrl-C ends the attempt as `user`, charged and void, with exit code 130; the next run runs its cells again."""
    protocol = make_study(tmp_path / "s", trial=TRIAL)
    assert capsule("freeze", protocol).code == 0
    command = [sys.executable, "-m", "capsule", "run", str(protocol)]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not pids_of(protocol)["trial"]:
        time.sleep(0.02)
    time.sleep(0.3)
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=30)
    assert run.returncode == 130, said
    assert "Traceback" not in said
    status = json.loads(capsule("status", protocol, "--json").out)
    assert [a["outcome"] for a in status["attempts"]] == ["user"]
    assert status["attempts"][0]["held_ms"] > 0
    assert capsule("run", protocol).code == 0
    assert json.loads(capsule("status", protocol, "--json").out)["cells"]["ok"] == 8


def test_terminated_stops_in_order(capsule: Capsule, tmp_path: Path) -> None:
    """SIGTERM to the command ends the attempt in order too, with exit code 143."""
    protocol = make_study(tmp_path / "s", trial=TRIAL)
    assert capsule("freeze", protocol).code == 0
    command = [sys.executable, "-m", "capsule", "run", str(protocol)]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not pids_of(protocol)["trial"]:
        time.sleep(0.02)
    run.send_signal(signal.SIGTERM)
    _, said = run.communicate(timeout=30)
    assert run.returncode == 143, said
    status = json.loads(capsule("status", protocol, "--json").out)
    assert [a["outcome"] for a in status["attempts"]] == ["user"]


def test_nothing_is_cleaned_while_a_run_is_at_work(capsule: Capsule, tmp_path: Path) -> None:
    """Also between its attempts, when none is open: the next one's snapshot may be there already."""
    protocol = make_study(tmp_path / "s")
    assert capsule("freeze", protocol).code == 0
    assert capsule("run", protocol).code == 0
    workspace = find_workspace(protocol)
    snapshots = sorted(workspace.snapshots.iterdir())
    with alone(workspace.state / LOCK, Worker(pid=4711, since="2030-01-02T03:04:05.678Z")):
        said = capsule("clean", protocol)
    assert (said.code, "pid 4711" in said.err) == (4, True), said
    assert sorted(workspace.snapshots.iterdir()) == snapshots != []
    assert capsule("clean", protocol).code == 0
    assert list(workspace.snapshots.iterdir()) == []

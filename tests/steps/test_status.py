"""Status, ledger and doctor: derived from what is there, on pretended devices and while commands run."""

from __future__ import annotations

import itertools
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from capsule.host import ledger
from capsule.host.lease import lease_directory, quarantine, quarantine_path, quarantined
from tests.conftest import Capsule
from tests.host.conftest import eventually
from tests.steps.machine import kill_all, make_devices, make_gpu_study, named, start


@pytest.fixture(autouse=True)
def two_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = make_devices(tmp_path / "devices", "GPU-aaaa", "GPU-bbbb")
    monkeypatch.setenv("CAPSULE_FAKE_DEVICES", str(folder))
    return folder


def frozen(capsule: Capsule, protocol: Path) -> Path:
    said = capsule("freeze", protocol)
    assert said.code == 0, said
    return protocol


def put_aside(device: str) -> None:
    quarantine(
        lease_directory(),
        device,
        words="4096 bytes in use",
        attempt="a000007",
        protocol="other",
        since="2030-01-02T03:04:05.678Z",
    )


# Quarantine.


def test_a_device_in_quarantine_is_passed_over_named_and_readmitted(capsule: Capsule, tmp_path: Path) -> None:
    """Left open, another device is taken; by name it is refused with the command that lifts it; then it runs."""
    protocol = frozen(capsule, make_gpu_study(tmp_path / "s", seeds=2, seconds=0.01))
    put_aside("GPU-aaaa")
    passed = json.loads(capsule("run", protocol, "--dry-run", "--json").out)
    assert passed["device"].startswith("GPU-bbbb")
    for more in ([], ["--dry-run"]):
        said = capsule("run", protocol, "--gpu", "GPU-bbbb", "--gpu", "GPU-aaaa", *more)
        assert said.code == 4, said
        assert "GPU-aaaa in quarantine since 2030-01-02T03:04:05.678Z: 4096 bytes in use (attempt a000007" in said.err
        assert "capsule doctor --readmit GPU-aaaa" in said.err
    assert named(protocol, "reserved") == []
    lifted = capsule("doctor", "--readmit", "GPU-aa", "--json")
    assert lifted.code == 0, lifted
    assert json.loads(lifted.out)["readmitted"] == "GPU-aaaa"
    assert quarantined(lease_directory(), "GPU-aaaa") is None
    assert capsule("run", protocol, "--gpu", "GPU-aaaa").code == 0


def test_with_every_device_in_quarantine_nothing_runs(capsule: Capsule, tmp_path: Path) -> None:
    """No other kind of device takes their place in silence."""
    protocol = make_gpu_study(tmp_path / "s", seeds=2, device='"any"')
    frozen(capsule, protocol)
    put_aside("GPU-aaaa")
    put_aside("GPU-bbbb")
    said = capsule("run", protocol)
    assert said.code == 4, said
    assert "in quarantine" in said.err


def test_doctor_lists_devices_their_holder_and_quarantine(capsule: Capsule, tmp_path: Path) -> None:
    """A device in quarantine is listed with words and the command that lifts it, also when it is gone."""
    protocol = frozen(capsule, make_gpu_study(tmp_path / "s", seeds=2, seconds=1))
    run = start("run", protocol, "--gpu", "GPU-bbbb")
    eventually(lambda: named(protocol, "spawned"))
    put_aside("GPU-aaaa")
    put_aside("GPU-gone")
    said = capsule("doctor", "--json")
    devices = {item["device"]: item for item in json.loads(said.out)["devices"]}
    assert devices["GPU-aaaa"]["quarantine"]["words"] == "4096 bytes in use"
    assert (devices["GPU-gone"]["name"], devices["GPU-gone"]["unit"]) == (None, None)
    assert devices["GPU-bbbb"]["holder"]["attempt"] == "a000001"
    assert devices["GPU-bbbb"]["quarantine"] is None
    assert not devices["CPU-0"]["held"]
    words = capsule("doctor").out
    assert "quarantined since 2030-01-02T03:04:05.678Z: 4096 bytes in use (a000007 of other)" in words
    assert "held by a000001 of study, pid" in words
    assert "capsule doctor --readmit GPU-gone" in words
    run.send_signal(signal.SIGINT)
    run.wait(20)


@pytest.mark.parametrize("name", ["GPU-bbbb", "GPU-", "nonsense", ""])
def test_readmitting_what_is_not_in_quarantine_is_an_error(capsule: Capsule, name: str) -> None:
    """Nothing by that name, or several: said with what is there."""
    put_aside("GPU-aaaa")
    put_aside("GPU-aabb")
    said = capsule("doctor", "--readmit", name)
    assert said.code == 2, said
    assert "GPU-aaaa, GPU-aabb" in said.err
    assert quarantine_path(lease_directory(), "GPU-aaaa").exists()


# Status and ledger.


def test_status_tells_a_group_lead_what_it_cost_and_what_remains(capsule: Capsule, tmp_path: Path) -> None:
    """Attempts with cost, end and exclusivity, totals by outcome, budget left, the worst case of what remains."""
    trial = "def measure(cell):\n    assert cell.seed != 1\n    return {'amount': 1.0, 'seconds': 0.0}\n"
    protocol = frozen(capsule, make_gpu_study(tmp_path / "s", seeds=3, trial=trial))
    before = json.loads(capsule("status", protocol, "--json").out)
    assert before["remaining"] == {
        "processes": 3, "open": 0, "cells": 12, "worst_ms": 51_000, "expected_ms": None, "seconds": None,
    }  # fmt: skip
    assert before["budgets"] == [
        {"unit": "gpu", "pilot": False, "budget_ms": 400_000, "held_ms": 0, "left_ms": 400_000}
    ]
    assert not before["done"]
    assert capsule("run", protocol).code == 0
    status = json.loads(capsule("status", protocol, "--json").out)
    assert status["done"]
    assert not status["active"]
    first = status["attempts"][0]
    assert (first["outcome"], first["devices"]) == ("trial_error", ["GPU-aaaa"])
    assert first["exclusivity"] in ("exclusive", "unverifiable")
    assert first["charge"]["debited_ms"] == first["held_ms"]
    totals = {item["outcome"]: item for item in status["totals"]}
    assert (totals["completed"]["attempts"], totals["trial_error"]["attempts"]) == (2, 1)
    budget = status["budgets"][0]
    assert sum(item["held_ms"] for item in status["totals"]) == budget["held_ms"]
    assert budget["left_ms"] == budget["budget_ms"] - budget["held_ms"]
    assert [item["device"] for item in status["devices"]] == ["GPU-aaaa", "GPU-bbbb", "CPU-0"]
    ledger = json.loads(capsule("ledger", protocol, "--json").out)
    assert ledger["totals"] == status["totals"]
    words = capsule("ledger", protocol).out
    assert "failed and void attempts cost 0.0 of" in words
    assert "AssertionError" in words
    assert capsule("ledger", protocol, "--events").out.startswith("seq")


def test_status_while_attempts_go_on(capsule: Capsule, tmp_path: Path) -> None:
    """Open attempts are running, the devices name their holders, and the command at work is named."""
    protocol = frozen(capsule, make_gpu_study(tmp_path / "s", seconds=2))
    run = start("run", protocol, "--gpu", "GPU-aaaa", "--gpu", "GPU-bbbb")
    eventually(lambda: len(named(protocol, "spawned")) == 2)
    status = json.loads(capsule("status", protocol, "--json").out)
    assert [attempt["state"] for attempt in status["attempts"]] == ["running", "running"]
    assert status["run"]["pid"] == run.pid
    assert status["active"]
    assert (status["remaining"]["open"], status["remaining"]["worst_ms"]) == (2, 2 * 17_000)
    held = {item["device"]: item["holder"]["attempt"] for item in status["devices"] if item["holder"]}
    assert sorted(held.values()) == ["a000001", "a000002"]
    assert "at work: capsule run, pid" in capsule("status", protocol).out
    kill_all(protocol)
    run.wait()
    eventually(lambda: "lost" in capsule("status", protocol).out)
    after = json.loads(capsule("status", protocol, "--json").out)
    assert (after["active"], after["run"]) == (False, None)
    assert "`capsule reconcile` settles it" in capsule("status", protocol).out


def test_watching_a_pipe_prints_one_object_for_each_change_until_nothing_is_open(
    capsule: Capsule, tmp_path: Path
) -> None:
    """Every line is one object; the last has nothing open. The ledger's have each event once."""
    protocol = frozen(capsule, make_gpu_study(tmp_path / "s", seeds=2, seconds=0.4))
    run = start("run", protocol)
    eventually(lambda: named(protocol, "spawned"))
    watching = [start(command, protocol, "--watch", "--json") for command in ("status", "ledger")]
    lines, events = ([json.loads(line) for line in item.communicate(timeout=60)[0].splitlines()] for item in watching)
    assert run.wait(30) == 0
    assert [item.returncode for item in watching] == [0, 0]
    assert len(lines) >= 2
    assert lines[0]["active"]
    assert lines[-1]["done"]
    assert all(before != after for before, after in itertools.pairwise(lines))
    seen = [event["seq"] for line in events for event in line["events"]]
    assert seen == list(range(len(json.loads(capsule("ledger", protocol, "--json").out)["events"])))
    words = capsule("status", protocol, "--watch").out
    assert words.count("\n") == 1
    assert words.startswith("2 of 2 processes done")


def test_watching_ends_with_an_interrupt(capsule: Capsule, tmp_path: Path) -> None:
    """Ctrl-C ends it with 130; on a terminal it redraws."""
    protocol = frozen(capsule, make_gpu_study(tmp_path / "s", seeds=2, seconds=3))
    run = start("run", protocol)
    eventually(lambda: named(protocol, "spawned"))
    primary, secondary = pty.openpty()
    watching = subprocess.Popen(
        [sys.executable, "-m", "capsule", "status", str(protocol), "--watch"], stdout=secondary, stderr=secondary
    )
    shown = b""
    until = time.monotonic() + 20
    while shown.count(b"\x1b[H\x1b[2J") < 2 and time.monotonic() < until:
        shown += os.read(primary, 1 << 16)
    watching.send_signal(signal.SIGINT)
    assert watching.wait(20) == 130
    assert shown.count(b"\x1b[H\x1b[2J") >= 2
    assert b"Traceback" not in shown
    for descriptor in (primary, secondary):
        os.close(descriptor)
    run.send_signal(signal.SIGINT)
    assert run.wait(30) == 130


def test_a_locked_ledger_is_said_at_once_and_read_after_a_moment(
    capsule: Capsule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped writer keeps nobody from reading: words name it at once, and the status comes within seconds."""
    assert ledger.PATIENCE_SECONDS / 20 == 3
    monkeypatch.setattr(ledger, "PATIENCE_SECONDS", 12)
    protocol = frozen(capsule, make_gpu_study(tmp_path / "s", seeds=2, seconds=0.01))
    assert capsule("run", protocol).code == 0
    lock = protocol.parent / ".capsule" / "study" / "ledger.jsonl.lock"
    script = "import fcntl, sys\nfile = open(sys.argv[1])\nfcntl.flock(file, fcntl.LOCK_EX)\nprint(flush=True)\ninput()"
    holding = subprocess.Popen([sys.executable, "-c", script, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holding.stdout is not None
    holding.stdout.readline()
    began = time.monotonic()
    said = capsule("status", protocol)
    assert said.code == 0, said
    assert time.monotonic() - began < 8
    assert f"the ledger is locked by pid {holding.pid}" in said.err
    assert "processes: 2 of 2 done" in said.out
    holding.communicate(b"\n")
    assert "locked" not in capsule("status", protocol).err

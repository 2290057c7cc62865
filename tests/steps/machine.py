"""A pretended machine with devices, and commands that really run on it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from capsule.host.process import descendants, is_alive
from capsule.host.traces import read_traces
from tests.study import make_study

TRIAL = """\
import os, time
def measure(cell):
    time.sleep(@SECONDS@)
    return {"amount": float(cell.parameters["factor"]), "seconds": 0.0}
"""


def make_devices(folder: Path, *uuids: str) -> Path:
    """Write a folder of pretended devices, for CAPSULE_FAKE_DEVICES."""
    for uuid in uuids:
        (folder / uuid / "allocations").mkdir(parents=True)
        (folder / uuid / "device.json").write_text(json.dumps({"name": "Fake H200"}))
    return folder


def make_gpu_study(
    folder: Path, *, devices: int = 1, seconds: float = 0.1, seeds: int = 4, trial: str = TRIAL, **changes: str
) -> Path:
    """Write a study for devices, of one process a seed; keywords replace the value of a key of the budget."""
    budget = {"device": '"gpu"', "device_seconds": "400"} | changes
    text = {f"{key} = ": value for key, value in budget.items()}
    protocol = make_study(
        folder,
        trial=trial.replace("@SECONDS@", str(seconds)),
        changes={"seeds = [1, 2]": f"seeds = {list(range(1, seeds + 1))}"},
    )
    lines = protocol.read_text().splitlines()
    for number, line in enumerate(lines):
        for key, value in text.items():
            if line.startswith(key):
                lines[number] = f"{key}{value}"
    lines.insert(lines.index("[budget]") + 1, f"devices = {devices}")
    protocol.write_text("\n".join(lines) + "\n")
    return protocol


def start(*arguments: str | Path, prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """Start a command as a process of its own."""
    command = [*prefix, sys.executable, "-m", "capsule", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def events_of(protocol: Path) -> list[dict[str, Any]]:
    """Read a study's ledger as it is on disk, whole lines only."""
    path = protocol.parent / ".capsule" / protocol.stem / "ledger.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def named(protocol: Path, name: str) -> list[dict[str, Any]]:
    """Return the events of that name."""
    return [event for event in events_of(protocol) if event["event"] == name]


def rows_of(protocol: Path, attempt: str) -> int:
    """Return how many rows an attempt has written."""
    journal = protocol.parent / ".capsule" / protocol.stem / "attempts" / attempt / "journal.jsonl"
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def at_once_at_most(protocol: Path) -> int:
    """Return how many attempts were going on at the same time, from lease to release."""
    moments = [(event["data"]["leased"]["boottime_ms"], 1) for event in named(protocol, "intent")]
    moments += [(event["data"]["released"]["boottime_ms"], -1) for event in named(protocol, "device_clean")]
    most = now = 0
    for _, step in sorted(moments):
        now += step
        most = max(most, now)
    return most


def devices_of(protocol: Path) -> dict[str, tuple[str, ...]]:
    """Return the devices of every attempt that was reserved."""
    return {event["attempt"]: tuple(event["data"]["devices"]) for event in named(protocol, "reserved")}


def check_no_device_twice(*protocols: Path) -> None:
    """No device had two attempts at the same time, and no process ran twice at the same time."""
    spans: dict[Any, list[tuple[int, int]]] = {}
    for protocol in protocols:
        held = {event["attempt"]: event["data"] for event in named(protocol, "reserved")}
        ended = {
            event["attempt"]: event["data"]["released"]["boottime_ms"] for event in named(protocol, "device_clean")
        }
        for event in named(protocol, "intent"):
            name, began = event["attempt"], event["data"]["leased"]["boottime_ms"]
            for thing in (*held[name]["devices"], (str(protocol), held[name]["process"])):
                spans.setdefault(thing, []).append((began, ended.get(name, began)))
    for thing, found in spans.items():
        for (_, end), (begin, _) in itertools.pairwise(sorted(found)):
            assert end <= begin, (thing, found)


ROLES = ("cli", "supervisor", "watchdog", "sampler", "trial")


def pids_of(protocol: Path) -> dict[str, list[int]]:
    """Return the live processes of a study's attempts by their role, as the attempts themselves name them."""
    found: dict[str, list[int]] = {role: [] for role in ROLES}
    for folder in (protocol.parent / ".capsule" / protocol.stem / "attempts").glob("a*"):
        whereabouts = read_traces(folder).whereabouts
        if whereabouts is None:
            continue
        watchdog = whereabouts.watchdog.pid if whereabouts.watchdog and is_alive(whereabouts.watchdog) else 0
        if is_alive(whereabouts.supervisor):
            own = whereabouts.supervisor.pid
            found["supervisor"].append(own)
            found["sampler"] += [item.pid for item in descendants(own) if item.parent == own and item.pid != watchdog]
        if watchdog:
            found["watchdog"].append(watchdog)
            found["trial"] += [item.pid for item in descendants(watchdog)]
    return found


def kill(pids: Iterable[int]) -> None:
    """Kill processes that may be gone."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_all(protocol: Path) -> None:
    """Kill every process of a study's attempts."""
    found = pids_of(protocol)
    assert found["supervisor"], "nothing of it lives"
    kill(itertools.chain(*found.values()))

"""The report of drawn histories: what the devices were seen doing is in it, and no more than that."""

from __future__ import annotations

import json
from pathlib import Path

import histories
import pytest

from capsule.steps.report import report
from tests.golden.make import seal


@pytest.mark.parametrize("seed", range(12))
def test_what_was_seen_of_devices_is_reported(seed: int, tmp_path: Path) -> None:
    """Every attempt with telemetry has a line for each device; every doubt about one that counts is said."""
    members = histories.draw(seed)
    path = tmp_path / "drawn.capsule"
    path.write_bytes(seal(members))
    told = report(path).partition("## Devices\n")[2].partition("\n## ")[0]
    settled = [
        event for event in map(json.loads, members["2-ledger.jsonl"].splitlines()) if event["event"] == "settled"
    ]
    lines = [f"| {event['attempt']} | {device} |" for event in settled for device in event["data"]["telemetry"]]
    assert [line for line in lines if line not in told] == []
    assert told.count("| a0") == len(lines)
    doubtful = {event["attempt"] for event in settled if event["data"]["exclusivity"] != "exclusive"}
    said = {word.strip(",.") for line in told.splitlines() if line.endswith(".") for word in line.split()}
    assert {word for word in said if word.startswith("a0")} <= doubtful

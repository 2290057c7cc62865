"""The one pass over a ledger: linear in its events, without keeping them, and light in its attempts."""

from __future__ import annotations

import gc
import json
import tracemalloc
from typing import Any

import pytest
from builders import History, edited, generation, honest, rechained

from capsule.core import ledger_pass
from capsule.core.account import add_up
from capsule.core.attempt import Attempt, Heartbeat, Reserved, Settled
from capsule.core.canonical import canonical_checked
from capsule.core.chain import read
from capsule.core.digest import digest_of
from capsule.core.evidence import Evidence
from capsule.core.judge import judge
from capsule.core.ledger_pass import FINDINGS_MAX, LedgerPass
from capsule.core.manifest import Manifest
from capsule.core.protocol import reserved_ms
from capsule.core.verdict import FINDINGS_COUNTED_MAX

RICH = edited(("device_seconds = 300", "device_seconds = 30000000"))
MANY = 3_000


def through(history: History) -> LedgerPass:
    """Go through a ledger that comes in pieces."""
    size = 1 << 16
    pieces = [history.ledger[start : start + size] for start in range(0, len(history.ledger), size)]
    return LedgerPass(pieces, "ledger", [history.manifest], history_files(history))


def history_files(history: History) -> Any:
    """Return the digests of the files of all attempts."""
    return {name: found.end.files for name, found in history.account.attempts.items() if found.end}


def test_sums_and_attempts_are_those_of_the_whole_ledger() -> None:
    """V-12 V-13: whatever checks ask for of an attempt, one pass leaves what adding up every event gives."""
    history = honest()
    found, whole = through(history).account, add_up(read(history.ledger, "l").events)
    assert (found.faults, found.manifests, found.seen) == (whole.faults, whole.manifests, whole.seen)
    assert [*found.attempts] == [*whole.attempts]
    for light, full in zip(found.attempts.values(), whole.attempts.values(), strict=True):
        assert (light.state, light.pilot, light.held_ms) == (full.state, full.pilot, full.held_ms)
        assert (light.reserved, light.first, light.released) == (full.reserved, full.first, full.released)
        assert (light.heartbeat_ms, light.corrections_ms) == (full.heartbeat_ms, full.corrections_ms)
        if full.intent and full.exit and full.end and light.intent and light.exit and light.end:
            assert (light.intent.leased, light.intent.snapshot) == (full.intent.leased, full.intent.snapshot)
            assert light.exit == full.exit.model_copy(update={"evidence": ""})
            kept = {"evidence": "", "files": {}, **({"telemetry": {}} if isinstance(full.end, Settled) else {})}
            assert light.end == full.end.model_copy(update=kept)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count how often an event is applied, and how often anybody asks what an attempt holds or who a manifest is."""
    counts = {"applied": 0, "held_ms": 0, "identity": 0}
    held, identity, apply = Attempt.held_ms, Manifest.identity, ledger_pass.apply

    def asked(own: Attempt) -> int:
        counts["held_ms"] += 1
        return int(held.__get__(own))

    def named(own: Manifest) -> str:
        counts["identity"] += 1
        return str(identity.__get__(own))

    def applied(account: Any, event: Any) -> None:
        counts["applied"] += 1
        apply(account, event)

    monkeypatch.setattr(Attempt, "held_ms", property(asked))
    monkeypatch.setattr(Manifest, "identity", property(named))
    monkeypatch.setattr(ledger_pass, "apply", applied)
    return counts


def test_time_is_in_proportion_to_the_events(counted: dict[str, int]) -> None:
    """V-12 V-13: each event is applied once and one attempt is looked at for it, however many there are."""
    history = History([generation(RICH)]).opened()
    for number in range(3):
        history.amended(edited(("seeds = [5, 3, 4]", f"seeds = [5, 3, {number + 10}]"), text=RICH))
        data = Reserved(
            manifest=history.manifest.identity, process=0, pilot=False, from_frozen=False, unit="cpu", devices=("cpu",),
            reserved_ms=reserved_ms(history.manifest.protocol.budget),
        )  # fmt: skip
        for attempt in range(MANY // 3):
            history.event("reserved", f"a{number * MANY // 3 + attempt + 1:06d}", data)
    generations = dict(enumerate(history.generations, start=1))
    evidence = Evidence(generations=generations, ledger=history.ledger, members={"2-ledger.jsonl"})
    counted.update(applied=0, held_ms=0, identity=0)
    verdict = judge(evidence)
    words = {check.id: check for check in verdict.checks}
    assert words["V-12"].words == f"{MANY} findings", "none of the attempts has ended"
    assert words["V-13"].status == "passed"
    assert counted["applied"] == len(history.lines)
    assert counted["held_ms"] < 4 * len(history.lines)
    assert counted["identity"] < 100


def grown(history: History) -> int:
    """Return the bytes that a pass over a ledger leaves behind."""
    files, manifests = history_files(history), [history.manifest]
    data = [history.ledger]
    LedgerPass(data, "ledger", manifests, files)
    gc.collect()
    tracemalloc.start()
    try:
        kept = LedgerPass(data, "ledger", manifests, files)
        assert not kept.walk.faults
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_heartbeats_are_not_kept() -> None:
    """An attempt of many hours leaves as much behind as one of a second."""
    sizes = []
    for beats in (1, 3_000):
        history = History([generation(RICH)]).opened()
        name = history.reserve(0)
        history.start(name)
        for number in range(beats):
            history.event("heartbeat", name, Heartbeat(elapsed_ms=number))
        sizes.append(grown(history))
    assert sizes[1] < sizes[0] + 2_000


def test_attempts_are_light() -> None:
    """An attempt that ended is kept in some thousand bytes, about as many as its lines have."""
    sizes = []
    for count in (1, 101):
        history = History([generation(RICH)]).opened()
        for number in range(count):
            history.attempt(number % 3)
        sizes.append(grown(history))
    assert sizes[1] - sizes[0] < 100 * 6_000


DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "words": ("settled", {"evidence": "x" * 2_000_000 + "\U0001f600"}),
    "files": ("settled", {"files": {f"{n}": {"sha256": "sha256:" + "0" * 64, "size": 0} for n in range(6_000)}}),
    "arguments": ("intent", {"argv": [""] * 45_000}),
    "baseline": ("intent", {"device_baseline": {f"{n}": None for n in range(12_000)}}),
    "devices": ("reserved", {"devices": [f"{n}" for n in range(1_000)]}),
}


@pytest.mark.parametrize(("name", "values"), DENSE.values(), ids=DENSE)
def test_what_few_bytes_declare_is_not_kept(name: str, values: dict[str, Any]) -> None:
    """However much events that compress well declare, going through them takes some megabytes and leaves little."""
    history = History([generation(RICH)]).opened()
    for number in range(3):
        history.attempt(number)
    lines: list[bytes] = []
    for number, line in enumerate(history.lines):
        event = json.loads(line) | {"prev": digest_of(lines[-1]) if number else None}
        if event["event"] == name:
            event["data"].update(values)
        lines.append(canonical_checked(event))
    data = [line + b"\n" for line in lines]
    tracemalloc.start()
    try:
        kept = LedgerPass(data, "ledger", [history.manifest], {})
        assert (kept.walk.faults, kept.account.faults) == ([], [])
        size, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 40 << 20
    assert size < 1 << 19


def test_what_is_found_is_kept_up_to_what_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """V-12 V-13: findings are kept up to one more than a check counts."""
    assert FINDINGS_MAX > FINDINGS_COUNTED_MAX
    monkeypatch.setattr(ledger_pass, "FINDINGS_MAX", 50)
    history = History([generation(edited(("device_seconds = 300", "device_seconds = 10")))]).opened()
    for _ in range(100):
        history.reserve(0)
    history.lines = rechained(history.ledger, lambda events: events.extend([events[0]] * 60)).splitlines()
    found = LedgerPass(history.ledger, "ledger", [history.manifest], {})
    assert (len(found.account.faults), len(found.over)) == (50, 50)

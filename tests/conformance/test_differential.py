"""The product and the second verifier against each other, on capsules that are drawn, forged and damaged.

A disagreement is a bug in one of the two or a gap in the specification. Each case is drawn from its number alone, so a
failure names all that is needed to see it again.
"""

from __future__ import annotations

import io
import json
import math
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import histories
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import verifier
from mutations import HEAD, LEDGER, ROWS, SAMPLES, mend, mutate

from capsule.core.canonical import canonical, join_lines, parse_lines
from capsule.core.digest import digest_of
from capsule.core.errors import MalformedError
from capsule.core.estimate import t_quantile
from capsule.core.table import TELEMETRY_COLUMNS
from capsule.steps.verify import verify
from tests.golden.make import MANIFEST, Members, rechain, row_removed, seal, unpack
from tests.tables import read_rows, table_bytes

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parents[1] / "golden"
HONEST = ("supported", "refuted", "budget-ended")
Answer = tuple[str, str, list[str]]
REFUSED: Answer = ("broken", "withheld", ["V-01"])
"""What stands for a file that is no capsule at all, which the product refuses in words."""


@cache
def golden(name: str) -> tuple[bytes, Members]:
    data = (GOLDEN / f"{name}.capsule").read_bytes()
    return data, unpack(data)


@cache
def drawn(seed: int) -> Members:
    return histories.draw(seed)


def product(data: bytes, *against: str) -> Answer:
    try:
        verdict = verify(io.BytesIO(data), against=against)
    except MalformedError:
        return REFUSED
    return verdict.integrity, verdict.outcome, [check.id for check in verdict.checks if check.status == "failed"]


def second(data: bytes, *against: str) -> Answer:
    answer = verifier.verify(data, against)
    return answer["integrity"], answer["outcome"], answer["failed"]


@pytest.mark.parametrize("tens", range(4))
def test_drawn_histories(tens: int) -> None:
    """An honest history is intact whatever happened in it, and both derive the same outcome."""
    for seed in range(10 * tens, 10 * tens + 10):
        data = seal(drawn(seed))
        assert second(data)[0] == "intact", (seed, verifier.verify(data)["findings"])
        assert product(data) == second(data), seed
        verdict, answer = verify(io.BytesIO(data)), verifier.verify(data)
        claims = [claim.model_dump(exclude={"words"}) for claim in verdict.order]
        assert (claims, [item.ground for item in verdict.rests_on]) == (answer["order"], answer["rests_on"])


@pytest.mark.parametrize("tens", range(20))
def test_forged_members(tens: int) -> None:
    """One or two changes with knowledge of the format, mostly with all that follows from them put right."""
    for seed in range(10 * tens, 10 * tens + 10):
        chance = random.Random(seed)
        honest = golden(chance.choice(HONEST))[1] if chance.random() < 0.5 else drawn(chance.randrange(40))
        members = honest
        for _ in range(chance.choice([1, 1, 2])):
            members = mutate(chance, members)
        if chance.random() < 0.6:
            members = mend(members, honest)
        data = seal(members)
        assert product(data) == second(data), (seed, verifier.verify(data)["findings"])


@pytest.mark.parametrize("tens", range(10))
def test_damaged_bytes(tens: int) -> None:
    """Bytes flipped, cut, added, and whole frames moved: the same damage is found, in the container or in members."""
    for seed in range(10 * tens, 10 * tens + 10):
        chance = random.Random(seed)
        data = damaged(chance, large() if chance.random() < 0.5 else golden(chance.choice(HONEST))[0])
        assert product(data) == second(data), (seed, verifier.verify(data)["findings"])


@cache
def large() -> bytes:
    """A capsule of several frames, with a member that goes over three."""
    noise = random.Random(1).randbytes(3 << 20)
    return seal({**golden("supported")[1], f"6-oracles/{digest_of(noise)[7:]}": noise, "6-oracles/" + "f" * 64: b""})


def damaged(chance: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice([1, 1, 2])):
        size = len(changed)
        at = chance.choice(
            [chance.randrange(size), chance.randrange(min(size, 600)), size - 1 - chance.randrange(400) % size]
        )
        match chance.randrange(6):
            case 0:
                changed[at] ^= 1 << chance.randrange(8)
            case 1:
                del changed[max(at, 1) :]
            case 2:
                pieces = [b"\0", b"x" * 9, b"\x28\xb5\x2f\xfd", b"\x50\x2a\x4d\x18\x04\0\0\0abcd", golden("refuted")[0]]
                changed[at:at] = chance.choice(pieces)
            case 3:
                del changed[at : at + chance.choice([1, 4, 100, 5000])]
            case 4:
                frames = frames_of(bytes(changed))
                if frames:
                    start, stop = chance.choice(frames)
                    piece = changed[start:stop]
                    del changed[start:stop]
                    place = chance.choice(frames)[0]
                    changed[place:place] = chance.choice([b"", piece, piece + piece])
            case _:
                changed[at : at + 8] = chance.randbytes(8)
        changed = changed or bytearray(b"x")
    return bytes(changed)


def frames_of(data: bytes) -> list[tuple[int, int]]:
    """Begin and end of each data frame, up to the first fault."""
    found: list[tuple[int, int]] = []
    try:
        while True:
            start = found[-1][1] if found else 0
            found.append((start, start + verifier.measure(data, start)[0]))
    except verifier.Fault:
        return found


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 30, 99])
def test_quantiles(degrees: int) -> None:
    """Student's t by a continued fraction and by a finite series: closer than results may differ."""
    for level in (0.5, 0.8, 0.9, 0.95, 0.99, 0.999):
        exact = float(verifier.t_quantile(0.5 + level / 2, degrees))
        assert math.isclose(t_quantile(0.5 + level / 2, degrees), exact, rel_tol=1e-12)


@pytest.mark.parametrize(("level", "degrees"), [(0.9999999, 1), (0.9999999, 7), (0.99999, 4), (0.9999, 1)])
def test_quantiles_at_the_ends(level: float, degrees: int) -> None:
    exact = float(verifier.t_quantile(0.5 + level / 2, degrees))
    assert math.isclose(t_quantile(0.5 + level / 2, degrees), exact, rel_tol=1e-12)


def changed_manifest(change: Callable[[dict[str, Any]], None]) -> Members:
    honest = golden("supported")[1]
    manifest = json.loads(honest[MANIFEST])
    change(manifest)
    return mend({**honest, MANIFEST: canonical(manifest)}, honest)


def with_events(members: Members, events: list[dict[str, Any]]) -> Members:
    chained = rechain(events)
    head = canonical({"count": len(chained), "sha256": digest_of(canonical(chained[-1]))})
    return {**members, LEDGER: join_lines(chained), HEAD: head}


def a_list_that_the_manifest_does_not_name() -> Members:
    """Attempts ran sources that nobody froze; their list lies beside the manifest, which does not name it."""
    members = dict(golden("supported")[1])
    entries = parse_lines(members["1-manifest/001/sources.jsonl"], "")
    other = b"print('other code')\n"
    entries[1] |= {"sha256": digest_of(other), "size": len(other)}
    listed = join_lines(entries)
    members |= {f"1-manifest/001/sources-{'ab' * 20}.jsonl": listed, f"5-sources/{digest_of(other)[7:]}": other}
    events = parse_lines(members[LEDGER], LEDGER)
    for event in events:
        if event["event"] == "intent":
            event["data"]["snapshot"] = digest_of(listed)
    return with_events(members, events)


def arms_that_the_protocol_does_not_have() -> Members:
    """M-07: the manifest names no list for the arms of its protocol."""
    return changed_manifest(lambda manifest: manifest.update(arms=[]))


def true_where_the_protocol_says_one() -> Members:
    """M-09: the manifest gives a trial `true`, the protocol's file 1."""
    return changed_manifest(lambda manifest: manifest["protocol"]["arms"][0]["parameters"].update(factor=True))


def sealed_bytes_that_are_not_what_they_say() -> Members:
    """L-03: the torn tail that an event keeps has another size and digest."""
    members = golden("supported")[1]
    events = parse_lines(members[LEDGER], LEDGER)
    data = {"size": 5, "sha256": digest_of(b"other"), "hex": "00"}
    return with_events(members, [*events, {**events[-1], "event": "sealed", "attempt": None, "data": data}])


def a_table_that_is_none() -> Members:
    """The table is there and cannot be read: broken, since to damage a wrong table must not improve the answer."""
    return {**row_removed(golden("supported")[1]), ROWS: b"garbage"}


def a_table_in_an_encoding_that_repeats() -> Members:
    """Kilobytes of a dictionary or of shared prefixes decode to gigabytes."""
    members = golden("supported")[1]
    sink = io.BytesIO()
    pq.write_table(
        pq.read_table(pa.BufferReader(members[ROWS])), sink, compression="none", use_dictionary=False,
        column_encoding={"cell": "DELTA_BYTE_ARRAY"}, store_schema=False,
    )  # fmt: skip
    return {**members, ROWS: sink.getvalue()}


def listed_anew(name: str, data: bytes, members: Members, events: list[dict[str, Any]]) -> Members:
    """Exchange a file of an attempt and what the ledger says of it."""
    _, attempt, file = name.split("/")
    for event in events:
        if event["event"] == "settled" and event["attempt"] == attempt:
            event["data"]["files"][file] = {"size": len(data), "sha256": digest_of(data)}
    return with_events({**members, name: data}, events)


def trials_that_nobody_imported() -> Members:
    """V-16: a completed attempt says nothing of the module that holds its trial."""
    members = golden("supported")[1]
    name = "3-attempts/a000001/provenance.jsonl"
    lines = [line for line in parse_lines(members[name], name) if line["origin"] != "source"]
    return listed_anew(name, join_lines(lines), members, parse_lines(members[LEDGER], LEDGER))


def modules_that_are_no_text() -> Members:
    """V-16: what names a module is a list."""
    members = golden("supported")[1]
    name = "3-attempts/a000001/provenance.jsonl"
    lines = parse_lines(members[name], name)
    return listed_anew(
        name, join_lines([*lines, {**lines[0], "origin": "source", "module": []}]), members,
        parse_lines(members[LEDGER], LEDGER),
    )  # fmt: skip


def sources_anew(change: Callable[[dict[str, Any]], None]) -> Members:
    """Freeze one link more, and let the attempts have run it."""
    honest = golden("supported")[1]
    name = "1-manifest/001/sources.jsonl"
    target = b"trial.py"
    link = {
        "blob": None, "kind": "link", "mode": None, "notes": [], "path": "zz", "sha256": digest_of(target),
        "size": len(target), "target": target.decode(),
    }  # fmt: skip
    change(link)
    data = join_lines([*parse_lines(honest[name], name), link])
    old, new = digest_of(honest[name]).encode(), digest_of(data).encode()
    ledger = parse_lines(honest[LEDGER].replace(old, new), LEDGER)
    return mend({**with_events(honest, ledger), name: data}, honest)


def a_protocol_before_that_cannot_be_read() -> Members:
    """V-17: the first of two manifests stops the reading, so nobody knows what the table's columns are."""
    members = golden("amended")[1]
    return mend({**members, "1-manifest/001/protocol.toml": b"no protocol"}, members)


def oracles_of_other_bytes() -> Members:
    """V-02: an oracle has the digest of other bytes for its name."""
    return {**golden("supported")[1], "6-oracles/" + "0" * 64: b"truth"}


def events_with(kind: str, **changes: Any) -> Members:
    """Change one event of a golden, and all that follows from it."""
    honest = golden("supported")[1]
    events = parse_lines(honest[LEDGER], LEDGER)
    event = next(event for event in events if event["event"] == kind)
    for key, value in changes.items():
        where = event["at"] if key == "realtime" else event["data"]
        where[key] = {**where[key], **value} if isinstance(value, dict) else value
    return mend(with_events(honest, events), honest)


def budget_of_one(exclusivity: bytes) -> Members:
    """Freeze another rule of exclusivity, and leave the attempts as they are."""
    honest = golden("supported")[1]
    place = "1-manifest/001/protocol.toml"
    return mend({**honest, place: honest[place].replace(b"best_effort", exclusivity)}, honest)


def budget_with(line: bytes) -> Members:
    """Freeze a budget with one line more."""
    honest = golden("supported")[1]
    place = "1-manifest/001/protocol.toml"
    return mend({**honest, place: honest[place].replace(b"[budget]", b"[budget]\n" + line)}, honest)


def sampled() -> Members:
    """The first drawn history of which an attempt completed and had its device to itself."""
    return next(members for members in map(drawn, range(400)) if telemetry_of(members))


def telemetry_of(members: Members) -> str | None:
    """Return the first such attempt."""
    for event in parse_lines(members[LEDGER], LEDGER):
        said = event["data"].get("exclusivity"), event["data"].get("outcome")
        if event["event"] == "settled" and said == ("exclusive", "completed"):
            return str(event["attempt"])
    return None


def resampled(change: Callable[[list[dict[str, Any]]], Any], *, mended: bool) -> Members:
    """Change the samples of one attempt, and all that follows from them where `mended`, else only their digest."""
    honest = sampled()
    name = f"3-attempts/{telemetry_of(honest)}/telemetry.jsonl"
    lines = parse_lines(honest[name], name)
    change(lines)
    changed = {**honest, name: join_lines(lines)}
    if mended:
        return mend(changed, honest)
    return listed_anew(name, changed[name], changed, parse_lines(honest[LEDGER], LEDGER))


def settled_as(**values: Any) -> Members:
    """Let the ledger say something else of the same samples."""
    honest = sampled()
    events = parse_lines(honest[LEDGER], LEDGER)
    attempt = telemetry_of(honest)
    next(e["data"] for e in events if e["event"] == "settled" and e["attempt"] == attempt).update(values)
    return with_events(honest, events)


def samples_left_out() -> Members:
    """The samples of an attempt are gone, and the ledger names no such file."""
    honest = sampled()
    events = parse_lines(honest[LEDGER], LEDGER)
    attempt = telemetry_of(honest)
    for event in events:
        if event["event"] == "settled" and event["attempt"] == attempt:
            del event["data"]["files"]["telemetry.jsonl"]
    kept = {name: data for name, data in honest.items() if name != f"3-attempts/{attempt}/telemetry.jsonl"}
    return with_events(kept, events)


def torn_samples() -> Members:
    """An attempt that was seen to its end has a line without its newline."""
    honest = sampled()
    name = f"3-attempts/{telemetry_of(honest)}/telemetry.jsonl"
    return listed_anew(name, honest[name] + b"{", honest, parse_lines(honest[LEDGER], LEDGER))


def table_of_samples(change: Callable[[list[dict[str, Any]]], Any]) -> Members:
    """Change the table of the samples only."""
    honest = sampled()
    rows = read_rows(honest[SAMPLES], TELEMETRY_COLUMNS, 10_000, SAMPLES)
    change(rows)
    return {**honest, SAMPLES: table_bytes(TELEMETRY_COLUMNS, rows)}


ALIEN = {"foreign": [7], "exclusivity": "contaminated"}
ONLY = ["V-19"]
Forgery = tuple[Callable[[], Members], list[str]]
FORGED: dict[str, Forgery] = {
    "list not named": (a_list_that_the_manifest_does_not_name, ["V-04", "V-15"]),
    "arms of nothing": (arms_that_the_protocol_does_not_have, ["V-04", "V-15"]),
    "true for 1": (true_where_the_protocol_says_one, ["V-04"]),
    "sealed": (sealed_bytes_that_are_not_what_they_say, ["V-12"]),
    "no table": (a_table_that_is_none, ["V-17"]),
    "encoding": (a_table_in_an_encoding_that_repeats, ["V-17"]),
    "protocol before": (a_protocol_before_that_cannot_be_read, ["V-04", "V-12", "V-15", "V-17"]),
    "oracle": (oracles_of_other_bytes, ["V-02"]),
    "trial not imported": (trials_that_nobody_imported, ["V-16"]),
    "link's size": (lambda: sources_anew(lambda link: link.update(size=9)), ["V-15"]),
    "link's digest": (lambda: sources_anew(lambda link: link.update(sha256=digest_of(b""))), ["V-15"]),
    "link's mode": (lambda: sources_anew(lambda link: link.update(mode="0644")), ["V-15", "V-16"]),
    "path upwards": (lambda: sources_anew(lambda link: link.update(path="z/../../x")), ["V-15"]),
    "path empty": (lambda: sources_anew(lambda link: link.update(path="z/")), ["V-15"]),
    "path with NUL": (lambda: sources_anew(lambda link: link.update(path="z\0")), ["V-15"]),
    "path needlessly hex": (lambda: sources_anew(lambda link: link.update(path="hex:7a7a")), ["V-15"]),
    "path in capitals": (lambda: sources_anew(lambda link: link.update(path="hex:FF")), ["V-15"]),
    "wait status": (lambda: events_with("exit", wait_status=256), ["V-17"]),
    "completed with 1": (lambda: events_with("exit", wait_status=256, exit_code=1), ["V-17"]),
    "completed by signal": (lambda: events_with("exit", **by_signal(9)), ["V-17"]),
    "completed by limit": (lambda: events_with("exit", cause="wall_limit"), ["V-17"]),
    "not observed": (lambda: events_with("settled", charge={"observed": False}), ["V-13"]),
    "overrun": (lambda: events_with("settled", overrun_ms=1), ["V-13"]),
    "device twice": (lambda: events_with("reserved", devices=["CPU-0", "CPU-0"]), ["V-13"]),
    "other unit": (lambda: events_with("reserved", unit="gpu"), ["V-13"]),
    "too late": (lambda: budget_with(b"not_after = 2026-11-30T20:02:06.977+01:00"), ["V-13"]),
    "killed by nobody": (lambda: events_with("settled", outcome="sigkill_unattributed"), ["V-17"]),
    "excused by a device": (lambda: events_with("settled", outcome="contaminated"), ONLY),
    "excused by doubt": (lambda: events_with("settled", outcome="unverifiable"), ONLY),
    "required": (lambda: budget_of_one(b"required"), ONLY),
    "exclusive unseen": (lambda: events_with("settled", exclusivity="exclusive"), ONLY),
    "sample changed": (lambda: resampled(lambda lines: lines[0].update(ALIEN), mended=False), ONLY),
    "sample hidden": (lambda: resampled(lambda lines: lines[0].update(foreign=[7]), mended=True), ONLY),
    "sample of others": (lambda: resampled(lambda lines: lines[0].update(device="x"), mended=True), ONLY),
    "sample too early": (lambda: resampled(lambda lines: lines.append({**lines[0], "at_ms": 0}), mended=True), ONLY),
    "null without reason": (lambda: resampled(lambda lines: lines[0].update(xid=None, missing={}), mended=True), ONLY),
    "samples left out": (samples_left_out, ONLY),
    "samples torn": (torn_samples, ONLY),
    "summary left out": (lambda: settled_as(telemetry={}, exclusivity="unverifiable"), ONLY),
    "exclusivity": (lambda: settled_as(exclusivity="contaminated"), ONLY),
    "row of samples": (lambda: table_of_samples(lambda rows: rows.pop()), ONLY),
    "cell of samples": (lambda: table_of_samples(lambda rows: rows[0].update(own="9")), ONLY),
    "no table of samples": (lambda: {**sampled(), SAMPLES: b"garbage"}, ONLY),
    "module is no text": (modules_that_are_no_text, ["V-16"]),
    "completed with no status": (lambda: events_with("exit", wait_status=None, exit_code=None), ["V-17"]),
    "no such day": (lambda: events_with("reserved", realtime="2026-02-30T00:00:00.000Z"), ["V-10", "V-12", "V-14"]),
    "in time": (lambda: budget_with(b"not_after = 2036-11-30T20:02:06.978+01:00"), []),
}


def by_signal(number: int) -> dict[str, Any]:
    return {"wait_status": number, "exit_code": None, "signal": number, "cause": "signalled"}


@pytest.mark.parametrize(("forge", "failed"), FORGED.values(), ids=FORGED)
def test_forgeries(forge: Callable[[], Members], failed: list[str]) -> None:
    data = seal(forge())
    assert second(data)[2] == failed
    assert product(data) == second(data)


def test_a_table_of_samples_needs_samples() -> None:
    data = seal({**golden("supported")[1], "4-records/telemetry.parquet": b"samples"})
    assert product(data) == second(data) == ("broken", "withheld", ["V-19"])

"""Vectors of the ledger: events that are canonical, chained and headed, and are not what happened."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from capsule.core.canonical import canonical, parse_lines
from capsule.core.digest import digest_of
from tests.attacks.vectors import (
    HEAD,
    JOURNAL,
    LEDGER,
    Change,
    Members,
    Vector,
    again,
    at,
    data,
    event,
    events,
    golden,
    ledger,
    sealed,
    with_events,
    with_ledger_lines,
    with_member,
)


def head(**values: Any) -> Callable[[], Members]:
    return lambda: with_member(HEAD, canonical({**json.loads(golden()[HEAD]), **values}))


def ledger_vectors() -> Iterator[Vector]:
    lines = golden()[LEDGER].splitlines()
    count = len(lines)
    chain: dict[str, Callable[[], Members]] = {
        "seq-off-by-one": lambda: with_member(LEDGER, golden()[LEDGER].replace(b'"seq":5', b'"seq":6')),
        "prev-null": lambda: with_member(
            LEDGER, golden()[LEDGER].replace(json.dumps(events()[3]["prev"]).encode(), b"null")
        ),
        "event-swapped": lambda: with_member(LEDGER, b"\n".join([*lines[:3], lines[4], lines[3], *lines[5:], b""])),
        "unknown-event": ledger(lambda items: items[4].update(event="started")),
        "field-absent": ledger(lambda items: items[4]["data"].pop("pid")),
        "field-more": ledger(lambda items: items[4]["data"].update(name="x")),
        "no-such-day": event("spawned", lambda item: item["at"].update(realtime="2026-02-30T00:00:00.000Z")),
        "hour-24": event("spawned", lambda item: item["at"].update(realtime="2026-02-03T24:00:00.000Z")),
        "time-without-milliseconds": event("spawned", lambda item: item["at"].update(realtime="2026-02-03T00:00:00Z")),
        "time-with-offset": event("spawned", lambda item: item["at"].update(realtime="2026-02-03T00:00:00.000+01:00")),
        "attempt-upper-case": event("spawned", lambda item: item.update(attempt="A000001")),
        "digest-upper-case": data("reserved", manifest="sha256:" + "A" * 64),
        "digest-short": data("reserved", manifest="sha256:" + "a" * 63),
        "digest-md5": data("reserved", manifest="md5:" + "a" * 32),
        "digest-empty": data("reserved", manifest=""),
        "digest-with-newline": data("reserved", manifest="sha256:" + "a" * 64 + "\n"),
        "no-device": data("reserved", devices=[]),
        "boot-id-long": event("spawned", lambda item: item["at"].update(boot_id="x" * 101)),
        "device-long": data("reserved", devices=["x" * 101]),
        "devices-many": data("reserved", devices=["x"] * 1_001),
        "cause-long": data("exit", cause="x" * 101),
        "event-large": data("settled", evidence="x" * (2 << 20)),
        "event-of-commas": data("settled", evidence="," * 50_000),
        "line-beyond-all": lambda: with_ledger_lines([*lines, b"x" * (4 << 20) + b"x"]),
        "torn-tail": lambda: with_ledger_lines(lines, torn=b'{"at"'),
        "sealed-odd-hex": again_sealed(hex="0"),
    }
    for name, build in chain.items():
        large = name in ("event-large", "event-of-commas", "line-beyond-all")
        clause = "L-03" if name in ("torn-tail", "sealed-odd-hex") else "L-01" if large else "L-04"
        yield Vector(f"h15-ledger-{name}", clause, ("V-10",), sealed(build))
    heads = {
        "ahead": head(count=count + 1),
        "two-behind": head(count=count - 2, sha256=events()[count - 2]["prev"]),
        "other-hash": head(sha256="sha256:" + "0" * 64),
        "empty": head(count=0, sha256=None),
        "negative": head(count=-1),
    }
    for name, build in heads.items():
        yield Vector(f"h15-head-{name}", "L-02", ("V-11",), sealed(build))
    kept = events()
    settled, reserved = kept[at("settled")], kept[at("reserved")]
    states: dict[str, tuple[str, Callable[[], Members]]] = {
        "sealed-other-bytes": ("L-03", again_sealed(hex="00")),
        "opened-of-an-attempt": ("L-04", event("opened", lambda item: item.update(attempt="a000001"))),
        "heartbeat-of-none": (
            "L-04",
            ledger(
                lambda items: (
                    again("spawned", "heartbeat", {"elapsed_ms": 1})(items)
                    or items[at("spawned") + 1].update(attempt=None)
                )
            ),
        ),
        "settled-twice": ("L-05", ledger(again("settled", "settled", settled["data"]))),
        "settled-before-exit": ("L-05", ledger(again("spawned", "settled", settled["data"]))),
        "refused-while-running": (
            "L-05",
            ledger(
                again(
                    "spawned",
                    "refused",
                    {
                        "manifest": reserved["data"]["manifest"],
                        "process": 0,
                        "pilot": False,
                        "reason": "busy",
                        "words": "x",
                    },
                )
            ),
        ),
        "correction-before-end": ("L-05", ledger(again("spawned", "correction", {"debited_ms": 0, "reason": "x"}))),
        "reconciled-without-hold": (
            "L-05",
            ledger(
                again(
                    "spawned",
                    "reconciled",
                    {key: settled["data"][key] for key in ("outcome", "evidence", "charge", "rows", "files")},
                )
            ),
        ),
        "exit-left-out": ("L-05", ledger(lambda items: items.pop(at("exit")))),
        "end-left-out": ("L-05", ledger(lambda items: items.pop(at("device_clean")))),
        "opened-twice": ("L-06", ledger(again("opened", "opened", kept[0]["data"]))),
        "never-opened": ("L-06", ledger(lambda items: items[1:])),
        "adoption-of-nothing-before": (
            "L-06",
            event("manifest_adopted", lambda item: item["data"].update(supersedes="sha256:" + "1" * 64)),
        ),
        "adopted-twice": ("L-06", ledger(again("manifest_adopted", "manifest_adopted", kept[1]["data"]))),
        "attempt-skipped": ("L-07", lambda: renumbered("a000002", "a000003")),
        "other-manifest-reserved": ("L-08", data("reserved", manifest="sha256:" + "2" * 64)),
    }
    for name, (clause, build) in states.items():
        yield Vector(f"h15-ledger-{name}", clause, ("V-12",), sealed(build))
    charge = settled["data"]["charge"]
    books = {
        "reservation-smaller": ("L-08", data("reserved", reserved_ms=1)),
        "reservation-larger": ("L-08", data("reserved", reserved_ms=reserved["data"]["reserved_ms"] + 1)),
        "two-devices": ("L-08", data("reserved", devices=["CPU-0", "CPU-1"])),
        "one-device-twice": ("L-08", data("reserved", devices=["CPU-0", "CPU-0"])),
        "unit-other": ("L-08", data("reserved", unit="gpu")),
        "charge-lowered": ("L-09", data("settled", charge={**charge, "lower_ms": 1, "upper_ms": 1, "debited_ms": 1})),
        "charge-debited-only": ("L-09", data("settled", charge={**charge, "debited_ms": charge["debited_ms"] - 1})),
        "charge-not-observed": ("L-09", data("settled", charge={**charge, "observed": False})),
        "overrun-said": ("L-09", data("settled", overrun_ms=1)),
        "lease-later": (
            "L-09",
            event(
                "intent",
                lambda item: item["data"]["leased"].update(boottime_ms=item["data"]["leased"]["boottime_ms"] + 1),
            ),
        ),
        "release-earlier": (
            "L-09",
            event(
                "device_clean",
                lambda item: item["data"]["released"].update(boottime_ms=item["data"]["released"]["boottime_ms"] - 1),
            ),
        ),
        "released-after-a-restart": (
            "L-09",
            event("device_clean", lambda item: item["data"]["released"].update(boot_id="x")),
        ),
    }
    for name, (clause, build) in books.items():
        yield Vector(f"h4-{name}", clause, ("V-13",), sealed(build))


def again_sealed(hex: str) -> Callable[[], Members]:  # noqa: A002 - the field's name
    said = {"size": 5, "sha256": digest_of(b"other"), "hex": hex}

    def build() -> Members:
        changed = events()
        return with_events([*changed, {**changed[-1], "event": "sealed", "attempt": None, "data": said}])

    return build


def renumbered(old: str, new: str) -> Members:
    """Give an attempt another number, everywhere."""
    members = {name.replace(old, new): content for name, content in golden().items()}
    return with_events(parse_lines(members[LEDGER].replace(old.encode(), new.encode()), LEDGER), members)


def outcome_vectors() -> Iterator[Vector]:
    """Outcomes that do not follow from the exit, or rows and files that are others (L-10, K-04)."""
    signal = {"exit_code": None, "signal": 9, "wait_status": 9, "cause": "signalled"}
    claims = {
        "completed-with-status-1": data("exit", wait_status=256, exit_code=1),
        "completed-by-signal": data("exit", **signal),
        "completed-at-the-limit": data("exit", cause="wall_limit"),
        "completed-and-not-executed": data("exit", wait_status=None, exit_code=None),
        "status-and-code-differ": data("exit", wait_status=256),
        "excused-as-killed": data("settled", outcome="sigkill_unattributed"),
        "excused-as-interrupted": data("settled", outcome="user"),
        "excused-as-lost": data("settled", outcome="lost"),
        "excused-as-never-started": data("settled", outcome="never_started"),
        "rows-more": data("settled", rows=5),
        "rows-none": data("settled", rows=0),
    }
    for name, build in claims.items():
        yield Vector(f"h15-outcome-{name}", "L-10", ("V-17",), sealed(build))
    yield Vector("h15-outcome-unknown", "L-10", ("V-10",), sealed(data("settled", outcome="fine")))
    files = events()[at("settled")]["data"]["files"]
    listed = {
        "absent": with_member(JOURNAL, None),
        "not-named": with_events_changed(lambda items: items[at("settled")]["data"]["files"].pop("stderr")),
        "other-digest": with_events_changed(
            lambda items: items[at("settled")]["data"]["files"]["stderr"].update(
                sha256=files["journal.jsonl"]["sha256"]
            )
        ),
        "other-size": with_events_changed(lambda items: items[at("settled")]["data"]["files"]["stderr"].update(size=1)),
        "of-no-attempt": with_member("3-attempts/a000009/stdout", b"x"),
        "more-than-named": with_member("3-attempts/a000001/redactions.jsonl", b"{}\n"),
        "changed": with_member("3-attempts/a000001/stdout", b"x"),
        "of-another-attempt": with_member(JOURNAL, golden()["3-attempts/a000002/journal.jsonl"]),
    }
    for name, members in listed.items():
        yield Vector(f"h15-file-{name}", "K-04", ("V-14",), sealed(lambda it=members: it))


def with_events_changed(change: Change) -> Members:
    return ledger(change)()

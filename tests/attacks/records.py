"""Vectors of what was observed: journals, the packed table, results, and samples of devices.

Whatever holds digests of the changed part is put right, as a forger would do;
so only a check of meaning finds the fault.
"""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from capsule.core.canonical import join_lines, parse_lines
from capsule.core.manifest import Manifest
from capsule.core.table import TELEMETRY_COLUMNS, table_columns
from tests.attacks.vectors import (
    JOURNAL,
    MANIFEST,
    RESULTS,
    ROWS,
    SAMPLES,
    Change,
    Members,
    Vector,
    either,
    events,
    golden,
    sampled,
    sampled_attempt,
    sealed,
    with_events,
    with_file,
    with_member,
    with_results,
)
from tests.tables import read_rows, table_bytes


def journal_of(old: bytes, new: bytes) -> Callable[[], Members]:
    """Change a journal as text, and what the ledger says of the file."""

    def build() -> Members:
        text = golden()[JOURNAL]
        assert old in text, old
        return with_file(JOURNAL, text.replace(old, new, 1))

    return build


def record_vectors() -> Iterator[Vector]:
    first = golden()[JOURNAL].split(b"\n")[0] + b"\n"
    end = b'{"end":true}\n'
    journals: dict[str, tuple[str, bytes, bytes]] = {
        "value-changed": ("R-09", b'"amount":10.1,', b'"amount":10.2,'),
        "value-by-one-bit": ("R-04", b'"amount":10.129999999999999', b'"amount":10.13'),
        "value-beyond-double": ("R-04", b'"amount":10.1,', b'"amount":1e309,'),
        "value-below-minimum": ("R-03", b'"amount":10.1,', b'"amount":-0.5,'),
        "value-text": ("R-04", b'"amount":10.1,', b'"amount":"10.1",'),
        "value-array": ("R-04", b'"amount":10.1,', b'"amount":[10.1],'),
        "nan-without-payload": ("R-05", b'"amount":10.1,', b'"amount":"NaN:",'),
        "nan-of-a-number": ("R-05", b'"amount":10.1,', b'"amount":"NaN:4024333333333333",'),
        "nan-in-capitals": ("R-05", b'"amount":10.1,', b'"amount":"NaN:FFF8000000000000",'),
        "value-absent": ("R-01", b'"amount":10.1,', b""),
        "value-undeclared": ("R-01", b'"amount":10.1,', b'"amount":10.1,"other":1,'),
        "cell-of-another-process": ("R-01", b"c000000", b"c000004"),
        "cell-not-planned": ("R-01", b"c000000", b"c999999"),
        "row-left-out": ("R-08", first, b""),
        "row-twice": ("R-03", first, first * 2),
        "error-for-a-row": ("R-07", first, b'{"cell":"c000000","error":"x"}\n'),
        "end-left-out": ("R-07", end, b""),
        "end-twice": ("R-01", end, end * 2),
        "end-first": ("R-01", first, end + first),
        "row-after-the-end": ("R-01", end, end + first),
        "torn": ("R-02", end, end + b"{"),
        "line-of-a-mebibyte": ("R-03", end, b'{"x":"' + b"x" * (1 << 20) + b'"}\n' + end),
        "line-of-garbage": ("R-03", end, b"\x1b[2J\xff\n" + end),
    }
    for name, (clause, old, new) in journals.items():
        yield Vector(f"h15-journal-{name}", clause, ("V-17",), sealed(journal_of(old, new)))


def columns() -> list[tuple[str, str]]:
    return table_columns(Manifest.from_bytes(golden()[MANIFEST], "x").protocol.observations)


def rows(change: Change) -> Callable[[], Members]:
    """Change the rows of the packed table."""

    def build() -> Members:
        found = read_rows(golden()[ROWS], columns(), 1000, ROWS)
        return with_member(ROWS, table_bytes(columns(), either(change(found), found)))

    return build


def parquet(**options: Any) -> Callable[[], Members]:
    """Write the same table with other options of Parquet."""

    def build() -> Members:
        sink = io.BytesIO()
        settings = {"compression": "none", "use_dictionary": False, "store_schema": False, "write_statistics": False}
        pq.write_table(pq.read_table(pa.BufferReader(golden()[ROWS])), sink, **(settings | options))
        return with_member(ROWS, sink.getvalue())

    return build


def hidden(encodings: bytes, **options: Any) -> Callable[[], Members]:
    """Write the same table in an encoding that the footer does not name: the last of a list is PLAIN there."""

    def build() -> Members:
        whole = parquet(**options)()[ROWS]
        assert whole.count(encodings) == 1
        return with_member(ROWS, whole.replace(encodings, encodings[:-1] + b"\x00"))

    return build


def renamed_column() -> Members:
    table = pq.read_table(pa.BufferReader(golden()[ROWS]))
    sink = io.BytesIO()
    pq.write_table(table.rename_columns(["x", *table.column_names[1:]]), sink, compression="none", use_dictionary=False)
    return with_member(ROWS, sink.getvalue())


def footer(old: bytes, new: bytes) -> Callable[[], Members]:
    """Change the footer of the table."""

    def build() -> Members:
        whole = golden()[ROWS]
        size = struct.unpack("<I", whole[-8:-4])[0]
        start = len(whole) - 8 - size
        changed = whole[start:].replace(old, new)
        assert changed != whole[start:]
        return with_member(ROWS, whole[:start] + changed)

    return build


def with_room(size: int) -> Callable[[], Members]:
    """Let the first column have so many bytes, most of them behind its page, with all rows as they were."""

    def build() -> Members:
        whole = golden()[ROWS]
        start = len(whole) - 8 - struct.unpack("<I", whole[-8:-4])[0]
        head, tail = re.split(rb"(?<=\x04cell\x15\x00\x16\x10)\x16..\x16..(?=\x26)", whole[start:-8], flags=re.S)
        number, left = b"", 2 * size
        while left > 127:
            number, left = number + bytes([left & 127 | 128]), left >> 7
        sizes = b"\x16" + number + bytes([left])
        changed = head + sizes * 2 + tail
        return with_member(ROWS, whole[:start] + bytes(size) + changed + struct.pack("<I", len(changed)) + b"PAR1")

    return build


def table_vectors() -> Iterator[Vector]:
    """The packed table: rows that are not the journals', and Parquet that lies (R-09)."""
    tables: dict[str, Callable[[], Members]] = {
        "h15-table-row-left-out": rows(lambda found: found[:-1]),
        "h15-table-row-twice": rows(lambda found: [*found, found[-1]]),
        "h15-table-rows-swapped": rows(lambda found: [found[1], found[0], *found[2:]]),
        "h15-table-all-rows-left-out": rows(lambda found: []),
        "h15-table-value-changed": rows(lambda found: found[0].update(amount=11.5)),
        "h15-table-value-null": rows(lambda found: found[0].update(amount=None)),
        "h15-table-status-changed": rows(lambda found: found[0].update(status="failed", reason="trial_error")),
        "h15-table-not-final": rows(lambda found: found[0].update(final=False)),
        "h15-table-attempt-changed": rows(lambda found: found[0].update(attempt="a000002")),
        "h12-table-of-garbage": lambda: with_member(ROWS, b"garbage"),
        "h12-table-empty": lambda: with_member(ROWS, b""),
        "h12-table-of-magic-only": lambda: with_member(ROWS, b"PAR1PAR1"),
        "h12-table-cut": lambda: with_member(ROWS, golden()[ROWS][:-1]),
        "h12-table-cut-in-front": lambda: with_member(ROWS, golden()[ROWS][1:]),
        "h12-table-footer-length-2-gib": lambda: with_member(ROWS, golden()[ROWS][:-8] + b"\xff\xff\xff\x7fPAR1"),
        "h12-table-footer-length-0": lambda: with_member(ROWS, golden()[ROWS][:-8] + bytes(4) + b"PAR1"),
        "h12-table-encrypted": lambda: with_member(ROWS, golden()[ROWS][:-4] + b"PARE"),
        "h12-table-compressed": parquet(compression="zstd"),
        "h12-table-with-dictionary": parquet(use_dictionary=True),
        "h12-table-delta-encoding": parquet(column_encoding={"cell": "DELTA_BYTE_ARRAY"}),
        "h12-table-column-renamed": renamed_column,
        "h12-table-too-many-rows": rows(lambda found: found * 200),
        "h12-table-codec-that-does-not-exist": footer(b"\x04cell\x15\x00", b"\x04cell\x15\x7e"),
        "h12-table-encoding-that-does-not-exist": footer(b"\x06\x00\x19\x18\x04cell", b"\x7e\x00\x19\x18\x04cell"),
        "h12-table-values-more-than-rows": footer(b"\x04cell\x15\x00\x16\x10", b"\x04cell\x15\x00\x16\x7e"),
        "h12-table-delta-encoding-hidden": hidden(b"\x19\x25\x06\x0e", column_encoding={"cell": "DELTA_BYTE_ARRAY"}),
        "h12-table-dictionary-hidden": hidden(b"\x19\x35\x00\x06\x10", use_dictionary=["cell"]),
        "h12-table-row-group-too-large": with_room(8 << 20),
        "h12-table-count-of-rows": footer(b"\x16\x10\x19", b"\x16\x7e\x19"),
    }
    for name, build in tables.items():
        yield Vector(name, "R-09", ("V-17",), sealed(build))


def result_vectors() -> Iterator[Vector]:
    """Results edited to a better verdict, and to any other."""

    def better(results: dict[str, Any]) -> None:
        results["outcome"] = "supported"
        for hypothesis in results["hypotheses"]:
            hypothesis["decision"] = "supported"
            for component in hypothesis["components"]:
                component["decision"] = "supported"

    yield Vector("h16-refuted-to-supported", "K-07", ("V-18",), sealed(with_results, better, golden("refuted")))
    yield Vector("h16-not-run-to-supported", "K-07", ("V-18",), sealed(with_results, better, golden("budget-ended")))
    changes: dict[str, Change] = {
        "outcome-only": lambda it: it.update(outcome="refuted"),
        "decision-only": lambda it: it["hypotheses"][0].update(decision="refuted"),
        "component-only": lambda it: it["hypotheses"][0]["components"][0].update(decision="refuted"),
        "hypothesis-left-out": lambda it: it["hypotheses"].pop(),
        "hypothesis-twice": lambda it: it["hypotheses"].append(it["hypotheses"][0]),
        "claim-reworded": lambda it: it["hypotheses"][0].update(claim="Thrice is more."),
        "mean": lambda it: it["estimates"][0].update(mean="9.5"),
        "interval-narrower": lambda it: it["estimates"][0].update(low="0.6931481", high="0.6931482"),
        "mean-as-nan": lambda it: it["estimates"][0].update(mean="NaN"),
        "value-of-a-start": lambda it: it["estimates"][0]["starts"][0].update(value="1"),
        "start-left-out": lambda it: it["estimates"][0]["starts"].pop(),
        "start-excused": lambda it: it["estimates"][0]["starts"][0].update(reason="x"),
        "gate-passed-more": lambda it: it["gates"][0].update(passed=9),
        "charge-lower": lambda it: it["charges"][0].update(debited_ms=1),
        "cells-more": lambda it: it["cells"].update(ok=9),
        "summary-left-out": lambda it: it["summaries"].pop(),
        "manifest-other": lambda it: it.update(manifest="sha256:" + "4" * 64),
    }
    for name, change in changes.items():
        yield Vector(f"h16-results-{name}", "K-07", ("V-18",), sealed(with_results, change))
    yield Vector(
        "h16-results-of-another-run", "K-07", ("V-18",), sealed(with_member, RESULTS, golden("refuted")[RESULTS])
    )


def telemetry_vectors() -> Iterator[Vector]:
    """Samples that contradict themselves, the ledger or the table (T-01 to T-12)."""
    attempt = sampled_attempt(sampled())
    name = f"3-attempts/{attempt}/telemetry.jsonl"

    def samples(change: Change, *, torn: bytes = b"") -> Callable[[], Members]:
        def build() -> Members:
            found = parse_lines(sampled()[name], name)
            return with_file(name, join_lines(either(change(found), found)) + torn, sampled())

        return build

    def settled(**values: Any) -> Callable[[], Members]:
        def build() -> Members:
            changed = events(sampled())
            for item in changed:
                if item["event"] == "settled" and item["attempt"] == attempt:
                    item["data"].update(values)
            return with_events(changed, sampled())

        return build

    def seen_rows(change: Change) -> Callable[[], Members]:
        def build() -> Members:
            found = read_rows(sampled()[SAMPLES], TELEMETRY_COLUMNS, 10_000, SAMPLES)
            return with_member(SAMPLES, table_bytes(TELEMETRY_COLUMNS, either(change(found), found)), sampled())

        return build

    first = parse_lines(sampled()[name], name)[0]
    told = next(
        item["data"]["telemetry"]
        for item in events(sampled())
        if item["event"] == "settled" and item["attempt"] == attempt
    )
    device = next(iter(told))
    faults: dict[str, tuple[str, Callable[[], Members]]] = {
        "torn": ("T-01", samples(lambda it: it, torn=b"{")),
        "absent": ("T-10", lambda: with_member(name, None, sampled())),
        "line-of-a-mebibyte": ("T-01", samples(lambda it: it[0].update(words="x" * (1 << 20)))),
        "other-device": ("T-02", samples(lambda it: it[0].update(device="x"))),
        "earlier-than-before": ("T-02", samples(lambda it: it.append({**first, "at_ms": 0}))),
        "null-without-reason": ("T-03", samples(lambda it: it[0].update(power_mw=None))),
        "reason-without-null": ("T-03", samples(lambda it: it[0]["missing"].update(driver="x"))),
        "error-with-readings": ("T-03", samples(lambda it: it[0].update(error="x", exclusivity="unverifiable"))),
        "lost-without-error": ("T-03", samples(lambda it: it[0].update(lost=True))),
        "negative-reading": ("T-03", samples(lambda it: it[0].update(power_mw=-1))),
        "foreign-and-exclusive": ("T-04", samples(lambda it: it[0].update(foreign=[7]))),
        "contaminated-by-nobody": ("T-04", samples(lambda it: it[0].update(exclusivity="contaminated", foreign=[]))),
        "foreign-hidden-in-the-sum": (
            "T-09",
            samples(lambda it: it[0].update(exclusivity="contaminated", foreign=[7])),
        ),
        "left-out": ("T-10", samples(lambda it: it[1:] or [])),
        "summary-absent": ("T-10", settled(telemetry={}, exclusivity="unverifiable")),
        "summary-energy": (
            "T-07",
            settled(telemetry={**told, device: {**told[device], "energy_mj": 1, "energy_missing": None}}),
        ),
        "summary-samples": ("T-10", settled(telemetry={**told, device: {**told[device], "samples": 99}})),
        "summary-observed": ("T-06", settled(telemetry={**told, device: {**told[device], "observed_ms": 0}})),
        "summary-throttled": (
            "T-08",
            settled(telemetry={**told, device: {**told[device], "throttled_ms": {"sync_boost": 1}}}),
        ),
        "summary-of-another-device": ("T-10", settled(telemetry={**told, "x": told[device]})),
        "exclusivity-other": ("T-10", settled(exclusivity="contaminated")),
        "table-row-left-out": ("T-12", seen_rows(lambda it: it[1:])),
        "table-row-twice": ("T-12", seen_rows(lambda it: [it[0], *it])),
        "table-value": ("T-12", seen_rows(lambda it: it[0].update(own="9"))),
        "table-of-garbage": ("T-12", lambda: with_member(SAMPLES, b"garbage", sampled())),
        "table-of-nothing": ("T-12", lambda: with_member(SAMPLES, golden()[ROWS])),
    }
    for fault, (clause, build) in faults.items():
        item = "h12" if fault == "table-of-garbage" else "h15"
        yield Vector(f"{item}-telemetry-{fault}", clause, ("V-19",), sealed(build))

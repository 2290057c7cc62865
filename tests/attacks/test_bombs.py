"""Kilobytes of a capsule that declare megabytes of lines or values: few of them are read, and little is kept."""

from __future__ import annotations

import io
import json
import time
import tracemalloc
from collections.abc import Callable

import pytest

from capsule.archive.tables import ROW_BYTES_MAX
from capsule.core.canonical import join_lines, parse_lines
from capsule.core.digest import digest_of
from capsule.core.errors import WORDS_MAX
from capsule.core.verdict import Verdict
from capsule.steps.verify import verify
from tests.attacks.records import columns
from tests.attacks.vectors import (
    CELLS,
    HEAD,
    JOURNAL,
    LEDGER,
    MANIFEST,
    PROVENANCE,
    RESULTS,
    ROWS,
    SOURCES,
    TOML,
    golden,
    with_file,
    with_list,
)
from tests.conformance import verifier
from tests.golden.make import seal
from tests.tables import read_rows, table_bytes

MEBIBYTES = 12 << 20


def table_of_long_texts() -> bytes:
    """Return the packed table with reasons of as many bytes as are read, of which each takes four in memory."""
    rows = read_rows(golden()[ROWS], columns(), 100, ROWS)
    long = "x" * (ROW_BYTES_MAX - 900) + "\U0001f600"
    return table_bytes(columns(), [{**row, "reason": long} for row in rows])


SAMPLED = "3-attempts/a000001/telemetry.jsonl"
BOMBS: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "manifest of arrays": (MANIFEST, lambda: b"[" + b"[]," * (MEBIBYTES // 3) + b"[]]", "V-04"),
    "manifest of numbers": (MANIFEST, lambda: b"[" + b"1," * (MEBIBYTES // 2) + b"1]", "V-04"),
    "head of objects": (HEAD, lambda: b"[" + b"{}," * (MEBIBYTES // 3) + b"{}]", "V-11"),
    "results of arrays": (RESULTS, lambda: b"[" + b"[]," * (MEBIBYTES // 3) + b"[]]", "V-18"),
    "ledger of arrays": (LEDGER, lambda: b"[]\n" * (MEBIBYTES // 3), "V-10"),
    "ledger of one line": (LEDGER, lambda: b'{"at":[' + b"1," * (MEBIBYTES // 2) + b"1]}\n", "V-10"),
    "ledger of newlines": (LEDGER, lambda: b"\n" * MEBIBYTES, "V-10"),
    "cells of numbers": (CELLS, lambda: b"1\n" * (MEBIBYTES // 2), "V-05"),
    "sources of newlines": (SOURCES, lambda: b"\n" * MEBIBYTES, "V-15"),
    "journal of letters": (JOURNAL, lambda: b"x\n" * (MEBIBYTES // 2), "V-17"),
    "journal of newlines": (JOURNAL, lambda: b"\n" * MEBIBYTES, "V-17"),
    "journal of spaces": (JOURNAL, lambda: b" " * MEBIBYTES + b"\n", "V-17"),
    "imports of numbers": (PROVENANCE, lambda: b"1\n" * (MEBIBYTES // 2), "V-16"),
    "results of one text": (RESULTS, lambda: b'"' + b"x" * MEBIBYTES + b'"', "V-18"),
    "manifest of one text": (MANIFEST, lambda: b'"' + "\U0001f600".encode() * (MEBIBYTES // 4) + b'"', "V-04"),
    "imports of one text": (PROVENANCE, lambda: b'"' + b"x" * MEBIBYTES + b'"\n', "V-16"),
    "journal of zeros": (JOURNAL, lambda: bytes(MEBIBYTES), "V-17"),
    "samples of one text": (SAMPLED, lambda: b'{"words":"' + b"x" * MEBIBYTES + b'"}\n', "V-14"),
    "table of long texts": (ROWS, table_of_long_texts, "V-17"),
    "table of zeros": (ROWS, lambda: b"PAR1" + bytes(64 << 20) + b"\x00\x10\x00\x00PAR1", "V-17"),
    "protocol of numbers": (TOML, lambda: b"a=[" + b"1," * 500_000 + b"]", "V-04"),
}


@pytest.mark.parametrize(("name", "build", "check"), BOMBS.values(), ids=BOMBS)
def test_bombs(name: str, build: Callable[[], bytes], check: str) -> None:
    """Each is found within two seconds of the processor, however many lines and values it declares, and not kept."""
    data = seal({**golden(), name: build()})
    assert len(data) < 100_000
    start = time.process_time()
    verdict, peak = measured(data)
    assert time.process_time() - start < 2
    assert peak < 32 << 20
    assert verdict.integrity == "broken"
    assert check in {item.id for item in verdict.checks if item.status == "failed"}


def measured(data: bytes) -> tuple[Verdict, int]:
    """Verify a capsule; return the verdict and the peak of what Python allocated meanwhile, in bytes."""
    tracemalloc.start()
    try:
        verdict = verify(io.BytesIO(data))
        return verdict, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_many_bombs_take_no_more_than_one() -> None:
    """Sixteen journals, and as many files of samples, of four mebibytes each are kept in kilobytes."""
    names = [f"3-attempts/a{number:06d}/{file}.jsonl" for number in range(1, 17) for file in ("journal", "telemetry")]
    verdict, peak = measured(seal({**golden(), **dict.fromkeys(names, b"{}\n" * (4 << 18))}))
    assert verdict.integrity == "broken"
    assert peak < 32 << 20


def test_what_is_kept_is_bounded_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bounds a member is named and not read, so that no number of members fills the memory."""
    data = seal(golden())
    before = [name for name in golden() if name[0] < "3"]
    values = [name for name in before if not name.endswith(".jsonl")]
    for bound, names, first in (
        ("ALL_KEPT_BYTES_MAX", set(before) - set(values), JOURNAL),
        ("DOCUMENTS_BYTES_MAX", set(values) - {HEAD}, HEAD),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(f"capsule.steps.verify.{bound}", sum(len(golden()[name]) for name in names))
            verdict = verify(io.BytesIO(data))
        assert verdict.integrity == "broken"
        found = next(check for check in verdict.checks if check.id == "V-02")
        assert any("beside those before it" in words and words.startswith(first) for words in found.findings)


LONG = {
    "in order": ["trial.py", "z" * (20 << 20)],
    "out of order": ["z" * (20 << 20), "a" * (20 << 20)],
    "of folders": ["a/" * (10 << 20) + "b"],
    "many": ["z" * number for number in range(1_000_000, 1_000_020)],
    "many out of order": ["z" * number for number in range(1_000_019, 999_999, -1)],
}


@pytest.mark.parametrize("paths", LONG.values(), ids=LONG)
def test_long_paths_take_no_memory_and_make_no_long_findings(paths: list[str]) -> None:
    """A path of megabytes takes kilobytes of a capsule: it is neither kept, copied again and again, nor printed."""
    entry = json.loads(golden()[SOURCES].splitlines()[0])
    data = seal(with_list(SOURCES, join_lines({**entry, "path": path} for path in paths)))
    assert len(data) < 100_000
    verdict, peak = measured(data)
    assert peak < 32 << 20
    assert "V-15" in {item.id for item in verdict.checks if item.status == "failed"}
    assert len(verdict.model_dump_json()) < 100_000
    second = verifier.verify(data)
    assert second["failed"] == [item.id for item in verdict.checks if item.status == "failed"]


def test_no_finding_is_long() -> None:
    """Whatever a check quotes, its words have a bound."""
    lines = parse_lines(golden()[PROVENANCE], PROVENANCE)
    module = "m" * 1_000_000
    more = {"module": module, "origin": "unknown", "name": "helper.py", "sha256": digest_of(b"")}
    verdict = verify(io.BytesIO(seal(with_file(PROVENANCE, join_lines([*lines, more])))))
    findings = [words for check in verdict.checks for words in check.findings]
    assert any(words.endswith("mmm is neither frozen nor of an installed distribution") for words in findings)
    assert max(map(len, findings)) <= WORDS_MAX

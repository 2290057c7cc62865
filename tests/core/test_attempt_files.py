"""Digests of the files of many attempts, packed."""

from __future__ import annotations

import tracemalloc

from capsule.core.attempt_files import AttemptFiles
from capsule.core.digest import digest_of
from capsule.core.manifest import FileDigest


def test_what_goes_in_comes_out() -> None:
    """Files are told apart by attempt and name, and an attempt that is not there has none."""
    found = AttemptFiles()
    found.add("a000001", "stdout", 7, digest_of(b"1"))
    found.add("a000002", "stdout", 2**52, digest_of(b"2"))
    found.add("a000001", "stderr", 0, digest_of(b""))
    assert list(found) == ["a000001", "a000002"]
    assert found["a000001"] == {
        "stdout": FileDigest(size=7, sha256=digest_of(b"1")),
        "stderr": FileDigest(size=0, sha256=digest_of(b"")),
    }
    assert found["a000002"]["stdout"].size == 2**52
    assert found.get("a000003") is None


def test_a_file_takes_some_fifty_bytes() -> None:
    """Sixty thousand files of ten thousand attempts take a few mebibytes."""
    tracemalloc.start()
    try:
        found = AttemptFiles()
        for number in range(10_000):
            for file in (
                "environment.json",
                "journal.jsonl",
                "provenance.jsonl",
                "stderr",
                "stdout",
                "telemetry.jsonl",
            ):
                found.add(f"a{number:06d}", file, number, digest_of(b""))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found) == 10_000
    assert held < 5 << 20

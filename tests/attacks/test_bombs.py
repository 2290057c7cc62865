"""Kilobytes of a capsule that declare megabytes of lines or values: few of them are read, and little is kept."""

from __future__ import annotations

import io
import time
from collections.abc import Callable

import pytest

from capsule.steps.verify import verify
from tests.attacks.vectors import CELLS, HEAD, JOURNAL, LEDGER, MANIFEST, PROVENANCE, RESULTS, SOURCES, TOML, golden
from tests.golden.make import seal

MEBIBYTES = 12 << 20
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
    "protocol of numbers": (TOML, lambda: b"a=[" + b"1," * 500_000 + b"]", "V-04"),
}


@pytest.mark.parametrize(("name", "build", "check"), BOMBS.values(), ids=BOMBS)
def test_bombs(name: str, build: Callable[[], bytes], check: str) -> None:
    """Each is found within two seconds of the processor, however many lines and values it declares."""
    data = seal({**golden(), name: build()})
    assert len(data) < 100_000
    start = time.process_time()
    verdict = verify(io.BytesIO(data))
    assert time.process_time() - start < 2
    assert verdict.integrity == "broken"
    assert check in {item.id for item in verdict.checks if item.status == "failed"}


def test_what_is_kept_is_bounded_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound a member is named and not read, so that no number of members fills the memory."""
    data = seal(golden())
    monkeypatch.setattr(
        "capsule.steps.verify.ALL_KEPT_BYTES_MAX", sum(len(golden()[n]) for n in golden() if n[0] < "3")
    )
    verdict = verify(io.BytesIO(data))
    assert verdict.integrity == "broken"
    found = next(check for check in verdict.checks if check.id == "V-02")
    assert any("beside those before it" in words and JOURNAL in words for words in found.findings)

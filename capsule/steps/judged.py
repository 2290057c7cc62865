"""Judged: a capsule read once, verified, and its results derived again; where report, diff and export begin.

Results are there only of an intact capsule, and they are the derived ones: packed results are compared, never shown.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from capsule.core.account import Account, add_up
from capsule.core.chain import Walk
from capsule.core.errors import CapsuleError
from capsule.core.evidence import Evidence
from capsule.core.judge import judge
from capsule.core.manifest import Manifest, read_cells
from capsule.core.progress import final_rows, reserved_processes
from capsule.core.record import read_journal
from capsule.core.results import Results, derive
from capsule.core.verdict import Verdict
from capsule.steps.verify import collect, open_capsule


@dataclass(frozen=True)
class Judged:
    """A capsule's evidence, its verdict, and what could be read of it.

    `manifest` is the one in force, None if it cannot be read; `account` is empty if the ledger cannot be.
    """

    evidence: Evidence
    verdict: Verdict
    manifest: Manifest | None
    account: Account
    results: Results | None

    @property
    def files(self) -> dict[str, bytes]:
        """The files of the manifest in force."""
        return self.evidence.generations.get(max(self.evidence.generations, default=0), {})


def judged(path: Path) -> Judged:
    """Read and judge the capsule at `path`.

    Raises:
        UsageError: there is no such file.
        MalformedError: the file is no capsule.
    """
    with open_capsule(path) as stream:
        return judged_stream(stream)


def judged_stream(stream: BinaryIO) -> Judged:
    """Read and judge the capsule that `stream` gives."""
    evidence = collect(stream)
    verdict = judge(evidence)
    files = evidence.generations.get(max(evidence.generations, default=0), {})
    manifest, account = None, Account()
    with suppress(CapsuleError):
        manifest = Manifest.from_bytes(files.get("manifest.json", b""), "manifest.json")
    with suppress(CapsuleError):
        account = add_up(Walk(evidence.ledger, "2-ledger.jsonl"))
    results = None
    if manifest is not None and verdict.integrity == "intact":
        results = _derived(evidence, manifest, account, files["cells.jsonl"])
    return Judged(evidence, verdict, manifest, account, results)


def _derived(evidence: Evidence, manifest: Manifest, account: Account, listed: bytes) -> Results:
    """Derive the results of an intact capsule from its journals and its ledger."""
    cells = read_cells(listed, "cells.jsonl")
    plan, identity = reserved_processes(cells, account), manifest.identity
    journals = {
        name: read_journal(
            evidence.journals.get(name, b""), manifest.protocol.observations, plan[attempt.reserved.process].names
        )
        for name, attempt in account.attempts.items()
        if attempt.reserved and not attempt.refused and attempt.reserved.manifest == identity
    }
    return derive(manifest, final_rows(manifest, cells, account, journals), account)

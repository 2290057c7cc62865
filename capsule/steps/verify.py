"""Verify: read a capsule once, in order, and judge it. Never executes, never extracts, needs no torch and no workspace.

Small members that the checks read are kept; everything else is only hashed. The file is read the same way from a disk
and from a pipe.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, cast

from capsule.archive.layout import is_allowed
from capsule.archive.model import Finding
from capsule.archive.reader import Chunk, End, MemberEnd, MemberStart, walk
from capsule.archive.tables import read_table, scan_table
from capsule.core.digest import PREFIX, Digests, is_digest
from capsule.core.errors import CapsuleError, MachineError, MalformedError, UsageError
from capsule.core.evidence import KEPT_BYTES_MAX, Evidence
from capsule.core.judge import judge
from capsule.core.manifest import FileDigest, Manifest
from capsule.core.signing import Trust
from capsule.core.source_list import SourceList
from capsule.core.table import TELEMETRY_COLUMNS, table_columns
from capsule.core.verdict import FINDINGS_COUNTED_MAX, Verdict

MAGIC = b"\x28\xb5\x2f\xfd"
"""The first bytes of every zstd frame, and so of every capsule."""

ALL_KEPT_BYTES_MAX = 1 << 30
"""Bytes of all members that are kept: a few kilobytes of a file can declare any number of zeros."""

TABLE_BYTES_MAX = 1 << 30
"""Bytes of one table, which holds the rows of all journals, or all samples."""

SOURCE_LIST = re.compile(r"1-manifest/[0-9]{3}/sources(-[0-9a-f]+)?\.jsonl")
STORED = ("5-sources/", "6-oracles/")
"""Rooms whose members are named by their digests; of them only digests are kept."""

OF_ATTEMPTS = {"journal.jsonl": "journals", "provenance.jsonl": "provenance", "telemetry.jsonl": "telemetry"}
"""Files of an attempt that the checks read, and where the evidence keeps them."""


def verify(stream: BinaryIO, *, against: Sequence[str] = (), trust: Trust | None = None) -> Verdict:
    """Verify the capsule that `stream` gives and return the verdict; `trust` is what `capsule.steps.trust` makes.

    Raises:
        UsageError: an expected identity is not a digest.
        MalformedError: the bytes do not begin like a capsule.
    """
    for digest in against:
        if not is_digest(digest):
            raise UsageError(f"expected a digest `sha256:` and 64 hexadecimal digits, found {digest[:80]!r}")
    return judge(collect(stream, whole_lists=False), against=against, trust=trust)


def open_capsule(path: Path) -> BinaryIO:
    """Open a capsule file for reading.

    Raises:
        UsageError: there is no such file.
        MachineError: it cannot be read.
    """
    try:
        return path.open("rb")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise UsageError(
            f"expected a capsule file at {path}, found {(error.strerror or str(error)).lower()}"
        ) from error
    except OSError as error:
        raise MachineError(f"cannot read {path}: {error.strerror}") from error


def collect(stream: BinaryIO, *, whole_lists: bool = True) -> Evidence:
    """Read a whole capsule into the evidence that the checks need; with `whole_lists` also the bytes of source lists.

    Without them memory grows by some hundred bytes for each source.
    """
    evidence = Evidence(sources=Digests(), frozen=Digests())
    tables: dict[str, bytes] = {}
    for name, size, digest, content in _members(stream, evidence, whole_lists):
        if name.startswith(STORED):
            evidence.stored += 1
        else:
            evidence.members.add(name)
        if not is_allowed(name):
            evidence.later.append(name)
            continue
        data = content if isinstance(content, bytes) else b""
        room, _, rest = name.partition("/")
        match room:
            case "1-manifest":
                number, _, file = rest.partition("/")
                files = evidence.generations.setdefault(int(number), {})
                if isinstance(content, SourceList):
                    evidence.add_list(int(number), file, content)
                else:
                    files[file] = data
            case "2-ledger.jsonl":
                evidence.ledger = data
            case "2-ledger.head.json":
                evidence.head = data
            case "3-attempts":
                attempt, _, file = rest.partition("/")
                evidence.attempt_files.setdefault(attempt, {})[file] = FileDigest(size=size, sha256=digest)
                if file in OF_ATTEMPTS:
                    getattr(evidence, OF_ATTEMPTS[file])[attempt] = data
            case "4-records":
                tables[rest] = data
            case "5-sources" | "6-oracles":
                if room == "5-sources":
                    evidence.add_source(PREFIX + rest)
                if digest != PREFIX + rest:
                    words = f"{name}: expected content with the digest of its name, found {digest}"
                    _note(evidence.member_findings, words)
            case "7-results":
                evidence.results = data
    evidence.table = _table(tables.get("rows.parquet", b""), evidence)
    if "telemetry.parquet" in tables:
        evidence.telemetry_table = _telemetry_table(tables["telemetry.parquet"], evidence)
    return evidence


def recognised(stream: BinaryIO) -> BinaryIO:
    """Refuse at once, however long it is, what is no capsule by its first bytes.

    A capsule that was cut or damaged after its first bytes is a broken capsule, and gets a verdict.

    Raises:
        MalformedError: the stream is empty or begins with other bytes.
    """
    buffered = stream if isinstance(stream, io.BufferedReader) else io.BufferedReader(cast(io.RawIOBase, stream))
    found = buffered.peek(len(MAGIC))[: len(MAGIC)]
    if found != MAGIC:
        words = f"a file that begins with the bytes {found.hex(' ')}" if found else "nothing"
        raise MalformedError(
            f"expected a capsule, found {words}",
            hint="a capsule is the file that `capsule pack` writes",
        )
    return buffered


def _members(
    stream: BinaryIO, evidence: Evidence, whole_lists: bool
) -> Iterator[tuple[str, int, str, bytes | SourceList]]:
    """Yield every whole member with its digest and, where the checks read it, its bytes or what is known of a list.

    Findings go to `evidence`.
    """
    kept: list[bytes] | SourceList | None = None
    left = ALL_KEPT_BYTES_MAX
    for event in walk(recognised(stream)):
        match event:
            case MemberStart(name, size):
                kept = [] if _is_kept(name) else None
                most = TABLE_BYTES_MAX if name.startswith("4-") else KEPT_BYTES_MAX
                if kept is not None and size > most:
                    _note(evidence.member_findings, f"{name}: expected at most {most} bytes, found {size}")
                    kept = None
                elif kept is not None and size > left:
                    _note(evidence.member_findings, f"{name}: expected at most {left} bytes beside those before it")
                    kept = None
                left -= size if kept is not None else 0
                if kept is not None and not whole_lists and SOURCE_LIST.fullmatch(name):
                    kept = SourceList(name)
            case Chunk(data):
                if isinstance(kept, SourceList):
                    kept.feed(bytes(data))
                elif kept is not None:
                    kept.append(bytes(data))
            case MemberEnd(name, size, digest):
                if isinstance(kept, SourceList):
                    kept.finish()
                yield name, size, digest, kept if isinstance(kept, SourceList) else b"".join(kept or [])
                kept = None
            case Finding():
                _note(evidence.member_findings if event.member else evidence.container_findings, str(event))
            case End(sealed):
                evidence.identity = sealed.identity if sealed else None


def _note(findings: list[str], words: str) -> None:
    """Keep a finding, if a check would count it."""
    if len(findings) <= FINDINGS_COUNTED_MAX:
        findings.append(words)


def _is_kept(name: str) -> bool:
    if not is_allowed(name):
        return False
    if name.startswith("3-attempts/"):
        return name.rpartition("/")[2] in OF_ATTEMPTS
    return name.startswith(("1-manifest/", "2-ledger", "4-records/", "7-results/"))


def _table(data: bytes, evidence: Evidence) -> list[dict[str, object]] | str:
    """Read the packed table by the columns of the manifest in force, or say why not."""
    files = evidence.generations.get(len(evidence.generations), {})
    try:
        manifest = Manifest.from_bytes(files.get("manifest.json", b""), "manifest.json")
        rows_max = manifest.cells.count + sum(journal.count(b"\n") for journal in evidence.journals.values())
        return read_table(data, table_columns(manifest.protocol.observations), rows_max, "4-records/rows.parquet")
    except CapsuleError as error:
        return error.message


def _telemetry_table(data: bytes, evidence: Evidence) -> Iterator[dict[str, object]] | str:
    """Open the packed table of samples, or say why not."""
    rows_max = sum(samples.count(b"\n") for samples in evidence.telemetry.values())
    try:
        return scan_table(data, TELEMETRY_COLUMNS, rows_max, "4-records/telemetry.parquet")
    except CapsuleError as error:
        return error.message

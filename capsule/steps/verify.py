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

from capsule.archive.kept import Kept, as_file
from capsule.archive.layout import is_allowed
from capsule.archive.model import Finding
from capsule.archive.reader import Chunk, End, MemberEnd, MemberStart, walk
from capsule.archive.tables import Table, open_table
from capsule.core.attempt_files import AttemptFiles
from capsule.core.digest import PREFIX, Digests, is_digest
from capsule.core.errors import CapsuleError, MachineError, MalformedError, UsageError
from capsule.core.evidence import CELLS, DOCUMENT_BYTES_MAX, DOCUMENTS_BYTES_MAX, KEPT_BYTES_MAX, Evidence
from capsule.core.judge import judge
from capsule.core.lines import count_lines, pieces
from capsule.core.manifest import Manifest
from capsule.core.signing import Trust
from capsule.core.source_list import ListCount, SourceList
from capsule.core.table import TELEMETRY_COLUMNS, table_columns
from capsule.core.verdict import FINDINGS_COUNTED_MAX, Verdict

MAGIC = b"\x28\xb5\x2f\xfd"
"""The first bytes of every zstd frame, and so of every capsule."""

ALL_KEPT_BYTES_MAX = 4 << 30
"""Bytes of all members that are kept: a few kilobytes of a file can declare any number of zeros."""

TABLE_BYTES_MAX = 2 << 30
"""Bytes of one table, which holds the rows of all journals, or all samples."""

FED_BYTES = 1 << 18
"""Bytes that are taken in at a time: whoever copies them copies few."""

SOURCE_LIST = re.compile(r"sources(-[0-9a-f]+)?\.jsonl")
DOCUMENTS = ("1-manifest/", "2-ledger.head.json")
"""Members that are read as one value, unless they are lists."""

COUNTED = ("3-attempts/", "5-sources/", "6-oracles/")
"""Rooms whose members are counted; their names are in the ledger, or are their digests."""

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
    attempt_files = AttemptFiles()
    evidence = Evidence(sources=Digests(), frozen=Digests(), attempt_files=attempt_files)
    tables: dict[str, bytes | Kept] = {}
    for name, size, digest, kept in _members(stream, evidence, whole_lists):
        if name.startswith(COUNTED):
            evidence.stored += 1
        else:
            evidence.members.add(name)
        if not is_allowed(name):
            evidence.later.append(name)
            continue
        room, _, rest = name.partition("/")
        match room:
            case "1-manifest":
                number, _, file = rest.partition("/")
                files = evidence.generations.setdefault(int(number), {})
                if isinstance(kept, SourceList):
                    kept.finish()
                    evidence.add_list(int(number), file, kept)
                elif isinstance(kept, ListCount):
                    evidence.cells[int(number)] = kept.digest
                else:
                    files[file] = _whole(kept)
            case "2-ledger.jsonl":
                evidence.ledger = _content(kept)
            case "2-ledger.head.json":
                evidence.head = _whole(kept)
            case "3-attempts":
                attempt, _, file = rest.partition("/")
                attempt_files.add(attempt, file, size, digest)
                if file in OF_ATTEMPTS:
                    getattr(evidence, OF_ATTEMPTS[file])[attempt] = _content(kept)
            case "4-records":
                tables[rest] = _content(kept)
            case "5-sources" | "6-oracles":
                if room == "5-sources":
                    evidence.add_source(PREFIX + rest)
                if digest != PREFIX + rest:
                    words = f"{name}: expected content with the digest of its name, found {digest}"
                    _note(evidence.member_findings, words)
            case "7-results":
                evidence.results = _content(kept)
    evidence.table = _table(as_file(tables.get("rows.parquet", b"")), evidence)
    if "telemetry.parquet" in tables:
        evidence.telemetry_table = _telemetry_table(as_file(tables["telemetry.parquet"]), evidence)
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


Keeper = Kept | ListCount
"""What takes in the bytes of a member as they come, and keeps all of them or what is known of a list."""


def _members(stream: BinaryIO, evidence: Evidence, whole_lists: bool) -> Iterator[tuple[str, int, str, Keeper | None]]:
    """Yield every whole member with its size and digest, and what was kept of it where the checks read it.

    Findings go to `evidence`.
    """
    kept: Keeper | None = None
    left = {True: DOCUMENTS_BYTES_MAX, False: ALL_KEPT_BYTES_MAX}
    for event in walk(recognised(stream)):
        match event:
            case MemberStart(name, size):
                kept = None
                if not _is_kept(name):
                    continue
                is_document = name.startswith(DOCUMENTS) and not name.endswith(".jsonl")
                most = DOCUMENT_BYTES_MAX if is_document else KEPT_BYTES_MAX
                most = TABLE_BYTES_MAX if name.startswith("4-") else most
                if size > most:
                    _note(evidence.member_findings, f"{name}: expected at most {most} bytes, found {size}")
                elif size > left[is_document]:
                    words = f"{name}: expected at most {left[is_document]} bytes beside those before it, found {size}"
                    _note(evidence.member_findings, words)
                else:
                    left[is_document] -= size
                    kept = Kept() if whole_lists or not name.startswith("1-") else _keeper(name)
            case Chunk(data):
                if kept is not None:
                    for start in range(0, len(data), FED_BYTES):
                        kept.feed(data[start : start + FED_BYTES])
            case MemberEnd(name, size, digest):
                yield name, size, digest, kept
                kept = None
            case Finding():
                _note(evidence.member_findings if event.member else evidence.container_findings, str(event))
            case End(sealed):
                evidence.identity = sealed.identity if sealed else None


def _keeper(name: str) -> Keeper:
    """Return what keeps a member of a manifest's folder: of lists not the lines."""
    file = name.rpartition("/")[2]
    return SourceList(name) if SOURCE_LIST.fullmatch(file) else ListCount() if file == CELLS else Kept()


def _content(kept: Keeper | None) -> bytes | Kept:
    """Return the content of a member that is gone through piece by piece; empty if it was not kept."""
    return kept.content() if isinstance(kept, Kept) else b""


def _whole(kept: Keeper | None) -> bytes:
    """Return the content of a member that is read as one value."""
    return b"".join(pieces(_content(kept)))


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


def _table(file: BinaryIO, evidence: Evidence) -> Table | str:
    """Open the packed table by the columns of the manifest in force, or say why not."""
    files = evidence.generations.get(len(evidence.generations), {})
    try:
        manifest = Manifest.from_bytes(files.get("manifest.json", b""), "manifest.json")
        rows_max = manifest.cells.count + sum(map(count_lines, evidence.journals.values()))
        return open_table(file, table_columns(manifest.protocol.observations), rows_max, "4-records/rows.parquet")
    except CapsuleError as error:
        return error.message


def _telemetry_table(file: BinaryIO, evidence: Evidence) -> Table | str:
    """Open the packed table of samples, or say why not."""
    rows_max = sum(map(count_lines, evidence.telemetry.values()))
    try:
        return open_table(file, TELEMETRY_COLUMNS, rows_max, "4-records/telemetry.parquet")
    except CapsuleError as error:
        return error.message

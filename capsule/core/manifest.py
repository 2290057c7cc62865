"""The manifest: what was promised, immutable, and the same bytes on any machine.

It holds the normalised protocol and only counts and digests of the two lists that lie beside it, the planned cells
and the frozen sources. Its identity is the SHA-256 of its canonical bytes. No time, host, user or absolute path is in
it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, TypeAdapter, ValidationError

from capsule.core.canonical import (
    canonical_checked,
    list_lines,
    parse,
    quoted,
    refuse_cut,
    refuse_long,
    whole_lines,
)
from capsule.core.digest import PREFIX, Digest, digest_of
from capsule.core.errors import MalformedError
from capsule.core.lines import Content, pieces
from capsule.core.paths import path_bytes, shown
from capsule.core.plan import Cell
from capsule.core.protocol import Protocol
from capsule.core.schema import Model, Natural, Text, first_error

_CELL = TypeAdapter(Cell)

COMMAS_MAX = 32_000
"""Commas in all manifests of a chain, which bound what they become in memory."""

NAME_BYTES_MAX = 255
"""Bytes of a name that file systems take."""

PATH_BYTES_MAX = 4096
"""Bytes of a path that Linux takes."""


class SourceEntry(Model):
    """One file of the frozen sources.

    `path` is relative, with `/`; a path that is not UTF-8 is written `hex:` and its bytes in hexadecimal. Links carry
    their target (in the same form) and the digest of its bytes; they are never followed. `blob` is git's object id of
    the raw bytes where the file is tracked; `notes` names what a reader should know (see `docs/spec/manifest.md`).
    Fields stand in the order of canonical JSON, so that the models' own encoder writes it.
    """

    blob: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}([0-9a-f]{24})?$")] | None
    kind: Literal["file", "link"]
    mode: Literal["0644", "0755"] | None
    notes: tuple[str, ...]
    path: str
    sha256: Digest
    size: Natural
    target: str | None


def is_inside(path: bytes) -> bool:
    """Whether a file of this path stays in the tree it is written to, and is not git's, which runs what it reads."""
    if len(path) > PATH_BYTES_MAX:
        return False
    parts = path.split(b"/")
    named = all(part not in (b"", b".", b"..") and len(part) <= NAME_BYTES_MAX for part in parts)
    return named and b"\0" not in path and all(part.lower() != b".git" for part in parts)


class SourceFaults:
    """Finds what no honest freeze writes: paths out of the tree or through a file, links that contradict their targets.

    Entries are looked at in byte order of their paths, so a file comes before what would lie below it, and all that
    begins with its path comes at once: only files whose paths begin this one's are remembered. None of them lies below
    another, so if this one lies below any, it is the last.
    """

    def __init__(self) -> None:
        self._files: list[bytes] = []

    def of(self, entry: SourceEntry) -> Iterator[str]:
        """Yield what is wrong with the next entry."""
        try:
            path = path_bytes(entry.path)
            target = path_bytes(entry.target) if entry.target is not None else None
        except MalformedError as error:
            yield error.message
            return
        while self._files and not path.startswith(self._files[-1]):
            self._files.pop()
        if not is_inside(path):
            most = f" of at most {PATH_BYTES_MAX} bytes" if len(path) > PATH_BYTES_MAX else ""
            yield f"expected a path inside the tree{most}, found {shown(entry.path)}"
        elif self._files and path.startswith(self._files[-1] + b"/"):
            yield f"expected a path through folders, found {shown(entry.path)} below a file"
        else:
            self._files.append(path)
        if (target is not None, entry.mode is None) != (entry.kind == "link",) * 2:
            yield f"{shown(entry.path)}: expected a target for a link and a mode for a file, found otherwise"
        elif target is not None and (len(target), digest_of(target)) != (entry.size, entry.sha256):
            yield f"{shown(entry.path)}: expected size and digest of the link's target, found others"


def source_faults(entries: Iterable[SourceEntry]) -> Iterator[str]:
    """Yield what no honest freeze writes; `entries` are in byte order of their paths."""
    faults = SourceFaults()
    for entry in entries:
        yield from faults.of(entry)


class ListDigest(Model):
    """Count and digest of a line-record list stored beside the manifest."""

    count: Natural
    sha256: Digest


class FileDigest(Model):
    """Size and digest of one file's bytes."""

    size: Natural
    sha256: Digest


class ArmSource(Model):
    """Where an arm's code comes from: the work tree's list, or the list of another git revision."""

    arm: str
    revision: str | None
    sources: ListDigest


class Supersedes(Model):
    """The amended manifest, why, and what the ledger shows had been seen by then."""

    manifest: Digest
    reason: Text
    ledger_events: Natural
    ledger_head: Digest | None
    attempts_seen: Natural
    pilot_attempts_seen: Natural
    rows_seen: Natural


def refuse_commas(count: int, where: str) -> None:
    """Refuse a chain that has more values than a reader takes, which its commas bound.

    Raises:
        MalformedError: the manifests have more commas (M-10).
    """
    if count > COMMAS_MAX:
        raise MalformedError(f"{where}: expected at most {COMMAS_MAX} commas in all manifests of a chain, found more")


class Manifest(Model):
    """Everything that was frozen; see `docs/spec/manifest.md`."""

    schema_: Annotated[Literal["capsule.manifest/1"], Field(alias="schema")]
    protocol: Protocol
    protocol_file: FileDigest
    cells: ListDigest
    sources: ListDigest
    arms: tuple[ArmSource, ...]
    lock: FileDigest | None
    supersedes: Supersedes | None

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Self:
        """Read a manifest from its canonical bytes; raises `MalformedError`, also over too many values."""
        refuse_commas(data.count(b","), where)
        return super().from_bytes(data, where)

    @cached_property
    def identity(self) -> str:
        """The digest by which this manifest is known."""
        return digest_of(self.to_bytes())


def cells_bytes(cells: Iterable[Cell]) -> bytes:
    """Return the bytes of the `cells` list."""
    return b"".join(cell_lines(cells))


def cell_lines(cells: Iterable[Cell]) -> Iterator[bytes]:
    """Yield the lines of the `cells` list."""
    return (_cell_bytes(cell) + b"\n" for cell in cells)


def _cell_bytes(cell: Cell) -> bytes:
    """Return a cell's canonical bytes, in a fifth of the time that a general encoder takes for its nine keys."""
    excluded = "null" if cell.excluded is None else quoted(cell.excluded)
    return (
        f'{{"arm":{quoted(cell.arm)},"block":{cell.block},"cell":{quoted(cell.cell)},"excluded":{excluded},'
        f'"position":{cell.position},"process":{cell.process},"seed":{cell.seed},"start":{cell.start},'
        f'"workload":{quoted(cell.workload)}}}'
    ).encode()


def read_cells(content: Content, where: str) -> list[Cell]:
    """Read the `cells` list from its bytes.

    Raises:
        MalformedError: a line is not canonical or not a cell, or the last one does not end.
    """
    return [_cell(line, f"{where}:{number}") for number, line in enumerate(list_lines(content, where), 1)]


def _cell(line: bytes, where: str) -> Cell:
    """Read a cell from its line; what writes it again to the same bytes was canonical, so only others are parsed."""
    try:
        cell = _CELL.validate_json(line)
    except ValidationError as error:
        parse(line, where)
        raise MalformedError(f"{where}: {first_error(error)}") from error
    if _cell_bytes(cell) != line:
        parse(line, where)
        raise MalformedError(f"{where}: expected a cell in canonical form, found another")
    return cell


def sources_bytes(entries: list[SourceEntry]) -> bytes:
    """Return the bytes of a `sources` list; entries are in byte order of their paths."""
    return b"".join(f"{entry.model_dump_json()}\n".encode() for entry in entries)


class SourceLines:
    """Reads a `sources` list as it comes, line by line, and keeps none of it."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._number = 0
        self._before: bytes | None = None
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[SourceEntry]:
        """Yield the entries of the lines that end within the next bytes.

        Raises:
            MalformedError: a line is too long, not canonical, not an entry, or not after the one before it in byte
                order of paths. Nothing can be fed after that.
        """
        begun = self._rest + data
        self._rest = begun[begun.rfind(b"\n") + 1 :]
        yield from map(self._entry, whole_lines(begun))
        self._refuse_long(self._rest, self._number + 1)

    def finish(self) -> None:
        """Say that nothing follows.

        Raises:
            MalformedError: the last line does not end.
        """
        refuse_cut(self._rest, self._where)

    def _entry(self, line: bytes) -> SourceEntry:
        self._number += 1
        self._refuse_long(line, self._number)
        where = f"{self._where}:{self._number}"
        entry = _checked(parse(line, where), self._where, self._number)
        path = _raw(entry.path, where)
        if self._before is not None and path <= self._before:
            raise MalformedError(f"{where}: expected paths in byte order, each once, found {entry.path!r}")
        if (entry.kind == "link") != (entry.target is not None) or (entry.kind == "link") != (entry.mode is None):
            raise MalformedError(f"{where}: expected a mode of every file and a target of every link")
        self._before = path
        return entry

    def _refuse_long(self, line: bytes, number: int) -> None:
        refuse_long(line, f"{self._where}:{number}")


def read_sources(data: bytes, where: str) -> list[SourceEntry]:
    """Read a `sources` list from its bytes.

    Raises:
        MalformedError: the bytes are not such a list; see `SourceLines`.
    """
    refuse_cut(data, where)
    return list(SourceLines(where).feed(data))


def _raw(path: str, where: str) -> bytes:
    """Return the bytes of a path in written form."""
    if not path.startswith("hex:"):
        return path.encode()
    try:
        return bytes.fromhex(path[4:])
    except ValueError as error:
        raise MalformedError(f"{where}: expected `hex:` and the bytes of a path, found {path!r}") from error


def file_digest(content: Content) -> FileDigest:
    """Return size and digest of a file's bytes."""
    size, hashed = 0, hashlib.sha256()
    for piece in pieces(content):
        size += len(piece)
        hashed.update(piece)
    return FileDigest(size=size, sha256=PREFIX + hashed.hexdigest())


def list_digest(content: Content) -> ListDigest:
    """Return count and digest of a line-record list."""
    count, hashed = 0, hashlib.sha256()
    for piece in pieces(content):
        count += piece.count(b"\n")
        hashed.update(piece)
    return ListDigest(count=count, sha256=PREFIX + hashed.hexdigest())


def _checked(value: Any, where: str, number: int) -> SourceEntry:
    """Validate one line of a list of sources."""
    try:
        item = SourceEntry.model_validate_json(canonical_checked(value))
    except ValidationError as error:
        raise MalformedError(f"{where}:{number}: {first_error(error)}") from error
    if item.to_json() != value:
        raise MalformedError(f"{where}:{number}: expected every field written out, found defaults left away")
    return item

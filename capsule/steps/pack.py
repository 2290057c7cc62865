"""Pack: put everything that a stranger needs to check a claim into one file.

Results are derived here by the same function that verifying and replaying use. Nothing is left out because it looks
bad: failed and pilot attempts, void rows and superseded manifests all go in.
"""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self, cast

from capsule.archive.layout import is_allowed
from capsule.archive.model import Sealed
from capsule.archive.readme import citation, verify_text
from capsule.archive.tables import Columns, write_table
from capsule.archive.writer import CapsuleWriter
from capsule.core.digest import PREFIX, hex_of
from capsule.core.errors import BrokenError, IncompleteError, MachineError, RefusedError, UsageError
from capsule.core.progress import final_rows
from capsule.core.results import Results, derive
from capsule.core.signing import Trust
from capsule.core.table import TELEMETRY_COLUMNS, table_columns, table_rows, telemetry_rows
from capsule.host import ssh, store
from capsule.host.durable import read_regular
from capsule.host.memory import give_memory_back
from capsule.host.workspace import STATE, Workspace, find_workspace
from capsule.steps.standing import Standing, standing
from capsule.steps.verify import MAGIC, open_capsule, verify

CHUNK_BYTES = 1 << 20
TELEMETRY = "telemetry.jsonl"
SIZED = struct.Struct("=32sQ")
"""A digest and a size in bytes."""
TABLE_IN_MEMORY_BYTES = 1 << 20
"""A larger table waits in an unnamed file until it is packed."""


@dataclass(frozen=True)
class Item:
    """One member to be packed: bytes, or a file to be streamed, by its path or open."""

    name: str
    size: int
    content: bytes | Path | BinaryIO

    def chunks(self) -> Iterator[bytes]:
        """Yield the content in pieces."""
        if isinstance(self.content, bytes):
            yield self.content
            return
        with self.content.open("rb") if isinstance(self.content, Path) else nullcontext(self.content) as file:
            file.seek(0)
            while piece := file.read(CHUNK_BYTES):
                yield piece


@dataclass(frozen=True)
class Packed:
    """A capsule that lies at `path`: written now, in the place of another, or there before with the same bytes."""

    path: Path
    sealed: Sealed
    results: Results
    was: Literal["absent", "replaced", "same"]


def pack(
    protocol_file: Path,
    output: Path | None = None,
    *,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Packed:
    """Pack a protocol's evidence into `output`, by default NAME.capsule beside the protocol, and verify it.

    A capsule that is there already stays if it is the same, and is replaced only by `force`.

    Raises:
        BrokenError: the packed capsule is not intact, because the evidence in the workspace is not.
        IncompleteError: nothing was frozen or run.
        RefusedError: an attempt is still open, or another capsule is there.
        MachineError: the file cannot be written; nothing is left behind.
    """
    workspace = find_workspace(protocol_file)
    path = output or workspace.protocol.with_suffix(".capsule")
    _check_target(path, workspace)
    was: Literal["absent", "replaced", "same"] = "absent"
    if path.exists() and path.stat().st_size:
        was = "replaced" if force else "same"
    sealed, results = _write(workspace, path, same=was == "same", progress=progress)
    give_memory_back()
    with open_capsule(path) as stream:
        verdict = verify(stream, trust=Trust(check_signature=ssh.checker(None)))
    if verdict.integrity != "intact":
        failed = [check for check in verdict.checks if check.status == "failed"]
        found = [f"{check.id} {check.name}: {(*check.findings, check.words)[0]}" for check in failed]
        raise BrokenError(
            f"{path}: expected an intact capsule, packed one that is {verdict.integrity}: {'; '.join(found[:5])}",
            hint="the evidence in the workspace was changed, or is more than a reader takes; the capsule keeps it all",
        )
    return Packed(path, sealed, results, was)


def _write(
    workspace: Workspace, path: Path, *, same: bool, progress: Callable[[int, int], None] | None
) -> tuple[Sealed, Results]:
    """Write everything to `path`, or compare it with what is there already."""
    items, results = plan(workspace, None if same else path.parent)
    total, done = sum(item.size for item in items), 0
    try:
        with ExitStack() as stack:
            stack.enter_context(items)
            target: BinaryIO | Path = path
            if same:
                target = cast(BinaryIO, _Same(path, stack.enter_context(path.open("rb"))))
            writer = stack.enter_context(CapsuleWriter(target))
            for item in items:
                writer.add(item.name, item.size, item.chunks())
                done += item.size
                if progress:
                    progress(done, total)
            return writer.close(), results
    except OSError as error:
        raise MachineError(f"cannot read what goes into the capsule: {error}") from error


class _Same:
    """A target that takes only the bytes which a file holds already."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file

    def write(self, data: bytes) -> int:
        """Compare the next bytes; raises `RefusedError` where the file holds others."""
        if self._file.read(len(data)) != data:
            raise self._refusal()
        return len(data)

    def flush(self) -> None:
        """Compare the end."""
        if self._file.read(1):
            raise self._refusal()

    def _refusal(self) -> RefusedError:
        return RefusedError(
            f"expected no other capsule at {self._path}, found one that holds something else",
            hint="keep both: capsule pack … --output FILE; or replace it: capsule pack … --force",
        )


def _check_target(path: Path, workspace: Workspace) -> None:
    """Refuse to write over anything that is not a capsule."""
    if path.name in ("", ".", "..") or path.is_dir():
        raise UsageError(f"expected a file to write the capsule to, found the folder {str(path)!r}")
    if (workspace.root / STATE) in path.absolute().parents:
        raise UsageError(f"expected a file outside {workspace.root / STATE}, found {path}")
    if (path.is_symlink() or path.exists()) and not _is_capsule(path):
        raise RefusedError(
            f"expected a new file or a capsule to replace, found something else at {path}",
            hint="name another file: capsule pack … --output FILE",
        )


def _is_capsule(path: Path) -> bool:
    """Whether a regular file, not reached through a link, begins like a capsule or is empty."""
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) in (b"", MAGIC)


class Contents:
    """Digests of frozen sources with their sizes, each once and in order, in 40 bytes for every path that has it."""

    def __init__(self) -> None:
        self._rooms = [bytearray() for _ in range(256)]

    def add(self, digest: str, size: int) -> None:
        """Add what may be there already."""
        raw = bytes.fromhex(hex_of(digest))
        self._rooms[raw[0]] += SIZED.pack(raw, size)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        for room in self._rooms:
            for raw, size in sorted(set(SIZED.iter_unpack(room))):
                yield raw.hex(), size


@dataclass(frozen=True)
class Items:
    """What is to be packed, in its order, and as often as is asked until it is closed; of sources no list is held."""

    before: list[Item]
    sources: Contents
    after: list[Item]
    root: Path
    tables: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.tables.close()

    def __iter__(self) -> Iterator[Item]:
        yield from self.before
        for hex_digits, size in self.sources:
            yield Item(f"5-sources/{hex_digits}", size, store.object_path(self.root, PREFIX + hex_digits))
        yield from self.after


def plan(workspace: Workspace, folder: Path | None = None) -> tuple[Items, Results]:
    """List the members in their order, and derive the results that go among them.

    Tables are made, large ones in files without a name in `folder`, by default one for temporary files.

    Raises:
        MachineError: a table cannot be made.
    """
    now = standing(workspace)
    if not now.chain.events:
        raise IncompleteError(
            f"expected attempts of {workspace.name} in the ledger, found none",
            hint=f"run it first: capsule run {workspace.protocol}",
        )
    still = [attempt.id for attempt in now.account.attempts.values() if attempt.open]
    if still:
        raise RefusedError(
            f"expected every attempt to have ended, found {', '.join(still)} open",
            hint="wait for it, or settle what a crash left: capsule reconcile",
        )
    manifest, cells = now.generation.manifest, now.cells
    results = derive(manifest, final_rows(manifest, cells, now.account, now.journals), now.account)
    before = [*_manifests(now), *_ledger(now), *_attempts(workspace, now)]
    columns = table_columns(manifest.protocol.observations)
    rows = table_rows(manifest, cells, now.account, now.journals)
    chain_files = [generation.files for generation in now.generations]
    after = [
        _bytes("7-results/results.json", results.to_bytes()),
        _bytes("8-README/CITATION.cff", citation(manifest)),
        _bytes("8-README/VERIFY.md", verify_text(manifest, chain_files)),
    ]
    sources = _sources(now)
    with ExitStack() as tables:
        for name, its_columns, its_rows in (
            ("4-records/rows.parquet", columns, rows),
            ("4-records/telemetry.parquet", TELEMETRY_COLUMNS, _samples(workspace, now)),
        ):
            if its_rows is not None:
                file = tables.enter_context(_table(name, its_columns, its_rows, folder))
                before.append(Item(name, file.tell(), file))
        return Items(before, sources, after, workspace.root, tables.pop_all()), results


def _table(name: str, columns: Columns, rows: Iterable[Mapping[str, Any]], folder: Path | None) -> BinaryIO:
    """Write a table to a file that is gone when it is closed, whatever happens to this process."""
    place = None if folder is None else str(folder)
    file = cast(BinaryIO, tempfile.SpooledTemporaryFile(TABLE_IN_MEMORY_BYTES, dir=place))  # noqa: SIM115 - returned
    try:
        write_table(file, columns, rows)
        file.flush()
    except BaseException as error:
        with suppress(OSError):  # of what is still to be written
            file.close()
        if not isinstance(error, OSError):
            raise
        raise MachineError(
            f"cannot make {name}: {error.strerror or error}",
            hint="nothing was left behind; free some space or choose another folder, then pack again",
        ) from error
    return file


def _bytes(name: str, data: bytes) -> Item:
    return Item(name, len(data), data)


def _manifests(now: Standing) -> Iterator[Item]:
    for generation in now.generations:
        for name in sorted(generation.files.keys() | generation.lists.keys()):
            member = f"1-manifest/{generation.number:03d}/{name}"
            if name in generation.lists and is_allowed(member):
                yield Item(member, generation.lists[name], generation.directory / name)
            elif is_allowed(member):
                yield _bytes(member, generation.files[name])


def _ledger(now: Standing) -> Iterator[Item]:
    yield _bytes("2-ledger.head.json", now.head.to_bytes())
    yield _bytes("2-ledger.jsonl", now.ledger)


def _attempts(workspace: Workspace, now: Standing) -> Iterator[Item]:
    for attempt in now.account.attempts.values():
        if attempt.end is None:
            continue
        for name, digest in sorted(attempt.end.files.items()):
            yield Item(f"3-attempts/{attempt.id}/{name}", digest.size, workspace.attempts / attempt.id / name)


def _samples(workspace: Workspace, now: Standing) -> Iterator[Mapping[str, Any]] | None:
    """Return the rows of all samples, None if there are none."""
    names = [item.id for item in now.account.attempts.values() if item.end and TELEMETRY in item.end.files]
    rows = telemetry_rows((name, read_regular(workspace.attempts / name / TELEMETRY) or b"") for name in names)
    first = next(rows, None)
    return None if first is None else chain([first], rows)


def _sources(now: Standing) -> Contents:
    contents = Contents()
    for generation in now.generations:
        for revision in {None, *(arm.revision for arm in generation.manifest.arms)}:
            for entry in generation.iterate_sources(revision):
                if entry.kind == "file":
                    contents.add(entry.sha256, entry.size)
    return contents

"""Where things are: the repository root, the frozen manifests beside a protocol, and what runs write.

protocols/NAME.toml                         the protocol
protocols/NAME.frozen/001/                  manifest.json, cells.jsonl, sources.jsonl, protocol.toml; read-only
.capsule/NAME/ledger.jsonl, ledger.head.json
.capsule/NAME/attempts/a000001/             what one attempt wrote
.capsule/NAME/snapshots/<digest>/           materialised frozen sources
.capsule/objects/                           frozen file contents by digest, shared by all protocols
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from capsule.core.digest import PREFIX, digest_of
from capsule.core.errors import IncompleteError, MachineError, MalformedError, UsageError
from capsule.core.manifest import FileDigest, ListDigest, Manifest, SourceEntry, SourceLines, list_digest, read_cells
from capsule.core.plan import Cell

STATE = ".capsule"
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Generation:
    """One frozen manifest of a protocol's chain with its files as bytes.

    Lists of sources, which can be large, are among them only until they are written; then `lists` has their sizes.
    """

    number: int
    directory: Path
    manifest: Manifest
    files: dict[str, bytes]
    lists: dict[str, int] = field(default_factory=dict)

    @cached_property
    def cells(self) -> Sequence[Cell]:
        """The planned cells, read once, for a run looks at them before each of its processes."""
        return read_cells(self.files["cells.jsonl"], str(self.directory / "cells.jsonl"))

    def sources(self, revision: str | None = None) -> list[SourceEntry]:
        """The frozen sources of the work tree, or of another revision."""
        return list(self.iterate_sources(revision))

    def iterate_sources(self, revision: str | None = None) -> Iterator[SourceEntry]:
        """Yield the frozen sources one by one, however many there are.

        Raises:
            MalformedError: the list is not the one that the manifest names.
        """
        lines = SourceLines(str(self.directory / sources_name(revision)))
        for block in self.list_blocks(revision):
            yield from lines.feed(block)
        lines.finish()

    def list_blocks(self, revision: str | None = None) -> Iterator[bytes]:
        """Yield the bytes of a list of sources in blocks; see `iterate_sources`."""
        name = sources_name(revision)
        if name in self.files:
            yield self.files[name]
            return
        found = _Counted()
        for block in _blocks(self.directory / name):
            found.add(block)
            yield block
        if found.digest != self.list_digest(revision):
            raise _edited(self.directory / name)

    def list_digest(self, revision: str | None = None) -> ListDigest:
        """Count and digest of a list of sources, by the manifest."""
        return next((a.sources for a in self.manifest.arms if a.revision == revision), self.manifest.sources)


def sources_name(revision: str | None) -> str:
    """Return the file name of a source list: the work tree's, or that of a git revision."""
    return f"sources-{revision}.jsonl" if revision else "sources.jsonl"


@dataclass(frozen=True)
class Workspace:
    """The places of one protocol."""

    root: Path
    protocol: Path

    @property
    def name(self) -> str:
        """The protocol's name, which is its file's."""
        return self.protocol.stem

    @property
    def frozen(self) -> Path:
        """The folder of the protocol's frozen manifests."""
        return self.protocol.with_name(f"{self.name}.frozen")

    @property
    def state(self) -> Path:
        """The folder of all that runs of this protocol write."""
        return self.root / STATE / self.name

    @property
    def ledger(self) -> Path:
        """The ledger file."""
        return self.state / "ledger.jsonl"

    @property
    def head(self) -> Path:
        """The ledger's head, kept outside it."""
        return self.state / "ledger.head.json"

    @property
    def attempts(self) -> Path:
        """The folder of attempts."""
        return self.state / "attempts"

    @property
    def snapshots(self) -> Path:
        """The folder of materialised sources."""
        return self.state / "snapshots"

    def generations(self) -> list[Generation]:
        """Read every frozen manifest of the chain, oldest first; an empty list before the first freeze.

        Raises:
            MalformedError: a file is not what its manifest says; frozen files are never edited.
        """
        if not self.frozen.is_dir():
            return []
        folders = sorted(path for path in self.frozen.iterdir() if re.fullmatch(r"[0-9]{3}", path.name))
        generations = [_generation(path) for path in folders]
        previous: str | None = None
        for number, generation in enumerate(generations, start=1):
            named = generation.manifest.supersedes.manifest if generation.manifest.supersedes else None
            if generation.number != number or named != previous:
                raise MalformedError(
                    f"{generation.directory}: expected manifest {number} of a chain, superseding {previous}, found one "
                    f"that supersedes {named}",
                    hint="frozen folders are never copied, renamed or removed; restore them from version control",
                )
            previous = generation.manifest.identity
        return generations

    def chain(self) -> list[Generation]:
        """Read every frozen manifest of the chain, oldest first.

        Raises:
            IncompleteError: nothing is frozen yet.
        """
        generations = self.generations()
        if not generations:
            raise IncompleteError(
                f"expected a frozen manifest in {self.frozen}, found none",
                hint=f"freeze the protocol first: capsule freeze {self.protocol}",
            )
        return generations

    def current(self) -> Generation:
        """Return the manifest in force; see `chain`."""
        return self.chain()[-1]


class _Counted:
    """Counts the lines of a list and hashes it, as it comes."""

    def __init__(self) -> None:
        self._hasher = hashlib.sha256()
        self._count = self.size = 0

    def add(self, block: bytes) -> None:
        self._hasher.update(block)
        self._count += block.count(b"\n")
        self.size += len(block)

    @property
    def digest(self) -> ListDigest:
        return ListDigest(count=self._count, sha256=PREFIX + self._hasher.hexdigest())


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            yield block


def _edited(path: Path) -> MalformedError:
    return MalformedError(
        f"{path}: expected the bytes that the manifest names, found others",
        hint="frozen files are never edited; restore them from version control",
    )


def _generation(directory: Path) -> Generation:
    paths = [path for path in sorted(directory.iterdir()) if path.is_file()]
    files = {path.name: path.read_bytes() for path in paths if not _is_list(path.name)}
    if "manifest.json" not in files:
        raise MalformedError(f"{directory}: expected manifest.json, found {', '.join(files) or 'an empty folder'}")
    manifest = Manifest.from_bytes(files["manifest.json"], str(directory / "manifest.json"))
    found = {"cells.jsonl": list_digest(files["cells.jsonl"])} if "cells.jsonl" in files else {}
    lists: dict[str, int] = {}
    for path in paths:
        if _is_list(path.name):
            counted = _Counted()
            for block in _blocks(path):
                counted.add(block)
            found[path.name], lists[path.name] = counted.digest, counted.size
    expected = {"cells.jsonl": manifest.cells}
    expected |= {sources_name(arm.revision): arm.sources for arm in manifest.arms}
    expected["sources.jsonl"] = manifest.sources
    wrong = [name for name, digest in expected.items() if found.get(name) != digest]
    protocol = files.get("protocol.toml", b"")
    if FileDigest(size=len(protocol), sha256=digest_of(protocol)) != manifest.protocol_file:
        wrong.append("protocol.toml")
    if wrong:
        raise _edited(directory / wrong[0])
    return Generation(int(directory.name), directory, manifest, files, lists)


def _is_list(name: str) -> bool:
    return name.startswith("sources") and name.endswith(".jsonl")


def find_workspace(protocol: Path) -> Workspace:
    """Find the workspace of a protocol file: the nearest folder above it with `.git` or `.capsule`, else its own.

    Raises:
        UsageError: there is no such file.
    """
    path = Path(os.path.abspath(protocol))  # noqa: PTH100 - `..` must go, and links must stay
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise MachineError(
            f"expected a workspace whose path is UTF-8 text, found {str(path)!a}",
            hint="rename the folder; files inside it may have any name",
        ) from error
    if path.is_dir():
        raise UsageError(f"expected a protocol file, found the folder {protocol}", hint=_candidates(path))
    if not path.is_file():
        raise UsageError(f"expected a protocol file, found nothing at {protocol}", hint=_candidates(path.parent))
    try:
        home = next((up for up in path.parents if (up / ".git").exists() or (up / STATE).is_dir()), path.parent)
    except PermissionError as error:
        raise MachineError(f"cannot look for the workspace of {protocol}: {error.strerror}") from error
    return Workspace(home, path)


def find_begun(protocol: Path) -> Workspace:
    """Find the workspace of a protocol that was frozen, or has a ledger although its manifests are gone.

    Raises:
        UsageError: there is no such file.
        IncompleteError: nothing is frozen, so it has no ledger either.
    """
    workspace = find_workspace(protocol)
    if not workspace.ledger.exists():
        workspace.chain()
    return workspace


def _candidates(folder: Path) -> str | None:
    found = sorted(folder.glob("*.toml")) + sorted(folder.glob("protocols/*.toml"))
    return f"protocols here: {', '.join(path.name for path in found[:5])}" if found else "`capsule init` writes one"

"""Extract: write a capsule's members, or the frozen source tree, below a fresh folder and nowhere else.

The capsule is read twice: once to the end, so that nothing is written of a damaged one, and once to write. Every file
is created new, never through a link, and made read-only. The folder gets its name once all is in it. However many
members there are, no list of them is held; of a source tree the paths are, in little more than their bytes.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from capsule.archive.access import list_members
from capsule.archive.reader import Chunk, MemberEnd, MemberStart
from capsule.core.digest import PREFIX, Digests
from capsule.core.errors import BrokenError, CapsuleError, IncompleteError
from capsule.core.manifest import SourceEntry, SourceFaults, SourceLines
from capsule.core.paths import path_bytes, path_text
from capsule.steps.fresh import fresh
from capsule.steps.show import sound

SOURCES = "5-sources/"
COPIED_BYTES = 1 << 20
RECORD = struct.Struct("=32s?Q")
"""Of one file: digest of its content, whether it may be executed, and where its path begins."""


@dataclass(frozen=True)
class Place:
    """Where a member's bytes go, relative to the target, and the mode of the file."""

    path: bytes
    mode: int = 0o444


@dataclass(frozen=True)
class Extracted:
    """How many files were written, and their names, which can be gone through once."""

    count: int
    names: Iterator[str]


def extract(path: Path, target: Path) -> Extracted:
    """Write every member below `target`, which must not exist or be empty.

    Raises:
        UsageError: there is no such file, or it is a pipe, which cannot be read twice.
        BrokenError: the capsule is damaged; nothing was written.
        RefusedError: the target is there and not empty, or lies below a file.
        MachineError: the disk is full, or it cannot be written for another reason; nothing is left.
    """
    count = sum(isinstance(event, MemberEnd) for event in sound(path))
    with fresh(target) as made:
        _write(path, made, lambda name: [Place(name.encode())])
    return Extracted(count, (name for name, _, _ in list_members(path)))


def extract_sources(path: Path, target: Path, revision: str | None = None) -> Extracted:
    """Write the frozen source tree of the manifest in force below `target`; links only where they stay inside it.

    Raises:
        UsageError: there is no such file, or it is a pipe, which cannot be read twice.
        BrokenError: the capsule is damaged or lacks the content of a source, or a path leads out of the tree; nothing
            was written.
        IncompleteError: it has no list of sources.
        RefusedError: the target is there and not empty, or lies below a file.
        MachineError: the disk is full, or it cannot be written for another reason; nothing is left.
    """
    tree, present = _read(path, revision)
    tree.check(path, present)
    with fresh(target) as made:
        _write(path, made, tree.places)
        for place, to in tree.links:
            _link(made, place, to)
    return Extracted(tree.count, tree.names())


class _Tree:
    """The files of a list of sources by the digest of their content, in rooms by its first byte, and the links."""

    def __init__(self, where: str) -> None:
        self.count = 0
        self.links: list[tuple[bytes, bytes]] = []
        self._error: CapsuleError | None = None
        self._paths = bytearray()
        self._rooms = [bytearray() for _ in range(256)]
        self._lines = SourceLines(where)
        self._faults = SourceFaults()
        self._opened: tuple[int, dict[bytes, list[Place]]] = (-1, {})

    def feed(self, data: bytes) -> None:
        """Add the entries of the lines that end within the next bytes; the first fault is kept for `check`."""
        if self._error is not None:
            return
        try:
            for entry in self._lines.feed(data):
                if words := next(self._faults.of(entry), None):
                    raise BrokenError(words)
                self._add(entry)
        except CapsuleError as error:
            self._error = error

    def finish(self) -> None:
        """Say that nothing follows."""
        try:
            self._lines.finish()
        except CapsuleError as error:
            self._error = self._error or error

    def _add(self, entry: SourceEntry) -> None:
        place = path_bytes(entry.path)
        if entry.kind == "link":
            to = path_bytes(entry.target or "")
            if not _leaves(place, to):
                self.links.append((place, to))
            return
        digest = bytes.fromhex(entry.sha256.removeprefix(PREFIX))
        self._rooms[digest[0]] += RECORD.pack(digest, entry.mode == "0755", len(self._paths))
        self._paths += place + b"\0"
        self.count += 1

    def check(self, path: Path, present: Digests) -> None:
        """Refuse a list with a fault, or with content that is not among the members."""
        if self._error is not None:
            raise type(self._error)(f"{path}: {self._error.message}")
        for number in range(len(self._rooms)):
            for digest in sorted(self._open(number)):
                if PREFIX + digest.hex() not in present:
                    member = f"{SOURCES}{digest.hex()}"
                    raise BrokenError(f"{path}: expected {member} with that content, as frozen, found none")

    def places(self, name: str) -> Sequence[Place]:
        """Return where a member goes; members come in the order of their names, so that one room is open at a time."""
        if not name.startswith(SOURCES):
            return ()
        digest = bytes.fromhex(name.removeprefix(SOURCES))
        if self._opened[0] != digest[0]:
            self._opened = (digest[0], self._open(digest[0]))
        return self._opened[1].get(digest, ())

    def names(self) -> Iterator[str]:
        """Yield the paths of the files in written form, in their order."""
        at = 0
        while at < len(self._paths):
            path = self._path(at)
            at += len(path) + 1
            yield path_text(path)

    def _open(self, number: int) -> dict[bytes, list[Place]]:
        found: dict[bytes, list[Place]] = {}
        for digest, executable, at in RECORD.iter_unpack(self._rooms[number]):
            found.setdefault(digest, []).append(Place(self._path(at), 0o555 if executable else 0o444))
        return found

    def _path(self, at: int) -> bytes:
        return bytes(self._paths[at : self._paths.index(b"\0", at)])


def _read(path: Path, revision: str | None) -> tuple[_Tree, Digests]:
    """Read a sound capsule to its end; return the tree of the manifest in force, and the sources that are there."""
    wanted = re.compile(rf"1-manifest/[0-9]{{3}}/{re.escape(f'sources-{revision}' if revision else 'sources')}\.jsonl")
    tree: _Tree | None = None
    last = "1-manifest/000"
    present = Digests()
    reading = False
    for event in sound(path):
        if isinstance(event, MemberStart):
            if event.name.startswith("1-manifest/") and event.name[: len(last)] > last:
                last, tree = event.name[: len(last)], None
            if reading := wanted.fullmatch(event.name) is not None:
                tree = _Tree(event.name)
        elif isinstance(event, Chunk) and reading and tree is not None:
            tree.feed(bytes(event.data))
        elif isinstance(event, MemberEnd):
            if reading and tree is not None:
                tree.finish()
            if event.name.startswith(SOURCES) and event.digest == PREFIX + event.name.removeprefix(SOURCES):
                present.add(event.digest)
            reading = False
    if tree is None:
        raise IncompleteError(f"{path}: expected a list of sources in {last}, found none")
    return tree, present


def _leaves(place: bytes, to: bytes) -> bool:
    """Whether a link at `place` points out of the tree; such links are not made. Nothing is written after the links."""
    reached = os.path.normpath(os.path.join(os.path.dirname(place), to))  # noqa: PTH118, PTH120 - paths of bytes
    return not to or to.startswith(b"/") or reached.split(b"/")[0] == b".."


def _write(path: Path, made: Path, places: Callable[[str], Sequence[Place]]) -> None:
    """Stream members into files; `places` says for each where it goes, which may be several places or none.

    However many places a member has, at most two of its files are open: the first is copied to the others.
    """
    root = os.open(made, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    first = None
    others: Sequence[Place] = ()
    try:
        for event in sound(path):
            if isinstance(event, MemberStart):
                if wanted := places(event.name):
                    first, others = _create(root, wanted[0]), wanted[1:]
            elif first is None:
                continue
            elif isinstance(event, Chunk):
                _write_all(first, event.data)
            elif isinstance(event, MemberEnd):
                for place in others:
                    _copy(first, root, place)
                done, first = first, None
                os.close(done)
    finally:
        if first is not None:
            os.close(first)
        os.close(root)


def _create(root: int, place: Place) -> int:
    """Create a new file below `root`, its folders one by one, following no link."""
    folder = _folder(root, place.path)
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        return os.open(place.path.rpartition(b"/")[2], flags, place.mode, dir_fd=folder)
    finally:
        os.close(folder)


def _copy(whole: int, root: int, place: Place) -> None:
    """Write what is in an open file to another place."""
    copy = _create(root, place)
    try:
        at = 0
        while data := os.pread(whole, COPIED_BYTES, at):
            _write_all(copy, memoryview(data))
            at += len(data)
    finally:
        os.close(copy)


def _link(made: Path, place: bytes, to: bytes) -> None:
    root = os.open(made, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        folder = _folder(root, place)
        try:
            os.symlink(to, place.rpartition(b"/")[2], dir_fd=folder)
        finally:
            os.close(folder)
    finally:
        os.close(root)


def _folder(root: int, path: bytes) -> int:
    """Open the folder that `path` lies in, making what is missing; the caller closes it."""
    current = os.dup(root)
    for name in path.split(b"/")[:-1]:
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o755, dir_fd=current)
            following = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=current)
        finally:
            os.close(current)
        current = following
    return current


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]

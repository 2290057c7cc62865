"""Frozen contents by digest, and snapshots made from them: a run executes exactly the frozen bytes.

Contents lie in `.capsule/objects/aa/bb…`, named by their SHA-256, written under another name, synced and renamed, so
that a crash leaves whole objects only. A snapshot is a read-only folder with the frozen files and links and nothing
else; it too gets its name when it is complete. Bytes are hashed on every way in and out.

A cache of compiled modules can replace the frozen module beside it, so a snapshot has none: `__pycache__` folders are
removed before a snapshot is used again, and what lies in one that is found later is an addition.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from capsule.core.digest import PREFIX, hex_of
from capsule.core.errors import BrokenError, DriftError, IncompleteError, MachineError, MalformedError, RefusedError
from capsule.core.manifest import SourceEntry
from capsule.core.paths import path_bytes, path_text, shown
from capsule.host import git
from capsule.host.disk import cannot_write
from capsule.host.durable import sync_directory
from capsule.host.source import Drift, compare, read_tree
from capsule.host.tree import Folders, walk

BLOCK_BYTES = 2**20
SYNCS_AT_ONCE = 8
OPEN_MAX = 128
"""Files that wait for their sync with an open descriptor."""

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)


def object_path(root: Path, digest: str) -> Path:
    """Return where the content of that digest lies in the workspace at `root`, there or not."""
    name = hex_of(digest)
    return Path(root, ".capsule", "objects", name[:2], name[2:])


def objects(root: Path) -> Iterator[Path]:
    """Yield every file of the store: whole objects, and what an interrupted call left under other names."""
    folder = root / ".capsule" / "objects"
    for below in sorted(folder.iterdir()) if folder.is_dir() else ():
        yield from sorted(below.iterdir())


def open_object(root: Path, digest: str) -> BinaryIO:
    """Open the content of that digest for reading; its bytes are not checked here.

    Raises:
        IncompleteError: it is not in the store.
    """
    try:
        return object_path(root, digest).open("rb")
    except FileNotFoundError:
        raise IncompleteError(
            f"expected the content {digest} in {root / '.capsule' / 'objects'}, found none",
            hint="freeze again while the work tree still holds it",
        ) from None


def put_all(root: Path, entries: Iterable[SourceEntry]) -> int:
    """Store the content of every frozen file below `root`; return the number of objects written.

    Raises:
        DriftError: a file no longer holds the frozen bytes.
        MachineError: the store cannot be written.
    """
    with _writing(root) as writer, Folders(root) as folders:
        for entry in writer.absent(entries):
            path = path_bytes(entry.path)
            try:
                descriptor = folders.open(path)
            except OSError as error:
                raise _drifted(entry) from error
            with open(descriptor, "rb", buffering=0) as file:  # noqa: PTH123 - a descriptor, not a path
                writer.put(entry, partial(_pump, file))
        return writer.written


def put_revision(root: Path, revision: str, entries: Iterable[SourceEntry]) -> int:
    """Store the content of every file of a revision from git's object store; see `put_all`."""
    repository = git.find_repository(root)
    if repository is None:
        raise RefusedError(f"expected a git repository for revision {revision}, found none around {root}")
    with _writing(root) as writer, git.ObjectReader(repository) as reader:
        for entry in writer.absent(entries):
            blob = entry.blob
            if blob is None:
                raise MalformedError(
                    f"expected git's id of {shown(entry.path)} in the sources of {revision}, found none"
                )
            writer.put(entry, partial(reader.copy, blob))
        return writer.written


def materialise(root: Path, entries: list[SourceEntry], target: Path) -> None:
    """Make `target` a read-only folder with exactly the frozen files; one that is there already is checked.

    Raises:
        DriftError: the folder is there and holds something else.
        IncompleteError: the store lacks a content.
        BrokenError: a stored content does not have its digest.
        MachineError: the folder cannot be written.
    """
    paths = _checked_paths(entries)
    with _machine(target):
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            making = Path(tempfile.mkdtemp(prefix=".making-", dir=target.parent))
            try:
                _fill(root, entries, paths, making)
                _rename_first(making, target)
            except BaseException:
                remove_tree(making)
                raise
        _remove_caches(target)
    drifts = verify_tree(entries, target)
    if drifts:
        raise DriftError(
            f"expected the frozen sources in {target}, found changes: {'; '.join(map(str, drifts[:5]))}"
            + (f"; {len(drifts) - 5} more" if len(drifts) > 5 else ""),
            hint="remove that folder; it is made again from the stored contents",
        )


def renew(root: Path, entries: list[SourceEntry], target: Path) -> None:
    """Materialise again what something changed: a snapshot that drifted is removed and made from the stored contents.

    No attempt may be using it.

    Raises:
        IncompleteError: the store lacks a content.
        BrokenError: a stored content does not have its digest.
        MachineError: the folder cannot be written.
    """
    with _machine(target):
        if target.is_symlink() or (target.exists() and not target.is_dir()):
            target.unlink()
    try:
        materialise(root, entries, target)
    except (DriftError, MachineError):
        with _machine(target):
            if target.exists():
                drifted = Path(tempfile.mkdtemp(prefix=".drifted-", dir=target.parent)) / target.name
                target.chmod(0o700)
                target.rename(drifted)
                remove_tree(drifted.parent)
        materialise(root, entries, target)


def verify_tree(entries: list[SourceEntry], target: Path) -> list[Drift]:
    """Hash a snapshot again; return every file that is not as it was frozen, added ones too."""
    frozen = {path_bytes(entry.path): entry for entry in entries}
    if not target.is_dir():
        return [Drift(entry.path, "removed") for entry in entries]
    there = walk(target, lambda path: False)
    readable = [path for path in there if path in frozen and _may_be_equal(target, path, frozen[path])]
    found = {entry.path: entry for entry in read_tree(target, readable)}
    odd = [frozen[path] for path in there if path in frozen and frozen[path].path not in found]
    drifts = compare(entries, [*found.values(), *odd]) + [Drift(entry.path, "changed") for entry in odd]
    drifts += [Drift(path_text(path), "added") for path in there if path not in frozen]
    return sorted(drifts, key=lambda drift: path_bytes(drift.path))


def remove_tree(path: Path) -> None:
    """Remove a snapshot, though its folders are read-only; links are removed, not followed."""
    for folder, below, _ in os.walk(path):
        for name in (".", *below):
            place = Path(folder, name)
            if not place.is_symlink():
                place.chmod(0o700)
    shutil.rmtree(path, ignore_errors=True)


class _Synced:
    """Syncs files some at a time by threads, since a disk does many syncs in the time of a few; then calls back."""

    def __init__(self) -> None:
        from concurrent.futures import ThreadPoolExecutor

        self._pool = ThreadPoolExecutor(SYNCS_AT_ONCE)
        self._open: list[tuple[int, Callable[[], object] | None]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._flush()
        finally:
            for descriptor, _ in self._open:
                os.close(descriptor)
            self._pool.shutdown()

    def add(self, descriptor: int, then: Callable[[], object] | None = None) -> None:
        """Take over a descriptor: sync it, close it and call `then`, at the latest when the block ends."""
        self._open.append((descriptor, then))
        if len(self._open) >= OPEN_MAX:
            self._flush()

    def _flush(self) -> None:
        list(self._pool.map(os.fsync, [descriptor for descriptor, _ in self._open]))
        while self._open:
            descriptor, then = self._open.pop()
            os.close(descriptor)
            if then:
                then()


class _Writer:
    """Puts contents into the store; each is hashed on the way, synced and renamed.

    The other name is in the object's own folder: one folder with very many new files is slow on some file systems.
    """

    def __init__(self, root: Path, synced: _Synced) -> None:
        self.written = 0
        self.folders: set[str] = set()
        self._root = root
        self._synced = synced
        self._suffix = f".{os.urandom(6).hex()}.tmp"
        self._unfinished: set[str] = set()

    def absent(self, entries: Iterable[SourceEntry]) -> Iterator[SourceEntry]:
        """Yield one entry for each content that is not in the store."""
        by_digest = {entry.sha256: entry for entry in entries if entry.kind == "file"}
        return (entry for digest, entry in by_digest.items() if not object_path(self._root, digest).exists())

    def put(self, entry: SourceEntry, feed: Callable[[Callable[[bytes], object]], object]) -> None:
        """Store what `feed` hands over, which must be the entry's content."""
        final = str(object_path(self._root, entry.sha256))
        temporary, folder = final + self._suffix, final.rpartition("/")[0]
        if folder not in self.folders:
            Path(folder).mkdir(exist_ok=True)
            self.folders.add(folder)
        descriptor = os.open(temporary, _CREATE, 0o600)
        self._unfinished.add(temporary)
        try:
            hasher = hashlib.sha256()

            def sink(block: bytes) -> None:
                hasher.update(block)
                _write(descriptor, block)

            feed(sink)
            if PREFIX + hasher.hexdigest() != entry.sha256:
                raise _drifted(entry)
            os.fchmod(descriptor, 0o444)
        except BaseException:
            os.close(descriptor)
            raise
        self._synced.add(descriptor, partial(self._finish, temporary, final))
        self.written += 1

    def discard(self) -> None:
        """Remove what has not got its name."""
        for temporary in self._unfinished:
            Path(temporary).unlink(missing_ok=True)

    def _finish(self, temporary: str, final: str) -> None:
        Path(temporary).replace(final)
        self._unfinished.remove(temporary)


@contextmanager
def _writing(root: Path) -> Iterator[_Writer]:
    folder = root / ".capsule" / "objects"
    with _machine(folder):
        folder.mkdir(parents=True, exist_ok=True)
        synced = _Synced()
        writer = _Writer(root, synced)
        try:
            with synced:
                yield writer
        finally:
            writer.discard()
        for below in (*map(Path, sorted(writer.folders)), folder):
            sync_directory(below)


@contextmanager
def _machine(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise cannot_write(place, error) from error


def _pump(file: BinaryIO, sink: Callable[[bytes], object]) -> None:
    while block := file.read(BLOCK_BYTES):
        sink(block)


def _write(descriptor: int, block: bytes) -> None:
    view = memoryview(block)
    while view:
        view = view[os.write(descriptor, view) :]


def _drifted(entry: SourceEntry) -> DriftError:
    return DriftError(
        f"expected the bytes just read in {shown(entry.path)}, found it changed since",
        hint="stop what is writing there, then try again",
    )


def _checked_paths(entries: list[SourceEntry]) -> list[bytes]:
    """Return the raw paths: relative, plain, each once, and none below another file or link."""
    paths = [path_bytes(entry.path) for entry in entries]
    known = set(paths)
    if len(known) < len(paths):
        raise MalformedError("expected each path once among the frozen sources, found one twice")
    for path in paths:
        parts = path.split(b"/")
        above = {b"/".join(parts[:end]) for end in range(1, len(parts))}
        if any(part in (b"", b".", b"..") or b"\0" in part for part in parts) or above & known:
            raise MalformedError(f"expected a path of a file within the sources, found {shown(path)}")
    return paths


def _fill(root: Path, entries: list[SourceEntry], paths: list[bytes], making: Path) -> None:
    """Write files, then links (so that none is written through), then take away the right to write in folders."""
    top = os.fsencode(making) + b"/"
    folders: set[bytes] = set()
    with _Synced() as synced:
        for entry, path in zip(entries, paths, strict=True):
            parent = path.rpartition(b"/")[0]
            if parent and parent not in folders:
                os.makedirs(top + parent, 0o700, exist_ok=True)  # noqa: PTH103 - pathlib has no bytes
                parts = parent.split(b"/")
                folders |= {b"/".join(parts[:end]) for end in range(1, len(parts) + 1)}
            if entry.kind == "file":
                synced.add(_copy_object(root, entry, top + path))
    for entry, path in zip(entries, paths, strict=True):
        if entry.target is not None:
            os.symlink(path_bytes(entry.target), top + path)  # noqa: PTH211 - pathlib has no bytes
    for folder in (*folders, b""):
        os.chmod(top + folder, 0o555)  # noqa: PTH101 - pathlib has no bytes


def _copy_object(root: Path, entry: SourceEntry, path: bytes) -> int:
    """Write a stored content to a new file; return its descriptor, not yet synced."""
    descriptor = os.open(path, _CREATE, 0o600)
    try:
        hasher = hashlib.sha256()
        with open_object(root, entry.sha256) as file:
            while block := file.read(BLOCK_BYTES):
                hasher.update(block)
                _write(descriptor, block)
        if PREFIX + hasher.hexdigest() != entry.sha256:
            raise BrokenError(
                f"expected the stored content of {shown(entry.path)} to have the digest {entry.sha256}, found another",
                hint=f"remove {object_path(root, entry.sha256)} and freeze again while the work tree still holds it",
            )
        os.fchmod(descriptor, 0o555 if entry.mode == "0755" else 0o444)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _rename_first(making: Path, target: Path) -> None:
    """Give a complete snapshot its name; where another process was first, its snapshot stays."""
    try:
        making.rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        remove_tree(making)
        return
    sync_directory(target.parent)


def _remove_caches(target: Path) -> None:
    for folder, below, _ in os.walk(target):
        if "__pycache__" in below:
            below.remove("__pycache__")
            cache = Path(folder) / "__pycache__"
            if not cache.is_symlink():
                remove_tree(cache)


def _may_be_equal(target: Path, path: bytes, entry: SourceEntry) -> bool:
    """Whether reading can show that a file is the frozen one: the kind and, for a file, the size agree."""
    found = os.lstat(os.fsencode(target) + b"/" + path)
    if entry.kind == "link":
        return stat.S_ISLNK(found.st_mode)
    return stat.S_ISREG(found.st_mode) and found.st_size == entry.size

"""The frozen sources: which files are in scope, and what each one holds, read once and never through a link.

Scope is what git tracks or could track (everything that no `.gitignore` names) where the root is inside a work tree,
else every file below the root; then the include and exclude patterns narrow it. The product's own outputs, `.git` and
the interpreter's `__pycache__` are never in scope. Nothing here depends on time, place, host, locale or umask: the
same files give the same entries on any machine.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple
from unicodedata import normalize

from capsule.core.digest import PREFIX, digest_of
from capsule.core.errors import RefusedError
from capsule.core.manifest import SourceEntry
from capsule.core.paths import path_bytes, path_text, resolve, shown
from capsule.core.protocol import Sources
from capsule.core.redact import is_secret_file, token_kind
from capsule.host import git
from capsule.host.patterns import compile_patterns
from capsule.host.tree import GONE, OPEN, Folders, changed, kind_words, read_error, walk

FILE_BYTES_MAX = 16 * 2**30
BLOCK_BYTES = 2**20
SECRET_CONTENT_BYTES_MAX = 64 * 2**10
"""Files above this size are judged by their name only."""

_OWN_OUTPUT = re.compile(
    rb"(?:^|/)(?:\.git(?:/|\Z)|(?:\.capsule|__pycache__|[^/]*\.frozen)/"
    rb"|[^/]*\.capsule(?:(?:\.[2-9])?\.sig(?:\.[0-9a-f]{16}\.tmp)?|\.[0-9a-f]{16}\.part)?\Z)"
)
_LFS = b"version https://git-lfs.github.com/spec/v1\n"
_LFS_BYTES_MAX = 1024

Progress = Callable[[int, int], object]
"""Told the number of files done and the number of all files."""


@dataclass(frozen=True, slots=True)
class Scan:
    """The entries in byte order of their raw paths, and what a person should know about the scope."""

    entries: list[SourceEntry]
    warnings: list[str]


@dataclass(frozen=True, slots=True)
class Drift:
    """One file that is not as it was frozen; `mode` means that only the executable bit differs."""

    path: str
    change: Literal["added", "removed", "changed", "mode"]

    def __str__(self) -> str:
        return f"{self.change}: {shown(self.path)}"


class Content(NamedTuple):
    """What one read of a file or link found."""

    kind: Literal["file", "link"]
    mode: Literal["0644", "0755"] | None
    size: int
    sha256: str
    target: bytes | None
    blob: str | None
    notes: list[str]
    secret: str | None


def scan_sources(root: Path, sources: Sources, *, progress: Progress | None = None) -> Scan:
    """Read every file in scope below `root`.

    Raises:
        RefusedError: nothing is in scope; a file is neither a file nor a link, or above 16 GiB; files look like
            secrets and are not allowed by name.
        DriftError: a file changed while it was read.
        MachineError: a file or folder cannot be read, or git cannot be asked.
    """
    warnings: list[str] = []
    repository = git.find_repository(root)
    if repository:
        found = list(git.work_tree_files(repository, warnings))
    else:
        found = [git.WorkFile(path) for path in walk(root, is_own_output)]
        warnings.append("not a git repository: every file below the root is in scope")
    in_scope = _scope(sources)
    candidates = sorted((item for item in found if in_scope(item.path)), key=lambda item: item.path)
    warnings.extend(_unmatched(sources.include, [item.path for item in candidates]))
    contents = _read_all(root, candidates, warnings, progress)
    return _finish(contents, sources, warnings)


def scan_revision(root: Path, revision: str, sources: Sources) -> Scan:
    """Read every file in scope from a commit of the repository around `root`; nothing is checked out.

    Raises:
        RefusedError: no repository or no such commit, nothing in scope, or files that look like secrets.
        BrokenError: an object does not hash to its id.
    """
    repository = git.find_repository(root)
    if repository is None:
        raise RefusedError(f"expected a git repository for revision {revision}, found none around {root}")
    warnings: list[str] = []
    in_scope = _scope(sources)
    contents: list[tuple[git.WorkFile, Content]] = []
    with git.ObjectReader(repository) as reader:
        files = [item for item in git.revision_files(reader, revision, repository.prefix) if in_scope(item.path)]
        for item in sorted(files, key=lambda item: item.path):
            if item.mode == git.GITLINK:
                warnings.append(f"submodule {shown(item.path)} is not in revision {revision}: its files are not frozen")
            else:
                contents.append((git.WorkFile(item.path), _revision_content(reader, item)))
    warnings.extend(_unmatched(sources.include, [candidate.path for candidate, _ in contents]))
    return _finish(contents, sources, warnings)


def compare(frozen: Iterable[SourceEntry], found: Iterable[SourceEntry]) -> list[Drift]:
    """Return every file that differs, in byte order of paths; git's ids and notes are not compared."""
    before, after = ({entry.path: entry for entry in entries} for entries in (frozen, found))
    drifts: list[Drift] = []
    for path in sorted(before.keys() | after.keys(), key=path_bytes):
        old, new = before.get(path), after.get(path)
        if old is None:
            drifts.append(Drift(path, "added"))
        elif new is None:
            drifts.append(Drift(path, "removed"))
        elif (old.kind, old.size, old.sha256, old.target) != (new.kind, new.size, new.sha256, new.target):
            drifts.append(Drift(path, "changed"))
        elif old.mode != new.mode:
            drifts.append(Drift(path, "mode"))
    return drifts


def is_own_output(path: bytes) -> bool:
    """Whether a path (folders end with `/`) is git's, the interpreter's cache or an output of this product."""
    return _OWN_OUTPUT.search(path) is not None


def _scope(sources: Sources) -> Callable[[bytes], bool]:
    included, excluded = compile_patterns(sources.include), compile_patterns(sources.exclude)
    everything = not sources.include
    return lambda path: not is_own_output(path) and (everything or included(path)) and not excluded(path)


def _unmatched(include: Sequence[str], paths: list[bytes]) -> Iterator[str]:
    for pattern in include:
        if not any(map(compile_patterns([pattern]), paths)):
            yield f"the include pattern {pattern!r} matches no file in scope"


def read_tree(root: Path, paths: Iterable[bytes]) -> list[SourceEntry]:
    """Read the given files and links below `root`, without git and without a judgement of their contents."""
    files = [git.WorkFile(path) for path in paths]
    return [_entry(file.path, content, []) for file, content in _read_all(root, files, [], None)]


def _read_all(
    root: Path, files: list[git.WorkFile], warnings: list[str], progress: Progress | None
) -> list[tuple[git.WorkFile, Content]]:
    """Read files in order; those above one block are hashed by threads, a bounded number at a time."""
    from concurrent.futures import Future, ThreadPoolExecutor

    results: list[tuple[git.WorkFile, Content | Future[Content]]] = []
    waiting: deque[Future[Content]] = deque()
    workers = min(8, os.cpu_count() or 1)
    with Folders(root) as folders, ThreadPoolExecutor(workers) as pool:
        for number, file in enumerate(files, 1):
            try:
                content = _read(folders, file, warnings)
            except OSError as error:
                raise read_error(file.path, error) from error
            if callable(content):
                waiting.append(pool.submit(content))
                results.append((file, waiting[-1]))
                if len(waiting) > 2 * workers:
                    waiting.popleft().result()
            elif content:
                results.append((file, content))
            if progress:
                progress(number, len(files))
    return [(file, content if isinstance(content, Content) else content.result()) for file, content in results]


def _read(folders: Folders, file: git.WorkFile, warnings: list[str]) -> Content | Callable[[], Content] | None:
    """Return what a file holds, for a large one the call that reads it, and None if a tracked one is not there."""
    try:
        folder, name = folders.enter(file.path)
        before = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISDIR(before.st_mode):
            raise IsADirectoryError(errno.EISDIR, "is a folder by now")
    except OSError as error:
        if error.errno not in GONE or file.tracked is None:
            raise
        git.note_missing(file, shown(file.path), warnings)
        return None
    object_format = file.owner.object_format if file.owner and file.tracked else None
    if stat.S_ISLNK(before.st_mode):
        return _link_content(os.readlink(name, dir_fd=folder), object_format)
    if not stat.S_ISREG(before.st_mode):
        raise RefusedError(
            f"expected a file or a link, found {kind_words(before.st_mode)}: {shown(file.path)}",
            hint="remove it, or exclude it in [sources]",
        )
    if before.st_size > FILE_BYTES_MAX:
        raise RefusedError(
            f"expected files up to {FILE_BYTES_MAX >> 30} GiB, found {before.st_size} bytes: {shown(file.path)}",
            hint="exclude it in [sources], and name its digest in the protocol if it matters",
        )
    descriptor = os.open(name, OPEN, dir_fd=folder)
    if before.st_size > BLOCK_BYTES:
        return lambda: _file_content(descriptor, before, file, object_format)
    return _file_content(descriptor, before, file, object_format)


def _file_content(descriptor: int, before: os.stat_result, file: git.WorkFile, object_format: str | None) -> Content:
    """Hash an open file in one pass and close it; it must be the file that was looked at, and hold still."""
    size = left = before.st_size
    hasher = hashlib.sha256()
    git_hasher = git.HASHERS[object_format](b"blob %d\0" % size) if object_format else None
    first = None
    try:
        # A byte more than there should be is asked for, so nothing has to be read again to see the end; and a file
        # that grows later has another size below.
        while (left > 0 or first is None) and (block := os.read(descriptor, min(left + 1, BLOCK_BYTES))):
            hasher.update(block)
            if git_hasher:
                git_hasher.update(block)
            first = first or block
            left -= len(block)
        after = os.fstat(descriptor)
    except OSError as error:
        raise read_error(file.path, error) from error
    finally:
        os.close(descriptor)
    if left or _identity(before) != _identity(after):
        raise changed(file.path)
    blob = git_hasher.hexdigest() if git_hasher else None
    notes, secret = _judged(first or b"", size, file, blob)
    mode: Literal["0644", "0755"] = "0755" if before.st_mode & stat.S_IXUSR else "0644"
    return Content("file", mode, size, PREFIX + hasher.hexdigest(), None, blob, notes, secret)


def _identity(found: os.stat_result) -> tuple[int, ...]:
    return found.st_ino, found.st_dev, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _link_content(target: bytes, object_format: str | None) -> Content:
    blob = git.object_id("blob", target, object_format) if object_format else None
    return Content("link", None, len(target), digest_of(target), target, blob, [], None)


def _judged(first: bytes, size: int, file: git.WorkFile, blob: str | None) -> tuple[list[str], str | None]:
    """Return notes on a file's bytes (`first` is all of them up to one block) and what secret it looks like."""
    notes: list[str] = []
    if size <= _LFS_BYTES_MAX and first.startswith(_LFS):
        notes.append("lfs-pointer")
    whole = len(first) == size
    if file.tracked and blob != file.tracked.blob and file.owner and whole and b"\n" in first:
        unix = first.replace(b"\r\n", b"\n")
        spellings = (unix, unix.replace(b"\n", b"\r\n"))
        if file.tracked.blob in [git.object_id("blob", data, file.owner.object_format) for data in spellings]:
            notes.append("line-endings-differ")
    secret = "secret by name" if is_secret_file(file.path) else None
    if secret is None and size <= SECRET_CONTENT_BYTES_MAX and whole:
        secret = token_kind(first)
    return notes, secret


def _revision_content(reader: git.ObjectReader, item: git.TreeFile) -> Content:
    """Read one file of a commit, hashed as it streams by."""
    if item.mode == git.LINK:
        return _link_content(reader.read(item.object_id, "blob"), reader.object_format)
    hasher = hashlib.sha256()
    first = bytearray()
    size = 0

    def sink(block: bytes) -> None:
        nonlocal size
        hasher.update(block)
        size += len(block)
        if len(first) < BLOCK_BYTES:
            first.extend(block)

    if (kind := reader.copy(item.object_id, sink)) != "blob":
        raise RefusedError(f"expected a blob of git, found a {kind}: {shown(item.path)}")
    notes, secret = _judged(bytes(first), size, git.WorkFile(item.path), item.object_id)
    mode: Literal["0644", "0755"] = "0755" if item.mode & stat.S_IXUSR else "0644"
    return Content("file", mode, size, PREFIX + hasher.hexdigest(), None, item.object_id, notes, secret)


def _finish(contents: list[tuple[git.WorkFile, Content]], sources: Sources, warnings: list[str]) -> Scan:
    """Turn contents into entries: refuse secrets and an empty scope, and add the notes that need all files."""
    if not contents:
        raise RefusedError(
            "expected at least one source file in scope, found none",
            hint="look at [sources] include and exclude, and at what .gitignore names",
        )
    _refuse_secrets(contents, sources.secrets_allowed)
    links = {file.path: content.target for file, content in contents if content.target is not None}
    folds = _folding([file.path for file, _ in contents], warnings)
    entries: list[SourceEntry] = []
    for file, content in contents:
        if file.owner and file.owner.submodule and _git_notes(file, content):
            file.owner.dirty = True
    for file, content in contents:
        notes = [*content.notes, *_git_notes(file, content)]
        if file.owner and file.owner.submodule:
            notes.append(f"submodule:{file.owner.submodule}{'+dirty' if file.owner.dirty else ''}")
        if content.target is not None and resolve(file.path, links) is None:
            notes.append("link-leaves-tree")
        notes += [f"folds-with:{path_text(other)}" for other in folds.get(file.path, ())]
        entries.append(_entry(file.path, content, notes))
        if "lfs-pointer" in notes:
            warnings.append(f"content absent: {shown(file.path)} is a pointer of git-lfs (git lfs pull fetches it)")
    return Scan(entries, warnings)


def _entry(path: bytes, content: Content, notes: list[str]) -> SourceEntry:
    return SourceEntry(
        path=path_text(path),
        kind=content.kind,
        mode=content.mode,
        size=content.size,
        sha256=content.sha256,
        target=None if content.target is None else path_text(content.target),
        blob=content.blob,
        notes=tuple(sorted(notes)),
    )


def _git_notes(file: git.WorkFile, content: Content) -> list[str]:
    """Return how a file of a work tree differs from its index; nothing for one that git knows and agrees on."""
    tracked = file.tracked
    if file.owner is None:
        return []
    if tracked is None:
        return ["untracked"]
    if tracked.stage:
        return ["unmerged"]
    notes = ["differs-from-index"] if content.blob != tracked.blob else []
    index_mode = None if tracked.mode == git.LINK else "0755" if tracked.mode & stat.S_IXUSR else "0644"
    if notes or content.mode != index_mode:
        notes += ["assume-unchanged-edit"] * tracked.assume_unchanged + ["skip-worktree-edit"] * tracked.skip_worktree
    return notes


def _refuse_secrets(contents: list[tuple[git.WorkFile, Content]], allowed: Sequence[str]) -> None:
    is_allowed = compile_patterns(allowed)
    found = [
        f"{shown(file.path)} ({content.secret})"
        for file, content in contents
        if content.secret and content.kind == "file" and not is_allowed(file.path)
    ]
    if found:
        raise RefusedError(
            f"expected no secrets among the sources, found what looks like {len(found)}: {', '.join(found)}",
            hint="remove them, exclude them in [sources], or list them in secrets_allowed to publish them on purpose",
        )


def _folding(paths: list[bytes], warnings: list[str]) -> dict[bytes, list[bytes]]:
    """Return, per path, the others that are equal to it after NFC and case folding; warn of folders that fold."""
    folders: set[bytes] = set()
    for folder in {path.rpartition(b"/")[0] for path in paths}:
        while folder and folder not in folders:
            folders.add(folder)
            folder = folder.rpartition(b"/")[0]
    spelled: dict[str, bytes] = {}
    groups: dict[str, set[bytes]] = {}
    for path in (*paths, *sorted(folders)):
        folded = _folded(path)
        first = spelled.setdefault(folded, path)
        if first != path:
            groups.setdefault(folded, {first}).add(path)
    folds: dict[bytes, list[bytes]] = {}
    for group in groups.values():
        for path in group:
            folds[path] = sorted(group - {path})
        if len(group & folders) > 1:
            warnings.append(f"folders whose names fold together: {', '.join(map(shown, sorted(group & folders)))}")
    return folds


def _folded(path: bytes) -> str:
    if path.isascii():
        return path.decode().lower()
    return normalize("NFC", normalize("NFC", path.decode("utf-8", "surrogateescape")).casefold())

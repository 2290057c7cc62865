"""The few questions that are put to git, with no surprise from its configuration and nothing written.

Each command runs in the given folder, answers in bytes separated by NUL, takes no lock, follows no replacement
reference, fetches nothing, and starts no program that a configuration names. Objects read from the object store are
hashed again here, so that a damaged or substituted object is found.

Only `.gitignore` files decide what is ignored. A person's own ignore file and `.git/info/exclude` do not travel with
the repository, so they would give two people two answers for the same files.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple, Self

from capsule.core.errors import BrokenError, MachineError, RefusedError

GITLINK = 0o160000
LINK = 0o120000
TREE = 0o040000
BLOCK_BYTES = 2**20
DEPTH_MAX = 2_000

HASHERS = {"sha1": hashlib.sha1, "sha256": hashlib.sha256}
"""The hash of each of git's object formats."""

_OVERRIDES = ("core.fsmonitor=false", "core.untrackedCache=false", "protocol.allow=never", "core.quotePath=false")


@dataclass(frozen=True, slots=True)
class Repository:
    """A folder inside a git work tree.

    `prefix` is the folder's path within the work tree, empty or ended by `/`; `object_format` is `sha1` or `sha256`.
    """

    root: Path
    prefix: bytes
    object_format: str


class Tracked(NamedTuple):
    """One line of the index: `stage` is zero but for an unmerged path; `mode` is git's (0o100755, 0o160000, …)."""

    path: bytes
    mode: int
    blob: str
    stage: int
    assume_unchanged: bool
    skip_worktree: bool


@dataclass(slots=True)
class Owner:
    """The repository that a file belongs to; `submodule` is its commit if it is one, `dirty` as far as is known."""

    object_format: str
    submodule: str | None = None
    dirty: bool = False


class WorkFile(NamedTuple):
    """A path of a work tree, its repository (None outside git), and its line of the index (None if untracked)."""

    path: bytes
    owner: Owner | None = None
    tracked: Tracked | None = None


class TreeFile(NamedTuple):
    """One file, link or submodule of a revision."""

    path: bytes
    mode: int
    object_id: str


def find_repository(root: Path) -> Repository | None:
    """Return the repository around `root`, or None where there is none or where it ignores `root` itself.

    Raises:
        MachineError: there is a repository and git cannot be asked (not installed, owned by somebody else, damaged).
    """
    try:
        done = _git(root, "rev-parse", "--show-object-format", "--is-inside-work-tree", "--show-prefix")
    except FileNotFoundError as error:
        if any((folder / ".git").exists() for folder in (root.resolve(), *root.resolve().parents)):
            raise MachineError(
                f"expected git, since {root} is inside a git repository; found no such program",
                hint="install git; what is tracked and ignored decides which files are frozen",
            ) from error
        return None
    if done.returncode != 0:
        if done.stderr.startswith(b"fatal: not a git repository (or any"):
            return None
        raise MachineError(f"git cannot read the repository around {root}: {_words(done.stderr)}")
    object_format, inside, prefix = done.stdout.split(b"\n", 2)
    if inside != b"true":
        raise MachineError(f"expected a folder of a work tree, found the inside of a git repository: {root}")
    if prefix != b"\n" and _git(root, "check-ignore", "--quiet", ".").returncode == 0:
        return None
    return Repository(root, prefix.removesuffix(b"\n"), object_format.decode())


def toplevel(root: Path) -> Path | None:
    """Return the top folder of the work tree around `root`, or None outside any repository."""
    if find_repository(root) is None:
        return None
    return Path(os.fsdecode(_answer(root, "rev-parse", "--show-toplevel").removesuffix(b"\n")))


def head_commit(root: Path) -> str | None:
    """Return the commit that is checked out, or None before the first commit."""
    done = _git(root, "rev-parse", "--verify", "--quiet", "HEAD^{commit}")
    return done.stdout.decode().strip() if done.returncode == 0 else None


def tracked_files(root: Path) -> list[Tracked]:
    """Return the index below `root`, submodules as one line each; paths are relative to `root`."""
    lines = _answer(root, "ls-files", "-z", "--stage", "-v").split(b"\0")[:-1]
    return [_tracked(line) for line in lines]


def untracked_files(root: Path) -> list[bytes]:
    """Return the files below `root` that are neither tracked nor ignored; a nested repository ends with `/`."""
    answer = _answer(root, "ls-files", "-z", "--others", "--exclude-per-directory=.gitignore")
    return answer.split(b"\0")[:-1]


def work_tree_files(repository: Repository, warnings: list[str]) -> Iterator[WorkFile]:
    """Yield every file that git tracks or could track below a folder, those of submodules and nested repositories too.

    A nested repository that is no submodule is untracked as a whole; its own ignore files still count.
    """
    return _below(repository, b"", Owner(repository.object_format), warnings)


def _below(repository: Repository, prefix: bytes, owner: Owner, warnings: list[str]) -> Iterator[WorkFile]:
    root = repository.root
    seen = None
    for tracked in tracked_files(root):
        if tracked.mode == GITLINK:
            yield from _submodule(root / os.fsdecode(tracked.path), prefix + tracked.path, warnings)
        elif tracked.path != seen:  # an unmerged path has up to three lines
            yield WorkFile(prefix + tracked.path, owner, tracked)
        seen = tracked.path
    for name in untracked_files(root):
        if not name.endswith(b"/"):
            yield WorkFile(prefix + name, owner)
        elif nested := find_repository(root / os.fsdecode(name)):
            yield from (WorkFile(file.path, owner) for file in _below(nested, prefix + name, owner, warnings))


def _submodule(folder: Path, path: bytes, warnings: list[str]) -> Iterator[WorkFile]:
    module = find_repository(folder) if folder.is_dir() and not folder.is_symlink() else None
    if module is None or module.prefix:
        warnings.append(f"submodule {os.fsdecode(path)!a} is not checked out: its files are not frozen")
        return
    owner = Owner(module.object_format, head_commit(folder) or "none")
    owner.dirty = not index_is_committed(folder)
    yield from _below(module, path + b"/", owner, warnings)


def note_missing(file: WorkFile, name: str, warnings: list[str]) -> None:
    """Record that a tracked file is not in the work tree; a sparse checkout leaves files out on purpose."""
    assert file.owner is not None  # a tracked file has one
    assert file.tracked is not None
    file.owner.dirty = True
    reason = "left out by a sparse checkout" if file.tracked.skip_worktree else "tracked, and not in the work tree"
    warnings.append(f"not frozen, since {reason}: {name}")


def index_is_committed(root: Path) -> bool:
    """Whether the index holds exactly what the checked out commit holds."""
    return _git(root, "diff-index", "--cached", "--quiet", "--ignore-submodules=none", "HEAD", "--").returncode == 0


def object_id(kind: str, data: bytes, object_format: str) -> str:
    """Return git's id of an object with these bytes."""
    return HASHERS[object_format](b"%s %d\0" % (kind.encode(), len(data)) + data).hexdigest()


class ObjectReader:
    """Reads objects of one repository; each one's bytes are hashed again and must give the id asked for."""

    def __init__(self, repository: Repository) -> None:
        self.object_format = repository.object_format
        self._process = subprocess.Popen(
            [*_command(repository.root), "cat-file", "--batch"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def copy(self, identifier: str, sink: Callable[[bytes], object]) -> str:
        """Hand the object's bytes to `sink` in blocks of at most 1 MiB; return its type.

        Raises:
            RefusedError: there is no such object.
            BrokenError: the object is damaged; `sink` has had its bytes by then.
        """
        kind, size = self._ask(identifier)
        answers = self._pipe(self._process.stdout)
        hasher = HASHERS[self.object_format](b"%s %d\0" % (kind.encode(), size))
        left = size
        while left:
            block = answers.read(min(left, BLOCK_BYTES))
            if not block:
                raise BrokenError(f"git could not read the whole object {identifier}")
            hasher.update(block)
            sink(block)
            left -= len(block)
        answers.read(1)
        if hasher.hexdigest() != identifier:
            raise BrokenError(
                f"expected git object {identifier}, found bytes whose id is {hasher.hexdigest()}",
                hint="the object store is damaged: git fsck says how far",
            )
        return kind

    def read(self, identifier: str, kind: str) -> bytes:
        """Return the bytes of an object of that type; see `copy`."""
        data = bytearray()
        found = self.copy(identifier, data.extend)
        if found != kind:
            raise RefusedError(f"expected a {kind} of git, found a {found}: {identifier}")
        return bytes(data)

    def _ask(self, identifier: str) -> tuple[str, int]:
        questions, answers = self._pipe(self._process.stdin), self._pipe(self._process.stdout)
        try:
            questions.write(identifier.encode() + b"\n")
            questions.flush()
        except BrokenPipeError:
            raise BrokenError(f"git stopped before it could read the object {identifier}") from None
        words = answers.readline().split()
        if len(words) == 2 and words[1] == b"missing":
            raise RefusedError(
                f"expected git object {identifier}, found none of that id in the object store",
                hint="fetch the revision first (git fetch; --unshallow for a shallow clone)",
            )
        if len(words) != 3:
            raise BrokenError(f"git could not read the object {identifier}", hint="git fsck says what is damaged")
        return words[1].decode(), int(words[2])

    @staticmethod
    def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
        assert pipe is not None  # both were asked for
        return pipe


def revision_files(reader: ObjectReader, revision: str, prefix: bytes = b"") -> Iterator[TreeFile]:
    """Yield the files of a commit below `prefix`, in no promised order; commit and trees are hashed again.

    Raises:
        RefusedError: there is no such commit, or the folder is not in it.
    """
    commit = reader.read(revision, "commit")
    tree = commit.split(b"\n", 1)[0].removeprefix(b"tree ").decode()
    for part in prefix.split(b"/")[:-1]:
        below = [item for item in _tree_items(reader, tree) if item.path == part and item.mode == TREE]
        if not below:
            raise RefusedError(f"expected the folder {os.fsdecode(prefix)} in revision {revision}, found none")
        tree = below[0].object_id
    pending = [(b"", tree, 0)]
    while pending:
        folder, tree, depth = pending.pop()
        if depth > DEPTH_MAX:
            raise RefusedError(f"expected at most {DEPTH_MAX} nested folders in revision {revision}, found more")
        for item in _tree_items(reader, tree):
            path = folder + item.path
            if item.mode == TREE:
                pending.append((path + b"/", item.object_id, depth + 1))
            else:
                yield TreeFile(path, item.mode, item.object_id)


def _tree_items(reader: ObjectReader, tree: str) -> Iterator[TreeFile]:
    """Yield the direct children of a tree object: mode, space, name, NUL, the raw id."""
    data = reader.read(tree, "tree")
    id_bytes = len(tree) // 2
    position = 0
    while position < len(data):
        end = data.find(b"\0", position)
        mode, _, name = data[position:end].partition(b" ")
        if end < 0 or not name or name in (b".", b"..") or b"/" in name or not mode.isdigit():
            raise BrokenError(f"expected a tree of git, found something else in {tree}")
        position = end + 1 + id_bytes
        yield TreeFile(name, int(mode, 8), data[end + 1 : position].hex())


def _tracked(line: bytes) -> Tracked:
    """Read `TAG MODE ID STAGE<tab>PATH`; a lower-case tag means assume-unchanged, `S` skip-worktree."""
    head, _, path = line.partition(b"\t")
    tag, mode, blob, stage = head.split(b" ")
    return Tracked(path, int(mode, 8), blob.decode(), int(stage), tag.islower(), tag.upper() == b"S")


def _command(root: Path) -> list[str]:
    return ["git", "-C", str(root), *(word for option in _OVERRIDES for word in ("-c", option))]


def _environment() -> dict[str, str]:
    """Return the environment without what redirects git (a hook sets GIT_DIR), but with where its configuration is.

    The configuration stays because it alone can say that a repository of another owner is trusted.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_") or "CONFIG" in name}
    return kept | {
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "LC_ALL": "C",
    }


def _git(root: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*_command(root), *arguments], stdin=subprocess.DEVNULL, capture_output=True, check=False, env=_environment()
    )


def _answer(root: Path, *arguments: str) -> bytes:
    done = _git(root, *arguments)
    if done.returncode != 0 or b"could not open directory" in done.stderr:
        raise MachineError(f"git {arguments[0]} failed in {root}: {_words(done.stderr)}")
    return done.stdout


def _words(stderr: bytes) -> str:
    return stderr.decode("utf-8", "replace").strip().splitlines()[0] if stderr.strip() else "without a word"

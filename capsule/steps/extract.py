"""Extract: write a capsule's members, or the frozen source tree, below a fresh folder and nowhere else.

The capsule is read twice: once to the end, so that nothing is written of a damaged one, and once to write. Every file
is created new, never through a link, and made read-only.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from capsule.archive.reader import Chunk, MemberEnd, MemberStart, walk
from capsule.core.errors import BrokenError, MachineError, RefusedError
from capsule.core.manifest import read_sources, source_faults
from capsule.core.paths import path_bytes
from capsule.steps.show import member, members
from capsule.steps.verify import open_capsule


@dataclass(frozen=True)
class Place:
    """Where a member's bytes go, relative to the target, and the mode of the file."""

    path: bytes
    mode: int = 0o444


def extract(path: Path, target: Path) -> list[str]:
    """Write every member below `target`, which must not exist or be empty; returns the names written.

    Raises:
        BrokenError: the capsule is damaged; nothing was written.
        RefusedError: the target is there and not empty.
    """
    names = [name for name, _, _ in members(path)]
    _fresh(target)
    _write(path, {name: [Place(name.encode())] for name in names}, target)
    return names


def extract_sources(path: Path, target: Path, revision: str | None = None) -> list[str]:
    """Write the frozen source tree of the manifest in force below `target`; links only where they stay inside it.

    Raises:
        BrokenError: the capsule is damaged or lacks a source, or a path leads out of the tree; nothing was written.
        RefusedError: the target is there and not empty.
    """
    listed = [name for name, _, _ in members(path)]
    number = max((int(name.split("/")[1]) for name in listed if name.startswith("1-manifest/")), default=0)
    file = f"1-manifest/{number:03d}/{f'sources-{revision}' if revision else 'sources'}.jsonl"
    entries = read_sources(member(path, file), file)
    if fault := next(source_faults(entries), None):
        raise BrokenError(f"{path}: {fault}")
    wanted: dict[str, list[Place]] = {}
    links = []
    for entry in entries:
        place = path_bytes(entry.path)
        if entry.kind == "link":
            to = path_bytes(entry.target or "")
            if not _leaves(place, to):
                links.append((place, to))
            continue
        mode = 0o555 if entry.mode == "0755" else 0o444
        wanted.setdefault(f"5-sources/{entry.sha256.removeprefix('sha256:')}", []).append(Place(place, mode))
    absent = sorted(wanted.keys() - set(listed))
    if absent:
        raise BrokenError(f"{path}: expected {absent[0]}, which the manifest freezes, found no such member")
    _fresh(target)
    _write(path, wanted, target)
    for place, to in links:
        _link(target, place, to)
    return [entry.path for entry in entries if entry.kind == "file"]


def _leaves(place: bytes, to: bytes) -> bool:
    """Whether a link at `place` points out of the tree; such links are not made. Nothing is written after the links."""
    reached = os.path.normpath(os.path.join(os.path.dirname(place), to))  # noqa: PTH118, PTH120 - paths of bytes
    return not to or to.startswith(b"/") or reached.split(b"/")[0] == b".."


def _fresh(target: Path) -> None:
    try:
        target.mkdir(parents=True, exist_ok=True)
        if any(target.iterdir()):
            raise RefusedError(f"expected an empty or new folder, found files in {target}", hint="name another folder")
    except FileExistsError as error:
        raise RefusedError(f"expected a folder, found a file at {target}") from error
    except OSError as error:
        raise MachineError(f"cannot write to {target}: {error.strerror}") from error


def _write(path: Path, wanted: Mapping[str, list[Place]], target: Path) -> None:
    """Stream the wanted members into files; a member may have several places."""
    root = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    files: list[int] = []
    try:
        with open_capsule(path) as stream:
            for event in walk(stream):
                if isinstance(event, MemberStart):
                    files = [_create(root, place) for place in wanted.get(event.name, ())]
                elif isinstance(event, Chunk):
                    for descriptor in files:
                        _write_all(descriptor, event.data)
                elif isinstance(event, MemberEnd):
                    while files:
                        os.close(files.pop())
    except OSError as error:
        raise MachineError(f"cannot extract below {target}: {error.strerror}") from error
    finally:
        for descriptor in (*files, root):
            os.close(descriptor)


def _create(root: int, place: Place) -> int:
    """Create a new file below `root`, its folders one by one, following no link."""
    folder = _folder(root, place.path)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        return os.open(place.path.rpartition(b"/")[2], flags, place.mode, dir_fd=folder)
    finally:
        os.close(folder)


def _link(target: Path, place: bytes, to: bytes) -> None:
    root = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        folder = _folder(root, place)
        try:
            os.symlink(to, place.rpartition(b"/")[2], dir_fd=folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise MachineError(f"cannot extract below {target}: {error.strerror}") from error
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

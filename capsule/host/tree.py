"""Reading a folder tree without following a link: folders opened one by one, and words for what can go wrong."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from capsule.core.errors import CapsuleError, DriftError, MachineError
from capsule.core.paths import shown

OPEN = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
OPEN_FOLDER = OPEN | getattr(os, "O_DIRECTORY", 0)
GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR)
"""What a look at a path says when the file is not there any more, or a folder on the way is a link."""


def walk(root: Path, skip: Callable[[bytes], bool]) -> list[bytes]:
    """Return the raw paths of everything below `root` but folders, sorted; links to folders are not entered."""
    top = os.fsencode(root)
    paths: list[bytes] = []
    pending = [b""]
    while pending:
        folder = pending.pop()
        try:
            with os.scandir(os.path.join(top, folder)) as items:  # noqa: PTH118 - pathlib has no bytes
                for item in items:
                    path = folder + item.name
                    if item.is_dir(follow_symlinks=False):
                        if not skip(path + b"/"):
                            pending.append(path + b"/")
                    elif not skip(path):
                        paths.append(path)
        except FileNotFoundError as error:
            raise changed(folder) from error
        except OSError as error:
            raise MachineError(f"cannot read the folder {shown(folder) or root}: {error.strerror}") from error
    return sorted(paths)


class Folders:
    """Opens files below a root one folder after the other, so that no link is followed on the way."""

    def __init__(self, root: Path) -> None:
        try:
            self._root = os.open(root, OPEN_FOLDER & ~getattr(os, "O_NOFOLLOW", 0))
        except OSError as error:
            raise MachineError(f"cannot read the folder {root}: {error.strerror}") from error
        self._parent = b""
        self._open: list[tuple[bytes, int]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_below(0)
        os.close(self._root)

    def enter(self, path: bytes) -> tuple[int, bytes]:
        """Return a descriptor of the folder that holds `path` (valid until the next call) and the last name.

        Raises:
            OSError: a folder is missing or unreadable, or is a link by now (`ENOTDIR` or `ELOOP`).
        """
        parent, _, name = path.rpartition(b"/")
        if parent != self._parent:
            self._change(parent)
        return (self._open[-1][1] if self._open else self._root), name

    def _change(self, parent: bytes) -> None:
        parts = parent.split(b"/") if parent else []
        kept = 0
        while kept < min(len(parts), len(self._open)) and parts[kept] == self._open[kept][0]:
            kept += 1
        self._close_below(kept)
        for part in parts[kept:]:
            above = self._open[-1][1] if self._open else self._root
            self._open.append((part, os.open(part, OPEN_FOLDER, dir_fd=above)))
        self._parent = parent

    def _close_below(self, kept: int) -> None:
        self._parent = b"/"  # no path's parent, until `_change` has succeeded
        while len(self._open) > kept:
            os.close(self._open.pop()[1])

    def open(self, path: bytes) -> int:
        """Open a file for reading; a link is refused with `ELOOP`, and a pipe does not block."""
        folder, name = self.enter(path)
        return os.open(name, OPEN, dir_fd=folder)


def kind_words(mode: int) -> str:
    """Return words for what is neither a file, a folder nor a link."""
    kinds = {
        stat.S_IFIFO: "a named pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return kinds.get(stat.S_IFMT(mode), "something else")


def changed(path: bytes) -> DriftError:
    """Return the error for a file that did not hold still while it was read."""
    return DriftError(
        f"{shown(path) or 'the root'} changed while it was read", hint="stop what is writing there, then try again"
    )


def read_error(path: bytes, error: OSError) -> CapsuleError:
    """Return our error for one that the system gave while a file was opened or read."""
    if error.errno in (*GONE, errno.ENXIO, errno.EINVAL):
        return changed(path)
    return MachineError(f"cannot read {shown(path)}: {error.strerror}", hint="check its permissions, or exclude it")

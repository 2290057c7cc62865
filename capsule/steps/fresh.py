"""A folder that is there whole or not at all: made under another name, and given its own once everything is written.

It is made beside its place, or, if an empty folder is there already, which may be a disk of its own, inside that. A
request to stop breaks off what is written, once; what came of it is removed before a second one is heard.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from capsule.core.errors import MachineError, RefusedError
from capsule.steps.stops import Stops

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_REST = re.compile(r"\.capsule-[a-z0-9_]{8}")


@contextmanager
def fresh(target: Path) -> Iterator[Path]:
    """Give a new folder whose content becomes that of `target`; if anything fails, nothing is left, nor a new parent.

    Raises:
        RefusedError: the target is there and not an empty folder, or lies below a file.
        MachineError: it cannot be written.
        KeyboardInterrupt: a signal asked to stop.
    """
    stops = Stops(lambda number, now: None)
    made = None
    parents: list[Path] = []
    with stops.taken_in():
        try:
            there = _is_empty_folder(target)
            if not there:
                _make_parents(target, parents)
            made = Path(tempfile.mkdtemp(prefix=".capsule-", dir=target if there else target.parent))
            with stops.breakable():
                yield made
            made.chmod(0o755)
            if there:
                _move_up(made, target)
            else:
                os.rename(made, target)  # noqa: PTH104 - also over an empty folder that came meanwhile
        except BaseException as error:
            left = "nothing was written" if made is None or _removed(made) else f"what was written is left in {made}"
            with suppress(OSError):  # another one may have put something there
                for parent in reversed(parents):
                    parent.rmdir()
            if not isinstance(error, OSError):
                raise
            raise MachineError(
                f"cannot write to {target}: {error.strerror or error}; {left}",
                hint="check its permissions and the space on its disk, or name a folder on another disk",
            ) from error


def _is_empty_folder(target: Path) -> bool:
    """Whether an empty folder is there; False where nothing is."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise RefusedError(f"expected a new or empty folder, found a file at {target}", hint="name another folder")
    if not target.is_dir():
        return False
    if names := [item.name for item in target.iterdir()]:
        words, hint = f"expected an empty or new folder, found files in {target}", "name another folder"
        if rests := [name for name in names if _REST.fullmatch(name)]:
            words += f", among them {rests[0]}, which a command that was killed left there, or one that runs writes now"
            hint += f", or remove {target / rests[0]} if none runs"
        raise RefusedError(words, hint=hint)
    return True


def _make_parents(target: Path, made: list[Path]) -> None:
    """Make the folders that are missing above a target; each that was made is added to `made`."""
    for parent in (target.parent, *target.parent.parents):
        if parent.is_dir():
            break
        if parent.exists() or parent.is_symlink():
            raise RefusedError(
                f"expected a new or empty folder at {target}, found a file at {parent}", hint="name another folder"
            )
    for parent in reversed((target.parent, *target.parent.parents)):
        if not parent.is_dir():
            with suppress(FileExistsError):
                parent.mkdir()
                made.append(parent)


def _move_up(made: Path, target: Path) -> None:
    """Move what is in `made` into the folder that it lies in, all of it or nothing."""
    if [item for item in target.iterdir() if item != made]:
        raise RefusedError(f"expected {target} to stay empty, found files in it by now", hint="name another folder")
    origin, place = os.fsencode(made), os.fsencode(target)
    moved = []
    try:
        for name in os.listdir(origin):  # noqa: PTH208 - names as bytes
            os.rename(origin + b"/" + name, place + b"/" + name)  # noqa: PTH104
            moved.append(name)
        made.rmdir()
    except BaseException:
        for name in moved:
            os.rename(place + b"/" + name, origin + b"/" + name)  # noqa: PTH104
        raise


def _removed(made: Path) -> bool:
    """Remove what was made, however deep its folders are; False if something of it is left."""
    with suppress(OSError):
        _empty(made)
        made.rmdir()
    return not made.exists()


def _empty(top: Path) -> None:
    """Remove what is in a folder, with one folder open at a time and no path longer than a name; follows no link."""
    current = os.open(top, _FOLDER)
    way: list[tuple[os.stat_result, list[bytes]]] = []
    try:
        way.append((os.fstat(current), _folders_left(current)))
        while way:
            _, folders = way[-1]
            if folders:
                current = _gone(current, folders[-1])
                way.append((os.fstat(current), _folders_left(current)))
                continue
            way.pop()
            if way:
                current = _gone(current, b"..")
                above, folders = way[-1]
                if not os.path.samestat(os.fstat(current), above):
                    raise NotADirectoryError("a folder was moved while it was removed")
                os.rmdir(folders.pop(), dir_fd=current)
    finally:
        os.close(current)


def _folders_left(folder: int) -> list[bytes]:
    """Remove the files and links in a folder; return the names of its folders."""
    folders = []
    for name in map(os.fsencode, os.listdir(folder)):
        try:
            os.unlink(name, dir_fd=folder)
        except (IsADirectoryError, PermissionError):
            folders.append(name)
    return folders


def _gone(current: int, name: bytes) -> int:
    """Open a folder from the one that is open, and close that."""
    following = os.open(name, _FOLDER, dir_fd=current)
    os.close(current)
    return following

"""A folder that is there whole or not at all: made under another name, and given its own once everything is written.

It is made beside its place, or, if an empty folder is there already, which may be a disk of its own, inside that.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from capsule.core.errors import MachineError, RefusedError


@contextmanager
def fresh(target: Path) -> Iterator[Path]:
    """Give a new folder whose content becomes that of `target`; if anything fails, nothing is left.

    Raises:
        RefusedError: the target is there and not an empty folder.
        MachineError: it cannot be written.
    """
    made = None
    try:
        there = _is_empty_folder(target)
        if not there:
            target.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".capsule-", dir=target if there else target.parent))
        yield made
        made.chmod(0o755)
        if there:
            _move_up(made, target)
        else:
            os.rename(made, target)  # noqa: PTH104 - also over an empty folder that came meanwhile
    except BaseException as error:
        left = "nothing was written" if made is None or _removed(made) else f"what was written is left in {made}"
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
    if any(target.iterdir()):
        raise RefusedError(f"expected an empty or new folder, found files in {target}", hint="name another folder")
    return True


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
    """Remove what was made; False if something of it is left, as where folders are too deep."""
    with contextlib.suppress(OSError, RecursionError):
        shutil.rmtree(made)
    return not made.exists()

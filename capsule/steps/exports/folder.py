"""What an export writes into a fresh folder.

Every file is created new. Names come from the container's closed set of member names, or from the exports themselves.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from capsule.archive.reader import Chunk, End, MemberEnd, MemberStart, walk
from capsule.core.errors import BrokenError


@dataclass(frozen=True)
class Written:
    """A file of an export: its name in the folder, its size in bytes and its SHA-256 in hexadecimal digits."""

    name: str
    size: int
    sha256: str


class Folder:
    """A fresh folder, and what was written into it so far."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.files: list[Written] = []

    def write(self, name: str, data: bytes) -> None:
        """Write one file."""
        with self._create(name) as file:
            file.write(data)
        self.files.append(Written(name, len(data), hashlib.sha256(data).hexdigest()))

    def make(self, name: str) -> None:
        """Make a folder, although nothing is in it."""
        (self._root / name).mkdir(parents=True)

    def write_members(self, capsule: Path, prefix: str, identity: str) -> list[Written]:
        """Write every member of the capsule that has this identity, its names after `prefix`; returns what was written.

        Raises:
            BrokenError: the file is another one by now.
        """
        before = len(self.files)
        file: BinaryIO | None = None
        sealed = None
        try:
            with capsule.open("rb") as stream:
                for event in walk(stream):
                    match event:
                        case MemberStart(name):
                            file = self._create(prefix + name)
                        case Chunk(data):
                            assert file is not None
                            file.write(data)
                        case MemberEnd(name, size, digest):
                            assert file is not None
                            file.close()
                            self.files.append(Written(prefix + name, size, digest.removeprefix("sha256:")))
                        case End():
                            sealed = event.sealed
        finally:
            if file is not None:
                file.close()
        if sealed is None or sealed.identity != identity:
            raise BrokenError(f"{capsule}: expected the capsule that was verified, {identity}, found another by now")
        return self.files[before:]

    def _create(self, name: str) -> BinaryIO:
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("xb")

"""A list of frozen sources gone through as it comes, of which nothing is kept but what the checks ask.

A study of 200,000 sources has a list of 50 MB, whose entries would take 300 MB. What is kept of each is the digest of
its content, and half a digest of path and content together, to know it again.
"""

from __future__ import annotations

import hashlib

from capsule.core.digest import PREFIX, Digests, PackedSet
from capsule.core.errors import MalformedError
from capsule.core.manifest import ListDigest, SourceEntry, SourceFaults, SourceLines

FAULTS_MAX = 10_001
"""One more than the findings that a check counts, which are `verdict.FINDINGS_COUNTED_MAX`."""
KEY_BYTES = 16


class ListCount:
    """Count and digest of a list of lines, of which nothing else is known."""

    def __init__(self) -> None:
        self._count = 0
        self._hasher = hashlib.sha256()

    def feed(self, data: bytes | memoryview) -> None:
        """Go through the next bytes."""
        self._hasher.update(data)
        self._count += bytes(data).count(b"\n")

    @property
    def digest(self) -> ListDigest:
        """Count of lines and digest of the bytes."""
        return ListDigest(count=self._count, sha256=f"{PREFIX}{self._hasher.hexdigest()}")


class SourceList(ListCount):
    """What is known of one list, as far as it was fed: its digest, what is wrong with it, the contents of its files.

    Whoever has compared the contents may take them out.

    `error` says why it is no list of sources; what is known of its entries ends there, its digest goes on.
    """

    def __init__(self, where: str) -> None:
        super().__init__()
        self.error: str | None = None
        self.faults: list[str] = []
        self.contents = Digests()
        self._known = PackedSet(KEY_BYTES)
        self._lines = SourceLines(where)
        self._faults = SourceFaults()

    @classmethod
    def of(cls, data: bytes, where: str) -> SourceList:
        """Go through a whole list."""
        listed = cls(where)
        listed.feed(data)
        listed.finish()
        return listed

    def feed(self, data: bytes | memoryview) -> None:
        """Go through the lines that end within the next bytes."""
        super().feed(data)
        if self.error is not None:
            return
        try:
            for entry in self._lines.feed(bytes(data)):
                self._add(entry)
        except MalformedError as error:
            self.error = error.message

    def finish(self) -> None:
        """Say that nothing follows."""
        try:
            self._lines.finish()
        except MalformedError as error:
            self.error = self.error or error.message

    def holds(self, path: str, content: str) -> bool:
        """Whether the list has an entry with this path, in written form, and this digest."""
        return _key(path, content) in self._known

    def _add(self, entry: SourceEntry) -> None:
        if len(self.faults) < FAULTS_MAX:
            self.faults += self._faults.of(entry)
        if entry.kind == "file":
            self.contents.add(entry.sha256)
        self._known.add(_key(entry.path, entry.sha256))


def _key(path: str, content: str) -> bytes:
    return hashlib.sha256(f"{content} {path}".encode("utf-8", "surrogatepass")).digest()[:KEY_BYTES]

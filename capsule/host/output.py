"""What a trial prints, kept as bytes up to a limit: the first half, a counted gap, and the last half.

The last half is written as it comes into segments beside the file, of which the newest two are kept, so that nothing
is lost when the supervisor is killed: whoever ends the attempt has `assemble` put the file together.
"""

from __future__ import annotations

import os
from pathlib import Path


class CappedOutput:
    """One output stream on its way into its file; `failure` says why the rest could not be kept."""

    def __init__(self, path: Path, limit: int) -> None:
        self.path = path
        self.failure: str | None = None
        self._half = half_of(limit)
        self._segment = -1
        self._room = self._half
        self._descriptor = _create(path)

    def write(self, data: bytes) -> None:
        """Keep bytes, or remember why they could not be kept; never raises for a full disk."""
        view = memoryview(data)
        try:
            while view and self.failure is None:
                if self._room == 0:
                    self._next_segment()
                written = os.write(self._descriptor, view[: self._room])
                self._room -= written
                view = view[written:]
        except OSError as error:
            self.failure = f"{self.path.name} could not be kept whole: {error.strerror}"

    def close(self) -> None:
        """End writing; `assemble` then makes the file."""
        os.close(self._descriptor)

    def _next_segment(self) -> None:
        following = _create(segment_path(self.path, self._segment + 1))
        os.close(self._descriptor)
        self._segment, self._descriptor = self._segment + 1, following
        segment_path(self.path, self._segment - 2).unlink(missing_ok=True)
        self._room = self._half


def half_of(limit: int) -> int:
    """Return how many bytes of each end are kept under a limit."""
    return max(1, limit // 2)


def segment_path(path: Path, number: int) -> Path:
    """Return the path of a segment of what came after the first half."""
    return path.with_name(f"{path.name}.tail-{number:09d}")


def assemble(path: Path, limit: int) -> None:
    """Put an output file together from its first half and its segments; doing so again changes nothing."""
    half = half_of(limit)
    segments = sorted(path.parent.glob(f"{path.name}.tail-*"))
    if not segments:
        return
    if path.stat().st_size <= half:
        number = int(segments[-1].name.rpartition("-")[2])
        total = number * half + segments[-1].stat().st_size
        tail = b"".join(segment.read_bytes() for segment in segments[-2:])[-half:]
        gap = total - len(tail)
        marker = f"\n[capsule: {gap} bytes left out here]\n".encode() if gap else b""
        whole = path.with_name(f"{path.name}.whole")
        whole.write_bytes(path.read_bytes() + marker + tail)
        whole.replace(path)
    for segment in segments:
        segment.unlink()


def _create(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    return os.open(path, flags, 0o644)

"""What a trial prints, kept as bytes up to a limit: the first half, a counted gap, and the last half.

The last half is written as it comes into segments beside the file, of which the newest three are kept, so that nothing
is lost when the supervisor is killed: whoever ends the attempt has `assemble` put the file together. Half a secret is
as good as a whole one, so one that lies across an edge of the gap is left out with it. A file that a trial put in the
place of its output is cut in the same way; nothing here is read into memory whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from capsule.core.redact import end_of_secret_across, open_end
from capsule.host.durable import sync

BLOCK_BYTES = 1 << 18
EDGE_BYTES = 1 << 18
"""How far around an edge of the gap a secret that lies across it is looked for."""
MARKER_BYTES_MAX = 64


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
        segment_path(self.path, self._segment - 3).unlink(missing_ok=True)
        self._room = self._half


def half_of(limit: int) -> int:
    """Return how many bytes of each end are kept under a limit."""
    return max(1, limit // 2)


def segment_path(path: Path, number: int) -> Path:
    """Return the path of a segment of what came after the first half."""
    return path.with_name(f"{path.name}.tail-{number:09d}")


def assemble(path: Path, limit: int, secrets: Sequence[bytes] = ()) -> None:
    """Put an output file together from its first half and its segments; doing so again changes nothing.

    A crash leaves the segments, or the file whole beside them, or the file in its place; a call after it goes on there.
    """
    half = half_of(limit)
    whole = path.with_name(f"{path.name}.whole")
    segments = sorted(path.parent.glob(f"{path.name}.tail-*"))
    if segments and not whole.exists() and path.stat().st_size <= half:
        number = int(segments[-1].name.rpartition("-")[2])
        total = number * half + segments[-1].stat().st_size
        tail = min(half, sum(segment.stat().st_size for segment in segments[-2:]))
        _join(path, path.stat().st_size, segments[-3:], tail, total - tail, secrets)
    for segment in segments:
        segment.unlink()
    if whole.exists():
        whole.replace(path)
    cut(path, limit, secrets)


def cut(path: Path, limit: int, secrets: Sequence[bytes] = ()) -> None:
    """Cut a file that is longer than an output can be under this limit, as `assemble` would; again changes nothing.

    Redaction makes an output longer by a quarter at most, which is no reason to cut it.
    """
    half, size = half_of(limit), path.stat().st_size
    most = 2 * half + MARKER_BYTES_MAX
    if size > most + most // 4:
        _join(path, half, [path], half, size - 2 * half, secrets)
        path.with_name(f"{path.name}.whole").replace(path)


def _join(path: Path, head: int, parts: Sequence[Path], tail: int, gap: int, secrets: Sequence[bytes]) -> None:
    """Write beside `path` its first `head` bytes, words on the gap, and the last `tail` bytes of `parts`."""
    end = sum(part.stat().st_size for part in parts)
    start = end - tail
    if gap:
        edge = max(0, head - EDGE_BYTES)
        kept = edge + open_end(b"".join(_pieces([path], edge, head)), secrets)
        edge = max(0, start - EDGE_BYTES)
        around = b"".join(_pieces(parts, edge, min(end, start + EDGE_BYTES)))
        begin = edge + end_of_secret_across(around, start - edge, secrets)
        gap, head, start = gap + head - kept + begin - start, kept, begin
    temporary = path.with_name(f"{path.name}.whole-part")
    temporary.unlink(missing_ok=True)
    with temporary.open("xb") as file:
        file.writelines(_pieces([path], 0, head))
        if gap:
            file.write(f"\n[capsule: {gap} bytes left out here]\n".encode())
        file.writelines(_pieces(parts, start, end))
        file.flush()
        sync(file.fileno())
    temporary.replace(path.with_name(f"{path.name}.whole"))


def _pieces(parts: Sequence[Path], start: int, end: int) -> Iterator[bytes]:
    """Yield the bytes from `start` to `end` of files one after the other, in blocks."""
    for part in parts:
        size = part.stat().st_size
        with part.open("rb") as file:
            file.seek(min(max(0, start), size))
            while piece := file.read(max(0, min(BLOCK_BYTES, end - file.tell()))):
                yield piece
        start, end = start - size, end - size


def _create(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    return os.open(path, flags, 0o644)

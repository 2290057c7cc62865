"""Judges the member table against what was seen before it, line by line as it streams past.

Of each member only a hash of its line is kept, to name the lines that differ; a running digest over all of them
decides. After damage, `name_damage` uses a table to name every member that overlaps a lost frame (C-20).
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator

from capsule.archive import layout, tar
from capsule.archive.index import FrameLog
from capsule.archive.lines import LineDigest, LineSplitter
from capsule.archive.model import Finding

LOOK_AHEAD = 64
"""Members looked through for the one that a line means, where lines are missing."""


class MemberLog:
    """The members seen, in order: identity, size of their lines, 8 bytes each to tell them apart."""

    def __init__(self) -> None:
        self.identity = LineDigest(layout.IDENTITY_TAG)
        self.hashes = array("q")

    def __len__(self) -> int:
        return len(self.hashes)

    def append(self, name: str, size: int, digest_hex: str) -> None:
        """Add the next member."""
        line = layout.member_line(name, size, digest_hex)
        self.identity.add(line)
        self.hashes.append(hash(line))


class TableCheck:
    """Compares the lines of a table with the members and frames seen (C-15, C-16); `offset` is where it begins."""

    def __init__(self, members: MemberLog, frames: FrameLog, frame_count: int, offset: int) -> None:
        self._members = members
        self._frames = frames
        self._frame_count = frame_count
        self._offset = offset
        self._splitter = LineSplitter()
        self._identity = hashlib.sha256(layout.IDENTITY_TAG)
        self._next = self._unmatched = 0
        self._named = False
        self._frames_next = 0
        self.container = hashlib.sha256(layout.CONTAINER_TAG)
        self.encoder: tuple[str, int] | None = None

    def feed(self, data: bytes | memoryview) -> Iterator[Finding]:
        """Yield what is wrong with the lines that end within `data`."""
        for lines in self._splitter.feed(data):
            if not self._as_seen(lines):
                for line in lines:
                    yield from self._line(line)

    def finish(self) -> Iterator[Finding]:
        """Yield what is wrong with the table as a whole."""
        for line in self._splitter.finish():
            yield from self._line(line)
        if self.encoder is None:
            yield from self._end_of_members()
            yield self._finding("C-16", "expected the line of the library, found none")
        if self._frames_next != self._frame_count:
            yield self._finding("C-16", f"expected {self._frame_count} frame lines, found {self._frames_next}")

    def _as_seen(self, lines: list[bytes]) -> bool:
        """Take many lines at once where each is that of the next member, as nearly always."""
        stop = self._next + len(lines)
        expected = self._members.hashes[self._next : stop]
        if self.encoder is not None or self._unmatched or array("q", map(hash, lines)) != expected:
            return False
        self._identity.update(b"".join(lines))
        self._next = stop
        return True

    def _line(self, line: bytes) -> Iterator[Finding]:
        if self.encoder is not None:
            yield from self._frame_line(line)
        elif (encoder := layout.parse_encoder_line(line)) is not None:
            yield from self._end_of_members()
            self.encoder = encoder
            self.container.update(line)
        else:
            yield from self._member_line(line)

    def _member_line(self, line: bytes) -> Iterator[Finding]:
        self._identity.update(line)
        hashes = self._members.hashes
        wanted = hash(line)
        if self._next < len(hashes) and hashes[self._next] == wanted:
            self._next += 1
            return
        member = layout.parse_member_line(line)
        if member is None:
            yield self._finding("C-15", f"expected the line of a member, found {line[:80]!r}")
            self._unmatched += 1
            return
        window = hashes[self._next : self._next + LOOK_AHEAD]
        if wanted not in window:
            yield self._finding(
                "C-15", "expected size and digest of the table, found other content or no such member", member[0]
            )
            self._unmatched += 1
            return
        skipped = window.index(wanted)
        yield from self._unlisted(skipped, f"before {member[0]}")
        self._next += skipped + 1
        self._unmatched = 0

    def _end_of_members(self) -> Iterator[Finding]:
        yield from self._unlisted(len(self._members) - self._next, "at the end")
        if not self._named and self._identity.digest() != self._members.identity.digest():
            yield self._finding("C-15", "expected the table to list the members in order, found other lines")

    def _unlisted(self, count: int, where: str) -> Iterator[Finding]:
        if count > self._unmatched:
            number = count - self._unmatched
            yield self._finding("C-15", f"expected every member in the table, found {number} {where} not listed")

    def _frame_line(self, line: bytes) -> Iterator[Finding]:
        self.container.update(line)
        number = self._frames_next
        self._frames_next += 1
        if number < self._frame_count:
            offset, size, raw_size, digest = self._frames[number]
            if line != layout.frame_line(number, offset, size, raw_size, digest.hex()):
                yield self._finding(
                    "C-16", f"expected frame {number} (at byte {offset}) as in the table, found another"
                )
        elif number == self._frame_count:
            yield self._finding("C-16", f"expected {self._frame_count} frame lines, found more")

    def _finding(self, code: str, message: str, member: str | None = None) -> Finding:
        self._named = True
        return Finding(code, member, self._offset, message)


def name_damage(frames: Iterable[bytes], seen: FrameLog) -> Iterator[Finding]:
    """Yield one finding for every member that overlaps a frame which the table lists and `seen` lacks.

    `frames` are the raw bytes of the table's own frames, decoded one by one and passed over twice.

    Raises:
        ContainerError: the table does not begin with a canonical header.
    """
    lost = _lost_ranges(lines_of(frames), seen)
    if not lost:
        return
    at = start = 0
    for line in lines_of(frames):
        member = layout.parse_member_line(line)
        if member is None:
            return
        name, size, _ = member
        stop = start + tar.header_size(size) + size + tar.padding_size(size)
        while at < len(lost) and lost[at][1] <= start:
            at += 1
        if at < len(lost) and lost[at][0] < stop:
            yield Finding(
                "C-20", name, lost[at][2], "expected the member whole, found a frame of it damaged or missing"
            )
        start = stop


def lines_of(frames: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a table, given the raw bytes of its frames."""
    splitter = LineSplitter()
    for piece in content_of(frames):
        for lines in splitter.feed(piece):
            yield from lines


def content_of(frames: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the content of a table in pieces, given the raw bytes of its frames."""
    left = -1
    head = b""
    for raw in frames:
        data = raw
        if left < 0:
            head += data
            length = 3 * tar.BLOCK if tar.is_extended(head) else tar.BLOCK
            if len(head) < length:
                continue
            _, left = tar.decode(head[:length], 0)
            data = head[length:]
        yield data[:left]
        left -= min(left, len(data))


def _lost_ranges(lines: Iterator[bytes], seen: FrameLog) -> list[tuple[int, int, int]]:
    """Return raw start, raw stop and file offset of each listed frame that was not seen."""
    by_offset = {offset: digest for offset, _, _, digest in seen}
    missing = []
    start = 0
    for line in lines:
        frame = layout.parse_frame_line(line)
        if frame is None:
            continue
        _, offset, _, raw_size, digest = frame
        if by_offset.get(offset) == digest:
            del by_offset[offset]
        else:
            missing.append((start, start + raw_size, offset, digest))
        start += raw_size
    elsewhere = Counter(by_offset.values())
    lost = []
    for first, stop, offset, digest in missing:
        if elsewhere[digest] > 0:
            elsewhere[digest] -= 1
        else:
            lost.append((first, stop, offset))
    return lost

"""Reads a container without trusting it: one pass, strictly in order, the same from a file and a pipe.

`walk` gives the members as events and every broken clause as a finding among them; a sound file ends with its seal.
Never followed: an offset, a size or a name that was not derived from the bytes before. Memory is bounded by `Limits`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import BinaryIO, NamedTuple

from capsule.archive import layout, tar
from capsule.archive.frames import Decoded, Frame, decompress
from capsule.archive.hashing import HashBehind
from capsule.archive.index import Index, encode_index, encode_seek_table
from capsule.archive.lines import LineDigest
from capsule.archive.members import MemberLog, TableCheck, name_damage
from capsule.archive.model import LIMITS, ContainerError, Finding, Limits, Sealed, fault, shown
from capsule.archive.scan import FrameScan, decoded
from capsule.archive.source import Source
from capsule.archive.stream import TarStream, starts_table
from capsule.core.digest import PREFIX

TABLE_KEPT_MAX = 1 << 26
"""Compressed bytes of a table that are kept after damage, to name members."""


class MemberStart(NamedTuple):
    """A member begins; `size` bytes follow as chunks."""

    name: str
    size: int


class Chunk(NamedTuple):
    """The next bytes of the member, at most one frame."""

    data: memoryview


class MemberEnd(NamedTuple):
    """The member was whole; its digest counts only once the walk ends with a seal."""

    name: str
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class End:
    """The last event of every walk; there is a seal exactly where there was no finding."""

    sealed: Sealed | None


Event = MemberStart | Chunk | MemberEnd | Finding | End


@dataclass(frozen=True, slots=True)
class Examination:
    """A walk summed up: the first findings, how many there were, and the members that were kept."""

    sealed: Sealed | None
    findings: tuple[Finding, ...]
    findings_count: int
    kept: dict[str, bytes]


def walk(stream: BinaryIO, *, threads: int = 2, limits: Limits = LIMITS) -> Generator[Event, None, None]:
    """Yield what a stream holds, in order: per member a start, chunks and an end; findings; one `End`.

    A member without `MemberEnd` is damaged. No event is given for a member with a name that is not allowed or not in
    order. `threads` decode ahead, and one more hashes what is large (0: none). Read errors raise `MachineError`.
    """
    return _Walk(stream, threads, limits).run()


def examine(
    stream: BinaryIO,
    *,
    keep: Callable[[str, int], bool] = lambda _name, _size: False,
    threads: int = 2,
    limits: Limits = LIMITS,
    findings_max: int = 10_000,
) -> Examination:
    """Walk a stream to its end and keep the content of members for which `keep(name, size)` holds.

    The memory of kept members is the caller's to bound, through `keep`.
    """
    findings: list[Finding] = []
    count = 0
    kept: dict[str, bytes] = {}
    pieces: list[memoryview] | None = None
    sealed = None
    for event in walk(stream, threads=threads, limits=limits):
        match event:
            case MemberStart(name, size):
                pieces = [] if keep(name, size) else None
            case Chunk(data):
                if pieces is not None:
                    pieces.append(data)
            case MemberEnd(name):
                if pieces is not None:
                    kept[name] = b"".join(pieces)
            case Finding():
                count += 1
                if count <= findings_max:
                    findings.append(event)
            case End():
                sealed = event.sealed
    return Examination(sealed, tuple(findings), count, kept)


class _Walk:
    """The state of one walk; `run` is the order of the checks."""

    def __init__(self, stream: BinaryIO, threads: int, limits: Limits) -> None:
        self._source = Source(stream)
        self._limits = limits
        self._scan = FrameScan(self._source)
        self._frames = decoded(self._scan, threads)
        self._raw = TarStream(self._source, self._frames)
        self._hash_thread = ThreadPoolExecutor(1, thread_name_prefix="capsule-hash") if threads else None
        self._members = MemberLog()
        self._sums = LineDigest()
        self._name: str | None = None
        self._last = ""
        self._newer = False
        self._check: TableCheck | None = None

    def run(self) -> Generator[Event, None, None]:
        sound = True
        try:
            for event in self._events():
                sound = sound and not isinstance(event, Finding)
                yield event
        finally:
            if self._hash_thread is not None:
                self._hash_thread.shutdown(cancel_futures=True)
            self._frames.close()
        yield End(self._seal() if sound else None)

    def _events(self) -> Iterator[Event]:
        try:
            size = yield from self._body()
            yield from self._table(size)
            self._end_of_tar()
        except ContainerError as error:
            yield self._placed(error.finding)
            yield from self._salvage()
        else:
            yield from self._tail()

    def _body(self) -> Generator[Event, None, int]:
        """Walk the members up to the header of the table; return the table's size."""
        total = 0
        while True:
            if not self._raw.fill():
                raise self._raw.ended()
            is_table = self._raw.starts_table()
            if is_table:
                self._raw.begin_table()
            name, size = self._header()
            if name == layout.TABLE:
                if not is_table:
                    raise fault(
                        "C-07", self._raw.offset, "expected the table at the start of a frame, found it inside one"
                    )
                return size
            total += size
            if total > self._limits.size_bytes_max or len(self._members) >= self._limits.members_max:
                raise fault(
                    "C-19",
                    self._raw.offset,
                    f"expected a file within the limits ({self._limits}), found more",
                    shown(name),
                )
            yield from self._member(name, size)

    def _header(self) -> tuple[str, int]:
        offset = self._raw.offset
        header = self._raw.exactly(tar.BLOCK)
        if tar.is_extended(header):
            header += self._raw.exactly(2 * tar.BLOCK)
        return tar.decode(header, offset)

    def _member(self, name: str, size: int) -> Iterator[Event]:
        self._name = name
        is_allowed = layout.is_allowed(name, newer=self._newer)
        is_own = name in layout.OWN_NAMES
        is_next = is_allowed and name > self._last and not is_own and len(self._members) > 0
        findings = [] if is_next else list(self._name_findings(name, size))
        yield from findings
        if not findings:
            yield MemberStart(name, size)
        hasher: hashlib._Hash | HashBehind | None = None
        header = b""
        left = size
        while left:
            data = self._raw.some(left)
            if hasher is not None:
                hasher.update(data)
            elif self._hash_thread is not None and size > layout.FRAME_SIZE:
                hasher = HashBehind(self._hash_thread, data)
            else:
                hasher = hashlib.sha256(data)
            left -= len(data)
            if name == layout.HEADER:
                header = (header + data)[: layout.HEADER_SIZE_MAX]
            if not findings:
                yield Chunk(data)
        if not self._raw.zeros(tar.padding_size(size)):
            yield self._finding("C-09", "expected zero bytes after the member, found others")
        digest_hex = (hasher or hashlib.sha256()).hexdigest()
        if is_own:
            yield from self._own_findings(name, size, digest_hex, header)
        if is_allowed:
            self._members.append(name, size, digest_hex)
            self._sums.add(layout.sums_line(name, digest_hex))
            self._last = max(self._last, name)
        if not findings:
            yield MemberEnd(name, size, PREFIX + digest_hex)
        self._name = None

    def _name_findings(self, name: str, size: int) -> Iterator[Finding]:
        if not layout.is_allowed(name, newer=self._newer):
            yield self._finding("C-11", "expected a name of the layout, found another")
        elif name <= self._last:
            yield self._finding("C-12", f"expected a name above {self._last}, found one that is not")
        if (name == layout.HEADER) != (len(self._members) == 0):
            yield self._finding("C-13", f"expected {layout.HEADER} as the first member and only there, found otherwise")
        if name == layout.SUMS and size != self._sums.size:
            yield self._finding("C-14", f"expected {self._sums.size} bytes of checksum lines, found {size}")

    def _own_findings(self, name: str, size: int, digest_hex: str, header: bytes) -> Iterator[Finding]:
        """Judge the content of the container's own members."""
        if name == layout.HEADER and len(self._members) == 0:
            newer = layout.is_newer_header(header)
            self._newer = newer is True
            if newer is None:
                yield self._finding("C-13", f"expected the header of {layout.FORMAT}, found other bytes")
        if name == layout.SUMS and size == self._sums.size and digest_hex != self._sums.digest().hex():
            yield self._finding("C-14", "expected the checksum lines of all members before, found other lines")

    def _table(self, size: int) -> Iterator[Finding]:
        self._name = layout.TABLE
        raw = self._raw
        if self._last != layout.SUMS:
            yield self._finding("C-14", f"expected {layout.SUMS} before the table, found none")
        assert raw.table_start is not None
        frame_count = raw.table_start
        check = self._check = TableCheck(self._members, raw.log, frame_count, raw.offset)
        size_max = self._members.identity.size + (frame_count + 1) * layout.LINE_SIZE_MAX + layout.FRAME_SIZE
        if size > size_max:
            raise fault("C-15", raw.offset, f"expected a table of at most {size_max} bytes, found {size}", layout.TABLE)
        left = size
        while left:
            data = raw.some(left)
            left -= len(data)
            yield from check.feed(data)
        yield from check.finish()
        if not raw.zeros(tar.padding_size(size)):
            yield self._finding("C-09", "expected zero bytes after the member, found others")
        self._name = None

    def _end_of_tar(self) -> None:
        raw = self._raw
        if not raw.zeros(len(tar.END)):
            raise fault("C-10", raw.offset, "expected two zero blocks after the table, found other bytes")
        if raw.fill():
            raise fault("C-10", raw.offset, "expected nothing after the two zero blocks, found more")

    def _tail(self) -> Iterator[Finding]:
        """Compare index, seek table and end of file with what the data frames imply."""
        source, raw = self._source, self._raw
        assert raw.table_start is not None
        table_offset = raw.log[raw.table_start][0]
        table_raw_offset = sum(raw.log[number][2] for number in range(raw.table_start))
        digest = raw.table_hasher.digest()
        index = Index(
            len(self._members), len(raw.log), table_offset, source.offset - table_offset, table_raw_offset, digest
        )
        for code, what, expected in (
            ("C-17", "index", encode_index(index)),
            ("C-18", "seek table", encode_seek_table(raw.log)),
        ):
            offset = source.offset
            found = source.take(len(expected))
            if len(found) < len(expected) and expected.startswith(found):
                yield Finding(
                    "C-02", None, source.offset, f"expected the rest of the {what}, found the end of the file"
                )
                return
            if found != expected:
                yield Finding(code, None, offset, f"expected the {what} that the frames imply, found other bytes")
        if source.available(1):
            yield Finding("C-01", None, source.offset, "expected the end of the file, found more bytes")

    def _salvage(self) -> Iterator[Finding]:
        """Go through the frames that are left, find the table among them, and name what is damaged."""
        raw = self._raw
        kept: list[Frame] = []
        kept_size = 0
        if raw.current is not None and raw.table_start is None and starts_table(raw.current.raw):
            kept.append(_copied(raw.current.frame))
        for item in self._frames:
            finding = item if isinstance(item, Finding) else item.finding
            if finding is not None:
                yield finding
                kept = []
                continue
            assert isinstance(item, Decoded)
            frame = item.frame
            raw.log.append(frame.offset, len(frame.data), frame.raw_size, item.digest)
            if starts_table(item.raw):
                kept, kept_size = [], 0
            elif not kept:
                continue
            kept_size += len(frame.data)
            if kept_size <= TABLE_KEPT_MAX:
                kept.append(_copied(frame))
            else:
                kept = []
        if kept:
            try:
                yield from name_damage(_Redecoded(kept), raw.log)
            except ContainerError as error:
                yield error.finding
        elif raw.table_start is None:
            last = f"members after {self._last}" if self._last else "members"
            yield Finding("C-20", None, self._source.offset, f"{last} are not named: no whole table follows")

    def _seal(self) -> Sealed:
        assert self._check is not None
        assert self._check.encoder is not None
        return Sealed(
            PREFIX + self._members.identity.digest().hex(),
            PREFIX + self._check.container.hexdigest(),
            self._source.offset,
            len(self._members),
            *self._check.encoder,
        )

    def _placed(self, finding: Finding) -> Finding:
        """Return a finding with the member it fell into, and for a cut file with what came before."""
        message = finding.message
        if finding.code == "C-02":
            before = f"{len(self._members)} members, up to {self._last}," if self._last else "no member"
            message += f"; {before} came whole before it"
        return replace(finding, member=finding.member or self._shown(), message=message)

    def _finding(self, code: str, message: str) -> Finding:
        return Finding(code, self._shown(), self._raw.offset, message)

    def _shown(self) -> str | None:
        return None if self._name is None else shown(self._name)


class _Redecoded:
    """The raw bytes of kept frames, decoded again each time they are passed over."""

    def __init__(self, frames: list[Frame]) -> None:
        self._kept = frames

    def __iter__(self) -> Iterator[bytes]:
        for frame in self._kept:
            yield decompress(frame.data, frame.raw_size, frame.offset)


def _copied(frame: Frame) -> Frame:
    """Return a frame that does not keep the buffer which it was read into."""
    return replace(frame, data=memoryview(bytes(frame.data)))

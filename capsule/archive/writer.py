"""Writes a container: one pass over the sources, bounded memory, the same bytes whatever machine and thread count.

Each frame is decoded again and compared before it counts as written. A path appears only when the file is whole and
on disk; after any exception nothing is left, and nothing even after a kill where the file system has unnamed files (on
Linux most do, network ones do not). It never reads the clock, the environment or an owner.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from capsule.archive import frames, layout, tar
from capsule.archive.index import FrameLog, Index, encode_index, encode_seek_table
from capsule.archive.lines import LineDigest
from capsule.archive.model import ContainerError, Sealed, fault, shown
from capsule.archive.source import Source
from capsule.core.digest import PREFIX
from capsule.core.errors import DriftError, MachineError

SPOOL_SIZE_MAX = 1 << 20
"""Bytes of the member list that stay in memory; more go to an unnamed temporary file."""
WRITES_MAX = 2
"""Frames that wait to be written."""
LINES_SIZE = 1 << 20
"""Bytes of a list that are handed on at once."""

Content = bytes | memoryview | Iterable[bytes | memoryview]


class CapsuleWriter:
    """Packs members, given in order, into one container.

    With a path, the file is written without a name, or beside it under a temporary one, and gets its name when whole;
    a file that was there is replaced. With a stream, which stays open, bytes are written from its current position. Use
    it as a context manager, or `close` or `abort` it.
    """

    def __init__(
        self, target: BinaryIO | Path | str, *, level: int = 1, self_check: bool = True, threads: int = 2
    ) -> None:
        assert 1 <= level <= frames.LEVEL_MAX, level
        assert threads >= 1, threads
        self._level = level
        self._path = Path(target) if isinstance(target, str | Path) else None
        self._stream = target if not isinstance(target, str | Path) else None
        self._part: Path | None = None
        self._previous = ""
        self._members = self._sums_size = 0
        self._identity = LineDigest(layout.IDENTITY_TAG)
        self._closed = False
        stream = self._open_part() if self._path else self._stream
        assert stream is not None
        self._sink = _FrameSink(stream, level, self_check, threads)
        folder = str(self._path.parent) if self._path else None
        self._lines = tempfile.SpooledTemporaryFile(SPOOL_SIZE_MAX, dir=folder)  # noqa: SIM115 - closed by abort
        try:
            self._member(layout.HEADER, len(layout.HEADER_BYTES), layout.HEADER_BYTES)
        except BaseException:
            self.abort()
            raise

    def add(self, name: str, size: int, content: Content) -> None:
        """Write the next member: `size` bytes, given whole or in pieces.

        Raises:
            ContainerError: the name is not in the layout (C-11) or not above the one before (C-12).
            DriftError: `content` holds more or fewer bytes than `size`.
            MachineError: the file cannot be written, or the compressor made a wrong frame.
        """
        assert not self._closed, "the writer is closed"
        try:
            if name in layout.OWN_NAMES:
                raise fault(
                    "C-11", self._sink.offset, "expected a member of the caller, found one of the container", name
                )
            self._member(name, size, content)
        except BaseException:
            self.abort()
            raise

    def close(self) -> Sealed:
        """Write the lists, the index and the seek table; make the file durable; name the result."""
        assert not self._closed, "the writer is closed"
        try:
            sealed = self._finish()
        except BaseException:
            self.abort()
            raise
        self._closed = True
        self._lines.close()
        return sealed

    def abort(self) -> None:
        """Give up: remove the temporary file. Does nothing after `close`."""
        if self._closed:
            return
        self._closed = True
        self._sink.stop()
        self._lines.close()
        if self._path:
            assert self._stream is not None
            with suppress(OSError):
                self._stream.close()
            if self._part:
                self._part.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def _member(self, name: str, size: int, content: Content) -> None:
        if not layout.is_allowed(name):
            raise fault("C-11", self._sink.offset, "expected a name of the layout, found another", shown(name))
        if name <= self._previous:
            raise fault(
                "C-12", self._sink.offset, f"expected a name above {self._previous}, found one that is not", name
            )
        self._previous = name
        digest_hex = self._write_member(name, size, content)
        line = layout.member_line(name, size, digest_hex)
        try:
            self._lines.write(line)
        except OSError as error:
            raise _unwritable(error) from error
        self._identity.add(line)
        self._members += 1
        self._sums_size += len(layout.sums_line(name, digest_hex))

    def _write_member(self, name: str, size: int, content: Content) -> str:
        hasher = hashlib.sha256()
        left = size
        self._sink.write(tar.encode(name, size))
        for piece in (content,) if isinstance(content, bytes | memoryview) else content:
            left -= len(piece)
            if left < 0:
                break
            hasher.update(piece)
            self._sink.write(piece)
        if left:
            raise DriftError(
                f"{name}: expected {size} bytes, found {'more' if left < 0 else size - left}",
                hint="the source changed while it was packed; let its writer finish and pack again",
            )
        self._sink.write(bytes(tar.padding_size(size)))
        return hasher.hexdigest()

    def _finish(self) -> Sealed:
        self._member(layout.SUMS, self._sums_size, self._sums())
        sink = self._sink
        sink.cut()
        log = sink.log
        count = len(log)
        offset, raw_offset = sink.offset, sum(raw_size for _, _, raw_size, _ in log)
        container = hashlib.sha256(layout.CONTAINER_TAG)
        tail_size = 0
        for line in self._container_lines(count):
            container.update(line)
            tail_size += len(line)
        sink.begin_table()
        self._write_member(layout.TABLE, self._identity.size + tail_size, self._table(count))
        sink.write(tar.END)
        sink.cut()
        table_digest = sink.table_hasher.digest()
        index = Index(self._members, len(log), offset, sink.offset - offset, raw_offset, table_digest)
        sink.put(encode_index(index) + encode_seek_table(log))
        sink.flush()
        sink.stop()
        self._publish()
        return Sealed(
            PREFIX + self._identity.digest().hex(),
            PREFIX + container.hexdigest(),
            sink.offset,
            self._members,
            frames.LIBRARY,
            self._level,
        )

    def _sums(self) -> Iterator[bytes]:
        self._lines.seek(0)
        while lines := self._lines.readlines(LINES_SIZE):
            yield b"".join(b"%b  %b\n" % (line[-67:-3], line[2 : line.index(b'"', 2)]) for line in lines)

    def _container_lines(self, count: int) -> Iterator[bytes]:
        yield layout.encoder_line(frames.LIBRARY, self._level)
        for number in range(count):
            offset, size, raw_size, digest = self._sink.log[number]
            yield layout.frame_line(number, offset, size, raw_size, digest.hex())

    def _table(self, count: int) -> Iterator[bytes]:
        self._lines.seek(0)
        while block := self._lines.read(LINES_SIZE):
            yield block
        yield from self._container_lines(count)

    def _open_part(self) -> BinaryIO:
        assert self._path is not None
        with _writing():
            self._stream = _open_unnamed(self._path.parent)
            if self._stream is None:
                self._part = self._part_path()
                self._stream = self._part.open("xb", buffering=0)
        return self._stream

    def _publish(self) -> None:
        assert self._stream is not None
        with _writing():
            self._stream.flush()
            if self._path is None:
                return
            os.fsync(self._stream.fileno())
            if self._part is None:
                self._name_file(self._stream.fileno())
            self._stream.close()
            if self._part:
                self._part.replace(self._path)
                self._part = None
            folder = os.open(self._path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def _name_file(self, descriptor: int) -> None:
        """Give an unnamed file its name, or a temporary one where that is taken."""
        assert self._path is not None
        source = _descriptor_path(descriptor)
        try:
            os.link(source, self._path, src_dir_fd=descriptor, follow_symlinks=True)
        except FileExistsError:
            self._part = self._part_path()
            os.link(source, self._part, src_dir_fd=descriptor, follow_symlinks=True)

    def _part_path(self) -> Path:
        assert self._path is not None
        return self._path.with_name(f".{self._path.name}.{secrets.token_hex(8)}.part")


def _open_unnamed(folder: Path) -> BinaryIO | None:
    """Return a new file without a name that can get one later, or nothing where there is no such thing."""
    if not hasattr(os, "O_TMPFILE"):
        return None
    try:
        descriptor = os.open(folder, os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, 0o666)
    except OSError:
        return None
    if not os.path.exists(_descriptor_path(descriptor)):  # noqa: PTH110
        os.close(descriptor)
        return None
    return open(descriptor, "wb", buffering=0)  # noqa: PTH123


def _descriptor_path(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"


class _FrameSink:
    """Cuts raw bytes into frames every `FRAME_SIZE` bytes (C-07); threads compress them, another writes them in order.

    An error of a write comes out of a later call, at the latest of `flush`; nothing is written after it.
    """

    def __init__(self, stream: BinaryIO, level: int, self_check: bool, threads: int) -> None:
        self._stream = stream
        self._level = level
        self._self_check = self_check
        self._pieces: list[bytes | memoryview] = []
        self._left = layout.FRAME_SIZE
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="capsule-encode")
        self._waiting: deque[Future[tuple[bytes, int, bytes]]] = deque()
        self._waiting_max = threads + 1
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="capsule-write")
        self._writes: deque[Future[None]] = deque()
        self._stopped = False
        self._in_table = False
        self.table_hasher = hashlib.sha256()
        self.log = FrameLog()
        self.offset = 0

    def write(self, data: bytes | memoryview) -> None:
        """Add raw bytes."""
        whole = data if isinstance(data, bytes) else bytes(data)  # the caller may reuse its buffer
        if len(whole) < self._left:
            self._pieces.append(whole)
            self._left -= len(whole)
            return
        view = memoryview(whole)
        while view:
            piece, view = view[: self._left], view[self._left :]
            self._pieces.append(piece)
            self._left -= len(piece)
            if not self._left:
                self._submit()

    def cut(self) -> None:
        """End the current frame here and wait until every frame is compressed."""
        if self._pieces:
            self._submit()
        while self._waiting:
            self._write_first()

    def flush(self) -> None:
        """Wait until everything is written."""
        while self._writes:
            self._wait_for_write()

    def begin_table(self) -> None:
        """Hash the bytes of the frames from here on for the index."""
        assert not self._pieces
        assert not self._waiting
        self._in_table = True

    def put(self, data: bytes) -> None:
        """Write bytes of the file as they are."""
        self.offset += len(data)
        self._writes.append(self._writer.submit(self._write, data))
        if len(self._writes) > WRITES_MAX:
            self._wait_for_write()

    def stop(self) -> None:
        """End the threads; what was not written yet never is."""
        self._stopped = True
        self._pool.shutdown(cancel_futures=True)
        self._writer.shutdown(cancel_futures=True)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view and not self._stopped:
            try:
                view = view[self._stream.write(view) :]
            except BaseException:
                self._stopped = True
                raise

    def _wait_for_write(self) -> None:
        with _writing():
            self._writes.popleft().result()

    def _submit(self) -> None:
        pieces, self._pieces, self._left = self._pieces, [], layout.FRAME_SIZE
        self._waiting.append(self._pool.submit(_seal, pieces, self._level, self._self_check))
        if len(self._waiting) > self._waiting_max:
            self._write_first()

    def _write_first(self) -> None:
        data, raw_size, digest = self._waiting.popleft().result()
        self.log.append(self.offset, len(data), raw_size, digest)
        if self._in_table:
            self.table_hasher.update(data)
        self.put(data)


def _seal(pieces: list[bytes | memoryview], level: int, self_check: bool) -> tuple[bytes, int, bytes]:
    raw = b"".join(pieces)
    pieces.clear()  # the work item holds them until the frame is sealed
    data = frames.compress(raw, level)
    if self_check and not _is_frame_of(data, raw):
        raise MachineError(
            "the compressor returned a frame that does not give back its input",
            hint="nothing was written; check this machine's memory and the zstandard package, then pack again",
        )
    return data, len(raw), hashlib.sha256(data).digest()


def _is_frame_of(data: bytes, raw: bytes) -> bool:
    try:
        size, raw_size = frames.measure(Source.of(data))
        return size == len(data) and frames.decompress(data, raw_size, 0) == raw
    except ContainerError:
        return False


@contextmanager
def _writing() -> Iterator[None]:
    """Turn an error of the file system into one for people."""
    try:
        yield
    except OSError as error:
        raise _unwritable(error) from error


def _unwritable(error: OSError) -> MachineError:
    return MachineError(
        f"cannot write the capsule: {error.strerror or error}",
        hint="nothing was left behind; free some space or choose another folder, then pack again",
    )

"""Whatever happens to the bytes of a container, it is never taken for sound, and the damage is named."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from container_forge import (
    FRAME,
    LIBRARY_LINE,
    MANIFEST,
    RESULTS,
    SMALL,
    Member,
    compress,
    entry,
    forge,
    pack_with_writer,
    with_lists,
)
from container_vectors import LONG, NOISE, RANDOM

from capsule.archive.hashing import HashBehind
from capsule.archive.reader import Examination, examine, walk
from capsule.core.errors import MalformedError


class Dribble(io.RawIOBase):
    """A stream that gives a few bytes at a time."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece, self._data = self._data[: min(97, len(buffer))], self._data[min(97, len(buffer)) :]
        buffer[: len(piece)] = piece
        return len(piece)


def look(data: bytes) -> Examination:
    return examine(io.BytesIO(data), threads=0)


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    """No single-bit change of a file on disk leaves it sound; each flip is read back from the disk."""
    path = tmp_path / "x.capsule"
    data = pack_with_writer(SMALL[:1])
    path.write_bytes(data)
    assert look(data).sealed is not None
    with path.open("r+b", buffering=0) as stream:
        for position in range(len(data)):
            for bit in range(8):
                changed = bytes([data[position] ^ 1 << bit])
                os.pwrite(stream.fileno(), changed, position)
                stream.seek(0)
                on_disk = stream.read()
                assert on_disk != data
                stream.seek(0)
                found = examine(stream, threads=0)
                assert found.sealed is None, (position, bit)
                assert found.findings, (position, bit)
            os.pwrite(stream.fileno(), data[position : position + 1], position)
    assert path.read_bytes() == data


def frame_edges(data: bytes) -> Iterator[int]:
    """Yield where each frame begins, by the seek table."""
    count = struct.unpack("<I", data[-9:-5])[0]
    at = 0
    for number in range(count):
        yield at
        at += struct.unpack_from("<I", data, len(data) - 9 - 8 * (count - number))[0]


@pytest.mark.parametrize("members", [SMALL, LONG], ids=["small", "long"])
def test_every_cut_is_called_a_cut(members: list[Member]) -> None:
    """A file cut anywhere near its end or at any frame edge is named as cut, whole members before it stay known."""
    data = pack_with_writer(members)
    edges = set(frame_edges(data)) | {edge + 1 for edge in frame_edges(data)} | {edge + 9 for edge in frame_edges(data)}
    near_end = range(len(data) - 200 if members is SMALL else len(data) - 20, len(data))
    cuts = sorted(edges - {len(data)} | {*near_end} | ({*range(len(data))} if members is SMALL else set()))
    for size in cuts:
        found = look(data[:size])
        assert found.sealed is None
        assert [finding.code for finding in found.findings if finding.code != "C-20"] == ["C-02"], (
            size,
            found.findings,
        )
        assert found.findings[0].offset <= size
        assert found == examine(Dribble(data[:size])) or size > FRAME  # type: ignore[arg-type]


def damaged(data: bytes, offset: int) -> bytes:
    changed = bytearray(data)
    changed[offset] ^= 0xFF
    assert bytes(changed) != data
    return bytes(changed)


MANY: list[Member] = [
    MANIFEST,
    *((f"3-attempts/a{number:06}/stdout", RANDOM[number : number + FRAME // 3]) for number in range(12)),
    RESULTS,
]


def test_every_member_in_a_damaged_frame_is_named_and_no_other() -> None:
    """Damage in two frames: exactly the members that have bytes in them are named."""
    data = pack_with_writer(MANY)
    places = []
    start = 512 + 512  # the header member
    for name, content in MANY:
        stop = start + 512 + len(content) + -len(content) % 512
        places.append((name, start, stop))
        start = stop
    edges = [*frame_edges(data)]
    assert len(edges) == 7
    for hit in ({1}, {1, 3}, {0}, {4}):
        found = data
        for number in hit:
            found = damaged(found, (edges[number] + edges[number + 1]) // 2)
        lost = {
            name
            for name, first, stop in places
            for number in hit
            if first < (number + 1) * FRAME and number * FRAME < stop
        }
        named = {finding.member for finding in look(found).findings if finding.code == "C-20"}
        own = {"0-header.json"} if 0 in hit else {"9-SHA256SUMS"} if 4 in hit else set()
        assert named == lost | own, hit


@pytest.mark.parametrize("at", [0, 4, 5, 9, 10, 11], ids=lambda at: f"byte-{at}")
def test_damage_to_a_frame_header_costs_only_that_frame(at: int) -> None:
    """Where the length of a frame is lost, the next frame is found again."""
    data = pack_with_writer(MANY)
    edges = [*frame_edges(data)]
    found = look(damaged(data, edges[2] + at))
    whole = look(damaged(data, edges[2] + 50_000))
    named = {finding.member for finding in found.findings if finding.code == "C-20"}
    assert named == {finding.member for finding in whole.findings if finding.code == "C-20"}
    assert len(named) == 4


def test_bytes_lost_in_the_middle_name_one_frame() -> None:
    """Removed and added bytes move all later frames; these still count as whole."""
    data = pack_with_writer(MANY)
    edge = [*frame_edges(data)][2]
    for changed in (data[: edge + 1000] + data[edge + 5000 :], data[: edge + 1000] + b"x" * 999 + data[edge + 1000 :]):
        named = {finding.member for finding in look(changed).findings if finding.code == "C-20"}
        assert len(named) == 4


def test_a_capsule_inside_a_damaged_capsule_is_not_mistaken_for_it() -> None:
    """Frames and index of a member that is itself a container never stand in for those of the outer one."""
    inner = pack_with_writer([MANIFEST, (NOISE[0], RANDOM[:3000])])
    content = RANDOM[: FRAME + 5000] + inner + RANDOM[: FRAME // 2]
    data = pack_with_writer([MANIFEST, (NOISE[0], content), RESULTS])
    assert inner in data
    edge = [*frame_edges(data)][1]
    for at in (0, 4, 9):
        found = look(damaged(data, edge + at))
        assert found.sealed is None
        assert NOISE[0] in {finding.member for finding in found.findings if finding.code == "C-20"}


def test_damage_with_a_damaged_table_says_what_is_unknown() -> None:
    data = pack_with_writer(MANY)
    edges = [*frame_edges(data)]
    found = look(damaged(damaged(data, edges[2] + 50_000), edges[5] + 50))
    last = [finding for finding in found.findings if finding.code == "C-20"]
    assert [finding.member for finding in last] == [None]
    assert "no whole table" in last[0].message


def test_a_failing_decoder_is_an_error_and_never_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> bytes:
        raise RuntimeError("worker died")

    monkeypatch.setattr("capsule.archive.frames.decompress", broken)
    for threads in (0, 2):
        with pytest.raises(RuntimeError, match="worker died"):
            examine(io.BytesIO(forge()), threads=threads)


def test_a_failing_hash_is_an_error_and_never_passes() -> None:
    with ThreadPoolExecutor(1) as thread:
        hasher = HashBehind(thread, b"one piece")
        hasher.update("no bytes")  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            hasher.hexdigest()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_hostile_files_stay_within_memory(tmp_path: Path) -> None:
    """Frames that expand thousandfold are read, and what is wrong with them found, in less than 128 MiB."""
    zeros = compress(bytes(FRAME))
    path = tmp_path / "x.capsule"
    path.write_bytes(forge([(NOISE[0], bytes(FRAME))], frames=lambda frames: [frames[0], *[zeros] * 200, frames[1]]))
    code = (
        "import sys; from capsule.archive.reader import examine\n"
        "found = examine(open(sys.argv[1], 'rb')); assert found.sealed is None and found.findings\n"
        "print([line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')][0])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert int(run.stdout) < 128 * 1024


def test_every_changed_byte_of_the_tar_is_found_inside_sound_frames() -> None:
    """Frames, index and seek table made anew around one changed byte of the tar: never sound."""
    raw = b"".join(entry(*member) for member in with_lists(SMALL))
    major = raw.index(b"capsule-archive/") + len("capsule-archive/")
    for position in range(len(raw)):
        if position == major:
            with pytest.raises(MalformedError, match="another major version"):
                look(forge(body=lambda raw: raw[:major] + bytes([raw[major] ^ 1]) + raw[major + 1 :]))
            continue
        found = look(forge(body=lambda raw, at=position: raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]))
        assert found.sealed is None, position
        assert found.findings[0].offset == 0


def test_every_changed_byte_of_the_table_is_found_inside_sound_frames() -> None:
    """The one thing that may differ is the library line: another library's file, of the same identity."""
    whole = look(forge()).sealed
    assert whole is not None
    lines: list[bytes] = []
    forge(table=lambda data: lines.append(data) or data)  # type: ignore[func-returns-value]
    free = range(lines[0].index(LIBRARY_LINE), lines[0].index(LIBRARY_LINE) + len(LIBRARY_LINE))
    for position in range(len(lines[0])):
        sealed = look(forge(table=lambda raw, at=position: raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])).sealed
        if sealed is not None:
            assert position in free
            assert sealed.identity == whole.identity
            assert sealed.container != whole.container


def test_an_abandoned_walk_leaves_no_thread() -> None:
    before = threading.active_count()
    data = pack_with_writer(LONG)
    for expected in ("capsule-decode", "capsule-hash"):
        events = walk(io.BytesIO(data), threads=2)
        while not any(thread.name.startswith(expected) for thread in threading.enumerate()):
            next(events)
        events.close()
        assert threading.active_count() == before

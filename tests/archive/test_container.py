"""What goes in comes out, the same bytes every time, and stock tools agree."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from container_forge import (
    FRAME,
    MANIFEST,
    RESULTS,
    SMALL,
    STDOUT,
    Member,
    forge,
    pack_into,
    pack_with_writer,
    tar_header,
)
from container_vectors import LONG, NOISE, RANDOM
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.archive import layout, tar
from capsule.archive.access import open_member
from capsule.archive.model import ContainerError
from capsule.archive.reader import Chunk, End, Event, MemberEnd, MemberStart, examine, walk
from capsule.archive.writer import CapsuleWriter
from capsule.core.canonical import canonical_line
from capsule.core.digest import digest_of
from capsule.core.errors import DriftError, IncompleteError, MachineError

ROOT = Path(__file__).parents[2]


def member_names() -> st.SearchStrategy[str]:
    hexes = st.binary(min_size=32, max_size=32).map(bytes.hex)
    attempts = st.integers(0, 999_999).map(lambda number: f"3-attempts/a{number:06}/stderr")
    fixed = st.sampled_from(["2-ledger.jsonl", "4-records/rows.parquet", "8-README/VERIFY.md", MANIFEST[0]])
    return st.one_of(fixed, attempts, hexes.map("5-sources/".__add__), hexes.map("6-oracles/".__add__))


def contents() -> st.SearchStrategy[bytes]:
    sizes = st.sampled_from([0, 1, 511, 512, 513, 1024, FRAME - 1536, FRAME - 1024, FRAME, FRAME + 1])
    return st.one_of(st.binary(max_size=2000), sizes.map(lambda size: RANDOM[:size]))


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(member_names(), contents(), max_size=8), st.integers(1, 3), st.sampled_from([1, 3]))
def test_round_trip(tree: dict[str, bytes], threads: int, level: int) -> None:
    """Every tree of members reads back equal, and an independent builder makes the same file."""
    members = sorted(tree.items())
    stream = io.BytesIO()
    with CapsuleWriter(stream, threads=threads, level=level) as writer:
        for name, content in members:
            half = len(content) // 2
            writer.add(name, len(content), iter([content[:half], memoryview(content)[half:]]))
        sealed = writer.close()
    found = examine(
        io.BytesIO(stream.getvalue()), keep=lambda name, _: name not in layout.OWN_NAMES, threads=threads - 1
    )
    assert found.findings == ()
    assert found.sealed == sealed
    assert found.kept == tree
    if level == 1:
        assert stream.getvalue() == forge(members)


def test_events_come_in_order() -> None:
    events: list[Event] = list(walk(io.BytesIO(pack_with_writer([STDOUT]))))
    kinds = [type(event) for event in events]
    assert kinds == [MemberStart, Chunk, MemberEnd] * 3 + [End]
    assert MemberEnd(STDOUT[0], len(STDOUT[1]), digest_of(STDOUT[1])) in events


def test_identity_is_that_of_the_member_lines() -> None:
    """C-22: the identity follows from names, sizes and digests only."""
    sums = "".join(f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in [header(), *SMALL]).encode()
    members = [header(), *SMALL, (layout.SUMS, sums)]
    lines = [canonical_line([name, len(content), hashlib.sha256(content).hexdigest()]) for name, content in members]
    expected = digest_of(b"capsule-archive/1\n" + b"".join(lines))
    seals = [examine(io.BytesIO(pack_with_writer(SMALL, level=level))).sealed for level in (1, 3, 9)]
    assert {sealed.identity for sealed in seals if sealed} == {expected}
    assert len({sealed.container for sealed in seals if sealed}) == 3


def header() -> Member:
    return layout.HEADER, layout.HEADER_BYTES


def test_identity_of_the_example_never_changes() -> None:
    """The example of the specification keeps its identity for ever."""
    sealed = examine(io.BytesIO(pack_with_writer([MANIFEST]))).sealed
    assert sealed is not None
    assert sealed.identity in (ROOT / "docs" / "spec" / "container.md").read_text()


def test_stock_tools_read_a_container(tmp_path: Path) -> None:
    """zstd and tar list and extract it, sha256sum checks it; neither warns."""
    path = tmp_path / "x.capsule"
    path.write_bytes(pack_with_writer(LONG))

    def shell(command: str) -> str:
        run = subprocess.run(
            ["bash", "-ec", "set -o pipefail; " + command], cwd=tmp_path, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stderr
        assert run.stderr == ""
        return run.stdout

    names = [layout.HEADER, *(name for name, _ in LONG), layout.SUMS, layout.TABLE]
    assert shell("zstd -dcq x.capsule | tar t").split() == names
    shell(
        "zstd -tq x.capsule && mkdir out && zstd -dcq x.capsule | tar -xC out"
        " && cd out && sha256sum --quiet -c 9-SHA256SUMS"
    )
    assert (tmp_path / "out" / NOISE[0]).read_bytes() == RANDOM


def test_bytes_depend_on_nothing_else(tmp_path: Path) -> None:
    """The same file for every thread count, umask, zone, locale, hash seed and way to write it."""
    code = (
        "import os, sys; os.umask(int(sys.argv[2], 8)); sys.path[:0] = sys.argv[4:]\n"
        "from container_vectors import LONG; from capsule.archive.writer import CapsuleWriter\n"
        "writer = CapsuleWriter(sys.argv[1], threads=int(sys.argv[3]))\n"
        "for name, content in LONG: writer.add(name, len(content), content)\n"
        "writer.close()"
    )
    expected = pack_with_writer(LONG)
    for number, (umask, threads, zone) in enumerate([("022", 1, "UTC"), ("077", 4, "Asia/Tokyo")]):
        path = tmp_path / f"{number}.capsule"
        environment = os.environ | {"TZ": zone, "LC_ALL": "C", "PYTHONHASHSEED": str(number)}
        arguments = [str(path), umask, str(threads), str(ROOT), str(Path(__file__).parent)]
        subprocess.run([sys.executable, "-c", code, *arguments], check=True, env=environment, cwd=tmp_path)
        assert path.read_bytes() == expected
        assert path.stat().st_mode & 0o777 == 0o666 & ~int(umask, 8)
    assert pack_with_writer(LONG, self_check=False, threads=3) == expected


@pytest.mark.parametrize("size", [0, 1, 512, tar.USTAR_SIZE_MAX, tar.USTAR_SIZE_MAX + 1, tar.SIZE_MAX])
def test_headers_are_read_by_tarfile_and_tar(size: int, tmp_path: Path) -> None:
    """The header of any size is one that stock tools understand, and below 8 GiB the one that tarfile writes."""
    block = tar.encode(RESULTS[0], size)
    assert len(block) == tar.header_size(size)
    assert tar.decode(block, 0) == (RESULTS[0], size)
    with tarfile.open(fileobj=io.BytesIO(block)) as archive:
        assert [(item.name, item.size) for item in [archive.next()] if item] == [(RESULTS[0], size)]
    if size <= tar.USTAR_SIZE_MAX:
        assert block == tar_header(RESULTS[0], size)
    if size <= 2 * tar.USTAR_SIZE_MAX:
        path = tmp_path / "sparse.tar"
        with path.open("wb") as stream:
            stream.write(block)
            stream.truncate(len(block) + size + tar.padding_size(size) + len(tar.END))
        listed = subprocess.run(["tar", "tvf", str(path)], check=True, capture_output=True, text=True).stdout.split()
        assert [listed[2], listed[-1]] == [str(size), RESULTS[0]]


def test_layout_lines_are_canonical_json() -> None:
    line = layout.member_line(STDOUT[0], 5, "0" * 64)
    assert line == canonical_line([STDOUT[0], 5, "0" * 64])
    assert layout.parse_member_line(line) == (STDOUT[0], 5, "0" * 64)
    assert layout.encoder_line("1.5.7", 1) == canonical_line(["zstd", "1.5.7", 1])
    assert layout.frame_line(1, 2, 3, 4, "a" * 64) == canonical_line([1, 2, 3, 4, "a" * 64])


def test_open_member(tmp_path: Path) -> None:
    path = tmp_path / "x.capsule"
    path.write_bytes(pack_with_writer(LONG))
    for name, content in LONG:
        assert open_member(path, name) == content
    assert open_member(path, layout.HEADER) == layout.HEADER_BYTES
    line = layout.member_line(layout.HEADER, len(layout.HEADER_BYTES), hashlib.sha256(layout.HEADER_BYTES).hexdigest())
    spanning = f'{layout.HEADER}{line.decode()[2 + len(layout.HEADER) :]}["{LONG[0][0]}'
    for absent in (STDOUT[0].replace("stdout", "stderr"), spanning, "7-results/results.jso", "", "é"):
        with pytest.raises(IncompleteError, match="none of that name"):
            open_member(path, absent)
    with pytest.raises(ContainerError, match="C-19"):
        open_member(path, NOISE[0], size_max=1000)


def access_faults() -> Iterator[tuple[str, bytes]]:
    good = forge(LONG)
    tail = len(good) - 96 - 8 - 5 * 8 - 9
    yield "C-18", good[:-1]
    yield "C-18", b""
    yield "C-17", good[: tail + 8] + b"x" + good[tail + 9 :]
    yield "C-21", good[: tail + 64] + bytes(32) + good[tail + 96 :]
    yield "C-21", forge(LONG, table=lambda lines: lines.replace(hashlib.sha256(RANDOM).hexdigest().encode(), b"0" * 64))
    yield "C-06", good[:3_000_000] + bytes(9) + good[3_000_009:]


@pytest.mark.parametrize(
    ("clause", "data"), [*access_faults()], ids=lambda value: value if isinstance(value, str) else ""
)
def test_open_member_never_returns_other_bytes(clause: str, data: bytes, tmp_path: Path) -> None:
    """C-21: random access through a false index or table ends in an error."""
    path = tmp_path / "x.capsule"
    path.write_bytes(data)
    with pytest.raises(ContainerError, match=clause):
        open_member(path, NOISE[0])


@pytest.mark.parametrize(("size", "pieces"), [(4, [b"abc"]), (2, [b"ab", b"c"]), (0, [b"x"]), (1, [])])
def test_a_source_of_another_size_is_an_error(size: int, pieces: list[bytes], tmp_path: Path) -> None:
    path = tmp_path / "x.capsule"
    writer = CapsuleWriter(path)
    with pytest.raises(DriftError, match=STDOUT[0]):
        writer.add(STDOUT[0], size, pieces)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["x", layout.HEADER, layout.SUMS, layout.TABLE, "7-results/results.json\n", "1-manifest/000/a"]
)
def test_names_are_refused_by_the_writer(name: str, tmp_path: Path) -> None:
    writer = CapsuleWriter(tmp_path / "x.capsule")
    with pytest.raises(ContainerError, match=r"C-11|C-12"):
        writer.add(name, 1, b"x")
    assert list(tmp_path.iterdir()) == []


def test_order_is_kept_by_the_writer(tmp_path: Path) -> None:
    with CapsuleWriter(tmp_path / "x.capsule") as writer:
        writer.add(RESULTS[0], 1, b"x")
        with pytest.raises(ContainerError, match="C-12"):
            writer.add(RESULTS[0], 1, b"x")


def test_nothing_is_left_after_any_error(tmp_path: Path) -> None:
    """A source that raises, and a writer that is left without `close`, leave no file; an older one stays as it was."""
    path = tmp_path / "x.capsule"
    path.write_bytes(b"older")

    def failing() -> Iterator[bytes]:
        yield b"x"
        raise KeyboardInterrupt

    with CapsuleWriter(path) as writer, pytest.raises(KeyboardInterrupt):
        writer.add(STDOUT[0], 2, failing())
    with CapsuleWriter(path) as writer:
        writer.add(*STDOUT[:1], len(STDOUT[1]), STDOUT[1])
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"older"
    with CapsuleWriter(path) as writer:
        writer.close()
    assert list(tmp_path.iterdir()) == [path]
    assert examine(path.open("rb")).sealed is not None


class Full(io.BytesIO):
    """A stream on a disk with room for so many bytes, which writes a few at a time."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def write(self, data: object) -> int:
        view = memoryview(data)[:1000]  # type: ignore[arg-type]
        if self.tell() + len(view) > self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(view)


def test_a_full_disk_is_an_error_with_a_hint() -> None:
    whole = pack_with_writer(SMALL)
    for room in range(0, len(whole), 50):
        with pytest.raises(MachineError, match="No space left") as caught:
            pack_into(Full(room), SMALL)
        assert caught.value.hint
    with pytest.raises(MachineError, match="No such file"):
        CapsuleWriter(ROOT / "absent" / "x.capsule")


def test_a_wrong_frame_is_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-check compares what each frame decodes to with what went in."""
    from capsule.archive import frames

    good = frames.compress
    monkeypatch.setattr(frames, "compress", lambda raw, level: good(raw[:-1] + b"x", level))
    with pytest.raises(MachineError, match="does not give back"):
        pack_with_writer(SMALL)
    assert examine(io.BytesIO(pack_with_writer(SMALL, self_check=False))).sealed is None

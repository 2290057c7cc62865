"""However many members a capsule has, the commands that read it keep a few bytes of each, and write all or nothing."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from capsule.cli import words
from capsule.core.digest import digest_of
from capsule.core.errors import BrokenError, MachineError, RefusedError
from capsule.core.judge import judge
from capsule.core.manifest import SourceEntry, sources_bytes
from capsule.host.workspace import find_workspace
from capsule.steps import extract as extracting
from capsule.steps.extract import extract, extract_sources
from capsule.steps.pack import Contents, Items, pack, plan
from capsule.steps.show import Listing, members
from capsule.steps.verify import collect
from tests.attacks.vectors import SOURCES, golden, with_list
from tests.golden.make import seal

GOLDEN = Path(__file__).parents[1] / "golden"
COUNT = 3000
BYTES_OF_ONE = 250
"""What may be kept of a source: digests of its content, of content and path, and once of its member."""


def entry(path: str, data: bytes) -> SourceEntry:
    return SourceEntry(
        path=path, kind="file", mode="0644", size=len(data), sha256=digest_of(data), target=None, blob=None, notes=()
    )


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    contents = {f"d{number % 50:02d}/{number:06d}.py": b"# %d\n" % number for number in range(COUNT)}
    listed = [entry(path, data) for path, data in sorted(contents.items())]
    every = with_list(SOURCES, sources_bytes(listed))
    every = {name: data for name, data in every.items() if not name.startswith("5-sources/")}
    every |= {f"5-sources/{item.sha256[7:]}": contents[item.path] for item in listed}
    path = tmp_path_factory.mktemp("large") / "large.capsule"
    path.write_bytes(seal(every))
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.capsule"
    path.write_bytes(seal({**golden()}))
    return path


def kept(action: Callable[[], Any]) -> tuple[Any, float]:
    """Return what an action returns, and how many bytes it keeps for each source."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        value = action()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return value, (after - before) / COUNT


def test_verify_keeps_digests_of_sources_only(large: Path) -> None:
    with large.open("rb") as stream:
        collect(stream, whole_lists=False)  # imports what it needs
        stream.seek(0)
        evidence, size = kept(lambda: collect(stream, whole_lists=False))
    assert size < BYTES_OF_ONE
    checks = {check.id: check for check in judge(evidence).checks}
    assert checks["V-01"].words == f"{sum(1 for _ in members(large).members)} members in canonical form"
    assert (checks["V-03"].status, checks["V-04"].status) == ("passed", "passed")
    assert not [finding for finding in checks["V-15"].findings if finding.startswith(("5-", "1-"))]


@pytest.mark.parametrize("name", [path.stem for path in sorted(GOLDEN.glob("*.capsule"))])
def test_verify_says_the_same_of_lists_that_were_read_whole(name: str) -> None:
    """Also where sources are absent, or more than the lists name, and where manifests share them."""
    with (GOLDEN / f"{name}.capsule").open("rb") as stream:
        whole = judge(collect(stream))
        stream.seek(0)
        assert judge(collect(stream, whole_lists=False)) == whole


def test_show_lists_members_as_they_are_read(large: Path) -> None:
    members(large)
    listing, size = kept(lambda: members(large))
    assert size < 20
    first = next(listing.members)
    middle, size = kept(lambda: [next(listing.members) for _ in range(COUNT // 2)][-1])
    assert size < 100
    rest = list(listing.members)
    assert first[0] < middle[0] < rest[0][0]
    assert rest[-1][0] == "9-SHA256SUMS"


def test_extract_keeps_paths_and_digests_only(large: Path, tmp_path: Path) -> None:
    result, size = kept(lambda: extract_sources(large, tmp_path / "tree"))
    assert (result.count, size < BYTES_OF_ONE) == (COUNT, True)
    found = list(result.names)
    assert found == sorted(str(path.relative_to(tmp_path / "tree")) for path in (tmp_path / "tree").rglob("*.py"))
    assert (tmp_path / "tree" / found[7]).read_bytes() == b"# %d\n" % int(found[7][4:10])


@pytest.mark.parametrize("names", [[], ["a"], ["a", "ü/\n"]])
def test_lists_are_printed_as_they_come_like_other_objects(
    names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words.emit_extracted(True, Path("x"), extracting.Extracted(len(names), iter(names)))
    assert (
        capsys.readouterr().out == json.dumps({"directory": "x", "files": names}, indent=2, ensure_ascii=False) + "\n"
    )
    words.emit_members(True, Listing(9, iter([(name, 9, "d") for name in names])))
    value = {"members": [{"name": name, "size_bytes": 9, "sha256": "d"} for name in names]}
    assert capsys.readouterr().out == json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def test_members_are_aligned_by_the_largest(capsys: pytest.CaptureFixture[str]) -> None:
    words.emit_members(False, Listing(1234567, iter([("a", 1, "d"), ("b", 1234567, "d")])))
    assert capsys.readouterr().out == "bytes    member\n1        a\n1234567  b\n"


@pytest.fixture(params=["absent", "empty", "current"])
def target(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to extract to: not there, there, or the one in which the command is given."""
    place = tmp_path / "place" / "out"
    place.parent.mkdir()
    if request.param != "absent":
        place.mkdir()
    if request.param == "current":
        monkeypatch.chdir(place)
        return Path()
    return place


def below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("way", [extract, extract_sources])
def test_all_is_there_or_nothing(way: Any, error: BaseException, small: Path, target: Path) -> None:
    """A write that fails, a signal and a kill: the folder never has its name with half of the files in it."""
    before = below(small.parent)
    write = extracting._write_all
    written = 0

    def failing(descriptor: int, data: memoryview) -> None:
        nonlocal written
        assert not (target / "0-header.json").exists()
        assert not (target / "trial.py").exists()
        written += 1
        if written == 2:
            raise error
        write(descriptor, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extracting, "_write_all", failing)
        with pytest.raises((MachineError, KeyboardInterrupt)) as caught:
            way(small, target)
    assert below(small.parent) == before
    if isinstance(error, OSError):
        assert f"cannot write to {target}: No space left on device; nothing was written" in str(caught.value)
    result = way(small, target)
    assert sum(path.is_file() for path in target.rglob("*")) == result.count
    assert not list(small.parent.rglob(".capsule-*"))


def test_files_that_came_meanwhile_stay(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out"
    target.mkdir()
    write = extracting._write_all

    def intruding(descriptor: int, data: memoryview) -> None:
        (target / "0-header.json").write_text("mine")
        write(descriptor, data)

    monkeypatch.setattr(extracting, "_write_all", intruding)
    with pytest.raises(RefusedError, match="found files in it by now"):
        extract(small, target)
    assert below(target) == ["0-header.json"]


def test_a_capsule_that_changes_meanwhile_leaves_nothing(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = extracting.fresh

    def cutting(target: Path) -> Any:
        os.truncate(small, small.stat().st_size - 60)
        return fresh(target)

    monkeypatch.setattr(extracting, "fresh", cutting)
    with pytest.raises(BrokenError):
        extract(small, tmp_path / "out")
    assert below(tmp_path) == ["small.capsule"]


def test_a_file_larger_than_the_disk_takes_is_an_error_of_the_machine(small: Path, tmp_path: Path) -> None:
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))

    command = [sys.executable, "-m", "capsule", "extract", str(small), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=limited)
    assert (done.returncode, done.stdout) == (5, "")
    assert f"cannot write to {tmp_path / 'out'}: File too large; nothing was written" in done.stderr
    assert below(tmp_path) == ["small.capsule"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 16 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(place)]
    if os.getuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("expected the right to mount a file system")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("name", ["", "out"])
def test_a_full_disk_is_as_it_was_before(name: str, small: Path, small_disk: Path) -> None:
    with pytest.raises(MachineError, match="No space left on device; nothing was written") as caught:
        extract(small, small_disk / name)
    assert "the space on its disk" in str(caught.value.hint)
    assert below(small_disk) == []


def test_tables_that_wait_in_files_are_packed_like_others(
    signed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files without a name in the folder of the capsule, of which nothing is left; listing leaves nothing either."""
    monkeypatch.setattr("capsule.steps.pack.TABLE_IN_MEMORY_BYTES", 1)
    packed = pack(signed, tmp_path / "x.capsule")
    assert packed.path.read_bytes() == signed.with_suffix(".capsule").read_bytes()
    with plan(find_workspace(signed), tmp_path)[0] as items:
        opened = [item for item in items if not isinstance(item.content, bytes | Path)]
        assert [item.name for item in opened] == ["4-records/rows.parquet"]
        once, again = (b"".join(opened[0].chunks()) for _ in range(2))
        assert once == again
        assert len(once) == opened[0].size
        assert below(tmp_path) == ["x.capsule"]
    assert opened[0].content.closed  # type: ignore[union-attr]
    assert below(tmp_path) == ["x.capsule"]


def test_a_disk_that_takes_no_table_is_an_error_of_the_machine(
    signed: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capsule.steps.pack.TABLE_IN_MEMORY_BYTES", 1)
    with suppress(OSError):
        (small_disk / "full").write_bytes(bytes(1 << 20))
    with pytest.raises(MachineError, match=r"cannot make 4-records/rows.parquet: No space left on device") as caught:
        pack(signed, small_disk / "x.capsule")
    assert (caught.value.exit_code, below(small_disk)) == (5, ["full"])


def test_what_is_packed_of_sources_is_in_order_and_small() -> None:
    digests = [digest_of(b"%d" % number) for number in range(COUNT)]
    contents, size = kept(Contents)
    _, more = kept(lambda: all(contents.add(digest, number) is None for number, digest in enumerate(digests)))
    contents.add(digests[7], 7)
    assert size + more < BYTES_OF_ONE / 2
    assert list(contents) == sorted((digest[7:], number) for number, digest in enumerate(digests))
    items = Items([], contents, [], Path("/x"))
    assert (
        [item.name for item in items] == [item.name for item in items] == sorted(f"5-sources/{d[7:]}" for d in digests)
    )

"""A list of sources gone through as it comes says what reading it whole says, in a hundredth of the memory."""

from __future__ import annotations

import hashlib
import re
import tracemalloc
from contextlib import suppress
from itertools import pairwise

import pytest
from builders import source_entries
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.core.digest import ROOM_MAX, Digests, PackedSet, digest_of
from capsule.core.errors import MalformedError
from capsule.core.lines import LINE_BYTES_MAX
from capsule.core.manifest import list_digest, read_sources, source_faults, sources_bytes
from capsule.core.source_list import FAULTS_MAX, SourceList
from capsule.core.verdict import FINDINGS_COUNTED_MAX

ENTRIES = source_entries({f"d{number // 3}/{number}.py": b"%d" % (number % 7) for number in range(20)})
DATA = sources_bytes(ENTRIES)
CUT = DATA[:-1]
UNORDERED = sources_bytes(ENTRIES[::-1])
NO_ENTRY = sources_bytes(ENTRIES[:5]) + b"{}\n" + sources_bytes(ENTRIES[5:])
FAULTY = sources_bytes(source_entries({"../a": b"1", "a": b"2", "a-b": b"3", "a/b": b"4", "a0": b"5", ".git/x": b"6"}))


@pytest.mark.parametrize("data", [DATA, b"", CUT, UNORDERED, NO_ENTRY, FAULTY, b"\n", b"x"])
@given(st.lists(st.integers(0, 5000), max_size=5))
@settings(max_examples=20)
def test_pieces_say_what_the_whole_says(data: bytes, cuts: list[int]) -> None:
    listed = SourceList("s")
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for start, stop in pairwise(places):
        listed.feed(data[start:stop])
    listed.finish()
    assert listed.digest == list_digest(data)
    words = None
    with suppress(MalformedError):
        entries = read_sources(data, "s")
        words = ""
    assert (listed.error is None) == (words == "")
    if listed.error is not None:
        with pytest.raises(MalformedError, match=re.escape(listed.error)):
            read_sources(data, "s")
        return
    assert listed.faults == list(source_faults(entries))
    assert sorted(listed.contents) == sorted({entry.sha256 for entry in entries})
    assert all(listed.holds(entry.path, entry.sha256) for entry in entries)
    assert not listed.holds("d0/0.py", digest_of(b"1"))
    assert not listed.holds("d0/1.py", digest_of(b"0"))


def test_a_file_is_found_above_another_although_others_lie_between() -> None:
    """In byte order `a-b` comes between the file `a` and what would lie below it."""
    words = list(source_faults(read_sources(FAULTY, "s")))
    assert words == [
        "expected a path inside the tree, found ../a",
        "expected a path inside the tree, found .git/x",
        "expected a path through folders, found a/b below a file",
    ]


@pytest.mark.parametrize(
    ("path", "sound"),
    [("a/" * 2047 + "bb", True), ("a/" * 2048 + "b", False), ("é/" * 1366, False), ("a/" * 200_000 + "b", False)],
    ids=["4096", "4097", "of two bytes each", "400001"],
)
def test_a_path_has_as_many_bytes_as_a_system_takes(path: str, *, sound: bool) -> None:
    words = list(source_faults(source_entries({path.rstrip("/"): b"1"})))
    expected = f"expected a path inside the tree of at most 4096 bytes, found {path[:2]}"
    assert [word[: len(expected)] for word in words] == [expected] * (not sound)
    assert all(len(word) < 1100 for word in words)


@given(st.lists(st.text("a-/", min_size=1, max_size=8), unique=True))
def test_what_lies_below_a_file_is_found_as_by_looking_at_every_folder(paths: list[str]) -> None:
    inside = sorted(path for path in paths if all(path.split("/")))
    words = list(source_faults(source_entries(dict.fromkeys(inside, b"1"))))
    below = [path for path in inside if any(path.startswith(f"{file}/") for file in inside)]
    assert words == [f"expected a path through folders, found {path} below a file" for path in below]


def test_a_long_line_is_refused_before_it_has_ended() -> None:
    """What has no end is neither kept nor gone through again and again."""
    listed = SourceList("s")
    listed.feed(DATA)
    for _ in range(20):
        listed.feed(b"a" * 100_000)
    assert listed.error == f"s:21: expected at most {LINE_BYTES_MAX} bytes in a line, found more"
    listed = SourceList.of(b"a" * (LINE_BYTES_MAX + 1) + b"\n", "s")
    assert listed.error == f"s:1: expected at most {LINE_BYTES_MAX} bytes in a line, found more"
    notes = source_entries({"a": b""})[0].model_copy(update={"notes": ("x" * (LINE_BYTES_MAX - 300),)})
    assert SourceList.of(sources_bytes([notes]), "s").error is None


def test_faults_are_kept_as_far_as_a_check_counts_them() -> None:
    assert FAULTS_MAX > FINDINGS_COUNTED_MAX


@given(st.lists(st.binary(min_size=2, max_size=2)), st.lists(st.binary(min_size=2, max_size=2)))
def test_a_packed_set_is_a_set(added: list[bytes], asked: list[bytes]) -> None:
    packed = PackedSet(2)
    for raw in added:
        packed.add(raw)
    assert sorted(packed) == sorted(set(added))
    assert len(packed) == len(set(added))
    assert [raw in packed for raw in asked] == [raw in set(added) for raw in asked]
    left = set(added)
    for raw in asked:
        packed.discard(raw)
        left.discard(raw)
    assert sorted(packed) == sorted(left)


def test_bytes_of_two_neighbours_are_no_member() -> None:
    """In one room, what lies across the edge of two members is not taken for one."""
    packed = PackedSet(2)
    for raw in (b"ab", b"cd"):
        packed.add(raw)
    assert b"bc" not in packed
    packed.add(b"bc")
    assert [*packed] == [b"ab", b"cd", b"bc"]
    assert b"bc" in packed


@pytest.mark.parametrize("place", [0, 14, 28])
def test_rooms_grow_with_what_they_hold(place: int) -> None:
    """However alike the members are, none has to be sought among more than a few others."""
    packed = PackedSet(32)
    for number in range(20_000):
        packed.add(bytes(place) + number.to_bytes(4, "big") + bytes(28 - place))
    assert len(packed) == len({*packed}) == 20_000
    assert max(map(len, packed._rooms)) < 32 * 10 * ROOM_MAX


def test_digests_take_little_more_than_their_bytes() -> None:
    tracemalloc.start()
    try:
        digests = Digests()
        before, _ = tracemalloc.get_traced_memory()
        for number in range(20_000):
            digests.add(f"sha256:{hashlib.sha256(b'%d' % number).hexdigest()}")
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(digests) == 20_000
    assert (after - before) / 20_000 < 64

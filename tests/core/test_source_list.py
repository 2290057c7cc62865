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

from capsule.core.digest import Digests, PackedSet, digest_of
from capsule.core.errors import MalformedError
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


def test_bytes_of_two_neighbours_are_no_member(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all in one room, what lies across the edge of two members is not taken for one."""
    monkeypatch.setattr("capsule.core.digest.ROOMS", 1)
    packed = PackedSet(2)
    for raw in (b"ab", b"cd"):
        packed.add(raw)
    assert b"bc" not in packed
    packed.add(b"bc")
    assert [*packed] == [b"ab", b"cd", b"bc"]
    assert b"bc" in packed


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

"""Text in pieces, cut into blocks of whole lines."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from capsule.core.lines import PIECE_BYTES, Blocks, pieces

TEXT = st.lists(st.sampled_from([b"\n", b"a", b"bc", b"", b"\r", b"d" * 5])).map(b"".join)


@given(text=TEXT, cuts=st.lists(st.integers(0, 40)))
def test_blocks_are_the_whole_lines_wherever_the_pieces_end(text: bytes, cuts: list[int]) -> None:
    """However a text is cut into pieces, its blocks end with newlines and give every whole line once and in order."""
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    blocks = Blocks([text[start:end] for start, end in pairwise(edges)])
    found = list(blocks)
    whole = text[: text.rfind(b"\n") + 1]
    assert b"".join(found) == whole
    assert all(block.endswith(b"\n") for block in found)
    assert blocks.torn == len(text) - len(whole)


@given(text=TEXT, cuts=st.lists(st.integers(0, 40)), most=st.integers(0, 6))
def test_long_lines_are_cut_to_one_byte_more_than_they_may_have(text: bytes, cuts: list[int], most: int) -> None:
    """What comes of a line that spans pieces has its beginning, and is longer than allowed exactly if the line is."""
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    blocks = Blocks([text[start:end] for start, end in pairwise(edges)], most)
    found = b"".join(blocks).split(b"\n")[:-1]
    expected = text.split(b"\n")[:-1]
    assert len(found) == len(expected)
    for short, whole in zip(found, expected, strict=True):
        assert whole.startswith(short)
        assert (len(short) > most) == (len(whole) > most)
        assert short == whole or len(short) > most


def test_pieces_of_bytes_are_bounded() -> None:
    """Bytes are gone through a mebibyte at a time, and again and again."""
    data = bytes(range(256)) * 10_000
    assert b"".join(pieces(data)) == data
    assert max(map(len, pieces(data))) == PIECE_BYTES
    assert list(pieces(b"")) == [b""]


def test_a_line_without_end_takes_no_memory() -> None:
    """Of a line of many pieces only as much is held as may be read."""

    def endless() -> Iterator[bytes]:
        for _ in range(64):
            yield bytes(PIECE_BYTES)

    blocks = Blocks(endless())
    tracemalloc.start()
    try:
        assert list(blocks) == []
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert blocks.torn == 64 * PIECE_BYTES
    assert peak < 8 << 20

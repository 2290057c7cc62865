"""Content that is kept compressed gives its bytes back, piece by piece and from any place."""

from __future__ import annotations

import io
import random
import tracemalloc

import pytest

from capsule.archive.kept import WHOLE_BYTES_MAX, Kept, as_file
from capsule.core.lines import PIECE_BYTES, pieces

SIZES = [0, 1, WHOLE_BYTES_MAX, WHOLE_BYTES_MAX + 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 7]


def kept(data: bytes) -> bytes | Kept:
    """Feed data in uneven chunks and return what is kept."""
    keeper = Kept()
    rng = random.Random(len(data))
    at = 0
    while at < len(data):
        size = rng.randint(1, 2 * PIECE_BYTES)
        keeper.feed(memoryview(data)[at : at + size])
        at += size
    return keeper.content()


@pytest.mark.parametrize("size", SIZES)
def test_what_is_kept_comes_back(size: int) -> None:
    """Whatever the size, the pieces together are the bytes, each time."""
    data = random.Random(size).randbytes(size)
    content = kept(data)
    assert isinstance(content, bytes) == (size <= WHOLE_BYTES_MAX)
    for _ in range(2):
        assert b"".join(pieces(content)) == data
    assert all(len(piece) <= PIECE_BYTES for piece in pieces(content))


@pytest.mark.parametrize("size", SIZES)
def test_what_is_kept_is_read_as_a_file(size: int) -> None:
    """A file over it reads and seeks as one over the bytes does."""
    data = random.Random(size).randbytes(size)
    rng = random.Random(size + 1)
    with io.BytesIO(data) as expected, as_file(kept(data)) as found:
        for _ in range(50):
            place, length = rng.randint(0, size + 9), rng.choice([0, 1, 100, PIECE_BYTES + 5])
            assert found.seek(place) == expected.seek(place)
            assert found.read(length) == expected.read(length)
            assert found.tell() == min(max(size, place), place + length)
        assert found.seek(0, io.SEEK_END) == size
        assert found.seek(-min(8, size), io.SEEK_END) == max(0, size - 8)
        assert found.read() == data[-8:]
        assert found.seek(0) == 0
        assert found.seek(3, io.SEEK_CUR) == 3


def test_zeros_take_no_memory() -> None:
    """What a few kilobytes of a file declare does not take more where it is kept."""
    tracemalloc.start()
    try:
        keeper = Kept()
        for _ in range(200):
            keeper.feed(bytes(PIECE_BYTES))
        content = keeper.content()
        assert sum(map(len, pieces(content))) == 200 * PIECE_BYTES
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20

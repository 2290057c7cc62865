"""Text that comes in pieces, cut into whole lines, so that no more than a few pieces of it are in memory at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

Content = bytes | Iterable[bytes]
"""The bytes of a member: all of them, or pieces that can be gone through again and again."""

PIECE_BYTES = 1 << 20
LINE_BYTES_MAX = 1 << 20


def pieces(content: Content) -> Iterator[bytes]:
    """Yield the content in pieces of at most a mebibyte, if whoever keeps it made them so."""
    if not isinstance(content, bytes):
        yield from content
        return
    if len(content) <= PIECE_BYTES:
        yield content
        return
    for start in range(0, len(content), PIECE_BYTES):
        yield content[start : start + PIECE_BYTES]


def count_lines(content: Content) -> int:
    """Return how many newlines the content has."""
    return sum(piece.count(b"\n") for piece in pieces(content))


def whole(content: Content, size_max: int) -> bytes | None:
    """Return the content in one, or None if it has more bytes than that."""
    found = b""
    for piece in pieces(content):
        found += piece
        if len(found) > size_max:
            return None
    return found


class Blocks:
    """Yields blocks of whole lines, each with its newline; afterwards `torn` counts the bytes behind the last newline.

    A line of more than `line_bytes_max` bytes is cut to one byte more than that, which its reader refuses.
    """

    def __init__(self, content: Content, line_bytes_max: int = LINE_BYTES_MAX) -> None:
        self._content = content
        self._line_bytes_max = line_bytes_max
        self.torn = 0

    def __iter__(self) -> Iterator[bytes]:
        self.torn = 0
        begun = b""
        for piece in pieces(self._content):
            room = max(0, self._line_bytes_max + 1 - len(begun))
            first = piece.find(b"\n")
            if first < 0:
                begun += piece[:room]
                self.torn += len(piece)
            else:
                end = piece.rindex(b"\n") + 1
                yield begun + piece[: min(first, room)] + piece[first:end]
                begun = piece[end:]
                self.torn = len(begun)

"""A SHA-256 that another thread computes, a bounded number of pieces behind its caller."""

from __future__ import annotations

import hashlib
from collections import deque
from concurrent.futures import Executor, Future

WAITING_MAX = 2
"""Pieces that wait to be hashed."""


class HashBehind:
    """A SHA-256 like those of `hashlib`, but that `thread` (an executor of one thread) computes while others go on.

    The bytes of a piece must stay as they are until it is hashed.
    """

    def __init__(self, thread: Executor, piece: bytes | memoryview) -> None:
        self._thread = thread
        self._hasher = hashlib.sha256()
        self._waiting: deque[Future[None]] = deque()
        self.update(piece)

    def update(self, piece: bytes | memoryview) -> None:
        """Hash the next piece soon."""
        self._waiting.append(self._thread.submit(self._hasher.update, piece))
        if len(self._waiting) > WAITING_MAX:
            self._waiting.popleft().result()

    def hexdigest(self) -> str:
        """Return the digest of all pieces so far in hexadecimal digits."""
        while self._waiting:
            self._waiting.popleft().result()
        return self._hasher.hexdigest()

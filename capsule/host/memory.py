"""Memory of this process that the system could use for something else."""

from __future__ import annotations

import ctypes
from contextlib import suppress


def give_memory_back() -> None:
    """Give the system what was freed and the allocator kept, where it can: between two tasks that take much of it."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)

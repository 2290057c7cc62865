"""Pipes from which much is read."""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import suppress
from typing import BinaryIO

PIPE_SIZE = 1 << 20
"""Bytes that wait in a pipe, at most: what anyone may ask of Linux. By default 64 KiB do, and each side waits often."""


def widen(stream: BinaryIO) -> None:
    """Let more bytes wait in a pipe, where the system can; it is as good a pipe without."""
    resize = getattr(fcntl, "F_SETPIPE_SZ", None)
    with suppress(OSError, ValueError):
        if resize is not None and stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode):
            fcntl.fcntl(stream.fileno(), resize, PIPE_SIZE)

"""Processes forked off this one for a task of their own, which hold nothing of their parent's by accident."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NoReturn

from capsule.host import durable

PR_SET_PDEATHSIG = 1
ARG_START = 45
"""The place of `arg_start` among the fields of `/proc/PID/stat` after the name; `arg_end` follows it (proc(5))."""


def fork_helper(
    main: Callable[[], int | None],
    *,
    keep: Collection[int],
    dies_with_parent: bool,
    log: Path | None = None,
    held: Collection[int] = (),
) -> int:
    """Fork a helper of this process that runs `main` and exits with the status that it returns; returns its pid.

    The helper keeps the standard streams and the descriptors in `keep`, no others, so that it holds no lease, pipe or
    lock by accident. With a `log` its output and errors are appended to that file, and its input is empty. It reacts to
    signals as a new process does, until it says otherwise, and holds those in `held` back; no handler of its parent's
    ever runs in it.

    Raises:
        OSError: no process can be started, or the log not be written.
    """
    libc = ctypes.CDLL(None)  # loaded before the fork: a thread of the caller may hold the loader's lock
    parent = os.getpid()
    output = None if log is None else os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _helper(main, keep, libc if dies_with_parent else None, parent, output, held)
    finally:
        if output is not None:
            os.close(output)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return pid


def _helper(
    main: Callable[[], int | None],
    keep: Collection[int],
    libc: ctypes.CDLL | None,
    parent: int,
    output: int | None,
    held: Collection[int],
) -> NoReturn:
    status = 1
    try:
        if libc is not None and hasattr(libc, "prctl"):
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if libc is None or os.getppid() == parent:
            gc.freeze()  # no finalizer of the parent's objects runs here
            durable.disarm()
            if output is not None:
                os.dup2(output, 1)
                os.dup2(output, 2)
            _close_all_but({0, 1, 2, *keep})
            if output is not None:
                _renew_streams()
            _reset_signals(held)
            status = main() or 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def name_process(words: str) -> None:
    """Let `ps` and `pgrep -f` show these words in the place of the command line of which this process was forked.

    Whoever signals the command by a pattern shall not hit its helpers too. The kernel shows the memory in which the
    command line came; where that cannot be found, nothing is changed. Longer words are cut.
    """
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[ARG_START]), int(fields[ARG_START + 1])
    except (OSError, IndexError, ValueError):
        return
    if 0 < start < end:
        ctypes.memmove(start, words.encode()[: end - start - 1].ljust(end - start, b"\0"), end - start)


def _renew_streams() -> None:
    """Empty the input, and leave what the parent had in its buffers, or in their place, to the parent."""
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    if nowhere:
        os.close(nowhere)
    sys.stdout = sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115


def _close_all_but(keep: Collection[int]) -> None:
    try:
        numbers = [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208 - no descriptor may stay open
    except OSError:
        numbers = list(range(os.sysconf("SC_OPEN_MAX")))
    for number in numbers:
        if number not in keep:
            with contextlib.suppress(OSError):
                os.close(number)


def _reset_signals(held: Collection[int]) -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, held)

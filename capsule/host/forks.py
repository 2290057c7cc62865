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
from typing import NoReturn

from capsule.host import durable

PR_SET_PDEATHSIG = 1


def fork_helper(
    main: Callable[[], object], *, keep: Collection[int], dies_with_parent: bool, silent: bool = False
) -> int:
    """Fork a helper of this process that runs `main` and ends; returns its pid.

    The helper keeps the standard streams, which lead nowhere if it is `silent`, and the descriptors in `keep`, no
    others, so that it holds no lease, pipe or lock by accident. It reacts to signals as a new process does, until it
    says otherwise; no handler of its parent's ever runs in it.

    Raises:
        OSError: no process can be started.
    """
    libc = ctypes.CDLL(None)  # loaded before the fork: a thread of the caller may hold the loader's lock
    parent = os.getpid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _helper(main, keep, libc if dies_with_parent else None, parent, silent)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return pid


def _helper(
    main: Callable[[], object], keep: Collection[int], libc: ctypes.CDLL | None, parent: int, silent: bool
) -> NoReturn:
    status = 1
    try:
        if libc is not None and hasattr(libc, "prctl"):
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if libc is None or os.getppid() == parent:
            gc.freeze()  # no finalizer of the parent's objects runs here
            durable.disarm()
            if silent:
                nowhere = os.open(os.devnull, os.O_RDWR)
                for number in range(3):
                    os.dup2(nowhere, number)
            _close_all_but({0, 1, 2, *keep})
            _reset_signals()
            main()
            status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        if not silent:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
        os._exit(status)


def _close_all_but(keep: Collection[int]) -> None:
    try:
        numbers = [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208 - no descriptor may stay open
    except OSError:
        numbers = list(range(os.sysconf("SC_OPEN_MAX")))
    for number in numbers:
        if number not in keep:
            with contextlib.suppress(OSError):
                os.close(number)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())

"""Work that may hang for ever, done in a process that can be given up.

A driver's call can block in the kernel where no signal reaches it. Such a call is made in a forked child: when it takes
too long the child is killed and, if even that does not end it, left to itself. The child holds no descriptor of its
parent's, so however long it stays, no lease, lock or pipe stays with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

from capsule.core.errors import CapsuleError, MachineError
from capsule.host.forks import fork_helper

Value = TypeVar("Value")

REAP_SECONDS = 0.2
"""How long a child that has answered, or was killed, is waited for before it is left to itself."""
CHUNK = 1 << 16
LENGTH_BYTES = 8
GO = b"g"
NOWHERE = Path(os.devnull)
HINT = "`nvidia-smi` says more about the driver and the device"

_left: set[int] = set()


def call(work: Callable[[], Value], seconds: float) -> Value:
    """Return what `work` returns, which must be picklable; it is run in a forked process for at most `seconds`.

    What `work` changes in memory or in the environment stays in that process. The caller is held for `seconds` and a
    moment at most, also by a child that cannot be killed.

    Raises:
        CapsuleError: `work` raised it.
        MachineError: it took longer, or its process ended without an answer.
        RuntimeError: `work` raised anything else, which is a defect; the message holds its traceback.
    """
    until = time.monotonic() + seconds
    _reap_left()
    ours, theirs = _channel()
    try:
        try:
            pid = fork_helper(lambda: _work(theirs, work), keep=[theirs], dies_with_parent=True, log=NOWHERE)
        except OSError as error:
            raise MachineError(f"cannot start a process to ask the driver: {error.strerror}") from error
        finally:
            os.close(theirs)
        try:
            os.write(ours, GO)
            data, in_time = _read(ours, until)
        except BaseException:
            _end(pid)
            raise
    finally:
        os.close(ours)
    if not in_time:
        _end(pid)
        raise MachineError(f"the driver did not answer within {seconds:g} s", hint=HINT)
    status = _wait(pid) if data is not None else _end(pid)
    if data is None:
        raise MachineError(f"the process that asked the driver {_ended(status)} before it answered", hint=HINT)
    kind, value = pickle.loads(data)
    if kind == "value":
        return cast(Value, value)
    if kind == "error":
        raise value
    raise RuntimeError(f"work in a forked process failed:\n{value}")


def _channel() -> tuple[int, int]:
    """Return the ends of a channel, the caller's and the child's, which is none of the standard streams."""
    ours, first = (end.detach() for end in socket.socketpair())
    try:
        return ours, fcntl.fcntl(first, fcntl.F_DUPFD_CLOEXEC, 3)
    except OSError:
        os.close(ours)
        raise
    finally:
        os.close(first)


def _work(channel: int, work: Callable[[], object]) -> None:
    """Work and answer, once the caller is known to know its child: one interrupted before closes the channel instead.

    Masks do not hold an interruption off: another thread of the caller may take the signal, and then Python runs its
    handler in the main thread whatever that one blocks.
    """
    if os.read(channel, len(GO)):
        _write(channel, _answer(work))


def _answer(work: Callable[[], object]) -> bytes:
    try:
        return pickle.dumps(("value", work()))
    except CapsuleError as error:
        return pickle.dumps(("error", error))
    except BaseException:
        return pickle.dumps(("defect", traceback.format_exc()))


def _write(channel: int, data: bytes) -> None:
    left = memoryview(len(data).to_bytes(LENGTH_BYTES, "big") + data)
    while left:
        left = left[os.write(channel, left) :]


def _read(channel: int, until: float) -> tuple[bytes | None, bool]:
    """Return the answer, None where the child ended without a whole one, and whether either came in time.

    The answer's length is sent before it: whether the channel was closed may depend on others.
    """
    data = bytearray()
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    while True:
        whole = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "big") if len(data) >= LENGTH_BYTES else sys.maxsize
        if len(data) >= whole:
            return bytes(data[LENGTH_BYTES:whole]), True
        left_ms = int((until - time.monotonic()) * 1000) + 1
        if left_ms <= 0 or not poll.poll(left_ms):
            return None, False
        chunk = os.read(channel, CHUNK)
        if not chunk:
            return None, True
        data += chunk


def _end(pid: int) -> int | None:
    """Kill the child and return its wait status, None if it does not end within a moment."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return _wait(pid)


def _wait(pid: int) -> int | None:
    until = time.monotonic() + REAP_SECONDS
    pause = 0.0002
    while True:
        try:
            found, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return None  # collected by somebody else in this process
        if found == pid:
            return status
        if time.monotonic() > until:
            _left.add(pid)
            return None
        time.sleep(pause)
        pause = min(2 * pause, 0.01)


def _reap_left() -> None:
    """Collect the children left behind that have ended since."""
    for pid in tuple(_left):
        try:
            found, _ = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            found = pid
        if found:
            _left.discard(pid)


def _ended(status: int | None) -> str:
    if status is None:
        return "went away"
    code = os.waitstatus_to_exitcode(status)
    return f"exited with status {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"

"""The one place that turns an error into words and an exit code."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn, TextIO

from capsule.core.errors import CapsuleError, MachineError

BUG_EXIT_CODE = 70
INTERRUPTED = 128 + signal.SIGINT
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def guarded(arguments: Sequence[str]) -> int:
    """Run the command line; every failure becomes `capsule: error: …` and a code, never a traceback.

    SIGTERM and SIGHUP end everything in the order in which an interrupt does; the exit code names the first signal. One
    that whoever started the command had ignored (`nohup`) stays ignored. The ends of children are never ignored: what
    `git` answered would be lost, and every answer taken for a yes.
    """
    _open_streams()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    received: list[signal.Signals] = []

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        received.append(signal.Signals(number))
        raise KeyboardInterrupt

    heeded = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in heeded}
    try:
        code = _called(arguments, "--json" in arguments)
    except KeyboardInterrupt:
        code = INTERRUPTED
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if code != INTERRUPTED:
        return _ended(code)
    number = received[0] if received else signal.SIGINT
    if "--json" in arguments:
        error = {"code": "interrupted", "message": f"ended by {number.name}", "hint": None}
        _object({"error": error}, indent=None if "--watch" in arguments else 2)
    return _ended(128 + number)


def _ended(code: int) -> int:
    """Return the code once all is said; what nobody takes, on a terminal that is gone or a full disk, changes none."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            _give_up(stream)
    return code


def _open_streams() -> None:
    """Give closed streams somewhere to go, and let text that a terminal's encoding lacks be escaped, not fail."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115, PTH123 - lives as long as the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _called(arguments: Sequence[str], wants_json: bool) -> int:
    from capsule.cli.app import app

    try:
        code = app(args=list(arguments), prog_name="capsule", standalone_mode=False)
        sys.stdout.flush()
    except CapsuleError as error:
        return report(error, wants_json)
    except OSError as error:
        return _closed_pipe() if error.errno == errno.EPIPE else report(_machine(error), wants_json)
    except SystemExit:  # click's own way out, with the code 1, where nobody reads any more
        return _closed_pipe()
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message(), file=sys.stderr)  # type: ignore[attr-defined]
            return 2
        if hasattr(error, "format_message"):  # click's own errors, wherever Typer keeps click
            return _usage(error, wants_json)
        if type(error).__name__ in ("Exit", "Abort"):
            return int(getattr(error, "exit_code", INTERRUPTED))
        return _bug(error)
    return code if isinstance(code, int) else 0


def report(error: CapsuleError, wants_json: bool) -> int:
    """Print an error for people on stderr, and as an object on stdout if that was asked for."""
    _say(error.message, error.hint)
    if wants_json:
        _object({"error": {"code": error.code, "message": error.message, "hint": error.hint}})
    return error.exit_code


def _machine(error: OSError) -> MachineError:
    where = f" ({error.filename})" if error.filename else ""
    hint = "free some space and run the command again" if error.errno == errno.ENOSPC else None
    return MachineError(f"the machine refused: {error.strerror or error}{where}", hint=hint)


def _usage(error: Exception, wants_json: bool) -> int:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "capsule"
    message = error.format_message()  # type: ignore[attr-defined]
    hint = f"{command} --help"
    _say(message, hint)
    if wants_json:
        _object({"error": {"code": "usage", "message": message, "hint": hint}})
    return 2


def _bug(error: Exception) -> int:
    if os.environ.get("CAPSULE_TRACEBACK"):
        raise error
    _say(
        f"a bug in capsule: {type(error).__name__}: {error}",
        "please report it; CAPSULE_TRACEBACK=1 shows where it happened",
    )
    return BUG_EXIT_CODE


def _say(message: str, hint: str | None) -> None:
    try:
        for line in message.splitlines() or [""]:
            print(f"capsule: error: {line}", file=sys.stderr)
        if hint:
            print(f"capsule: hint: {hint}", file=sys.stderr)
    except OSError:
        pass


def _object(value: dict[str, object], *, indent: int | None = 2) -> None:
    try:
        print(json.dumps(value, indent=indent), flush=True)
    except OSError:
        _closed_pipe()


def _closed_pipe() -> int:
    """Nobody reads any more: be quiet."""
    _give_up(sys.stdout)
    return 128 + signal.SIGPIPE


def _give_up(stream: TextIO) -> None:
    """Let what a stream still holds go nowhere, also when the interpreter flushes at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

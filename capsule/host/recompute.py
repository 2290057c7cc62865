"""Run one cell again on the CPU for a replay: outside any reservation, in a folder of its own, within the limits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from capsule import guest
from capsule.core.errors import MachineError
from capsule.core.plan import Cell
from capsule.core.protocol import Protocol
from capsule.host import launch
from capsule.host.durable import read_regular


def recompute(protocol: Protocol, cell: Cell, tree: Path, folder: Path) -> tuple[bytes, str]:
    """Run `cell` from the source tree `tree`, writing into `folder`; returns its journal, and words on how it ended."""
    journal = folder / launch.JOURNAL
    environment = launch.trial_environment(os.environ) | {"CUDA_VISIBLE_DEVICES": ""}
    environment |= {"CAPSULE_ATTEMPT": "a000000", "CAPSULE_DEVICE": "cpu", "CAPSULE_RECORDS": str(journal)}
    argv: tuple[str, ...]
    if protocol.arm(cell.arm).trial is not None:
        task = launch.python_task(protocol, [cell], attempt="a000000", device="cpu", root=tree, attempt_dir=folder)
        (folder / "task.json").write_text(json.dumps(task), encoding="utf-8")
        argv = (sys.executable, guest.__file__, str(folder / "task.json"))
    else:
        argv, more = launch.command_line(protocol, cell, device="cpu")
        environment |= more
    try:
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(
                argv, cwd=tree, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
            words = _waited(process, float(protocol.budget.wall_limit_seconds))
    except OSError as error:
        raise MachineError(f"cannot run {argv[0]}: {error.strerror}") from error
    except ValueError as error:
        raise MachineError(f"cannot run {argv[0]!r}: {error}") from error
    return read_regular(journal, launch.JOURNAL_BYTES_MAX) or b"", words


def _waited(process: subprocess.Popen[bytes], limit_seconds: float) -> str:
    """Wait for a process that leads its own group; past the limit, or when interrupted, the group is killed."""
    try:
        return f"ended with status {process.wait(limit_seconds)}"
    except subprocess.TimeoutExpired:
        return f"was still running after the wall limit of {limit_seconds:g} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

"""Launching one attempt: the order that a supervisor carries out, and how it is composed.

The order says everything that a supervisor needs to know, so it goes on and settles the attempt when the command that
started it is gone.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from capsule import guest
from capsule.core.attempt import AttemptId, Reserved
from capsule.core.digest import Digest
from capsule.core.errors import MachineError, UsageError
from capsule.core.plan import Cell, crossed
from capsule.core.progress import Process
from capsule.core.protocol import Observation, Protocol, milliseconds
from capsule.core.schema import Model, Natural, Parameter, Parameters, plain
from capsule.host.durable import CRASH_AT, FAIL_AT, write_durably
from capsule.host.ledger import Position
from capsule.host.process import Identity, identify
from capsule.host.reservation import Reservation

ORDER = "order.json"
LAUNCHER = "launcher.json"
LOG = "supervisor.log"
JOURNAL = "journal.jsonl"
IMPORTS = "imports.jsonl"

PASSED = frozenset({"PYTHONHASHSEED", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "PYTHONMALLOC"})
"""The variables of the interpreter that a trial inherits; others could let code in that nobody froze."""
REMOVED = frozenset({CRASH_AT, FAIL_AT})
"""Other variables that a trial does not inherit."""
FIXED = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONNOUSERSITE": "1"}
"""Variables that every trial gets: snapshots stay as they are, and a user's own packages stay out."""

JOURNAL_BYTES_MAX = 64 * 2**20
"""A longer journal is cut at the end of its attempt, since a capsule with one could not be read."""

SETTLED = 0
"""Exit status of a supervisor whose attempt is settled, whatever its outcome."""
REFUSED = 4
"""Nothing was started; the ledger says why."""
MACHINE = 5
"""Nothing was started, and the ledger could not be written."""
DEFECT = 70
"""A bug; the trial was stopped and the attempt is open."""
LEDGER_FAILED = 75
"""The ledger could not be written while the trial ran; the trial was stopped and the attempt is open."""


class Limits(Model):
    """The frozen limits of one attempt."""

    wall_ms: Natural
    kill_grace_ms: Natural
    release_grace_ms: Natural
    output_bytes_max: Natural
    processes_max: Natural


class SourceTree(Model):
    """A materialised snapshot and the list of what must be in it."""

    root: str
    sources: str


class LaunchOrder(Model):
    """Everything that a supervisor needs to know; it asks nobody."""

    protocol: str
    ledger: str
    ledger_head: str
    ledger_position: Position
    attempt: AttemptId
    attempt_dir: str
    token: str
    launcher: Identity
    lease_dir: str
    lease_wait_ms: Natural
    reserved: Reserved
    exclusivity: Literal["required", "best_effort"]
    on_contamination: Literal["finish", "stop"]
    limits: Limits
    kind: Literal["python", "command"]
    argv: tuple[str, ...]
    directory: str
    environment: dict[str, str]
    cells: tuple[Cell, ...]
    observations: tuple[Observation, ...]
    snapshot: Digest
    trees: tuple[SourceTree, ...]
    secrets: tuple[str, ...]


def compose(
    protocol: Protocol,
    process: Process,
    reservation: Reservation,
    *,
    ledger: Path,
    ledger_head: Path,
    attempt_dir: Path,
    lease_dir: Path,
    source_roots: Mapping[str, Path],
    snapshot: str,
    trees: Sequence[SourceTree] = (),
    secret_names: Sequence[str] = (),
    lease_wait_ms: int = 0,
) -> LaunchOrder:
    """Return the order for one reserved process of the plan, and write the task that a Python trial reads.

    `source_roots` gives the folder of each
    arm's frozen sources; the arms of one process share one.

    Raises:
        UsageError: a command names a placeholder that does not exist.
    """
    arms = [protocol.arm(cell.arm) for cell in process.cells]
    roots = {source_roots[arm.name] for arm in arms}
    assert len(roots) == 1, "arms with sources of their own run in processes of their own"
    (root,) = roots
    kind: Literal["python", "command"] = "python" if arms[0].trial is not None else "command"
    attempt, unit = reservation.attempt, reservation.reserved.unit
    device = "cuda" if unit == "gpu" else "cpu"
    environment = {
        "CAPSULE_ATTEMPT": attempt,
        "CAPSULE_DEVICE": device,
        "CAPSULE_RECORDS": str(attempt_dir / JOURNAL),
    }
    if kind == "python":
        task = attempt_dir / "task.json"
        item = python_task(protocol, process.cells, attempt=attempt, device=device, root=root, attempt_dir=attempt_dir)
        write_durably(task, json.dumps(item).encode())
        argv: tuple[str, ...] = (sys.executable, guest.__file__, str(task))
    else:
        assert len(process.cells) == 1, "a command runs one cell"
        argv, more = command_line(protocol, process.cells[0], device=device)
        environment |= more
    budget = protocol.budget
    return LaunchOrder(
        protocol=protocol.name,
        ledger=str(ledger),
        ledger_head=str(ledger_head),
        ledger_position=reservation.position,
        attempt=attempt,
        attempt_dir=str(attempt_dir),
        token=secrets.token_hex(16),
        launcher=identify(os.getpid()),
        lease_dir=str(lease_dir),
        lease_wait_ms=lease_wait_ms,
        reserved=reservation.reserved,
        exclusivity=budget.exclusivity,
        on_contamination=budget.on_contamination,
        limits=Limits(
            wall_ms=milliseconds(budget.wall_limit_seconds),
            kill_grace_ms=milliseconds(budget.kill_grace_seconds),
            release_grace_ms=milliseconds(budget.release_grace_seconds),
            output_bytes_max=budget.output_bytes_max,
            processes_max=budget.processes_max,
        ),
        kind=kind,
        argv=argv,
        directory=str(root),
        environment=environment,
        cells=tuple(process.cells),
        observations=protocol.observations,
        snapshot=snapshot,
        trees=tuple(trees),
        secrets=tuple(secret_names),
    )


def python_task(
    protocol: Protocol, cells: Sequence[Cell], *, attempt: str, device: str, root: Path, attempt_dir: Path
) -> dict[str, Any]:
    """Return the task of a Python trial's process; see `capsule.guest.run_task`."""
    workloads = {workload.name: workload.parameters for workload in crossed(protocol)}
    items = []
    for cell in cells:
        arm = protocol.arm(cell.arm)
        item = {
            "cell": cell.cell,
            "trial": arm.trial,
            "parameters": _plain(arm.parameters),
            "workload": _plain(workloads[cell.workload]),
            "source_root": str(root),
        }
        items.append(item | {name: getattr(cell, name) for name in ("arm", "seed", "start", "block", "position")})
    return {
        "attempt": attempt,
        "device": device,
        "records": str(attempt_dir / JOURNAL),
        "imports": str(attempt_dir / IMPORTS),
        "cells": items,
    }


_PLACEHOLDER = re.compile(r"(?<![$])\{(\{?)([a-z]+|(?:parameters|workload)\.[^{}]+)\}(\}?)")


def command_line(protocol: Protocol, cell: Cell, *, device: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return a command's arguments with its placeholders filled in, and the environment that names its cell.

    Placeholders are `{cell}`, `{arm}`, `{workload}`, `{seed}`, `{start}`, `{block}`, `{device}`, `{parameters.NAME}`
    and `{workload.NAME}`; `{{word}}` stands for `{word}` itself and `${NAME}` is left to a shell.

    Raises:
        UsageError: a placeholder does not exist.
    """
    arm = protocol.arm(cell.arm)
    assert arm.command is not None, arm.name
    workload = next(item.parameters for item in crossed(protocol) if item.name == cell.workload)
    known = {
        "cell": cell.cell,
        "arm": cell.arm,
        "workload": cell.workload,
        "seed": str(cell.seed),
        "start": str(cell.start),
        "block": str(cell.block),
        "device": device,
    }
    known |= {f"parameters.{name}": _as_argument(value) for name, value in arm.parameters.items()}
    known |= {f"workload.{name}": _as_argument(value) for name, value in workload.items()}

    def fill(match: re.Match[str]) -> str:
        opened, name, closed = match.groups()
        if opened and closed:
            return "{" + name + "}"
        if name not in known:
            raise UsageError(
                f"arm {arm.name}: expected a placeholder that is one of {', '.join(known)}, found {{{name}}}",
                hint=f"write {{{{{name}}}}} for the text itself",
            )
        return opened + known[name] + closed

    argv = tuple(_PLACEHOLDER.sub(fill, argument) for argument in arm.command)
    if argv[0] in ("python", "python3"):
        argv = (sys.executable, *argv[1:])
    environment = {
        "CAPSULE_CELL": cell.cell,
        "CAPSULE_ARM": cell.arm,
        "CAPSULE_SEED": str(cell.seed),
        "CAPSULE_WORKLOAD": cell.workload,
        "CAPSULE_PARAMETERS": json.dumps(_plain(arm.parameters)),
        "CAPSULE_WORKLOAD_PARAMETERS": json.dumps(_plain(workload)),
    }
    return argv, environment


def _plain(parameters: Parameters) -> dict[str, Any]:
    return {name: plain(value) for name, value in parameters.items()}


def _as_argument(value: Parameter) -> str:
    """Write a parameter for a command line: decimals as their author wrote them, booleans and lists as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int | tuple):
        return json.dumps(plain(value))
    return value.decimal


def shown_argv(order: LaunchOrder) -> list[str]:
    """Return an order's arguments as evidence keeps them: this machine's own folders by name, not by path."""
    names = {
        order.attempt_dir: "{attempt}",
        order.directory: "{sources}",
        str(Path(guest.__file__).parent): "{capsule}",
        sys.executable: "python",
    }
    shown = list(order.argv)
    for path, name in names.items():
        shown = [argument.replace(path, name) for argument in shown]
    return shown


def passes(name: str) -> bool:
    """Whether a trial inherits the environment variable of that name."""
    return name in PASSED if name.startswith("PYTHON") else name not in REMOVED


def trial_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what every trial has of an environment, and the variables that are the same for all."""
    return {name: value for name, value in environment.items() if passes(name)} | FIXED


def announce(attempt_dir: Path) -> None:
    """Make an attempt's folder and say in it who is about to launch it; called before its reservation is written."""
    try:
        attempt_dir.mkdir(parents=True, exist_ok=True)
        write_durably(attempt_dir / LAUNCHER, identify(os.getpid()).to_bytes())
    except OSError as error:
        raise MachineError(f"{attempt_dir}: cannot be written: {error.strerror}") from error

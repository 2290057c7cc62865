"""Init: a workspace with a commented protocol and a trial, or a training script, that runs at once."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from capsule.core.errors import MachineError, RefusedError

FUNCTION = {"protocol.toml": "protocol.toml", "trial.py": "trial.py"}
COMMAND = {"protocol.toml": "command.toml", "train.py": "train.py"}
"""Files of a workspace, and the template of each: for a Python function, and for a script of one's own."""


def init(directory: Path, *, command: bool = False) -> list[Path]:
    """Write the starting files into `directory` and return their paths; `command` starts from a training script.

    Raises:
        RefusedError: one of the files is there already; nothing was written.
        MachineError: the folder cannot be written.
    """
    templates = COMMAND if command else FUNCTION
    targets = [directory / name for name in templates]
    there = [str(target) for target in targets if target.exists()]
    if there:
        raise RefusedError(
            f"expected a folder without {' and '.join(there)}", hint="name another folder: capsule init DIR"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / ".capsule").mkdir(exist_ok=True)
        for template, target in zip(templates.values(), targets, strict=True):
            target.write_bytes(files("capsule").joinpath("templates", template).read_bytes())
    except OSError as error:
        raise MachineError(f"cannot write to {directory}: {error.strerror}") from error
    return targets

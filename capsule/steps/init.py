"""Init: a workspace with a commented protocol and a trial that runs at once."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from capsule.core.errors import MachineError, RefusedError

TEMPLATES = ("protocol.toml", "trial.py")


def init(directory: Path) -> list[Path]:
    """Write the starting files into `directory` and return their paths.

    Raises:
        RefusedError: one of the files is there already; nothing was written.
        MachineError: the folder cannot be written.
    """
    targets = [directory / name for name in TEMPLATES]
    there = [str(target) for target in targets if target.exists()]
    if there:
        raise RefusedError(
            f"expected a folder without {' and '.join(there)}", hint="name another folder: capsule init DIR"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / ".capsule").mkdir(exist_ok=True)
        for name, target in zip(TEMPLATES, targets, strict=True):
            target.write_bytes(files("capsule").joinpath("templates", name).read_bytes())
    except OSError as error:
        raise MachineError(f"cannot write to {directory}: {error.strerror}") from error
    return targets

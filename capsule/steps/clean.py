"""Clean: remove snapshots and stored contents that no frozen manifest needs. Evidence is never touched."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from capsule.core.digest import hex_of
from capsule.core.errors import BusyError, RefusedError
from capsule.host import store
from capsule.host.reservation import LOCK, at_work
from capsule.host.workspace import STATE, Workspace, find_workspace
from capsule.steps.standing import standing


@dataclass(frozen=True)
class Cleaned:
    """What was removed."""

    snapshots: int
    objects: int
    size_bytes: int


def clean(protocol_file: Path) -> Cleaned:
    """Remove all snapshots of the protocol, and stored contents that no manifest of the workspace names.

    Raises:
        BusyError: a run is at work on the protocol.
        RefusedError: an attempt is open and may be using a snapshot.
    """
    workspace = find_workspace(protocol_file)
    worker = at_work(workspace.state / LOCK)
    if worker is not None:
        raise BusyError(
            f"expected no run of {workspace.name}, found pid {worker.pid}, at work since {worker.since}",
            hint="clean once it has ended; see it: capsule status",
        )
    if any(attempt.open for attempt in standing(workspace).account.attempts.values()):
        raise RefusedError(
            "expected no open attempt, found one that may be using its snapshot", hint="capsule reconcile"
        )
    snapshots = size = 0
    for path in workspace.snapshots.iterdir() if workspace.snapshots.is_dir() else ():
        if not path.is_dir():  # the list of one, which lies beside it
            path.unlink()
            continue
        size += sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())
        store.remove_tree(path)
        snapshots += 1
    needed = _needed(workspace.root)
    objects = 0
    for path in store.objects(workspace.root):
        if path.parent.name + path.name not in needed:
            size += path.stat().st_size
            path.unlink()
            objects += 1
    return Cleaned(snapshots, objects, size)


def _needed(root: Path) -> set[str]:
    """Return the digests that any frozen manifest below the workspace's root names."""
    needed: set[str] = set()
    for frozen in root.rglob("*.frozen"):
        if STATE not in frozen.parts:
            for generation in Workspace(root, frozen.with_name(frozen.stem + ".toml")).generations():
                for revision in {None, *(arm.revision for arm in generation.manifest.arms)}:
                    needed |= {hex_of(entry.sha256) for entry in generation.sources(revision)}
    return needed

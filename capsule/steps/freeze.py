"""Freeze: turn a protocol and the hashes of its sources into an immutable manifest beside it.

The same protocol and sources give the same bytes anywhere. A protocol that is frozen already is never frozen again with
other content: that is what `amend` is for.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from capsule.core.digest import digest_of
from capsule.core.errors import DriftError, FrozenError, MachineError, ProtocolError, RefusedError, UsageError
from capsule.core.evidence import CELLS, CHAIN_BYTES_MAX, DOCUMENT_BYTES_MAX, KEPT_BYTES_MAX
from capsule.core.lines import LINE_BYTES_MAX
from capsule.core.manifest import (
    COMMAS_MAX,
    ArmSource,
    FileDigest,
    Manifest,
    SourceEntry,
    Supersedes,
    cells_bytes,
    list_digest,
    source_faults,
    sources_bytes,
)
from capsule.core.paths import shown
from capsule.core.plan import Cell, base, enumerate_cells
from capsule.core.protocol import Protocol
from capsule.core.redact import redact, secret_values
from capsule.core.toml import line_of, read_protocol
from capsule.host import environment, launch, source, store
from capsule.host.durable import write_durably
from capsule.host.source import Drift
from capsule.host.workspace import Generation, Workspace, find_workspace, sources_name

DOCUMENTS = ("manifest.json", "protocol.toml")
"""What a manifest's folder has beside lists."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Draft:
    """A manifest that is not written yet, with every file that goes beside it."""

    manifest: Manifest
    files: dict[str, bytes]
    entries: list[SourceEntry]
    warnings: list[str]


@dataclass(frozen=True)
class Frozen:
    """A frozen manifest: where it is, and whether this call wrote it."""

    generation: Generation
    written: bool
    warnings: list[str]

    @property
    def identity(self) -> str:
        """The manifest's digest."""
        return self.generation.manifest.identity


def freeze(protocol_file: Path, *, progress: Progress | None = None) -> Frozen:
    """Freeze a protocol; frozen already and equal is success.

    Raises:
        ProtocolError: the protocol is not one that can be frozen.
        FrozenError: it is frozen already with other content.
        RefusedError: a source looks like a secret.
    """
    workspace = find_workspace(protocol_file)
    generations = workspace.generations()
    supersedes = generations[-1].manifest.supersedes if generations else None
    made = draft(workspace, supersedes, progress=progress)
    if not generations:
        return Frozen(write(workspace, made, 1), True, made.warnings)
    current = generations[-1]
    if made.manifest.to_bytes() != current.files["manifest.json"] and not _same_bytes(current, made):
        raise FrozenError(
            f"{protocol_file}: expected what manifest {current.manifest.identity} froze, found changes: "
            f"{'; '.join(changes(current, made))}",
            hint=f"state why in an amendment: capsule amend {protocol_file} --reason …",
        )
    return Frozen(current, False, made.warnings)


def draft(workspace: Workspace, supersedes: Supersedes | None, *, progress: Progress | None = None) -> Draft:
    """Read the protocol and the sources and make the manifest that would be written; stores contents by digest."""
    data = _read(workspace.protocol)
    file = os.path.relpath(workspace.protocol)
    protocol = read_protocol(data, file)
    refuse_secrets(data, "a protocol", file)
    if protocol.name == "objects":
        raise ProtocolError(f"{file}: name: expected another name than 'objects', which the store of contents has")
    if protocol.name != workspace.name:
        line = line_of(data.decode(), ("name",))
        raise ProtocolError(
            f"{file}:{line}: name: expected the file's name {workspace.name!r}, found {protocol.name!r}"
        )
    complaints = environment.check_specifiers(protocol.environment)
    if complaints:
        raise ProtocolError("\n".join(f"{file}: environment: {words}" for words in complaints))
    cells = enumerate_cells(protocol)
    scan = source.scan_sources(workspace.root, protocol.sources, progress=progress)
    refuse_secrets("\n".join(entry.path for entry in scan.entries).encode(), "the sources' paths", "the sources")
    _check_trials(protocol, file, scan.entries)
    _check_commands(protocol, file, cells)
    lock = _lock(workspace, protocol, file)
    revisions = {
        revision: source.scan_revision(workspace.root, revision, protocol.sources).entries
        for revision in sorted({arm.revision for arm in protocol.arms if arm.revision})
    }
    files = {"cells.jsonl": cells_bytes(cells), "protocol.toml": data, "sources.jsonl": sources_bytes(scan.entries)}
    files |= {sources_name(revision): sources_bytes(entries) for revision, entries in revisions.items()}
    for name, entries in {"sources.jsonl": scan.entries, **{sources_name(r): e for r, e in revisions.items()}}.items():
        _check_entries(name, entries, files[name])
    manifest = Manifest(
        schema_="capsule.manifest/1",
        protocol=protocol,
        protocol_file=FileDigest(size=len(data), sha256=digest_of(data)),
        cells=list_digest(files["cells.jsonl"]),
        sources=list_digest(files["sources.jsonl"]),
        arms=tuple(
            ArmSource(arm=arm.name, revision=arm.revision, sources=list_digest(files[sources_name(arm.revision)]))
            for arm in protocol.arms
        ),
        lock=lock,
        supersedes=supersedes,
    )
    files["manifest.json"] = manifest.to_bytes()
    _check_sizes(files)
    # Written only now, when nothing is left to complain about: a refused freeze leaves no `.capsule` behind.
    store.put_all(workspace.root, scan.entries)
    for revision, entries in revisions.items():
        store.put_revision(workspace.root, revision, entries)
    return Draft(manifest, files, scan.entries, scan.warnings)


def write(workspace: Workspace, made: Draft, number: int) -> Generation:
    """Write a manifest and its lists as read-only files, all or none.

    Raises:
        RefusedError: the chain would have more manifests than a reader takes.
        MachineError: they cannot be written.
    """
    _check_chain(workspace, made.files)
    target = workspace.frozen / f"{number:03d}"
    claim(workspace)
    try:
        workspace.frozen.mkdir(exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".writing-", dir=workspace.frozen))
        try:
            for name, data in made.files.items():
                descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o444)
                with os.fdopen(descriptor, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
            folder.chmod(0o755)
            folder.rename(target)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    except OSError as error:
        raise MachineError(
            f"cannot write the manifest to {workspace.frozen}: {error.strerror}",
            hint="the manifest lies beside the protocol; that folder must be writable and have space",
        ) from error
    return Generation(number, target, made.manifest, made.files)


def claim(workspace: Workspace) -> None:
    """Make the protocol's state folder its own: two protocols of one name would share a ledger.

    Raises:
        RefusedError: another protocol of this name has it.
    """
    own = os.path.relpath(workspace.protocol, workspace.root)
    owner = workspace.state / "protocol"
    try:
        workspace.state.mkdir(parents=True, exist_ok=True)
        if not owner.exists():
            write_durably(owner, own.encode())
        found = owner.read_bytes().decode(errors="replace")
    except OSError as error:
        raise MachineError(f"cannot write to {workspace.state}: {error.strerror}") from error
    if found != own:
        raise RefusedError(
            f"expected {workspace.state} to belong to {own}, found that it belongs to {found}",
            hint="two protocols of one workspace need two names; a moved protocol moves back",
        )


def _same_bytes(current: Generation, made: Draft) -> bool:
    """Whether only what git records of the files differs: the same bytes were committed meanwhile, or in a clone."""
    before, now = current.manifest, made.manifest
    arms = [[(arm.arm, arm.revision) for arm in manifest.arms] for manifest in (before, now)]
    same = (before.protocol_file, before.cells, before.lock, arms[0]) == (
        now.protocol_file,
        now.cells,
        now.lock,
        arms[1],
    )
    return same and not source.compare(current.sources(), made.entries)


def changes(current: Generation, made: Draft) -> list[str]:
    """Say in words what differs between a frozen manifest and what would be frozen now."""
    words = []
    if made.files["protocol.toml"] != current.files["protocol.toml"]:
        words.append("the protocol file")
    drifts = source.compare(current.sources(), made.entries)
    words += named(drifts)
    return words or ["the lock file, or another arm's revision"]


def named(drifts: list[Drift]) -> list[str]:
    """Name what drifted, what was frozen first; files that were added to one folder together."""
    words = [str(drift) for drift in drifts if drift.change != "added"]
    added: dict[str, list[str]] = {}
    for drift in drifts:
        if drift.change == "added":
            added.setdefault(drift.path.rpartition("/")[0], []).append(str(drift))
    for folder, files in added.items():
        words += files if len(files) < 3 else [f"added: {len(files)} files in {shown(folder) or 'the root'}"]
    return [*words[:5], *([f"{len(words) - 5} more"] if len(words) > 5 else [])]


def check_drift(workspace: Workspace, generation: Generation) -> None:
    """Compare the work tree with the frozen sources.

    Raises:
        DriftError: the protocol or a source differs; the message names the first files.
    """
    if _read(workspace.protocol) != generation.files["protocol.toml"]:
        raise DriftError(
            f"{workspace.protocol}: expected the frozen protocol, found it changed",
            hint="undo the change, or state why in an amendment: capsule amend … --reason …",
        )
    scan = source.scan_sources(workspace.root, generation.manifest.protocol.sources)
    drifts = source.compare(generation.sources(), scan.entries)
    if drifts:
        added = all(drift.change == "added" for drift in drifts)
        undo = "move the new files elsewhere" if added else "undo the changes"
        raise DriftError(
            f"expected the frozen sources in {workspace.root}, found changes: {'; '.join(named(drifts))}",
            hint=f"{undo}, amend the protocol, or run the frozen ones on purpose: capsule run --from-frozen",
        )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise MachineError(f"cannot read {path}: {error.strerror}") from error


def refuse_secrets(data: bytes, what: str, file: str) -> None:
    """Refuse what a manifest would publish if it holds what looks like a secret, or the value of a secret variable.

    Raises:
        RefusedError: it does.
    """
    _, found = redact(data, secret_values(os.environ))
    if found:
        line = data[: found[0].offset].count(b"\n") + 1
        raise RefusedError(
            f"{file}:{line}: expected no secret in {what}, found what looks like one ({found[0].kind})",
            hint="the manifest is published; name an environment variable instead",
        )


def _check_sizes(files: Mapping[str, bytes]) -> None:
    """Refuse what no reader of a capsule would take, before it is run and paid for."""
    for name, content in files.items():
        most, what, hint = KEPT_BYTES_MAX, " sources", "leave files out in [sources]"
        if name == CELLS:
            what, hint = " planned cells", "plan fewer cells in one protocol"
        elif name in DOCUMENTS:
            most, what, hint = DOCUMENT_BYTES_MAX, "", "give long parameters in files among the sources"
        if len(content) > most:
            count = f" of {list_digest(content).count}{what}" if what else ""
            raise RefusedError(
                f"expected {name} of at most {most} bytes, as no reader takes more, found {len(content)}{count}",
                hint=hint,
            )


def _check_chain(workspace: Workspace, files: Mapping[str, bytes]) -> None:
    """Refuse one amendment too many, of which no reader would take the manifest."""
    chain = [generation.files for generation in workspace.generations()]
    commas = sum(older["manifest.json"].count(b",") for older in [*chain, files])
    if commas > COMMAS_MAX:
        raise RefusedError(
            f"expected at most {COMMAS_MAX} commas in all manifests of {workspace.name}, found {commas}",
            hint="give long parameters in files among the sources, or begin a protocol of another name",
        )
    before = sum(len(older[name]) for older in chain for name in DOCUMENTS)
    if before + sum(len(files[name]) for name in DOCUMENTS) > CHAIN_BYTES_MAX:
        raise RefusedError(
            f"expected all manifests of {workspace.name} with their protocols to have at most {CHAIN_BYTES_MAX} bytes, "
            f"found {before} in {len(chain)} of them and no room for another",
            hint="begin a protocol of another name",
        )


def _check_entries(name: str, entries: list[SourceEntry], content: bytes) -> None:
    """Refuse entries of which every reader of a capsule would say that no freeze writes them."""
    longest = max(map(len, content.split(b"\n")))
    words = next(source_faults(entries), None)
    if words is None and longest > LINE_BYTES_MAX:
        words = f"expected lines of at most {LINE_BYTES_MAX} bytes, found one of {longest}"
    if words is not None:
        raise RefusedError(f"{name}: {words}", hint="rename that file, or leave it out in [sources]")


def _check_trials(protocol: Protocol, file: str, entries: list[SourceEntry]) -> None:
    """A trial's module must be among the frozen sources, or the run would only find out after it was charged."""
    paths = {entry.path for entry in entries}
    for index, arm in enumerate(protocol.arms):
        if arm.trial is None or arm.revision is not None:
            continue
        module = arm.trial.split(":")[0].replace(".", "/")
        if f"{module}.py" not in paths and f"{module}/__init__.py" not in paths:
            raise ProtocolError(
                f"{file}: arms[{index}].trial: expected {module}.py among the frozen sources, found no such file",
                hint="the path is relative to the workspace's root; [sources] may leave it out",
            )


def _check_commands(protocol: Protocol, file: str, cells: Sequence[Cell]) -> None:
    """A command's placeholders must exist, or the run would only find out after it reserved."""
    for index, arm in enumerate(protocol.arms):
        if arm.command is None:
            continue
        try:
            if any("\0" in argument for argument in arm.command):
                raise UsageError("expected arguments without a NUL character, found one")
            for cell in {base(cell.workload): cell for cell in cells if cell.arm == arm.name}.values():
                launch.command_line(protocol, cell, device="cpu")
        except UsageError as error:
            raise ProtocolError(f"{file}: arms[{index}].command: {error.message}", hint=error.hint) from error


def _lock(workspace: Workspace, protocol: Protocol, file: str) -> FileDigest | None:
    if protocol.environment.lock is None:
        return None
    path = workspace.root / protocol.environment.lock
    if not path.is_file():
        raise ProtocolError(f"{file}: environment.lock: expected a file, found nothing at {protocol.environment.lock}")
    data = path.read_bytes()
    return FileDigest(size=len(data), sha256=digest_of(data))

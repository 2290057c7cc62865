"""Sign: vouch for a frozen manifest or a finished capsule with an SSH key; several people can, each with a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from capsule.core.errors import BrokenError, FrozenError, IncompleteError, MachineError, RefusedError
from capsule.core.signature_checks import SIGNATURES
from capsule.core.sshsig import (
    ARCHIVE_NAMESPACE,
    JUDGED_MAX,
    MANIFEST_NAMESPACE,
    SIGNATURES_MAX,
    SshSignature,
    archive_message,
    read_signature,
    signature_name,
)
from capsule.host import ssh
from capsule.host.durable import write_durably
from capsule.host.ledger import Ledger
from capsule.host.workspace import find_workspace
from capsule.steps.trust import beside
from capsule.steps.verify import MAGIC, open_capsule, verify


@dataclass(frozen=True)
class Signed:
    """A signature: of what, by which key, in which file, and whether this call wrote it."""

    of: str
    identity: str
    key: SshSignature
    path: Path
    written: bool
    notes: list[str]


def sign(file: Path, key: Path | None = None) -> Signed:
    """Sign the manifest in force of a protocol, or a capsule; signed by the same key already is success.

    Raises:
        UsageError: there is no such file or key.
        IncompleteError: nothing is frozen, or the capsule lacks something.
        BrokenError: the capsule is broken; nobody should vouch for it.
        RefusedError: nine signatures of it are there already, or as many as a capsule may come with.
        MachineError: ssh-keygen could not sign, or the file cannot be written.
    """
    chosen = key or ssh.default_key()
    if is_capsule(file):
        identity, inside = _identity(file)
        others = inside + len(beside(file))
        base, notes = file, []
        message, namespace, of = archive_message(identity), ARCHIVE_NAMESPACE, "capsule"
    else:
        workspace = find_workspace(file)
        generation = workspace.current()
        base = generation.directory / "manifest.json"
        message, namespace, of = generation.files["manifest.json"], MANIFEST_NAMESPACE, "manifest"
        others = sum(name in SIGNATURES for each in workspace.chain() for name in each.files)
        identity = generation.manifest.identity
        _, account = Ledger(workspace.ledger, workspace.head).read()
        begun = [a for a in account.attempts.values() if a.reserved and a.reserved.manifest == identity]
        notes = [f"{len(begun)} attempts under it came before this signature"] if begun else []
    made = ssh.sign(message, chosen, namespace)
    own = read_signature(made, str(chosen))
    check = ssh.checker(None)
    if (answer := check(message, made, namespace, None)).answer == "broken":
        raise MachineError(f"expected a signature that checks, found {answer.words}")
    for number in range(1, SIGNATURES_MAX + 1):
        path = base.with_name(signature_name(base.name, number))
        if not path.exists():
            _check_count(others, of)
            _write(path, made)
            return Signed(of, identity, own, path, True, notes)
        there = path.read_bytes()
        if read_signature(there, str(path)).key != own.key:
            continue
        if check(message, there, namespace, None).answer == "unknown":
            return Signed(of, identity, own, path, False, notes)
        raise FrozenError(
            f"{path}: expected a signature of {identity}, found one by the same key over something else",
            hint="it may be of an earlier capsule; remove it, then sign again",
        )
    raise RefusedError(f"expected at most {SIGNATURES_MAX} signatures of one {of}, found as many already")


def is_capsule(file: Path) -> bool:
    """Whether a file begins like a capsule; one that cannot be opened is taken for a protocol, which says so."""
    try:
        with file.open("rb") as stream:
            return stream.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def _check_count(others: int, of: str) -> None:
    """Refuse a signature beyond those that a reader judges: a capsule that comes with more is broken."""
    if others >= JUDGED_MAX:
        what = "a capsule and the manifests in it" if of == "capsule" else "all manifests of a protocol"
        raise RefusedError(
            f"expected fewer than {JUDGED_MAX} signatures of {what}, found {others}",
            hint=f"`capsule verify` judges at most {JUDGED_MAX} and calls a capsule with more broken",
        )


def _identity(file: Path) -> tuple[str, int]:
    """Verify a capsule; return its identity, and how many signatures of manifests are in it."""
    with open_capsule(file) as stream:
        verdict = verify(stream)
    error = {"broken": BrokenError, "incomplete": IncompleteError}.get(verdict.integrity)
    if error is not None or verdict.capsule is None:
        raise (error or BrokenError)(
            f"{file}: expected an intact capsule to vouch for, found one that is {verdict.integrity}",
            hint=f"see why: capsule verify {file}",
        )
    return verdict.capsule, len(verdict.signatures)


def _write(path: Path, data: bytes) -> None:
    """Write a signature as a read-only file, never over another one."""
    try:
        write_durably(path, data, mode=0o444, over=False)
    except OSError as error:
        raise MachineError(f"cannot write {path}: {error.strerror}") from error

"""Export: a verified capsule in a form that other people's tools read.

The capsule is verified first; one that is not intact is refused unless the caller insists, and then what is written
says so. A damaged container has no members to export. What is written depends on the capsule alone: no time, no host.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from capsule.core.errors import BrokenError, CapsuleError, IncompleteError, MachineError, RefusedError, UsageError
from capsule.core.verdict import Verdict
from capsule.host.durable import write_durably
from capsule.host.openssl import signing_key
from capsule.steps.exports import bagit, intoto, mlflow, rocrate
from capsule.steps.exports.folder import Folder
from capsule.steps.fresh import fresh
from capsule.steps.judged import Judged, judged_stream
from capsule.steps.report import check_output
from capsule.steps.show import open_regular

CHUNK_BYTES = 1 << 20

FOLDERS: dict[str, Callable[[Judged, Path, Folder], None]] = {
    "bagit": bagit.write,
    "ro-crate": rocrate.write,
    "mlflow": mlflow.write,
}
"""Forms that are a folder; `in-toto` is one file."""
FORMS = ("bagit", "ro-crate", "in-toto", "mlflow")


@dataclass(frozen=True)
class Exported:
    """What was written: how many files, of which capsule, and by whose key it is signed, if by any."""

    form: str
    output: Path
    files: int
    verdict: Verdict
    signed_by: str | None


def export(path: Path, form: str, output: Path, *, force: bool = False, key: Path | None = None) -> Exported:
    """Write the capsule at `path` in the form of others: a folder, or for `in-toto` a file.

    Raises:
        UsageError: there is no such form or file, the file is a pipe, or a key was given for a form that is not signed.
        BrokenError, IncompleteError: the capsule is not intact, and `force` was not given.
        RefusedError: something is there already.
    """
    if form not in FORMS:
        raise UsageError(f"expected one of {', '.join(FORMS)}, found {form[:80]!r}")
    if key is not None and form != "in-toto":
        raise UsageError(f"expected a key only for in-toto, found one for {form}, which has no signature")
    signer = signing_key(key) if key is not None else None
    if form == "in-toto":
        check_output(output)
        if output.exists() or output.is_symlink():
            raise RefusedError(f"expected a new file, found one at {output}", hint="name another file")
    found, digest = _verified(path, force)
    if form in FOLDERS:
        with fresh(output) as made:
            folder = Folder(made)
            FOLDERS[form](found, path, folder)
        return Exported(form, output, len(folder.files), found.verdict, None)
    data = intoto.statement(found, path.name, digest)
    if signer is not None:
        data = intoto.envelope(data, signer)
    try:
        write_durably(output, data + b"\n", over=False)
    except OSError as error:
        raise MachineError(f"cannot write {output}: {error.strerror}") from error
    return Exported(form, output, 1, found.verdict, signer.identity if signer else None)


def _verified(path: Path, force: bool) -> tuple[Judged, str]:
    """Verify the capsule; return what was found and the SHA-256 of the file, in hexadecimal digits."""
    with open_regular(path) as stream:
        digest = _sha256(stream)
        stream.seek(0)
        found = judged_stream(stream)
        stream.seek(0)
        if _sha256(stream) != digest:
            raise BrokenError(f"{path}: expected a file that nobody changes while it is read, found another by now")
    verdict = found.verdict
    hint = f"see why: capsule verify {path}"
    if verdict.capsule is None:
        raise BrokenError(f"{path}: expected a sound container to export, found damage", hint=hint)
    if verdict.integrity != "intact" and not force:
        error: type[CapsuleError] = BrokenError if verdict.integrity == "broken" else IncompleteError
        hint += "; --force exports it all the same, and what is written says so"
        raise error(f"{path}: expected an intact capsule, found one that is {verdict.integrity}", hint=hint)
    return found, digest


def _sha256(stream: BinaryIO) -> str:
    hasher = hashlib.sha256()
    while piece := stream.read(CHUNK_BYTES):
        hasher.update(piece)
    return hasher.hexdigest()

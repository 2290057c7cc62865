"""The files of one attempt: brought into their final form, redacted, made durable and hashed, by whoever ends it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from capsule.core.canonical import canonical_line
from capsule.core.digest import digest_of
from capsule.core.manifest import FileDigest
from capsule.core.redact import redact, secret_values
from capsule.host.durable import sync, write_durably
from capsule.host.output import assemble

OUTPUTS = ("stdout", "stderr")
REDACTIONS = "redactions.jsonl"
FILES = ("journal.jsonl", *OUTPUTS, "provenance.jsonl", REDACTIONS, "environment.json")
"""Every file of an attempt that its last event names and a capsule carries."""


def secrets_of(names: Iterable[str]) -> list[bytes]:
    """Return the values to redact: of the variables named, and of every one whose name looks secret."""
    named = [os.environb[os.fsencode(name)] for name in names if name in os.environ]
    return [*named, *secret_values(os.environ)]


def finish_files(attempt_dir: Path, output_bytes_max: int, secrets: Sequence[bytes]) -> dict[str, FileDigest]:
    """Finish, redact, sync and hash what is there; a second call finds the same."""
    for name in OUTPUTS:
        if (attempt_dir / name).exists():
            assemble(attempt_dir / name, output_bytes_max)
            _redact(attempt_dir, name, secrets)
    digests = {}
    for name in FILES:
        path = attempt_dir / name
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                sync(file.fileno())
                data = file.read()
            digests[name] = FileDigest(size=len(data), sha256=digest_of(data))
    return digests


def _redact(attempt_dir: Path, name: str, secrets: Sequence[bytes]) -> None:
    """Replace secrets in one output; what is replaced is listed first, by its offset in the original bytes."""
    path, listed = attempt_dir / name, attempt_dir / REDACTIONS
    clean, found = redact(path.read_bytes(), secrets)
    if not found:
        return
    lines = [
        canonical_line({"file": name, "offset": item.offset, "length": item.length, "kind": item.kind})
        for item in found
    ]
    before = listed.read_bytes() if listed.exists() else b""
    if not before.endswith(b"".join(lines)):
        write_durably(listed, before + b"".join(lines))
    write_durably(path, clean)

"""The files of one attempt: brought into their final form, redacted, made durable and hashed, by whoever ends it."""

from __future__ import annotations

import os
import re
import secrets as random
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from capsule.core.canonical import canonical_line
from capsule.core.digest import digest_of
from capsule.core.manifest import FileDigest
from capsule.core.redact import redact, secret_values
from capsule.host.durable import read_regular, write_durably
from capsule.host.output import assemble

OUTPUTS = ("stdout", "stderr")
REDACTIONS = "redactions.jsonl"
FILES = ("journal.jsonl", *OUTPUTS, "provenance.jsonl", REDACTIONS, "environment.json")
"""Every file of an attempt that its last event names and a capsule carries."""
READ = (*FILES, "imports.jsonl")
"""Every file in which a trial can leave something that is read when its attempt ends."""


def secrets_of(names: Iterable[str]) -> list[bytes]:
    """Return the values to redact: of the variables named, and of every one whose name looks secret."""
    named = [os.environb[os.fsencode(name)] for name in names if name in os.environ]
    return [*named, *secret_values(os.environ)]


def finish_files(attempt_dir: Path, output_bytes_max: int, secrets: Sequence[bytes]) -> dict[str, FileDigest]:
    """Finish, redact, sync and hash what is there and a regular file; a second call finds the same."""
    for name in OUTPUTS:
        if _is_usable(attempt_dir / name):
            _clear_segments(attempt_dir, name)
            assemble(attempt_dir / name, output_bytes_max)
            _redact(attempt_dir, name, secrets)
    digests = {}
    for name in FILES:
        data = read_regular(attempt_dir / name, durable=True)
        if data is not None:
            digests[name] = FileDigest(size=len(data), sha256=digest_of(data))
    return digests


def irregular_words(attempt_dir: Path) -> list[str]:
    """Return words on everything that stands where a file of the attempt belongs and counts as absent."""
    names = [name for name in READ if os.path.lexists(attempt_dir / name) and not _is_usable(attempt_dir / name)]
    return [f"{name} is no regular file that can be read and counts as absent" for name in names]


def make_way(path: Path) -> None:
    """Put what is no regular file out of the way of one that is about to be written."""
    if os.path.lexists(path) and not _is_usable(path):
        path.rename(path.with_name(f"irregular-{random.token_hex(8)}-{path.name}"))


def _is_usable(path: Path) -> bool:
    """Whether a file is regular and may be read; the attempt's processes are gone, so the answer stays true."""
    try:
        return stat.S_ISREG(path.lstat().st_mode) and os.access(path, os.R_OK)
    except OSError:
        return False


def _clear_segments(attempt_dir: Path, name: str) -> None:
    """Put out of the way whatever would hold up putting an output together."""
    make_way(attempt_dir / f"{name}.whole")
    for path in attempt_dir.glob(f"{name}.tail-*"):
        make_way(path)
        if not re.fullmatch(r"[0-9]{9,18}", path.name.rpartition("-")[2]):
            path.unlink(missing_ok=True)


def _redact(attempt_dir: Path, name: str, secrets: Sequence[bytes]) -> None:
    """Replace secrets in one output; what is replaced is listed first, by its offset in the original bytes."""
    path, listed = attempt_dir / name, attempt_dir / REDACTIONS
    clean, found = redact(read_regular(path) or b"", secrets)
    if not found:
        return
    lines = [
        canonical_line({"file": name, "offset": item.offset, "length": item.length, "kind": item.kind})
        for item in found
    ]
    before = read_regular(listed) or b""
    if not before.endswith(b"".join(lines)):
        make_way(listed)
        write_durably(listed, before + b"".join(lines))
    write_durably(path, clean)

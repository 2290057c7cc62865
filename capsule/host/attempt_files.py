"""The files of one attempt: brought into their final form, redacted, made durable and hashed, by whoever ends it.

Whatever a trial left in them, and however much, memory stays bounded. Records are redacted before anything reads them,
so that what is judged, hashed, packed and verified is the same file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets as random
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from capsule.core.canonical import canonical_line
from capsule.core.digest import PREFIX, is_digest
from capsule.core.manifest import FileDigest
from capsule.core.protocol import Observation
from capsule.core.redact import Redaction, Redactor, redact_text, secret_values
from capsule.core.redact_records import Public, RecordRedactor
from capsule.host.durable import read_regular, sync, sync_directory, write
from capsule.host.output import assemble, cut

OUTPUTS = ("stdout", "stderr")
REDACTIONS = "redactions.jsonl"
FILES = ("journal.jsonl", *OUTPUTS, "provenance.jsonl", REDACTIONS, "environment.json", "telemetry.jsonl")
"""Every file of an attempt that its last event names and a capsule carries."""
READ = (*FILES, "imports.jsonl")
"""Every file in which a trial can leave something that is read when its attempt ends."""
SECRETS = "secrets.json"
SECRET_NAMES = "CAPSULE_SECRETS"
"""Environment variable with the names of further variables whose values are secret, separated by blanks or commas."""

BLOCK_BYTES = 1 << 18
RECORD_BYTES_MAX = 64 * 2**20
"""A longer file of records could not be read from a capsule."""
SECRETS_BYTES_MAX = 2**20
SECRETS_MAX = 256

_NUMBER = re.compile(r"-?[0-9]{1,20}|NaN(?::[0-9a-f]{1,16})?|-?Infinity|-0")
_LISTED = re.compile(rb'\{"file":"[a-z.]{1,40}","kind":"[a-z_]{1,40}","length":[0-9]{1,16},"offset":[0-9]{1,16}\}\n')


class Redacting(Protocol):
    """Something that redacts a stream."""

    def feed(self, data: bytes) -> tuple[bytes, list[Redaction]]:
        """Take in what comes next; return what is ready by now, and what was replaced in it."""

    def close(self) -> tuple[bytes, list[Redaction]]:
        """Return the rest."""


# The values that are secret.


def secret_names(environment: Mapping[str, str]) -> list[str]:
    """Return the variables that a user calls secret, whatever they are named: those that `SECRET_NAMES` lists."""
    return environment.get(SECRET_NAMES, "").replace(",", " ").split()


def secrets_of(names: Iterable[str]) -> list[bytes]:
    """Return the values to redact: of the variables named, and of every one whose name looks secret."""
    named = [os.environb[os.fsencode(name)] for name in names if name in os.environ]
    return [*named, *secret_values(os.environ)]


def keep_secrets(attempt_dir: Path, values: Iterable[bytes]) -> None:
    """Keep the values that are to be redacted beside an attempt, for whoever ends it in another environment.

    Only the attempt's own user can read the file, no capsule carries it, and `forget_secrets` removes it.

    Raises:
        OSError: the file cannot be written.
    """
    temporary = attempt_dir / f"{SECRETS}.tmp"
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        write(descriptor, json.dumps(sorted({value.hex() for value in values})).encode())
        sync(descriptor)
    finally:
        os.close(descriptor)
    temporary.replace(attempt_dir / SECRETS)
    sync_directory(attempt_dir)


def kept_secrets(attempt_dir: Path) -> list[bytes]:
    """Return the values kept beside an attempt; none where there are none, or where a trial spoilt them.

    A trial may write there, and each value is searched for: no more are taken than an environment has.
    """
    try:
        kept = json.loads(read_regular(attempt_dir / SECRETS, SECRETS_BYTES_MAX) or b"[]")
        return [bytes.fromhex(value) for value in kept[:SECRETS_MAX]]
    except (OSError, TypeError, ValueError, RecursionError):
        return []


def forget_secrets(attempt_dir: Path) -> None:
    """Remove the values kept beside an attempt, once it has ended; a second call finds nothing to do."""
    for path in (attempt_dir / SECRETS, attempt_dir / f"{SECRETS}.tmp"):
        if path.is_dir() and not path.is_symlink():
            make_way(path)
        path.unlink(missing_ok=True)


def without_secrets(words: str, secrets: Iterable[bytes]) -> str:
    """Return words for the ledger, which is published whole, without secrets."""
    return redact_text(words, [os.fsdecode(secret) for secret in secrets])


# The files.


def redact_records(attempt_dir: Path, secrets: Sequence[bytes], observations: Sequence[Observation] = ()) -> None:
    """Redact journal and telemetry, before anything is judged by them; a second call changes nothing.

    Texts and names of fields are redacted, never numbers, nor the names that the protocol declares: these are public.
    """
    _redact(attempt_dir, "journal.jsonl", secrets, _journal(observations))
    _redact(attempt_dir, "telemetry.jsonl", secrets, _TELEMETRY)


def finish_files(
    attempt_dir: Path, output_bytes_max: int, secrets: Sequence[bytes], observations: Sequence[Observation] = ()
) -> dict[str, FileDigest]:
    """Finish, redact, sync and hash what is there and a regular file; a second call finds the same."""
    redact_records(attempt_dir, secrets, observations)
    for name in OUTPUTS:
        if _is_usable(attempt_dir / name):
            _clear_segments(attempt_dir, name)
            assemble(attempt_dir / name, output_bytes_max, secrets)
            _redact(attempt_dir, name, secrets, None)
    for name, public in _OTHERS.items():
        _redact(attempt_dir, name, secrets, public)
    if _is_usable(attempt_dir / REDACTIONS):
        _drop_unlisted(attempt_dir / REDACTIONS)
    digests = {name: _digest(attempt_dir / name) for name in FILES}
    return {name: digest for name, digest in digests.items() if digest is not None}


def irregular_words(attempt_dir: Path) -> list[str]:
    """Return words on everything that stands where a file of the attempt belongs and counts as absent."""
    names = [name for name in READ if os.path.lexists(attempt_dir / name) and not _is_usable(attempt_dir / name)]
    return [f"{name} is no regular file that can be read and counts as absent" for name in names]


def make_way(path: Path) -> None:
    """Put what is no regular file out of the way of one that is about to be written."""
    if os.path.lexists(path) and not _is_usable(path):
        _move(path)


def set_aside(path: Path) -> None:
    """Put out of the way what stands where a file belongs that nobody has written, if it can be."""
    with contextlib.suppress(OSError):
        _move(path)


def _move(path: Path) -> None:
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
    make_way(attempt_dir / f"{name}.whole-part")
    for path in attempt_dir.glob(f"{name}.tail-*"):
        make_way(path)
        if not re.fullmatch(r"[0-9]{9,18}", path.name.rpartition("-")[2]):
            path.unlink(missing_ok=True)


def _digest(path: Path) -> FileDigest | None:
    """Sync and hash a file block by block."""
    if not _is_usable(path):
        return None
    hasher, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        sync(file.fileno())
        for block in _blocks(file):
            hasher.update(block)
            size += len(block)
    return FileDigest(size=size, sha256=PREFIX + hasher.hexdigest())


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    while block := file.read(BLOCK_BYTES):
        yield block


# What is public in a file of records.


def _journal(observations: Sequence[Observation]) -> Public:
    numeric = {column.name for column in observations if column.type != "text"}

    def numbers(row: Mapping[str, Any]) -> set[str]:
        return {name for name in numeric & row.keys() if _NUMBER.fullmatch(str(row[name]))}

    return Public(frozenset({"cell", "end", "error", *(column.name for column in observations)}), numbers)


def _origin(line: Mapping[str, Any]) -> set[str]:
    """Return what is public of where a module came from: digests, and the frozen path and the name spelt in it."""
    shown = {"origin"} | {name for name in ("sha256",) if is_digest(str(line.get(name)))}
    if line.get("origin") == "source":
        path = str(line.get("name")).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        shown |= {"name"} | ({"module"} if f".{path}".endswith(f".{line.get('module')}") else set())
    return shown


_TELEMETRY = Public(
    frozenset({"at_ms", "device", "exclusivity", "words", "own", "foreign", "missing", "error", "lost"}),
    lambda sample: {"device", "exclusivity", "driver", "layout"},
)
_OTHERS = {
    "provenance.jsonl": Public(frozenset({"module", "origin", "name", "sha256"}), _origin),
    "imports.jsonl": Public(frozenset({"module", "file", "sha256"}), _origin),
    "environment.json": Public(),
}


# Redaction of one file.


def _redact(attempt_dir: Path, name: str, secrets: Sequence[bytes], public: Public | None) -> None:
    """Replace secrets in one file; what is replaced is listed first, by its offset in the original bytes.

    A file of records is first cut to a size that can be read; then it is not made longer than that.
    """
    path = attempt_dir / name
    if not _is_usable(path):
        return
    if public is not None:
        make_way(path.with_name(f"{name}.whole"))
        make_way(path.with_name(f"{name}.whole-part"))
        cut(path, RECORD_BYTES_MAX, secrets)
    if not _may_hold_secrets(path, secrets, escapes=public is not None):
        return

    def make(*, clip: bool) -> Redacting:
        return Redactor(secrets) if public is None else RecordRedactor(secrets, public, clip=clip)

    clean, lines = attempt_dir / f"{name}.clean", attempt_dir / f"{name}.redactions"
    found = _copy_redacted(path, make(clip=False), name, clean, lines)
    if public is not None and clean.stat().st_size > RECORD_BYTES_MAX >= path.stat().st_size:
        _copy_redacted(path, make(clip=True), name, clean, lines)
    if found:
        _list(attempt_dir / REDACTIONS, lines)
        clean.replace(path)
        sync_directory(attempt_dir)
    for temporary in (clean, lines):
        temporary.unlink(missing_ok=True)


def _may_hold_secrets(path: Path, secrets: Sequence[bytes], *, escapes: bool) -> bool:
    """Whether a plain search finds anything, or escapes of JSON could hide something from it."""
    redactor = Redactor(secrets)
    with path.open("rb") as file:
        for block in _blocks(file):
            if redactor.feed(block)[1] or (escapes and b"\\" in block):
                return True
    return bool(redactor.close()[1])


def _copy_redacted(source: Path, redactor: Redacting, name: str, target: Path, lines: Path) -> bool:
    """Write a file without its secrets and the list of these; whether there were any."""
    some = False
    with source.open("rb") as file, _fresh(target) as clean_file, _fresh(lines) as line_file:
        for clean, found in _redacted(file, redactor):
            clean_file.write(clean)
            for item in found:
                some = True
                listed = {"file": name, "offset": item.offset, "length": item.length, "kind": item.kind}
                line_file.write(canonical_line(listed))
        for written in (clean_file, line_file):
            written.flush()
            sync(written.fileno())
    return some


def _redacted(file: IO[bytes], redactor: Redacting) -> Iterator[tuple[bytes, list[Redaction]]]:
    for block in _blocks(file):
        yield redactor.feed(block)
    yield redactor.close()


def _list(listed: Path, lines: Path) -> None:
    """Append lines to the list of redactions, unless a crash came after that."""
    _drop_unlisted(listed)
    if not _ends_with(listed, lines):
        whole = listed.with_name(f"{listed.name}.whole")
        with _fresh(whole) as file:
            for part in (listed, lines) if listed.exists() else (lines,):
                with part.open("rb") as piece:
                    file.writelines(_blocks(piece))
            file.flush()
            sync(file.fileno())
        whole.replace(listed)
        sync_directory(listed.parent)


def _ends_with(listed: Path, lines: Path) -> bool:
    size, added = listed.stat().st_size if listed.exists() else 0, lines.stat().st_size
    if size < added:
        return False
    with listed.open("rb") as old, lines.open("rb") as new:
        old.seek(size - added)
        return all(block == old.read(len(block)) for block in _blocks(new))


def _drop_unlisted(listed: Path) -> None:
    """Drop from the list of redactions what is none, since a trial can write there too."""
    make_way(listed)
    if not listed.exists():
        return
    size = 0
    with listed.open("rb") as file:
        while _LISTED.fullmatch(line := file.readline(256)):
            size += len(line)
        if size == listed.stat().st_size:
            return
        file.seek(0)
        whole = listed.with_name(f"{listed.name}.whole")
        with _fresh(whole) as kept:
            while size:
                size -= kept.write(file.read(min(size, BLOCK_BYTES)))
            kept.flush()
            sync(kept.fileno())
    if whole.stat().st_size:
        whole.replace(listed)
    else:
        whole.unlink()
        listed.unlink()


def _fresh(path: Path) -> IO[bytes]:
    """Open a new file in the place of whatever a crash or a trial left there."""
    make_way(path)
    path.unlink(missing_ok=True)
    return path.open("xb")

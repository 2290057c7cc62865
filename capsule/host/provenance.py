"""Where every imported module came from: the frozen sources of its arm, an installed distribution, or neither.

A trial's process reports name, file and digest of each module at its end. A file below a snapshot must be one of its
frozen files; anywhere else it must be the interpreter's, this tool's, or have the digest that a distribution's RECORD
promises. So one arm's module can never stand in for another's, and nothing comes in by a search path that nobody froze.
The lines that are kept name no absolute path.
"""

from __future__ import annotations

import base64
import functools
import importlib.metadata
import os
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import capsule
from capsule.core.canonical import join_lines, parse_strict
from capsule.core.digest import digest_of, hex_of, is_digest
from capsule.core.errors import MalformedError
from capsule.core.manifest import SourceEntry
from capsule.core.paths import path_bytes, resolve
from capsule.host.environment import RecordedFile, matches_record, recorded_files

Origin = Literal["source", "distribution", "stdlib", "tool", "unknown"]

_SITE_FOLDERS = ("site-packages", "dist-packages")
_BOOTSTRAP = "_virtualenv.py"
"""Put beside the distributions by makers of virtual environments, which write no RECORD; imported at every start."""


class Imported(NamedTuple):
    """One line of the trial's report: `file` is absolute; `sha256` is null where the file could not be read."""

    module: str
    file: str | None
    sha256: str | None


@dataclass(frozen=True, slots=True)
class ImportLine:
    """Where one module came from; `name` is a frozen path, a distribution, or else the file's own name."""

    module: str
    origin: Origin
    name: str
    sha256: str | None

    def to_json(self) -> dict[str, str | None]:
        """Return the JSON object of this line."""
        return {"module": self.module, "origin": self.origin, "name": self.name, "sha256": self.sha256}


@dataclass(frozen=True, slots=True)
class ImportFinding:
    """A module that nobody vouches for; `file` is its absolute path, for the person at this machine only."""

    module: str
    file: str
    words: str

    def __str__(self) -> str:
        return self.words


@dataclass(frozen=True, slots=True)
class ImportJudgement:
    """One line for each module that has a file, by module name, and what is wrong."""

    lines: tuple[ImportLine, ...]
    findings: tuple[ImportFinding, ...]

    def to_bytes(self) -> bytes:
        """Return the canonical lines, as they are kept with the attempt."""
        return join_lines(line.to_json() for line in self.lines)


class SnapshotTree:
    """A materialised snapshot and what must be in it."""

    def __init__(self, root: Path, entries: Iterable[SourceEntry]) -> None:
        self.roots = {os.path.abspath(root), os.path.realpath(root)}  # noqa: PTH100 - Path.resolve follows links
        self.entries: dict[str, SourceEntry] = {}
        self.links: dict[bytes, bytes] = {}
        for entry in entries:
            raw = path_bytes(entry.path)
            self.entries[_reported(raw)] = entry
            if entry.target is not None:
                self.links[raw] = path_bytes(entry.target)

    def relative(self, file: str) -> str | None:
        """Return the path of `file` within this snapshot, or None outside it."""
        return next((file[len(root) + 1 :] for root in self.roots if file.startswith(root + "/")), None)

    def entry(self, relative: str) -> SourceEntry | None:
        """Return the frozen file that a path leads to through the frozen links."""
        resolved = resolve(os.fsencode(relative), self.links)
        found = self.entries.get(_reported(resolved)) if resolved is not None else None
        return found if found and found.kind == "file" else None


def read_imports(data: bytes, where: str) -> list[Imported]:
    """Read the report of a trial's process: a JSON object with `module`, `file` and `sha256` on each line.

    Raises:
        MalformedError: it is something else; what runs inside a trial is not trusted to be well formed.
    """
    imported = []
    for number, line in enumerate(data.splitlines(), 1):
        value = parse_strict(line, f"{where}:{number}")
        if not isinstance(value, dict) or set(value) != {"module", "file", "sha256"}:
            raise MalformedError(
                f"{where}:{number}: expected an object with module, file and sha256, found another value"
            )
        item = Imported(value["module"], value["file"], value["sha256"])
        if not isinstance(item.module, str) or not all(isinstance(x, str | None) for x in (item.file, item.sha256)):
            raise MalformedError(f"{where}:{number}: expected texts, found another type")
        imported.append(item)
    return imported


def judge_imports(imported: Iterable[Imported], trees: Sequence[SnapshotTree]) -> ImportJudgement:
    """Say of every module with a file where it came from; `trees` are the snapshots of the process's own arms."""
    lines: list[ImportLine] = []
    findings: list[ImportFinding] = []
    for item in sorted(imported, key=lambda item: (item.module, item.file or "")):
        if item.file is None:
            continue
        file = os.path.normpath(item.file)
        origin, name, reason = _origin(file, item.sha256, trees)
        lines.append(ImportLine(item.module, origin, name, item.sha256))
        if reason:
            findings.append(ImportFinding(item.module, file, f"module {item.module} from {_tail(file)} {reason}"))
    return ImportJudgement(tuple(lines), tuple(findings))


def _origin(file: str, sha256: str | None, trees: Sequence[SnapshotTree]) -> tuple[Origin, str, str | None]:
    """Return the origin of a file, its name there, and why it is not accepted (None if it is)."""
    own_name = file.rpartition("/")[2]
    for tree in trees:
        relative = tree.relative(file)
        if relative is not None:
            entry = tree.entry(relative)
            if entry is None:
                return "unknown", own_name, "lies in the snapshot and is not frozen"
            if entry.sha256 != sha256:
                return "unknown", own_name, "does not hold its frozen bytes"
            return "source", entry.path, None
    if sha256 is None or not is_digest(sha256):
        return "unknown", own_name, "could not be read"
    for form in dict.fromkeys((file, os.path.realpath(file))):
        relative = _within(form, _tool())
        if relative is not None:
            return "tool", f"capsule/{relative}", None
        if any(_is_standard(form, folder) for folder in _standard_folders()):
            return "stdlib", own_name, None
        record = _record_index().get(form)
        if record is not None:
            if _is_recorded(form, sha256, record):
                return "distribution", record.distribution, None
            return "unknown", own_name, f"does not hold the bytes that {record.distribution} was installed with"
        if own_name == _BOOTSTRAP and os.path.basename(os.path.dirname(form)) in _SITE_FOLDERS:  # noqa: PTH119, PTH120
            return "distribution", "virtualenv", None
    return "unknown", own_name, "is neither frozen nor of an installed distribution"


def _is_recorded(file: str, sha256: str, record: RecordedFile) -> bool:
    """Compare the reported digest with RECORD's; under another algorithm, read the file again for both."""
    if record.hash.startswith("sha256="):
        encoded = base64.urlsafe_b64encode(bytes.fromhex(hex_of(sha256))).rstrip(b"=").decode()
        return record.hash == f"sha256={encoded}"
    try:
        data = Path(file).read_bytes()
    except OSError:
        return False
    return digest_of(data) == sha256 and matches_record(data, record)


def _is_standard(file: str, folder: str) -> bool:
    relative = _within(file, folder)
    return relative is not None and relative.split("/", 1)[0] not in _SITE_FOLDERS


def _within(file: str, folder: str) -> str | None:
    return file[len(folder) + 1 :] if file.startswith(folder + "/") else None


def _tail(file: str) -> str:
    """Return the last two names of a path: enough to find it, without saying whose machine this is."""
    return "/".join(file.rsplit("/", 2)[-2:])


def _reported(raw: bytes) -> str:
    """Return a path as the trial's process writes it."""
    return raw.decode(errors="backslashreplace")


def _tool() -> str:
    return os.path.dirname(os.path.abspath(capsule.__file__))  # noqa: PTH100, PTH120


@functools.cache
def _standard_folders() -> tuple[str, ...]:
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
    return tuple(dict.fromkeys(form for folder in folders for form in (folder, os.path.realpath(folder))))


@functools.cache
def _record_index() -> Mapping[str, RecordedFile]:
    """Return every recorded file by its absolute path, and by its real one where a link leads there.

    Of two distributions of one name both count: what was imported lies in the folder of one of them.
    """
    index: dict[str, RecordedFile] = {}
    for distribution in importlib.metadata.distributions():
        base = os.path.abspath(str(distribution.locate_file("")))  # noqa: PTH100
        folders = tuple(dict.fromkeys((base, os.path.realpath(base))))
        for record in recorded_files(distribution):
            for folder in folders:
                index.setdefault(os.path.normpath(f"{folder}/{record.path}"), record)
    return index

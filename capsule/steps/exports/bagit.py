"""A capsule as a BagIt 1.0 bag (RFC 8493): members as payload, SHA-256 of everything, identities in `bag-info.txt`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from capsule import __version__
from capsule.core.document import visible
from capsule.steps.exports.folder import Folder, Written
from capsule.steps.judged import Judged


def write(found: Judged, capsule: Path, folder: Folder) -> None:
    """Write the bag; without a date, so that the same capsule gives the same bytes."""
    assert found.verdict.capsule is not None
    payload = folder.write_members(capsule, "data/", found.verdict.capsule)
    tags = {
        "bagit.txt": "BagIt-Version: 1.0\nTag-File-Character-Encoding: UTF-8\n",
        "bag-info.txt": "".join(f"{name}: {visible(value)}\n" for name, value in _information(found, payload)),
        "manifest-sha256.txt": _manifest(payload),
    }
    for name, text in tags.items():
        folder.write(name, text.encode())
    folder.write("tagmanifest-sha256.txt", _manifest(folder.files[-len(tags) :]).encode())


def _manifest(files: Iterable[Written]) -> str:
    return "".join(f"{file.sha256}  {file.name}\n" for file in sorted(files, key=lambda file: file.name))


def _information(found: Judged, payload: list[Written]) -> Iterable[tuple[str, str]]:
    verdict = found.verdict
    yield "Bag-Software-Agent", f"evidence-capsule {__version__}"
    yield "External-Identifier", str(verdict.capsule)
    if found.manifest is not None:
        yield "External-Description", " ".join(found.manifest.protocol.title.split())
        yield "Internal-Sender-Identifier", found.manifest.protocol.name
    yield "Payload-Oxum", f"{sum(file.size for file in payload)}.{len(payload)}"
    yield "Capsule-Manifest", verdict.manifest or "none that can be read"
    yield "Capsule-Integrity", verdict.integrity
    yield "Capsule-Outcome", verdict.outcome

"""What `diff` and `export` say."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from capsule.cli.words import Said, columns, paint, safe

if TYPE_CHECKING:
    from capsule.steps.diff import Diff, Section, Side
    from capsule.steps.export import Exported

VALUE_CHARACTERS = 72
READERS = {
    "bagit": "to check it with others' tools: bagit.py --validate {}",
    "ro-crate": "to check it with others' tools: rocrate-validator validate {}",
    "mlflow": "to move it into MLflow: mlflow migrate-filestore --source {} --target sqlite:///mlflow.db",
}
DIGEST = re.compile(r"(sha256:[0-9a-f]{12})[0-9a-f]{52}")


def compared(result: Diff) -> Said:
    """Say what differs between two capsules."""
    value = {
        "equal": result.equal,
        "same_manifest": result.same_manifest,
        "left": _side(result.left),
        "right": _side(result.right),
        "sections": [
            {
                "name": section.name,
                "count": section.count,
                "differences": [{"where": d.where, "left": d.left, "right": d.right} for d in section.differences],
            }
            for section in result.sections
        ],
    }
    rows = [
        (name, side.file, side.verdict.capsule or "", side.verdict.integrity, side.verdict.outcome)
        for name, side in (("A", result.left), ("B", result.right))
    ]
    manifests = f"same manifest: {result.left.verdict.manifest}" if result.same_manifest else "different manifests"
    lines = [columns(rows, ("", "file", "capsule", "integrity", "outcome")), "", manifests]
    for section in result.sections:
        lines += _section(section)
    answer = paint("equal", "good") if result.equal else paint("different", "doubt")
    return value, "\n".join([*lines, "", answer])


def exported(result: Exported) -> Said:
    """Say what was exported."""
    verdict = result.verdict
    value = {
        "form": result.form,
        "output": str(result.output),
        "files": result.files,
        "capsule": verdict.capsule,
        "integrity": verdict.integrity,
        "signed_by": result.signed_by,
    }
    what = "1 file" if result.files == 1 else f"{result.files} files"
    lines = [f"wrote {what} as {result.form}: {result.output}"]
    if verdict.integrity != "intact":
        lines.append(paint(f"the capsule is {verdict.integrity}; what was written says so", "bad"))
    if result.form in READERS:
        lines.append(READERS[result.form].format(shlex.quote(str(result.output))))
    else:
        lines.append(f"signed by {result.signed_by}" if result.signed_by else "unsigned: a bare statement; see --key")
    return value, "\n".join(lines)


def _side(side: Side) -> dict[str, Any]:
    verdict = side.verdict
    return {
        "file": side.file,
        "capsule": verdict.capsule,
        "manifest": verdict.manifest,
        "integrity": verdict.integrity,
        "outcome": verdict.outcome,
    }


def _section(section: Section) -> Iterator[str]:
    many = "difference" if section.count == 1 else "differences"
    yield f"{section.name.ljust(9)}  {f'{section.count} {many}' if section.count else 'equal'}"
    for item in section.differences:
        yield f"  {safe(item.where)}: {_shown(item.left)} | {_shown(item.right)}"
    if section.count > len(section.differences):
        yield f"  and {section.count - len(section.differences)} more (--limit)"


def _shown(value: Any) -> str:
    """Write a value in one short line, digests by their beginning; the object has them whole."""
    if isinstance(value, dict) and value:
        return "only here"
    text = "none" if value is None else DIGEST.sub(r"\1…", safe(str(value)))
    return text if len(text) <= VALUE_CHARACTERS else text[: VALUE_CHARACTERS - 1] + "…"

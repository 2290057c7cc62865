"""What `diff` and `export` say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from capsule.cli.words import Said, columns, paint, safe

if TYPE_CHECKING:
    from capsule.steps.diff import Diff, Section, Side

VALUE_CHARACTERS = 72
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

"""What each command says: one JSON object, and the same for people. No command prints anywhere else."""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capsule.core.verdict import Verdict
    from capsule.host.reconcile import Finding as Settlement
    from capsule.steps.clean import Cleaned
    from capsule.steps.extract import Extracted
    from capsule.steps.freeze import Frozen
    from capsule.steps.pack import Items, Packed
    from capsule.steps.replay import Replay
    from capsule.steps.show import Listing

Said = tuple[Any, str]
"""The JSON object of a command, and its words."""

COLOURS = {"good": "32", "bad": "31", "doubt": "33", "faint": "2"}


def emit(wants_json: bool, value: Any, text: str) -> None:
    """Print the object or the words on stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False) if wants_json else text.rstrip("\n"))


def emit_bytes(wants_json: bool, name: str, data: bytes) -> None:
    """Print a member's bytes as they are, or as an object."""
    if wants_json:
        emit(True, {"member": name, "size_bytes": len(data), "base64": base64.b64encode(data).decode()}, "")
        return
    sys.stdout.flush()
    sys.stdout.buffer.write(data)


def paint(text: str, mood: str) -> str:
    """Colour a word on a terminal that takes colours."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{COLOURS[mood]}m{text}\x1b[0m"


def safe(text: str) -> str:
    """Show control and direction characters of a stranger's text instead of obeying them."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def columns(rows: Sequence[Sequence[str]], head: Sequence[str]) -> str:
    """Align rows under a head; the last column is not padded."""
    lines = [[safe(value) for value in row] for row in (head, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    padded = ["  ".join(v.ljust(w) for v, w in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([paint(padded[0], "faint"), *padded[1:]])


def initialised(directory: Path, paths: Sequence[Path]) -> Said:
    """Say what `init` wrote."""
    text = "\n".join(f"wrote {path}" for path in paths)
    where = f"cd {directory} && " if str(directory) != "." else ""
    return {"written": [str(path) for path in paths]}, f"{text}\nnext: {where}capsule freeze protocol.toml"


def frozen(result: Frozen) -> Said:
    """Say what was frozen."""
    manifest = result.generation.manifest
    for warning in result.warnings:
        print(f"capsule: note: {safe(warning)}", file=sys.stderr)
    value = {
        "manifest": result.identity,
        "generation": result.generation.number,
        "written": result.written,
        "cells": manifest.cells.count,
        "sources": manifest.sources.count,
        "directory": str(result.generation.directory),
        "supersedes": manifest.supersedes.manifest if manifest.supersedes else None,
        "warnings": result.warnings,
    }
    verb = "frozen" if result.written else "frozen already, unchanged"
    counts = f"{manifest.cells.count} planned cells, {manifest.sources.count} source files"
    return value, f"{result.identity}\n{verb}: {counts}, in {os.path.relpath(result.generation.directory)}"


def reconciled(settlements: Sequence[Settlement]) -> Said:
    """Say what `reconcile` found."""
    value = {"attempts": [{"attempt": s.attempt, "state": s.state, "words": s.words} for s in settlements]}
    if not settlements:
        return value, "nothing was open"
    return value, columns([(s.attempt, s.state, s.words) for s in settlements], ("attempt", "state", ""))


def emit_planned(wants_json: bool, items: Items) -> None:
    """List what would be packed."""
    if wants_json:
        _emit_object({}, "members", ({"name": item.name, "size_bytes": item.size} for item in items))
    else:
        _emit_sized(max(item.size for item in items), ((item.name, item.size) for item in items))


def packed(result: Packed) -> Said:
    """Say what was packed."""
    value = {
        "file": str(result.path),
        "capsule": result.sealed.identity,
        "members": result.sealed.members,
        "size_bytes": result.sealed.size_bytes,
        "replaced": result.was == "replaced",
        "unchanged": result.was == "same",
        "outcome": result.results.outcome,
    }
    size = f"{result.sealed.size_bytes / 1e6:.2f} MB"
    text = f"{result.sealed.identity}\npacked {result.sealed.members} members into {result.path} ({size})"
    if result.was != "absent":
        text += ", in the place of another capsule" if result.was == "replaced" else ", which held the same already"
    return value, f"{text}\npublish this identity elsewhere: only then can nobody rebuild the capsule unnoticed"


def verdict(result: Verdict, verbose: bool = False) -> Said:
    """Say the two answers, then what kept a check from passing, or every check by name."""
    from capsule.cli import signed

    identities = {"capsule": result.capsule, "manifest": result.manifest}
    lines = [
        *_answers(result),
        "",
        *(f"{name}: ".ljust(10) + digest for name, digest in identities.items() if digest),
        *_checks(result, verbose),
        *signed.order(result.order),
        *signed.rests_on(result),
    ]
    return result.to_json(), "\n".join(lines)


def _checks(result: Verdict, verbose: bool) -> list[str]:
    """Return a line for each check that did not pass or passed something over, or for every one, with its findings."""
    from capsule.core.version import PASSED_OVER

    moods = {"passed": "good", "failed": "bad", "not_checked": "doubt"}
    told = [c for c in result.checks if verbose or c.status != "passed" or PASSED_OVER in c.words]
    width = max((len(check.name) for check in told), default=0)
    passed = sum(check.status == "passed" for check in result.checks)
    lines = [f"checks:   {passed} of {len(result.checks)} passed{'' if verbose else ' (each by name: --verbose)'}"]
    for check in told:
        status_word = paint(check.status.replace("_", " ").ljust(11), moods[check.status])
        lines.append(f"  {check.id}  {check.name.ljust(width)}  {status_word}  {safe(check.words)}".rstrip())
        lines += [f"        - {safe(finding)}" for finding in check.findings]
    return lines


def _answers(result: Verdict) -> list[str]:
    from capsule.cli import signed

    mood = {"intact": "good", "incomplete": "doubt", "broken": "bad"}[result.integrity]
    lines = [
        f"integrity: {paint(result.integrity, mood)}, {signed.signatures(result)}",
        f"outcome:   {result.outcome}",
    ]
    if result.amended:
        lines.append(paint(safe(f"amended:   {result.amended.removeprefix('amended ')}"), "doubt"))
    lines += [f"  {item.decision.ljust(12)}  {item.hypothesis}: {safe(item.claim)}" for item in result.hypotheses]
    return lines


def verdict_exit_code(result: Verdict, fail_on_outcome: bool) -> int:
    """Return 0 for intact, 1 for broken, 3 for incomplete; the outcome counts only when asked."""
    code = {"intact": 0, "broken": 1, "incomplete": 3}[result.integrity]
    return code or int(fail_on_outcome and result.outcome != "supported")


def replayed(result: Replay) -> Said:
    """Say what was derived again and what was recomputed."""
    observations = [
        {"cell": r.cell, "observation": r.observation, "answer": r.answer, "words": r.words}
        for r in result.observations
    ]
    value = {
        "verdict": result.verdict.to_json(),
        "results": result.results.to_json() if result.results else None,
        "observations": observations,
    }
    lines = _answers(result.verdict)
    if result.results:
        lines += ["", *_result_lines(result)]
    if observations:
        counts: dict[str, int] = {}
        for item in result.observations:
            counts[item.answer] = counts.get(item.answer, 0) + 1
        cells = len({item.cell for item in result.observations})
        summary = ", ".join(f"{count} {answer.replace('_', ' ')}" for answer, count in sorted(counts.items()))
        planned = result.manifest.cells.count
        lines += ["", f"recomputed {cells} of {planned} cells: {summary} (others with --cells or --limit)"]
        lines += [
            f"  {item.cell} {item.observation}: {item.answer.replace('_', ' ')}: {safe(item.words)}"
            for item in result.observations
            if item.answer == "different" or (item.answer == "not_verified" and "measured" not in item.words)
        ]
    return value, "\n".join(lines)


def _result_lines(result: Replay) -> list[str]:
    import math

    from capsule.steps.limits import HEAD, gate_rows

    assert result.results is not None
    rules = {estimate.name: estimate for estimate in result.manifest.protocol.estimates}
    rows = []
    for item in result.results.estimates:
        rule = rules[item.estimate]
        sides = f"{rule.numerator} / {rule.denominator}" if rule.denominator else rule.numerator
        if item.mean is None or item.low is None or item.high is None:
            rows.append((item.workload, sides, item.withheld or "", ""))
            continue
        values = [float(item.mean), float(item.low), float(item.high)]
        if rule.rule == "log_ratio":
            values = [math.exp(min(value, 700.0)) for value in values]
        shown = f"{values[0]:.3g} [{values[1]:.3g}, {values[2]:.3g}]"
        rows.append(
            (
                item.workload,
                f"{rule.observation}: {sides}",
                shown,
                f"{100 * float(item.level):g} % over {len(item.starts)} starts",
            )
        )
    lines = [columns(rows, ("workload", "ratio or mean of", "estimate [interval]", ""))] if rows else []
    gates = gate_rows(result.manifest.protocol, result.results)
    if gates:
        lines += ["", columns(gates, HEAD)]
    for charge in result.results.charges:
        attempts = ", ".join(f"{count} {name}" for name, count in sorted(charge.attempts.items()))
        pilot = "pilot " if charge.pilot else ""
        spent = f"{charge.debited_ms / 1000:.1f} of {charge.budget_ms / 1000:g} {charge.unit}-seconds"
        lines += ["", f"{pilot}charged: {spent}, attempts: {attempts}"]
    return lines


def replay_exit_code(result: Replay) -> int:
    """Return 1 when evidence is broken or a recomputed value differs, 3 when it is incomplete."""
    code = verdict_exit_code(result.verdict, False)
    return code or int(any(item.answer == "different" for item in result.observations))


def reported(text: str) -> Said:
    """Give the report."""
    return {"markdown": text}, text


def report_written(output: Path, form: str) -> Said:
    """Say where the report was written."""
    return {"file": str(output), "form": form}, f"wrote {output}"


def emit_members(wants_json: bool, listing: Listing) -> None:
    """List a capsule's members, as they are read."""
    if wants_json:
        listed = ({"name": name, "size_bytes": size, "sha256": digest} for name, size, digest in listing.members)
        _emit_object({}, "members", listed)
        return
    _emit_sized(listing.size_max, ((name, size) for name, size, _ in listing.members))


def _emit_sized(size_max: int, members: Iterable[tuple[str, int]]) -> None:
    """Print a line for each member, as it comes, under the head that `columns` would give them."""
    width = max(len("bytes"), len(str(size_max)))
    print(paint(f"{'bytes'.ljust(width)}  member", "faint"))
    for name, size in members:
        print(f"{str(size).ljust(width)}  {safe(name)}")


def emit_extracted(wants_json: bool, directory: Path, result: Extracted) -> None:
    """Say what was extracted."""
    if wants_json:
        _emit_object({"directory": str(directory)}, "files", result.names)
    else:
        print(f"wrote {result.count} files below {directory}")


def _emit_object(value: dict[str, Any], key: str, items: Iterable[Any]) -> None:
    """Print an object with one more key, of which the items are printed as they come; else as `emit` does."""
    head, _, tail = json.dumps({**value, key: []}, indent=2, ensure_ascii=False).rpartition("[]")
    sys.stdout.write(f"{head}[")
    before = after = ""
    for item in items:
        text = json.dumps(item, indent=2, ensure_ascii=False).replace("\n", "\n    ")
        sys.stdout.write(f"{before}\n    {text}")
        before, after = ",", "\n  "
    print(f"{after}]{tail}")


def cleaned(result: Cleaned) -> Said:
    """Say what `clean` removed."""
    value = {"snapshots": result.snapshots, "objects": result.objects, "size_bytes": result.size_bytes}
    return (
        value,
        f"removed {result.snapshots} snapshots and {result.objects} contents, {result.size_bytes / 1e6:.1f} MB",
    )

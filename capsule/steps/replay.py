"""Replay: derive every table from a capsule's records, and on request recompute observations on a CPU.

The capsule is verified first. Recomputing runs the capsule's own code: it is asked for by name, runs from a fresh
folder that holds exactly the frozen sources, and its records go where the caller says.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from capsule.core.comparison import Answer, compare
from capsule.core.errors import BrokenError, RefusedError, UsageError
from capsule.core.evidence import Evidence
from capsule.core.judge import judge
from capsule.core.lines import pieces
from capsule.core.manifest import Manifest
from capsule.core.plan import Cell, enumerate_cells, shuffle
from capsule.core.record import Scalar, read_journal
from capsule.core.results import Results
from capsule.core.verdict import Verdict
from capsule.host.recompute import recompute
from capsule.steps.extract import extract_sources
from capsule.steps.verify import collect, open_capsule


@dataclass(frozen=True)
class Replayed:
    """One observation recomputed and compared."""

    cell: str
    observation: str
    answer: Answer
    words: str


@dataclass(frozen=True)
class Replay:
    """A verified capsule's results derived again, and the observations that were recomputed."""

    verdict: Verdict
    results: Results | None
    manifest: Manifest
    observations: tuple[Replayed, ...]


def replay(
    path: Path,
    *,
    execute: bool = False,
    cells: Sequence[str] = (),
    limit: int | None = None,
    output: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Replay:
    """Replay a capsule's tables, and with `execute` recompute chosen cells (the frozen sample by default).

    Raises:
        BrokenError: the capsule is not intact, and code of such a capsule is not run.
        UsageError: a cell is not in the plan.
    """
    with open_capsule(path) as stream:
        evidence = collect(stream, whole_lists=False)
    verdict = judge(evidence)
    manifest = _manifest(evidence, path)
    packed = b"".join(pieces(evidence.results))
    results = Results.from_bytes(packed, "7-results/results.json") if verdict.integrity == "intact" else None
    if not execute:
        return Replay(verdict, results, manifest, ())
    if results is None:
        raise BrokenError(
            f"{path}: expected an intact capsule, found {verdict.integrity}: its code is not run",
            hint=f"see why: capsule verify {path}",
        )
    chosen = _chosen(manifest, enumerate_cells(manifest.protocol), evidence, cells, limit)
    folder = output or Path(tempfile.mkdtemp(prefix="capsule-replay-"))
    recomputed = _recompute(path, manifest, chosen, folder, progress)
    return Replay(verdict, results, manifest, tuple(_compared(manifest, chosen, evidence, recomputed)))


def _manifest(evidence: Evidence, path: Path) -> Manifest:
    files = evidence.generations.get(max(evidence.generations, default=0), {})
    if "manifest.json" not in files:
        raise BrokenError(f"{path}: expected a manifest, found none")
    return Manifest.from_bytes(files["manifest.json"], "manifest.json")


def _chosen(
    manifest: Manifest, planned: Sequence[Cell], evidence: Evidence, cells: Sequence[str], limit: int | None
) -> list[Cell]:
    """Return the cells to recompute: the named ones, or a sample drawn by the frozen seed from those that are ok."""
    assert not isinstance(evidence.table, str)
    observed = {row["cell"] for row in evidence.table if row["final"] and row["status"] == "ok"}
    by_name = {cell.cell: cell for cell in planned}
    if cells:
        unknown = [name for name in cells if name not in by_name]
        if unknown:
            raise UsageError(f"expected a planned cell, found {unknown[0]!r}", hint="`capsule report` lists the cells")
        unobserved = [name for name in cells if name not in observed]
        if unobserved:
            raise UsageError(f"expected an observed cell, found {unobserved[0]}, which has no values")
        chosen = [by_name[name] for name in dict.fromkeys(cells)]
    else:
        drawn = shuffle(
            [cell for cell in planned if cell.cell in observed], manifest.protocol.design.order_seed, "replay"
        )
        chosen = drawn[: limit or manifest.protocol.replay_sample]
    return chosen[:limit]


def _recompute(
    path: Path, manifest: Manifest, chosen: Sequence[Cell], folder: Path, progress: Callable[[int, int], None] | None
) -> dict[str, dict[str, Scalar | None] | str]:
    """Run each chosen cell in a process of its own; returns its values, or why there are none."""
    if any(arm.revision for arm in manifest.protocol.arms):
        raise RefusedError("expected arms of the work tree's sources, found a revision: replay runs one source tree")
    tree = folder / "sources"
    extract_sources(path, tree)
    found: dict[str, dict[str, Scalar | None] | str] = {}
    for done, cell in enumerate(chosen):
        if progress:
            progress(done, len(chosen))
        place = folder / cell.cell
        place.mkdir()
        data, words = recompute(manifest.protocol, cell, tree, place)
        journal = read_journal(data, manifest.protocol.observations, [cell.cell])
        row = journal.rows.get(cell.cell)
        if row is None:
            found[cell.cell] = journal.faults[0] if journal.faults else words
        else:
            found[cell.cell] = dict(row.values) if row.error is None else f"raised {row.error}"
    if progress:
        progress(len(chosen), len(chosen))
    return found


def _compared(
    manifest: Manifest, chosen: Sequence[Cell], evidence: Evidence, found: dict[str, dict[str, Scalar | None] | str]
) -> list[Replayed]:
    assert not isinstance(evidence.table, str)
    recorded = {row["cell"]: row for row in evidence.table if row["final"]}
    compared = []
    for cell in chosen:
        values = found[cell.cell]
        for column in manifest.protocol.observations:
            if isinstance(values, str):
                compared.append(Replayed(cell.cell, column.name, "not_verified", values))
            else:
                answer, words = compare(column, recorded[cell.cell][column.name], values[column.name])
                compared.append(Replayed(cell.cell, column.name, answer, words))
    return compared

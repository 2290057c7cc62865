"""Make the golden capsules: python -m tests.golden.make

A few honest studies are run and packed; every other golden is forged from one of them by one named fault and sealed
again, so that its container is sound and only a check of meaning can find it. Beside each lies what any verifier must
say of it: `NAME.expected.json`, and `NAME@VARIANT.expected.json` for other options on the same capsule. The options
name files by their place below this folder. Goldens are kept: run this only when the format changes, and say why in the
commit.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import rfc8785

from capsule.archive import layout
from capsule.archive.reader import examine
from capsule.archive.writer import CapsuleWriter
from capsule.core.canonical import canonical, join_lines, parse_lines
from capsule.core.checks import CHECK_FUNCTIONS
from capsule.core.digest import digest_of
from capsule.core.evidence import Reading
from capsule.core.manifest import Manifest
from capsule.core.progress import final_rows
from capsule.core.results import derive
from capsule.core.table import table_columns, table_rows
from capsule.steps.verify import collect
from tests.study import make_study
from tests.tables import read_rows, table_bytes

FOLDER = Path(__file__).parent
Members = dict[str, bytes]
OWN = {"0-header.json", "9-SHA256SUMS", "9-TABLE"}
MANIFEST = "1-manifest/001/manifest.json"
RESULTS = "7-results/results.json"
LEDGER = "2-ledger.jsonl"


def honest(folder: Path, changes: dict[str, str] | None = None, budget_ends: bool = False) -> bytes:
    """Run a study and return its capsule."""
    protocol = make_study(folder / "study", changes=changes)
    environment = {**os.environ, "CAPSULE_LEASE_DIR": str(folder / "leases")}
    for command in ("freeze", "run", "pack"):
        done = subprocess.run([sys.executable, "-m", "capsule", command, str(protocol)], env=environment, check=False)
        assert done.returncode == 0 or (budget_ends and done.returncode == 4), command
    return protocol.with_suffix(".capsule").read_bytes()


def unpack(data: bytes) -> Members:
    """Return a sound capsule's members, the container's own left out."""
    found = examine(io.BytesIO(data), keep=lambda name, size: True)
    assert found.sealed is not None, found.findings
    return {name: content for name, content in found.kept.items() if name not in OWN}


def seal(members: Members, version: str = layout.FORMAT) -> bytes:
    """Seal members into a sound container, as a forger would, or as another version of the format would."""
    stream = io.BytesIO()
    header = layout.HEADER_BYTES.replace(layout.FORMAT.encode(), version.encode())
    allowed = partial(layout.is_allowed, newer=True)
    with (
        patch.object(layout, "HEADER_BYTES", header),
        patch.object(layout, "is_allowed", allowed),
        CapsuleWriter(stream) as writer,
    ):
        for name in sorted(members):
            writer.add(name, len(members[name]), members[name])
        writer.close()
    return stream.getvalue()


def rechain(lines: list[dict[str, object]]) -> list[dict[str, object]]:
    """Number and chain ledger events again, as a forger would."""
    previous: str | None = None
    chained = []
    for number, line in enumerate(lines):
        event = {**line, "seq": number, "prev": previous}
        previous = digest_of(canonical(event))
        chained.append(event)
    return chained


def with_ledger(members: Members, lines: list[dict[str, object]]) -> Members:
    """Put a ledger in the place of another, with its head."""
    chained = rechain(lines)
    head = canonical({"count": len(chained), "sha256": digest_of(canonical(chained[-1]))})
    return {**members, LEDGER: join_lines(chained), "2-ledger.head.json": head}


def results_edited(members: Members) -> Members:
    """Results that say more than the records: an inconclusive estimate turned into a large one."""
    results = json.loads(members[RESULTS])
    results["estimates"][0] |= {"mean": "9.5", "low": "9.0", "high": "10.0"}
    return {**members, RESULTS: canonical(results)}


def outcome_edited(members: Members) -> Members:
    """A refuted hypothesis declared supported."""
    results = json.loads(members[RESULTS])
    results["outcome"] = results["hypotheses"][0]["decision"] = "supported"
    for component in results["hypotheses"][0]["components"]:
        component["decision"] = "supported"
    return {**members, RESULTS: canonical(results)}


def row_removed(members: Members) -> Members:
    """A row missing from the table."""
    columns = table_columns(Manifest.from_bytes(members[MANIFEST], "manifest").protocol.observations)
    rows = read_rows(members["4-records/rows.parquet"], columns, 1000, "rows")
    return {**members, "4-records/rows.parquet": table_bytes(columns, rows[:-1])}


def journal_edited(members: Members) -> Members:
    """An observation changed in the journal, the ledger left as it was."""
    name = "3-attempts/a000001/journal.jsonl"
    changed = members[name].replace(b'"amount":', b'"amount":1', 1)
    assert changed != members[name]
    return {**members, name: changed}


def charge_lowered(members: Members) -> Members:
    """A charge lowered, and the ledger chained again."""
    lines = parse_lines(members[LEDGER], LEDGER)
    for line in lines:
        if line["event"] == "settled":
            line["data"]["charge"] = {"lower_ms": 1, "upper_ms": 1, "debited_ms": 1, "observed": True}
    return with_ledger(members, lines)


def attempt_removed(members: Members) -> Members:
    """The last attempt taken out of the ledger, and the ledger chained again."""
    lines = [line for line in parse_lines(members[LEDGER], LEDGER) if line["attempt"] != "a000002"]
    return with_ledger(members, lines)


def event_removed(members: Members) -> Members:
    """One event cut out of the chain."""
    lines = members[LEDGER].splitlines(keepends=True)
    return {**members, LEDGER: b"".join(lines[:5] + lines[6:])}


def tail_removed(members: Members) -> Members:
    """The ledger's tail cut off, its head left."""
    lines = members[LEDGER].splitlines(keepends=True)
    return {**members, LEDGER: b"".join(lines[:-3])}


def source_swapped(members: Members) -> Members:
    """A source's bytes replaced."""
    name = next(name for name in members if name.startswith("5-sources/"))
    return {**members, name: b"print('another program')\n"}


def source_missing(members: Members) -> Members:
    """A frozen source left out."""
    name = next(name for name in members if name.startswith("5-sources/"))
    return {key: value for key, value in members.items() if key != name}


def results_missing(members: Members) -> Members:
    """No results at all."""
    return {key: value for key, value in members.items() if key != RESULTS}


def ledger_missing(members: Members) -> Members:
    """No ledger at all."""
    return {key: value for key, value in members.items() if not key.startswith("2-")}


def threshold_moved(members: Members) -> Members:
    """A threshold moved in the manifest after the fact."""
    manifest = json.loads(members[MANIFEST])
    manifest["protocol"]["hypotheses"][0]["threshold"] = "-9"
    return {**members, MANIFEST: canonical(manifest)}


def cell_dropped(members: Members) -> Members:
    """A planned cell dropped from the plan, its digest put right in the manifest."""
    cells = b"".join(members["1-manifest/001/cells.jsonl"].splitlines(keepends=True)[:-1])
    manifest = json.loads(members[MANIFEST])
    manifest["cells"] = {"count": cells.count(b"\n"), "sha256": digest_of(cells)}
    return {**members, "1-manifest/001/cells.jsonl": cells, MANIFEST: canonical(manifest)}


def import_foreign(members: Members) -> Members:
    """A module that came from nowhere frozen, the ledger's digest of the list put right."""
    name = "3-attempts/a000001/provenance.jsonl"
    line = {"module": "helper", "origin": "unknown", "name": "helper.py", "sha256": digest_of(b"")}
    data = members[name] + join_lines([line])
    lines = parse_lines(members[LEDGER], LEDGER)
    for event in lines:
        if event["event"] == "settled" and event["attempt"] == "a000001":
            event["data"]["files"]["provenance.jsonl"] = {"size": len(data), "sha256": digest_of(data)}
    return with_ledger({**members, name: data}, lines)


def exclusivity_claimed(members: Members) -> Members:
    """An attempt said to have had its device to itself, without a sample of it, and the ledger chained again."""
    lines = parse_lines(members[LEDGER], LEDGER)
    for line in lines:
        if line["event"] == "settled":
            line["data"]["exclusivity"] = "exclusive"
    return with_ledger(members, lines)


def resealed(members: Members) -> Members:
    """Every amount above 15 is a thousand times larger, and all that follows from the journals is rebuilt to agree."""
    changed, lines = dict(members), parse_lines(members[LEDGER], LEDGER)
    for event in lines:
        name = f"3-attempts/{event['attempt']}/journal.jsonl"
        if "files" in event["data"] and name in members:
            data = changed[name] = re.sub(rb'"amount":([0-9.]+)', _enlarged, members[name])
            event["data"]["files"]["journal.jsonl"] = {"size": len(data), "sha256": digest_of(data)}
    changed = with_ledger(changed, lines)
    reading = Reading(collect(io.BytesIO(seal(changed))))
    for identifier in ("V-04", "V-05", "V-10", "V-12", "V-17"):
        list(CHECK_FUNCTIONS[identifier](reading))
    assert reading.manifest is not None
    known = reading.manifest, reading.cells, reading.account, reading.journals
    table = table_bytes(table_columns(reading.manifest.protocol.observations), table_rows(*known))
    results = derive(reading.manifest, final_rows(*known), reading.account)
    return {**changed, "4-records/rows.parquet": table, RESULTS: results.to_bytes()}


def _enlarged(match: re.Match[bytes]) -> bytes:
    value = float(match[1])
    return b'"amount":' + rfc8785.dumps(value * 1000 if value > 15 else value)


def newer(members: Members) -> Members:
    """A capsule as a newer minor version may write it: with a further member."""
    return {**members, "8-plots/ratio.svg": b"<svg/>"}


FORGERIES: tuple[Callable[[Members], Members], ...] = (
    results_edited, row_removed, journal_edited, charge_lowered, attempt_removed, event_removed, tail_removed,
    source_swapped, source_missing, results_missing, ledger_missing, threshold_moved, cell_dropped, import_foreign,
    exclusivity_claimed,
)  # fmt: skip


def damaged(data: bytes) -> dict[str, bytes]:
    """Return files whose bytes were damaged after sealing."""
    flipped = bytearray(data)
    flipped[len(data) // 3] ^= 0x10
    return {"bit-flipped": bytes(flipped), "truncated": data[: len(data) * 2 // 3], "trailing-bytes": data + b"more"}


def plain_cases() -> dict[str, tuple[str, bytes]]:
    """Return every golden that no key or authority is needed for."""
    with tempfile.TemporaryDirectory() as folder:
        supported = honest(Path(folder) / "a")
        refuted = honest(Path(folder) / "b", {"threshold = 0": "threshold = 5"})
        short = honest(Path(folder) / "c", {"device_seconds = 200": "device_seconds = 17.001"}, budget_ends=True)
    made = {
        "supported": ("An honest capsule whose hypotheses are supported.", supported),
        "refuted": ("An honest capsule whose first hypothesis is refuted; intact all the same.", refuted),
        "budget-ended": ("An honest capsule whose budget ended before its plan; what was not run says so.", short),
    }
    members = unpack(supported)
    for forge in FORGERIES:
        made[forge.__name__.replace("_", "-")] = (forge.__doc__ or "", seal(forge(members)))
    made["newer-minor"] = (newer.__doc__ or "", seal(newer(members), "capsule-archive/1.1"))
    made["outcome-edited"] = (outcome_edited.__doc__ or "", seal(outcome_edited(unpack(refuted))))
    for name, data in damaged(supported).items():
        made[name] = ("Bytes changed after sealing.", data)
    return made


def judged(name: str, options: tuple[str, ...]) -> dict[str, object]:
    """What the product says of a golden with some options."""
    command = [sys.executable, "-m", "capsule", "verify", f"{name.partition('@')[0]}.capsule", *options, "--json"]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False)
    verdict = json.loads(done.stdout)
    failed = [check["id"] for check in verdict["checks"] if check["status"] == "failed"]
    return {"integrity": verdict["integrity"], "outcome": verdict["outcome"], "failed": failed}


def main() -> None:
    """Write all goldens with what the product says of each; what was recorded on other machines stays."""
    from tests.golden import signed

    with tempfile.TemporaryDirectory() as folder:
        made = signed.make(Path(folder))
    plain = {name: signed.Case(what, data) for name, (what, data) in plain_cases().items()}
    cases = {**plain, **made.cases}
    files = {f"{name}.capsule": case.data for name, case in cases.items() if case.data is not None}
    for place, data in {**made.files, **files}.items():
        (FOLDER / place).parent.mkdir(exist_ok=True)
        (FOLDER / place).write_bytes(data)
    for name, case in cases.items():
        said = judged(name, case.options)
        options = {"options": case.options} if case.options else {}
        text = json.dumps({"what": case.what, **options, **said}, indent=2)
        (FOLDER / f"{name}.expected.json").write_text(text + "\n", encoding="utf-8")
        print(f"{name}: {said['integrity']}, {said['outcome']}, {said['failed']}")


if __name__ == "__main__":
    main()

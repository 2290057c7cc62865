"""The checks of a verdict, one function each: a generator that yields findings and returns words for a pass.

A check that cannot be made raises `NotChecked`. Each is named by its clause in `docs/spec/verdict.md`; the order is
that of `verdict.CHECKS`, and a later check relies on what an earlier one could read.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from heapq import nsmallest
from typing import Any

from capsule.core.attempt import COMPLETED, Settled, exit_faults
from capsule.core.canonical import iterate_lines
from capsule.core.digest import Digests, digest_of
from capsule.core.errors import MalformedError
from capsule.core.evidence import CELLS, NotChecked, Reading, Rows
from capsule.core.ledger_checks import (
    Checking,
    check_attempt_files,
    check_attempt_states,
    check_charges,
    check_ledger_chain,
    check_ledger_head,
)
from capsule.core.lines import whole
from capsule.core.manifest import FileDigest, ListDigest, Manifest, cell_lines, file_digest, list_digest, refuse_commas
from capsule.core.plan import enumerate_cells
from capsule.core.plan_checks import complaints
from capsule.core.progress import final_rows, outcome_of, reserved_processes
from capsule.core.record import read_journal
from capsule.core.results import Results, agree, derive, result_pieces
from capsule.core.schema import key_path
from capsule.core.signature_checks import check_signature, check_timestamp
from capsule.core.source_list import SourceList
from capsule.core.table import table_rows
from capsule.core.telemetry_checks import check_telemetry
from capsule.core.toml import read_protocol
from capsule.core.verdict import FINDINGS_COUNTED_MAX
from capsule.core.version import passed_over

REQUIRED_MEMBERS = (
    "0-header.json", "2-ledger.head.json", "2-ledger.jsonl", "4-records/rows.parquet", "7-results/results.json",
    "8-README/VERIFY.md",
)  # fmt: skip
JUDGED = COMPLETED | {"bad_records", "incomplete"}
"""Outcomes that follow from the journal of a process which exited with status 0."""
NOTHING = list_digest(b"")
RESULTS_ROOM = 4096
"""Bytes that packed results may have beyond twice what is derived: of numbers the last digits may differ."""
REQUIRED_OF_MANIFEST = ("cells.jsonl", "manifest.json", "protocol.toml", "sources.jsonl")


def check_container(reading: Reading) -> Checking:
    """V-01: the container is in its one canonical form, and every byte of the file belongs to it."""
    yield from reading.evidence.container_findings
    return f"{len(reading.evidence.members) + reading.evidence.stored} members in canonical form"


def check_members(reading: Reading) -> Checking:
    """V-02: every member's bytes have the digest that the member table gives."""
    yield from reading.evidence.member_findings
    if reading.evidence.identity is None:
        raise NotChecked("the member table could not be read")
    return f"every digest recomputed; identity {reading.evidence.identity}{passed_over(reading.evidence.later)}"


def check_required(reading: Reading) -> Checking:
    """V-03: nothing that the format requires is absent."""
    evidence = reading.evidence
    missing = [name for name in REQUIRED_MEMBERS if name not in evidence.members]
    numbers = sorted(evidence.generations)
    if numbers != list(range(1, len(numbers) + 1)) or not numbers:
        missing.append("1-manifest/001")
    for number in numbers:
        files = evidence.files(number)
        missing += [f"1-manifest/{number:03d}/{name}" for name in REQUIRED_OF_MANIFEST if name not in files]
    if missing:
        raise NotChecked(f"absent: {', '.join(missing)}")
    yield from ()
    return "all there"


def check_manifest(reading: Reading) -> Checking:
    """V-04: every manifest is canonical, and the protocol and lists beside it are those it names."""
    commas = 0
    for number, files in sorted(reading.evidence.generations.items()):
        place = f"1-manifest/{number:03d}"
        if "manifest.json" not in files:
            raise NotChecked(f"{place}/manifest.json is absent")
        commas += files["manifest.json"].count(b",")
        refuse_commas(commas, f"{place}/manifest.json")
        manifest = Manifest.from_bytes(files["manifest.json"], f"{place}/manifest.json")
        for at, words in complaints(manifest.protocol):
            raise MalformedError(f"{place}/manifest.json: protocol: {key_path(at)}: {words}")
        reading.manifests.append(manifest)
        yield from _lists_agree(manifest, reading.evidence.list_digests(number), place)
        protocol_file = files.get("protocol.toml", b"")
        if FileDigest(size=len(protocol_file), sha256=digest_of(protocol_file)) != manifest.protocol_file:
            yield f"{place}/protocol.toml: expected {manifest.protocol_file.sha256}, found {digest_of(protocol_file)}"
        elif read_protocol(protocol_file, f"{place}/protocol.toml").to_bytes() != manifest.protocol.to_bytes():
            yield f"{place}/manifest.json: its protocol is not that of protocol.toml"
    if reading.manifest is None:
        raise NotChecked("there is no manifest")
    return f"{reading.manifest.identity}"


def _lists_agree(manifest: Manifest, lists: Mapping[str, ListDigest], place: str) -> Iterator[str]:
    expected = {"cells.jsonl": manifest.cells, "sources.jsonl": manifest.sources}
    planned = [(arm.name, arm.revision) for arm in manifest.protocol.arms]
    if [(arm.arm, arm.revision) for arm in manifest.arms] != planned:
        yield f"{place}/manifest.json: expected the sources of the arms {planned}, found those of others"
    for arm in manifest.arms:
        name = f"sources-{arm.revision}.jsonl" if arm.revision else "sources.jsonl"
        if expected.setdefault(name, arm.sources) != arm.sources:
            yield f"{place}/manifest.json: arm {arm.arm} names another list than {name}"
    for name in sorted(lists):
        if name not in expected:
            yield f"{place}/{name}: the manifest names no such list"
    for name, digest in expected.items():
        found = lists.get(name, NOTHING)
        if found != digest:
            words = f"expected {digest.count} lines with {digest.sha256}, found {found.count} with {found.sha256}"
            yield f"{place}/{name}: {words}"


def _number_in_force(reading: Reading) -> int:
    """Return the number of the last manifest that could be read."""
    return sorted(reading.evidence.generations)[len(reading.manifests) - 1]


def check_plan(reading: Reading) -> Checking:
    """V-05: the planned cells are those that the protocol enumerates, in the order that its seed draws."""
    if reading.manifest is None:
        raise NotChecked("the manifest could not be read")
    planned = reading.cells = enumerate_cells(reading.manifest.protocol)
    found = reading.evidence.list_digests(_number_in_force(reading)).get(CELLS, NOTHING)
    if found != list_digest(cell_lines(planned)):
        words = f"found {found.count} lines that are not those"
        yield f"expected the {len(planned)} cells that the protocol enumerates, {words}"
    return f"{len(planned)} planned cells enumerated again"


def check_manifest_chain(reading: Reading) -> Checking:
    """V-06: each amendment names the manifest before it, and the protocol keeps its name."""
    if reading.manifest is None:
        raise NotChecked("the manifest could not be read")
    previous: Manifest | None = None
    for number, manifest in enumerate(reading.manifests, start=1):
        named = manifest.supersedes.manifest if manifest.supersedes else None
        expected = previous.identity if previous else None
        if named != expected:
            yield f"manifest {number}: expected it to supersede {expected}, found {named}"
        if previous is not None and manifest.protocol.name != previous.protocol.name:
            yield f"manifest {number}: expected protocol {previous.protocol.name}, found {manifest.protocol.name}"
        previous = manifest
    return amendments(reading.manifests) or "not amended"


def amendments(manifests: Sequence[Manifest]) -> str:
    """Say what had been seen when a protocol was amended; empty if it never was."""
    seen = [manifest.supersedes for manifest in manifests if manifest.supersedes is not None]
    said = [
        f"after {item.rows_seen} rows of {item.attempts_seen} attempts had been seen: {item.reason}" for item in seen
    ]
    return f"amended {len(seen)} times; {'; '.join(said)}" if len(seen) > 1 else f"amended {said[0]}" if said else ""


def check_against(reading: Reading) -> Checking:
    """V-07: what the caller expects is this capsule's identity or a manifest of its chain."""
    if not reading.against:
        raise NotChecked("no identity was given to check against", required=False)
    known = {manifest.identity: f"manifest {number}" for number, manifest in enumerate(reading.manifests, start=1)}
    if reading.evidence.identity:
        known[reading.evidence.identity] = "the capsule"
    for digest in reading.against:
        if digest not in known:
            yield f"expected {digest}, found {', '.join(known) or 'nothing that could be read'}"
    return ", ".join(f"{digest} is {known[digest]}" for digest in reading.against if digest in known)


def check_sources(reading: Reading) -> Checking:
    """V-15: every frozen source is there, nothing else is, and each attempt ran a frozen snapshot."""
    if reading.manifest is None:
        raise NotChecked("the manifest could not be read")
    evidence = reading.evidence
    wanted = Digests()
    for number, name, listed in _source_lists(reading):
        place = f"1-manifest/{number:03d}/{name}"
        if listed.error is not None:
            raise MalformedError(listed.error)
        yield from (f"{place}: {words}" for words in listed.faults)
        for digest in listed.contents:
            wanted.add(digest)
        if number == _number_in_force(reading):
            reading.sources[_revision(name)] = listed
    for digest in evidence.frozen:
        wanted.add(digest)
    absent = _first(digest for digest in wanted if digest not in evidence.sources)
    yield from (f"5-sources: {digest} is frozen and absent" for digest in absent)
    extra = _first(digest for digest in evidence.sources if digest not in wanted)
    yield from (f"5-sources: {digest} is there and not frozen" for digest in extra)
    lists = {item.identity: {arm.sources.sha256 for arm in item.arms} for item in reading.manifests}
    for attempt in reading.account.attempts.values():
        own = lists.get(attempt.reserved.manifest, set()) if attempt.reserved else set()
        if attempt.intent and not attempt.pilot and attempt.intent.snapshot not in own:
            yield f"{attempt.id}: ran a snapshot of {attempt.intent.snapshot}, which its manifest does not freeze"
    return f"{evidence.matched + len(evidence.sources)} distinct files"


def _source_lists(reading: Reading) -> Iterator[tuple[int, str, SourceList]]:
    """Yield number, name and what is known of every list of sources."""
    evidence = reading.evidence
    for number, files in sorted(evidence.generations.items()):
        for name in sorted(evidence.files(number)):
            if name.startswith("sources"):
                read = evidence.source_lists.get(number, {}).get(name)
                yield number, name, read or SourceList.of(files[name], f"1-manifest/{number:03d}/{name}")


def _revision(name: str) -> str | None:
    return name.removeprefix("sources").removesuffix(".jsonl").removeprefix("-") or None


def _first(digests: Iterable[str]) -> list[str]:
    """Return digests in their order, not more than a check counts."""
    return nsmallest(FINDINGS_COUNTED_MAX + 1, digests)


def check_imports(reading: Reading) -> Checking:
    """V-16: every module that a completed attempt imported came from the sources of its arms or a distribution."""
    if reading.manifest is None:
        raise NotChecked("the manifest could not be read")
    plan = reserved_processes(reading.cells, reading.account)
    known = {arm.name: arm for arm in reading.manifest.protocol.arms}
    names_of = {ordinal: {cell.arm for cell in process.cells} for ordinal, process in plan.items()}
    arms_of = {ordinal: [known[name] for name in names] for ordinal, names in names_of.items()}
    modules, identity = 0, reading.manifest.identity
    for attempt in reading.account.attempts.values():
        own = attempt.reserved is not None and attempt.reserved.manifest == identity
        if not own or attempt.pilot or attempt.end is None or attempt.end.outcome not in COMPLETED:
            continue
        data = reading.evidence.provenance.get(attempt.id)
        arms = arms_of.get(attempt.reserved.process, []) if attempt.reserved else []
        if data is None:
            if any(arm.trial for arm in arms):
                yield f"{attempt.id}: expected a record of what its trial imported, found none"
            continue
        lists = [
            reading.sources[revision] for revision in {arm.revision for arm in arms} if revision in reading.sources
        ]
        own_modules = {arm.trial.partition(":")[0] for arm in arms if arm.trial}
        shown = set()
        for line in iterate_lines(data, f"3-attempts/{attempt.id}/provenance.jsonl"):
            modules += 1
            yield from _import_faults(attempt.id, line, lists)
            if isinstance(line, dict) and line.get("origin") == "source":
                shown.add(str(line.get("module")))
        for module in sorted(own_modules - shown) if attempt.end.outcome == "completed" else ():
            yield f"{attempt.id}: expected the trial's own module {module} among what it imported, found no such line"
    return f"{modules} imports" if modules else "no Python trial completed; what commands load is not looked into"


def _import_faults(attempt: str, line: object, lists: Sequence[SourceList]) -> Iterator[str]:
    item = line if isinstance(line, dict) else {}
    module, file = item.get("module"), item.get("name")
    if item.get("origin") not in ("source", "distribution", "stdlib", "tool"):
        yield f"{attempt}: module {module} is neither frozen nor of an installed distribution"
    elif item["origin"] == "source" and not any(frozen.holds(str(file), str(item.get("sha256"))) for frozen in lists):
        yield f"{attempt}: module {module} came from {file}, which is not frozen with those bytes for its arm"


def check_records(reading: Reading) -> Checking:
    """V-17: outcomes and rows follow from the journals; the packed table is theirs; every cell has one final row."""
    manifest = reading.manifest
    if manifest is None or not reading.cells or not reading.chain.events:
        raise NotChecked("the plan or the ledger could not be read")
    plan, identity = reserved_processes(reading.cells, reading.account), manifest.identity
    for name, attempt in reading.account.attempts.items():
        if attempt.reserved is None or attempt.refused or attempt.reserved.manifest != identity:
            continue
        data = reading.evidence.journals.get(name, b"")
        process = plan.get(attempt.reserved.process)
        if process is None:
            yield f"{name}: process {attempt.reserved.process} is not planned"
            continue
        journal = read_journal(data, manifest.protocol.observations, process.names)
        reading.journals[name] = journal
        if attempt.end is None:
            continue
        if attempt.end.rows != len(journal.rows):
            yield f"{name}: expected {attempt.end.rows} rows by the ledger, found {len(journal.rows)}"
        outcome = attempt.end.outcome
        if outcome in JUDGED and outcome_of(process, journal)[0] != outcome:
            yield f"{name}: the ledger says {outcome}, the journal {outcome_of(process, journal)[0]}"
        if isinstance(attempt.end, Settled) and attempt.exit is not None:
            yield from (f"{name}: {words}" for words in exit_faults(attempt.exit, outcome))
    if "4-records/rows.parquet" not in reading.evidence.members:
        raise NotChecked("the table is absent")
    if _number_in_force(reading) != len(reading.evidence.generations):
        yield "4-records/rows.parquet: expected the last manifest, which says its columns, found that it cannot be read"
        return ""
    if isinstance(reading.evidence.table, str):
        yield reading.evidence.table
        return ""
    expected = table_rows(manifest, reading.cells, reading.account, reading.journals)
    count = yield from _table_faults(reading.evidence.table, expected)
    return f"{count} rows, {len(reading.cells)} of them final"


def _table_faults(found: Rows, expected: Iterable[Mapping[str, Any]]) -> Generator[str, None, int]:
    """Go through both beside each other, yield what differs and return how many rows are expected.

    No row is decoded that nothing is expected for, or after more findings than are counted.
    """
    rows = iter(found)
    faults: list[str] = []
    count = 0
    for right in expected:
        left = next(rows, None) if len(faults) <= FINDINGS_COUNTED_MAX else None
        if left is not None and left != right:
            names = [name for name in left.keys() | right.keys() if left.get(name, ...) != right.get(name, ...)]
            words = f"row {count}: {', '.join(sorted(names))}: not what the journals give"
            faults.append(f"4-records/rows.parquet: {words}")
        count += 1
    if len(found) != count:
        yield f"4-records/rows.parquet: expected {count} rows by the journals, found {len(found)}"
    yield from faults
    return count


def check_results(reading: Reading) -> Checking:
    """V-18: tables, estimates, decisions and outcome derived again from the records equal the packed ones."""
    if reading.manifest is None or not reading.cells or not reading.chain.events:
        raise NotChecked("the manifest, plan or ledger could not be read")
    rows = final_rows(reading.manifest, reading.cells, reading.account, reading.journals)
    reading.results = derive(reading.manifest, rows, reading.account)
    if "7-results/results.json" not in reading.evidence.members:
        raise NotChecked("the results are absent")
    words = f"{len(reading.results.estimates)} estimates and {len(reading.results.hypotheses)} decisions derived again"
    expected = file_digest(result_pieces(reading.results))
    if file_digest(reading.evidence.results) == expected:
        return words
    size_max = 2 * expected.size + RESULTS_ROOM
    data = whole(reading.evidence.results, size_max)
    if data is None:
        yield f"7-results/results.json: expected the results of these records, found more than {size_max} bytes"
        return ""
    packed = Results.from_bytes(data, "7-results/results.json")
    yield from agree(packed, reading.results)
    return words


CHECK_FUNCTIONS: Mapping[str, Callable[[Reading], Checking]] = {
    "V-01": check_container,
    "V-02": check_members,
    "V-03": check_required,
    "V-04": check_manifest,
    "V-05": check_plan,
    "V-06": check_manifest_chain,
    "V-07": check_against,
    "V-08": check_signature,
    "V-09": check_timestamp,
    "V-10": check_ledger_chain,
    "V-11": check_ledger_head,
    "V-12": check_attempt_states,
    "V-13": check_charges,
    "V-14": check_attempt_files,
    "V-15": check_sources,
    "V-16": check_imports,
    "V-17": check_records,
    "V-18": check_results,
    "V-19": check_telemetry,
}

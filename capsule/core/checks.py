"""The checks of a verdict, one function each: a generator that yields findings and returns words for a pass.

A check that cannot be made raises `NotChecked`. Each is named by its clause in `docs/spec/verdict.md`; the order is
that of `verdict.CHECKS`, and a later check relies on what an earlier one could read.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping

from capsule.core.attempt import COMPLETED, Account, Attempt, Reconciled, Reserved, Settled, add_up, apply
from capsule.core.canonical import iterate_lines
from capsule.core.chain import Head, head_faults, read
from capsule.core.digest import digest_of
from capsule.core.errors import MalformedError
from capsule.core.evidence import NotChecked, Reading
from capsule.core.manifest import FileDigest, Manifest, cells_bytes, list_digest, read_sources
from capsule.core.plan import complaints, enumerate_cells
from capsule.core.progress import final_rows, outcome_of, processes
from capsule.core.protocol import milliseconds, reserved_ms
from capsule.core.record import read_journal
from capsule.core.results import Results, agree, derive
from capsule.core.schema import key_path
from capsule.core.table import table_rows
from capsule.core.toml import read_protocol

Checking = Generator[str, None, str]

REQUIRED_MEMBERS = (
    "0-header.json", "2-ledger.head.json", "2-ledger.jsonl", "4-records/rows.parquet", "7-results/results.json",
    "8-README/VERIFY.md",
)  # fmt: skip
JUDGED = COMPLETED | {"bad_records", "incomplete"}
"""Outcomes that follow from the journal of a process which exited with status 0."""
REQUIRED_OF_MANIFEST = ("cells.jsonl", "manifest.json", "protocol.toml", "sources.jsonl")


def check_container(reading: Reading) -> Checking:
    """V-01: the container is in its one canonical form, and every byte of the file belongs to it."""
    yield from reading.evidence.container_findings
    return f"{len(reading.evidence.members)} members in canonical form"


def check_members(reading: Reading) -> Checking:
    """V-02: every member's bytes have the digest that the member table gives."""
    yield from reading.evidence.member_findings
    if reading.evidence.identity is None:
        raise NotChecked("the member table could not be read")
    return f"every digest recomputed; identity {reading.evidence.identity}"


def check_required(reading: Reading) -> Checking:
    """V-03: nothing that the format requires is absent."""
    evidence = reading.evidence
    missing = [name for name in REQUIRED_MEMBERS if name not in evidence.members]
    numbers = sorted(evidence.generations)
    if numbers != list(range(1, len(numbers) + 1)) or not numbers:
        missing.append("1-manifest/001")
    for number, files in sorted(evidence.generations.items()):
        missing += [f"1-manifest/{number:03d}/{name}" for name in REQUIRED_OF_MANIFEST if name not in files]
    if missing:
        raise NotChecked(f"absent: {', '.join(missing)}")
    yield from ()
    return "all there"


def check_manifest(reading: Reading) -> Checking:
    """V-04: every manifest is canonical, and the protocol and lists beside it are those it names."""
    for number, files in sorted(reading.evidence.generations.items()):
        place = f"1-manifest/{number:03d}"
        if "manifest.json" not in files:
            raise NotChecked(f"{place}/manifest.json is absent")
        manifest = Manifest.from_bytes(files["manifest.json"], f"{place}/manifest.json")
        for at, words in complaints(manifest.protocol):
            raise MalformedError(f"{place}/manifest.json: protocol: {key_path(at)}: {words}")
        reading.manifests.append(manifest)
        yield from _lists_agree(manifest, files, place)
        protocol_file = files.get("protocol.toml", b"")
        if FileDigest(size=len(protocol_file), sha256=digest_of(protocol_file)) != manifest.protocol_file:
            yield f"{place}/protocol.toml: expected {manifest.protocol_file.sha256}, found {digest_of(protocol_file)}"
        elif read_protocol(protocol_file, f"{place}/protocol.toml") != manifest.protocol:
            yield f"{place}/manifest.json: its protocol is not that of protocol.toml"
    if reading.manifest is None:
        raise NotChecked("there is no manifest")
    return f"{reading.manifest.identity}"


def _lists_agree(manifest: Manifest, files: Mapping[str, bytes], place: str) -> Iterator[str]:
    expected = {"cells.jsonl": manifest.cells, "sources.jsonl": manifest.sources}
    for arm in manifest.arms:
        name = f"sources-{arm.revision}.jsonl" if arm.revision else "sources.jsonl"
        if expected.setdefault(name, arm.sources) != arm.sources:
            yield f"{place}/manifest.json: arm {arm.arm} names another list than {name}"
    for name, digest in expected.items():
        found = list_digest(files.get(name, b""))
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
    found = reading.evidence.generations[_number_in_force(reading)].get("cells.jsonl", b"")
    if found != cells_bytes(planned):
        lines = found.count(b"\n")
        yield f"expected the {len(planned)} cells that the protocol enumerates, found {lines} lines that are not those"
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
    amended = len(reading.manifests) - 1
    return f"amended {amended} times" if amended else "not amended"


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


def check_signature(reading: Reading) -> Checking:
    """V-08: a demanded signature is there. Absent signatures are named and take nothing away."""
    signed = any("manifest.json.sig" in files for files in reading.evidence.generations.values())
    words = "the manifest is signed; this version checks no signatures" if signed else "unsigned"
    yield from ()
    raise NotChecked(words, required=reading.signature_required)


def check_timestamp(reading: Reading) -> Checking:
    """V-09: a timestamp token is named."""
    stamped = any("manifest.json.tsr" in files for files in reading.evidence.generations.values())
    yield from ()
    raise NotChecked("a token is there; this version checks none" if stamped else "not timestamped", required=False)


def check_ledger_chain(reading: Reading) -> Checking:
    """V-10: the ledger is whole lines, each holding the hash of the line before it."""
    if "2-ledger.jsonl" not in reading.evidence.members:
        raise NotChecked("the ledger is absent")
    reading.chain = read(reading.evidence.ledger, "2-ledger.jsonl")
    yield from reading.chain.faults
    if reading.chain.tail:
        yield f"2-ledger.jsonl: {len(reading.chain.tail)} bytes after the last whole line"
    if not reading.chain.events:
        yield "2-ledger.jsonl: expected at least the event `opened`, found none"
    reading.account = add_up(reading.chain.events)
    return f"{len(reading.chain.events)} events"


def check_ledger_head(reading: Reading) -> Checking:
    """V-11: the head kept outside the ledger is that of the ledger, or one event behind it."""
    if "2-ledger.head.json" not in reading.evidence.members:
        raise NotChecked("the head is absent")
    head = Head.from_bytes(reading.evidence.head, "2-ledger.head.json")
    yield from head_faults(reading.chain, head)
    return f"{head.count} events by the head"


def check_attempt_states(reading: Reading) -> Checking:
    """V-12: every event is allowed by the state table, every attempt ended once, amendments name what had been seen."""
    if not reading.chain.events:
        raise NotChecked("the ledger could not be read")
    account = reading.account
    yield from account.faults
    for attempt in account.attempts.values():
        if attempt.open:
            yield f"attempt {attempt.id} has not ended: state {attempt.state}"
    if reading.manifest and account.protocol != reading.manifest.protocol.name:
        yield f"the ledger is that of {account.protocol}, the manifest that of {reading.manifest.protocol.name}"
    adopted = account.manifests
    chain = [manifest.identity for manifest in reading.manifests]
    if adopted != chain[: len(adopted)]:
        yield f"expected the manifests {chain}, found {adopted} in the ledger"
    yield from _seen_faults(reading)
    return f"{len(account.attempts)} attempts, each ended once"


def _seen_faults(reading: Reading) -> Iterator[str]:
    """Derive again what each amendment says had been seen, from the ledger as it was by then."""
    hashes = reading.chain.hashes
    for number, manifest in enumerate(reading.manifests, start=1):
        said = manifest.supersedes
        if said is None:
            continue
        count = said.ledger_events
        if count > len(hashes) or said.ledger_head != (hashes[count - 1] if count else None):
            yield f"manifest {number}: the ledger never had {count} events with the head that it names"
            continue
        account = add_up(event for event in reading.chain.events if event.seq < count)
        ended = [(attempt, attempt.end) for attempt in account.attempts.values() if attempt.end is not None]
        pilots = sum(attempt.pilot for attempt, _ in ended)
        seen = (len(ended) - pilots, pilots, sum(end.rows for _, end in ended))
        if seen != (said.attempts_seen, said.pilot_attempts_seen, said.rows_seen):
            yield f"manifest {number}: expected {seen} attempts, pilot attempts and rows seen, found other numbers"


def check_charges(reading: Reading) -> Checking:
    """V-13: charges follow from the events, every reservation is the frozen worst case and fitted the budget."""
    if reading.manifest is None or not reading.chain.events:
        raise NotChecked("the manifest or the ledger could not be read")
    manifests = {manifest.identity: manifest for manifest in reading.manifests}
    for attempt in reading.account.attempts.values():
        reserved = attempt.reserved
        if reserved is None:
            continue
        manifest = manifests.get(reserved.manifest)
        worst = reserved_ms(manifest.protocol.budget) if manifest else reserved.reserved_ms
        if reserved.reserved_ms != worst:
            yield f"{attempt.id}: expected {worst} ms reserved, found {reserved.reserved_ms}"
        yield from _charge_faults(attempt)
    yield from _budget_faults(reading, manifests)
    debited = sum(attempt.held_ms for attempt in reading.account.attempts.values())
    return f"{debited / 1000:.1f} device-seconds debited, added up again"


def _charge_faults(attempt: Attempt) -> Iterator[str]:
    """Derive a charge again from the attempt's own clocks."""
    end = attempt.end
    if isinstance(end, Settled) and attempt.intent and attempt.released and attempt.reserved:
        start, stop = attempt.intent.leased, attempt.released
        expected = len(attempt.reserved.devices) * (stop.boottime_ms - start.boottime_ms)
        charge = end.charge
        if start.boot_id != stop.boot_id or (charge.lower_ms, charge.upper_ms, charge.debited_ms) != (expected,) * 3:
            yield f"{attempt.id}: expected a charge of {expected} ms from lease to release, found {charge.debited_ms}"
    if isinstance(end, Reconciled):
        lower = attempt.heartbeat_ms * len(attempt.reserved.devices) if attempt.reserved else 0
        charge = end.charge
        if charge.debited_ms != charge.upper_ms or not lower <= charge.lower_ms <= charge.upper_ms:
            yield f"{attempt.id}: expected the upper bound debited, a lower one of at least {lower} ms, found {charge}"


def _budget_faults(reading: Reading, manifests: Mapping[str, Manifest]) -> Iterator[str]:
    """Walk the ledger once more: at every reservation, what was held before and the new one fit the budget."""
    account = Account()
    for event in reading.chain.events:
        if isinstance(event.data, Reserved) and event.data.manifest in manifests:
            own = event.data
            budget = manifests[own.manifest].protocol.budget
            limit = milliseconds(budget.pilot_device_seconds if own.pilot else budget.device_seconds)
            held = account.held_ms(own.unit, pilot=own.pilot)
            if held + own.reserved_ms > limit:
                yield f"{event.attempt}: reserved {own.reserved_ms} ms over {held} ms held, of a budget of {limit} ms"
            before = [a for a in account.attempts.values() if a.reserved and not a.refused and a.pilot == own.pilot]
            if len(before) >= budget.attempts_max:
                yield f"{event.attempt}: reserved after {len(before)} attempts, of at most {budget.attempts_max}"
        apply(account, event)


def check_attempt_files(reading: Reading) -> Checking:
    """V-14: the files of every attempt that started are those whose digests its last event recorded."""
    if not reading.chain.events:
        raise NotChecked("the ledger could not be read")
    found = dict(reading.evidence.attempt_files)
    started = 0
    for attempt in reading.account.attempts.values():
        files = found.pop(attempt.id, {})
        if attempt.end is None:
            yield from (f"3-attempts/{attempt.id}/{name}: of an attempt that never started" for name in sorted(files))
            continue
        started += 1
        if files != attempt.end.files:
            names = sorted(
                name
                for name in files.keys() | attempt.end.files.keys()
                if files.get(name) != attempt.end.files.get(name)
            )
            yield f"3-attempts/{attempt.id}: {', '.join(names)}: not the bytes that the ledger recorded"
    yield from (f"3-attempts/{name}: no attempt of the ledger" for name in found)
    return f"{started} attempts"


def check_sources(reading: Reading) -> Checking:
    """V-15: every frozen source is there, nothing else is, and each attempt ran a frozen snapshot."""
    if reading.manifest is None:
        raise NotChecked("the manifest could not be read")
    wanted: set[str] = set()
    lists = set()
    for number, files in sorted(reading.evidence.generations.items()):
        for name, data in files.items():
            if name.startswith("sources"):
                entries = read_sources(data, f"1-manifest/{number:03d}/{name}")
                wanted |= {entry.sha256 for entry in entries if entry.kind == "file"}
                lists.add(digest_of(data))
                if number == _number_in_force(reading):
                    revision = name.removeprefix("sources").removesuffix(".jsonl").removeprefix("-") or None
                    reading.sources[revision] = entries
    present = reading.evidence.sources
    yield from (f"5-sources: {digest} is frozen and absent" for digest in sorted(wanted - present))
    yield from (f"5-sources: {digest} is there and not frozen" for digest in sorted(present - wanted))
    for attempt in reading.account.attempts.values():
        if attempt.intent and not attempt.pilot and attempt.intent.snapshot not in lists:
            yield f"{attempt.id}: ran a snapshot of {attempt.intent.snapshot}, which no manifest of the chain freezes"
    return f"{len(wanted)} distinct files"


def check_imports(reading: Reading) -> Checking:
    """V-16: every module that a completed attempt imported came from the sources of its arms or a distribution."""
    if reading.manifest is None:
        raise NotChecked("the manifest could not be read")
    plan = {process.ordinal: process for process in processes(reading.cells)}
    modules = 0
    for attempt in reading.account.attempts.values():
        own = attempt.reserved is not None and attempt.reserved.manifest == reading.manifest.identity
        if not own or attempt.pilot or attempt.end is None or attempt.end.outcome not in COMPLETED:
            continue
        data = reading.evidence.provenance.get(attempt.id)
        process = plan.get(attempt.reserved.process) if attempt.reserved else None
        arms = [reading.manifest.protocol.arm(name) for name in {cell.arm for cell in process.cells}] if process else []
        if data is None:
            if any(arm.trial for arm in arms):
                yield f"{attempt.id}: expected a record of what its trial imported, found none"
            continue
        lists = [reading.sources.get(revision, []) for revision in {arm.revision for arm in arms}]
        frozen = {(entry.path, entry.sha256) for entries in lists for entry in entries}
        for line in iterate_lines(data, f"3-attempts/{attempt.id}/provenance.jsonl"):
            modules += 1
            yield from _import_faults(attempt.id, line, frozen)
    return f"{modules} imports"


def _import_faults(attempt: str, line: object, frozen: set[tuple[str, str]]) -> Iterator[str]:
    item = line if isinstance(line, dict) else {}
    module, file = item.get("module"), item.get("name")
    if item.get("origin") not in ("source", "distribution", "stdlib", "tool"):
        yield f"{attempt}: module {module} is neither frozen nor of an installed distribution"
    elif item["origin"] == "source" and (str(file), str(item.get("sha256"))) not in frozen:
        yield f"{attempt}: module {module} came from {file}, which is not frozen with those bytes for its arm"


def check_records(reading: Reading) -> Checking:
    """V-17: outcomes and rows follow from the journals; the packed table is theirs; every cell has one final row."""
    manifest = reading.manifest
    if manifest is None or not reading.cells or not reading.chain.events:
        raise NotChecked("the plan or the ledger could not be read")
    plan = {process.ordinal: process for process in processes(reading.cells)}
    for name, attempt in reading.account.attempts.items():
        if attempt.reserved is None or attempt.refused or attempt.reserved.manifest != manifest.identity:
            continue
        data = reading.evidence.journals.get(name, b"")
        process = plan.get(attempt.reserved.process)
        if process is None:
            yield f"{name}: process {attempt.reserved.process} is not planned"
            continue
        journal = read_journal(data, manifest.protocol.observations, [cell.cell for cell in process.cells])
        reading.journals[name] = journal
        if attempt.end is None:
            continue
        if attempt.end.rows != len(journal.rows):
            yield f"{name}: expected {attempt.end.rows} rows by the ledger, found {len(journal.rows)}"
        outcome, status = attempt.end.outcome, attempt.exit.exit_code if attempt.exit else None
        if outcome in JUDGED and outcome_of(process, journal)[0] != outcome:
            yield f"{name}: the ledger says {outcome}, the journal {outcome_of(process, journal)[0]}"
        if outcome in JUDGED and isinstance(attempt.end, Settled) and status != 0:
            yield f"{name}: the ledger says {outcome} of a process with exit status {status}"
    if isinstance(reading.evidence.table, str):
        raise NotChecked(f"the table was not read: {reading.evidence.table}")
    expected = list(table_rows(manifest, reading.cells, reading.account, reading.journals))
    yield from _table_faults(reading.evidence.table, expected)
    return f"{len(expected)} rows, {len(reading.cells)} of them final"


def _table_faults(found: list[dict[str, object]], expected: list[dict[str, object]]) -> Iterator[str]:
    if len(found) != len(expected):
        yield f"4-records/rows.parquet: expected {len(expected)} rows by the journals, found {len(found)}"
    for number, (left, right) in enumerate(zip(found, expected, strict=False)):
        if left != right:
            names = [name for name in left.keys() | right.keys() if left.get(name, ...) != right.get(name, ...)]
            yield f"4-records/rows.parquet: row {number}: {', '.join(sorted(names))}: not what the journals give"


def check_results(reading: Reading) -> Checking:
    """V-18: tables, estimates, decisions and outcome derived again from the records equal the packed ones."""
    if reading.manifest is None or not reading.cells or not reading.chain.events:
        raise NotChecked("the manifest, plan or ledger could not be read")
    rows = final_rows(reading.manifest, reading.cells, reading.account, reading.journals)
    reading.results = derive(reading.manifest, rows, reading.account)
    if "7-results/results.json" not in reading.evidence.members:
        raise NotChecked("the results are absent")
    packed = Results.from_bytes(reading.evidence.results, "7-results/results.json")
    yield from agree(packed.to_json(), reading.results.to_json())
    return f"{len(reading.results.estimates)} estimates and {len(reading.results.hypotheses)} decisions derived again"


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
}

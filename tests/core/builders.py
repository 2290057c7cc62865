"""Builds small honest histories in memory: a manifest with its files, a ledger, journals, a table and results.

Nothing here is a shortcut through the code under test: lines are written as the formats say, and a test may change any
part before it is judged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from capsule.core.account import Account, add_up
from capsule.core.attempt import (
    OF_DEVICE,
    OF_EXIT_ZERO,
    OF_SIGKILL,
    Charge,
    Clock,
    DeviceClean,
    EventName,
    Exit,
    Heartbeat,
    HeldUnknown,
    Intent,
    ManifestAdopted,
    Opened,
    Reconciled,
    Refused,
    Reserved,
    Settled,
    Spawned,
    TreeEmpty,
)
from capsule.core.chain import Head, encode, read
from capsule.core.digest import digest_of
from capsule.core.evidence import Evidence
from capsule.core.manifest import (
    ArmSource,
    FileDigest,
    Manifest,
    SourceEntry,
    Supersedes,
    cells_bytes,
    list_digest,
    sources_bytes,
)
from capsule.core.plan import Cell, enumerate_cells
from capsule.core.progress import final_rows, processes
from capsule.core.protocol import Protocol, reserved_ms
from capsule.core.record import Journal, read_journal
from capsule.core.results import derive
from capsule.core.schema import Model
from capsule.core.table import table_rows, telemetry_rows
from capsule.core.telemetry import READINGS, Sample, summarize, worst
from capsule.core.toml import read_protocol

PROTOCOL = """\
schema = "capsule.protocol/1"
name = "sums"
title = "Is the builtin sum faster?"
question = "Does sum take less time than a loop?"

[[arms]]
name = "loop"
trial = "trial:measure"

[[arms]]
name = "builtin"
trial = "trial:measure"
parameters = { method = "builtin", scale = 1.50 }

[[workloads]]
name = "small"
parameters = { numbers = 20 }

[[workloads]]
name = "large"

[design]
seeds = [5, 3, 4]
order = "abba"
order_seed = 7
isolation = "start"

[[observations]]
name = "seconds"
type = "float64"
minimum = 0
replay = { rule = "never", reason = "a time is measured" }

[[observations]]
name = "total"
type = "uint64"
replay = { rule = "exact" }

[[observations]]
name = "note"
type = "text"
optional = true
replay = { rule = "exact" }

[[gates]]
name = "summed"
observation = "total"
rule = "at_least"
limit = 10
on_failure = "exclude"

[[estimates]]
name = "speed-up"
rule = "log_ratio"
observation = "seconds"
numerator = "loop"
denominator = "builtin"
confidence = 0.95

[[hypotheses]]
name = "faster"
claim = "The builtin takes less time."
rule = "interval_above"
estimate = "speed-up"
threshold = 0

[[hypotheses]]
name = "right"
claim = "Every sum is large."
rule = "gates_pass"
gates = ["summed"]

[analysis]
missing = "withhold"
multiplicity = "none"

[budget]
device = "cpu"
device_seconds = 300
pilot_device_seconds = 100
wall_limit_seconds = 8
kill_grace_seconds = 1
release_grace_seconds = 1
exclusivity = "best_effort"

[retry]
exit_nonzero = 1

[environment]
python = ">=3.11"
"""

SOURCES = {"trial.py": b"def measure(cell): ...\n", "data/numbers.txt": b"1 2 3\n"}
BOOT = "0f0e0d0c-0b0a-4908-8706-050403020100"


def protocol(text: str = PROTOCOL) -> Protocol:
    """Read a protocol as `freeze` does."""
    return read_protocol(text.encode(), "sums.toml")


def edited(*changes: tuple[str, str], text: str = PROTOCOL) -> str:
    """Return the text with parts replaced, each of which must be there."""
    for before, after in changes:
        assert before in text, before
        text = text.replace(before, after)
    return text


def appended(text: str, *, to: str = PROTOCOL) -> str:
    """Return the protocol with more tables at its end."""
    return f"{to}\n{text}"


def source_entries(contents: Mapping[str, bytes] = SOURCES) -> list[SourceEntry]:
    """Return the list of frozen sources."""
    return [
        SourceEntry(
            path=path,
            kind="file",
            mode="0644",
            size=len(data),
            sha256=digest_of(data),
            target=None,
            blob=None,
            notes=(),
        )
        for path, data in sorted(contents.items())
    ]


def generation(text: str = PROTOCOL, supersedes: Supersedes | None = None) -> dict[str, bytes]:
    """Return the files of one frozen manifest."""
    return dict(_generation(text, supersedes))


@lru_cache(maxsize=64)
def _generation(text: str, supersedes: Supersedes | None) -> dict[str, bytes]:
    frozen = protocol(text)
    files = {
        "cells.jsonl": cells_bytes(enumerate_cells(frozen)),
        "protocol.toml": text.encode(),
        "sources.jsonl": sources_bytes(source_entries()),
    }
    for arm in frozen.arms:
        if arm.revision:
            files[f"sources-{arm.revision}.jsonl"] = sources_bytes(source_entries({"trial.py": arm.revision.encode()}))
    names = {arm.name: f"sources-{arm.revision}.jsonl" if arm.revision else "sources.jsonl" for arm in frozen.arms}
    manifest = Manifest(
        schema_="capsule.manifest/1",
        protocol=frozen,
        protocol_file=FileDigest(size=len(text.encode()), sha256=digest_of(text.encode())),
        cells=list_digest(files["cells.jsonl"]),
        sources=list_digest(files["sources.jsonl"]),
        arms=tuple(
            ArmSource(arm=arm.name, revision=arm.revision, sources=list_digest(files[names[arm.name]]))
            for arm in frozen.arms
        ),
        lock=None,
        supersedes=supersedes,
    )
    return {**files, "manifest.json": manifest.to_bytes()}


def manifest_of(files: Mapping[str, bytes]) -> Manifest:
    """Return the manifest among the files of a generation."""
    return _read(files["manifest.json"])


@lru_cache(maxsize=64)
def _read(data: bytes) -> Manifest:
    return Manifest.from_bytes(data, "manifest.json")


@lru_cache(maxsize=64)
def _planned(data: bytes) -> tuple[Cell, ...]:
    return tuple(enumerate_cells(_read(data).protocol))


def observed(cell: Cell, ratio: float = 2.0) -> dict[str, Any]:
    """Return an honest row: the loop takes `ratio` times as long, a little different in every start."""
    seconds = (ratio if cell.arm == "loop" else 1.0) * (1 + cell.seed / 100 + (cell.arm == "loop") * cell.seed / 1000)
    return {"cell": cell.cell, "seconds": seconds, "total": 190 + cell.seed}


def journal_bytes(rows: Iterable[Mapping[str, Any]], *, ended: bool = True) -> bytes:
    """Return the bytes of a journal."""
    lines = [*rows, *([{"end": True}] if ended else [])]
    return b"".join(json.dumps(line, sort_keys=True).encode() + b"\n" for line in lines)


PROVENANCE = [
    {"module": "trial", "origin": "source", "name": "trial.py", "sha256": digest_of(SOURCES["trial.py"])},
    {"module": "json", "origin": "stdlib", "name": "json/__init__.py", "sha256": digest_of(b"json")},
]


def lines_bytes(items: Iterable[Any]) -> bytes:
    """Return canonical JSON lines, written by the standard library (the values here are ASCII)."""
    return b"".join(json.dumps(item, sort_keys=True, separators=(",", ":")).encode() + b"\n" for item in items)


def exit_of(outcome: str, status: int = 0) -> Exit:
    """Return the exit that an outcome is the end of; `status` is the exit status of a process that ended itself."""
    cause, signal, code = "exited", None, status
    if outcome == "exit_nonzero":
        code = status or 1
    elif outcome == "signalled":
        cause, signal = "signalled", 11
    elif outcome in OF_SIGKILL:
        cause, signal = "signalled", 9
    elif outcome not in OF_EXIT_ZERO | OF_DEVICE:
        cause, signal = outcome, 15
    failed = outcome == "exec_failed"
    return Exit(
        wait_status=None if failed else signal if signal else code << 8,
        exit_code=None if failed or signal else code,
        signal=None if failed else signal,
        core_dumped=False,
        cause=cause,
        evidence="as it was",
        user_ms=1,
        system_ms=1,
        max_rss_bytes=1,
    )


def sample(at_ms: int, device: str = "cpu", **changes: Any) -> Sample:
    """Return a sample of a device that did not say more than its energy."""
    energy_mj = at_ms * 300
    missing = {name: "not supported" for name in READINGS if name != "energy_mj" and changes.get(name) is None}
    plain: dict[str, Any] = {
        "exclusivity": "exclusive", "words": "nobody else", "own": (3,), "foreign": (), "energy_mj": energy_mj,
        "missing": missing,
    }  # fmt: skip
    return Sample(at_ms=at_ms, device=device, **{**plain, **changes})


def silent(at_ms: int, device: str = "cpu", **changes: Any) -> Sample:
    """Return the sample of a device that did not answer."""
    plain: dict[str, Any] = {"exclusivity": "unverifiable", "words": "no answer", "own": (), "foreign": ()}
    return Sample(at_ms=at_ms, device=device, **{**plain, "error": "timed out", **changes})


@dataclass
class History:
    """A ledger being written, and the files of its attempts."""

    generations: list[dict[str, bytes]] = field(default_factory=lambda: [generation()])
    lines: list[bytes] = field(default_factory=list)
    journals: dict[str, bytes] = field(default_factory=dict)
    provenance: dict[str, bytes] = field(default_factory=dict)
    telemetry: dict[str, bytes] = field(default_factory=dict)
    devices: tuple[str, ...] = ("cpu",)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    now_ms: int = 1000
    attempts: int = 0

    @property
    def manifest(self) -> Manifest:
        """The manifest in force."""
        return manifest_of(self.generations[-1])

    @property
    def cells(self) -> list[Cell]:
        """The planned cells."""
        return list(_planned(self.generations[-1]["manifest.json"]))

    def clock(self) -> Clock:
        """Return the next reading of the clocks, ten milliseconds later."""
        self.now_ms += 10
        seconds, milli = divmod(self.now_ms, 1000)
        minutes, seconds = divmod(seconds, 60)
        return Clock(
            realtime=f"2030-01-01T{minutes // 60:02}:{minutes % 60:02}:{seconds:02}.{milli:03}Z",
            boottime_ms=self.now_ms,
            monotonic_ms=self.now_ms,
            boot_id=BOOT,
        )

    def event(self, name: EventName, attempt: str | None, data: Model) -> None:
        """Append an event with the hash of the line before it."""
        previous = digest_of(self.lines[-1]) if self.lines else None
        self.lines.append(encode(len(self.lines), previous, name, attempt, self.clock(), data))

    def opened(self) -> History:
        """Open the ledger under the first manifest."""
        self.event("opened", None, Opened(format="capsule.ledger/1", protocol=self.manifest.protocol.name))
        self.event("manifest_adopted", None, ManifestAdopted(manifest=self.manifest.identity, supersedes=None))
        return self

    def amended(self, text: str, reason: str = "the large workload was too large") -> History:
        """Amend the protocol, saying what the ledger shows, and adopt the amendment."""
        chain = read(self.ledger, "ledger")
        ended = [attempt for attempt in add_up(chain.events).attempts.values() if attempt.end]
        said = Supersedes(
            manifest=self.manifest.identity,
            reason=reason,
            ledger_events=chain.head.count,
            ledger_head=chain.head.sha256,
            attempts_seen=sum(not attempt.pilot for attempt in ended),
            pilot_attempts_seen=sum(attempt.pilot for attempt in ended),
            rows_seen=sum(attempt.end.rows for attempt in ended if attempt.end),
        )
        self.generations.append(generation(text, said))
        adopted = ManifestAdopted(manifest=self.manifest.identity, supersedes=said.manifest)
        self.event("manifest_adopted", None, adopted)
        return self

    def reserve(self, process: int, *, pilot: bool = False) -> str:
        """Reserve the next attempt."""
        self.attempts += 1
        name = f"a{self.attempts:06d}"
        data = Reserved(
            manifest=self.manifest.identity, process=process, pilot=pilot, from_frozen=False, unit="cpu",
            devices=self.devices, reserved_ms=reserved_ms(self.manifest.protocol.budget),
        )  # fmt: skip
        self.event("reserved", name, data)
        return name

    def refuse(self, process: int, reason: str = "busy", *, reserved: bool = False) -> str:
        """Refuse an attempt, before it was reserved or after."""
        if reserved:
            name = self.reserve(process)
        else:
            self.attempts += 1
            name = f"a{self.attempts:06d}"
        words = "another attempt holds the device"
        data = Refused(manifest=self.manifest.identity, process=process, pilot=False, reason=reason, words=words)
        self.event("refused", name, data)
        return name

    def start(self, name: str) -> Clock:
        """Lease and spawn a reserved attempt; return the reading from which it is charged."""
        leased = self.clock()
        intent = Intent(
            leased=leased, supervisor_pid=2, argv=("python",), device_baseline={"memory": 0},
            snapshot=digest_of(self.generations[-1]["sources.jsonl"]),
        )  # fmt: skip
        self.event("intent", name, intent)
        self.event("spawned", name, Spawned(pid=3, start_ticks=4))
        self.event("heartbeat", name, Heartbeat(elapsed_ms=5))
        return leased

    def attempt(
        self,
        process: int,
        outcome: str = "completed",
        *,
        journal: bytes | None = None,
        pilot: bool = False,
        ratio: float = 2.0,
        status: int = 0,
        samples: Callable[[int], Sequence[Sample]] | None = None,
        lasts_ms: int = 0,
    ) -> str:
        """Run an attempt that is observed to its end; `samples` are given the time of its lease."""
        name = self.reserve(process, pilot=pilot)
        leased = self.start(name)
        self.now_ms += lasts_ms
        self.event("exit", name, exit_of(outcome, status))
        self.event("tree_empty", name, TreeEmpty(killed=0, level="subreaper"))
        released = self.clock()
        self.event("device_clean", name, DeviceClean(clean=True, released=released, evidence="idle"))
        charged = len(self.devices) * (released.boottime_ms - leased.boottime_ms)
        taken = None if samples is None else samples(leased.boottime_ms)
        rows, files = self._finish(name, process, journal, ratio, taken)
        span = leased.boottime_ms, released.boottime_ms
        telemetry = {device: summarize(device, taken, *span) for device in self.devices} if taken else {}
        charge = Charge(lower_ms=charged, upper_ms=charged, debited_ms=charged, observed=True)
        settled = Settled(
            outcome=outcome, evidence="as it was", charge=charge, overrun_ms=0, suspended_ms=0, rows=rows, files=files,
            telemetry=telemetry, exclusivity=worst(telemetry.values()),
        )  # type: ignore[arg-type]  # fmt: skip
        self.event("settled", name, settled)
        return name

    def lose(
        self, process: int, outcome: str = "lost", *, rows: int = 1, samples: Sequence[Sample] | None = None
    ) -> str:
        """Run an attempt whose end nobody observed, after it wrote some rows."""
        name = self.reserve(process)
        self.start(name)
        self.event("held_unknown", name, HeldUnknown(evidence="the supervisor is gone"))
        planned = processes(self.cells)[process].cells[:rows]
        count, files = self._finish(name, process, journal_bytes(map(observed, planned), ended=False), 2.0, samples)
        charge = Charge(lower_ms=5, upper_ms=90, debited_ms=90, observed=False)
        reconciled = Reconciled(outcome=outcome, evidence="gone", charge=charge, rows=count, files=files)  # type: ignore[arg-type]
        self.event("reconciled", name, reconciled)
        return name

    def _finish(
        self, name: str, process: int, journal: bytes | None, ratio: float, samples: Sequence[Sample] | None
    ) -> tuple[int, dict[str, FileDigest]]:
        planned = processes(self.cells)[process].cells
        if journal is None:
            journal = journal_bytes(observed(cell, ratio) for cell in planned)
        self.journals[name] = journal
        self.provenance[name] = lines_bytes(PROVENANCE)
        self.files[name] = {
            "environment.json": b"{}", "journal.jsonl": journal, "provenance.jsonl": self.provenance[name],
            "stderr": b"", "stdout": b"\x96\r",
        }  # fmt: skip
        if samples is not None:
            self.telemetry[name] = lines_bytes(item.to_json() for item in samples)
            self.files[name]["telemetry.jsonl"] = self.telemetry[name]
        names = [cell.cell for cell in planned]
        rows = len(read_journal(journal, self.manifest.protocol.observations, names).rows)
        return rows, {
            file: FileDigest(size=len(data), sha256=digest_of(data)) for file, data in self.files[name].items()
        }

    @property
    def ledger(self) -> bytes:
        """The bytes of the ledger."""
        return b"".join(line + b"\n" for line in self.lines)

    @property
    def account(self) -> Account:
        """The ledger added up."""
        return add_up(read(self.ledger, "ledger").events)

    def read_journals(self) -> dict[str, Journal]:
        """Read the journals of the manifest in force."""
        plan = processes(self.cells)
        result = {}
        account = self.account
        for name, data in self.journals.items():
            reserved = account.attempts[name].reserved
            if reserved is not None and reserved.manifest == self.manifest.identity:
                names = [cell.cell for cell in plan[reserved.process].cells]
                result[name] = read_journal(data, self.manifest.protocol.observations, names)
        return result

    def evidence(self) -> Evidence:
        """Pack: everything as a reader of the capsule hands it over."""
        account, journals = self.account, self.read_journals()
        rows = final_rows(self.manifest, self.cells, account, journals)
        evidence = Evidence(
            generations=dict(enumerate(deepcopy(self.generations), start=1)),
            ledger=self.ledger,
            head=Head(count=len(self.lines), sha256=digest_of(self.lines[-1])).to_bytes(),
            attempt_files={
                name: {file: FileDigest(size=len(data), sha256=digest_of(data)) for file, data in files.items()}
                for name, files in self.files.items()
            },
            journals=dict(self.journals),
            provenance=dict(self.provenance),
            telemetry=dict(self.telemetry),
            telemetry_table=list(telemetry_rows(self.telemetry.items())),
            sources=self._frozen(),
            table=list(table_rows(self.manifest, self.cells, account, journals)),
            results=derive(self.manifest, rows, account).to_bytes(),
        )
        return sealed(evidence)

    def _frozen(self) -> set[str]:
        lists = (data for files in self.generations for name, data in files.items() if name.startswith("sources"))
        return {json.loads(line)["sha256"] for data in lists for line in data.splitlines()}


def sealed(evidence: Evidence) -> Evidence:
    """Give the evidence the member names and an identity that follow from its contents."""
    names = {"0-header.json", "8-README/VERIFY.md"}
    for number, files in evidence.generations.items():
        names |= {f"1-manifest/{number:03d}/{name}" for name in files}
    for attempt, digests in evidence.attempt_files.items():
        names |= {f"3-attempts/{attempt}/{name}" for name in digests}
    names |= {f"5-sources/{digest}" for digest in evidence.sources}
    contents = {
        "2-ledger.jsonl": evidence.ledger,
        "2-ledger.head.json": evidence.head,
        "4-records/rows.parquet": evidence.table,
        "4-records/telemetry.parquet": evidence.telemetry_table,
        "7-results/results.json": evidence.results,
    }
    evidence.members = names | {name for name, content in contents.items() if content}
    evidence.identity = None
    evidence.identity = "sha256:" + hashlib.sha256(repr(comparable(evidence)).encode()).hexdigest()
    return evidence


def comparable(evidence: Evidence) -> list[tuple[str, Any]]:
    """Return all of the evidence in an order of its own, to tell whether two are the same."""
    values = {key: value for key, value in vars(evidence).items() if key != "identity"}
    return [(key, _ordered(value)) for key, value in values.items()]


def _ordered(value: Any) -> Any:
    if isinstance(value, dict):
        return sorted((str(key), _ordered(item)) for key, item in value.items())
    return sorted(value) if isinstance(value, set) else value


def rechained(ledger: bytes, change: Callable[[list[dict[str, Any]]], None]) -> bytes:
    """Change the events of a ledger and chain them anew, as someone would who rebuilds everything."""
    events = [json.loads(line) for line in ledger.splitlines()]
    change(events)
    previous, result = None, b""
    for number, event in enumerate(events):
        line = lines_bytes([{**event, "seq": number, "prev": previous}]).rstrip(b"\n")
        previous, result = digest_of(line), result + line + b"\n"
    return result


def with_ledger(evidence: Evidence, ledger: bytes) -> Evidence:
    """Return the evidence with another ledger and the head that fits it."""
    lines = ledger.splitlines()
    evidence.ledger = ledger
    evidence.head = Head(count=len(lines), sha256=digest_of(lines[-1]) if lines else None).to_bytes()
    return sealed(evidence)


CONTAMINATED: dict[str, Any] = {"exclusivity": "contaminated", "words": "in use by pid 77", "foreign": (77,)}


def honest(ratio: float = 2.0) -> History:
    """A whole history: a pilot, a refusal, a lost start and its repetition, a failure that was retried; samples."""
    history = History().opened()
    history.attempt(0, pilot=True, ratio=ratio)
    history.attempt(0, ratio=ratio, samples=lambda at: [sample(at + 5), sample(at + 30, throttle=4)])
    history.refuse(1)
    history.lose(1, samples=[sample(9)])
    history.attempt(1, ratio=ratio, samples=lambda at: [sample(at + 5), sample(at + 9, **CONTAMINATED)])
    history.attempt(2, "exit_nonzero", journal=b"", status=11)
    history.attempt(2, ratio=ratio)
    return history

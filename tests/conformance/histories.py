"""Draws whole honest histories from a seed: protocol, ledger, journals, table and results, as a capsule's members.

A drawn history is consistent throughout, so any verifier must find it intact; what it observed is not kind: NaNs,
infinities, missing rows, faulty lines, lost attempts, retries, pilots, refusals, amendments, a budget that ends early.
"""

from __future__ import annotations

import json
import random
import struct
from typing import Any

from capsule.core.account import Account, apply
from capsule.core.attempt import COMPLETED, DATA, Clock, Event, EventName
from capsule.core.canonical import canonical, join_lines
from capsule.core.digest import digest_of
from capsule.core.errors import ProtocolError
from capsule.core.manifest import ArmSource, FileDigest, Manifest, SourceEntry, Supersedes, cells_bytes, list_digest
from capsule.core.plan import enumerate_cells
from capsule.core.progress import Process, deciding_attempt, final_rows, outcome_of, processes, tries
from capsule.core.protocol import Observation, Protocol, reserved_ms
from capsule.core.record import Journal, read_journal
from capsule.core.results import derive
from capsule.core.table import TELEMETRY_COLUMNS, table_columns, table_rows, telemetry_rows
from capsule.core.telemetry import READINGS, Sample, summarize, worst
from capsule.core.toml import read_protocol
from tests.golden.make import Members, rechain
from tests.tables import table_bytes

BOOT = "00000000-0000-0000-0000-000000000001"
REVISION = "12" * 20
SOURCES = {"study.toml": b"name = 'study'\n", "trial.py": b"def measure(cell): ...\n"}
TIMES = ["2030-01-31T12:00:00Z", "2026-01-01T02:00:00+02:00"]
"""Times at or after the one at which everything here happens."""
REVISED = {"trial.py": b"def measure(cell): return 1\n"}
FAILED = ["exit_nonzero", "signalled", "wall_limit", "device_lost", "contaminated", "unverifiable", "oom_host"]
LOST = ["lost", "host_crash"]
EXITS: list[tuple[str, str, list[int]]] = [
    ("exit_nonzero", "exited", [1 << 8, 255 << 8]), ("signalled", "signalled", [15, 11 | 0x80]),
    ("oom_cgroup", "signalled", [9]), ("oom_host", "signalled", [9 | 0x80]), ("sigkill_unattributed", "signalled", [9]),
    ("fork_storm", "fork_storm", [9, 15]), ("device_suspect", "exited", [0, 3 << 8]), ("config_changed", "exited", [0]),
    ("wall_limit", "wall_limit", [0, 15, 1 << 8]), ("user", "user", [2, 130 << 8]), ("lease_lost", "lease_lost", [9]),
    ("device_lost", "exited", [0]), ("device_mismatch", "exited", [7 << 8]),
    ("leaked_descendants", "exited", [0]), ("provenance", "exited", [0]), ("source_changed", "exited", [0]),
]  # fmt: skip
"""Outcomes that neither a journal nor samples decide, each with its exit's cause and wait statuses that go with it."""


def draw(seed: int) -> Members:
    """Return the members of an honest capsule."""
    return _History(random.Random(seed)).members()


def protocol_text(chance: random.Random, title: str) -> str:
    """Return a protocol that may or may not be allowed."""
    pick = chance.choice
    isolation = pick(["start", "workload", "cell"])
    arms = ["once", "twice", "thrice"][: chance.randint(2, 3)]
    lines = ['schema = "capsule.protocol/1"', 'name = "study"', f"title = {json.dumps(title)}", 'question = "Is it?"']
    lines.append(f"replay_sample = {chance.randint(1, 3)}" if chance.random() < 0.3 else "")
    for arm in arms:
        command = isolation == "cell" and chance.random() < 0.3
        lines += ["[[arms]]", f'name = "{arm}"', 'command = ["./x", "é"]' if command else 'trial = "trial:measure"']
        lines.append("parameters = { n = 1, x = 2.50, on = true, t = ['a', 1e-3] }" if chance.random() < 0.4 else "")
        if isolation == "cell" and chance.random() < 0.2:
            lines.append(f'revision = "{REVISION}"')
    workloads = ["small", "large"][: chance.randint(1, 2)]
    for workload in workloads:
        lines += ["[[workloads]]", f'name = "{workload}"', pick(["", "parameters = { size = 10 }"])]
    if chance.random() < 0.4:
        lines += ["[[factors]]", 'name = "depth"', f"levels = {pick(['[1, 2]', '[0.5, 1]', '[true, 2]'])}"]
    seeds = chance.sample(range(9), chance.randint(1, 3))
    starts = chance.randint(2 if len(seeds) == 1 else 1, 3)
    lines += ["[design]", f"seeds = {seeds}", f"starts = {starts}", f"blocks = {chance.randint(1, 2)}"]
    lines += [f'order = "{pick(["abba", "shuffled", "listed"])}"', f"order_seed = {chance.randint(0, 99)}"]
    lines.append(f'isolation = "{isolation}"')
    kind = pick(["float64", "float64", "float32", "float16", "int64", "uint64"])
    lines += ["[[observations]]", 'name = "amount"', f'type = "{kind}"', pick(["", "minimum = -5", "maximum = 1e6"])]
    lines.append('replay = { rule = "relative", tolerance = 1e-6 }')
    lines.append(pick(["", "optional = true"]))
    for number in range(chance.randint(0, 3)):
        other = pick(["float64", "float32", "float16", "int64", "uint64", "bool", "text"])
        lines += ["[[observations]]", f'name = "o{number}"', f'type = "{other}"', 'replay = { rule = "exact" }']
        lines.append(pick(["", "optional = true", 'unit = "s"']))
    gates, estimates = chance.randint(0, 2), chance.randint(0, 2)
    for number in range(gates):
        rule = pick(["at_most", "at_least", "above", "below", "equal", "not_equal", "finite"])
        lines += ["[[gates]]", f'name = "g{number}"', 'observation = "amount"', f'rule = "{rule}"']
        lines.append("" if rule == "finite" else f"limit = {pick(['0', '2.5', '1e2', '-0.0', '4'])}")
        lines.append(f'on_failure = "{pick(["record", "exclude", "stop"])}"')
    for number in range(estimates):
        rule = pick(["mean", "difference", "log_ratio"])
        lines += ["[[estimates]]", f'name = "e{number}"', f'rule = "{rule}"', 'observation = "amount"']
        lines += ['numerator = "twice"', f"confidence = {pick(['0.95', '0.9', '0.5', '0.990'])}"]
        lines.append("" if rule == "mean" else 'denominator = "once"')
    rules = ["gates_pass"] * (gates > 0) + ["interval_above", "interval_below", "interval_within"] * (estimates > 0)
    for number in range(chance.randint(1, 3) if rules else 0):
        rule = pick(rules)
        lines += ["[[hypotheses]]", f'name = "h{number}"', 'claim = "So it is."', f'rule = "{rule}"']
        lines.append(pick(["", "", "workloads = ['small']"]))
        lines.append("gates = ['g0']" if rule == "gates_pass" else 'estimate = "e0"')
        if rule == "interval_within":
            lines.append("low = -1\nhigh = 1_000.5")
        elif rule != "gates_pass":
            lines.append(f"threshold = {pick(['0', '0.5', '1e1'])}")
    if chance.random() < 0.2:
        lines += ["[[exclusions]]", 'arm = "thrice"', pick(["", 'workload = "small"']), 'reason = "It is slow."']
    lines += ["[analysis]", f'missing = "{pick(["withhold", "drop_start"])}"', f"starts_min = {chance.randint(1, 3)}"]
    lines += [f'multiplicity = "{pick(["none", "bonferroni"])}"', "[budget]"]
    lines += [f'device = "{pick(["any", "cpu", "gpu"])}"', f"devices = {pick([1, 1, 2])}"]
    lines += [f"device_seconds = {pick(['1e5', '9_000', '40.5'])}", "pilot_device_seconds = 100"]
    lines += ["wall_limit_seconds = 15.0001", "kill_grace_seconds = 1", "release_grace_seconds = 1e0"]
    lines += [f'exclusivity = "{pick(["best_effort", "best_effort", "required"])}"']
    lines += [pick(["", 'on_contamination = "stop"', 'on_contamination = "finish"']), pick(["", "processes_max = 9"])]
    lines += [pick(["", f"not_after = {pick(TIMES)}"]), "[retry]"]
    lines += [f"{name} = {chance.randint(0, 2)}" for name in chance.sample([*FAILED, "incomplete", "trial_error"], 2)]
    lines += ["[environment]", 'python = ">=3.11"']
    return "\n".join(lines) + "\n"


class _History:
    """Writes one history event by event."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.noise = chance.choice([0, 0, 1])  # whether what is observed is odd
        self.events: list[dict[str, Any]] = []
        self.clock = 1000
        self.files: Members = {}
        self.attempts = 0
        self.account = Account()

    def members(self) -> Members:
        manifest = self.freeze(None)
        self.write("opened", None, {"format": "capsule.ledger/1", "protocol": "study"})
        self.write("manifest_adopted", None, {"manifest": manifest.identity, "supersedes": None})
        if self.chance.random() < 0.2:
            self.write("sealed", None, {"size": 2, "sha256": digest_of(b"{\xff"), "hex": "7bff"})
        if self.chance.random() < 0.3:
            self.run(manifest, self.chance.random())
            manifest = self.freeze(manifest)
            said = manifest.supersedes
            assert said is not None
            adopted = {"manifest": manifest.identity, "supersedes": said.manifest}
            self.write("manifest_adopted", None, adopted)
        self.run(manifest, self.chance.choice([1, 1, 1, 0.5]))
        return self.pack(manifest)

    def freeze(self, before: Manifest | None) -> Manifest:
        """Freeze a protocol that is allowed, as the first manifest or an amendment."""
        number = 2 if before else 1
        while True:
            text = protocol_text(self.chance, f"Study {number} é\u2028").encode()
            try:
                protocol = read_protocol(text, "study.toml")
                break
            except ProtocolError:
                continue
        lists: dict[str | None, bytes] = {None: self.sources(SOURCES)}
        if any(arm.revision for arm in protocol.arms):
            lists[REVISION] = self.sources(REVISED)
        cells = cells_bytes(enumerate_cells(protocol))
        supersedes = None
        if before is not None:
            ended = [e for e in self.events if e["event"] in ("settled", "reconciled")]
            pilots = {e["attempt"] for e in self.events if e["event"] == "reserved" and e["data"]["pilot"]}
            supersedes = Supersedes(
                manifest=before.identity, reason="It was too short.", ledger_events=len(self.events),
                ledger_head=digest_of(canonical(rechain(self.events)[-1])),
                attempts_seen=sum(e["attempt"] not in pilots for e in ended),
                pilot_attempts_seen=sum(e["attempt"] in pilots for e in ended),
                rows_seen=sum(e["data"]["rows"] for e in ended),
            )  # fmt: skip
        manifest = Manifest(
            schema_="capsule.manifest/1", protocol=protocol, cells=list_digest(cells),
            protocol_file=FileDigest(size=len(text), sha256=digest_of(text)), sources=list_digest(lists[None]),
            arms=tuple(
                ArmSource(arm=arm.name, revision=arm.revision, sources=list_digest(lists[arm.revision]))
                for arm in protocol.arms
            ),
            lock=None, supersedes=supersedes,
        )  # fmt: skip
        place = f"1-manifest/{number:03d}"
        self.files |= {f"{place}/sources{f'-{key}' if key else ''}.jsonl": data for key, data in lists.items()}
        self.files |= {f"{place}/cells.jsonl": cells, f"{place}/protocol.toml": text}
        self.files[f"{place}/manifest.json"] = manifest.to_bytes()
        self.lists = lists
        return manifest

    def sources(self, files: dict[str, bytes]) -> bytes:
        self.files |= {f"5-sources/{digest_of(data)[7:]}": data for data in files.values()}
        link = SourceEntry(
            path="zlink", kind="link", mode=None, size=8, sha256=digest_of(b"trial.py"), target="trial.py", blob=None,
            notes=(),
        )  # fmt: skip
        entries = [
            SourceEntry(
                path=path, kind="file", mode="0644", size=len(data), sha256=digest_of(data), target=None, blob=None,
                notes=("untracked",),
            )
            for path, data in sorted(files.items())
        ]  # fmt: skip
        return join_lines(entry.to_json() for entry in [*entries, link])

    def now(self, passed: int = 0) -> dict[str, Any]:
        self.clock += passed
        return {
            "boot_id": BOOT, "boottime_ms": self.clock, "monotonic_ms": self.clock,
            "realtime": "2026-01-01T00:00:00.000Z",
        }  # fmt: skip

    def write(self, event: EventName, attempt: str | None, data: dict[str, Any]) -> None:
        at = self.now()
        parsed = DATA[event].model_validate_json(json.dumps(data))
        apply(self.account, Event(len(self.events), event, attempt, Clock.model_validate(at), parsed))
        self.events.append({"event": event, "attempt": attempt, "at": at, "data": data})

    def run(self, manifest: Manifest, share: float) -> None:
        """Run a share of what is left, with whatever goes wrong."""
        cells = enumerate_cells(manifest.protocol)
        chance = self.chance
        for process in processes(cells):
            if not process.cells or chance.random() > share:
                continue
            if chance.random() < 0.1:
                self.attempt(manifest, process, True)
            while True:
                if deciding_attempt(manifest, tries(self.account, manifest.identity, process.ordinal)):
                    break
                if not self.attempt(manifest, process, False):
                    return

    def attempt(self, manifest: Manifest, process: Process, pilot: bool) -> bool:
        """Write one attempt; false where the budget does not cover it."""
        chance, protocol = self.chance, manifest.protocol
        reserved = reserved_ms(protocol.budget)
        self.attempts += 1
        name = f"a{self.attempts:06d}"
        limit = 100_000 if pilot else int(float(protocol.budget.device_seconds) * 1000)
        unit = protocol.budget.device if protocol.budget.device in ("cpu", "gpu") else chance.choice(["cpu", "gpu"])
        count = protocol.budget.devices
        own = {"manifest": manifest.identity, "process": process.ordinal, "pilot": pilot}
        refused = {**own, "reason": "budget", "words": "too little"}
        if self.account.held_ms(unit, pilot=pilot) + reserved > limit:
            self.write("refused", name, refused)
            return False
        devices = [f"{unit}-{number}" for number in range(count)]
        wanted = {"from_frozen": False, "unit": unit, "devices": devices, "reserved_ms": reserved}
        self.write("reserved", name, {**own, **wanted})
        if chance.random() < 0.05:
            self.write("refused", name, refused | {"reason": "busy"})
            return True
        leased = self.now()
        revision = protocol.arm(process.cells[0].arm).revision
        intent = {"leased": leased, "supervisor_pid": 1, "argv": ["python"], "device_baseline": {"used": 1, "x": None}}
        self.write("intent", name, {**intent, "snapshot": digest_of(self.lists[revision])})
        usage = {"user_ms": 1, "system_ms": 1, "max_rss_bytes": 1, "evidence": ""}
        if chance.random() < 0.03 * self.noise:
            none = {"wait_status": None, "exit_code": None, "signal": None, "core_dumped": False}
            self.write("exit", name, {**none, **usage, "cause": "exec_failed"})
            self.settle(name, leased, protocol, devices, {"outcome": "exec_failed", "rows": 0, "files": {}})
            return True
        self.write("spawned", name, {"pid": 2, "start_ticks": 3})
        cells = [cell.cell for cell in process.cells]
        journal = journal_bytes(chance, protocol.observations, cells, self.noise)
        found = read_journal(journal, protocol.observations, cells)
        provenance = self.provenance(self.files_of(revision))
        self.files[f"3-attempts/{name}/journal.jsonl"] = journal
        self.files[f"3-attempts/{name}/provenance.jsonl"] = provenance
        self.files[f"3-attempts/{name}/stderr"] = b"\x96\r\n"
        place = f"3-attempts/{name}/"
        files = {
            key.removeprefix(place): {"size": len(data), "sha256": digest_of(data)}
            for key, data in self.files.items()
            if key.startswith(place)
        }
        end = {"evidence": "", "rows": len(found.rows), "files": files}
        self.clock += chance.choice([50, 50, 50, 700, 5000])
        self.write("heartbeat", name, {"elapsed_ms": 40})
        if chance.random() < 0.2 * self.noise:
            self.write("held_unknown", name, {"evidence": "gone"})
            bounds = {"lower_ms": 40 * count, "upper_ms": 90 * count, "debited_ms": 90 * count}
            charge = {**bounds, "observed": chance.random() < 0.5}
            if chance.random() < 0.5:
                samples = self.samples(devices[:1], leased["boottime_ms"], self.clock)
                self.telemetry(name, samples, files, chance.choice([b"", b'{"at_ms":1']))
            self.write("reconciled", name, {**end, "outcome": chance.choice(LOST), "charge": charge})
            return True
        outcome, cause, status = outcome_of(process, found)[0], "exited", 0
        if chance.random() < 0.15 * self.noise:
            outcome, cause, statuses = chance.choice(EXITS)
            status = chance.choice(statuses)
        if cause not in ("exited", "signalled"):
            self.write("stopping", name, {"cause": cause, "evidence": ""})
        by = status & 0x7F or None
        exited = {"wait_status": status, "exit_code": None if by else status >> 8, "signal": by}
        self.write("exit", name, {**exited, **usage, "core_dumped": status & 0x80 != 0, "cause": cause})
        if outcome == "leaked_descendants":
            self.write("stopping", name, {"cause": outcome, "evidence": ""})
        self.settle(name, leased, protocol, devices, {**end, "outcome": outcome})
        if chance.random() < 0.05:
            self.write("correction", name, {"debited_ms": 7, "reason": "seen later"})
        return True

    def settle(
        self, name: str, leased: dict[str, Any], protocol: Protocol, devices: list[str], end: dict[str, Any]
    ) -> None:
        """Write an observed end, sometimes long after the time that was reserved, by what was seen of the devices."""
        count, reserved = len(devices), reserved_ms(protocol.budget)
        self.write("tree_empty", name, {"killed": 0, "level": "subreaper"})
        late = self.chance.random() < 0.05 * self.noise
        released = self.now(reserved if late else self.chance.randint(0, 20))
        self.write("device_clean", name, {"clean": not late, "released": released, "evidence": ""})
        spent = count * (released["boottime_ms"] - leased["boottime_ms"])
        charge = {"lower_ms": spent, "upper_ms": spent, "debited_ms": spent, "observed": True}
        span = leased["boottime_ms"], released["boottime_ms"]
        samples: list[Sample] = []
        if devices[0].startswith("gpu") and self.chance.random() < 0.7:
            samples = self.samples(devices, *span)
            self.telemetry(name, samples, end["files"])
        found = {device: summarize(device, samples, *span) for device in devices} if samples else {}
        exclusivity = worst(found.values())
        budget = protocol.budget
        if exclusivity != "exclusive":
            required = budget.exclusivity == "required"
            may = required or (exclusivity == "contaminated" and budget.on_contamination == "stop")
            if (required and end["outcome"] in COMPLETED) or (may and self.chance.random() < 0.3):
                end["outcome"] = exclusivity
        extra = {"overrun_ms": max(0, spent - reserved), "suspended_ms": 0, "evidence": "", "exclusivity": exclusivity}
        summaries = {device: item.to_json() for device, item in found.items()}
        self.write("settled", name, {**end, **extra, "charge": charge, "telemetry": summaries})

    def telemetry(self, name: str, samples: list[Sample], files: dict[str, Any], tail: bytes = b"") -> None:
        """Leave samples among the files of an attempt."""
        data = join_lines(item.to_json() for item in samples) + tail
        self.files[f"3-attempts/{name}/telemetry.jsonl"] = data
        files["telemetry.jsonl"] = {"size": len(data), "sha256": digest_of(data)}

    def samples(self, devices: list[str], leased: int, released: int) -> list[Sample]:
        """Draw what devices were seen doing, more or less throughout."""
        chance = self.chance
        seen = [device for device in devices if chance.random() < 0.9]
        odd = chance.choice([0, 0, 0, 0.05, 0.3])
        stride = chance.choice([400, 500, 1400]) if chance.random() < 0.8 else 2100
        at, energy, samples = leased + chance.choice([0, 20, -5]), chance.randrange(10**9), []
        while at < released + chance.choice([0, 30]):
            for device in seen:
                energy += chance.choice([0, 1000, 1000]) if chance.random() > odd / 4 else -5
                samples.append(sample(chance, device, max(at, 0), max(energy, 0), odd))
            at += chance.randrange(stride // 2, stride)
        return samples

    def files_of(self, revision: str | None) -> dict[str, bytes]:
        return REVISED if revision else SOURCES

    def provenance(self, files: dict[str, bytes]) -> bytes:
        trial = {"module": "trial", "name": "trial.py", "origin": "source", "sha256": digest_of(files["trial.py"])}
        library = {"module": "json", "name": "json/__init__.py", "origin": "stdlib", "sha256": digest_of(b"")}
        return join_lines([library, trial])

    def pack(self, manifest: Manifest) -> Members:
        events = rechain(self.events)
        ledger = join_lines(events)
        account = self.account
        cells = enumerate_cells(manifest.protocol)
        journals: dict[str, Journal] = {}
        for name, attempt in account.attempts.items():
            if attempt.reserved and not attempt.refused and attempt.reserved.manifest == manifest.identity:
                own = next(item for item in processes(cells) if item.ordinal == attempt.reserved.process)
                data = self.files.get(f"3-attempts/{name}/journal.jsonl", b"")
                names = [cell.cell for cell in own.cells]
                journals[name] = read_journal(data, manifest.protocol.observations, names)
        rows = table_rows(manifest, cells, account, journals)
        results = derive(manifest, final_rows(manifest, cells, account, journals), account)
        count = len(events) - (self.chance.random() < 0.2)
        head = {"count": count, "sha256": digest_of(canonical(events[count - 1]))}
        return {
            **self.files,
            "2-ledger.jsonl": ledger,
            "2-ledger.head.json": canonical(head),
            "4-records/rows.parquet": table_bytes(table_columns(manifest.protocol.observations), rows),
            **telemetry_table(self.files, account),
            "7-results/results.json": results.to_bytes(),
            "8-README/VERIFY.md": b"Look.\n",
        }


def telemetry_table(members: Members, account: Account) -> Members:
    """Return the table of the samples of an account's attempts, if there are any."""
    names = [(name, f"3-attempts/{name}/telemetry.jsonl") for name in account.attempts]
    rows = list(telemetry_rows((name, members[place]) for name, place in names if place in members))
    return {"4-records/telemetry.parquet": table_bytes(TELEMETRY_COLUMNS, rows)} if rows else {}


def sample(chance: random.Random, device: str, at_ms: int, energy_mj: int, odd: float) -> Sample:
    """Draw one sample; `odd` is how likely it is that something is the matter."""
    kind = chance.choice(["contaminated", "unverifiable", "error", "driver"]) if chance.random() < odd else "exclusive"
    if kind == "error":
        return Sample(
            at_ms=at_ms, device=device, exclusivity="unverifiable", words="no answer", own=(), foreign=(),
            missing=chance.choice([{}, {"energy_mj": "hung"}]), error="timed out é", lost=chance.random() < 0.3,
        )  # fmt: skip
    readings: dict[str, Any] = {name: chance.choice([0, 7, 2**53 - 1, None]) for name in READINGS[:-2]}
    readings |= {"energy_mj": energy_mj if chance.random() > 0.1 else None, "layout": chance.choice([None, "whole"])}
    readings |= {"throttle": chance.choice([0, 4, 0x25, 0x800, None]), "driver": "2" if kind == "driver" else "1"}
    exclusivity = "exclusive" if kind == "driver" else kind
    return Sample(
        at_ms=at_ms, device=device, exclusivity=exclusivity, words=f"{kind} at {at_ms}", own=(2, 5)[: at_ms % 3],
        foreign=(77, 78) if kind == "contaminated" else (), **readings,
        missing={name: chance.choice(["not supported", ""]) for name, found in readings.items() if found is None},
    )  # type: ignore[arg-type]  # fmt: skip


def value(chance: random.Random, kind: str, noise: int) -> str:
    """Return the JSON text of a value that a column of this type may or may not hold."""
    pick = chance.choice
    if chance.random() < 0.01 * noise:
        return pick(['"1"', "null", "[1]", "1e999", "true", "{}", '"\\ud800"', "99999999999999999999999", "0.1"])
    if kind == "bool":
        return pick(["true", "false"])
    if kind == "text":
        return pick(['""', '"é\\n"', '"\\u0000"', '"NaN"', json.dumps("x" * chance.randint(0, 99))])
    if kind == "int64":
        return pick(["1", "-5", "9007199254740993", '"-9223372036854775808"', '"7"', "100"])
    if kind == "uint64":
        return pick(["1", "4", '"18446744073709551615"', "9007199254740993", "100"])
    odd = ['"NaN"', "NaN", '"Infinity"', "-Infinity", "-0", '"-0"', "5e-324", "1e-7", "-1.5", "0", "60000", "1e308"]
    width = {"float64": 16, "float32": 8, "float16": 4}[kind]
    bits = int.from_bytes(chance.randbytes(width // 2)) | {16: 0x7FF << 52, 8: 0xFF << 23, 4: 0x1F << 10}[width]
    if chance.random() < 0.1 * noise:
        return pick([*odd, f'"NaN:{bits:0{width}x}"', f'"NaN:{0x7FF0000000000001:016x}"'])
    return repr(struct.unpack("<f", struct.pack("<f", chance.uniform(1, 9)))[0]) if chance.random() < 0.5 else "2"


def journal_bytes(chance: random.Random, columns: tuple[Observation, ...], cells: list[str], noise: int) -> bytes:
    """Return the journal of a process that may not have written what it should."""
    lines = []
    for cell in cells:
        fields = [f'"cell":"{cell}"'] if len(cells) > 1 or chance.random() < 0.7 else []
        there = [column for column in columns if not column.optional or chance.random() > 0.2 * noise]
        fields += [f'"{column.name}": {value(chance, column.type, noise)}' for column in there]
        if chance.random() < 0.02 * noise:
            fields = [f'"cell":"{cell}"', pick_error(chance)]
        if chance.random() >= 0.01 * noise:
            lines.append("{" + ", ".join(fields) + "}")
        if chance.random() < 0.01 * noise:
            lines.append(chance.choice(["", " \t", "{", "[]", '{"cell":"c999999"}', lines[-1] if lines else ""]))
    end = chance.choice(["", "\n"]) if chance.random() < 0.03 * noise else '{"end":true}\n'
    return "".join(line + "\n" for line in lines).encode() + end.encode()


def pick_error(chance: random.Random) -> str:
    """Return the field of an error."""
    return chance.choice(['"error":"ValueError"', '"error":null', '"error":{"a":[1]}'])


def protocol_of(members: Members) -> Protocol:
    """Return the protocol in force of a drawn history."""
    last = max(name for name in members if name.endswith("/manifest.json"))
    return Manifest.from_bytes(members[last], last).protocol

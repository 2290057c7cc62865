"""The verdict: each check finds what it promises to find, and removing evidence never improves anything."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
from builders import (
    History,
    comparable,
    edited,
    generation,
    honest,
    journal_bytes,
    lines_bytes,
    manifest_of,
    observed,
    rechained,
    sealed,
    with_ledger,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.core.attempt import ManifestAdopted
from capsule.core.chain import Head
from capsule.core.checks import CHECK_FUNCTIONS
from capsule.core.digest import digest_of
from capsule.core.errors import WORDS_MAX
from capsule.core.evidence import Evidence
from capsule.core.judge import judge
from capsule.core.manifest import FileDigest, SourceEntry, sources_bytes
from capsule.core.signing import Trust
from capsule.core.verdict import CHECKS, Check, Verdict, integrity_of

HONEST = {ratio: honest(ratio).evidence() for ratio in (2.0, 0.5)}
MANIFEST = manifest_of(generation()).identity
OTHER = digest_of(b"something else")
ORDER = {"broken": 0, "incomplete": 1, "intact": 2}


def copy(ratio: float = 2.0) -> Evidence:
    """Return honest evidence that a test may change."""
    return deepcopy(HONEST[ratio])


def statuses(verdict: Verdict) -> dict[str, str]:
    """Return the status of every check that did not pass, but those about what was not asked for."""
    quiet = {"V-07", "V-08", "V-09"}
    return {
        c.id: c.status for c in verdict.checks if c.status != "passed" and (c.id not in quiet or c.status == "failed")
    }


@pytest.mark.parametrize(("ratio", "outcome"), [(2.0, "supported"), (0.5, "refuted")])
def test_honest_evidence_is_intact_whatever_it_says(ratio: float, outcome: str) -> None:
    """V-01 to V-19 pass for an honest capsule; a refuted claim in it is as intact as a supported one."""
    verdict = judge(copy(ratio), against=[MANIFEST, str(copy(ratio).identity)])
    assert statuses(verdict) == {}
    assert (verdict.integrity, verdict.outcome, verdict.signed) == ("intact", outcome, False)
    assert [(check.id, check.name) for check in verdict.checks] == list(CHECKS)
    assert [item.hypothesis for item in verdict.hypotheses] == ["faster", "right"]
    assert Verdict.from_bytes(verdict.to_bytes(), "v") == verdict


def test_an_honest_capsule_whose_budget_ran_out_is_intact() -> None:
    """V-17 V-18: cells that were not run are in the table with their reason, and the outcome is inconclusive."""
    history = History().opened()
    history.attempt(0)
    history.refuse(1, "budget")
    verdict = judge(history.evidence())
    assert (verdict.integrity, verdict.outcome) == ("intact", "inconclusive")


def test_an_amended_capsule_is_intact() -> None:
    """V-06 V-12: a chain of manifests whose amendment says what had been seen is intact, under either identity."""
    history = History().opened()
    first = history.manifest.identity
    history.attempt(0)
    history.attempt(1, pilot=True)
    history.amended(edited(("numbers = 20", "numbers = 30")))
    for process in range(3):
        history.attempt(process)
    verdict = judge(history.evidence(), against=[first, history.manifest.identity])
    assert (verdict.integrity, verdict.outcome) == ("intact", "supported")
    words = {check.id: check.words for check in verdict.checks}
    assert words["V-06"] == "amended after 16 rows of 1 attempts had been seen: the large workload was too large"
    assert "manifest 1" in words["V-07"]


def test_what_is_said_of_amendments_has_a_bound() -> None:
    """V-06: reasons as long as they may be do not make the verdict longer than its words may be."""
    history = History().opened()
    for numbers in (30, 40):
        history.amended(edited(("numbers = 20", f"numbers = {numbers}")), reason="why " * 2_500)
    verdict = judge(history.evidence())
    assert verdict.amended.startswith("amended 2 times; after 0 rows of 0 attempts had been seen: why why")
    assert len(verdict.amended) <= WORDS_MAX


def test_amendments_that_nothing_ran_under_are_intact() -> None:
    """V-12: manifests that the ledger has not adopted yet may follow those that it has, in their order."""
    history = History().opened()
    history.attempt(0)
    for numbers in (30, 40):
        history.amended(edited(("numbers = 20", f"numbers = {numbers}")))
        history.lines.pop()
        assert judge(history.evidence()).integrity == "intact"
    history.event("manifest_adopted", None, ManifestAdopted(manifest=history.manifest.identity, supersedes=MANIFEST))
    assert statuses(judge(history.evidence()))["V-12"] == "failed"


def test_no_evidence_is_no_capsule() -> None:
    """V-02 V-03: an empty capsule is not intact, nothing can be checked in it, and no error is raised."""
    verdict = judge(Evidence())
    assert (verdict.integrity, verdict.outcome, verdict.manifest) == ("incomplete", "withheld", None)
    assert {check.id for check in verdict.checks if check.status == "passed"} == {"V-01"}
    only_ledger = judge(Evidence(ledger=honest().ledger, members={"2-ledger.jsonl"}))
    assert only_ledger.integrity != "intact"


def drop(*names: str) -> Callable[[Evidence], None]:
    """Return a change that takes members away."""

    def change(evidence: Evidence) -> None:
        for name in names:
            room, _, file = name.partition("/")
            if room.isdigit():
                del evidence.generations[int(room)][file]
            else:
                setattr(evidence, name, b"")

    return change


def file(number: int, name: str, data: bytes) -> Callable[[Evidence], None]:
    """Return a change that replaces a file of a manifest."""
    return lambda evidence: evidence.generations[number].update({name: data})


def events(change: Callable[[list[dict[str, Any]]], None]) -> Callable[[Evidence], None]:
    """Return a change of the ledger that chains everything anew."""
    return lambda evidence: with_ledger(evidence, rechained(evidence.ledger, change)) and None


def event(events: list[dict[str, Any]], name: str, attempt: str) -> dict[str, Any]:
    """Return the data of an event of an attempt."""
    return next(e["data"] for e in events if e["event"] == name and e["attempt"] == attempt)  # type: ignore[no-any-return]


def set_event(name: str, attempt: str, **values: Any) -> Callable[[Evidence], None]:
    """Return a change of one event's data, with everything chained anew."""
    return events(lambda all_: event(all_, name, attempt).update(values))


SAMPLES = "4-records/telemetry.parquet"
CHARGED = {"lower_ms": 1, "upper_ms": 1, "debited_ms": 1, "observed": True}
HALF = {"lower_ms": 5, "upper_ms": 90, "debited_ms": 5, "observed": False}

TAMPERED: list[tuple[str, Callable[[Evidence], Any], str]] = [
    ("V-01", lambda e: e.container_findings.append("C-02: bytes after the end"), "failed"),
    ("V-02", lambda e: e.member_findings.append("a digest differs"), "failed"),
    ("V-03", lambda e: e.members.discard("8-README/VERIFY.md"), "not_checked"),
    ("V-03", drop("1/cells.jsonl"), "not_checked"),
    ("V-03", drop("1/protocol.toml"), "not_checked"),
    ("V-03", lambda e: e.generations.update({3: e.generations.pop(1)}), "not_checked"),
    ("V-03", drop("results"), "not_checked"),
    ("V-04", drop("1/manifest.json"), "not_checked"),
    ("V-04", file(1, "manifest.json", b"{}"), "failed"),
    ("V-04", drop("1/sources.jsonl"), "failed"),
    ("V-04", file(1, "protocol.toml", edited(("limit = 10", "limit = 11")).encode()), "failed"),
    ("V-04", file(1, "protocol.toml", generation()["protocol.toml"] + b"#"), "failed"),
    ("V-05", file(1, "cells.jsonl", b""), "failed"),
    ("V-05", file(1, "cells.jsonl", b"".join(generation()["cells.jsonl"].splitlines(keepends=True)[::-1])), "failed"),
    ("V-10", lambda e: setattr(e, "ledger", e.ledger.replace(b'"pilot":true', b'"pilot":false')), "failed"),
    ("V-10", lambda e: setattr(e, "ledger", e.ledger + b"{"), "failed"),
    ("V-10", drop("ledger"), "not_checked"),
    ("V-11", drop("head"), "not_checked"),
    ("V-11", lambda e: setattr(e, "head", Head(count=3, sha256=OTHER).to_bytes()), "failed"),
    ("V-11", lambda e: setattr(e, "ledger", b"".join(e.ledger.splitlines(keepends=True)[:-1])), "failed"),
    ("V-12", events(lambda all_: all_.pop()), "failed"),
    ("V-12", events(lambda all_: all_.pop(3)), "failed"),
    ("V-12", events(lambda all_: all_[0]["data"].update(protocol="other")), "failed"),
    ("V-12", events(lambda all_: all_[1]["data"].update(manifest=OTHER)), "failed"),
    ("V-13", set_event("reserved", "a000002", reserved_ms=9999), "failed"),
    ("V-13", set_event("settled", "a000002", charge=CHARGED), "failed"),
    ("V-13", set_event("settled", "a000006", charge=CHARGED), "failed"),
    ("V-13", set_event("reconciled", "a000004", charge=HALF), "failed"),
    ("V-13", set_event("heartbeat", "a000004", elapsed_ms=500), "failed"),
    ("V-14", lambda e: e.attempt_files["a000002"].update(stderr=FileDigest(size=1, sha256=OTHER)), "failed"),
    ("V-14", lambda e: e.attempt_files["a000002"].pop("stdout"), "failed"),
    ("V-14", lambda e: e.attempt_files.pop("a000006"), "failed"),
    ("V-14", lambda e: e.attempt_files.update(a000003={"stdout": FileDigest(size=0, sha256=OTHER)}), "failed"),
    ("V-14", lambda e: e.attempt_files.update(a000099={"stdout": FileDigest(size=0, sha256=OTHER)}), "failed"),
    ("V-15", lambda e: e.sources.pop(), "failed"),
    ("V-15", lambda e: e.sources.add(OTHER), "failed"),
    ("V-15", set_event("intent", "a000002", snapshot=OTHER), "failed"),
    ("V-16", lambda e: e.provenance.pop("a000002"), "failed"),
    ("V-16", lambda e: e.provenance.update(a000002=lines_bytes([[1]])), "failed"),
    ("V-16", lambda e: e.provenance.update(a000002=lines_bytes([{"module": "x", "origin": "unknown"}])), "failed"),
    ("V-16", lambda e: e.provenance.update(
        a000002=lines_bytes([{"module": "trial", "origin": "source", "name": "trial.py", "sha256": OTHER}])), "failed"),
    ("V-16", lambda e: e.provenance.update(
        a000002=lines_bytes([{"module": "t", "origin": "source", "name": ["trial.py"], "sha256": None}])), "failed"),
    ("V-16", lambda e: e.provenance.update(a000002=b"{"), "failed"),
    ("V-17", lambda e: e.journals.pop("a000002"), "failed"),
    ("V-17", lambda e: e.table.pop(), "failed"),
    ("V-17", lambda e: e.table.pop(0), "failed"),
    ("V-17", lambda e: e.table[3].update(seconds=1.0), "failed"),
    ("V-17", lambda e: e.table[3].pop("note"), "failed"),
    ("V-17", lambda e: e.table.append(e.table[0]), "failed"),
    ("V-17", lambda e: setattr(e, "table", "4-records/rows.parquet: not a table"), "failed"),
    ("V-17", lambda e: (setattr(e, "table", ""), e.members.discard("4-records/rows.parquet")), "not_checked"),
    ("V-17", set_event("settled", "a000002", rows=7), "failed"),
    ("V-17", set_event("settled", "a000002", outcome="trial_error"), "failed"),
    ("V-17", set_event("settled", "a000002", outcome="bad_records"), "failed"),
    ("V-17", set_event("settled", "a000002", outcome="incomplete"), "failed"),
    ("V-17", set_event("exit", "a000002", wait_status=256, exit_code=1), "failed"),
    ("V-17", set_event("exit", "a000002", wait_status=9, exit_code=None, signal=9, cause="signalled"), "failed"),
    ("V-17", set_event("settled", "a000006", outcome="oom_cgroup"), "failed"),
    ("V-17", set_event("reserved", "a000002", process=7), "failed"),
    ("V-18", drop("results"), "not_checked"),
    ("V-18", lambda e: setattr(e, "results", e.results.replace(b'"supported"', b'"refuted"')), "failed"),
    ("V-18", lambda e: setattr(e, "results", e.results + b"\n"), "failed"),
    ("V-18", lambda e: setattr(e, "results", HONEST[0.5].results), "failed"),
    ("V-19", lambda e: e.telemetry.pop("a000002"), "failed"),
    ("V-19", lambda e: e.telemetry.update(a000004=b"{}\n"), "failed"),
    ("V-19", lambda e: e.telemetry_table.pop(), "failed"),
    ("V-19", lambda e: e.telemetry_table.append(e.telemetry_table[0]), "failed"),
    ("V-19", lambda e: setattr(e, "telemetry_table", "4-records/telemetry.parquet: not a table"), "failed"),
    ("V-19", lambda e: (setattr(e, "telemetry_table", []), e.members.discard(SAMPLES)), "not_checked"),
    ("V-19", set_event("settled", "a000005", exclusivity="exclusive"), "failed"),
    ("V-19", set_event("settled", "a000006", exclusivity="exclusive"), "failed"),
    ("V-19", set_event("settled", "a000005", telemetry={}), "failed"),
    ("V-19", set_event("settled", "a000002", outcome="contaminated"), "failed"),
    ("V-19", drop("ledger"), "not_checked"),
]  # fmt: skip


@pytest.mark.parametrize(("check", "change", "status"), TAMPERED, ids=[f"{t[0]}-{n}" for n, t in enumerate(TAMPERED)])
def test_each_check_finds_what_it_promises(check: str, change: Callable[[Evidence], Any], status: str) -> None:
    """V-01 to V-19: a check finds what it promises, whatever was rebuilt to hide it, and the outcome is withheld."""
    evidence = copy()
    members = set(evidence.members)
    change(evidence)
    verdict = judge(sealed(evidence) if evidence.members == members else evidence)
    assert statuses(verdict).get(check) == status, [(c.id, c.words, c.findings) for c in verdict.checks]
    assert verdict.integrity != "intact"
    assert verdict.outcome == "withheld"
    assert verdict.hypotheses == ()


def test_what_is_expected_must_be_there() -> None:
    """V-07: every identity that the caller names must be the capsule's or a manifest's of its chain."""
    verdict = judge(copy(), against=[MANIFEST, OTHER])
    assert verdict.integrity == "broken"
    check = verdict.checks[6]
    assert (check.id, check.status) == ("V-07", "failed")
    assert check.findings[0].startswith(f"expected {OTHER}, found {MANIFEST}")
    assert judge(Evidence(), against=[OTHER]).integrity == "broken"
    assert judge(copy()).checks[6].words == "no identity was given to check against"


def test_a_demanded_signature_is_required() -> None:
    """V-08 V-09: unsigned takes nothing away; a signature that was demanded and is not there leaves it incomplete."""
    verdict = judge(copy())
    assert (verdict.integrity, verdict.signed, verdict.checks[7].words) == ("intact", False, "unsigned")
    verdict = judge(copy(), trust=Trust(demand="any"))
    assert (verdict.integrity, verdict.outcome) == ("incomplete", "withheld")
    assert verdict.checks[7].words.endswith("found: unsigned")
    signed = copy()
    signed.generations[1].update({"manifest.json.sig": b"x", "manifest.json.tsr": b"y"})
    assert statuses(judge(sealed(signed))) == {"V-08": "failed", "V-09": "failed"}


def test_a_chain_of_manifests_cannot_be_cut_or_joined() -> None:
    """M-08 V-06: an amendment without the manifest before it, after another one or of another name is found."""
    history = History().opened()
    history.attempt(0)
    history.amended(edited(("numbers = 20", "numbers = 30")))
    history.attempt(0)
    evidence = history.evidence()
    evidence.generations = {1: evidence.generations[2]}
    assert statuses(judge(sealed(evidence)))["V-06"] == "failed"
    evidence = history.evidence()
    evidence.generations = {1: evidence.generations[1], 2: generation(edited(("numbers = 20", "numbers = 40")))}
    assert statuses(judge(sealed(evidence)))["V-06"] == "failed"
    renamed = History().opened().amended(edited(('name = "sums"', 'name = "other"')))
    assert statuses(judge(renamed.evidence()))["V-06"] == "failed"


@pytest.mark.parametrize("key", ["attempts_seen", "pilot_attempts_seen", "rows_seen", "ledger_events", "ledger_head"])
def test_an_amendment_cannot_deny_what_had_been_seen(key: str) -> None:
    """M-08 V-12: what an amendment says had been seen by then is derived again from the ledger."""
    history = History().opened()
    history.attempt(0)
    history.attempt(0, pilot=True)
    history.amended(edited(("numbers = 20", "numbers = 30")))
    said = json.loads(history.generations[1]["manifest.json"])["supersedes"]
    assert (said["attempts_seen"], said["pilot_attempts_seen"], said["rows_seen"]) == (1, 1, 16)
    assert judge(history.evidence()).integrity == "intact"
    changed = deepcopy(history)
    lied = manifest_of(history.generations[1]).supersedes
    assert lied is not None
    value: Any = OTHER if key == "ledger_head" else getattr(lied, key) - 1
    changed.generations[1] = generation(edited(("numbers = 20", "numbers = 30")), lied.model_copy(update={key: value}))
    adopted = changed.manifest.identity
    changed.lines = rechained(changed.ledger, lambda all_: all_[-1]["data"].update(manifest=adopted)).splitlines()
    found = statuses(judge(changed.evidence()))
    assert found == {"V-12": "failed"}


def test_the_budget_holds_over_the_whole_ledger() -> None:
    """V-13: a reservation that did not fit the frozen budget, or came after too many attempts, is found."""
    small = edited(
        ("device_seconds = 300", "device_seconds = 10.2"), ("pilot_device_seconds = 100", "pilot_device_seconds = 0")
    )
    history = History([generation(small)]).opened()
    for process in range(3):
        history.attempt(process)
    assert judge(history.evidence()).integrity == "intact"
    history.attempt(0)
    history.attempt(0)
    found = judge(history.evidence())
    assert statuses(found) == {"V-13": "failed"}
    assert "over" in found.checks[12].findings[0]
    piloted = History([generation(small)]).opened()
    piloted.attempt(0, pilot=True)
    assert statuses(judge(piloted.evidence())) == {"V-13": "failed"}
    few = History([generation(edited(('device = "cpu"', 'device = "cpu"\nattempts_max = 2')))]).opened()
    few.attempt(0)
    few.refuse(1, reserved=True)
    few.attempt(1)
    assert judge(few.evidence()).integrity == "intact"
    few.attempt(2)
    assert "reserved after 2 attempts, of at most 2" in judge(few.evidence()).checks[12].findings[0]


def test_arms_of_different_revisions_cannot_stand_in_for_each_other() -> None:
    """V-16: a module of one arm's revision, imported by an attempt of the other arm, is found."""
    revision = "b" * 40
    text = edited(('name = "builtin"\n', f'name = "builtin"\nrevision = "{revision}"\n'), ('"start"', '"cell"'))
    history = History([generation(text)]).opened()
    arms = [cell.arm for cell in history.cells]
    loop, builtin = arms.index("loop"), arms.index("builtin")

    def imported(process: int, digest: str) -> str | None:
        trial = deepcopy(history)
        name = trial.attempt(process)
        line = {"module": "trial", "origin": "source", "name": "trial.py", "sha256": digest}
        evidence = trial.evidence()
        evidence.provenance[name] = lines_bytes([line])
        return statuses(judge(sealed(evidence))).get("V-16")

    own, other = digest_of(b"def measure(cell): ...\n"), digest_of(revision.encode())
    assert imported(loop, own) is None
    assert imported(loop, other) == "failed"
    assert imported(builtin, other) is None
    assert imported(builtin, own) == "failed"


def test_a_manifest_that_could_not_have_been_frozen_is_refused() -> None:
    """V-04: a manifest whose protocol contradicts itself is a finding, and no later check stumbles over it."""
    value = json.loads(generation()["manifest.json"])
    for change in (
        lambda p: p["hypotheses"][0].update(estimate="none"),
        lambda p: p["estimates"][0].update(confidence="0.99999999999999999999"),
        lambda p: p["budget"].update(device_seconds="1e300"),
        lambda p: p["design"].update(starts=1_000_000, blocks=1_000_000),
        lambda p: p["workloads"][1].update(name="small"),
    ):
        hostile = deepcopy(value)
        change(hostile["protocol"])
        evidence = copy()
        evidence.generations[1]["manifest.json"] = lines_bytes([hostile])[:-1]
        verdict = judge(sealed(evidence))
        assert statuses(verdict)["V-04"] == "failed"
        assert verdict.integrity == "broken"


def test_cells_that_the_protocol_does_not_plan_are_never_used() -> None:
    """V-05: a list of cells of someone's own choice is a finding, and rows are judged by the plan all the same."""
    evidence = copy()
    cells = [json.loads(line) for line in evidence.generations[1]["cells.jsonl"].splitlines()]
    cells[0].update(workload="elsewhere", seed=99, process=77, arm="nobody")
    data = lines_bytes(cells)
    evidence.generations[1]["cells.jsonl"] = data
    manifest = json.loads(evidence.generations[1]["manifest.json"])
    manifest["cells"] = {"count": len(cells), "sha256": digest_of(data)}
    evidence.generations[1]["manifest.json"] = lines_bytes([manifest])[:-1]
    found = statuses(judge(sealed(evidence)))
    assert found["V-05"] == "failed"
    assert "V-04" not in found


def test_findings_are_capped_and_counted() -> None:
    """V-01: fifty findings of a check are shown, all are counted."""
    evidence = copy()
    evidence.container_findings = [f"finding {number}" for number in range(1000)]
    check = judge(evidence).checks[0]
    assert (len(check.findings), check.words) == (50, "1000 findings")


# Removing evidence never improves a verdict.

Change = Callable[[Evidence, st.DataObject], None]


def _bytes(data: bytes, draw: st.DataObject) -> bytes:
    """Change bytes anywhere: a bit, a line dropped, doubled or moved, a cut, or nothing left."""
    how = draw.draw(st.sampled_from(["bit", "drop", "double", "swap", "cut", "empty"]))
    lines = data.splitlines(keepends=True)
    one, other = (draw.draw(st.integers(0, max(len(lines) - 1, 0))) for _ in range(2))
    if how == "bit" and data:
        changed = bytearray(data)
        at = draw.draw(st.integers(0, len(data) * 8 - 1))
        changed[at // 8] ^= 1 << at % 8
        return bytes(changed)
    if how == "cut":
        return data[: draw.draw(st.integers(0, len(data)))]
    if how == "empty" or not lines:
        return b""
    if how == "drop":
        del lines[one]
    elif how == "double":
        lines.insert(other, lines[one])
    else:
        lines[one], lines[other] = lines[other], lines[one]
    return b"".join(lines)


def _attribute(name: str) -> Change:
    return lambda evidence, draw: setattr(evidence, name, _bytes(getattr(evidence, name), draw))


def _generation_file(evidence: Evidence, draw: st.DataObject) -> None:
    files = evidence.generations[draw.draw(st.sampled_from(sorted(evidence.generations)))]
    name = draw.draw(st.sampled_from(sorted(files)))
    if draw.draw(st.booleans()):
        files[name] = _bytes(files[name], draw)
    else:
        del files[name]


def _journal(evidence: Evidence, draw: st.DataObject) -> None:
    name = draw.draw(st.sampled_from(sorted(evidence.journals)))
    data = evidence.journals[name] = _bytes(evidence.journals[name], draw)
    evidence.attempt_files[name]["journal.jsonl"] = FileDigest(size=len(data), sha256=digest_of(data))


def _attempt(evidence: Evidence, draw: st.DataObject) -> None:
    name = draw.draw(st.sampled_from(sorted(evidence.attempt_files)))
    for held in (evidence.attempt_files, evidence.journals, evidence.provenance, evidence.telemetry):
        held.pop(name, None)


def _provenance(evidence: Evidence, draw: st.DataObject) -> None:
    name = draw.draw(st.sampled_from(sorted(evidence.provenance)))
    data = evidence.provenance[name] = _bytes(evidence.provenance[name], draw)
    evidence.attempt_files[name]["provenance.jsonl"] = FileDigest(size=len(data), sha256=digest_of(data))


def _telemetry(evidence: Evidence, draw: st.DataObject) -> None:
    name = draw.draw(st.sampled_from(sorted(evidence.telemetry)))
    data = evidence.telemetry[name] = _bytes(evidence.telemetry[name], draw)
    evidence.attempt_files[name]["telemetry.jsonl"] = FileDigest(size=len(data), sha256=digest_of(data))


def _sample_row(evidence: Evidence, draw: st.DataObject) -> None:
    rows = evidence.telemetry_table
    assert isinstance(rows, list)
    at = draw.draw(st.integers(0, len(rows) - 1))
    if draw.draw(st.booleans()):
        del rows[at]
    else:
        column = draw.draw(st.sampled_from(sorted(rows[at])))
        rows[at] = {**rows[at], column: draw.draw(st.sampled_from([None, 7, "x", 0.25]))}


def _row(evidence: Evidence, draw: st.DataObject) -> None:
    assert isinstance(evidence.table, list)
    at = draw.draw(st.integers(0, len(evidence.table) - 1))
    how = draw.draw(st.sampled_from(["drop", "double", "alter", "swap"]))
    if how == "drop":
        del evidence.table[at]
    elif how == "double":
        evidence.table.append(evidence.table[at])
    elif how == "swap":
        evidence.table[at], evidence.table[0] = evidence.table[0], evidence.table[at]
    else:
        column = draw.draw(st.sampled_from(sorted(evidence.table[at])))
        evidence.table[at] = {**evidence.table[at], column: draw.draw(st.sampled_from([None, 7, "x", 0.25]))}


def _source(evidence: Evidence, draw: st.DataObject) -> None:
    if draw.draw(st.booleans()):
        evidence.sources.discard(draw.draw(st.sampled_from(sorted(evidence.sources))))
    else:
        evidence.sources.add(OTHER)


def _generation(evidence: Evidence, draw: st.DataObject) -> None:
    evidence.generations.pop(1)


IN_PLACE: dict[str, Change] = {
    "ledger": _attribute("ledger"), "head": _attribute("head"), "results": _attribute("results"),
    "manifest": _generation_file, "journal": _journal, "attempt": _attempt, "provenance": _provenance, "row": _row,
    "source": _source, "generation": _generation, "telemetry": _telemetry, "sample row": _sample_row,
}  # fmt: skip


def _rebuilt(evidence: Evidence, draw: st.DataObject) -> None:
    """Drop events and everything of an attempt, and build ledger, table and results anew to fit."""
    history = honest(draw.draw(st.sampled_from([2.0, 0.5, 1.0])))
    if draw.draw(st.booleans()):
        history = History().opened()
        for process in range(draw.draw(st.integers(0, 3))):
            history.attempt(process)
    vars(evidence).update(vars(history.evidence()))


@pytest.mark.parametrize("ratio", [2.0, 0.5])
@pytest.mark.parametrize("kind", [*IN_PLACE, "rebuilt"])
@given(st.data())
@settings(max_examples=8)
def test_no_change_improves_a_verdict_under_a_fixed_identity(kind: str, ratio: float, data: st.DataObject) -> None:
    """V-07: against the honest identities, any change of any member leaves nothing intact and withholds the outcome."""
    evidence, original = copy(ratio), HONEST[ratio]
    {**IN_PLACE, "rebuilt": _rebuilt}[kind](evidence, data)
    verdict = judge(sealed(evidence), against=[MANIFEST, str(original.identity)])
    if comparable(evidence) == comparable(original):
        assert (verdict.integrity, verdict.outcome) == ("intact", {2.0: "supported", 0.5: "refuted"}[ratio])
    else:
        assert ORDER[verdict.integrity] < ORDER["intact"]
        assert verdict.outcome == "withheld"


@pytest.mark.parametrize("ratio", [2.0, 0.5])
@pytest.mark.parametrize("kind", IN_PLACE)
@given(st.data())
@settings(max_examples=14)
def test_no_single_change_goes_unseen_under_the_manifests_identity(
    kind: str, ratio: float, data: st.DataObject
) -> None:
    """V-04 to V-19: with the manifest's identity alone, no change of one member goes unseen or gives another outcome.

    The packed results are an exception that changes nothing: their last places may differ, as they are derived again.
    """
    evidence, original = copy(ratio), HONEST[ratio]
    IN_PLACE[kind](evidence, data)
    verdict = judge(sealed(evidence), against=[MANIFEST])
    honest_outcome = {2.0: "supported", 0.5: "refuted"}[ratio]
    assert verdict.outcome in (honest_outcome, "withheld")
    if comparable(evidence) != comparable(original) and kind != "results":
        assert verdict.integrity != "intact"
        assert verdict.outcome == "withheld"


def something_left(kind: str, evidence: Evidence) -> bool:
    """Whether earlier changes left anything that a kind of change could change."""
    if kind in ("manifest", "generation"):
        return bool(evidence.generations.get(1))
    held = {
        "row": evidence.table, "attempt": evidence.attempt_files, "journal": evidence.journals,
        "provenance": evidence.provenance, "source": evidence.sources,
        "telemetry": evidence.telemetry, "sample row": evidence.telemetry_table,
    }  # fmt: skip
    return bool(held.get(kind, True))


@given(st.lists(st.sampled_from(sorted(IN_PLACE)), min_size=2, max_size=4), st.data())
@settings(max_examples=40)
def test_several_changes_never_raise_and_never_help(kinds: list[str], data: st.DataObject) -> None:
    """V-01 to V-19: however damaged a capsule is, judging it is a verdict and never an error."""
    evidence = copy()
    for kind in kinds:
        if something_left(kind, evidence):
            IN_PLACE[kind](evidence, data)
    verdict = judge(sealed(evidence), against=[MANIFEST])
    assert verdict.outcome in ("supported", "withheld")


def test_a_choice_among_attempts_is_seen() -> None:
    """V-17: declaring a whole start void, to run it again until it pleases, contradicts its journal."""
    history = History().opened()
    for process in range(3):
        history.attempt(process, ratio=0.5)
    for process in range(3):
        history.attempt(process, ratio=2.0)
    assert judge(history.evidence()).outcome == "refuted"
    for word in ("bad_records", "incomplete"):
        chosen = deepcopy(history)
        chosen.lines = rechained(history.ledger, lambda all_, word=word: [
            event(all_, "settled", f"a{number:06d}").update(outcome=word) for number in (1, 2, 3)
        ] and None).splitlines()  # fmt: skip
        verdict = judge(chosen.evidence())
        assert statuses(verdict)["V-17"] == "failed"


def test_a_journal_cannot_speak_for_a_cell_that_was_not_its() -> None:
    """V-17: rows for cells of another process are faults, so an attempt cannot fill in what another left out."""
    history = History().opened()
    stolen = journal_bytes([observed(cell) for cell in history.cells[8:16]])
    history.attempt(0, journal=stolen)
    verdict = judge(history.evidence())
    assert statuses(verdict)["V-17"] == "failed"


def test_links_carry_no_content() -> None:
    """V-15: a frozen link is its target only; its digest is no member of the sources."""
    link = SourceEntry(
        path="z", kind="link", mode=None, size=1, sha256=digest_of(b"a"), target="a", blob=None, notes=()
    )
    evidence = copy()
    entries = evidence.generations[1]["sources.jsonl"] + sources_bytes([link])
    manifest = json.loads(evidence.generations[1]["manifest.json"])
    for place in (manifest["sources"], *(arm["sources"] for arm in manifest["arms"])):
        place.update(count=3, sha256=digest_of(entries))
    evidence.generations[1].update({"sources.jsonl": entries, "manifest.json": lines_bytes([manifest])[:-1]})
    checks = {check.id: check for check in judge(sealed(evidence)).checks}
    assert checks["V-04"].status == "passed"
    assert not [finding for finding in checks["V-15"].findings if finding.startswith("5-sources")]


def test_integrity_is_the_worst_of_the_checks() -> None:
    """V-01 to V-19: broken < incomplete < intact; what was not asked for takes nothing away."""
    kinds = {
        "passed": Check(id="x", name="x", status="passed", words=""),
        "failed": Check(id="x", name="x", status="failed", words=""),
        "required": Check(id="x", name="x", status="not_checked", words=""),
        "optional": Check(id="x", name="x", status="not_checked", words="", required=False),
    }
    for chosen in itertools.product(kinds, repeat=3):
        expected = "broken" if "failed" in chosen else "incomplete" if "required" in chosen else "intact"
        assert integrity_of(tuple(kinds[name] for name in chosen)) == expected


def test_every_check_has_a_function_that_names_its_clause() -> None:
    """V-01 to V-19: the table of checks, the functions and their docstrings are the same list."""
    assert list(CHECK_FUNCTIONS) == [identifier for identifier, _ in CHECKS]
    for identifier, function in CHECK_FUNCTIONS.items():
        assert (function.__doc__ or "").startswith(f"{identifier}: ")


def test_judging_a_large_plan_keeps_none_of_its_cells() -> None:
    """P-06: what a manifest of two kilobytes plans is enumerated, compared and derived without being kept."""
    text = edited(('"abba"', '"abba"\nblocks = 834'), ('isolation = "start"', 'isolation = "cell"'))
    history = History([generation(text)]).opened()
    files = {**history.generations[0], "cells.jsonl": b""}
    evidence = Evidence(
        generations={1: files},
        ledger=history.ledger,
        head=Head(count=len(history.lines), sha256=digest_of(history.lines[-1])).to_bytes(),
        members={"7-results/results.json"},
    )
    judge(evidence)
    tracemalloc.start()
    verdict = judge(evidence)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    plan = next(check for check in verdict.checks if check.id == "V-05")
    assert "expected the 20016 cells that the protocol enumerates, found 0 lines" in plan.findings[0]
    assert peak < 20_016 * 40

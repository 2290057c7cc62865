"""Telemetry: samples read, added up and compared with what the ledger and the packed table say of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import pytest
from builders import (
    CONTAMINATED,
    History,
    edited,
    generation,
    lines_bytes,
    rechained,
    sample,
    sealed,
    silent,
    with_ledger,
)
from hypothesis import given
from hypothesis import strategies as st

from capsule.core.canonical import canonical
from capsule.core.digest import digest_of
from capsule.core.evidence import Evidence
from capsule.core.judge import judge
from capsule.core.manifest import FileDigest
from capsule.core.table import TELEMETRY_COLUMNS
from capsule.core.telemetry import (
    READINGS,
    Sample,
    Tally,
    interval_ms,
    read_samples,
    summarize,
    throttle_names,
    torn_bytes,
    worst,
)

Samples = Callable[[int], Sequence[Sample]]
PAIR = ("GPU-1", "GPU-2")
UNKNOWN = {"exclusivity": "unverifiable", "words": "no process is listed"}


def findings(evidence: Evidence) -> list[str]:
    """Return the findings of V-19, or why it was not made; every other check has passed."""
    checks = judge(sealed(evidence)).checks
    assert not [check for check in checks[:-1] if check.status != "passed" and check.required and check.id != "V-18"]
    last = checks[-1]
    return [*last.findings] if last.status != "not_checked" else [f"not checked: {last.words}"]


def history(
    samples: Samples | None = None,
    outcome: str = "completed",
    *,
    rules: str = 'exclusivity = "best_effort"',
    devices: tuple[str, ...] = ("cpu",),
    lasts_ms: int = 0,
) -> History:
    """Return a history of one attempt under a budget with these rules."""
    text = edited(
        ('exclusivity = "best_effort"', rules + (f"\ndevices = {len(devices)}" if len(devices) > 1 else "")),
    )
    found = History([generation(text)], devices=devices).opened()
    found.attempt(0, outcome, samples=samples, lasts_ms=lasts_ms)
    return found


def refiled(found: History, data: bytes, attempt: str = "a000001") -> Evidence:
    """Return evidence with other bytes for the attempt's telemetry, and their digest in the ledger."""
    evidence = found.evidence()
    digest = FileDigest(size=len(data), sha256=digest_of(data))

    def change(events: list[dict[str, Any]]) -> None:
        end = next(e for e in events if e["event"] in ("settled", "reconciled") and e["attempt"] == attempt)
        end["data"]["files"]["telemetry.jsonl"] = digest.to_json()

    evidence.telemetry[attempt] = data
    evidence.attempt_files[attempt]["telemetry.jsonl"] = digest
    return with_ledger(evidence, rechained(evidence.ledger, change))


def settled_as(found: History, **values: Any) -> Evidence:
    """Return evidence whose ledger settles the attempt otherwise, chained anew."""
    evidence = found.evidence()

    def change(events: list[dict[str, Any]]) -> None:
        next(e["data"] for e in events if e["event"] == "settled").update(values)

    return with_ledger(evidence, rechained(evidence.ledger, change))


def two(at_ms: int) -> list[Sample]:
    """Return two samples of an attempt."""
    return [sample(at_ms + 5), sample(at_ms + 30)]


GOOD = sample(7).to_json()


@pytest.mark.parametrize(
    "line",
    [
        b"", b"{}", b"[]", b"null", b"{", b"\xff", canonical(GOOD) + b" ", canonical(GOOD | {"at_ms": -1}),
        canonical(GOOD | {"at_ms": "7"}), canonical(GOOD | {"at_ms": True}), canonical(GOOD | {"more": 1}),
        canonical({key: value for key, value in GOOD.items() if key != "xid"}), json.dumps(GOOD).encode(),
        canonical(GOOD | {"exclusivity": "shared"}), canonical(GOOD | {"own": 3}),
        canonical(GOOD | {"lost": None}), canonical(GOOD).replace(b'"xid":null', b'"xid":null,"xid":null'),
    ],
)  # fmt: skip
def test_a_line_is_a_sample_or_says_why_not(line: bytes) -> None:
    """T-01: what is not the canonical JSON of a sample with every field is named and never becomes one."""
    found = list(read_samples(canonical(GOOD) + b"\n" + line + b"\n" + canonical(GOOD) + b"\n"))
    assert [isinstance(item, Sample) for item in found] == [True, False, True]
    assert found[1]


def test_every_file_is_readable() -> None:
    """T-01: a line that is no sample is found wherever it stands, and a torn one unless nobody saw the end."""
    found = history(two)
    data = found.telemetry["a000001"]
    assert findings(refiled(found, data)) == []
    assert findings(refiled(found, data + b"{}\n"))[0].startswith("3-attempts/a000001/telemetry.jsonl:3: sample: ")
    assert "found a torn one" in findings(refiled(found, data + b"{"))[0]
    assert torn_bytes(data) == 0
    assert torn_bytes(data + b"{") == torn_bytes(b"x") == 1
    lost = History().opened()
    lost.lose(0, samples=two(1000))
    data = lost.telemetry["a000001"]
    assert findings(refiled(lost, data + b'{"at')) == []
    assert len(findings(refiled(lost, b"x\n" + data))) == 1


def test_samples_are_of_the_attempts_devices_in_the_order_of_their_time() -> None:
    """T-02: samples of several devices may alternate; an earlier one, or one of another device, is found."""
    mixed = history(lambda at: [sample(at + n, device) for n in (5, 9, 30) for device in PAIR], devices=PAIR)
    assert findings(mixed.evidence()) == []
    assert len(mixed.account.attempts["a000001"].end.telemetry) == 2  # type: ignore[union-attr]
    assert "expected samples in the order of their time" in findings(history(lambda at: two(at)[::-1]).evidence())[0]
    found = findings(history(lambda at: [*two(at), sample(at + 31, "other")]).evidence())
    assert found == ["3-attempts/a000001/telemetry.jsonl:3: expected a device that the attempt reserved, found 'other'"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"missing": {}}, "a reason for every reading that is null"),
        ({"energy_mj": None}, "a reason for every reading that is null"),
        ({"power_mw": 1, "missing": {name: "x" for name in READINGS if name != "energy_mj"}}, "and for no other"),
        ({"missing": {**sample(1).missing, "own": "x"}}, "and for no other"),
        ({"lost": True}, "the error of a device that is lost"),
        ({"error": "timed out"}, "no reading and no process"),
        ({"foreign": (5,)}, "`contaminated` exactly where"),
        ({"exclusivity": "contaminated"}, "`contaminated` exactly where"),
        ({"exclusivity": "unverifiable", "foreign": (5,)}, "`contaminated` exactly where"),
    ],
)
def test_a_sample_does_not_contradict_itself(changes: dict[str, Any], words: str) -> None:
    """T-03 T-04: what is null has a reason, a device without an answer nothing else, and foreign processes show."""
    found = list(read_samples(lines_bytes([sample(7, **changes).to_json()])))
    assert isinstance(found[0], str)
    assert words in found[0]


def test_samples_that_are_sound() -> None:
    """T-03 T-04: a device that did not answer needs no reasons, one that is lost has an error, others may be unsure."""
    sound = [silent(1), silent(2, lost=True), silent(3, missing={"xid": "x"})]
    sound += [sample(4, **CONTAMINATED), sample(5, **UNKNOWN)]
    assert list(read_samples(lines_bytes(item.to_json() for item in sound))) == sound


def test_unknown_bits_are_kept() -> None:
    """T-05: every bit has a name, an unknown one its value."""
    assert list(throttle_names(0)) == []
    assert list(throttle_names(0x1 | 0x4 | 0x200 | 1 << 52)) == [
        "gpu_idle", "sw_power_cap", "bit_0x200", "bit_0x10000000000000",
    ]  # fmt: skip


def observed(times: Sequence[int], leased: int, released: int) -> int:
    """Return how much of an attempt is observed by samples at these times."""
    return summarize("cpu", [sample(at) for at in times], leased, released).observed_ms


def test_observed_time() -> None:
    """T-06: neighbours of at most three intervals apart observe what lies between, the ends of the lease included."""
    assert [interval_ms(at) for at in (0, 999_999, 1_002_000, 3_000_000, 9_000_000)] == [500, 500, 501, 1500, 2000]
    assert observed([1500, 3000], 0, 4500) == 4500
    assert observed([1501, 3000], 0, 4500) == 2999
    assert observed([1500, 3000], 0, 4501) == 3000
    assert observed([3_000_000, 3_004_500], 0, 3_004_500) == 4500
    assert observed([3_000_000, 3_004_507], 0, 3_004_507) == 0
    assert observed([], 0, 100) == 0
    assert summarize("cpu", [silent(50)], 0, 100).observed_ms == 0
    assert summarize("cpu", [sample(10), silent(50)], 0, 100).observed_ms == 100
    late = summarize("cpu", [sample(5), sample(50), sample(150, **CONTAMINATED)], 10, 100)
    assert (late.samples, late.observed_ms, late.elapsed_ms, late.exclusivity) == (1, 90, 90, "exclusive")


@given(st.lists(st.integers(0, 9000), max_size=12), st.integers(0, 2000), st.integers(0, 9000))
def test_no_more_is_observed_than_elapsed(times: list[int], leased: int, lasted: int) -> None:
    """T-06: whatever samples there are, what is observed is part of what elapsed, and one more never takes away."""
    found = observed(sorted(times), leased, leased + lasted)
    assert 0 <= found <= lasted
    assert observed(sorted([*times, leased + lasted // 2]), leased, leased + lasted) >= found


@pytest.mark.parametrize(
    ("samples", "energy", "why"),
    [
        ([sample(1, energy_mj=5), sample(2, energy_mj=5), sample(3, energy_mj=9)], 4, None),
        ([sample(1, energy_mj=5), silent(2), sample(3, energy_mj=9)], 4, None),
        ([], None, "fewer than two readings"),
        ([sample(1)], None, "fewer than two readings"),
        ([sample(1), sample(2, energy_mj=None, missing=dict.fromkeys(READINGS, "denied"))], None, "denied"),
        ([sample(1, energy_mj=None, missing=dict.fromkeys(READINGS, ""))], None, ""),
        ([sample(1, energy_mj=9), sample(2, energy_mj=5), sample(3, energy_mj=99)], None, "the counter fell"),
        (
            [sample(1, driver="2", energy_mj=9), sample(2, driver="1", energy_mj=5)], None,
            "the driver changed: 1, 2",
        ),
    ],
)  # fmt: skip
def test_energy(samples: list[Sample], energy: int | None, why: str | None) -> None:
    """T-07: what the counter rose, or the first reason why nobody can say; never zero in its place."""
    found = summarize("cpu", samples, 0, 100)
    assert (found.energy_mj, found.energy_missing) == (energy, why)


def test_throttling() -> None:
    """T-08: the observed time that ended in a sample with a reason counts for it, unobserved time for none."""
    samples = [sample(0, throttle=4), sample(100, throttle=5), sample(5000, throttle=4), sample(5300, throttle=0)]
    assert summarize("cpu", samples, 0, 5400).throttled_ms == {"gpu_idle": 100, "sw_power_cap": 100}


@pytest.mark.parametrize(
    ("samples", "exclusivity", "evidence"),
    [
        ([], "unverifiable", "no sample was taken"),
        ([sample(10)], "exclusive", "no foreign process in 1 samples"),
        ([sample(10), silent(20)], "unverifiable", "no answer (in 1 of 2 samples)"),
        ([sample(10, **UNKNOWN), sample(20, **CONTAMINATED), silent(30)], "contaminated",
         "in use by pid 77 (in 1 of 3 samples)"),
        ([sample(10), sample(3000)], "unverifiable", "2990 of 4000 ms were not observed"),
    ],
)  # fmt: skip
def test_exclusivity_of_a_device(samples: list[Sample], exclusivity: str, evidence: str) -> None:
    """T-09: the worst that was seen, and nothing is exclusive that was not watched throughout."""
    found = summarize("cpu", samples, 0, 4000 if len(samples) > 1 and samples[-1].at_ms > 100 else 100)
    assert (found.exclusivity, found.evidence) == (exclusivity, evidence)


def test_an_attempt_is_as_exclusive_as_its_worst_device() -> None:
    """T-10: a device that was not sampled beside one that was is unverifiable, and so is its attempt."""
    assert worst([]) == "unverifiable"
    one = history(lambda at: [sample(at + 5, "GPU-1")], devices=PAIR)
    assert findings(one.evidence()) == []
    end = one.account.attempts["a000001"].end
    assert end is not None
    assert end.exclusivity == "unverifiable"  # type: ignore[union-attr]
    assert {key: item.exclusivity for key, item in end.telemetry.items()} == {  # type: ignore[union-attr]
        "GPU-1": "exclusive",
        "GPU-2": "unverifiable",
    }
    alone = {"GPU-1": end.telemetry["GPU-1"].to_json()}  # type: ignore[union-attr]
    assert len(findings(settled_as(one, telemetry=alone, exclusivity="exclusive"))) == 2


SUMMARY = Tally(1000, 1010).summary().to_json()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"exclusivity": "unverifiable"}, "expected exclusive by its samples"),
        ({"telemetry": {}, "exclusivity": "unverifiable"}, "expected a summary exactly where there are samples"),
        ({"telemetry": {"cpu": SUMMARY}}, "not what its samples add up to"),
        ({"telemetry": {"other": SUMMARY}}, "expected a summary exactly where there are samples"),
    ],
)
def test_the_ledger_says_what_the_samples_add_up_to(values: dict[str, Any], words: str) -> None:
    """T-10: a summary that is not that of the samples, or of no device of theirs, is found."""
    assert any(words in finding for finding in findings(settled_as(history(two), **values)))


@pytest.mark.parametrize("name", list(SUMMARY))
def test_each_field_of_a_summary_counts(name: str) -> None:
    """T-10: no field of a summary can say something else."""
    found = history(two)
    end = found.account.attempts["a000001"].end
    honest = end.telemetry["cpu"].to_json()  # type: ignore[union-attr]
    other = {"exclusivity": "contaminated", "energy_missing": "x", "throttled_ms": {"gpu_idle": 1}, "evidence": "x"}
    value = other.get(name, 3 if honest[name] != 3 else 4)
    assert f": {name}: not what" in findings(settled_as(found, telemetry={"cpu": {**honest, name: value}}))[0]


def test_samples_cannot_be_left_out_or_made_up() -> None:
    """T-10 K-04: without its file a summary is a claim; without a summary, or samples, nothing is exclusive."""
    found = history(two)
    evidence = found.evidence()
    for held in (evidence.telemetry, evidence.attempt_files):
        held.pop("a000001") if held is evidence.telemetry else held["a000001"].pop("telemetry.jsonl")

    def change(events: list[dict[str, Any]]) -> None:
        del events[-1]["data"]["files"]["telemetry.jsonl"]

    evidence.telemetry_table = []
    without = with_ledger(evidence, rechained(evidence.ledger, change))
    assert findings(without) == [
        "3-attempts/a000001/telemetry.jsonl: expected the samples that the ledger adds up, found none"
    ]
    claimed = findings(settled_as(history(), exclusivity="exclusive"))
    assert claimed == ["a000001: expected unverifiable by its samples, found exclusive"]
    assert findings(history().evidence()) == []


BEST, REQUIRED = 'exclusivity = "best_effort"', 'exclusivity = "required"'
STOP = '\non_contamination = "stop"'
SEEN: dict[str, Samples] = {
    "exclusive": two,
    "contaminated": lambda at: [*two(at), sample(at + 31, **CONTAMINATED)],
    "unverifiable": lambda at: [*two(at), sample(at + 31, **UNKNOWN)],
}


@pytest.mark.parametrize("rules", [BEST, BEST + STOP, REQUIRED, REQUIRED + STOP])
@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("outcome", ["completed", "contaminated", "unverifiable", "exit_nonzero", "device_lost"])
def test_outcomes_follow_from_what_was_seen(rules: str, seen: str, outcome: str) -> None:
    """T-11 P-19: required exclusivity is kept for every result, and no outcome is excused by what was not seen."""
    required, stops = REQUIRED in rules, "stop" in rules
    allowed = {
        "completed": not required or seen == "exclusive",
        "contaminated": seen == "contaminated" and (required or stops),
        "unverifiable": seen == "unverifiable" and required,
    }.get(outcome, True)
    found = findings(history(SEEN[seen], outcome, rules=rules).evidence())
    assert (found == []) == allowed, found


def test_what_is_contaminated_counts_and_is_labelled() -> None:
    """T-11: with best effort a contaminated attempt has its result, and the verdict says so."""
    check = judge(history(SEEN["contaminated"]).evidence()).checks[-1]
    assert (check.status, check.words) == (
        "passed",
        "3 samples of 1 attempts added up again; of 1 settled: 1 contaminated",
    )


def test_the_table_is_a_view_of_the_samples() -> None:
    """T-12 K-05: a row more, less, other or elsewhere is found; so is a table where there is nothing to show."""
    found = history(SEEN["contaminated"])
    rows = list(found.evidence().telemetry_table)
    assert [list(row) for row in rows] == [[name for name, _ in TELEMETRY_COLUMNS]] * 3
    assert (rows[2]["own"], rows[2]["foreign"], rows[2]["lost"]) == ("3", "77", False)
    assert rows[0]["missing"].startswith('{"driver":"not supported"')
    changed: list[tuple[Any, str]] = [
        (rows[:2], "expected a row for each sample, found 2 rows"),
        ([*rows, rows[0]], "expected 3 rows, found more"),
        (rows[::-1], "row 0: "),
        ([*rows[:2], {**rows[2], "foreign": ""}], "row 2: foreign: not what"),
        ("4-records/telemetry.parquet: damaged", "damaged"),
    ]
    for table, words in changed:
        evidence = deepcopy(found.evidence())
        evidence.telemetry_table = table
        assert words in findings(evidence)[0]
    evidence = found.evidence()
    evidence.telemetry_table = []
    assert findings(evidence) == ["not checked: the table of 3 samples is absent"]
    evidence = history().evidence()
    evidence.telemetry_table = rows
    assert findings(evidence) == ["4-records/telemetry.parquet: expected no table without samples, found one"]


def test_a_ledger_that_cannot_be_read_says_nothing_of_samples() -> None:
    """T-10: without a ledger there is nothing that samples could be compared with."""
    assert judge(Evidence()).checks[-1].status == "not_checked"

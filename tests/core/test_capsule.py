"""What a capsule must hold: nothing that is required is absent, nothing that does not belong is there."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from builders import History, edited, generation, honest, journal_bytes, observed, rechained, sealed, with_ledger

from capsule.core.checks import REQUIRED_MEMBERS, REQUIRED_OF_MANIFEST
from capsule.core.digest import digest_of
from capsule.core.evidence import Evidence
from capsule.core.judge import judge
from capsule.core.manifest import FileDigest

HONEST = honest().evidence()
EMPTY = FileDigest(size=0, sha256=digest_of(b""))


def failing(evidence: Evidence) -> dict[str, list[str]]:
    """Return the findings, or the words, of every check that did not pass and should have."""
    checks = [check for check in judge(evidence).checks if check.status != "passed" and check.required]
    return {
        check.id: [*check.findings] or [check.words] for check in checks if check.id not in ("V-07", "V-08", "V-09")
    }


@pytest.mark.parametrize("name", REQUIRED_MEMBERS)
def test_required_members(name: str) -> None:
    """K-01: a capsule without one of its members is not intact, and the member is named."""
    evidence = deepcopy(HONEST)
    evidence.members.discard(name)
    assert failing(evidence)["V-03"] == [f"absent: {name}"]
    assert judge(evidence).integrity != "intact"


@pytest.mark.parametrize("name", REQUIRED_OF_MANIFEST)
def test_required_files_of_a_manifest(name: str) -> None:
    """K-02: each manifest of the chain comes with its lists and protocol; what is absent is named."""
    evidence = History().opened().amended(edited(("numbers = 20", "numbers = 30"))).evidence()
    assert failing(evidence) == {}
    del evidence.generations[1][name]
    assert failing(sealed(evidence))["V-03"] == [f"absent: 1-manifest/001/{name}"]


def test_manifests_are_numbered_without_a_gap() -> None:
    """K-02: a superseded manifest cannot be left away, whatever the others are called."""
    whole = History().opened().amended(edited(("numbers = 20", "numbers = 30"))).evidence()
    for numbers in ((2,), (1, 3), (0, 1)):
        evidence = deepcopy(whole)
        files = list(evidence.generations.values())
        evidence.generations = dict(zip(numbers, files[-len(numbers) :], strict=True))
        assert "absent: 1-manifest/001" in failing(sealed(evidence))["V-03"]


def test_a_list_of_another_revision_is_part_of_its_manifest() -> None:
    """K-02: the list of an arm's own revision must be there with the digest that the manifest names."""
    revision = "c" * 40
    text = edited(('name = "builtin"\n', f'name = "builtin"\nrevision = "{revision}"\n'), ('"start"', '"cell"'))
    evidence = History([generation(text)]).opened().evidence()
    assert failing(evidence) == {}
    del evidence.generations[1][f"sources-{revision}.jsonl"]
    assert f"sources-{revision}.jsonl: expected 1 lines" in failing(sealed(evidence))["V-04"][0]


@pytest.mark.parametrize("attempt", [f"a{number:06d}" for number in range(1, 8)])
def test_no_attempt_can_be_left_out_of_the_ledger(attempt: str) -> None:
    """K-03: the ledger is whole: an attempt that looks bad cannot be cut out, even if all is chained anew."""
    evidence = deepcopy(HONEST)

    def cut(events: list[dict[str, Any]]) -> None:
        events[:] = [event for event in events if event["attempt"] != attempt]

    found = failing(with_ledger(evidence, rechained(evidence.ledger, cut)))
    if attempt == "a000007":  # the last one leaves no gap in the numbers, only files and rows without an attempt
        assert "3-attempts/a000007: no attempt of the ledger" in found["V-14"]
    else:
        assert any("expected attempt" in finding for finding in found["V-12"])


@pytest.mark.parametrize("name", ["environment.json", "journal.jsonl", "provenance.jsonl", "stderr", "stdout"])
def test_attempts_have_the_files_that_their_end_names(name: str) -> None:
    """K-04: a file of an attempt cannot be absent, other or more than the ledger recorded."""
    for attempt in ("a000002", "a000004"):
        for change in (
            lambda files: files.pop(name),
            lambda files: files.update({name: EMPTY.model_copy(update={"size": 1})}),
        ):
            evidence = deepcopy(HONEST)
            change(evidence.attempt_files[attempt])
            assert failing(sealed(evidence))["V-14"] == [
                f"3-attempts/{attempt}: {name}: not the bytes that the ledger recorded"
            ]
    evidence = deepcopy(HONEST)
    evidence.attempt_files["a000003"] = {name: EMPTY}
    assert failing(sealed(evidence))["V-14"] == [f"3-attempts/a000003/{name}: of an attempt that never started"]


def test_the_table_is_a_view_of_the_journals() -> None:
    """K-05: a table that says something else than the journals is found, however well results fit it."""
    better = honest(9.0).evidence()
    evidence = deepcopy(HONEST)
    evidence.table, evidence.results = better.table, better.results
    found = failing(sealed(evidence))
    assert set(found) == {"V-17", "V-18"}
    assert found["V-17"][0].endswith("seconds: not what the journals give")


def test_sources_are_exactly_those_frozen() -> None:
    """K-06: a frozen file cannot be absent, and none can be slipped in."""
    other = digest_of(b"other")
    for digest in sorted(HONEST.sources):
        evidence = deepcopy(HONEST)
        evidence.sources.remove(digest)
        assert failing(sealed(evidence)) == {"V-15": [f"5-sources: {digest} is frozen and absent"]}
    evidence = deepcopy(HONEST)
    evidence.sources.add(other)
    assert failing(sealed(evidence)) == {"V-15": [f"5-sources: {other} is there and not frozen"]}


def test_an_attempt_may_leave_no_rows() -> None:
    """K-04 R-08: an attempt that failed before its first row is as much part of a capsule as any other."""
    history = History().opened()
    history.attempt(0, "signalled", journal=b"", status=1)
    history.attempt(1, "exit_nonzero", journal=journal_bytes([observed(history.cells[8])], ended=False), status=1)
    assert failing(history.evidence()) == {}

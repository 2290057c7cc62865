"""A newer minor version is read and named, another major version refused in words, and neither is frozen."""

from __future__ import annotations

import json
from typing import Any

import pytest
from builders import PROTOCOL, History, generation, manifest_of, sealed

from capsule.core.canonical import canonical
from capsule.core.chain import read
from capsule.core.digest import digest_of
from capsule.core.errors import MalformedError, ProtocolError
from capsule.core.evidence import Evidence
from capsule.core.judge import judge
from capsule.core.manifest import Manifest
from capsule.core.toml import read_protocol
from capsule.core.version import is_newer, passed_over, version_of

NEWER_PROTOCOL = PROTOCOL.replace('"capsule.protocol/1"', '"capsule.protocol/1.3"') + "\n[later]\nhow = 0.5\n"


def changed(data: bytes, **changes: Any) -> bytes:
    """Return canonical JSON with other or further keys."""
    return canonical(json.loads(data) | changes)


def newer_generation() -> dict[str, bytes]:
    """Return a frozen manifest as a newer minor version might write it."""
    files = generation()
    file = NEWER_PROTOCOL.encode()
    manifest = json.loads(files["manifest.json"])
    manifest["schema"] = "capsule.manifest/1.2"
    manifest["protocol"] |= {"schema": "capsule.protocol/1.3", "later": {"how": {"decimal": "0.5"}}}
    manifest["arms"][0]["colour"] = "red"
    manifest["protocol_file"] = {"size": len(file), "sha256": digest_of(file)}
    return {**files, "protocol.toml": file, "manifest.json": canonical(manifest)}


def newer_history() -> Evidence:
    """Return a capsule all of whose documents are of newer minor versions and hold something more."""
    history = History(generations=[newer_generation()]).opened()
    history.attempt(0)
    lines = [json.loads(line) for line in history.lines]
    lines[0]["data"] |= {"format": "capsule.ledger/1.7", "site": "north"}
    lines[3]["data"]["room"] = 5
    previous = None
    for at, line in enumerate(lines):
        history.lines[at] = canonical(line | {"prev": previous})
        previous = digest_of(history.lines[at])
    evidence = history.evidence()
    evidence.results = changed(evidence.results, schema="capsule.results/1.1", mood="good")
    evidence.members.add("7-results/mood.json")
    evidence.later.append("7-results/mood.json")
    return sealed(evidence)


def test_a_newer_minor_version_is_read_and_named() -> None:
    """F-03 F-04: what a newer minor version added is kept in the digests, passed over, and named in the verdict."""
    evidence = newer_history()
    verdict = judge(evidence)
    found = {check.id: check for check in verdict.checks}
    assert [check.findings for check in verdict.checks if check.findings] == []
    assert verdict.integrity == "intact"
    assert verdict.manifest == digest_of(evidence.generations[1]["manifest.json"])
    assert "passed over, as of a newer minor version: 7-results/mood.json" in found["V-02"].words
    assert "arms[0].colour" in found["V-04"].words
    assert "protocol.later" in found["V-04"].words


@pytest.mark.parametrize("where", ["manifest", "protocol", "event", "results"])
def test_an_unknown_key_without_a_newer_version_is_refused(where: str) -> None:
    """F-04: a document of this very version holds nothing that this version does not know."""
    history = History().opened()
    history.attempt(0)
    if where == "event":
        line = json.loads(history.lines[-1])
        line["data"]["room"] = 5
        history.lines[-1] = canonical(line)
    evidence = history.evidence()
    files = evidence.generations[1]
    if where == "manifest":
        files["manifest.json"] = changed(files["manifest.json"], room=5)
    elif where == "protocol":
        manifest = json.loads(files["manifest.json"])
        files["manifest.json"] = changed(files["manifest.json"], protocol=manifest["protocol"] | {"room": 5})
    elif where == "results":
        evidence.results = changed(evidence.results, room=5)
    assert judge(sealed(evidence)).integrity == "broken"


@pytest.mark.parametrize("version", ["2", "0", "2.1", "999"])
def test_another_major_version_is_refused_in_words(version: str) -> None:
    """F-02: both versions are named, and what to do."""
    data = changed(generation()["manifest.json"], schema=f"capsule.manifest/{version}")
    with pytest.raises(
        MalformedError, match=rf"expected capsule\.manifest/1, found capsule\.manifest/{version}"
    ) as error:
        Manifest.from_bytes(data, "manifest.json")
    assert error.value.hint
    ledger = canonical(
        json.loads(History().opened().lines[0]) | {"data": {"format": "capsule.ledger/2", "protocol": "x"}}
    )
    assert "found capsule.ledger/2" in read(ledger + b"\n", "ledger").faults[0]


@pytest.mark.parametrize("version", ["1.0", "1.01", "1.1000", "1.", "01", "1.2.3", " 1", "one", ""])
def test_a_version_has_one_spelling(version: str) -> None:
    """F-01: no leading zeros, no minor version zero, at most three digits."""
    data = changed(generation()["manifest.json"], schema=f"capsule.manifest/{version}")
    with pytest.raises(MalformedError):
        Manifest.from_bytes(data, "manifest.json")


def test_what_was_added_takes_part_in_the_identity() -> None:
    """F-04: two manifests that differ in an unknown key are two manifests."""
    files = newer_generation()
    one, other = files["manifest.json"], changed(files["manifest.json"], room=5)
    assert Manifest.from_bytes(one, "m").identity == digest_of(one) != Manifest.from_bytes(other, "m").identity
    assert Manifest.from_bytes(other, "m").added() == ["arms[0].colour", "protocol.later", "room"]
    assert manifest_of(generation()).added() == []


def test_a_protocol_of_a_newer_version_is_not_frozen() -> None:
    """F-05: it may ask for what this version does not do."""
    with pytest.raises(
        ProtocolError, match=r"p\.toml:\d+: schema: expected capsule\.protocol/1, found capsule\.protocol/1\.3"
    ):
        read_protocol(NEWER_PROTOCOL.encode(), "p.toml")
    assert (
        read_protocol(NEWER_PROTOCOL.encode(), "p.toml", newer=True).known().name
        == manifest_of(generation()).protocol.name
    )


def test_words_of_versions() -> None:
    """F-01 F-04: what is written is the major version alone, and what was passed over is named shortly."""
    assert version_of("capsule.manifest") == "capsule.manifest/1"
    assert not is_newer("capsule.manifest/1", "m")
    assert is_newer("capsule.manifest/1.1", "m")
    assert passed_over([]) == ""
    assert passed_over(list("abcdefg")).endswith("a, b, c, d, e and 2 more")

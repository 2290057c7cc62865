"""Members of a newer minor version are named, another major version is refused in words, and no unknown key is read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from builders import PROTOCOL, History, generation, sealed

from capsule.core.canonical import canonical
from capsule.core.chain import read
from capsule.core.digest import digest_of
from capsule.core.errors import MalformedError, ProtocolError
from capsule.core.judge import judge
from capsule.core.manifest import Manifest
from capsule.core.toml import read_protocol
from capsule.core.version import passed_over, refuse_other_major


def changed(data: bytes, **changes: Any) -> bytes:
    """Return canonical JSON with other or further keys."""
    return canonical(json.loads(data) | changes)


def test_members_of_a_newer_minor_version_are_named() -> None:
    """F-04: what was added is passed over, and named in the verdict."""
    history = History().opened()
    history.attempt(0)
    evidence = history.evidence()
    evidence.members.add("8-weather/rain.json")
    evidence.later.append("8-weather/rain.json")
    verdict = judge(sealed(evidence))
    assert verdict.integrity == "intact"
    (members,) = [check for check in verdict.checks if check.id == "V-02"]
    assert members.words.endswith("passed over, as of a newer minor version: 8-weather/rain.json")


@pytest.mark.parametrize("version", ["", "1", "1.1"])
@pytest.mark.parametrize("where", ["manifest", "protocol", "event", "data", "head", "results", "journal"])
def test_no_unknown_key_is_read(where: str, version: str) -> None:
    """F-03: documents are what they are key by key, whatever version an unknown key `schema` claims."""
    extra = {"room": 5} | ({"schema": f"capsule.ledger/{version}"} if version else {})
    history = History().opened()
    history.attempt(0)
    if where in ("event", "data"):
        line = json.loads(history.lines[-1])
        (line if where == "event" else line["data"]).update(extra)
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
    elif where == "head":
        evidence.head = changed(evidence.head, **extra)
    elif where == "journal":
        name = next(iter(evidence.journals))
        evidence.journals[name] = evidence.journals[name].replace(b'"cell"', b'"room": 5, "cell"', 1)
    assert judge(sealed(evidence)).integrity == "broken"


@pytest.mark.parametrize("version", ["2", "0", "2.1", "999"])
def test_another_major_version_is_refused_in_words(version: str) -> None:
    """F-02 F-05: both versions are named, and what to do."""
    data = changed(generation()["manifest.json"], schema=f"capsule.manifest/{version}")
    with pytest.raises(
        MalformedError, match=rf"expected capsule\.manifest/1, found capsule\.manifest/{version}"
    ) as error:
        Manifest.from_bytes(data, "manifest.json")
    assert error.value.hint
    opened = {"data": {"format": f"capsule.ledger/{version}", "protocol": "x"}}
    ledger = canonical(json.loads(History().opened().lines[0]) | opened)
    assert "capsule.ledger/1" in read(ledger + b"\n", "ledger").faults[0]


@pytest.mark.parametrize("version", ["1.0", "1.1", "1.01", "1.", "01", "1.2.3", " 1", "one", ""])
def test_a_document_has_one_spelling_of_its_version(version: str) -> None:
    """F-01: documents have a major version only."""
    data = changed(generation()["manifest.json"], schema=f"capsule.manifest/{version}")
    with pytest.raises(MalformedError):
        Manifest.from_bytes(data, "manifest.json")
    assert digest_of(data) != digest_of(generation()["manifest.json"])


@pytest.mark.parametrize("version", ["1.1", "2"])
def test_a_protocol_of_another_version_is_not_frozen(version: str) -> None:
    """F-05: it may ask for what this version does not do."""
    text = PROTOCOL.replace('"capsule.protocol/1"', f'"capsule.protocol/{version}"')
    with pytest.raises(ProtocolError, match=r"p\.toml:\d+: schema: .*capsule\.protocol/1"):
        read_protocol(text.encode(), "p.toml")


def test_words_of_versions() -> None:
    """F-02 F-04: what was passed over is named shortly, and the version at hand is no other."""
    refuse_other_major("capsule-archive/1.7", "0-header.json")
    assert passed_over([]) == ""
    assert passed_over(list("abcdefg")).endswith("a, b, c, d, e and 2 more")

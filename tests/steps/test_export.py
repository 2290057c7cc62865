"""Exports, read by the libraries of those whose formats they are, and held to what the capsule says.

`make test-exports` shows the same folders to RO-Crate's validator and to MLflow itself, which need packages that the
tested set of this project has no room for.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import bagit
import pytest
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from rocrate.rocrate import ROCrate
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import VerificationError
from securesystemslib.signer import SSlibKey

from capsule.archive.reader import walk
from capsule.steps.exports import rocrate
from tests.conftest import Capsule

GOLDEN = Path(__file__).parents[1] / "golden"
INTACT = ("supported", "refuted", "budget-ended")
NOT_INTACT = {"results-missing": ("incomplete", 3), "journal-edited": ("broken", 1)}
FORMS = ("bagit", "ro-crate", "mlflow", "in-toto")


def golden(name: str) -> Path:
    return GOLDEN / f"{name}.capsule"


def exported(capsule: Capsule, name: str, form: str, output: Path, *more: str | Path) -> Path:
    said = capsule("export", golden(name), "--as", form, "--output", output, *more)
    assert said.code == 0, said
    return output


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def members_of(name: str) -> set[str]:
    with golden(name).open("rb") as stream:
        return {event.name for event in walk(stream) if type(event).__name__ == "MemberStart"}


def test_a_crate_says_which_members_this_version_does_not_know(capsule: Capsule, tmp_path: Path) -> None:
    folder = exported(capsule, "newer-minor", "ro-crate", tmp_path / "crate")
    graph = json.loads((folder / "ro-crate-metadata.json").read_text())["@graph"]
    said = {item["@id"]: item["description"] for item in graph if item["@type"] == "File"}
    assert [name for name in said if said[name] == rocrate.LATER] == ["8-plots/ratio.svg"]
    assert rocrate.description("8-README/NOTES.md") == rocrate.LATER
    assert rocrate.description("8-README/VERIFY.md") == rocrate.ROOMS["8-README"]


@pytest.mark.parametrize("name", INTACT)
def test_a_bag_is_valid(capsule: Capsule, tmp_path: Path, name: str) -> None:
    """The Library of Congress's own tool accepts the bag; its payload is every member, and it names the capsule."""
    folder = exported(capsule, name, "bagit", tmp_path / "bag")
    bag = bagit.Bag(str(folder))
    bag.validate()
    verdict = json.loads(capsule("verify", golden(name), "--json").out)
    assert bag.info["External-Identifier"] == verdict["capsule"]
    assert (bag.info["Capsule-Integrity"], bag.info["Capsule-Outcome"]) == ("intact", verdict["outcome"])
    assert set(bag.payload_files()) == {f"data/{member}" for member in members_of(name)}


@pytest.mark.parametrize("change", ["payload", "tag", "missing", "added"])
def test_a_changed_bag_is_not(capsule: Capsule, tmp_path: Path, change: str) -> None:
    """What the tool accepts is held to its digests: no file of the bag can change, vanish or come unseen."""
    folder = exported(capsule, "supported", "bagit", tmp_path / "bag")
    ledger = folder / "data" / "2-ledger.jsonl"
    match change:
        case "payload":
            ledger.write_bytes(ledger.read_bytes().replace(b"completed", b"Completed", 1))
        case "tag":
            information = folder / "bag-info.txt"
            information.write_text(information.read_text().replace("supported", "refuted"))
        case "missing":
            ledger.unlink()
        case "added":
            (folder / "data" / "more").write_text("more")
    with pytest.raises(bagit.BagValidationError):
        bagit.Bag(str(folder)).validate()


def terms() -> set[str]:
    """Return the terms of RO-Crate's context, as its library ships it."""
    text = resources.files("rocrate").joinpath("data/ro-crate.jsonld").read_text(encoding="utf-8")
    return set(json.loads(text)["@context"])


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        assert set(value) == {"@id"}, "an entity inside another one"
        yield value["@id"]
    for item in value if isinstance(value, list) else ():
        yield from references(item)


@pytest.mark.parametrize("name", INTACT)
def test_a_crate_is_read_and_keeps_its_rules(capsule: Capsule, tmp_path: Path, name: str) -> None:
    """The community's library reads the crate, with every member as a file; RO-Crate 1.1's MUSTs hold."""
    folder = exported(capsule, name, "ro-crate", tmp_path / "crate")
    crate = ROCrate(str(folder))
    found = {entity.id: entity for entity in crate.data_entities}
    assert set(found) == members_of(name)
    for identifier, entity in found.items():
        assert entity["contentSize"] == str((folder / identifier).stat().st_size)
    verdict = json.loads(capsule("verify", golden(name), "--json").out)
    assert crate.root_dataset["identifier"] == verdict["capsule"]
    assert crate.dereference("#outcome")["value"] == verdict["outcome"]

    document = json.loads((folder / "ro-crate-metadata.json").read_text(encoding="utf-8"))
    graph = document["@graph"]
    entities = {entity["@id"]: entity for entity in graph}
    assert len(entities) == len(graph)
    used = {key for entity in graph for key in entity if not key.startswith("@")}
    assert used <= terms()
    assert {entity["@type"] for entity in graph} <= terms()
    linked = {reference for entity in graph for value in entity.values() for reference in references(value)}
    assert linked - set(entities) == {"https://w3id.org/ro/crate/1.1"}
    assert set(entities) - linked == {"ro-crate-metadata.json"}
    root = entities["./"]
    assert entities["ro-crate-metadata.json"]["about"] == {"@id": "./"}
    assert {"name", "description", "datePublished", "license"} <= set(root)
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", root["datePublished"])


@pytest.mark.parametrize("algorithm", [("ed25519",), ("EC", "-pkeyopt", "ec_paramgen_curve:P-256")])
def test_a_statement_is_verified_by_another_library(
    capsule: Capsule, tmp_path: Path, algorithm: tuple[str, ...]
) -> None:
    """securesystemslib accepts the envelope's signature by the public key, refuses it once anything is changed."""
    key = tmp_path / "key.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", *algorithm, "-out", key], check=True, capture_output=True)
    public = subprocess.run(["openssl", "pkey", "-in", key, "-pubout"], check=True, capture_output=True).stdout
    file = exported(capsule, "supported", "in-toto", tmp_path / "statement.json", "--key", key)
    document = json.loads(file.read_bytes())
    envelope = Envelope.from_dict(json.loads(file.read_bytes()))
    trusted = SSlibKey.from_crypto(load_pem_public_key(public), keyid=document["signatures"][0]["keyid"])
    assert list(envelope.verify([trusted], 1)) == [trusted.keyid]

    statement = json.loads(envelope.payload)
    assert envelope.payload_type == "application/vnd.in-toto+json"
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    sums = {subject["name"]: subject["digest"]["sha256"] for subject in statement["subject"]}
    verdict = json.loads(capsule("verify", golden("supported"), "--json").out)
    assert sums == {
        "supported.capsule": hashlib.sha256(golden("supported").read_bytes()).hexdigest(),
        "manifest.json": verdict["manifest"].removeprefix("sha256:"),
    }
    assert statement["predicate"]["verdict"] == verdict

    changed = envelope.payload.replace(b'"outcome":"supported"', b'"outcome":"refuted"')
    assert changed != envelope.payload
    for part, value in (("payload", base64.b64encode(changed).decode()), ("payloadType", "text/plain")):
        with pytest.raises(VerificationError):
            Envelope.from_dict({**json.loads(file.read_bytes()), part: value}).verify([trusted], 1)


def test_a_statement_without_a_key_is_bare(capsule: Capsule, tmp_path: Path) -> None:
    """Without a key there is no envelope, as one has at least one signature; and the command says so."""
    output = tmp_path / "statement.json"
    said = capsule("export", golden("refuted"), "--as", "in-toto", "--output", output)
    assert "unsigned" in said.out
    statement = json.loads(output.read_bytes())
    assert statement["predicate"]["verdict"]["outcome"] == "refuted"


def test_an_mlflow_folder_has_every_attempt_and_result(capsule: Capsule, tmp_path: Path) -> None:
    """Runs, in MLflow's own layout: each attempt with its outcome and charge, below it its arms, and the results."""
    folder = exported(capsule, "supported", "mlflow", tmp_path / "mlruns")
    (experiment,) = folder.iterdir()
    runs = {
        (run / "tags" / "mlflow.runName").read_text(): run
        for run in experiment.iterdir()
        if (run / "meta.yaml").exists()
    }
    results = json.loads(capsule("show", golden("supported"), "7-results/results.json").out)
    (estimate,) = results["estimates"]
    for bound in ("low", "mean", "high"):
        name = f"{estimate['estimate']}.{estimate['workload']}.{bound}"
        _, value, step = (runs["results"] / "metrics" / name).read_text().split()
        assert (float(value), step) == (float(estimate[bound]), "0")
    for hypothesis in results["hypotheses"]:
        tag = runs["results"] / "tags" / f"hypothesis.{hypothesis['hypothesis']}"
        assert tag.read_text() == hypothesis["decision"]
    attempts = {name: run for name, run in runs.items() if re.fullmatch(r"a\d{6}", name)}
    assert {(run / "tags" / "outcome").read_text() for run in attempts.values()} == {"completed"}
    assert all(float((run / "metrics" / "charged_device_seconds").read_text().split()[1]) for run in attempts.values())
    children = [run for name, run in runs.items() if " " in name]
    assert {(run / "tags" / "mlflow.parentRunId").read_text() for run in children} == {
        run.name for run in attempts.values()
    }
    assert sum(len((run / "metrics" / "amount").read_text().splitlines()) for run in children) == 8


@pytest.mark.parametrize("form", FORMS)
def test_the_same_capsule_gives_the_same_bytes(capsule: Capsule, tmp_path: Path, form: str) -> None:
    """An export depends on the capsule alone: no time of day, no host."""
    twice = [exported(capsule, "refuted", form, tmp_path / name) for name in ("first", "second")]
    first, second = (files_of(path) if path.is_dir() else path.read_bytes() for path in twice)
    assert first == second


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NOT_INTACT)
def test_what_is_not_intact_is_exported_on_purpose_only(capsule: Capsule, tmp_path: Path, name: str, form: str) -> None:
    """It is refused with verify's exit code and leaves nothing; with --force what is written says what it is."""
    integrity, code = NOT_INTACT[name]
    output = tmp_path / "out"
    said = capsule("export", golden(name), "--as", form, "--output", output)
    assert (said.code, list(tmp_path.iterdir())) == (code, [])
    assert integrity in said.err
    exported(capsule, name, form, output, "--force")
    written = files_of(output) if output.is_dir() else {"statement": output.read_bytes()}
    told = {
        "bagit": f"Capsule-Integrity: {integrity}",
        "ro-crate": f"This capsule is {integrity}: do not rely on it.",
        "mlflow": integrity,
        "in-toto": f'"integrity":"{integrity}"',
    }[form].encode()
    place = {"bagit": "bag-info.txt", "ro-crate": "ro-crate-metadata.json", "in-toto": "statement"}.get(form)
    assert told in (written[place] if place else next(v for k, v in written.items() if k.endswith("capsule.integrity")))
    if form == "bagit":
        bagit.Bag(str(output)).validate()


@pytest.mark.parametrize("form", FORMS)
def test_a_damaged_container_is_never_exported(capsule: Capsule, tmp_path: Path, form: str) -> None:
    """Members that cannot be read are no members, whoever insists."""
    said = capsule("export", golden("truncated"), "--as", form, "--output", tmp_path / "out", "--force")
    assert (said.code, list(tmp_path.iterdir())) == (1, [])
    assert "sound container" in said.err


@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_written_over(capsule: Capsule, tmp_path: Path, form: str) -> None:
    """What is there already stays as it is."""
    output = tmp_path / "out"
    if form == "in-toto":
        output.write_text("mine")
    else:
        output.mkdir()
        (output / "mine").write_text("mine")
    said = capsule("export", golden("supported"), "--as", form, "--output", output)
    assert said.code == 4
    assert (output if output.is_file() else output / "mine").read_text() == "mine"
    assert list(tmp_path.iterdir()) == [output]


def test_wrong_arguments_are_told(capsule: Capsule, tmp_path: Path) -> None:
    """An unknown form, a key for a form without signatures, and what is no key are usage errors."""
    (tmp_path / "no.pem").write_text("no key")
    for arguments, words in (
        (("--as", "zip"), "expected one of bagit, ro-crate, in-toto, mlflow"),
        (("--as", "bagit", "--key", tmp_path / "no.pem"), "which has no signature"),
        (("--as", "in-toto", "--key", tmp_path / "no.pem"), "expected a private key"),
    ):
        said = capsule("export", golden("supported"), *arguments, "--output", tmp_path / "out")
        assert (said.code, words in said.err) == (2, True), said
        assert not (tmp_path / "out").exists()

"""A re-sealing forger, done: what stops someone who rebuilds a whole capsule consistently, and what does not.

`docs/THREATS.md` says in words what is shown here.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Capsule, Said
from tests.golden.make import resealed, seal, unpack
from tests.signatures import Key


@pytest.fixture(scope="module")
def forged(signed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The signed study's capsule rebuilt with better results; signature and token of its manifest kept."""
    path = tmp_path_factory.mktemp("forged") / "study.capsule"
    path.write_bytes(seal(resealed(unpack(signed.with_suffix(".capsule").read_bytes()))))
    return path


def told(said: Said) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said.out)
    return found


def test_a_capsule_alone_does_not_stop_a_forger(capsule: Capsule, signed: Path, forged: Path) -> None:
    """Every part agrees with every other, so it is intact, says more, and nothing from outside speaks for it."""
    honest, found = (told(capsule("verify", file, "--json")) for file in (signed.with_suffix(".capsule"), forged))
    assert (honest["integrity"], honest["outcome"]) == ("intact", "refuted")
    assert (found["integrity"], found["outcome"]) == ("intact", "supported")
    assert [item["status"] for item in found["checks"]].count("failed") == 0
    assert found["manifest"] == honest["manifest"]
    assert "no seal from outside" in [item["ground"] for item in found["rests_on"]]
    assert "no seal from outside" in capsule("verify", forged).out


def test_an_identity_from_elsewhere_stops_a_forger(capsule: Capsule, signed: Path, forged: Path) -> None:
    """The capsule's does; the manifest's does not, since the promise is the same."""
    honest = told(capsule("verify", signed.with_suffix(".capsule"), "--json"))
    assert capsule("verify", forged, "--against", honest["capsule"]).code == 1
    assert capsule("verify", forged, "--against", honest["manifest"]).code == 0


def test_a_capsule_signature_stops_a_forger(
    capsule: Capsule, signed: Path, forged: Path, keys: Path, tmp_path: Path
) -> None:
    """None came along: incomplete. The honest capsule's beside it: broken. The forger's own: by an unknown key."""
    demand = ("--require-signature", keys / "signers", "--signature-of", "capsule")
    said = capsule("verify", forged, *demand)
    assert said.code == 3
    assert "the capsule itself is unsigned" in said.out
    copied = Path(shutil.copy(forged, tmp_path))
    shutil.copy(f"{signed.with_suffix('.capsule')}.sig", f"{copied}.sig")
    assert capsule("verify", copied).code == 1
    assert capsule("verify", copied, *demand).code == 1
    Path(f"{copied}.sig").unlink()
    assert capsule("sign", copied, "--key", keys / "bob").code == 0
    assert capsule("verify", copied).code == 0
    said = capsule("verify", copied, *demand)
    assert said.code == 3
    assert "unknown to you" in said.out


def test_a_manifest_signature_does_not_stop_a_forger(
    capsule: Capsule, forged: Path, keys: Path, tmp_path: Path
) -> None:
    """The promise was kept; the verdict says what that is worth, and a policy can let a key count for capsules only."""
    said = capsule("verify", forged, "--require-signature", keys / "signers", "--tsa-ca", keys / "tsa" / "ca.pem")
    assert said.code == 0
    assert "the capsule itself unsigned" in said.out
    assert "a forger keeps the signed manifest, rebuilds the rest" in said.out
    only = tmp_path / "signers"
    only.write_text(Key(keys / "alice").allowed(options='namespaces="capsule-archive"'))
    assert capsule("verify", forged, "--require-signature", only).code == 3


def test_a_promise_that_was_changed_afterwards(capsule: Capsule, signed: Path, keys: Path, tmp_path: Path) -> None:
    """Whoever changes a signed and stamped manifest cannot keep signature or token, and without them lacks both."""
    members = unpack(signed.with_suffix(".capsule").read_bytes())
    place = "1-manifest/001/manifest.json"
    moved = {**members, place: members[place].replace(b'"threshold":"5"', b'"threshold":"0"')}
    assert moved != members
    path = tmp_path / "moved.capsule"
    path.write_bytes(seal(moved))
    found = {item["id"]: item["status"] for item in told(capsule("verify", path, "--json"))["checks"]}
    assert (found["V-08"], found["V-09"]) == ("failed", "failed")
    path.write_bytes(seal({name: data for name, data in moved.items() if not name.endswith((".sig", ".tsr"))}))
    options = ("--require-signature", keys / "signers", "--tsa-ca", keys / "tsa" / "ca.pem")
    found = {item["id"]: item["status"] for item in told(capsule("verify", path, *options, "--json"))["checks"]}
    assert (found["V-08"], found["V-09"]) == ("not_checked", "not_checked")

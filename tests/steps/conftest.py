"""A study that was signed and stamped with keys of its own, made once for all tests of this folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.signatures import Authority, Key
from tests.study import make_study


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two keys, an authority, and a policy that trusts one of the keys."""
    folder = tmp_path_factory.mktemp("keys")
    Key.make(folder / "alice")
    Key.make(folder / "bob")
    Authority.make(folder / "tsa")
    (folder / "signers").write_text(Key(folder / "alice").allowed(), encoding="ascii")
    return folder


@pytest.fixture(scope="session")
def signed(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study that refutes its claim: signed, stamped, run and packed, its capsule signed; copy what is to change."""
    home = tmp_path_factory.mktemp("signed")
    protocol = make_study(home / "study", changes={"threshold = 0": "threshold = 5"})

    def step(*arguments: str | Path) -> None:
        environment = {**os.environ, "CAPSULE_LEASE_DIR": str(home / "leases")}
        subprocess.run([sys.executable, "-m", "capsule", *arguments], env=environment, check=True, capture_output=True)

    step("freeze", protocol)
    step("sign", protocol, "--key", keys / "alice")
    step("timestamp", protocol, "--query", home / "query")
    (home / "token").write_bytes(Authority(keys / "tsa").answer((home / "query").read_bytes()))
    step("timestamp", protocol, "--token", home / "token")
    step("run", protocol)
    step("pack", protocol)
    step("sign", protocol.with_suffix(".capsule"), "--key", keys / "alice")
    return protocol

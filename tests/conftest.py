"""Shared by all tests: leases of their own, so that tests never wait for each other or for a person's run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings

# A shell ignores the one in what it starts in the background, and `nohup` the other.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
settings.register_profile("stable", derandomize=True, deadline=None)
settings.load_profile("stable")


@dataclass(frozen=True)
class Said:
    """What a command said and how it ended."""

    code: int
    out: str
    err: str


Capsule = Callable[..., Said]


@pytest.fixture(autouse=True)
def own_leases(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every test a lease folder of its own."""
    monkeypatch.setenv("CAPSULE_LEASE_DIR", str(tmp_path_factory.mktemp("leases")))


@pytest.fixture
def capsule(capsys: pytest.CaptureFixture[str]) -> Capsule:
    """Give a function that runs a command in this process."""
    from capsule.cli.errors import guarded

    def call(*arguments: str | Path) -> Said:
        capsys.readouterr()
        code = guarded([os.fspath(argument) for argument in arguments])
        said = capsys.readouterr()
        assert "Traceback" not in said.out + said.err
        return Said(code, said.out, said.err)

    return call

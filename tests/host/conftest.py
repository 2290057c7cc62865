"""A bench on which attempts really run: a ledger, leases and snapshots in a temporary folder."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from capsule.core.account import Account
from capsule.core.attempt import Attempt, Charge, Event, ManifestAdopted, Opened, Reserved, Settled, exit_faults
from capsule.core.manifest import sources_bytes
from capsule.core.plan import enumerate_cells
from capsule.core.progress import Process, processes
from capsule.core.protocol import Protocol, reserved_ms
from capsule.host import launch
from capsule.host.clock import read_clock
from capsule.host.ledger import Ledger
from capsule.host.reservation import Reservation, reserve
from capsule.host.source import read_tree
from capsule.host.supervision import Supervision, start

MANIFEST = "sha256:" + "a" * 64
SNAPSHOT = "sha256:" + "b" * 64


def protocol_of(
    *,
    command: list[str] | None = None,
    trial: str | None = None,
    parameters: dict[str, Any] | None = None,
    **budget: Any,
) -> Protocol:
    """Return a small protocol with one arm of one command or trial, limits to be overridden by keyword."""
    limits = {
        "device": "any", "device_seconds": "1000", "wall_limit_seconds": "20", "kill_grace_seconds": "2",
        "release_grace_seconds": "1", "exclusivity": "best_effort",
    }  # fmt: skip
    arm: dict[str, Any] = {"name": "only", "parameters": parameters or {}}
    arm |= {"command": command} if command else {"trial": trial}
    value = {
        "schema": "capsule.protocol/1", "name": "0001-x", "title": "t", "question": "q",
        "arms": [arm],
        "workloads": [{"name": "w", "parameters": {"n": 3}}],
        "design": {
            "seeds": [7], "starts": 2, "order": "listed", "order_seed": 0,
            "isolation": "cell" if command else "start", "blocks": 1 if command else 2,
        },
        "observations": [
            {"name": "x", "type": "float64", "optional": True, "replay": {"rule": "exact"}},
            {"name": "words", "type": "text", "optional": True, "replay": {"rule": "exact"}},
        ],
        "gates": [{"name": "g", "observation": "x", "rule": "finite", "on_failure": "record"}],
        "hypotheses": [{"name": "h", "claim": "c", "rule": "gates_pass", "gates": ["g"]}],
        "analysis": {"missing": "withhold", "multiplicity": "none"},
        "budget": limits | {key: value if isinstance(value, int) and key.endswith("max") else str(value)
                            for key, value in budget.items()},
        "environment": {"python": ">=3.11"},
    }  # fmt: skip
    return Protocol.model_validate_json(json.dumps(value))


@dataclass
class Bench:
    """One protocol's places; `go` runs an attempt to its end and returns what the ledger says about it."""

    root: Path
    device: str = "CPU-0"
    supervisions: list[Supervision] = field(default_factory=list)

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.root / "state/ledger.jsonl", self.root / "state/ledger.head.json")

    @property
    def attempts(self) -> Path:
        return self.root / "state/attempts"

    @property
    def leases(self) -> Path:
        return self.root / "leases"

    @property
    def snapshot(self) -> Path:
        return self.root / "snapshot"

    def open(self) -> None:
        self.snapshot.mkdir()
        self.ledger.append("opened", None, Opened(format="capsule.ledger/1", protocol="0001-x"), read_clock())
        self.ledger.append("manifest_adopted", None, ManifestAdopted(manifest=MANIFEST, supersedes=None), read_clock())

    def asked(self, protocol: Protocol) -> Reserved:
        return Reserved(
            manifest=MANIFEST, process=0, pilot=False, from_frozen=False,
            unit="cpu" if self.device == "CPU-0" else "gpu", devices=(self.device,),
            reserved_ms=reserved_ms(protocol.budget),
        )  # fmt: skip

    def reserve(self, asked: Reserved) -> Reservation:
        return reserve(
            self.ledger, asked, budget_ms=10**9, attempts_max=100,
            before=lambda attempt: launch.announce(self.attempts / attempt),
        )  # fmt: skip

    def process(self, protocol: Protocol) -> Process:
        return processes(enumerate_cells(protocol))[0]

    def frozen(self) -> launch.SourceTree:
        """Freeze what is in the snapshot now."""
        paths = sorted(
            os.fsencode(path.relative_to(self.snapshot)) for path in self.snapshot.rglob("*") if path.is_file()
        )
        listed = self.root / "sources.jsonl"
        listed.write_bytes(sources_bytes(read_tree(self.snapshot, paths)))
        return launch.SourceTree(root=str(self.snapshot), sources=str(listed))

    def order(self, protocol: Protocol, **more: Any) -> launch.LaunchOrder:
        if "trees" not in more:
            more["trees"] = [self.frozen()]
        reservation = self.reserve(self.asked(protocol))
        return launch.compose(
            protocol, self.process(protocol), reservation,
            ledger=self.ledger.path, ledger_head=self.ledger.head_path,
            attempt_dir=self.attempts / reservation.attempt, lease_dir=self.leases,
            source_roots={"only": self.snapshot}, snapshot=SNAPSHOT, **more,
        )  # fmt: skip

    def start(self, protocol: Protocol, **more: Any) -> Supervision:
        supervision = start(self.order(protocol, **more))
        self.supervisions.append(supervision)
        return supervision

    def go(self, protocol: Protocol, **more: Any) -> Attempt:
        supervision = self.start(protocol, **more)
        status = supervision.wait(60)
        assert status == launch.SETTLED, (status, self.log(supervision.attempt))
        return self.measured(supervision.attempt)

    def measured(self, attempt: str) -> Attempt:
        """Return a settled attempt; hold that it was charged from its lease to its release, and ended as it exited."""
        found = self.account().attempts[attempt]
        assert isinstance(found.end, Settled)
        assert found.reserved is not None
        assert found.intent is not None
        assert found.released is not None
        assert found.exit is not None
        span = found.released.boottime_ms - found.intent.leased.boottime_ms
        charged = len(found.reserved.devices) * span
        assert found.end.charge == Charge(lower_ms=charged, upper_ms=charged, debited_ms=charged, observed=True)
        assert (span > 0, found.end.overrun_ms) == (True, max(0, charged - found.reserved.reserved_ms))
        assert list(exit_faults(found.exit, found.end.outcome)) == []
        return found

    def python(self, source: str, **limits: Any) -> Attempt:
        """Run a command that is a Python script of this source."""
        return self.go(protocol_of(command=["python", "-c", source], **limits))

    def account(self) -> Account:
        return self.ledger.read()[1]

    def events(self, attempt: str) -> list[Event]:
        return [event for event in self.ledger.read()[0].events if event.attempt == attempt]

    def names(self, attempt: str) -> list[str]:
        return [event.name for event in self.events(attempt)]

    def log(self, attempt: str) -> str:
        path = self.attempts / attempt / "supervisor.log"
        return path.read_text() if path.exists() else ""

    def journal(self, attempt: str) -> str:
        return (self.attempts / attempt / "journal.jsonl").read_text()


DAEMONIZE = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        use()
        os.closerange(0, 3)
        time.sleep(60)
    os._exit(0)
"""
"""What a trial does that leaves a daemon behind, which uses the device and hears no signal."""


def eventually(check: Callable[[], Any], seconds: float = 20) -> Any:
    """Return the first true value of `check`, asked again and again."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        value = check()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f"not true within {seconds} s: {check}")


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """An opened bench; supervisors that a test left running are killed, and their trials with them."""
    if sys.platform != "linux":
        pytest.skip("attempts run on Linux")
    monkeypatch.setenv("CAPSULE_LEASE_DIR", str(tmp_path / "leases"))
    bench = Bench(tmp_path)
    bench.open()
    yield bench
    for supervision in bench.supervisions:
        if supervision.poll() is None:
            supervision.stop(now=True)
            if supervision.wait(10) is None:
                os.kill(supervision.pid, 9)
                supervision.wait(10)

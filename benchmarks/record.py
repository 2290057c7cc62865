"""What recording and supervising cost: one `record` call, one ledger append, and one attempt beside its bare command.

    python benchmarks/record.py [--pairs N] [--watch SECONDS] [--device UUID]

Attempts and bare commands alternate, so that a machine that warms up or is shared favours neither; the differences are
within pairs, and medians are printed with the middle half of the pairs. While a long trial sleeps, the processor time
of supervisor, watchdog and sampler is read. Needs Linux; run by hand on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from capsule import guest
from capsule.core.attempt import Heartbeat, Intent, ManifestAdopted, Opened, Reserved, Settled, Spawned, Unit
from capsule.core.plan import enumerate_cells
from capsule.core.progress import processes
from capsule.core.protocol import Protocol, reserved_ms
from capsule.host import launch
from capsule.host.clock import read_clock
from capsule.host.ledger import Ledger
from capsule.host.process import descendants
from capsule.host.reservation import reserve
from capsule.host.supervision import Supervision, start
from capsule.host.traces import read_traces

MANIFEST = "sha256:" + "0" * 64
COMMAND = [sys.executable, "-S", "-E", "-c", "pass"]
PROTOCOL = {
    "schema": "capsule.protocol/1", "name": "benchmark", "title": "t", "question": "q",
    "arms": [{"name": "only", "command": COMMAND}],
    "workloads": [{"name": "w"}],
    "design": {"seeds": [0], "starts": 2, "order": "listed", "order_seed": 0, "isolation": "cell"},
    "observations": [{"name": "x", "type": "float64", "optional": True, "replay": {"rule": "exact"}}],
    "gates": [{"name": "g", "observation": "x", "rule": "finite", "on_failure": "record"}],
    "hypotheses": [{"name": "h", "claim": "c", "rule": "gates_pass", "gates": ["g"]}],
    "analysis": {"missing": "withhold", "multiplicity": "none"},
    "budget": {"device": "cpu", "device_seconds": "1000000", "wall_limit_seconds": "60", "kill_grace_seconds": "1",
               "release_grace_seconds": "1", "exclusivity": "best_effort"},
    "environment": {"python": ">=3.11"},
}  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--watch", type=int, default=30, help="seconds of a trial that does nothing")
    parser.add_argument("--device", default="CPU-0", help="the device of that trial")
    arguments = parser.parse_args()
    pairs = arguments.pairs
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        show("record(x=…), one row", "µs", [seconds * 1e6 for seconds in record_calls(folder)])
        show("one write of the same bytes", "µs", [seconds * 1e6 for seconds in bare_writes(folder)])
        show("one durable ledger append", "ms", [seconds * 1e3 for seconds in appends(folder)])
        bare, whole, charged = attempts(folder, pairs)
        show("the bare command", "ms", bare)
        show("attempt, reservation to settlement", "ms", whole)
        show("  more than the bare command", "ms", [a - b for a, b in zip(whole, bare, strict=True)])
        show("  charged, lease to release", "ms", charged)
        show("  charged beyond the bare command", "ms", [a - b for a, b in zip(charged, bare, strict=True)])
        for who, share in watching(folder, arguments.watch, arguments.device).items():
            print(f"{who + ' while a trial sleeps':36} {100 * share:9.3f} % of one core")


def show(what: str, unit: str, values: Sequence[float]) -> None:
    """Print the median and the middle half."""
    low, middle, high = statistics.quantiles(values, n=4)
    print(f"{what:36} {middle:9.2f} {unit}   ({low:.2f} to {high:.2f}, {len(values)} times)")


def timed(call: Callable[[], object], times: int, *, batch: int = 1) -> list[float]:
    """Return the seconds of one call, `times` times over batches."""
    result = []
    for _ in range(times):
        began = time.perf_counter()
        for _ in range(batch):
            call()
        result.append((time.perf_counter() - began) / batch)
    return result


def record_calls(folder: Path) -> list[float]:
    """Time `record` as a trial calls it."""
    os.environ["CAPSULE_RECORDS"] = str(folder / "journal.jsonl")
    os.environ["CAPSULE_CELL"] = "c000000"
    try:
        return timed(lambda: guest.record(loss=0.123456789, steps=1000, name="adam"), 200, batch=50)
    finally:
        del os.environ["CAPSULE_RECORDS"], os.environ["CAPSULE_CELL"]


def bare_writes(folder: Path) -> list[float]:
    """Time opening, writing and closing alone: what no recorder can do without."""
    line = b'{"cell":"c000000","loss":0.123456789,"name":"adam","steps":1000}\n'

    def write() -> None:
        descriptor = os.open(folder / "bare.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(descriptor, line)
        os.close(descriptor)

    return timed(write, 200, batch=50)


def opened(folder: Path) -> Ledger:
    """Return a new ledger with one manifest."""
    ledger = Ledger(folder / "ledger.jsonl", folder / "ledger.head.json")
    ledger.append("opened", None, Opened(format="capsule.ledger/1", protocol="benchmark"), read_clock())
    ledger.append("manifest_adopted", None, ManifestAdopted(manifest=MANIFEST, supersedes=None), read_clock())
    return ledger


def asked(protocol: Protocol, device: str = "CPU-0") -> Reserved:
    """Return the reservation of one attempt."""
    unit: Unit = "cpu" if device == "CPU-0" else "gpu"
    return Reserved(
        manifest=MANIFEST, process=0, pilot=False, from_frozen=False, unit=unit, devices=(device,),
        reserved_ms=reserved_ms(protocol.budget),
    )  # fmt: skip


def appends(folder: Path) -> list[float]:
    """Time heartbeats of one running attempt."""
    ledger = opened(folder / "appends")
    attempt = reserve(ledger, asked(protocol()), budget_ms=10**9, attempts_max=9).attempt
    intent = Intent(leased=read_clock(), supervisor_pid=1, argv=(), snapshot=MANIFEST, device_baseline={})
    ledger.append("intent", attempt, intent, read_clock())
    ledger.append("spawned", attempt, Spawned(pid=1, start_ticks=1), read_clock())
    return timed(lambda: ledger.append("heartbeat", attempt, Heartbeat(elapsed_ms=1), read_clock()), 300)


def protocol(command: Sequence[str] = COMMAND) -> Protocol:
    """Return the protocol of one trivial command."""
    arms = [{"name": "only", "command": list(command)}]
    return Protocol.model_validate_json(json.dumps(PROTOCOL | {"arms": arms}))


def attempts(folder: Path, pairs: int) -> tuple[list[float], list[float], list[float]]:
    """Alternate the bare command and a whole attempt of it; milliseconds of both, and what was charged."""
    ledger = opened(folder / "attempts")
    bare, whole, charged = [], [], []
    for _ in range(pairs):
        bare += [1e3 * seconds for seconds in timed(lambda: subprocess.run(COMMAND, check=True), 1)]
        began = time.perf_counter()
        name = attempt(ledger, folder)
        whole.append(1e3 * (time.perf_counter() - began))
        end = ledger.read()[1].attempts[name].end
        assert isinstance(end, Settled), end
        charged.append(float(end.charge.debited_ms))
    return bare, whole, charged


def attempt(ledger: Ledger, folder: Path) -> str:
    """Run one whole attempt."""
    supervision = started(ledger, folder, protocol(), "CPU-0")
    assert supervision.wait(60) == launch.SETTLED
    return supervision.attempt


def watching(folder: Path, seconds: int, device: str) -> dict[str, float]:
    """Return the share of one core that each process takes which looks after a sleeping trial, its start left out."""
    ledger = opened(folder / "watching")
    supervision = started(ledger, folder, protocol(["sleep", str(seconds)]), device)
    time.sleep(5)
    whereabouts = read_traces(folder / "attempts" / supervision.attempt).whereabouts
    assert whereabouts is not None
    assert whereabouts.watchdog is not None
    watchdog = whereabouts.watchdog.pid
    (sampler,) = {item.pid for item in descendants(supervision.pid) if item.parent == supervision.pid} - {watchdog}
    pids = {"supervisor": supervision.pid, "watchdog": watchdog, "sampler": sampler}
    before = {who: processor_seconds(pid) for who, pid in pids.items()}
    time.sleep(seconds - 8)
    shares = {who: (processor_seconds(pid) - before[who]) / (seconds - 8) for who, pid in pids.items()}
    assert supervision.wait(60) == launch.SETTLED
    return shares | {"together": sum(shares.values())}


def processor_seconds(pid: int) -> float:
    """Return the processor time that a process has taken so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def started(ledger: Ledger, folder: Path, of: Protocol, device: str) -> Supervision:
    """Start one attempt."""
    reservation = reserve(ledger, asked(of, device), budget_ms=10**12, attempts_max=10**6)
    attempt_dir = folder / "attempts" / reservation.attempt
    attempt_dir.mkdir(parents=True, exist_ok=True)
    order = launch.compose(
        of,
        processes(enumerate_cells(of))[0],
        reservation,
        ledger=ledger.path,
        ledger_head=ledger.head_path,
        attempt_dir=attempt_dir,
        lease_dir=folder / "leases",
        source_roots={"only": folder},
        snapshot=MANIFEST,
    )
    return start(order)


if __name__ == "__main__":
    main()

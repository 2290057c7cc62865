"""The same promises on a real NVIDIA device: `make test-gpu`, on a machine that has one."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from capsule.core.attempt import Attempt, Reconciled, Refused, Settled
from capsule.core.telemetry import DeviceTelemetry, Sample
from capsule.host import launch
from capsule.host.devices import all_devices
from capsule.host.reconcile import reconcile
from tests.host.conftest import Bench, eventually, protocol_of

pytest_plugins = ["tests.host.conftest"]

GPUS = [device for device in all_devices() if device.unit == "gpu"]
ALLOCATE = "import os, signal, sys, time, torch\nheld = torch.ones(2**28, device='cuda')\ntorch.cuda.synchronize()\n"
LIMITS = {"wall_limit_seconds": 60, "kill_grace_seconds": 2, "release_grace_seconds": 20}
HOLDER = """
import sys, time, torch
held = torch.ones(2**24, device='cuda')
torch.cuda.synchronize()
print('held', flush=True)
time.sleep(float(sys.argv[1]))
"""


@pytest.fixture
def gpu(bench: Bench) -> Bench:
    assert GPUS, "these tests need an NVIDIA device"
    bench.device = GPUS[0].uuid
    return bench


def settled(attempt: Attempt) -> Settled:
    assert isinstance(attempt.end, Settled)
    return attempt.end


def samples(gpu: Bench, attempt: str) -> list[Sample]:
    data = (gpu.attempts / attempt / "telemetry.jsonl").read_bytes()
    return [Sample.from_bytes(line, "telemetry.jsonl") for line in data.splitlines()]


def telemetry(attempt: Attempt) -> DeviceTelemetry:
    (found,) = settled(attempt).telemetry.values()
    return found


@contextmanager
def holding(seconds: float) -> Iterator[subprocess.Popen[str]]:
    """A process of somebody else that holds 64 MiB of the device."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(seconds)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_trial_sees_the_leased_device_and_gives_its_memory_back(gpu: Bench) -> None:
    source = ALLOCATE + "print(torch.cuda.device_count())\nopen(os.environ['CAPSULE_RECORDS'], 'w').write('{}\\n')"
    attempt = gpu.python(source, **LIMITS)
    assert settled(attempt).outcome == "completed", gpu.log(attempt.id)
    assert (gpu.attempts / attempt.id / "stdout").read_text() == "1\n"
    assert attempt.intent is not None
    assert attempt.intent.device_baseline[f"{gpu.device}.memory_used_bytes"]
    clean = next(event for event in gpu.events(attempt.id) if event.name == "device_clean")
    assert clean.data.to_json()["clean"] is True


def test_samples_tell_memory_clocks_power_and_energy(gpu: Bench) -> None:
    source = ALLOCATE + "until = time.time() + 4\nwhile time.time() < until:\n    held.mul_(1.0)\n"
    attempt = gpu.python(source, **LIMITS)
    found = samples(gpu, attempt.id)
    assert len(found) >= 6
    assert max(item.memory_used_bytes or 0 for item in found) > 2**30
    assert max(item.sm_clock_mhz or 0 for item in found) > 0
    assert max(item.power_mw or 0 for item in found) > 0
    assert {item.device for item in found} == {gpu.device}
    summary = telemetry(attempt)
    assert (summary.energy_mj or 0) > 0, summary.energy_missing
    assert summary.observed_ms <= summary.elapsed_ms


def test_a_segmentation_fault_with_memory_held_is_measured_and_released(gpu: Bench) -> None:
    attempt = gpu.python(ALLOCATE + "os.kill(os.getpid(), signal.SIGSEGV)", **LIMITS)
    assert settled(attempt).outcome == "signalled"
    assert attempt.exit is not None
    assert attempt.exit.signal == signal.SIGSEGV
    assert "not clean" not in settled(attempt).evidence


def test_a_kill_in_the_middle_of_a_kernel_is_released(gpu: Bench) -> None:
    attempt = gpu.python(ALLOCATE + "torch.cuda._sleep(10**12)\nos.kill(os.getpid(), signal.SIGKILL)", **LIMITS)
    assert settled(attempt).outcome in ("sigkill_unattributed", "oom_host")
    assert "not clean" not in settled(attempt).evidence


def test_a_daemon_that_keeps_the_device_is_found_and_ended(gpu: Bench) -> None:
    source = (
        "import os, sys, time\n"
        "if os.fork():\n    time.sleep(15)\n    os._exit(0)\n"
        "os.setsid()\n"
        "if os.fork():\n    os._exit(0)\n" + ALLOCATE + "time.sleep(600)\n"
    )
    attempt = gpu.python(source, **LIMITS)
    assert settled(attempt).outcome == "leaked_descendants"
    assert "not clean" not in settled(attempt).evidence


@pytest.mark.parametrize(
    "busy", ["while True:\n    held.mul_(1.0)\n", "torch.cuda._sleep(10**13)\ntorch.cuda.synchronize()"]
)
def test_the_wall_limit_holds_against_a_busy_kernel_and_a_trial_that_ignores_term(gpu: Bench, busy: str) -> None:
    source = ALLOCATE + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + busy
    attempt = gpu.python(source, **LIMITS | {"wall_limit_seconds": 20})
    assert settled(attempt).outcome == "wall_limit"
    assert 22_000 <= settled(attempt).charge.debited_ms < 45_000
    assert "not clean" not in settled(attempt).evidence


def test_a_process_that_holds_the_device_before_is_seen(gpu: Bench) -> None:
    with holding(120):
        supervision = gpu.start(protocol_of(command=["true"], **LIMITS | {"exclusivity": "required"}))
        assert supervision.wait(60) == launch.REFUSED, gpu.log(supervision.attempt)
    refused = gpu.account().attempts[supervision.attempt].refused
    assert isinstance(refused, Refused)
    assert refused.reason in ("foreign_process", "unverifiable")


def test_a_process_that_comes_during_a_run_is_seen(gpu: Bench) -> None:
    source = (
        ALLOCATE + "open('PIDFILE', 'w').write('x')\ntime.sleep(25)\n"
        "open(os.environ['CAPSULE_RECORDS'], 'w').write('{}\\n')\n"
    )
    pidfile = gpu.root / "pid"
    command = ["python", "-c", source.replace("PIDFILE", str(pidfile))]
    supervision = gpu.start(protocol_of(command=command, **LIMITS | {"exclusivity": "required"}))
    eventually(pidfile.exists, 60)
    with holding(3):
        time.sleep(3)
    assert supervision.wait(90) == launch.SETTLED, gpu.log(supervision.attempt)
    attempt = gpu.account().attempts[supervision.attempt]
    assert settled(attempt).exclusivity == settled(attempt).outcome != "exclusive", settled(attempt).evidence
    assert len({item.exclusivity for item in samples(gpu, attempt.id)}) > 1


def test_a_killed_supervisor_leaves_the_lease_with_whoever_holds_the_device(gpu: Bench) -> None:
    pidfile = gpu.root / "pid"
    source = ALLOCATE + f"open({str(pidfile)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    supervision = gpu.start(protocol_of(command=["python", "-c", source], **LIMITS))
    eventually(lambda: pidfile.exists() and pidfile.read_text(), 60)
    os.kill(supervision.pid, signal.SIGKILL)
    supervision.wait(10)
    second = gpu.start(protocol_of(command=["true"], **LIMITS))
    assert second.wait(60) == launch.REFUSED
    reconcile(gpu.ledger, gpu.attempts, gpu.leases)
    end = gpu.account().attempts[supervision.attempt].end
    assert isinstance(end, Reconciled)
    assert end.charge.observed
    assert not Path(f"/proc/{pidfile.read_text()}").exists()
    assert isinstance(gpu.go(protocol_of(command=["true"], **LIMITS)).end, Settled)


def test_nothing_is_left_on_the_device_for_the_next(gpu: Bench) -> None:
    assert gpu.go(protocol_of(command=["true"], exclusivity="best_effort")).end is not None

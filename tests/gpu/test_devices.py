"""The same promises on a real NVIDIA device: `make test-gpu`, on a machine that has one."""

import signal

import pytest

from capsule.core.attempt import Settled
from capsule.host.devices import all_devices
from tests.host.conftest import Bench, protocol_of

pytest_plugins = ["tests.host.conftest"]

GPUS = [device for device in all_devices() if device.unit == "gpu"]
ALLOCATE = "import os, signal, sys, time, torch\nheld = torch.ones(2**28, device='cuda')\ntorch.cuda.synchronize()\n"
LIMITS = {"wall_limit_seconds": 60, "kill_grace_seconds": 2, "release_grace_seconds": 20}


@pytest.fixture
def gpu(bench: Bench) -> Bench:
    assert GPUS, "these tests need an NVIDIA device"
    bench.device = GPUS[0].uuid
    return bench


def test_a_trial_sees_the_leased_device_and_gives_its_memory_back(gpu: Bench) -> None:
    source = ALLOCATE + "print(torch.cuda.device_count())\nopen(os.environ['CAPSULE_RECORDS'], 'w').write('{}\\n')"
    attempt = gpu.python(source, **LIMITS)
    assert isinstance(attempt.end, Settled)
    assert attempt.end.outcome == "completed", gpu.log(attempt.id)
    assert (gpu.attempts / attempt.id / "stdout").read_text() == "1\n"
    assert attempt.intent is not None
    assert attempt.intent.device_baseline[f"{gpu.device}.memory_used_bytes"]
    clean = next(event for event in gpu.events(attempt.id) if event.name == "device_clean")
    assert clean.data.to_json()["clean"] is True


def test_a_segmentation_fault_with_memory_held_is_measured_and_released(gpu: Bench) -> None:
    attempt = gpu.python(ALLOCATE + "os.kill(os.getpid(), signal.SIGSEGV)", **LIMITS)
    assert isinstance(attempt.end, Settled)
    assert attempt.end.outcome == "signalled"
    assert attempt.exit is not None
    assert attempt.exit.signal == signal.SIGSEGV
    assert "not clean" not in attempt.end.evidence


def test_a_daemon_that_keeps_the_device_is_found_and_ended(gpu: Bench) -> None:
    source = (
        "import os, sys, time\n"
        "if os.fork():\n    time.sleep(15)\n    os._exit(0)\n"
        "os.setsid()\n"
        "if os.fork():\n    os._exit(0)\n" + ALLOCATE + "time.sleep(600)\n"
    )
    attempt = gpu.python(source, **LIMITS)
    assert isinstance(attempt.end, Settled)
    assert attempt.end.outcome == "leaked_descendants"
    assert "not clean" not in attempt.end.evidence


def test_the_wall_limit_holds_against_a_trial_that_ignores_term(gpu: Bench) -> None:
    source = ALLOCATE + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True:\n    held.mul_(1.0)\n"
    attempt = gpu.python(source, **LIMITS | {"wall_limit_seconds": 20})
    assert isinstance(attempt.end, Settled)
    assert attempt.end.outcome == "wall_limit"
    assert 22_000 <= attempt.end.charge.debited_ms < 40_000


def test_nothing_is_left_on_the_device_for_the_next(gpu: Bench) -> None:
    assert gpu.go(protocol_of(command=["true"], exclusivity="best_effort")).end is not None

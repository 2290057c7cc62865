"""Devices: what is chosen, what counts as idle, and what a run makes of a device that is not."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from capsule.core.attempt import Settled
from capsule.core.errors import MachineError
from capsule.host import launch
from capsule.host.devices import all_devices, backend_for, find_device, find_devices
from capsule.host.devices.cpu import CpuBackend
from capsule.host.devices.fake import IDLE_BYTES, FakeBackend
from capsule.host.devices.nvml import MEMORY_TOLERANCE_BYTES, NvmlBackend
from capsule.host.lease import lease_path, read_holder
from tests.host.conftest import Bench, protocol_of


class Machine:
    """Fake devices and the scenario of what goes wrong with them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, uuid: str, name: str = "Fake H200") -> None:
        (self.folder / uuid / "allocations").mkdir(parents=True)
        (self.folder / uuid / "device.json").write_text(json.dumps({"name": name}))

    def scenario(self, uuid: str, **what: Any) -> None:
        (self.folder / "scenario.json").write_text(json.dumps({uuid: what}))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    folder = tmp_path / "devices"
    folder.mkdir()
    monkeypatch.setenv("CAPSULE_FAKE_DEVICES", str(folder))
    return Machine(folder)


# Choosing.


def test_any_is_an_accelerator_where_there_is_one_and_else_the_cpu(machine: Machine) -> None:
    assert find_device("any").uuid == "CPU-0"
    machine.add("GPU-a")
    assert find_device("any").uuid == "GPU-a"
    assert find_device("any", "cpu").uuid == "CPU-0"
    assert find_device("cpu").unit == "cpu"
    assert [device.uuid for device in all_devices()] == ["GPU-a", "CPU-0"]


def test_a_device_is_chosen_by_a_part_of_its_name_or_the_beginning_of_its_uuid(machine: Machine) -> None:
    machine.add("GPU-aaaa", "NVIDIA A100")
    machine.add("GPU-abbb", "NVIDIA H200")
    assert find_device("h200").uuid == "GPU-abbb"
    assert find_device("gpu", "GPU-ab").uuid == "GPU-abbb"
    assert [device.uuid for device in find_devices("gpu", [], 2)] == ["GPU-aaaa", "GPU-abbb"]
    assert [device.uuid for device in find_devices("any", ["GPU-abbb", "GPU-aaaa"], 2)] == ["GPU-aaaa", "GPU-abbb"]


@pytest.mark.parametrize(
    ("required", "choices", "count"),
    [("gpu", [], 3), ("h100", [], 1), ("cpu", ["gpu"], 1), ("cpu", [], 2), ("any", [], 3), ("any", ["GPU-zzzz"], 1)],
)
def test_a_missing_device_is_an_error_of_the_machine_that_lists_what_is_there(
    machine: Machine, required: str, choices: list[str], count: int
) -> None:
    machine.add("GPU-aaaa")
    machine.add("GPU-abbb")
    with pytest.raises(MachineError, match="GPU-aaaa") as missing:
        find_devices(required, choices, count)
    assert missing.value.hint


def test_an_unknown_device_has_no_home(machine: Machine) -> None:
    assert isinstance(backend_for("CPU-0"), CpuBackend)
    with pytest.raises(MachineError, match="GPU-gone"):
        backend_for("GPU-gone")


# The fake.


def test_the_fake_counts_memory_of_live_processes_and_names_strangers(machine: Machine) -> None:
    machine.add("GPU-a")
    fake = FakeBackend(machine.folder)
    baseline = fake.baseline("GPU-a")
    assert baseline == {"memory_used_bytes": IDLE_BYTES, "driver": "fake"}
    assert fake.occupancy("GPU-a", own=()).exclusivity == "exclusive"
    (machine.folder / f"GPU-a/allocations/{os.getpid()}").write_text("4096")
    assert fake.occupancy("GPU-a", own=()).foreign == (os.getpid(),)
    assert fake.occupancy("GPU-a", own=(os.getpid(),)).exclusivity == "exclusive"
    assert "in use" in (fake.unclean("GPU-a", baseline) or "")
    (machine.folder / f"GPU-a/allocations/{os.getpid()}").unlink()
    assert fake.unclean("GPU-a", baseline) is None
    (machine.folder / "GPU-a/device.json").unlink()
    with pytest.raises(MachineError, match="gone"):
        fake.baseline("GPU-a")


# A2, B4, E3 in attempts.


def refused(bench: Bench, machine: Machine, **limits: Any) -> tuple[str, str]:
    supervision = bench.start(protocol_of(command=["true"], **limits))
    assert supervision.wait(20) == launch.REFUSED, bench.log(supervision.attempt)
    attempt = bench.account().attempts[supervision.attempt]
    assert attempt.refused is not None
    assert bench.names(attempt.id) == ["reserved", "refused"]
    assert attempt.held_ms == 0
    return attempt.refused.reason, attempt.refused.words


@pytest.fixture
def gpu(bench: Bench, machine: Machine) -> Bench:
    machine.add("GPU-a")
    bench.device = "GPU-a"
    return bench


def test_a_foreign_process_before_the_start_is_refused(gpu: Bench, machine: Machine) -> None:
    machine.scenario("GPU-a", foreign=[{"pid": 4242}])
    reason, words = refused(gpu, machine)
    assert (reason, "4242" in words) == ("foreign_process", True)


def test_exclusivity_that_cannot_be_proven_is_refused_only_where_it_is_required(gpu: Bench, machine: Machine) -> None:
    machine.scenario("GPU-a", exclusivity="unverifiable")
    assert refused(gpu, machine, exclusivity="required")[0] == "unverifiable"
    assert gpu.go(protocol_of(command=["true"])).end is not None


def test_a_cpu_is_never_known_to_be_exclusive(bench: Bench, machine: Machine) -> None:
    assert refused(bench, machine, exclusivity="required")[0] == "unverifiable"


def test_a_device_that_does_not_answer_is_refused(gpu: Bench, machine: Machine) -> None:
    machine.scenario("GPU-a", errors={"baseline": "GPU is lost"})
    reason, words = refused(gpu, machine)
    assert (reason, words) == ("machine", "GPU-a: GPU is lost")


def test_the_trial_sees_the_leased_device_only(gpu: Bench, machine: Machine) -> None:
    machine.add("GPU-b")
    source = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['CAPSULE_DEVICE'])"
    attempt = gpu.python(source)
    assert (gpu.attempts / attempt.id / "stdout").read_text() == "GPU-a cuda\n"
    assert attempt.intent is not None
    assert attempt.intent.device_baseline == {"GPU-a.memory_used_bytes": IDLE_BYTES, "GPU-a.driver": "fake"}


ALLOCATE = (
    "import os\nopen(os.environ['CAPSULE_FAKE_DEVICE_FOLDERS'] + f'/allocations/{os.getpid()}', 'w').write('5')\n"
    "open(os.environ['CAPSULE_RECORDS'], 'w').write('{}\\n')\n"
)


def test_memory_that_comes_back_late_is_charged_until_it_does(gpu: Bench, machine: Machine) -> None:
    machine.scenario("GPU-a", keeps_memory_ms=400)
    attempt = gpu.python(ALLOCATE, release_grace_seconds=10)
    assert isinstance(attempt.end, Settled)
    assert attempt.end.outcome == "completed"
    assert 400 <= attempt.end.charge.debited_ms < 3_000
    assert read_holder(lease_path(gpu.leases, "GPU-a")) is None


def test_memory_that_never_comes_back_is_charged_for_the_grace_and_the_device_not_used_again(
    gpu: Bench, machine: Machine
) -> None:
    machine.scenario("GPU-a", keeps_memory_ms=10**9)
    attempt = gpu.python(ALLOCATE, release_grace_seconds="0.5")
    assert isinstance(attempt.end, Settled)
    assert attempt.end.charge.debited_ms >= 500
    assert "the device is not clean" in attempt.end.evidence
    clean = next(event for event in gpu.events(attempt.id) if event.name == "device_clean")
    assert clean.data.to_json()["clean"] is False
    reason, words = refused(gpu, machine)
    assert (reason, f"attempt {attempt.id} of 0001-x left it so" in words) == ("device_unclean", True)
    machine.scenario("GPU-a")
    assert gpu.go(protocol_of(command=["true"])).end is not None
    assert read_holder(lease_path(gpu.leases, "GPU-a")) is None


def test_a_device_that_is_lost_during_the_run_is_said_to_be(gpu: Bench, machine: Machine) -> None:
    source = "import os, time\nos.unlink(os.environ['CAPSULE_FAKE_DEVICE_FOLDERS'] + '/device.json')"
    attempt = gpu.python(source)
    assert isinstance(attempt.end, Settled)
    assert attempt.end.outcome == "device_lost"
    holder = read_holder(lease_path(gpu.leases, "GPU-a"))
    assert holder is not None
    assert holder.attempt == attempt.id


def test_a_slow_device_is_waited_for_and_charged(gpu: Bench, machine: Machine) -> None:
    machine.scenario("GPU-a", delay_ms=150)
    attempt = gpu.go(protocol_of(command=["true"]))
    assert isinstance(attempt.end, Settled)
    assert attempt.end.charge.debited_ms >= 300


# NVML, by a stand-in with its functions.


class NVMLError(Exception):
    """What the real library raises."""


class Library:
    """The functions of pynvml that are used, over two made-up devices."""

    NVMLError = NVMLError

    def __init__(self) -> None:
        self.used = {"GPU-0": 615 * 2**20, "GPU-1": 615 * 2**20}
        self.pids: dict[str, list[int]] = {"GPU-0": [], "GPU-1": []}
        self.broken: set[str] = set()

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in object.__getattribute__(self, "broken"):
            raise NVMLError(f"{name} failed")
        return object.__getattribute__(self, name)

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        return f"GPU-{index}"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid not in self.used:
            raise NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetUUID(self, handle: str) -> bytes:  # noqa: N802
        return handle.encode()

    def nvmlDeviceGetName(self, handle: str) -> str:  # noqa: N802
        return "NVIDIA H200"

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "580.1"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:  # noqa: N802
        return types.SimpleNamespace(used=self.used[handle])

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:  # noqa: N802
        return [types.SimpleNamespace(pid=pid) for pid in self.pids[handle]]


@pytest.fixture
def library() -> Library:
    return Library()


def test_nvml_lists_devices_by_uuid_and_measures_them_idle(library: Library) -> None:
    nvml = NvmlBackend(library)
    assert [(device.uuid, device.unit, device.name) for device in nvml.devices()] == [
        ("GPU-0", "gpu", "NVIDIA H200"),
        ("GPU-1", "gpu", "NVIDIA H200"),
    ]
    baseline = nvml.baseline("GPU-1")
    assert baseline == {"memory_used_bytes": 615 * 2**20, "driver": "580.1"}
    library.used["GPU-1"] += MEMORY_TOLERANCE_BYTES
    assert nvml.unclean("GPU-1", baseline) is None
    library.used["GPU-1"] += 1
    assert "679 MiB in use, 615 MiB when idle" in (nvml.unclean("GPU-1", baseline) or "")
    assert nvml.environment(["GPU-1"]) == {"CUDA_VISIBLE_DEVICES": "GPU-1"}


@pytest.mark.parametrize(
    ("pids", "used", "own", "expected"),
    [
        ([], 615 * 2**20, [], "exclusive"),
        ([7], 615 * 2**20, [7], "exclusive"),
        ([7], 80 * 2**30, [7], "exclusive"),
        ([7, 8], 615 * 2**20, [7], "contaminated"),
        ([0], 615 * 2**20, [], "unverifiable"),
        ([2**32 - 1], 615 * 2**20, [], "unverifiable"),
        ([], 3 * 2**30, [], "unverifiable"),
    ],
)
def test_what_nvml_lists_is_doubted_where_it_cannot_be_true(
    library: Library, pids: list[int], used: int, own: list[int], expected: str
) -> None:
    library.pids["GPU-0"], library.used["GPU-0"] = pids, used
    assert NvmlBackend(library).occupancy("GPU-0", own).exclusivity == expected


def test_nvml_errors_are_errors_of_the_machine(library: Library) -> None:
    nvml = NvmlBackend(library)
    with pytest.raises(MachineError, match="Not Found"):
        nvml.baseline("GPU-9")
    library.broken = {"nvmlDeviceGetMemoryInfo"}
    for call in (lambda: nvml.baseline("GPU-0"), lambda: nvml.unclean("GPU-0", {})):
        with pytest.raises(MachineError, match="nvmlDeviceGetMemoryInfo failed"):
            call()


def test_without_a_driver_there_are_no_devices(library: Library) -> None:
    library.broken = {"nvmlInit"}
    nvml = NvmlBackend(library)
    assert nvml.devices() == ()
    with pytest.raises(MachineError, match="no NVIDIA driver"):
        nvml.baseline("GPU-0")


def test_asking_for_the_cpu_loads_no_driver() -> None:
    code = (
        "import sys; from capsule.host.devices import backend_for; backend_for('CPU-0'); "
        "sys.exit('pynvml' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""Devices: what is chosen, what counts as idle, and what a run makes of a device that is not."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import types
import uuid
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from capsule.core.attempt import Settled
from capsule.core.errors import MachineError
from capsule.core.telemetry import READINGS, Sample, sample_faults
from capsule.host import devices, launch, preflight
from capsule.host.devices import DeviceLostError, all_devices, ask, backend_for, backends, find_device, find_devices
from capsule.host.devices import occupancy as judgement
from capsule.host.devices.base import Backend, Baseline, Occupancy
from capsule.host.devices.cpu import CpuBackend
from capsule.host.devices.cuda import visible_uuids
from capsule.host.devices.fake import IDLE_BYTES, FakeBackend
from capsule.host.devices.nvml import NvmlBackend, is_installed
from capsule.host.devices.occupancy import ECHO_SECONDS, MEMORY_TOLERANCE_BYTES, Judge, Look
from capsule.host.killable import call
from capsule.host.lease import lease_path, read_holder
from capsule.host.preflight import Refusal, inspect_devices
from tests.host.conftest import Bench, protocol_of

MIB = 2**20
NOBODY = 2**22 + 7
"""A pid that no process of this machine can have."""


class Machine:
    """Fake devices and the scenario of what goes wrong with them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, uuid: str, name: str = "Fake H200") -> None:
        (self.folder / uuid / "allocations").mkdir(parents=True)
        (self.folder / uuid / "device.json").write_text(json.dumps({"name": name}))

    def scenario(self, uuid: str, **what: Any) -> None:
        (self.folder / "scenario.new").write_text(json.dumps({uuid: what}))
        (self.folder / "scenario.new").rename(self.folder / "scenario.json")


def checked(sample: Sample) -> Sample:
    """A sample as its consumers may rely on it: every null with its reason, and the same after a way through bytes."""
    assert list(sample_faults(sample)) == []
    assert Sample.from_bytes(sample.to_bytes(), "sample") == sample
    return sample


@pytest.fixture
def stranger() -> Iterator[int]:
    """A live process that is no descendant of anything of ours but this test."""
    process = subprocess.Popen(["sleep", "60"])
    yield process.pid
    process.kill()
    process.wait()


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


def test_a_list_of_devices_does_not_wait_for_a_driver_that_hangs(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No command hangs for ever, and one that needs no accelerator asks none."""
    machine.add("GPU-a")
    machine.scenario("*", delays={"devices": 60_000})
    monkeypatch.setattr(devices, "DRIVER_SECONDS", 0.3)
    began = time.monotonic()
    for work in (all_devices, lambda: backend_for("GPU-a"), lambda: find_device("any")):
        with pytest.raises(MachineError, match="did not answer within"):
            work()
    assert time.monotonic() - began < 10
    assert find_device("cpu").uuid == find_device("any", "cpu").uuid == "CPU-0"
    assert isinstance(backend_for("CPU-0"), CpuBackend)


def test_a_driver_is_asked_by_another_process_unless_this_one_uses_it(machine: Machine, library: "Library") -> None:
    assert ask(CpuBackend(), os.getpid) == os.getpid()
    assert ask(FakeBackend(machine.folder), os.getpid) != os.getpid()
    nvml = NvmlBackend(library)
    assert not nvml.started
    assert [device.uuid for device in ask(nvml, nvml.devices)] == ["GPU-0", "GPU-1"]
    assert not nvml.started
    nvml.baseline("GPU-0")
    assert nvml.started
    assert ask(nvml, os.getpid) == os.getpid()


def test_nvml_is_not_used_on_both_sides_of_a_fork(library: "Library") -> None:
    """What the driver's library holds open belongs to the process that opened it."""
    nvml = NvmlBackend(library)
    nvml.baseline("GPU-0")
    for work in (lambda: nvml.baseline("GPU-0"), lambda: NvmlBackend(library).occupancy("GPU-0", ())):
        with pytest.raises(MachineError, match=f"in use by process {os.getpid()}"):
            call(work, 60)
    assert call(nvml.devices, 60) == ()
    assert "in use by process" in (call(lambda: nvml.sample("GPU-0", (), {}), 60).error or "")


def test_a_machine_without_an_nvidia_library_starts_nothing_to_list_its_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CAPSULE_FAKE_DEVICES", raising=False)
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a process was started"))
    if not is_installed():
        assert [type(backend) for backend in backends()] == [CpuBackend]
        assert [device.uuid for device in all_devices()] == ["CPU-0"]
    assert find_device("cpu").uuid == "CPU-0"


# The CPU.


def test_a_cpu_is_not_watched() -> None:
    cpu = CpuBackend()
    assert (cpu.sampled, cpu.started, cpu.visible()) == (False, False, ("CPU-0",))
    sample = checked(cpu.sample("CPU-0", [5, 3], {}))
    assert (sample.exclusivity, sample.own, sample.error) == ("unverifiable", (3, 5), None)
    assert set(sample.missing) == set(READINGS)


# Whose a device is: one judgement for every home and for both moments.


LOOKS = [
    # listed, used MiB above idle, utilization, own, expected, foreign, own listed
    ([], 0, 0, [], "exclusive", (), ()),
    ([], 0, None, [], "exclusive", (), ()),
    ([], 64, 0, [], "exclusive", (), ()),
    ([], 65, 0, [], "unverifiable", (), ()),
    ([], 0, 1, [], "unverifiable", (), ()),
    ([7], 9000, 99, [7], "exclusive", (), (7,)),
    ([7], 9000, 99, [7, 8], "exclusive", (), (7,)),
    ([7, 8], 0, 0, [7], "contaminated", (8,), (7,)),
    ([8], 0, 0, [], "contaminated", (8,), ()),
    ([0], 0, 0, [], "unverifiable", (), ()),
    ([2**32 - 1], 0, 0, [7], "unverifiable", (), ()),
    ([0, 7], 0, 0, [7], "unverifiable", (), (7,)),
    ([0, 8, 7], 0, 0, [7], "contaminated", (8,), (7,)),
    ([NOBODY], 0, 0, [], "unverifiable", (), ()),
    ([NOBODY, 7], 0, 0, [7], "unverifiable", (), (7,)),
    ([NOBODY, 8], 0, 0, [], "contaminated", (8,), ()),
    ([1], 0, 0, [1], "exclusive", (), (1,)),
    ([0], 0, 0, [0], "unverifiable", (), ()),
]


@pytest.mark.parametrize(("listed", "above", "utilization", "own", "expected", "foreign", "ours"), LOOKS)
def test_a_drivers_list_is_doubted_where_it_cannot_be_true(
    listed: list[int],
    above: int,
    utilization: int | None,
    own: list[int],
    expected: str,
    foreign: tuple[int, ...],
    ours: tuple[int, ...],
) -> None:
    look = Look(frozenset(listed), "", (615 + above) * MIB, utilization)
    found = Judge().sampled("GPU-0", lambda: look, own, 615 * MIB, lambda pid: pid < NOBODY)
    assert (found.exclusivity, found.foreign, found.own) == (expected, foreign, ours)
    assert found.words


def test_a_list_that_the_driver_does_not_give_is_never_exclusive() -> None:
    look = Look(None, "Not Supported", 615 * MIB, 0)
    found = Judge().sampled("GPU-0", lambda: look, [7], 615 * MIB, lambda pid: True)
    assert (found.exclusivity, "Not Supported" in found.words) == ("unverifiable", True)


def test_without_an_idle_baseline_two_gib_are_somebodys() -> None:
    for used, expected in ((2048 * MIB, "exclusive"), (2048 * MIB + 1, "unverifiable"), (None, "exclusive")):
        look = Look(frozenset(), "", used, 0)
        assert Judge().sampled("GPU-0", lambda look=look: look, [], None, lambda pid: True).exclusivity == expected


def test_a_process_that_has_just_ended_is_looked_for_once_more() -> None:
    """It may be listed still when it is gone already; the list is taken again before anything is doubted."""
    looks = iter([Look(frozenset({NOBODY}), "", 615 * MIB, 0), Look(frozenset(), "", 615 * MIB, 0)])
    found = Judge().sampled("GPU-0", lambda: next(looks), [], 615 * MIB, lambda pid: False)
    assert found.exclusivity == "exclusive"
    assert next(looks, None) is None


def test_a_process_that_ours_has_just_started_is_ours(stranger: int) -> None:
    """It can be listed before whoever collected our processes could know of it."""
    look = Look(frozenset({stranger}), "", 615 * MIB, 0)
    judge = Judge()
    for own, expected in (([os.getpid()], "exclusive"), ([], "contaminated"), ([NOBODY], "contaminated")):
        assert judge.sampled("GPU-0", lambda: look, own, 615 * MIB, lambda pid: True).exclusivity == expected


def test_our_processes_are_read_after_the_drivers_list() -> None:
    order: list[str] = []

    class Live(list[int]):
        def __iter__(self) -> Iterator[int]:
            order.append("own")
            return iter([7])

    def look() -> Look:
        order.append("list")
        return Look(frozenset({7}), "", 0, 0)

    assert Judge().sampled("GPU-0", look, Live(), 0, lambda pid: True).own == (7,)
    assert order[0] == "list"


def test_what_ours_left_is_ours_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver averages utilization over a time in which our process still ran; later it is somebody's."""
    now = 1000.0
    monkeypatch.setattr(judgement.time, "monotonic", lambda: now)
    judge = Judge()
    busy, left = Look(frozenset({7}), "", 9000 * MIB, 80), Look(frozenset(), "", 900 * MIB, 80)

    def found(uuid: str, look: Look, own: list[int]) -> Occupancy:
        return judge.sampled(uuid, lambda: look, own, 615 * MIB, lambda pid: True)

    assert found("GPU-0", left, []).exclusivity == "unverifiable"
    assert found("GPU-0", busy, [7]).own == (7,)
    assert found("GPU-1", left, []).exclusivity == "unverifiable"
    now += ECHO_SECONDS - 0.1
    after = found("GPU-0", left, [])
    assert (after.exclusivity, "listed just before" in after.words) == ("exclusive", True)
    stranger = Look(frozenset({8}), "", 900 * MIB, 80)
    assert found("GPU-0", stranger, []).exclusivity == "contaminated"
    now += 0.2
    assert found("GPU-0", left, []).exclusivity == "unverifiable"


class Looked(FakeBackend):
    """A device of which every look but the last is used up."""

    def __init__(self, *looks: Look) -> None:
        super().__init__(Path())
        self.looks = list(looks)

    def baseline(self, uuid: str) -> Baseline:
        return {}

    def occupancy(self, uuid: str, own: Collection[int]) -> Occupancy:
        def look() -> Look:
            return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]

        return Judge().sampled(uuid, look, own, None, lambda pid: True)


def busy(utilization: int) -> Look:
    return Look(frozenset(), "", 615 * MIB, utilization)


def test_before_an_attempt_utilization_alone_is_given_time_to_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """All devices are waited for together, and samples can be taken of them meanwhile."""
    slept: list[float] = []
    monkeypatch.setattr(preflight.time, "sleep", slept.append)
    backends = {"GPU-0": Looked(*map(busy, (40, 40, 20, 20, 0))), "GPU-1": Looked(*map(busy, (9, 9, 0)))}
    waited: list[list[str]] = []
    inspect_devices(backends, {}, "required", lambda uuids: waited.append(sorted(uuids)))
    assert len(slept) == 2
    assert waited == [["GPU-0", "GPU-1"], ["GPU-0"]]


@pytest.mark.parametrize(
    "look",
    [
        Look(frozenset(), "", 9000 * MIB, 40),
        Look(frozenset({0}), "", 615 * MIB, 40),
        Look(None, "no", 615 * MIB, 40),
    ],
)
def test_before_an_attempt_other_doubts_are_not_waited_for(monkeypatch: pytest.MonkeyPatch, look: Look) -> None:
    monkeypatch.setattr(preflight.time, "sleep", lambda seconds: pytest.fail("waited"))
    with pytest.raises(Refusal) as refused:
        inspect_devices({"GPU-0": Looked(look)}, {}, "required")
    assert refused.value.reason == "unverifiable"
    inspect_devices({"GPU-0": Looked(look)}, {}, "best_effort")


def test_a_foreign_process_is_not_waited_for_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.time, "sleep", lambda seconds: pytest.fail("waited"))
    backends = {"GPU-0": Looked(busy(40)), "GPU-1": Looked(Look(frozenset({8}), "", 615 * MIB, 40))}
    with pytest.raises(Refusal, match="in use by pid 8"):
        inspect_devices(backends, {}, "best_effort")


def test_utilization_that_does_not_settle_is_somebodys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "SETTLE_SECONDS", 0.1)
    with pytest.raises(Refusal, match="1 % utilization and the driver lists no process"):
        inspect_devices({"GPU-0": Looked(busy(1))}, {}, "required")


def test_a_process_exists_also_where_it_is_hidden_or_not_ours(monkeypatch: pytest.MonkeyPatch, stranger: int) -> None:
    assert judgement.exists(os.getpid())
    assert judgement.exists(stranger)
    assert not judgement.exists(NOBODY)
    assert not judgement.exists(2**40)

    def refuse(pid: int, number: int) -> None:
        raise PermissionError

    with monkeypatch.context() as patched:
        patched.setattr(os, "kill", refuse)
        assert judgement.exists(stranger)


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


def test_the_fakes_sample_is_whole(machine: Machine) -> None:
    machine.add("GPU-a")
    fake = FakeBackend(machine.folder)
    baseline = fake.baseline("GPU-a")
    sample = checked(fake.sample("GPU-a", (), baseline))
    assert (sample.device, sample.exclusivity, sample.driver, sample.layout) == ("GPU-a", "exclusive", "fake", "whole")
    assert sample.missing == {"xid": "none was reported"}
    assert abs(sample.at_ms - time.clock_gettime(time.CLOCK_BOOTTIME) * 1000) < 5_000
    time.sleep(0.02)
    later = checked(fake.sample("GPU-a", (), baseline))
    assert (later.energy_mj or 0) > (sample.energy_mj or 0)
    assert later.at_ms > sample.at_ms


def test_the_fake_lists_live_allocations_in_samples_too(machine: Machine, stranger: int) -> None:
    machine.add("GPU-a")
    fake = FakeBackend(machine.folder)
    baseline = fake.baseline("GPU-a")
    (machine.folder / f"GPU-a/allocations/{stranger}").write_text(str(900 * MIB))
    sample = checked(fake.sample("GPU-a", (), baseline))
    assert (sample.exclusivity, sample.foreign, sample.own) == ("contaminated", (stranger,), ())
    assert sample.memory_used_bytes == IDLE_BYTES + 900 * MIB
    assert sample.utilization_percent
    for own in ([stranger], [os.getpid()]):
        sample = checked(fake.sample("GPU-a", own, baseline))
        assert (sample.exclusivity, sample.foreign, sample.own) == ("exclusive", (), (stranger,))


def test_the_fake_keeps_memory_for_every_observer_alike(machine: Machine, stranger: int) -> None:
    """Also those in processes forked to ask, which take nothing they learnt along."""
    machine.add("GPU-a")
    machine.scenario("GPU-a", keeps_memory_ms=1_000)
    fake = FakeBackend(machine.folder)
    baseline = fake.baseline("GPU-a")
    (machine.folder / f"GPU-a/allocations/{stranger}").write_text(str(900 * MIB))
    os.kill(stranger, signal.SIGKILL)
    os.waitid(os.P_PID, stranger, os.WEXITED | os.WNOWAIT)
    assert "in use" in (call(lambda: fake.unclean("GPU-a", baseline), 60) or "")
    sample = checked(fake.sample("GPU-a", (), baseline))
    assert (sample.exclusivity, "lists no process" in sample.words) == ("unverifiable", True)
    until = time.monotonic() + 10
    while call(lambda: fake.unclean("GPU-a", baseline), 60) is not None:
        assert time.monotonic() < until
        time.sleep(0.05)
    assert FakeBackend(machine.folder).unclean("GPU-a", baseline) is None


@pytest.mark.parametrize(
    ("foreign", "expected"),
    [
        ({"pid": 77}, "contaminated"),
        ({"pid": 77, "elsewhere": True}, "unverifiable"),
        ({"pid": 0}, "unverifiable"),
        ({"pid": 2**32 - 1}, "unverifiable"),
        ({"pid": 77, "from_ms": 10**9}, "exclusive"),
        ({"pid": 77, "to_ms": 0}, "exclusive"),
        ({"pid": 77, "from_ms": 0, "to_ms": 10**9}, "contaminated"),
    ],
)
def test_the_fake_lists_strangers_in_their_time(machine: Machine, foreign: dict[str, Any], expected: str) -> None:
    machine.add("GPU-a")
    machine.scenario("GPU-a", foreign=[foreign])
    fake = FakeBackend(machine.folder)
    time.sleep(0.002)
    assert fake.occupancy("GPU-a", own=()).exclusivity == expected
    assert checked(fake.sample("GPU-a", (), fake.baseline("GPU-a"))).exclusivity == expected


def test_the_fake_that_lists_nothing_is_unverifiable_in_samples_too(machine: Machine) -> None:
    machine.add("GPU-a")
    machine.scenario("GPU-a", exclusivity="unverifiable")
    fake = FakeBackend(machine.folder)
    assert checked(fake.sample("GPU-a", (os.getpid(),), fake.baseline("GPU-a"))).exclusivity == "unverifiable"


def test_the_fakes_readings_change_in_their_time(machine: Machine) -> None:
    machine.add("GPU-a")
    machine.scenario(
        "GPU-a",
        sample=[
            {"throttle": 0x800000000004, "ecc_uncorrected": 1, "driver": "2", "layout": "mig:MIG-1", "xid": 79},
            {"energy_mj": 5, "to_ms": 10**9},
            {"power_mw": None},
            {"remapped_rows": 9, "from_ms": 10**9},
        ],
    )
    sample = checked(FakeBackend(machine.folder).sample("GPU-a", (), {}))
    assert (sample.throttle, sample.ecc_uncorrected, sample.driver) == (0x800000000004, 1, "2")
    assert (sample.layout, sample.xid, sample.energy_mj, sample.remapped_rows) == ("mig:MIG-1", 79, 5, 0)
    assert sample.missing == {"power_mw": "the scenario hides it"}


def test_use_that_the_scenario_shows_and_nobody_explains_is_doubted(machine: Machine) -> None:
    machine.add("GPU-a")
    fake = FakeBackend(machine.folder)
    for reading in ({"utilization_percent": 3}, {"memory_used_bytes": IDLE_BYTES + MEMORY_TOLERANCE_BYTES + 1}):
        machine.scenario("GPU-a", sample=[reading])
        assert checked(fake.sample("GPU-a", (), {"memory_used_bytes": IDLE_BYTES})).exclusivity == "unverifiable"


def test_the_fake_is_lost_for_every_call_from_its_time_on(machine: Machine) -> None:
    machine.add("GPU-a")
    machine.scenario("GPU-a", lost_from_ms=10**9)
    fake = FakeBackend(machine.folder)
    baseline = fake.baseline("GPU-a")
    assert fake.sample("GPU-a", (), baseline).error is None
    machine.scenario("GPU-a", lost_from_ms=0)
    sample = checked(fake.sample("GPU-a", (os.getpid(),), baseline))
    assert (sample.lost, sample.error, sample.own) == (True, "GPU-a: GPU is lost", ())
    for work in (
        lambda: fake.baseline("GPU-a"),
        lambda: fake.occupancy("GPU-a", ()),
        lambda: fake.unclean("GPU-a", baseline),
    ):
        with pytest.raises(DeviceLostError):
            work()
    (machine.folder / "GPU-a/device.json").unlink()
    machine.scenario("GPU-a")
    assert checked(fake.sample("GPU-a", (), baseline)).lost


def test_the_fake_fails_and_hangs_by_the_call(machine: Machine) -> None:
    machine.add("GPU-a")
    fake = FakeBackend(machine.folder)
    baseline = fake.baseline("GPU-a")
    machine.scenario("GPU-a", errors={"sample": "Unknown Error", "unclean": {"words": "later", "from_ms": 10**9}})
    sample = checked(fake.sample("GPU-a", (), baseline))
    assert (sample.error, sample.lost) == ("GPU-a: Unknown Error", False)
    assert fake.unclean("GPU-a", baseline) is None
    machine.scenario("GPU-a", delays={"sample": 60_000, "unclean": [{"ms": 60_000, "from_ms": 10**9}]}, delay_ms=20)
    began = time.monotonic()
    assert fake.unclean("GPU-a", baseline) is None
    assert 0.02 <= time.monotonic() - began < 10
    with pytest.raises(MachineError, match="did not answer"):
        call(lambda: fake.sample("GPU-a", (), baseline), 0.2)
    machine.scenario("*", delays={"visible": {"ms": 60_000, "to_ms": 10**9}})
    with pytest.raises(MachineError, match="did not answer"):
        call(fake.visible, 0.2)


def visible(backend: Backend, environment: dict[str, str]) -> tuple[str, ...] | None:
    def work() -> tuple[str, ...] | None:
        os.environ.clear()
        os.environ.update(environment)
        return backend.visible()

    return call(work, 60)


def test_the_fake_shows_a_program_what_its_environment_names(machine: Machine) -> None:
    machine.add("GPU-a")
    machine.add("GPU-b")
    fake = FakeBackend(machine.folder)
    assert visible(fake, {}) == ("GPU-a", "GPU-b")
    assert visible(fake, fake.environment(["GPU-b"])) == ("GPU-b",)
    assert visible(fake, {"CUDA_VISIBLE_DEVICES": "GPU-b,GPU-x,GPU-a"}) == ("GPU-b",)
    assert visible(fake, {"CUDA_VISIBLE_DEVICES": ""}) == ()
    machine.scenario("GPU-a", sees=["GPU-b"])
    assert visible(fake, fake.environment(["GPU-a"])) == ("GPU-b",)
    machine.scenario("*", sees=[])
    assert visible(fake, fake.environment(["GPU-a"])) == ()
    machine.scenario("*", sees=None)
    assert visible(fake, fake.environment(["GPU-a"])) is None


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
    """What the real library raises: `value` is the driver's number."""

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        words = {3: "Not Supported", 6: "Not Found", 10: "Timeout", 13: "Function Not Found", 15: "GPU is lost"}
        return words.get(self.value, f"error {self.value}")


class Gpu:
    """One made-up device, or a MIG instance of one."""

    def __init__(self, uuid: str, name: str = "NVIDIA H200", parent: "Gpu | None" = None) -> None:
        self.uuid, self.name, self.parent = uuid, name, parent
        self.used = 615 * MIB
        self.pids: dict[str, list[int]] = {"Compute": [], "Graphics": [], "MPSCompute": []}
        self.mig_mode = 0
        self.instances: list[Gpu | None] = []
        self.events: list[tuple[int, int]] = []
        self.readings: dict[str, Any] = {
            "UtilizationRates": types.SimpleNamespace(gpu=0, memory=0),
            "ClockInfo": {1: 1980, 2: 3201},
            "Temperature": 33,
            "PowerUsage": 118_500,
            "TotalEnergyConsumption": 987_654_321,
            "CurrentClocksThrottleReasons": 0x1,
            "TotalEccErrors": {0: 4, 1: 2},
            "RemappedRows": (1, 2, 0, 0),
            "SupportedEventTypes": 0x8 | 0x10,
        }


class Library:
    """The functions of pynvml that are used, over made-up devices; `broken` maps a function to the error it raises."""

    NVMLError = NVMLError

    def __init__(self) -> None:
        self.gpus = [Gpu("GPU-0"), Gpu("GPU-1")]
        self.broken: dict[str, int | Exception] = {}
        self.asked: list[str] = []
        self.sets: list[list[Gpu]] = []
        self.driver: str | bytes = "580.1"

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml"):
            object.__getattribute__(self, "asked").append(name)
            error = object.__getattribute__(self, "broken").get(name)
            if isinstance(error, Exception):
                raise error
            if error is not None:
                return lambda *arguments: raised(NVMLError(error))
        return object.__getattribute__(self, name)

    def find(self, uuid: str) -> Gpu:
        for gpu in self.gpus:
            for item in (gpu, *gpu.instances):
                if item is not None and item.uuid == uuid:
                    return item
        raise NVMLError(6)

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:  # noqa: N802
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Gpu:  # noqa: N802
        return self.find(uuid)

    def nvmlDeviceGetUUID(self, gpu: Gpu) -> bytes:  # noqa: N802
        return gpu.uuid.encode()

    def nvmlDeviceGetName(self, gpu: Gpu) -> str:  # noqa: N802
        return gpu.name

    def nvmlSystemGetDriverVersion(self) -> str | bytes:  # noqa: N802
        return self.driver

    def nvmlDeviceGetMemoryInfo(self, gpu: Gpu) -> Any:  # noqa: N802
        return types.SimpleNamespace(used=gpu.used)

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: Gpu) -> list[Any]:  # noqa: N802
        return [types.SimpleNamespace(pid=pid) for pid in gpu.pids["Compute"]]

    def nvmlDeviceGetGraphicsRunningProcesses(self, gpu: Gpu) -> list[Any]:  # noqa: N802
        return [types.SimpleNamespace(pid=pid) for pid in gpu.pids["Graphics"]]

    def nvmlDeviceGetMPSComputeRunningProcesses(self, gpu: Gpu) -> list[Any]:  # noqa: N802
        return [types.SimpleNamespace(pid=pid) for pid in gpu.pids["MPSCompute"]]

    def nvmlDeviceGetMigMode(self, gpu: Gpu) -> list[int]:  # noqa: N802
        return [gpu.mig_mode, 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: Gpu) -> int:  # noqa: N802
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: Gpu, index: int) -> Gpu:  # noqa: N802
        found = gpu.instances[index] if index < len(gpu.instances) else None
        return found or raised(NVMLError(6))

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, gpu: Gpu) -> Gpu:  # noqa: N802
        return gpu.parent or raised(NVMLError(2))

    def nvmlDeviceGetUtilizationRates(self, gpu: Gpu) -> Any:  # noqa: N802
        return whole(gpu)["UtilizationRates"]

    def nvmlDeviceGetClockInfo(self, gpu: Gpu, clock: int) -> int:  # noqa: N802
        return whole(gpu)["ClockInfo"][clock]  # type: ignore[no-any-return]

    def nvmlDeviceGetTemperature(self, gpu: Gpu, sensor: int) -> int:  # noqa: N802
        assert sensor == 0
        return whole(gpu)["Temperature"]  # type: ignore[no-any-return]

    def nvmlDeviceGetPowerUsage(self, gpu: Gpu) -> int:  # noqa: N802
        return whole(gpu)["PowerUsage"]  # type: ignore[no-any-return]

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: Gpu) -> int:  # noqa: N802
        return whole(gpu)["TotalEnergyConsumption"]  # type: ignore[no-any-return]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: Gpu) -> int:  # noqa: N802
        return whole(gpu)["CurrentClocksThrottleReasons"]  # type: ignore[no-any-return]

    def nvmlDeviceGetTotalEccErrors(self, gpu: Gpu, kind: int, counter: int) -> int:  # noqa: N802
        assert counter == 0, "the volatile counter starts with the driver"
        return whole(gpu)["TotalEccErrors"][kind]  # type: ignore[no-any-return]

    def nvmlDeviceGetRemappedRows(self, gpu: Gpu) -> tuple[int, ...]:  # noqa: N802
        return whole(gpu)["RemappedRows"]  # type: ignore[no-any-return]

    def nvmlDeviceGetSupportedEventTypes(self, gpu: Gpu) -> int:  # noqa: N802
        return whole(gpu)["SupportedEventTypes"]  # type: ignore[no-any-return]

    def nvmlEventSetCreate(self) -> list[Gpu]:  # noqa: N802
        self.sets.append([])
        return self.sets[-1]

    def nvmlDeviceRegisterEvents(self, gpu: Gpu, kinds: int, events: list[Gpu]) -> None:  # noqa: N802
        assert kinds == 0x8
        events.append(gpu)

    def nvmlEventSetWait(self, events: list[Gpu], timeout_ms: int) -> Any:  # noqa: N802
        assert timeout_ms == 0, "a sample never waits"
        for gpu in events:
            if gpu.events:
                kind, data = gpu.events.pop(0)
                return types.SimpleNamespace(eventType=kind, eventData=data)
        raise NVMLError(10)


def raised(error: Exception) -> Any:
    raise error


def whole(gpu: Gpu) -> dict[str, Any]:
    if gpu.parent is not None:
        raise NVMLError(3)
    return gpu.readings


@pytest.fixture
def library() -> Library:
    return Library()


@pytest.fixture
def split(library: Library) -> Gpu:
    """A device in MIG mode with two instances, the second slot empty."""
    gpu = library.gpus[1]
    gpu.mig_mode = 1
    first, second = (Gpu(f"MIG-{name}", "NVIDIA H200 MIG 1g.18gb", gpu) for name in "ba")
    gpu.instances = [first, None, second]
    return gpu


def test_nvml_lists_devices_by_uuid_and_measures_them_idle(library: Library) -> None:
    nvml = NvmlBackend(library)
    assert nvml.sampled
    assert [(device.uuid, device.unit, device.name) for device in nvml.devices()] == [
        ("GPU-0", "gpu", "NVIDIA H200"),
        ("GPU-1", "gpu", "NVIDIA H200"),
    ]
    baseline = nvml.baseline("GPU-1")
    assert baseline == {"memory_used_bytes": 615 * MIB, "driver": "580.1"}
    library.gpus[1].used += MEMORY_TOLERANCE_BYTES
    assert nvml.unclean("GPU-1", baseline) is None
    library.gpus[1].used += 1
    assert "679 MiB in use, 615 MiB when idle" in (nvml.unclean("GPU-1", baseline) or "")
    assert "no idle baseline" in (nvml.unclean("GPU-1", {}) or "")
    assert nvml.environment(["GPU-1"]) == {"CUDA_VISIBLE_DEVICES": "GPU-1"}


@pytest.mark.parametrize(
    ("pids", "used", "own", "expected"),
    [
        ([], 615 * MIB, [], "exclusive"),
        ([7], 615 * MIB, [7], "exclusive"),
        ([7], 80 * 2**30, [7], "exclusive"),
        ([7, 1], 615 * MIB, [7], "contaminated"),
        ([0], 615 * MIB, [], "unverifiable"),
        ([2**32 - 1], 615 * MIB, [], "unverifiable"),
        ([NOBODY], 615 * MIB, [], "unverifiable"),
        ([], 3 * 2**30, [], "unverifiable"),
    ],
)
def test_what_nvml_lists_is_doubted_where_it_cannot_be_true(
    library: Library, pids: list[int], used: int, own: list[int], expected: str
) -> None:
    library.gpus[0].pids["Compute"], library.gpus[0].used = pids, used
    nvml = NvmlBackend(library)
    assert nvml.occupancy("GPU-0", own).exclusivity == expected
    sample = checked(NvmlBackend(library).sample("GPU-0", own, {"memory_used_bytes": 615 * MIB}))
    assert (sample.exclusivity, sample.memory_used_bytes) == (expected, used)
    assert set(sample.own) == set(pids) & set(own)


def test_utilization_that_nobody_explains_is_doubted(library: Library) -> None:
    library.gpus[0].readings["UtilizationRates"].gpu = 5
    nvml = NvmlBackend(library)
    assert nvml.occupancy("GPU-0", ()).exclusivity == "unverifiable"
    assert "5 % utilization" in checked(nvml.sample("GPU-0", (), nvml.baseline("GPU-0"))).words


@pytest.mark.parametrize("kind", ["Compute", "Graphics", "MPSCompute"])
def test_graphics_and_mps_processes_use_the_device_too(library: Library, kind: str, stranger: int) -> None:
    library.gpus[0].pids[kind] = [stranger]
    nvml = NvmlBackend(library)
    assert nvml.occupancy("GPU-0", ()).foreign == (stranger,)
    sample = checked(nvml.sample("GPU-0", (), {}))
    assert (sample.exclusivity, sample.foreign) == ("contaminated", (stranger,))


@pytest.mark.parametrize(
    ("function", "error", "expected"),
    [
        ("nvmlDeviceGetComputeRunningProcesses", 3, "unverifiable"),
        ("nvmlDeviceGetComputeRunningProcesses", 4, "unverifiable"),
        ("nvmlDeviceGetComputeRunningProcesses", AttributeError("too old"), "unverifiable"),
        ("nvmlDeviceGetGraphicsRunningProcesses", 3, "exclusive"),
        ("nvmlDeviceGetGraphicsRunningProcesses", 4, "unverifiable"),
        ("nvmlDeviceGetMPSComputeRunningProcesses", 3, "exclusive"),
        ("nvmlDeviceGetMPSComputeRunningProcesses", 13, "exclusive"),
        ("nvmlDeviceGetMPSComputeRunningProcesses", AttributeError("too old"), "exclusive"),
        ("nvmlDeviceGetMPSComputeRunningProcesses", 999, "unverifiable"),
    ],
)
def test_a_list_that_is_not_given_is_doubted_unless_there_is_none(
    library: Library, function: str, error: int | Exception, expected: str
) -> None:
    library.broken = {function: error}
    nvml = NvmlBackend(library)
    assert nvml.occupancy("GPU-0", ()).exclusivity == expected
    assert checked(nvml.sample("GPU-0", (), {})).exclusivity == expected


def test_nvmls_sample_holds_everything_the_driver_tells(library: Library) -> None:
    sample = checked(NvmlBackend(library).sample("GPU-0", (), {}))
    expected = {
        "memory_used_bytes": 615 * MIB,
        "utilization_percent": 0,
        "sm_clock_mhz": 1980,
        "memory_clock_mhz": 3201,
        "temperature_celsius": 33,
        "power_mw": 118_500,
        "energy_mj": 987_654_321,
        "throttle": 1,
        "ecc_corrected": 4,
        "ecc_uncorrected": 2,
        "remapped_rows": 3,
        "xid": None,
        "driver": "580.1",
        "layout": "whole",
    }
    assert {name: getattr(sample, name) for name in READINGS} == expected
    assert sample.missing == {"xid": "none was reported"}
    assert (sample.error, sample.lost) == (None, False)


def test_a_sample_that_need_not_be_whole_leaves_energy_out(library: Library) -> None:
    nvml = NvmlBackend(library)
    whole, other = (checked(nvml.sample("GPU-0", [9], {}, whole=whole)) for whole in (True, False))
    assert (other.energy_mj, set(other.missing) - set(whole.missing)) == (None, {"energy_mj"})
    assert "energy_mj" not in whole.missing


READERS = {
    "memory_used_bytes": "nvmlDeviceGetMemoryInfo",
    "utilization_percent": "nvmlDeviceGetUtilizationRates",
    "sm_clock_mhz": "nvmlDeviceGetClockInfo",
    "temperature_celsius": "nvmlDeviceGetTemperature",
    "power_mw": "nvmlDeviceGetPowerUsage",
    "energy_mj": "nvmlDeviceGetTotalEnergyConsumption",
    "throttle": "nvmlDeviceGetCurrentClocksThrottleReasons",
    "ecc_corrected": "nvmlDeviceGetTotalEccErrors",
    "remapped_rows": "nvmlDeviceGetRemappedRows",
    "xid": "nvmlDeviceRegisterEvents",
    "driver": "nvmlSystemGetDriverVersion",
}


@pytest.mark.parametrize(("name", "function"), READERS.items())
@pytest.mark.parametrize("error", [3, 4, 999, AttributeError("no such function"), ValueError("not text")])
def test_one_reading_that_fails_is_null_with_its_reason_and_the_rest_is_read(
    library: Library, name: str, function: str, error: int | Exception
) -> None:
    library.broken = {function: error}
    sample = checked(NvmlBackend(library).sample("GPU-0", (), {}))
    assert sample.error is None
    assert getattr(sample, name) is None
    assert function in sample.missing[name]
    twins = {"sm_clock_mhz": "memory_clock_mhz", "ecc_corrected": "ecc_uncorrected"}
    assert set(sample.missing) == {name, "xid"} | {twins[name] for _ in range(name in twins)}


def test_a_device_that_cannot_have_mig_is_whole(library: Library) -> None:
    for error in (3, 13, AttributeError("too old")):
        library.broken = {"nvmlDeviceGetMigMode": error}
        assert checked(NvmlBackend(library).sample("GPU-0", (), {})).layout == "whole"
    library.broken = {"nvmlDeviceGetMigMode": 4}
    assert "nvmlDeviceGetMigMode" in checked(NvmlBackend(library).sample("GPU-0", (), {})).missing["layout"]


def test_unknown_throttle_bits_are_kept_and_numbers_that_mean_unknown_are_not(library: Library) -> None:
    readings = library.gpus[0].readings
    readings["CurrentClocksThrottleReasons"] = 0x4 | 1 << 40
    assert checked(NvmlBackend(library).sample("GPU-0", (), {})).throttle == 0x4 | 1 << 40
    readings["CurrentClocksThrottleReasons"] = 1 << 63
    readings["TotalEnergyConsumption"] = 2**64 - 1
    readings["PowerUsage"] = None
    readings["RemappedRows"] = ()
    sample = checked(NvmlBackend(library).sample("GPU-0", (), {}))
    assert (sample.throttle, sample.energy_mj, sample.power_mw, sample.remapped_rows) == (None,) * 4
    assert "0x8000000000000000" in sample.missing["throttle"]
    assert sample.exclusivity == "exclusive"


def test_a_drivers_text_that_is_no_unicode_is_text(library: Library) -> None:
    library.driver = b"580\xff"
    assert checked(NvmlBackend(library).sample("GPU-0", (), {})).driver == "580\ufffd"


def test_the_first_xid_since_the_last_sample_is_told(library: Library) -> None:
    nvml, gpu = NvmlBackend(library), library.gpus[0]
    gpu.events = [(0x10, 5)]
    assert nvml.sample("GPU-0", (), {}).xid is None
    gpu.events = [(0x10, 5), (0x8, 31), (0x8, 45)]
    assert checked(nvml.sample("GPU-0", (), {})).xid == 31
    assert checked(nvml.sample("GPU-0", (), {})).missing["xid"] == "none was reported"
    gpu.events = [(0x8, 13)] * 1000
    assert nvml.sample("GPU-0", (), {}).xid == 13
    assert len(gpu.events) > 900, "a storm of events does not hold a sample"
    library.gpus[1].events = [(0x8, 79)]
    assert nvml.sample("GPU-1", (), {}).xid == 79
    assert len(library.sets) == 2


def test_where_xids_are_not_told_the_sample_says_why(library: Library) -> None:
    library.gpus[0].readings["SupportedEventTypes"] = 0x10
    nvml = NvmlBackend(library)
    for _ in range(3):
        assert "no Xid" in checked(nvml.sample("GPU-0", (), {})).missing["xid"]
    assert library.sets == []
    library.broken = {"nvmlEventSetWait": 999}
    assert "nvmlEventSetWait" in checked(nvml.sample("GPU-1", (), {})).missing["xid"]


@pytest.mark.parametrize("function", ["nvmlDeviceGetHandleByUUID", *READERS.values()])
def test_a_lost_device_is_lost_whichever_call_says_so(library: Library, function: str) -> None:
    nvml = NvmlBackend(library)
    nvml.sample("GPU-0", (), {})
    library.broken = {function: 15}
    if function == "nvmlDeviceRegisterEvents":
        nvml = NvmlBackend(library)
    sample = checked(nvml.sample("GPU-0", (), {}))
    assert sample.lost
    assert "GPU is lost" in (sample.error or "")


def test_a_device_that_is_not_found_any_more_is_lost(library: Library) -> None:
    nvml = NvmlBackend(library)
    sample = checked(nvml.sample("GPU-9", (), {}))
    assert (sample.lost, "GPU-9" in (sample.error or "")) == (True, True)
    with pytest.raises(DeviceLostError, match="GPU-9"):
        nvml.baseline("GPU-9")


def test_a_device_that_answers_nothing_is_an_error_and_not_lost(library: Library) -> None:
    library.broken = {"nvmlDeviceGetHandleByUUID": 17}
    sample = checked(NvmlBackend(library).sample("GPU-0", (), {}))
    assert (sample.lost, "nvmlDeviceGetHandleByUUID" in (sample.error or "")) == (False, True)
    silent = [name for name in dir(Library) if name.startswith("nvmlDeviceGet") and "Handle" not in name]
    library.broken = dict.fromkeys(silent, 999)
    sample = checked(NvmlBackend(library).sample("GPU-0", (), {}))
    assert (sample.lost, "answers nothing" in (sample.error or "")) == (False, True)


def test_a_sample_without_a_driver_is_an_error(library: Library) -> None:
    library.broken = {"nvmlInit": 9}
    sample = checked(NvmlBackend(library).sample("GPU-0", (), {}))
    assert (sample.lost, "no NVIDIA driver" in (sample.error or "")) == (False, True)


def test_a_device_in_mig_mode_is_shown_as_its_instances(library: Library, split: Gpu) -> None:
    nvml = NvmlBackend(library)
    assert [(device.uuid, device.unit, device.name) for device in nvml.devices()] == [
        ("GPU-0", "gpu", "NVIDIA H200"),
        ("MIG-b", "gpu", "NVIDIA H200 MIG 1g.18gb"),
        ("MIG-a", "gpu", "NVIDIA H200 MIG 1g.18gb"),
    ]
    split.instances = []
    assert [device.uuid for device in nvml.devices()] == ["GPU-0"]


def test_of_a_mig_instance_only_its_own_is_known(library: Library, split: Gpu, stranger: int) -> None:
    """What the whole device does may be its neighbours' doing."""
    nvml = NvmlBackend(library)
    first, _, second = split.instances
    assert first is not None
    assert second is not None
    first.used, second.used = 40 * MIB, 9000 * MIB
    second.pids["Compute"] = [stranger]
    split.readings["UtilizationRates"].gpu = 90
    assert nvml.baseline("MIG-b") == {"memory_used_bytes": 40 * MIB, "driver": "580.1"}
    assert nvml.occupancy("MIG-b", ()).exclusivity == "exclusive"
    assert nvml.occupancy("MIG-a", ()).foreign == (stranger,)
    sample = checked(nvml.sample("MIG-b", (), {"memory_used_bytes": 40 * MIB}))
    assert (sample.exclusivity, sample.memory_used_bytes, sample.driver) == ("exclusive", 40 * MIB, "580.1")
    assert sample.layout == "mig:MIG-a,MIG-b"
    assert set(sample.missing) == set(READINGS) - {"memory_used_bytes", "driver", "layout"}
    assert nvml.environment(["MIG-b"]) == {"CUDA_VISIBLE_DEVICES": "MIG-b"}


def test_a_layout_that_others_changed_shows(library: Library, split: Gpu) -> None:
    nvml = NvmlBackend(library)
    before = nvml.sample("MIG-b", (), {}).layout
    split.instances.append(Gpu("MIG-c", parent=split))
    assert (before, nvml.sample("MIG-b", (), {}).layout) == ("mig:MIG-a,MIG-b", "mig:MIG-a,MIG-b,MIG-c")
    assert nvml.sample("GPU-1", (), {}).layout == "mig:MIG-a,MIG-b,MIG-c"
    split.instances = []
    assert checked(nvml.sample("MIG-b", (), {})).lost


def test_a_device_that_does_not_answer_is_not_listed_and_hides_no_other(library: Library) -> None:
    real = library.nvmlDeviceGetName
    library.nvmlDeviceGetName = lambda gpu: raised(NVMLError(15)) if gpu.uuid == "GPU-0" else real(gpu)  # type: ignore[method-assign]
    assert [device.uuid for device in NvmlBackend(library).devices()] == ["GPU-1"]
    library.broken = {"nvmlDeviceGetCount": 999}
    assert NvmlBackend(library).devices() == ()


def test_nvml_errors_are_errors_of_the_machine(library: Library) -> None:
    nvml = NvmlBackend(library)
    library.broken = {"nvmlDeviceGetMemoryInfo": 999}
    calls: list[Callable[[], object]] = [lambda: nvml.baseline("GPU-0"), lambda: nvml.unclean("GPU-0", {})]
    for work in calls:
        with pytest.raises(MachineError, match="nvmlDeviceGetMemoryInfo: error 999") as failed:
            work()
        assert not isinstance(failed.value, DeviceLostError)
    library.broken = {"nvmlDeviceGetMemoryInfo": 15}
    for work in [*calls, lambda: nvml.occupancy("GPU-0", ())]:
        with pytest.raises(DeviceLostError, match="GPU is lost"):
            work()


def test_nvml_is_only_read(library: Library, split: Gpu) -> None:
    """No call that could change a setting is ever made."""
    nvml = NvmlBackend(library)
    for device in nvml.devices():
        baseline = nvml.baseline(device.uuid)
        nvml.occupancy(device.uuid, ())
        nvml.sample(device.uuid, (), baseline)
        nvml.unclean(device.uuid, baseline)
    harmless = ("nvmlInit", "nvmlDeviceGet", "nvmlSystemGet", "nvmlEventSet", "nvmlDeviceRegisterEvents")
    assert [name for name in library.asked if not name.startswith(harmless)] == []


def test_without_a_driver_there_are_no_devices(library: Library) -> None:
    library.broken = {"nvmlInit": 9}
    nvml = NvmlBackend(library)
    assert nvml.devices() == ()
    with pytest.raises(MachineError, match="no NVIDIA driver"):
        nvml.baseline("GPU-0")


def test_the_names_that_nvml_is_asked_by_exist() -> None:
    """Every function that the stand-in has is one of the real library's, and the numbers are its own."""
    pynvml = pytest.importorskip("pynvml")
    names = [name for name in dir(Library) if name.startswith("nvml")]
    assert [name for name in names if not callable(getattr(pynvml, name, None))] == []
    from capsule.host.devices import nvml

    for ours, theirs in {
        "NOT_SUPPORTED": "NVML_ERROR_NOT_SUPPORTED",
        "NOT_FOUND": "NVML_ERROR_NOT_FOUND",
        "TIMEOUT": "NVML_ERROR_TIMEOUT",
        "FUNCTION_NOT_FOUND": "NVML_ERROR_FUNCTION_NOT_FOUND",
        "CLOCK_SM": "NVML_CLOCK_SM",
        "CLOCK_MEMORY": "NVML_CLOCK_MEM",
        "TEMPERATURE_GPU": "NVML_TEMPERATURE_GPU",
        "ECC_CORRECTED": "NVML_MEMORY_ERROR_TYPE_CORRECTED",
        "ECC_UNCORRECTED": "NVML_MEMORY_ERROR_TYPE_UNCORRECTED",
        "ECC_VOLATILE": "NVML_VOLATILE_ECC",
        "EVENT_XID": "nvmlEventTypeXidCriticalError",
        "MIG_ENABLED": "NVML_DEVICE_MIG_ENABLE",
    }.items():
        assert getattr(nvml, ours) == getattr(pynvml, theirs), ours
    assert {pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_GPU_NOT_FOUND} == nvml.LOST


# What a CUDA program sees, by a stand-in for the driver's library.


class Cuda:
    """The functions of libcuda that are used, with its way of returning through pointers."""

    def __init__(self, *devices: tuple[uuid.UUID, uuid.UUID, bytes]) -> None:
        self.devices = devices
        self.broken: dict[str, int] = {}

    def cuInit(self, flags: int) -> int:  # noqa: N802
        assert flags == 0
        return self.broken.get("cuInit", 0 if self.devices else 100)

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self.devices)
        return self.broken.get("cuDeviceGetCount", 0)

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:  # noqa: N802
        device._obj.value = ordinal + 10
        return self.broken.get("cuDeviceGet", 0)

    def cuDeviceGetName(self, name: Any, size: int, device: ctypes.c_int) -> int:  # noqa: N802
        assert size == 256
        name.value = self.devices[device.value - 10][2]
        return 0

    def cuDeviceGetUuid(self, answer: Any, device: ctypes.c_int) -> int:  # noqa: N802
        answer._obj[:] = list(self.devices[device.value - 10][0].bytes)
        return 0


class NewCuda(Cuda):
    """The library since 11.4."""

    def cuDeviceGetUuid_v2(self, answer: Any, device: ctypes.c_int) -> int:  # noqa: N802
        answer._obj[:] = list(self.devices[device.value - 10][1].bytes)
        return self.broken.get("cuDeviceGetUuid_v2", 0)


ONE, OTHER = uuid.UUID(int=1 << 90), uuid.UUID(int=2**128 - 3)


@pytest.mark.parametrize("cuda", [Cuda, NewCuda])
def test_a_program_sees_devices_by_the_uuids_that_nvml_gives(cuda: type[Cuda]) -> None:
    seen = cuda((OTHER, OTHER, b"NVIDIA H200"), (ONE, ONE, b"NVIDIA H200"))
    assert visible_uuids(seen) == (f"GPU-{OTHER}", f"GPU-{ONE}") == NvmlBackend(Library(), seen).visible()
    assert visible_uuids(seen) == ("GPU-ffffffff-ffff-ffff-ffff-fffffffffffd", f"GPU-{ONE}")


def test_a_program_sees_a_mig_instance_by_its_own_uuid() -> None:
    assert visible_uuids(NewCuda((ONE, OTHER, b"NVIDIA H200 MIG 1g.18gb"))) == (f"MIG-{OTHER}",)
    assert visible_uuids(NewCuda((ONE, OTHER, b"NVIDIA H200"))) == (f"MIG-{OTHER}",)
    assert visible_uuids(NewCuda((OTHER, OTHER, b"NVIDIA H200 MIG 1g.18gb"))) == (f"MIG-{OTHER}",)


def test_a_program_that_sees_no_device_is_not_one_of_which_nobody_can_say() -> None:
    assert visible_uuids(NewCuda()) == ()
    stub = NewCuda()
    stub.broken = {"cuInit": 34}
    assert visible_uuids(stub) is None


@pytest.mark.parametrize("function", ["cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetUuid_v2"])
def test_a_cuda_driver_that_does_not_answer_is_an_error_of_the_machine(function: str) -> None:
    cuda = NewCuda((ONE, ONE, b"NVIDIA H200"))
    cuda.broken = {function: 999}
    with pytest.raises(MachineError, match=f"{function}: error 999"):
        visible_uuids(cuda)


def test_without_the_cuda_library_nobody_can_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: raised(OSError(f"{name}: cannot open shared object file")))
    assert visible_uuids() is None
    assert not is_installed()


def test_asking_for_the_cpu_loads_no_driver() -> None:
    code = (
        "import sys; from capsule.host.devices import backend_for; backend_for('CPU-0'); "
        "sys.exit('pynvml' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

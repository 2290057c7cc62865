"""Attempts side by side, on pretended devices and with real processes: one budget, each device and process once."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from tests.conftest import Capsule
from tests.host.conftest import eventually
from tests.steps.machine import (
    TRIAL,
    at_once_at_most,
    check_no_device_twice,
    devices_of,
    events_of,
    kill_all,
    make_devices,
    make_gpu_study,
    named,
    rows_of,
    start,
)

pytestmark = pytest.mark.slow

STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + TRIAL


@pytest.fixture(autouse=True)
def four_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = make_devices(tmp_path / "devices", "GPU-aaaa", "GPU-bbbb", "GPU-cccc", "GPU-dddd")
    monkeypatch.setenv("CAPSULE_FAKE_DEVICES", str(folder))
    return folder


def frozen(capsule: Capsule, protocol: Path) -> Path:
    said = capsule("freeze", protocol)
    assert said.code == 0, said
    return protocol


def test_one_device_an_attempt_and_two_devices_are_two_at_a_time(capsule: Capsule, tmp_path: Path) -> None:
    """Each attempt has a device of its own, all are of one budget, and the capsule is intact."""
    protocol = frozen(capsule, make_gpu_study(tmp_path / "s", seconds=0.3))
    planned = capsule("run", protocol, "--gpu", "GPU-aa", "--gpu", "GPU-cc", "--dry-run")
    assert "2 side by side" in planned.out
    said = capsule("run", protocol, "--gpu", "GPU-aa", "--gpu", "GPU-cc", "--json")
    assert said.code == 0, said
    ran = json.loads(said.out)
    assert ran["cells"] == {"ok": 16, "failed": 0, "not_run": 0}
    assert ran["side_by_side"] == 2
    assert sorted(attempt["process"] for attempt in ran["attempts"]) == [0, 1, 2, 3]
    assert set(devices_of(protocol).values()) == {("GPU-aaaa",), ("GPU-cccc",)}
    assert at_once_at_most(protocol) == 2
    check_no_device_twice(protocol)
    assert ran["held_ms"] == sum(attempt["debited_ms"] for attempt in ran["attempts"])
    assert capsule("pack", protocol).code == 0
    assert capsule("verify", protocol.with_suffix(".capsule")).code == 0


def test_as_many_devices_as_one_attempt_takes_are_one_at_a_time(capsule: Capsule, tmp_path: Path) -> None:
    """One trial over two devices sees both of them, and is charged for both."""
    trial = "import os\n" + TRIAL.replace("    return", "    print(os.environ['CUDA_VISIBLE_DEVICES'])\n    return")
    protocol = frozen(capsule, make_gpu_study(tmp_path / "s", devices=2, seeds=2, trial=trial))
    assert capsule("run", protocol, "--gpu", "GPU-bbbb", "--gpu", "GPU-aaaa").code == 0
    assert at_once_at_most(protocol) == 1
    assert {frozenset(devices) for devices in devices_of(protocol).values()} == {frozenset(["GPU-aaaa", "GPU-bbbb"])}
    printed = protocol.parent / ".capsule" / "study" / "attempts" / "a000001" / "stdout"
    assert set(printed.read_text().split("\n")[0].split(",")) == {"GPU-aaaa", "GPU-bbbb"}
    leased = named(protocol, "intent")[0]["data"]["leased"]["boottime_ms"]
    released = named(protocol, "device_clean")[0]["data"]["released"]["boottime_ms"]
    assert named(protocol, "settled")[0]["data"]["charge"]["debited_ms"] == 2 * (released - leased)


def test_two_devices_an_attempt_and_four_devices_are_two_at_a_time(capsule: Capsule, tmp_path: Path) -> None:
    """Groups are made in the order of the names, and never share a device."""
    protocol = frozen(capsule, make_gpu_study(tmp_path / "s", devices=2, seconds=0.3))
    every = ("--gpu", "GPU-aaaa", "--gpu", "GPU-bbbb", "--gpu", "GPU-cccc", "--gpu", "GPU-dddd")
    assert capsule("run", protocol, *every).code == 0
    assert set(devices_of(protocol).values()) == {("GPU-aaaa", "GPU-bbbb"), ("GPU-cccc", "GPU-dddd")}
    assert at_once_at_most(protocol) == 2
    check_no_device_twice(protocol)


@pytest.mark.parametrize(
    ("names", "code", "words"),
    [
        (["GPU-aaaa", "GPU-bbbb", "GPU-cccc"], 2, "multiple of 2"),
        (["GPU-aaaa"], 2, "multiple of 2"),
        (["GPU-aaaa", "GPU-aaaa"], 2, "multiple of 2"),
        (["GPU-", "GPU-aaaa"], 2, "GPU-aaaa, GPU-bbbb"),
        (["GPU-zzzz", "GPU-aaaa"], 5, "GPU-zzzz"),
        (["CPU-0", "GPU-aaaa"], 5, "CPU-0"),
    ],
)
def test_devices_that_make_no_groups_are_refused(
    capsule: Capsule, tmp_path: Path, names: list[str], code: int, words: str
) -> None:
    """A number that does not divide, a name of several devices, of none, or of one that is not allowed."""
    protocol = frozen(capsule, make_gpu_study(tmp_path / "s", devices=2))
    said = capsule("run", protocol, *(argument for name in names for argument in ("--gpu", name)))
    assert said.code == code, said
    assert words in said.err
    assert events_of(protocol) == []


# The frozen rules.


def test_a_budget_of_one_worst_case_lets_one_wait_for_the_other(capsule: Capsule, tmp_path: Path) -> None:
    """What does not fit beside a running attempt fits after it: nothing is refused, and everything is done."""
    protocol = frozen(capsule, make_gpu_study(tmp_path / "s", device_seconds="30"))
    said = capsule("run", protocol, "--gpu", "GPU-aaaa", "--gpu", "GPU-bbbb", "--json")
    assert said.code == 0, said
    assert json.loads(said.out)["cells"]["ok"] == 16
    assert at_once_at_most(protocol) == 1
    assert named(protocol, "refused") == []


def test_the_end_of_the_budget_lets_what_is_running_end(capsule: Capsule, tmp_path: Path) -> None:
    """Held and charged time never exceed the budget, and what is left says why it was not run."""
    protocol = make_gpu_study(tmp_path / "s", seconds=0.4, seeds=8, device_seconds="16.5", wall_limit_seconds="6")
    frozen(capsule, protocol)
    said = capsule("run", protocol, "--gpu", "GPU-aaaa", "--gpu", "GPU-bbbb", "--json")
    assert said.code == 4, said
    ran = json.loads(said.out)
    assert "budget" in ran["stopped"]
    assert at_once_at_most(protocol) == 2
    assert [event["data"]["reason"] for event in named(protocol, "refused")] == ["budget"]
    assert len(named(protocol, "settled")) == len(named(protocol, "reserved"))
    assert ran["held_ms"] <= 16_500
    assert capsule("pack", protocol).code == 0
    assert capsule("verify", protocol.with_suffix(".capsule")).code == 0


def test_a_stop_gate_lets_what_is_running_end(capsule: Capsule, tmp_path: Path) -> None:
    """The first process fails a stop gate: the one beside it keeps its rows, and no third one starts."""
    trial = (
        "import time\n"
        "def measure(cell):\n    time.sleep(0.6 if cell.seed == 2 else 0.0)\n"
        "    return {'amount': 0.0 if cell.seed == 1 else 1.0, 'seconds': 0.0}\n"
    )
    protocol = make_gpu_study(tmp_path / "s", trial=trial)
    protocol.write_text(protocol.read_text().replace('on_failure = "exclude"', 'on_failure = "stop"'))
    said = capsule("run", frozen(capsule, protocol), "--gpu", "GPU-aaaa", "--gpu", "GPU-bbbb", "--json")
    assert said.code == 4, said
    assert "positive" in json.loads(said.out)["stopped"]
    assert json.loads(said.out)["cells"] == {"ok": 8, "failed": 0, "not_run": 8}
    assert [event["data"]["outcome"] for event in named(protocol, "settled")] == ["completed", "completed"]
    assert capsule("pack", protocol).code == 0
    assert capsule("verify", protocol.with_suffix(".capsule")).code == 0


def test_a_device_that_another_study_holds_lets_what_is_running_end(capsule: Capsule, tmp_path: Path) -> None:
    """One of two devices is held: the attempt on the other ends and counts, the refusal says who, no more starts."""
    other = frozen(capsule, make_gpu_study(tmp_path / "other", seconds=0.8, seeds=2))
    holding = start("run", other, "--gpu", "GPU-bbbb", "--wait")
    eventually(lambda: named(other, "spawned"))
    protocol = frozen(capsule, make_gpu_study(tmp_path / "s", seconds=0.2))
    said = capsule("run", protocol, "--gpu", "GPU-aaaa", "--gpu", "GPU-bbbb")
    assert said.code == 4, said
    assert "GPU-bbbb is held by attempt a000001 of study, pid" in said.err
    assert "--wait" in said.err
    assert [event["data"]["reason"] for event in named(protocol, "refused")] == ["busy"]
    assert [event["data"]["outcome"] for event in named(protocol, "settled")] == ["completed"]
    assert capsule("run", protocol, "--gpu", "GPU-aaaa", "--gpu", "GPU-bbbb", "--wait").code == 0
    assert holding.wait(30) == 0
    check_no_device_twice(protocol, other)


def test_an_attempt_that_fails_beside_others_is_retried_alone(capsule: Capsule, tmp_path: Path) -> None:
    """A failed process is tried again as the protocol says, while others go on; no process runs twice at a time."""
    marker = tmp_path / "marker"
    trial = (
        "import os, time\n"
        f"def measure(cell):\n    marker = {str(marker)!r} + str(cell.seed)\n    time.sleep(0.1)\n"
        "    if cell.position == 1 and not os.path.exists(marker):\n        open(marker, 'w'); os._exit(3)\n"
        "    return {'amount': float(cell.parameters['factor']), 'seconds': 0.0}\n"
    )
    protocol = make_gpu_study(tmp_path / "s", trial=trial)
    protocol.write_text(protocol.read_text().replace("[retry]", "[retry]\nexit_nonzero = 1"))
    said = capsule("run", frozen(capsule, protocol), "--gpu", "GPU-aaaa", "--gpu", "GPU-bbbb", "--json")
    assert said.code == 0, said
    assert json.loads(said.out)["cells"]["ok"] == 16
    outcomes = [event["data"]["outcome"] for event in named(protocol, "settled")]
    assert sorted(outcomes) == ["completed"] * 4 + ["exit_nonzero"] * 4
    check_no_device_twice(protocol)


# Requests to stop.


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_stops_all_in_order_and_is_named(
    capsule: Capsule, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """Every attempt ends as `user`, charged, with the signal that was sent; the exit code is that signal's."""
    protocol = frozen(capsule, make_gpu_study(tmp_path / "s", seconds=5))
    run = start("run", protocol, "--gpu", "GPU-aaaa", "--gpu", "GPU-bbbb", "--gpu", "GPU-cccc")
    eventually(lambda: len(named(protocol, "spawned")) == 3)
    time.sleep(0.5)
    run.send_signal(number)
    _, said = run.communicate(timeout=30)
    assert run.returncode == code, said
    assert "Traceback" not in said
    ended = [event["data"] for event in named(protocol, "settled")]
    assert [end["outcome"] for end in ended] == ["user"] * 3
    assert all(number.name in end["evidence"] for end in ended), ended
    assert all(f"a00000{place} user" in said for place in (1, 2, 3))
    assert len(named(protocol, "reserved")) == 3


def test_a_second_signal_kills_at_once(capsule: Capsule, tmp_path: Path) -> None:
    """Trials that ignore the request would have a minute; interrupted twice they are gone in a moment."""
    trial = STUBBORN
    protocol = make_gpu_study(tmp_path / "s", seconds=60, trial=trial, kill_grace_seconds="60")
    run = start("run", frozen(capsule, protocol), "--gpu", "GPU-aaaa", "--gpu", "GPU-bbbb", "--json")
    eventually(lambda: len(named(protocol, "spawned")) == 2)
    time.sleep(1)
    run.send_signal(signal.SIGINT)
    eventually(lambda: len(named(protocol, "stopping")) == 2)
    began = time.monotonic()
    run.send_signal(signal.SIGINT)
    out, said = run.communicate(timeout=30)
    assert time.monotonic() - began < 10
    assert run.returncode == 130
    assert json.loads(out)["error"]["code"] == "interrupted"
    assert "killing" in said
    assert [event["data"]["outcome"] for event in named(protocol, "settled")] == ["user"] * 2


def test_a_terminal_shows_all_that_goes_on_and_closing_it_stops_them(capsule: Capsule, tmp_path: Path) -> None:
    """One line has every attempt at hand; a terminal that is gone is a hangup, and nothing is left running."""
    protocol = frozen(capsule, make_gpu_study(tmp_path / "s", seconds=0.7))
    primary, secondary = pty.openpty()
    run = subprocess.Popen(
        [sys.executable, "-m", "capsule", "run", str(protocol), "--gpu", "GPU-aaaa", "--gpu", "GPU-bbbb"],
        stdin=secondary,
        stdout=secondary,
        stderr=secondary,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(secondary)
    shown = b""
    until = time.monotonic() + 30
    while not re.search(rb"a000001 [1-4]/4, a000002 [1-4]/4", shown) and time.monotonic() < until:
        shown += os.read(primary, 1 << 16)
    assert b"0 of 4 processes, about" in shown
    os.close(primary)
    assert run.wait(30) == 129
    ended = [event["data"] for event in named(protocol, "settled")]
    assert [end["outcome"] for end in ended] == ["user", "user"]
    assert all("SIGHUP" in end["evidence"] for end in ended)


def test_what_was_started_to_survive_the_terminal_does(capsule: Capsule, tmp_path: Path) -> None:
    """Under `nohup` a hangup is ignored, as its caller asked."""
    protocol = frozen(capsule, make_gpu_study(tmp_path / "s", seconds=0.3, seeds=2))
    run = start("run", protocol, "--gpu", "GPU-aaaa", prefix=("nohup",))
    eventually(lambda: named(protocol, "spawned"))
    run.send_signal(signal.SIGHUP)
    assert run.wait(30) == 0
    assert len(named(protocol, "settled")) == 2


def test_a_killed_command_leaves_both_to_their_supervisors(capsule: Capsule, tmp_path: Path) -> None:
    """After kill -9 of the command both attempts settle by themselves; the next run waits, and runs only the rest."""
    protocol = frozen(capsule, make_gpu_study(tmp_path / "s", seconds=0.5))
    run = start("run", protocol, "--gpu", "GPU-aaaa", "--gpu", "GPU-bbbb")
    eventually(lambda: len(named(protocol, "spawned")) == 2)
    run.kill()
    run.wait()
    refused = capsule("run", protocol, "--gpu", "GPU-cccc", "--gpu", "GPU-dddd")
    assert refused.code == 4, refused
    assert "a000001" in refused.err
    said = capsule("run", protocol, "--gpu", "GPU-cccc", "--gpu", "GPU-dddd", "--wait", "--json")
    assert said.code == 0, said
    assert json.loads(said.out)["cells"]["ok"] == 16
    assert [event["data"]["outcome"] for event in named(protocol, "settled")] == ["completed"] * 4
    check_no_device_twice(protocol)


def test_everything_killed_is_settled_and_run_again(capsule: Capsule, tmp_path: Path) -> None:
    """Command, supervisors and trials killed -9: both attempts are charged, void, and their processes run again."""
    protocol = frozen(capsule, make_gpu_study(tmp_path / "s", seconds=0.5, seeds=3))
    run = start("run", protocol, "--gpu", "GPU-aaaa", "--gpu", "GPU-bbbb")
    eventually(lambda: len(named(protocol, "heartbeat")) >= 2 or rows_of(protocol, "a000002") > 1)
    kill_all(protocol)
    run.wait()
    said = capsule("run", protocol, "--gpu", "GPU-aaaa", "--gpu", "GPU-bbbb", "--wait", "--json")
    assert said.code == 0, said
    assert json.loads(said.out)["cells"]["ok"] == 12
    lost = [event["data"] for event in named(protocol, "reconciled")]
    assert [end["outcome"] for end in lost] == ["lost", "lost"]
    assert all(end["charge"]["debited_ms"] > 0 for end in lost)
    check_no_device_twice(protocol)


# Commands that race.


def test_two_commands_of_one_protocol_exclude_each_other_whatever_their_devices(
    capsule: Capsule, tmp_path: Path
) -> None:
    """Of two that start together one works, the other is told who does; one that waits finds everything done."""
    protocol = frozen(capsule, make_gpu_study(tmp_path / "s", seconds=0.15, seeds=3))
    runs = [start("run", protocol, "--gpu", name) for name in ("GPU-aaaa", "GPU-bbbb")]
    codes = [run.wait(60) for run in runs]
    assert sorted(codes) == [0, 4], [run.communicate() for run in runs]
    said = runs[codes.index(4)].communicate()[1]
    assert f"pid {runs[codes.index(0)].pid}, at work since" in said
    assert "--wait" in said
    assert len(set(devices_of(protocol).values())) == 1
    check_no_device_twice(protocol)


def test_three_that_wait_for_one_protocol_do_its_work_once(capsule: Capsule, tmp_path: Path) -> None:
    """With --wait all of them end well, one after the other, and each process ran once."""
    protocol = frozen(capsule, make_gpu_study(tmp_path / "s", seconds=0.02, seeds=3))
    runs = [start("run", protocol, "--gpu", name, "--wait") for name in ("GPU-aaaa", "GPU-bbbb", "GPU-cccc")]
    assert [run.wait(60) for run in runs] == [0, 0, 0], [run.communicate() for run in runs]
    assert len(named(protocol, "settled")) == 3
    check_no_device_twice(protocol)


def test_two_protocols_that_race_for_one_device(capsule: Capsule, tmp_path: Path) -> None:
    """Exactly one gets it; the other is refused without a charge and told who has it."""
    protocols = [frozen(capsule, make_gpu_study(tmp_path / name, seconds=0.6, seeds=2)) for name in ("one", "two")]
    runs = [start("run", protocol, "--gpu", "GPU-aaaa") for protocol in protocols]
    codes = [run.wait(60) for run in runs]
    assert sorted(codes) == [0, 4], [run.communicate() for run in runs]
    loser = protocols[codes.index(4)]
    assert "held by attempt a000001 of study, pid" in runs[codes.index(4)].communicate()[1]
    assert [event["data"]["reason"] for event in named(loser, "refused")] == ["busy"]
    assert named(loser, "intent") == []
    check_no_device_twice(*protocols)


def test_two_protocols_over_the_same_devices_in_another_order_never_block_each_other(
    capsule: Capsule, tmp_path: Path
) -> None:
    """Leases of several devices are taken in one order, all or none: both come to their end."""
    protocols = [
        frozen(capsule, make_gpu_study(tmp_path / name, devices=2, seeds=2, seconds=0.05)) for name in ("one", "two")
    ]
    names = (["--gpu", "GPU-aaaa", "--gpu", "GPU-bbbb"], ["--gpu", "GPU-bbbb", "--gpu", "GPU-aaaa"])
    runs = [start("run", protocol, *order, "--wait") for protocol, order in zip(protocols, names, strict=True)]
    assert [run.wait(90) for run in runs] == [0, 0], [run.communicate() for run in runs]
    check_no_device_twice(*protocols)


# Choosing devices.


def test_free_devices_are_chosen_before_held_ones(capsule: Capsule, tmp_path: Path) -> None:
    """Whoever leaves the device open does not meet one that is at work."""
    other = frozen(capsule, make_gpu_study(tmp_path / "other", seconds=0.6, seeds=2))
    holding = start("run", other)
    eventually(lambda: named(other, "spawned"))
    protocol = frozen(capsule, make_gpu_study(tmp_path / "s", seeds=2))
    assert capsule("run", protocol).code == 0
    assert devices_of(other)["a000001"] == ("GPU-aaaa",)
    assert set(devices_of(protocol).values()) == {("GPU-bbbb",)}
    assert holding.wait(30) == 0


def test_a_pilot_is_one_attempt_whatever_its_devices(capsule: Capsule, tmp_path: Path) -> None:
    """A pilot runs one process on the first of the devices."""
    protocol = make_gpu_study(tmp_path / "s")
    assert capsule("run", protocol, "--pilot", "--gpu", "GPU-aaaa", "--gpu", "GPU-bbbb").code == 0
    assert devices_of(protocol) == {"a000001": ("GPU-aaaa",)}

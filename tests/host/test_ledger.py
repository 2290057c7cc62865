"""The ledger file: what survives a crash at any byte, what is refused, and that no event is ever doubled."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from capsule.core import chain as chain_module
from capsule.core.attempt import (
    Charge,
    Heartbeat,
    HeldUnknown,
    Intent,
    ManifestAdopted,
    Opened,
    Reconciled,
    Reserved,
    Spawned,
    Stopping,
)
from capsule.core.chain import EVENT_BYTES_MAX, LINE_COMMAS_MAX, Head, encode
from capsule.core.digest import digest_of
from capsule.core.errors import BudgetError, BusyError, MachineError, RefusedError
from capsule.host import ledger as ledger_module
from capsule.host.clock import read_clock
from capsule.host.ledger import START, Ledger
from capsule.host.reservation import reserve
from tests.host.crashes import LONG, chance

MANIFEST = "sha256:" + "a" * 64
ASKED = Reserved(
    manifest=MANIFEST, process=0, pilot=False, from_frozen=False, unit="cpu", devices=("CPU-0",), reserved_ms=1_000
)


def opened(folder: Path) -> Ledger:
    ledger = Ledger(folder / "ledger.jsonl", folder / "head.json")
    ledger.append("opened", None, Opened(format="capsule.ledger/1", protocol="x"), read_clock())
    ledger.append("manifest_adopted", None, ManifestAdopted(manifest=MANIFEST, supersedes=None), read_clock())
    return ledger


def again(ledger: Ledger) -> Ledger:
    """Return a ledger object that knows nothing yet, as another process has it."""
    return Ledger(ledger.path, ledger.head_path)


def beat(ledger: Ledger, elapsed_ms: int = 1) -> None:
    ledger.append("heartbeat", "a000001", Heartbeat(elapsed_ms=elapsed_ms), read_clock())


@pytest.fixture
def running(tmp_path: Path) -> Ledger:
    """A ledger whose first attempt runs."""
    ledger = opened(tmp_path)
    reserve(ledger, ASKED, budget_ms=10_000, attempts_max=9)
    intent = Intent(leased=read_clock(), supervisor_pid=1, argv=("x",), snapshot=MANIFEST, device_baseline={})
    ledger.append("intent", "a000001", intent, read_clock())
    ledger.append("spawned", "a000001", Spawned(pid=1, start_ticks=1), read_clock())
    return ledger


def names(ledger: Ledger) -> list[str]:
    return [event.name for event in again(ledger).read()[0].events]


def test_a_ledger_that_was_never_written_is_empty_and_stays_absent(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "deep/ledger.jsonl", tmp_path / "deep/head.json")
    chain, account = ledger.read()
    assert (chain.events, account.attempts) == ([], {})
    assert not (tmp_path / "deep").exists()


def test_an_event_is_durable_before_its_head_and_a_new_file_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is synced, in this order: the folder of a new ledger, its line, the head, and the folder again."""
    synced: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(Path(f"/proc/self/fd/{descriptor}").readlink()))
    folder = tmp_path / "new"
    folder.mkdir()
    opened(folder)
    names = [path.name.partition(".")[0] for path in synced]
    assert names == ["new", "ledger", "head", "new", "ledger", "head", "new"]


def test_what_was_appended_is_read_back_in_order(running: Ledger) -> None:
    chain, account = again(running).read()
    assert [event.name for event in chain.events] == ["opened", "manifest_adopted", "reserved", "intent", "spawned"]
    assert [event.seq for event in chain.events] == [0, 1, 2, 3, 4]
    assert account.attempts["a000001"].state == "running"
    assert running.head_path.read_bytes() == chain.head.to_bytes()


def test_an_event_that_the_state_does_not_allow_is_refused_and_not_written(running: Ledger) -> None:
    before = running.path.read_bytes()
    with pytest.raises(RefusedError, match="spawned cannot follow state running"):
        running.append("spawned", "a000001", Spawned(pid=1, start_ticks=1), read_clock())
    assert running.path.read_bytes() == before
    beat(running)


def test_an_event_that_no_reader_would_take_is_not_written(running: Ledger) -> None:
    """L-01: the writer refuses what is too large, and the ledger goes on; the largest event can be sealed when torn."""
    at = read_clock()
    short = Stopping(cause="user", evidence="")
    room = EVENT_BYTES_MAX - len(encode(5, MANIFEST, "stopping", "a000001", at, short))
    before = running.path.read_bytes()
    for words in ("x" * (room + 1), "," * LINE_COMMAS_MAX):
        with pytest.raises(RefusedError, match=r"expected at most .* in an event"):
            running.append("stopping", "a000001", Stopping(cause="user", evidence=words), at)
        assert running.path.read_bytes() == before
    running.append("stopping", "a000001", Stopping(cause="user", evidence="x" * room), at)
    os.truncate(running.path, running.path.stat().st_size - 1)
    running.head_path.write_bytes(Head(count=5, sha256=digest_of(before.splitlines()[-1])).to_bytes())
    beat(again(running))
    assert names(running)[-2:] == ["sealed", "heartbeat"]


def test_a_heartbeat_reads_only_what_is_new(running: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("the whole ledger was read")

    monkeypatch.setattr(ledger_module, "read", refuse)
    beat(running)
    beat(running)
    other = Ledger(running.path, running.head_path, resumed=START)
    beat(other)
    beat(running)


def test_a_resumed_ledger_starts_at_its_place_and_knows_its_own_attempt(
    running: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = reserve(running, ASKED, budget_ms=10_000, attempts_max=9).position
    resumed = Ledger(running.path, running.head_path, resumed=place)
    monkeypatch.setattr(ledger_module, "read", lambda *arguments: pytest.fail("the whole ledger was read"))
    again_ours = Ledger(running.path, running.head_path, resumed=START)
    again_ours.append("held_unknown", "a000002", HeldUnknown(evidence="settled by another command"), read_clock())
    monkeypatch.undo()
    with pytest.raises(RefusedError, match="heartbeat cannot follow state held of a000002"):
        resumed.append("heartbeat", "a000002", Heartbeat(elapsed_ms=1), read_clock())


# D14: cut at every byte of the last two lines.


def test_a_cut_within_the_last_line_is_sealed_and_never_fused(quick: Path) -> None:
    (quick / "whole").mkdir()
    ledger = opened(quick / "whole")
    whole = ledger.path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(first, len(whole)):
        folder = quick / str(cut)
        folder.mkdir()
        (folder / "ledger.jsonl").write_bytes(whole[:cut])
        # The head of the line that was torn was never written: it comes second.
        behind = Ledger(folder / "ledger.jsonl", folder / "head.json")
        chain_head = ledger_module.Head(count=1, sha256=ledger_module.digest_of(whole[: first - 1]))
        behind.head_path.write_bytes(chain_head.to_bytes())
        adopted = ManifestAdopted(manifest=MANIFEST, supersedes=None)
        behind.append("manifest_adopted", None, adopted, read_clock())
        chain, account = again(behind).read()
        expected = ["opened", "manifest_adopted"] if cut == first else ["opened", "sealed", "manifest_adopted"]
        assert [event.name for event in chain.events] == expected
        if cut > first:
            sealed = chain.events[1].data.to_json()
            assert bytes.fromhex(sealed["hex"]) == whole[first:cut]
        assert account.faults == []


def settled(folder: Path) -> Ledger:
    """A ledger with one attempt that was settled and one that runs."""
    ledger = opened(folder)
    for attempt in ("a000001", "a000002"):
        reserve(ledger, ASKED, budget_ms=10_000, attempts_max=9)
        intent = Intent(leased=read_clock(), supervisor_pid=1, argv=("x",), snapshot=MANIFEST, device_baseline={})
        ledger.append("intent", attempt, intent, read_clock())
        ledger.append("spawned", attempt, Spawned(pid=1, start_ticks=1), read_clock())
        if attempt == "a000001":
            charge = Charge(lower_ms=1, upper_ms=900, debited_ms=900, observed=False)
            ledger.append("held_unknown", attempt, HeldUnknown(evidence="x"), read_clock())
            end = Reconciled(outcome="lost", evidence="x", charge=charge, rows=0, files={})
            ledger.append("reconciled", attempt, end, read_clock())
    return ledger


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in memory where there is one; an equal line is not judged anew each time."""
    monkeypatch.setattr(chain_module, "_entry", lru_cache(chain_module._entry))
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


def rewound(ledger: Ledger, count: int) -> None:
    """Set the head back to the first `count` events, as a crash before it was written leaves it (or a forger)."""
    lines = ledger.path.read_bytes().splitlines()
    sha256 = ledger_module.digest_of(lines[count - 1]) if count else None
    ledger.head_path.write_bytes(Head(count=count, sha256=sha256).to_bytes())


@pytest.mark.parametrize("events", [7, 9])
def test_a_ledger_cut_at_any_byte_of_its_last_two_lines(quick: Path, events: int) -> None:
    """D14: with its head one event behind it loses what nobody was told, which is sealed; else it is refused.

    Its last event ends an attempt, or starts one; what is held for both never falls.
    """
    ledger = settled(quick)
    whole = b"".join(ledger.path.read_bytes().splitlines(keepends=True)[:events])
    last = whole.rindex(b"\n", 0, len(whole) - 1) + 1
    before = whole.rindex(b"\n", 0, last - 1) + 1
    ledger.path.write_bytes(whole)
    rewound(ledger, events)
    held_ms = again(ledger).read()[1].held_ms("cpu", pilot=False)
    chosen = chance("cuts", events)
    for behind in (0, 1, 2):
        for cut in range(before, len(whole)):
            if behind == 2 and not LONG and chosen.random() < 0.8:  # that is no state that a crash leaves
                continue
            ledger.path.write_bytes(whole)
            rewound(ledger, events - behind)
            ledger.path.write_bytes(whole[:cut])
            lost = 1 + (cut < last)
            if lost > behind:
                with pytest.raises(RefusedError, match="ledger_regressed"):
                    again(ledger).read()
                if cut % 9 == 0 or LONG:
                    with pytest.raises(RefusedError, match="ledger_regressed"):
                        again(ledger).seal(read_clock())
                assert ledger.path.read_bytes() == whole[:cut]
                continue
            torn = whole[last if lost == 1 else before : cut]
            assert again(ledger).seal(read_clock()) == bool(torn)
            chain, after = again(ledger).read()
            assert after.faults == []
            if torn:
                assert chain.events[-1].data.to_json()["hex"] == torn.hex()
            if behind < 2:
                assert after.held_ms("cpu", pilot=False) >= held_ms


def test_every_earlier_copy_is_refused_while_its_head_is_kept(tmp_path: Path) -> None:
    """D15: whatever was cut off; and a head that is gone is not taken for that of a new ledger."""
    ledger = settled(tmp_path)
    head = ledger.head_path.read_bytes()
    lines = ledger.path.read_bytes().splitlines(keepends=True)
    known = again(ledger)
    known.read()
    for count in range(len(lines)):
        ledger.path.write_bytes(b"".join(lines[:count]))
        ledger.head_path.write_bytes(head)
        for operation in (known.read, again(ledger).read, lambda: beat(again(ledger)), lambda: beat(known)):
            with pytest.raises(RefusedError, match="ledger_regressed"):
                operation()
        ledger.head_path.unlink()
        if count > 1:
            with pytest.raises(RefusedError, match="ledger_regressed"):
                again(ledger).read()
    ledger.head_path.write_bytes(head)
    ledger.path.unlink()
    for operation in (again(ledger).read, lambda: beat(again(ledger)), lambda: beat(known)):
        with pytest.raises(RefusedError, match="ledger_regressed"):
            operation()


def flips(data: bytes, label: str) -> Iterator[tuple[int, bytes]]:
    """Yield data with one bit of every byte flipped, chosen by the seed; all eight with CAPSULE_TEST_LONG=1."""
    chosen = chance(label)
    for place in range(len(data)):
        for bit in range(8) if LONG else [chosen.randrange(8)]:
            damaged = bytearray(data)
            damaged[place] ^= 1 << bit
            yield place, bytes(damaged)


@pytest.mark.parametrize("behind", [False, True])
def test_any_bit_flipped_in_a_ledger_is_found(quick: Path, behind: bool) -> None:
    """D15: refused and left alone; of a last line that no head vouches for yet, damage is found where it shows."""
    ledger = settled(quick)
    whole = ledger.path.read_bytes()
    if behind:
        rewound(ledger, whole.count(b"\n") - 1)
    lines = whole.splitlines(keepends=True)
    start = len(whole) - len(lines[-1]) - len(lines[-2]) if behind and not LONG else 0
    for place, damaged in flips(whole, f"ledger {behind}"):
        if place < start:  # where it makes no difference how old the head is
            continue
        ledger.path.write_bytes(damaged)
        if behind and place >= whole.rindex(b"\n", 0, -1) + 1:
            with contextlib.suppress(RefusedError):
                account = again(ledger).read()[1]
                assert account.held_ms("cpu", pilot=False) == 1_900
            continue
        with pytest.raises(RefusedError):
            again(ledger).read()
        if place % 9 == 0 or LONG:
            with pytest.raises(RefusedError):
                beat(again(ledger))
        assert ledger.path.read_bytes() == damaged


def test_any_bit_flipped_in_a_head_is_found(quick: Path) -> None:
    ledger = settled(quick)
    for _, damaged in flips(ledger.head_path.read_bytes(), "head"):
        ledger.head_path.write_bytes(damaged)
        with pytest.raises(RefusedError):
            again(ledger).read()
        with pytest.raises(RefusedError):
            beat(again(ledger))


def test_an_older_copy_is_refused_also_with_its_own_lines_sound(running: Ledger) -> None:
    older = running.path.read_bytes()
    beat(running)
    beat(running)
    running.path.write_bytes(older)
    with pytest.raises(RefusedError, match="ledger_regressed"):
        reserve(again(running), ASKED, budget_ms=10_000, attempts_max=9)


def test_a_writer_that_knows_the_ledger_notices_that_another_s_event_was_cut_off(running: Ledger) -> None:
    known = running.path.read_bytes()
    beat(again(running))
    running.path.write_bytes(known)
    with pytest.raises(RefusedError, match="ledger_regressed"):
        beat(running)


# C5: the ledger cannot be written.


@pytest.fixture
def fails_once(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let one system call fail once with EIO."""

    def arm(call: str) -> None:
        real = getattr(os, call)
        left = [1]

        def failing(*arguments: Any) -> Any:
            if left[0]:
                left[0] -= 1
                raise OSError(errno.EIO, "Input/output error")
            return real(*arguments)

        monkeypatch.setattr(os, call, failing)

    return arm


@pytest.mark.parametrize("call", ["fsync", "pwrite"])
def test_a_failed_call_is_an_error_and_the_next_append_doubles_nothing(
    running: Ledger, fails_once: Callable[[str], None], call: str
) -> None:
    fails_once(call)
    with pytest.raises(MachineError, match="cannot be written: Input/output error"):
        beat(running, 10)
    beat(running, 20)
    chain, account = again(running).read()
    assert account.faults == []
    assert [event.seq for event in chain.events] == list(range(len(chain.events)))
    beats = [event.data.to_json()["elapsed_ms"] for event in chain.events if event.name == "heartbeat"]
    assert beats == ([10, 20] if call == "fsync" else [20])


def test_after_a_failed_sync_the_line_is_written_again_before_the_next(
    running: Ledger, monkeypatch: pytest.MonkeyPatch, fails_once: Callable[[str], None]
) -> None:
    """A page whose sync failed may be marked clean although it never reached the disk; only a new write is sure."""
    fails_once("fsync")
    with pytest.raises(MachineError):
        beat(running, 10)
    last = running.path.read_bytes().splitlines(keepends=True)[-1]
    written: list[bytes] = []
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: written.append(bytes(data)) or real(fd, data, offset))
    beat(again(running), 20)
    assert written[0] == last
    assert len(written) == 2


def test_a_write_in_part_is_an_error_and_its_bytes_are_sealed(running: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:25], offset))
    with pytest.raises(MachineError, match="bytes were written"):
        beat(running)
    monkeypatch.undo()
    beat(running)
    assert names(running)[-2:] == ["sealed", "heartbeat"]


def test_a_torn_tail_is_sealed_once_also_without_an_append(running: Ledger) -> None:
    with running.path.open("ab") as file:
        file.write(b'{"half')
    assert again(running).read()[0].tail == b'{"half'
    assert running.seal(read_clock()) is True
    assert running.seal(read_clock()) is False
    assert names(running)[-1] == "sealed"


FULL = """
import resource, signal, sys
from pathlib import Path
from capsule.core.attempt import Heartbeat
from capsule.core.errors import MachineError
from capsule.host.clock import read_clock
from capsule.host.ledger import Ledger
ledger = Ledger(Path(sys.argv[1]), Path(sys.argv[2]))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
limit = Path(sys.argv[1]).stat().st_size + 60
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
for _ in range(2):
    try:
        ledger.append("heartbeat", "a000001", Heartbeat(elapsed_ms=1), read_clock())
    except MachineError as error:
        print(error.message, "|", error.hint)
"""


def test_a_full_disk_is_an_error_of_the_machine_and_the_ledger_goes_on_once_there_is_space(running: Ledger) -> None:
    paths = [str(running.path), str(running.head_path)]
    done = subprocess.run([sys.executable, "-c", FULL, *paths], capture_output=True, text=True, check=True)
    assert done.stdout.count("cannot be written") == 2, done.stderr
    beat(running)
    chain, account = again(running).read()
    assert account.faults == []
    assert [event.name for event in chain.events][-2:] == ["sealed", "heartbeat"]


def fill(ledger: Ledger) -> None:
    for _ in range(200):
        reserve(ledger, ASKED, budget_ms=10**9, attempts_max=10**6)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system of its own needs root")
def test_a_file_system_without_space_and_a_read_only_one(tmp_path: Path) -> None:
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", place], check=False).returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        ledger = opened(place)
        (place / "filler").write_bytes(b"x" * (32 * 1024 - 12 * 1024))
        with pytest.raises(MachineError) as full:
            fill(ledger)
        assert "No space left" in full.value.message
        assert "free space" in (full.value.hint or "")
        (place / "filler").unlink()
        reserve(again(ledger), ASKED, budget_ms=10**9, attempts_max=10**6)
        chain, account = again(ledger).read()
        assert account.faults == []
        assert [event.seq for event in chain.events] == list(range(len(chain.events)))
        subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        assert again(ledger).read()[1].attempts.keys() == account.attempts.keys()
        with pytest.raises(MachineError) as read_only:
            reserve(again(ledger), ASKED, budget_ms=10**9, attempts_max=10**6)
        assert "read-only" in (read_only.value.hint or "").lower()
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def test_a_stopped_writer_is_named_as_the_reason(running: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "PATIENCE_SECONDS", 0.2)
    with running._lock(shared=False):
        with pytest.raises(BusyError, match="expected the ledger's lock"):
            beat(again(running))
        assert len(again(running).read()[0].events) == 5


# A1: reservations against one budget.

RACE = """
import sys
from pathlib import Path
from capsule.core.attempt import Reserved
from capsule.core.errors import BudgetError
from capsule.host.ledger import Ledger
from capsule.host.reservation import reserve
asked = Reserved.model_validate_json(sys.argv[3])
ledger = Ledger(Path(sys.argv[1]), Path(sys.argv[2]))
print("ready", flush=True)
sys.stdin.readline()
try:
    print("won", reserve(ledger, asked, budget_ms=1500, attempts_max=9).attempt)
except BudgetError as error:
    print("lost", error.message)
"""


def test_of_racing_reservers_exactly_one_wins(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    arguments = [sys.executable, "-c", RACE, str(ledger.path), str(ledger.head_path), ASKED.model_dump_json()]
    racers = [subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    answers = [racer.communicate()[0].split()[0] for racer in racers]
    assert sorted(answers) == ["lost", "lost", "lost", "won"]
    chain, account = again(ledger).read()
    assert sorted(event.name for event in chain.events[2:]) == ["refused"] * 3 + ["reserved"]
    assert account.held_ms("cpu", pilot=False) == 1_000


def test_a_refused_reservation_says_what_was_left_and_costs_nothing(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    reserve(ledger, ASKED, budget_ms=1_500, attempts_max=9)
    with pytest.raises(BudgetError, match=r"expected 1 cpu-seconds left .* found 0.5 of 1.5"):
        reserve(ledger, ASKED, budget_ms=1_500, attempts_max=9)
    with pytest.raises(BudgetError, match="expected fewer than 1 attempts"):
        reserve(ledger, ASKED, budget_ms=9_000, attempts_max=1)
    pilot = ASKED.model_copy(update={"pilot": True})
    assert reserve(ledger, pilot, budget_ms=1_000, attempts_max=1).attempt == "a000004"
    refusals = [event.data.to_json()["reason"] for event in ledger.read()[0].events if event.name == "refused"]
    assert refusals == ["budget", "attempts_max"]


def test_reserving_under_a_superseded_manifest_is_refused_without_a_trace(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    newer = ManifestAdopted(manifest="sha256:" + "c" * 64, supersedes=MANIFEST)
    ledger.append("manifest_adopted", None, newer, read_clock())
    with pytest.raises(RefusedError, match="manifest in force"):
        reserve(ledger, ASKED, budget_ms=9_000, attempts_max=9)
    assert names(ledger) == ["opened", "manifest_adopted", "manifest_adopted"]


CRASH = """
import sys
from pathlib import Path
from capsule.core.attempt import Heartbeat
from capsule.host.clock import read_clock
from capsule.host.durable import crash_at
from capsule.host.ledger import Ledger
ledger = Ledger(Path(sys.argv[1]), Path(sys.argv[2]))
crash_at(int(sys.argv[3]))
for elapsed in range(3):
    ledger.append("heartbeat", "a000001", Heartbeat(elapsed_ms=elapsed), read_clock())
"""


@pytest.mark.parametrize("boundary", range(1, 13))
def test_a_writer_killed_at_any_boundary_leaves_a_ledger_that_goes_on(running: Ledger, boundary: int) -> None:
    paths = [str(running.path), str(running.head_path)]
    done = subprocess.run([sys.executable, "-c", CRASH, *paths, str(boundary)], check=False)
    assert done.returncode == -signal.SIGKILL
    written = names(running).count("heartbeat")
    assert written == (boundary + 2) // 4, "the line is there from the second of its four boundaries on"
    beat(again(running))
    chain, account = again(running).read()
    assert account.faults == []
    assert names(running).count("heartbeat") == written + 1
    assert again(running).head_path.read_bytes() == chain.head.to_bytes()

"""Attempts that really run: however a trial ends, its end is told apart, its tree is emptied and its time charged."""

import itertools
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from capsule.core.attempt import EVIDENCE_MAX, Attempt, Exit, Settled
from capsule.core.plan import enumerate_cells
from capsule.core.progress import Process, outcome_of
from capsule.core.record import read_journal
from capsule.host import launch
from capsule.host.heartbeats import heartbeat_interval_ms
from capsule.host.lease import Holder, lease_path, take
from capsule.host.process import descendants, identify, is_alive
from capsule.host.recompute import recompute
from tests.host.conftest import MANIFEST, SNAPSHOT, Bench, eventually, protocol_of

RECORD = (
    "import json, os\ndef record(**row):\n    open(os.environ['CAPSULE_RECORDS'], 'a').write(json.dumps(row) + '\\n')\n"
)
HOLDER = Holder(protocol="0002-y", attempt="a000007", pid=4711, since="then", boot_id="b", token="t", baseline={})
WHOLE = ["reserved", "intent", "spawned", "exit", "tree_empty", "device_clean", "settled"]


def end(attempt: Attempt) -> Settled:
    assert isinstance(attempt.end, Settled)
    return attempt.end


def exit_of(attempt: Attempt) -> Exit:
    assert attempt.exit is not None
    return attempt.exit


def supervised(bench: Bench, order: launch.LaunchOrder, changes: str) -> Attempt:
    """Run an order under a supervisor of its own process in which `changes` were made first."""
    imports = "import sys\nfrom capsule.host import attempt_run, heartbeats, launch, supervisor\n"
    code = f"{imports}{changes}\nsys.exit(supervisor.main(sys.argv[1:]))"
    path = Path(order.attempt_dir) / launch.ORDER
    path.write_bytes(order.to_bytes())
    done = subprocess.run([sys.executable, "-c", code, str(path)], timeout=60, check=False, capture_output=True)
    assert done.returncode == launch.SETTLED, done.stderr
    return bench.account().attempts[order.attempt]


def pids(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().split()]


# B1, B2: every end is told apart.


def test_a_command_that_records_its_row_completes(bench: Bench) -> None:
    attempt = bench.python(RECORD + "sum(range(3_000_000))\nrecord(x=1.5)")
    assert bench.names(attempt.id) == WHOLE
    assert exit_of(attempt).user_ms > 0
    assert exit_of(attempt).max_rss_bytes > 2**20
    assert (end(attempt).outcome, end(attempt).rows) == ("completed", 1)
    assert bench.journal(attempt.id) == '{"x": 1.5}\n{"end":true}\n'
    assert set(end(attempt).files) == {"journal.jsonl", "stdout", "stderr"}


@pytest.mark.parametrize(
    ("source", "outcome", "status", "code", "by_signal"),
    [
        ("raise SystemExit(0)", "incomplete", 0, 0, None),
        ("raise SystemExit(1)", "exit_nonzero", 256, 1, None),
        ("raise SystemExit(11)", "exit_nonzero", 11 << 8, 11, None),
        ("import os; os._exit(11)", "exit_nonzero", 11 << 8, 11, None),
        ("raise SystemExit(139)", "exit_nonzero", 139 << 8, 139, None),
        ("raise SystemExit(255)", "exit_nonzero", 255 << 8, 255, None),
        ("import os; os.kill(os.getpid(), 11)", "signalled", None, None, signal.SIGSEGV),
        ("import os; os.kill(os.getpid(), 9)", "sigkill_unattributed", 9, None, signal.SIGKILL),
    ],
)
def test_every_end_is_told_apart(
    bench: Bench, source: str, outcome: str, status: int | None, code: int | None, by_signal: int | None
) -> None:
    attempt = bench.python(source)
    found = exit_of(attempt)
    assert (end(attempt).outcome, found.exit_code, found.signal) == (outcome, code, by_signal)
    assert status is None or found.wait_status == status
    assert end(attempt).charge.observed
    if by_signal == signal.SIGKILL:
        assert "which this supervisor did not send" in end(attempt).evidence


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_CORE)[1] == 0, reason="core dumps are forbidden here")
def test_a_core_dump_is_flagged(bench: Bench) -> None:
    source = (
        "import os, resource, signal\n"
        "hard = resource.getrlimit(resource.RLIMIT_CORE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))\n"
        "os.kill(os.getpid(), signal.SIGSEGV)\n"
    )
    attempt = bench.python(source)
    assert exit_of(attempt).wait_status == signal.SIGSEGV | 0x80
    assert (exit_of(attempt).signal, exit_of(attempt).core_dumped) == (signal.SIGSEGV, True)


# A6: what cannot be executed.


@pytest.mark.parametrize("command", [["/nowhere/program"], ["{workload.n}"], ["/etc/passwd"]])
def test_a_program_that_cannot_be_executed_is_charged_and_named(bench: Bench, command: list[str]) -> None:
    attempt = bench.go(protocol_of(command=command))
    assert bench.names(attempt.id) == [name for name in WHOLE if name != "spawned"]
    assert end(attempt).outcome == "exec_failed"
    assert command[0].replace("{workload.n}", "3") in end(attempt).evidence
    assert exit_of(attempt).wait_status is None


def test_an_argument_that_no_process_can_be_given_is_exec_failed(bench: Bench) -> None:
    attempt = bench.go(protocol_of(command=["echo", "a{parameters.nul}b"], parameters={"nul": "\0"}))
    assert end(attempt).outcome == "exec_failed"
    assert "null byte" in end(attempt).evidence


def test_a_folder_that_is_gone_is_exec_failed_too(bench: Bench) -> None:
    bench.snapshot.rmdir()
    attempt = bench.go(protocol_of(command=["true"]), trees=[])
    assert end(attempt).outcome == "exec_failed"
    assert str(bench.snapshot) in end(attempt).evidence


# The records.


def test_rows_of_every_float_and_the_last_line_without_its_newline(bench: Bench) -> None:
    attempt = bench.python("import os; open(os.environ['CAPSULE_RECORDS'], 'w').write('{\"x\": \"NaN\"}')")
    assert end(attempt).outcome == "completed"
    assert bench.journal(attempt.id) == '{"x": "NaN"}\n{"end":true}\n'


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("record(cell='c000099', x=1)", "a cell planned for this process"),
        ("record(x=1); record(x=2)", "expected one row for cell c000000"),
        ("record(y=1)", "declared observations"),
        ("record(x='Inf')", "a float64"),
        ("open(os.environ['CAPSULE_RECORDS'], 'ab').write(b'\\x96 no json')", "faulty line"),
    ],
)
def test_rows_that_were_not_planned_are_bad_records(bench: Bench, source: str, words: str) -> None:
    attempt = bench.python(RECORD + source)
    assert end(attempt).outcome == "bad_records"
    assert words in end(attempt).evidence


def test_a_python_trial_runs_every_cell_of_its_process(bench: Bench) -> None:
    (bench.snapshot / "trial.py").write_text(
        "def f(cell):\n    print(cell.id)\n    return {'x': float('-inf'), 'words': f'{cell.workload} {cell.device}'}\n"
    )
    attempt = bench.go(protocol_of(trial="trial:f"))
    assert (end(attempt).outcome, end(attempt).rows) == ("completed", 2)
    assert '"words":"{\'n\': 3} cpu"' in bench.journal(attempt.id)
    assert (bench.attempts / attempt.id / "stdout").read_text() == "c000000\nc000001\n"


def test_a_trial_that_raises_is_a_result(bench: Bench) -> None:
    (bench.snapshot / "trial.py").write_text("def f(cell):\n    raise ValueError('no')\n")
    attempt = bench.go(protocol_of(trial="trial:f"))
    assert (end(attempt).outcome, end(attempt).rows) == ("trial_error", 2)


def test_a_trial_that_leaves_is_incomplete(bench: Bench) -> None:
    (bench.snapshot / "trial.py").write_text("import sys\ndef f(cell):\n    sys.exit(0)\n")
    assert end(bench.go(protocol_of(trial="trial:f"))).outcome == "incomplete"


def test_a_trial_that_ends_itself_with_rows_of_its_own_is_not_completed(bench: Bench) -> None:
    (bench.snapshot / "trial.py").write_text(
        "import os\ndef f(cell):\n    with open(os.environ['CAPSULE_RECORDS'], 'w') as journal:\n"
        '        journal.write(\'{"cell":"c000000","x":1.0}\\n{"cell":"c000001","x":1.0}\\n{"end":true}\\n\')\n'
        "    os._exit(0)\n"
    )
    attempt = bench.go(protocol_of(trial="trial:f"))
    assert (end(attempt).outcome, end(attempt).rows) == ("provenance", 2)
    assert "without the report of imported modules" in end(attempt).evidence


@pytest.mark.parametrize(
    "line",
    ["{", "[" * 100_000, '{"module":1,"file":"/x","sha256":null}', '{"module":"m","file":"/a\\u0000","sha256":""}'],
)
def test_a_report_of_imports_that_a_trial_forged_badly_is_not_believed(bench: Bench, line: str) -> None:
    (bench.snapshot / "trial.py").write_text(
        "import atexit, os\ndef forge():\n    folder = os.path.dirname(os.environ['CAPSULE_RECORDS'])\n"
        f"    open(os.path.join(folder, 'imports.jsonl'), 'w').write({line!r} + '\\n')\n"
        "atexit.register(forge)\ndef f(cell):\n    return {'x': 1.0}\n"
    )
    attempt = bench.go(protocol_of(trial="trial:f"))
    assert (end(attempt).outcome, end(attempt).rows) == ("provenance", 2)


IN_THE_WAY = (
    "import os\nfolder = os.path.dirname(os.environ['CAPSULE_RECORDS'])\n"
    "def put(name, make):\n    path = os.path.join(folder, name)\n"
    "    if os.path.exists(path): os.unlink(path)\n    make(path)\n"
)
IRREGULAR = ["os.mkfifo", "os.mkdir", "lambda path: os.symlink('/etc/passwd', path)"]


@pytest.mark.parametrize("make", IRREGULAR)
@pytest.mark.parametrize("name", ["journal.jsonl", "stdout", "redactions.jsonl", "environment.json"])
def test_what_is_no_regular_file_counts_as_absent(bench: Bench, name: str, make: str) -> None:
    attempt = bench.python(RECORD + "record(x=1)\n" + IN_THE_WAY + f"put({name!r}, {make})")
    assert end(attempt).outcome == ("incomplete" if name == "journal.jsonl" else "completed")
    assert f"{name} is no regular file" in end(attempt).evidence
    assert name not in end(attempt).files
    assert end(attempt).rows == (0 if name == "journal.jsonl" else 1)


@pytest.mark.parametrize("make", IRREGULAR)
def test_what_stands_in_the_way_of_evidence_is_moved(bench: Bench, monkeypatch: pytest.MonkeyPatch, make: str) -> None:
    monkeypatch.setenv("SERVICE_TOKEN", "tr0ub4dor&3-and-more")
    names = ["redactions.jsonl", "provenance.jsonl", "stdout.whole", "stdout.tail-000000007", "stdout.tail-x"]
    (bench.snapshot / "trial.py").write_text(
        IN_THE_WAY + "def f(cell):\n    print(os.environ['SERVICE_TOKEN'], flush=True)\n    if cell.block == 0:\n"
        f"        for name in {names}: put(name, {make})\n    return {{'x': 1.0}}\n"
    )
    attempt = bench.go(protocol_of(trial="trial:f"))
    assert end(attempt).outcome == "completed"
    assert {"redactions.jsonl", "provenance.jsonl"} <= set(end(attempt).files)
    assert (bench.attempts / attempt.id / "stdout").read_text() == "[redacted]\n" * 2


def test_evidence_that_a_command_wrote_itself_counts_as_absent(bench: Bench) -> None:
    """A command is not looked into and a CPU not sampled, so that whoever reads these would read the trial's word."""
    names = ["provenance.jsonl", "telemetry.jsonl", "imports.jsonl"]
    plants = f"for name in {names}: put(name, lambda path: open(path, 'w').write('{{}}' + chr(10)))\n"
    attempt = bench.python(RECORD + "record(x=1)\n" + IN_THE_WAY + plants)
    assert end(attempt).outcome == "completed"
    for name in names[:2]:
        assert f"{name} was written by somebody else" in end(attempt).evidence
        assert name not in end(attempt).files
    assert end(attempt).telemetry == {}


@pytest.mark.parametrize("make", IRREGULAR)
def test_a_report_of_imports_that_is_no_regular_file_is_none(bench: Bench, make: str) -> None:
    (bench.snapshot / "trial.py").write_text(
        "import atexit\n" + IN_THE_WAY + f"atexit.register(put, 'imports.jsonl', {make})\n"
        "def f(cell):\n    return {'x': 1.0}\n"
    )
    attempt = bench.go(protocol_of(trial="trial:f"))
    assert end(attempt).outcome == "provenance"
    assert "imports.jsonl is no regular file" in end(attempt).evidence


def test_a_journal_too_long_for_a_capsule_is_cut_after_a_whole_line(bench: Bench) -> None:
    source = RECORD + "record(x=1.5)\nopen(os.environ['CAPSULE_RECORDS'], 'a').write('\\n' * 2_000)"
    order = bench.order(protocol_of(command=["python", "-c", source]))
    attempt = supervised(bench, order, "launch.JOURNAL_BYTES_MAX = 1_000")
    data = (bench.attempts / attempt.id / "journal.jsonl").read_bytes()
    kept, _, marker = data.rstrip(b"\n").rpartition(b"\n")
    left_out = 11 + 2_000 + len('{"end":true}\n') - len(kept) - 1
    assert marker == b"[capsule: %d bytes left out here]" % left_out
    assert len(data) <= 1_000
    assert (end(attempt).outcome, end(attempt).rows) == ("bad_records", 1)
    assert end(attempt).evidence == f"the journal is longer than 1000 bytes; its last {left_out} were left out"
    assert end(attempt).files["journal.jsonl"].size == len(data)
    journal = read_journal(data, order.observations, ["c000000"])
    assert outcome_of(Process(0, order.cells), journal)[0] == "bad_records"


def test_the_limit_of_a_journal_is_not_reached_by_one_that_has_it(bench: Bench) -> None:
    source = RECORD + "record(x=1.5)\nopen(os.environ['CAPSULE_RECORDS'], 'a').write('\\n' * 976)"
    order = bench.order(protocol_of(command=["python", "-c", source]))
    attempt = supervised(bench, order, "launch.JOURNAL_BYTES_MAX = 1_000")
    assert (end(attempt).outcome, end(attempt).files["journal.jsonl"].size) == ("completed", 1_000)


@pytest.mark.slow
def test_a_real_journal_of_more_than_the_limit_is_cut(bench: Bench) -> None:
    line = "'{\"x\": 1}' + ' ' * 900_000 + '\\n'"
    source = RECORD + f"record(x=1.5)\nfor _ in range(80): open(os.environ['CAPSULE_RECORDS'], 'a').write({line})"
    attempt = bench.python(source, wall_limit_seconds=60)
    assert end(attempt).outcome == "bad_records"
    assert 64 * 2**20 - 10**6 < end(attempt).files["journal.jsonl"].size <= 64 * 2**20 == launch.JOURNAL_BYTES_MAX


# C1, C2, B3: limits and trees.


def test_a_trial_that_ignores_term_is_killed_after_the_grace_and_why_is_written_first(bench: Bench) -> None:
    source = (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(60)"
    )
    attempt = bench.python(source, wall_limit_seconds=1, kill_grace_seconds="0.5")
    names = bench.names(attempt.id)
    assert [name for name in names if name != "heartbeat"] == [*WHOLE[:3], "stopping", *WHOLE[3:]]
    assert end(attempt).outcome == "wall_limit"
    assert exit_of(attempt).signal == signal.SIGKILL
    assert exit_of(attempt).cause == "wall_limit"
    assert 1_500 <= end(attempt).charge.debited_ms < 3_500


def test_a_trial_that_heeds_term_is_not_killed(bench: Bench) -> None:
    """And when it is asked to end, the ledger says why already."""
    source = (
        "import signal, sys, time\n"
        f"def end(*_):\n    print(open({str(bench.ledger.path)!r}).read().count('\"stopping\"'))\n    sys.exit(3)\n"
        "signal.signal(signal.SIGTERM, end)\ntime.sleep(60)"
    )
    attempt = bench.python(source, wall_limit_seconds=1, kill_grace_seconds=20)
    assert (end(attempt).outcome, exit_of(attempt).exit_code) == ("wall_limit", 3)
    assert (bench.attempts / attempt.id / "stdout").read_text() == "1\n"
    assert 1_000 <= end(attempt).charge.debited_ms < 3_000
    assert end(attempt).overrun_ms == 0


GRANDCHILD = """
import os, sys, time
if os.fork():
    os._exit(0) if len(sys.argv) > 1 else None
    time.sleep(SLEEP)
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
import signal
def note(*_):
    open(PIDS + ".asked", "w").write(str(open(LEDGER).read().count('"stopping"')))
signal.signal(signal.SIGTERM, note)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
os.environ.clear()
for descriptor in range(3):
    os.close(descriptor)
open(PIDS, "a").write(f"{os.getpid()}\\n")
until = time.monotonic() + 60
while time.monotonic() < until:
    time.sleep(1)
"""


def grandchild(bench: Bench, pids: Path, seconds: str) -> str:
    """A program that leaves a daemon; asked to end, that one notes how often the ledger says why, and stays."""
    names = {"SLEEP": seconds, "PIDS": repr(str(pids)), "LEDGER": repr(str(bench.ledger.path))}
    return re.sub("SLEEP|PIDS|LEDGER", lambda name: names[name[0]], GRANDCHILD)


def test_a_daemon_that_outlives_its_leader_is_found_killed_and_not_plain_ok(bench: Bench, tmp_path: Path) -> None:
    source = RECORD + "record(x=1)\n" + grandchild(bench, tmp_path / "pids", "0.3")
    attempt = bench.python(source, kill_grace_seconds="0.3")
    (daemon,) = pids(tmp_path / "pids")
    assert not Path(f"/proc/{daemon}").exists()
    assert end(attempt).outcome == "leaked_descendants"
    assert str(daemon) in end(attempt).evidence
    empty = next(event for event in bench.events(attempt.id) if event.name == "tree_empty")
    assert empty.data.to_json()["killed"] == 1
    assert (tmp_path / "pids.asked").read_text() == "1", "why it is ended was written first"
    assert end(attempt).charge.debited_ms >= 1_000


def test_the_whole_tree_ends_at_the_wall_limit(bench: Bench, tmp_path: Path) -> None:
    attempt = bench.python(grandchild(bench, tmp_path / "pids", "60"), wall_limit_seconds=1, kill_grace_seconds="0.3")
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids(tmp_path / "pids"))
    assert end(attempt).outcome == "wall_limit"


def test_helpers_that_end_by_themselves_are_no_leak(bench: Bench) -> None:
    attempt = bench.python(RECORD + "record(x=1)\nif os.fork() == 0:\n    import time; time.sleep(0.3)\n")
    assert end(attempt).outcome == "completed"
    assert end(attempt).charge.debited_ms >= 300


# Output.


def test_fifty_megabytes_are_kept_at_both_ends_with_the_gap_counted(bench: Bench) -> None:
    source = RECORD + "import sys\nfor i in range(500_000): sys.stdout.write(f'{i:099d}\\n')\nrecord(x=1)"
    attempt = bench.python(source, output_bytes_max=1_000_000)
    data = (bench.attempts / attempt.id / "stdout").read_bytes()
    marker = b"\n[capsule: 49000000 bytes left out here]\n"
    assert end(attempt).outcome == "completed"
    assert len(data) == 1_000_000 + len(marker)
    assert data.startswith(f"{0:099d}\n".encode())
    assert data.endswith(f"{499_999:099d}\n".encode())
    assert data[500_000 : 500_000 + len(marker)] == marker
    assert end(attempt).files["stdout"].size == len(data)
    assert [path.name for path in (bench.attempts / attempt.id).glob("stdout*")] == ["stdout"]


def test_secrets_are_replaced_before_hashing_and_listed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_VALUE", "correct horse battery")
    monkeypatch.setenv("SERVICE_TOKEN", "tr0ub4dor&3-and-more")
    source = RECORD + "record(x=1)\nprint('a', os.environ['MY_VALUE'], os.environ['SERVICE_TOKEN'])"
    attempt = bench.go(protocol_of(command=["python", "-c", source, "tr0ub4dor&3-and-more"]), secret_names=["MY_VALUE"])
    folder = bench.attempts / attempt.id
    assert (folder / "stdout").read_text() == "a [redacted] [redacted]\n"
    listed = [json.loads(line) for line in (folder / "redactions.jsonl").read_text().splitlines()]
    assert [(item["file"], item["offset"], item["length"]) for item in listed] == [
        ("stdout", 2, 21),
        ("stdout", 24, 20),
    ]
    assert attempt.intent is not None
    assert attempt.intent.argv[-1] == "[redacted]"
    assert b"tr0ub4dor" not in bench.ledger.path.read_bytes()
    assert "redactions.jsonl" in end(attempt).files


# What the trial is given.


def test_a_command_is_told_its_cell(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("PASSED_THROUGH", "yes")
    names = ["CAPSULE_CELL", "CAPSULE_ARM", "CAPSULE_SEED", "CAPSULE_WORKLOAD", "CAPSULE_PARAMETERS", "PASSED_THROUGH",
             "CAPSULE_WORKLOAD_PARAMETERS", "CAPSULE_DEVICE", "CAPSULE_ATTEMPT", "PYTHONPATH", "PYTHONNOUSERSITE",
             "PYTHONDONTWRITEBYTECODE", "CUDA_VISIBLE_DEVICES"]  # fmt: skip
    source = (
        f"import json, os, sys; print(json.dumps([sys.argv[1:], [os.environ.get(n) for n in {names}], os.getcwd()]))"
    )
    argv = [
        "{seed}/{cell}/{arm}/{workload}/{start}/{block}/{device}",
        "{parameters.lr}",
        "{workload.n}",
        "${HOME}",
        "{{x}}",
    ]
    protocol = protocol_of(command=["python", "-c", source.replace("{", "{").replace("[n]", "[n]"), *argv],
                           parameters={"lr": {"decimal": "0.10"}, "deep": True})  # fmt: skip
    supervision = bench.start(protocol)
    assert supervision.wait(30) == launch.SETTLED
    assert supervision.notes == ("PYTHONPATH is set here and not passed to the trial",)
    arguments, given, directory = json.loads((bench.attempts / supervision.attempt / "stdout").read_text())
    assert arguments == ["7/c000000/only/w/0/0/cpu", "0.10", "3", "${HOME}", "{x}"]
    assert directory == str(bench.snapshot)
    assert given == ["c000000", "only", "7", "w", '{"lr": 0.1, "deep": true}', "yes", '{"n": 3}', "cpu", "a000001",
                     None, "1", "1", ""]  # fmt: skip


PLANTED = """
import importlib.util, os, py_compile, sys
source, prefix, content = sys.argv[1:]
sys.pycache_prefix = prefix or None
cache = importlib.util.cache_from_source(source)
os.makedirs(os.path.dirname(cache), exist_ok=True)
open(cache + ".py", "w").write(content)
py_compile.compile(cache + ".py", cache, source, doraise=True,
                   invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
os.unlink(cache + ".py")
"""


def test_a_planted_cache_elsewhere_does_not_replace_a_frozen_module(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = bench.snapshot / "trial.py"
    trial.write_text("def f(cell):\n    return {'x': 1.0}\n")
    planted = trial.read_text().replace("1.0", "2.0")
    subprocess.run([sys.executable, "-c", PLANTED, str(trial), str(tmp_path / "caches"), planted], check=True)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path / "caches"))
    supervision = bench.start(protocol_of(trial="trial:f"))
    assert supervision.wait(30) == launch.SETTLED
    assert "PYTHONPYCACHEPREFIX is set here and not passed to the trial" in supervision.notes
    assert end(bench.account().attempts[supervision.attempt]).outcome == "completed"
    assert '"x":1.0' in bench.journal(supervision.attempt)


def test_a_planted_cache_in_the_snapshot_is_refused(bench: Bench) -> None:
    trial = bench.snapshot / "trial.py"
    trial.write_text("def f(cell):\n    return {'x': 1.0}\n")
    trees = [bench.frozen()]
    subprocess.run([sys.executable, "-c", PLANTED, str(trial), "", trial.read_text()], check=True)
    supervision = bench.start(protocol_of(trial="trial:f"), trees=trees)
    assert supervision.wait(20) == launch.REFUSED
    refused = bench.account().attempts[supervision.attempt].refused
    assert refused is not None
    assert refused.reason == "source_changed"
    assert "__pycache__" in refused.words


def test_a_cache_that_a_trial_plants_for_the_next_one_is_a_change(bench: Bench) -> None:
    (bench.snapshot / "trial.py").write_text(
        "from pathlib import Path\ndef f(cell):\n    (cell.source_root / '__pycache__').mkdir(exist_ok=True)\n"
        "    (cell.source_root / '__pycache__/x.pyc').touch()\n    return {'x': 1.0}\n"
    )
    assert end(bench.go(protocol_of(trial="trial:f"))).outcome == "source_changed"


def test_few_variables_of_the_interpreter_reach_a_trial(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PYTHON")]:
        monkeypatch.delenv(name)
    for name in ("HASHSEED", "UNBUFFERED", "FAULTHANDLER"):
        monkeypatch.setenv(f"PYTHON{name}", "1")
    monkeypatch.setenv("PYTHONMALLOC", "malloc")
    for name in ("OPTIMIZE", "WARNINGS", "BREAKPOINT", "PYCACHEPREFIX", "PLATLIBDIR", "SAFEPATH", "NOBODYKNOWS"):
        monkeypatch.setenv(f"PYTHON{name}", "")
    attempt = bench.python("import os; print(*sorted(name for name in os.environ if name.startswith('PYTHON')))")
    assert (bench.attempts / attempt.id / "stdout").read_text().split() == [
        "PYTHONDONTWRITEBYTECODE", "PYTHONFAULTHANDLER", "PYTHONHASHSEED", "PYTHONMALLOC", "PYTHONNOUSERSITE",
        "PYTHONUNBUFFERED",
    ]  # fmt: skip


def test_a_cell_run_again_ignores_planted_caches_and_what_is_no_regular_file(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = bench.snapshot / "trial.py"
    trial.write_text("def f(cell):\n    return {'x': 1.0}\n")
    planted = trial.read_text().replace("1.0", "2.0")
    subprocess.run([sys.executable, "-c", PLANTED, str(trial), str(tmp_path / "caches"), planted], check=True)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path / "caches"))
    protocol = protocol_of(trial="trial:f")
    (tmp_path / "again").mkdir()
    journal, words = recompute(protocol, enumerate_cells(protocol)[0], bench.snapshot, tmp_path / "again")
    assert (b'"x":1.0' in journal, words) == (True, "ended with status 0")
    protocol = protocol_of(command=["mkfifo", str(tmp_path / "pipe/journal.jsonl")])
    (tmp_path / "pipe").mkdir()
    journal, words = recompute(protocol, enumerate_cells(protocol)[0], bench.snapshot, tmp_path / "pipe")
    assert (journal, words) == (b"", "ended with status 0")


def test_the_trial_has_no_terminal_no_input_and_a_session_of_its_own(bench: Bench) -> None:
    source = RECORD + "import sys\nrecord(x=float(os.getsid(0) == os.getpid() and sys.stdin.read() == ''))"
    attempt = bench.python(source)
    assert bench.journal(attempt.id).splitlines()[0] == '{"x": 1.0}'


# Heartbeats, stops and losses while it runs.


def test_heartbeats_come_after_one_second_and_then_every_five(bench: Bench) -> None:
    attempt = bench.python("import time; time.sleep(1.3)")
    beats = [event.data.to_json()["elapsed_ms"] for event in bench.events(attempt.id) if event.name == "heartbeat"]
    assert len(beats) == 1
    assert 1_000 <= beats[0] < 2_000


def test_heartbeats_grow_rare_with_the_time_elapsed() -> None:
    elapsed = [0, 400_000, 500_000, 1_000_000, 5_999_000, 6_000_000, 10**9]
    assert [heartbeat_interval_ms(ms) for ms in elapsed] == [5_000, 5_000, 5_000, 10_000, 59_990, 60_000, 60_000]


def test_the_journal_is_synced_and_the_lease_looked_at_between_rare_heartbeats(bench: Bench, tmp_path: Path) -> None:
    changes = (
        "attempt_run.FIRST_HEARTBEAT_MS = attempt_run.HEARTBEAT_MS = heartbeats.HEARTBEAT_MS = 50\n"
        "heartbeats.HEARTBEAT_GROWTH = 2\n"
        "real, loss = attempt_run.sync, supervisor.Lease.loss\n"
        f"def note(word): open({str(tmp_path / 'calls')!r}, 'a').write(word + ' ')\n"
        "def sync(descriptor):\n    note('sync')\n    real(descriptor)\nattempt_run.sync = sync\n"
        "supervisor.Lease.loss = lambda self: note('lease') or loss(self)"
    )
    order = bench.order(protocol_of(command=["sleep", "2"]))
    attempt = supervised(bench, order, changes)
    beats = [event.data.to_json()["elapsed_ms"] for event in bench.events(attempt.id) if event.name == "heartbeat"]
    gaps = [(later - before) / before for before, later in itertools.pairwise(beats)]
    assert 3 <= len(beats) <= 12
    assert min(gaps) >= 0.45
    calls = (tmp_path / "calls").read_text().split()
    assert min(calls.count("sync"), calls.count("lease")) > 2 * len(beats)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_to_a_supervisor_that_is_not_up_yet_is_heeded(bench: Bench, number: signal.Signals) -> None:
    supervision = bench.start(protocol_of(command=["sleep", "60"]))
    os.kill(supervision.pid, number)
    assert supervision.wait(20) == launch.REFUSED
    refused = bench.account().attempts[supervision.attempt].refused
    assert refused is not None
    assert (refused.reason, refused.words) == ("user", f"{number.name} before anything was started")
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


def test_a_trial_starts_with_no_signal_blocked(bench: Bench) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        attempt = bench.python("import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert (bench.attempts / attempt.id / "stdout").read_text() == "set()\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_supervisor_stops_the_trial_as_the_user_s_wish(bench: Bench, number: int) -> None:
    supervision = bench.start(protocol_of(command=["sleep", "60"]))
    eventually(lambda: "spawned" in bench.names(supervision.attempt))
    os.kill(supervision.pid, number)
    assert supervision.wait(20) == launch.SETTLED
    attempt = bench.measured(supervision.attempt)
    assert end(attempt).outcome == "user"
    assert signal.Signals(number).name in end(attempt).evidence
    names = bench.names(attempt.id)
    assert names.index("stopping") < names.index("exit")


def test_a_second_signal_kills_at_once(bench: Bench) -> None:
    source = (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(60)"
    )
    protocol = protocol_of(command=["python", "-c", source], kill_grace_seconds=30, wall_limit_seconds=30)
    supervision = bench.start(protocol)
    stdout = bench.attempts / supervision.attempt / "stdout"
    eventually(lambda: stdout.exists() and stdout.read_text())
    supervision.stop()
    eventually(lambda: "stopping" in bench.names(supervision.attempt))
    began = time.monotonic()
    supervision.stop()
    assert supervision.wait(20) == launch.SETTLED
    assert time.monotonic() - began < 5
    attempt = bench.account().attempts[supervision.attempt]
    assert (end(attempt).outcome, exit_of(attempt).signal) == ("user", signal.SIGKILL)


def test_stop_now_needs_no_grace(bench: Bench) -> None:
    source = (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(60)"
    )
    supervision = bench.start(protocol_of(command=["python", "-c", source], kill_grace_seconds=30))
    stdout = bench.attempts / supervision.attempt / "stdout"
    eventually(lambda: stdout.exists() and stdout.read_text())
    supervision.stop(now=True)
    assert supervision.wait(5) == launch.SETTLED
    assert end(bench.account().attempts[supervision.attempt]).outcome == "user"


@pytest.mark.parametrize("replaced", [False, True])
def test_a_lease_file_that_goes_stops_the_trial(bench: Bench, replaced: bool) -> None:
    supervision = bench.start(protocol_of(command=["sleep", "60"]))
    eventually(lambda: "spawned" in bench.names(supervision.attempt))
    lease_path(bench.leases, "CPU-0").unlink()
    if replaced:
        lease_path(bench.leases, "CPU-0").touch()
    assert supervision.wait(20) == launch.SETTLED
    attempt = bench.measured(supervision.attempt)
    assert (end(attempt).outcome, exit_of(attempt).signal) == ("lease_lost", signal.SIGTERM)
    assert ("was replaced" if replaced else "is gone") in end(attempt).evidence


def test_a_lease_file_that_went_just_before_the_trial_ended_counts_too(bench: Bench) -> None:
    """Another attempt may have had the device since, and nobody could know."""
    attempt = bench.python(RECORD + f"record(x=1)\nos.unlink({str(lease_path(bench.leases, 'CPU-0'))!r})")
    assert (end(attempt).outcome, end(attempt).rows, exit_of(attempt).exit_code) == ("lease_lost", 1, 0)


def test_the_supervisor_goes_on_when_the_command_that_started_it_is_killed(bench: Bench, tmp_path: Path) -> None:
    order = bench.order(protocol_of(command=["python", "-c", RECORD + "import time; time.sleep(1); record(x=1)"]))
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom capsule.host.launch import LaunchOrder\n"
        "from capsule.host.supervision import start\n"
        "from capsule.host.process import identify\nimport os\n"
        "order = LaunchOrder.from_bytes(Path(sys.argv[1]).read_bytes(), 'order')\n"
        "print(start(order.model_copy(update={'launcher': identify(os.getpid())})).pid, flush=True)\ntime.sleep(60)\n"
    )
    (tmp_path / "order.json").write_bytes(order.to_bytes())
    starter = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "order.json")], stdout=subprocess.PIPE, text=True
    )
    assert starter.stdout is not None
    supervisor = identify(int(starter.stdout.readline()))
    eventually(lambda: "spawned" in bench.names(order.attempt))
    starter.kill()
    starter.communicate()
    eventually(lambda: not is_alive(supervisor))
    attempt = bench.account().attempts[order.attempt]
    assert end(attempt).outcome == "completed"
    assert "cli_lost" in end(attempt).evidence


# Refused before anything starts.


def test_waiting_for_a_device_can_be_stopped(bench: Bench) -> None:
    held = take(bench.leases, ["CPU-0"], HOLDER)
    supervision = bench.start(protocol_of(command=["true"]), lease_wait_ms=60_000)
    eventually(lambda: (bench.attempts / supervision.attempt / "whereabouts.json").exists())
    time.sleep(0.5)
    supervision.stop()
    assert supervision.wait(10) == launch.REFUSED
    held.release()
    refused = bench.account().attempts[supervision.attempt].refused
    assert refused is not None
    assert (refused.reason, refused.words) == ("user", "SIGTERM before anything was started")


def test_a_busy_device_is_refused_by_name_and_costs_nothing(bench: Bench) -> None:
    held = take(bench.leases, ["CPU-0"], HOLDER)
    supervision = bench.start(protocol_of(command=["true"]))
    assert supervision.wait(20) == launch.REFUSED
    attempt = bench.account().attempts[supervision.attempt]
    assert attempt.refused is not None
    assert attempt.refused.reason == "busy"
    assert "held by attempt a000007 of 0002-y, pid 4711, since then" in attempt.refused.words
    assert attempt.held_ms == 0
    assert bench.names(attempt.id) == ["reserved", "refused"]
    waiting = bench.start(protocol_of(command=["true"]), lease_wait_ms=20_000)
    time.sleep(0.5)
    held.clear()
    held.release()
    assert waiting.wait(20) == launch.SETTLED


def test_frozen_sources_that_changed_are_refused_before_and_found_after(bench: Bench) -> None:
    (bench.snapshot / "a.py").write_text("x = 1\n")
    frozen = [bench.frozen()]
    source = RECORD + "record(x=1)\nopen('b.py', 'w').write('y = 2')"
    attempt = bench.go(protocol_of(command=["python", "-c", source]), trees=frozen)
    assert end(attempt).outcome == "source_changed"
    assert "b.py" in end(attempt).evidence
    supervision = bench.start(protocol_of(command=["true"]), trees=frozen)
    assert supervision.wait(20) == launch.REFUSED
    refused = bench.account().attempts[supervision.attempt].refused
    assert refused is not None
    assert refused.reason == "source_changed"


def test_words_that_a_trial_makes_long_are_shortened_in_the_ledger(bench: Bench) -> None:
    """L-01: a module's name of megabytes, which the end quotes, leaves an event that every reader takes."""
    (bench.snapshot / "trial.py").write_text(
        "import atexit, json, os\ndef forge():\n    folder = os.path.dirname(os.environ['CAPSULE_RECORDS'])\n"
        "    words = [json.dumps({'module': 'm,' * n, 'file': '/x', 'sha256': None}) for n in range(400000, 400005)]\n"
        "    open(os.path.join(folder, 'imports.jsonl'), 'w').write('\\n'.join([*words, '']))\n"
        "atexit.register(forge)\ndef f(cell):\n    return {'x': 1.0}\n"
    )
    ended = end(bench.go(protocol_of(trial="trial:f")))
    assert ended.outcome == "provenance"
    assert "m,m,m" in ended.evidence
    assert "characters cut" in ended.evidence
    assert len(ended.evidence) <= EVIDENCE_MAX


def test_a_module_that_nobody_froze_is_found(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/sneaked.py").write_text("")
    (bench.snapshot / "trial.py").write_text(
        f"import sys\nsys.path.append({str(tmp_path / 'elsewhere')!r})\nimport sneaked\ndef f(cell):\n    return {{}}\n"
    )
    attempt = bench.go(protocol_of(trial="trial:f"))
    assert end(attempt).outcome == "provenance"
    assert "sneaked" in end(attempt).evidence
    assert "provenance.jsonl" in end(attempt).files


# The charge.


def test_the_charge_runs_from_the_lease_to_the_verified_release(bench: Bench) -> None:
    attempt = bench.python("import time; time.sleep(0.6)")
    assert attempt.intent is not None
    assert attempt.released is not None
    charge = end(attempt).charge
    assert charge.lower_ms == charge.upper_ms == charge.debited_ms
    assert charge.debited_ms == attempt.released.boottime_ms - attempt.intent.leased.boottime_ms >= 600
    assert attempt.held_ms == charge.debited_ms
    assert attempt.intent.snapshot == SNAPSHOT
    assert bench.account().manifests == [MANIFEST]
    assert lease_path(bench.leases, "CPU-0").read_bytes() == b""


def test_nothing_heavy_is_loaded_by_a_supervisor() -> None:
    """It has what the command has that forks it."""
    code = "import sys, capsule.cli.app, capsule.steps.run, capsule.host.supervision; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"torch", "pyarrow", "rich", "pynvml", "numpy"}.isdisjoint(loaded)


def test_a_supervisor_leaves_no_process(bench: Bench) -> None:
    bench.python("print('done')")
    assert [item for item in descendants(os.getpid()) if item.pid in {s.pid for s in bench.supervisions}] == []

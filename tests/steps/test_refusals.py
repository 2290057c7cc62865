"""What freeze and run refuse: drift, secrets, what cannot be planned, what is frozen already, two runs at once."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.conftest import Capsule
from tests.study import TRIAL, make_command_study, make_study


def test_a_changed_source_is_drift(capsule: Capsule, tmp_path: Path) -> None:
    """A run refuses when a frozen file changed, names it, and runs the frozen bytes only when told to."""
    protocol = make_study(tmp_path / "s")
    assert capsule("freeze", protocol).code == 0
    (protocol.parent / "trial.py").write_text(TRIAL + "# changed\n")
    said = capsule("run", protocol)
    assert said.code == 4
    assert "trial.py" in said.err
    assert "--from-frozen" in said.err
    assert capsule("run", protocol, "--from-frozen").code == 0
    events = json.loads(capsule("ledger", protocol, "--json").out)["events"]
    assert [e["data"]["from_frozen"] for e in events if e["event"] == "reserved"] == [True, True]


def test_an_added_and_a_removed_file_are_drift(capsule: Capsule, tmp_path: Path) -> None:
    """Files that appear or vanish are named."""
    protocol = make_study(tmp_path / "s")
    (protocol.parent / "kept.txt").write_text("kept")
    assert capsule("freeze", protocol).code == 0
    (protocol.parent / "kept.txt").unlink()
    (protocol.parent / "new.txt").write_text("new")
    said = capsule("run", protocol)
    assert said.code == 4
    assert "removed: kept.txt" in said.err
    assert "added: new.txt" in said.err
    assert "undo the changes" in said.err
    (protocol.parent / "kept.txt").write_text("kept")
    said = capsule("run", protocol)
    assert (said.code, "move the new files elsewhere" in said.err) == (4, True), said


def test_a_frozen_protocol_is_not_frozen_again_with_other_content(capsule: Capsule, tmp_path: Path) -> None:
    """Equal is success and says so; different is refused and points at amend."""
    protocol = make_study(tmp_path / "s")
    first = capsule("freeze", protocol)
    assert capsule("freeze", protocol).out.splitlines()[0] == first.out.splitlines()[0]
    protocol.write_text(protocol.read_text().replace("threshold = 0", "threshold = 1"))
    said = capsule("freeze", protocol)
    assert said.code == 4
    assert "capsule amend" in said.err


def test_an_amendment_keeps_ledger_and_budget(capsule: Capsule, tmp_path: Path) -> None:
    """Amending erases no attempt: the new manifest names the old one and what was seen, and shares its spent budget."""
    protocol = make_study(tmp_path / "s")
    for command in ("freeze", "run"):
        assert capsule(command, protocol).code == 0
    spent = json.loads(capsule("status", protocol, "--json").out)["budgets"][0]["held_ms"]
    protocol.write_text(protocol.read_text().replace("threshold = 0", "threshold = 1"))
    assert capsule("amend", protocol, "--reason", " ").code == 2
    amended = capsule("amend", protocol, "--reason", "the threshold was wrong", "--json")
    assert amended.code == 0, amended
    shown = json.loads((protocol.parent / "study.frozen" / "002" / "manifest.json").read_text())
    assert shown["supersedes"]["attempts_seen"] == 2
    assert shown["supersedes"]["rows_seen"] == 8
    status = json.loads(capsule("status", protocol, "--json").out)
    assert status["budgets"][0]["held_ms"] == spent
    assert status["cells"] == {"ok": 0, "failed": 0, "not_run": 8}
    for command in ("run", "pack"):
        assert capsule(command, protocol).code == 0
    verdict = json.loads(capsule("verify", protocol.with_suffix(".capsule"), "--json").out)
    assert (verdict["integrity"], verdict["outcome"]) == ("intact", "refuted")
    first = capsule("verify", protocol.with_suffix(".capsule"), "--against", shown["supersedes"]["manifest"])
    assert first.code == 0


def test_a_pilot_is_charged_apart_and_never_counts(capsule: Capsule, tmp_path: Path) -> None:
    """Pilots run before freezing too; they are recorded, exploratory, and in no verdict."""
    protocol = make_study(tmp_path / "s")
    assert capsule("run", protocol, "--pilot").code == 0
    for command in ("freeze", "run"):
        assert capsule(command, protocol).code == 0
    assert capsule("run", protocol, "--pilot").code == 0
    status = json.loads(capsule("status", protocol, "--json").out)
    assert [a["pilot"] for a in status["attempts"]] == [True, False, False, True]
    assert {(b["unit"], b["pilot"]) for b in status["budgets"]} == {("cpu", False), ("cpu", True)}
    assert capsule("pack", protocol).code == 0
    said = capsule("verify", protocol.with_suffix(".capsule"))
    assert said.code == 0, said


def test_a_secret_in_the_protocol_is_refused(capsule: Capsule, tmp_path: Path) -> None:
    """A token in the protocol is refused by line and kind, and not printed."""
    token = "ghp_" + "a1B2" * 9
    protocol = make_study(tmp_path / "s", changes={"A small study": f"A study with {token}"})
    said = capsule("freeze", protocol)
    assert said.code == 4
    assert "study.toml:3" in said.err
    assert token not in said.err + said.out


def test_a_trial_that_is_not_frozen_is_refused(capsule: Capsule, tmp_path: Path) -> None:
    """A trial's module must be among the sources."""
    protocol = make_study(tmp_path / "s", changes={'"trial:measure"': '"missing.module:measure"'})
    said = capsule("freeze", protocol)
    assert said.code == 2
    assert "arms[0].trial" in said.err
    assert "missing/module.py" in said.err


@pytest.mark.parametrize("data", [b"", b"\x00\xff\x80binary", b"key = ", b'schema = "capsule.protocol/9"\n'])
def test_what_is_no_protocol_is_refused(capsule: Capsule, tmp_path: Path, data: bytes) -> None:
    """An empty, binary, broken or future file is refused with the file's name."""
    protocol = make_study(tmp_path / "s")
    protocol.write_bytes(data)
    said = capsule("freeze", protocol)
    assert said.code == 2
    assert "study.toml" in said.err


def held_open(capsule: Capsule, folder: Path) -> tuple[Path, Path, subprocess.Popen[str]]:
    """Return a study, a file for which its trials wait, and a run of it that has come to the first of them."""
    gate = folder / "gate"
    trial = (
        "import os, time\n"
        f"def measure(cell):\n    while not os.path.exists({str(gate)!r}):\n        time.sleep(0.02)\n"
        "    return {'amount': 1.0, 'seconds': 0.0}\n"
    )
    protocol = make_study(folder / "s", trial=trial)
    assert capsule("freeze", protocol).code == 0
    command = [sys.executable, "-m", "capsule", "run", str(protocol)]
    run = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    until = time.monotonic() + 20
    journal = protocol.parent / ".capsule" / "study" / "attempts" / "a000001" / "journal.jsonl"
    while not journal.exists() and time.monotonic() < until:
        time.sleep(0.05)
    return protocol, gate, run


def test_two_runs_at_once(capsule: Capsule, tmp_path: Path) -> None:
    """The second run is told who holds the device; with --wait it goes on afterwards; no cell runs twice."""
    protocol, gate, first = held_open(capsule, tmp_path)
    second = capsule("run", protocol)
    assert second.code == 4, second
    assert f"pid {first.pid}" in second.err
    assert "a000001" in second.err
    threading.Timer(0.5, gate.touch).start()
    waited = capsule("run", protocol, "--wait")
    assert waited.code == 0, waited
    assert first.wait(60) in (0, 4), first.communicate()
    status = json.loads(capsule("status", protocol, "--json").out)
    assert status["cells"]["ok"] == 8
    assert [a["outcome"] for a in status["attempts"]].count("completed") == 2


def test_the_same_manifest_from_two_clones(capsule: Capsule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clones in different folders, time zones and umasks give the same manifest bytes."""
    protocol = make_study(tmp_path / "origin")
    folder = protocol.parent
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C"]
    subprocess.run([*git, folder, "init", "-q"], check=True)
    subprocess.run([*git, folder, "add", "study.toml", "trial.py"], check=True)
    subprocess.run([*git, folder, "commit", "-qm", "one"], check=True)
    identities = []
    for name, zone, mask in (("first", "Pacific/Auckland", 0o022), ("a b/second", "America/Lima", 0o077)):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        old = os.umask(mask)
        subprocess.run(["git", "clone", "-q", folder, tmp_path / name], check=True)
        said = capsule("freeze", tmp_path / name / "study.toml")
        os.umask(old)
        assert said.code == 0, said
        identities.append((tmp_path / name / "study.frozen" / "001" / "manifest.json").read_bytes())
    monkeypatch.undo()
    time.tzset()
    assert identities[0] == identities[1]


def test_frozen_files_are_read_only_and_checked(capsule: Capsule, tmp_path: Path) -> None:
    """A frozen list that was edited is found, whatever reads it."""
    protocol = make_study(tmp_path / "s")
    assert capsule("freeze", protocol).code == 0
    cells = protocol.parent / "study.frozen" / "001" / "cells.jsonl"
    assert cells.stat().st_mode & 0o222 == 0
    cells.chmod(0o644)
    cells.write_bytes(cells.read_bytes().replace(b'"arm":"once"', b'"arm":"both"', 1))
    for command in ("status", "run", "pack"):
        said = capsule(command, protocol)
        assert said.code == 3, said
        assert "cells.jsonl" in said.err


def test_a_disk_that_takes_no_more_leaves_nothing_half_written(capsule: Capsule, tmp_path: Path) -> None:
    """When a file cannot be written, freeze stops with exit code 5, says so, and can simply be repeated."""
    protocol = make_study(tmp_path / "s")
    (protocol.parent / "large.bin").write_bytes(b"\0" * 400_000)
    script = (
        "import resource, signal, sys\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        f"from capsule.cli.errors import guarded\nsys.exit(guarded(['freeze', {str(protocol)!r}]))"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert said.returncode == 5, said.stderr
    assert "capsule: error:" in said.stderr
    assert not list(protocol.parent.glob("study.frozen/*"))
    assert capsule("freeze", protocol).code == 0


def test_nothing_starts_after_the_frozen_time(capsule: Capsule, tmp_path: Path) -> None:
    """Past `not_after` the run is refused, and what was not run says why."""
    changes = {"device_seconds = 200": "device_seconds = 200\nnot_after = 2020-01-31T12:00:00Z"}
    protocol = make_study(tmp_path / "s", changes=changes)
    assert capsule("freeze", protocol).code == 0
    said = capsule("run", protocol)
    assert said.code == 4
    assert "2020-01-31T12:00:00Z" in said.out
    assert capsule("pack", protocol).code == 0
    results = json.loads(capsule("show", protocol.with_suffix(".capsule"), "7-results/results.json").out)
    assert results["reasons"] == {"not_run: not_after": 8}


def test_a_time_without_its_offset_is_refused(capsule: Capsule, tmp_path: Path) -> None:
    """A naive time means another moment elsewhere."""
    changes = {"device_seconds = 200": "device_seconds = 200\nnot_after = 2020-01-31T12:00:00"}
    said = capsule("freeze", make_study(tmp_path / "s", changes=changes))
    assert said.code == 2
    assert "not_after" in said.err


def test_lists_that_no_reader_takes_are_not_frozen(
    capsule: Capsule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list beyond the bound would make the capsule broken, once everything has been run and paid for."""
    protocol = make_study(tmp_path)
    for limit, name, what in ((300, "cells.jsonl", "8 planned cells"), (5000, "sources.jsonl", "42 sources")):
        monkeypatch.setattr("capsule.steps.freeze.KEPT_BYTES_MAX", limit)
        said = capsule("freeze", protocol)
        assert said.code == 4
        assert f"expected {name} of at most {limit} bytes, as no reader takes more, found " in said.err
        assert f" of {what}" in said.err
        assert not (tmp_path / ".capsule" / "objects").exists()
        assert not (tmp_path / "study.frozen").exists()
        for number in range(40):
            (tmp_path / f"more{number}.py").touch()
    monkeypatch.undo()


def test_manifests_that_no_reader_takes_are_not_frozen(
    capsule: Capsule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M-10: a manifest has a bound, and so have all of a chain, whether they are written or only frozen again."""
    protocol = make_study(tmp_path)
    monkeypatch.setattr("capsule.steps.freeze.DOCUMENT_BYTES_MAX", 1000)
    said = capsule("freeze", protocol)
    assert said.code == 4
    assert "of at most 1000 bytes, as no reader takes more" in said.err
    assert not (tmp_path / ".capsule" / "objects").exists()
    monkeypatch.undo()
    assert capsule("freeze", protocol).code == 0
    size = sum((tmp_path / "study.frozen/001" / name).stat().st_size for name in ("manifest.json", "protocol.toml"))
    monkeypatch.setattr("capsule.steps.freeze.COMMAS_MAX", 10)
    (tmp_path / "another.py").touch()
    said = capsule("amend", protocol, "--reason", "another file")
    assert said.code == 4
    assert "expected at most 10 commas in all manifests of study" in said.err
    monkeypatch.undo()
    (tmp_path / "another.py").unlink()
    monkeypatch.setattr("capsule.steps.freeze.CHAIN_BYTES_MAX", size)
    assert capsule("freeze", protocol).code == 0
    (tmp_path / "another.py").touch()
    said = capsule("amend", protocol, "--reason", "another file")
    assert said.code == 4
    assert f"at most {size} bytes, found {size} in 1 of them and no room for another" in said.err
    assert not (tmp_path / "study.frozen/002").exists()


@pytest.mark.parametrize("command", ["ledger", "reconcile", "status", "clean", "run", "pack"])
def test_what_was_never_frozen_has_no_account(capsule: Capsule, tmp_path: Path, command: str) -> None:
    """A file that is no frozen protocol is told as such, and never as one without events."""
    protocol, other = make_study(tmp_path), tmp_path / "README.md"
    other.write_text("read me")
    for file in (protocol, other):
        said = capsule(command, file, "--json")
        assert said.code == 3, said
        assert json.loads(said.out)["error"]["code"] == "incomplete"
        assert f"expected a frozen manifest in {file.with_name(file.stem + '.frozen')}, found none" in said.err
        assert f"capsule: hint: freeze the protocol first: capsule freeze {file}" in said.err
    assert capsule("freeze", protocol).code == 0
    for name, words in (("ledger", "no attempt yet"), ("reconcile", "nothing was open")):
        said = capsule(name, protocol)
        assert (said.code, said.out) == (0, f"{words}\n")


def test_a_ledger_that_was_removed_is_missed(capsule: Capsule, tmp_path: Path) -> None:
    """Removing ledger and head while the attempts are there gives no budget back."""
    protocol = make_study(tmp_path / "s")
    for command in ("freeze", "run"):
        assert capsule(command, protocol).code == 0
    for path in (protocol.parent / ".capsule" / "study").glob("ledger*"):
        path.unlink()
    said = capsule("run", protocol)
    assert said.code == 4
    assert "ledger" in said.err


def test_a_ledger_that_is_removed_while_a_run_goes_on_is_missed(capsule: Capsule, tmp_path: Path) -> None:
    protocol, gate, run = held_open(capsule, tmp_path)
    study = protocol.parent / ".capsule" / "study"
    with (study / "ledger.jsonl.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # no append is half done, which would leave a head
        for path in study.glob("ledger*"):
            path.unlink()
    gate.touch()
    _, said = run.communicate(timeout=60)
    assert (run.returncode, "Traceback" in said) == (5, False), said
    assert "ledger.jsonl: expected attempt a000001" in said


def test_an_edited_journal_is_found_by_whoever_reads_it(capsule: Capsule, tmp_path: Path) -> None:
    """A journal that is not the one that the ledger recorded stops status, run and pack."""
    protocol = make_study(tmp_path / "s")
    for command in ("freeze", "run"):
        assert capsule(command, protocol).code == 0
    journal = protocol.parent / ".capsule" / "study" / "attempts" / "a000001" / "journal.jsonl"
    journal.write_bytes(journal.read_bytes().replace(b'"amount":', b'"amount":1', 1))
    for command in ("status", "run", "pack"):
        said = capsule(command, protocol)
        assert said.code == 1, said
        assert "a000001" in said.err


def test_pack_writes_over_nothing_but_capsules(capsule: Capsule, tmp_path: Path) -> None:
    """A protocol, a ledger, a link, a device or a folder is not replaced; a capsule is."""
    protocol = make_study(tmp_path / "s")
    for command in ("freeze", "run", "pack", "pack"):
        assert capsule(command, protocol).code == 0
    link = tmp_path / "link"
    link.symlink_to(protocol.with_suffix(".capsule"))
    before = protocol.read_bytes()
    ledger = protocol.parent / ".capsule" / "study" / "ledger.jsonl"
    for target, code in ((protocol, 4), (ledger, 2), (link, 4), (Path("/dev/null"), 4), (tmp_path, 2), (Path(), 2)):
        assert capsule("pack", protocol, "--output", target).code == code, target
    assert protocol.read_bytes() == before
    assert capsule("status", protocol).code == 0
    assert Path("/dev/null").is_char_device()


def test_a_path_with_dots_means_the_folder_it_leads_to(capsule: Capsule, tmp_path: Path) -> None:
    """`../two/study.toml` is a protocol of `two`, not of the repository that the caller stands in."""
    two = make_study(tmp_path / "two")
    one = make_study(tmp_path / "one")
    subprocess.run(["git", "init", "-q", one.parent], check=True)
    said = capsule("freeze", one.parent / ".." / "two" / "study.toml")
    assert said.code == 0
    assert (tmp_path / "two" / ".capsule" / "objects").is_dir()
    assert capsule("run", two).code == 0


def test_committing_the_frozen_bytes_changes_nothing(capsule: Capsule, tmp_path: Path) -> None:
    """What git records of the same bytes is no change: freezing again says frozen already."""
    protocol = make_study(tmp_path / "s")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", protocol.parent]
    subprocess.run([*git, "init", "-q"], check=True)
    first = capsule("freeze", protocol)
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    again = capsule("freeze", protocol)
    assert again.code == 0, again
    assert again.out.splitlines()[0] == first.out.splitlines()[0]


def test_two_protocols_of_one_name_do_not_share_a_ledger(capsule: Capsule, tmp_path: Path) -> None:
    """The second protocol of a name in one workspace is refused."""
    first = make_study(tmp_path / "w" / "a")
    second = make_study(tmp_path / "w" / "b")
    for folder in (first.parent, second.parent):
        (folder / ".capsule").rmdir()
    (tmp_path / "w" / ".capsule").mkdir()
    for protocol in (first, second):
        protocol.write_text(protocol.read_text().replace('"trial:measure"', f'"{protocol.parent.name}.trial:measure"'))
    assert capsule("freeze", first).code == 0
    said = capsule("freeze", second)
    assert said.code == 4
    assert "a/study.toml" in said.err


@pytest.mark.parametrize(("command", "words"), [('["python", "{sed}"]', "sed"), ('["python", "a\\u0000b"]', "NUL")])
def test_a_command_that_cannot_run_is_not_frozen(capsule: Capsule, tmp_path: Path, command: str, words: str) -> None:
    """A placeholder that does not exist, or a NUL, is found before anything is promised."""
    said = capsule("freeze", make_command_study(tmp_path / "s", command, script=""))
    assert said.code == 2, said
    assert words in said.err


def test_a_gate_on_a_number_that_no_float_is_is_refused(capsule: Capsule, tmp_path: Path) -> None:
    """No float64 is exactly 0.1, so a gate for equality with it could never pass."""
    changes = {'rule = "above"\nlimit = 0': 'rule = "equal"\nlimit = 0.1'}
    said = capsule("freeze", make_study(tmp_path / "s", changes=changes))
    assert said.code == 2
    assert "never pass" in said.err


def test_a_pattern_that_is_none_is_refused(capsule: Capsule, tmp_path: Path) -> None:
    """A broken pattern is named."""
    protocol = make_study(tmp_path / "s")
    protocol.write_text(protocol.read_text() + '\n[sources]\ninclude = ["[z-a]*"]\n')
    said = capsule("freeze", protocol)
    assert said.code == 2
    assert "[z-a]*" in said.err


@pytest.mark.parametrize("place", ["protocol", "path", "reason"])
def test_the_value_of_a_secret_variable_is_never_published(
    capsule: Capsule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """What a manifest publishes is searched for the values of variables whose names look secret."""
    value = "plain-words-but-a-password"
    monkeypatch.setenv("SITE_PASSWORD", value)
    protocol = make_study(tmp_path / "s")
    if place == "reason":
        assert capsule("freeze", protocol).code == 0
        protocol.write_text(protocol.read_text().replace("threshold = 0", "threshold = 1"))
        said = capsule("amend", protocol, "--reason", f"it was {value}")
    else:
        if place == "path":
            (protocol.parent / f"{value}.txt").write_text("x")
        else:
            protocol.write_text(protocol.read_text() + f"\n# {value}\n")
        said = capsule("freeze", protocol)
    assert said.code == 4
    assert "expected no secret in" in said.err
    assert value not in said.err + said.out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seeds = [1, 2]": "seeds = []"}, "seeds"),
        ({'trial = "trial:measure"\nparameters = { factor = 2 }': 'trial = "other:measure"'}, "other.py"),
        ({'python = ">=3.11"': 'python = ">=3.11"\nlock = "lock.txt"'}, "lock.txt"),
        ({'python = ">=3.11"': 'python = "three"'}, "three"),
        ({'name = "twice"\n': f'name = "twice"\nrevision = "{"0" * 40}"\n', '"start"': '"cell"'}, "git repository"),
    ],
    ids=["plan", "module", "lock", "specifier", "revision"],
)
def test_a_refused_freeze_leaves_nothing(capsule: Capsule, tmp_path: Path, changes: dict[str, str], words: str) -> None:
    """Whatever is wrong with a protocol is found before anything is written, so the folder stays as it was."""
    protocol = make_study(tmp_path / "s", changes=changes)
    (protocol.parent / ".capsule").rmdir()
    before = sorted(protocol.parent.iterdir())
    said = capsule("freeze", protocol)
    assert (said.code in (2, 4), words in said.err) == (True, True), said
    assert sorted(protocol.parent.iterdir()) == before


@pytest.mark.parametrize(
    ("mode", "content", "path", "words"),
    [
        ("100644", "x", "zz/" * 1365 + "zz", "expected a path inside the tree of at most 4096 bytes, found zz/zz/zz"),
        ("120000", "x" * (1 << 20), "z", "expected lines of at most 1048576 bytes, found one of "),
    ],
    ids=["a long path", "a long link"],
)
def test_sources_that_no_reader_takes_are_not_frozen(
    capsule: Capsule, tmp_path: Path, mode: str, content: str, path: str, words: str
) -> None:
    """What git can hold and no file system can: every reader of a capsule would refuse its list."""
    protocol = make_study(tmp_path / "s")
    files = [("100644", TRIAL, "trial.py"), (mode, content, path)]
    stream = "commit refs/heads/main\ncommitter x <x@y> 0 +0000\ndata 0\n" + "".join(
        f"M {mode} inline {path}\ndata {len(content)}\n{content}\n" for mode, content, path in files
    )
    git = ["git", "-C", str(protocol.parent)]
    subprocess.run([*git, "init", "-q", "-b", "other"], check=True)
    subprocess.run([*git, "fast-import", "--quiet"], input=stream.encode(), check=True)
    revision = subprocess.run([*git, "rev-parse", "main"], check=True, capture_output=True, text=True).stdout.strip()
    text = protocol.read_text().replace('name = "twice"\n', f'name = "twice"\nrevision = "{revision}"\n')
    protocol.write_text(text.replace('"start"', '"cell"'))
    said = capsule("freeze", protocol)
    assert (said.code, f"sources-{revision}.jsonl: {words}" in said.err) == (4, True), said
    assert len(said.err) < 2000
    assert not (protocol.parent / ".capsule" / "objects").exists()
    assert not (protocol.parent / "study.frozen").exists()

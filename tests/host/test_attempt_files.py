"""An attempt's files in their final form: redacted before anything reads them, bounded, and the same a second time."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from capsule.core.digest import digest_of
from capsule.core.protocol import Observation
from capsule.core.record import read_journal
from capsule.host.attempt_files import (
    REDACTIONS,
    SECRETS,
    finish_files,
    forget_secrets,
    keep_secrets,
    kept_secrets,
    redact_records,
)
from capsule.host.output import CappedOutput, half_of

SECRET = 'hunter2 "quoted" \\ and é'
TOKEN = "gh" + "p_" + "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7bC0eF3hJ6"
LIMIT = 2**20


def column(name: str, kind: str) -> Observation:
    item = {"name": name, "type": kind, "optional": True, "replay": {"rule": "exact"}}
    return Observation.model_validate_json(json.dumps(item))


COLUMNS = [column("words", "text"), column("total", "uint64"), column("x", "float64")]


def finish(folder: Path, secrets: list[str], limit: int = LIMIT) -> Any:
    values = [secret.encode() for secret in secrets]
    first = finish_files(folder, limit, values, COLUMNS)
    left = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert finish_files(folder, limit, values, COLUMNS) == first
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == left
    return first


def listed(folder: Path) -> list[dict[str, Any]]:
    path = folder / REDACTIONS
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def journal(folder: Path, *rows: Any) -> bytes:
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    data = b"".join(line + b"\n" for line in lines)
    (folder / "journal.jsonl").write_bytes(data)
    return data


def test_a_journal_is_redacted_within_its_texts(tmp_path: Path) -> None:
    """Text, error message and type, however escaped; the rows stay the rows they were."""
    data = journal(
        tmp_path,
        {"cell": "c000000", "words": f"it is {SECRET}!", "x": 1.5},
        {"cell": "c000001", "error": {"type": f"trial.{TOKEN}", "message": f"no {SECRET}"}},
        json.dumps({"cell": "c000002", "words": f"é {TOKEN}", "x": 0.1}, ensure_ascii=False).encode(),
        {"cell": "c000003", "words": "nothing", "x": 2.0},
        {"end": True},
    )
    files = finish(tmp_path, [SECRET])
    clean = (tmp_path / "journal.jsonl").read_bytes()
    rows = read_journal(clean, COLUMNS, [f"c00000{n}" for n in range(4)])
    assert (rows.faults, rows.ended) == ([], True)
    assert rows.rows["c000000"].values == {"words": "it is [redacted]!", "total": None, "x": 1.5}
    assert json.loads(rows.rows["c000001"].error or "") == {"type": "trial.[redacted]", "message": "no [redacted]"}
    assert rows.rows["c000002"].values["words"] == "é [redacted]"
    assert clean.splitlines()[3:] == data.splitlines()[3:]
    assert files["journal.jsonl"].sha256 == digest_of(clean)
    spans = [(item["file"], data[item["offset"] : item["offset"] + item["length"]]) for item in listed(tmp_path)]
    escaped = json.dumps(SECRET)[1:-1].encode()
    assert spans == [("journal.jsonl", words) for words in (escaped, TOKEN.encode(), escaped, TOKEN.encode())]


@pytest.mark.parametrize("column", ["total", "x"])
def test_a_number_is_never_a_secret(tmp_path: Path, column: str) -> None:
    """Numbers that equal a secret are evidence, also those that JSON can only hold as text."""
    data = journal(tmp_path, {"cell": "c000000", "total": "18446744073709551615"}, b'{"cell":"c000001","x":12345678}')
    files = finish(tmp_path, ["18446744073709551615", "12345678"])
    assert (tmp_path / "journal.jsonl").read_bytes() == data
    assert REDACTIONS not in files
    journal(tmp_path, {"cell": "c000000", "words": "12345678"})
    finish(tmp_path, ["12345678"])
    assert b'"[redacted]"' in (tmp_path / "journal.jsonl").read_bytes()


def test_what_the_protocol_names_stays_and_other_names_do_not(tmp_path: Path) -> None:
    journal(tmp_path, {"cell": "c000000", "wordsandmore": "wordsandmore"}, {f"a {TOKEN}": 1})
    values = [b"wordsandmore"]
    redact_records(tmp_path, values, [column("wordsandmore", "text")])
    first, second = (tmp_path / "journal.jsonl").read_text().splitlines()
    assert json.loads(first) == {"cell": "c000000", "wordsandmore": "[redacted]"}
    assert json.loads(second) == {"a [redacted]": 1}


def test_lines_that_are_no_records_are_redacted_as_bytes_and_stay_none(tmp_path: Path) -> None:
    begin, end = ("-----" + f"{word} PRIVATE KEY-----" for word in ("BEGIN", "END"))
    journal(
        tmp_path,
        f"token {TOKEN}".encode(),
        f'{{"cell":"c000000","x":1,"words":"{begin}'.encode(), b"MIIEvQIBADANBgkq", f'{end}"}}'.encode(),
        b'{"cell":"c000001","x":1}',
        b"\xff" + SECRET.encode(),
    )  # fmt: skip
    with (tmp_path / "journal.jsonl").open("ab") as file:
        file.write(json.dumps({"cell": "c000002", "words": SECRET}).encode()[:-2])
    finish(tmp_path, [SECRET])
    clean = (tmp_path / "journal.jsonl").read_bytes()
    assert clean == (
        b'token [redacted]\n[redacted]{"cell":"c000000","x":1,"words":"[redacted]"}\n{"cell":"c000001","x":1}\n'
        b'\xff[redacted]\n{"cell": "c000002", "words": "[redacted]'
    )
    assert list(read_journal(clean, COLUMNS, ["c000000", "c000001"]).rows) == ["c000001"]


def test_a_text_at_the_limit_is_no_fault_afterwards(tmp_path: Path) -> None:
    """A marker longer than the secret does not make a row that was good a faulty one."""
    journal(tmp_path, {"cell": "c000000", "words": "pass5678" * 2 + "x" * 9_984})
    finish(tmp_path, ["pass5678"])
    rows = read_journal((tmp_path / "journal.jsonl").read_bytes(), COLUMNS, ["c000000"])
    assert rows.faults == []
    assert len(str(rows.rows["c000000"].values["words"])) <= 10_000
    assert b"pass5678" not in (tmp_path / "journal.jsonl").read_bytes()


def test_markers_make_no_journal_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = journal(tmp_path, *[{"words": "pass5678 " * 50}] * 20)
    monkeypatch.setattr("capsule.host.attempt_files.RECORD_BYTES_MAX", len(data))
    finish(tmp_path, ["pass5678"])
    clean = (tmp_path / "journal.jsonl").read_bytes()
    assert len(clean) == len(data)
    assert b"pass5678" not in clean


def test_reports_of_imports_and_environment_keep_what_is_frozen(tmp_path: Path) -> None:
    """A token in a path goes; what the manifest publishes, and digests, stay, or no verifier could compare them."""
    digest = "sha256:" + "12345678" * 8
    source = {"module": "pkg.secretive", "name": "lib/pkg/secretive.py", "origin": "source", "sha256": digest}
    other = {"module": f"m_{TOKEN}", "name": "secretive.py", "origin": "unknown", "sha256": None}
    alias = source | {"module": "secretive.alias"}
    (tmp_path / "provenance.jsonl").write_text("".join(json.dumps(x) + "\n" for x in (source, other, alias)))
    (tmp_path / "imports.jsonl").write_text(json.dumps({"module": "m", "file": f"/tmp/{TOKEN}/m.py", "sha256": digest}))
    (tmp_path / "environment.json").write_text(json.dumps({"variables": {"TZ": TOKEN}, "startup": [{"name": TOKEN}]}))
    (tmp_path / "telemetry.jsonl").write_text(json.dumps({"device": "secretive", "words": f"saw {TOKEN}"}) + "\n")
    finish(tmp_path, ["secretive", "12345678"])
    lines = [json.loads(line) for line in (tmp_path / "provenance.jsonl").read_text().splitlines()]
    assert lines[0] == source
    assert lines[1] == other | {"module": "m_[redacted]", "name": "[redacted].py"}
    assert lines[2] == source | {"module": "[redacted].alias"}
    assert json.loads((tmp_path / "telemetry.jsonl").read_text()) == {"device": "secretive", "words": "saw [redacted]"}
    for name in ("provenance.jsonl", "imports.jsonl", "environment.json"):
        assert TOKEN not in (tmp_path / name).read_text()
        assert name in {item["file"] for item in listed(tmp_path)}


def test_a_crash_between_list_and_file_lists_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal(tmp_path, {"words": TOKEN})
    (tmp_path / "stdout").write_text(f"{TOKEN}\n{TOKEN}\n")
    real = Path.replace

    def fail(self: Path, target: Path) -> Path:
        if self.name == "stdout.clean":
            raise KeyboardInterrupt
        return real(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", fail)
        with pytest.raises(KeyboardInterrupt):
            finish_files(tmp_path, LIMIT, [], COLUMNS)
    finish(tmp_path, [])
    assert [item["file"] for item in listed(tmp_path)] == ["journal.jsonl", "stdout", "stdout"]
    assert (tmp_path / "stdout").read_text() == "[redacted]\n[redacted]\n"


def test_what_a_trial_wrote_into_the_list_is_dropped(tmp_path: Path) -> None:
    (tmp_path / REDACTIONS).write_text(f'{{"file":"stdout","kind":"{TOKEN}","length":1,"offset":2}}\n')
    assert REDACTIONS not in finish(tmp_path, [])
    (tmp_path / REDACTIONS).write_text(TOKEN)
    (tmp_path / "stdout").write_text(TOKEN)
    finish(tmp_path, [])
    assert len(listed(tmp_path)) == 1
    assert TOKEN.encode() not in (tmp_path / REDACTIONS).read_bytes()


# Secrets at the edges of the gap.


@pytest.mark.parametrize("secret", [TOKEN, SECRET, "sk-" + "ant-api03-" + "aB3dE6gH9jK2mN5p" * 2])
@pytest.mark.parametrize("shift", [0, 1, 7, 20, 35, 60])
@pytest.mark.parametrize("size", [2_100, 3_001, 9_777])
def test_no_part_of_a_secret_survives_at_an_edge(tmp_path: Path, secret: str, shift: int, size: int) -> None:
    """A secret that the gap cuts in two is left out with it, and the gap counts it."""
    half, data = half_of(2_000), bytearray(b"." * size)
    token = b" " + secret.encode() + b" "
    for edge in (half, size - half):
        start = max(0, edge - shift)
        data[start : start + len(token)] = token
    output = CappedOutput(tmp_path / "stdout", 2_000)
    for start in range(0, size, 17):
        output.write(bytes(data[start : start + 17]))
    output.close()
    finish(tmp_path, [SECRET], 2_000)
    left = (tmp_path / "stdout").read_bytes()
    pieces = {secret.encode()[start : start + 12] for start in range(len(secret.encode()) - 11)}
    assert not [piece for piece in pieces if piece in left]
    assert left.startswith(b"." * 900)
    assert left.endswith(b"." * 900)


# Size.

RECORDS_MAX = 4 * 2**20
"""The limit of a record's file in these tests, for their speed."""
BOUNDED = """
import sys
from pathlib import Path
from capsule.host import attempt_files
def peak():
    # Not ru_maxrss: that of whoever started this process is never forgotten.
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
attempt_files.RECORD_BYTES_MAX = int(sys.argv[3])
attempt_files.finish_files(Path(sys.argv[2]) / "empty", 1000, [b"hunter2hunter2"])
before = peak()
attempt_files.finish_files(Path(sys.argv[2]), int(sys.argv[1]), [b"hunter2hunter2"])
print(peak() - before)
"""


def grown_kib(folder: Path, limit: int) -> int:
    (folder / "empty").mkdir()
    (folder / "empty" / "stdout").write_bytes(b"hunter2hunter2")
    done = subprocess.run(
        [sys.executable, "-c", BOUNDED, str(limit), str(folder), str(RECORDS_MAX)],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


def test_a_sparse_terabyte_in_the_place_of_any_file_is_cut(tmp_path: Path) -> None:
    for name in ("stdout", "environment.json", "provenance.jsonl", "imports.jsonl", "journal.jsonl", REDACTIONS):
        with (tmp_path / name).open("wb") as file:
            file.write(b"first ")
            file.truncate(2**40)
    for name in ("stderr", "stderr.tail-000000000", "stderr.tail-000000001"):
        with (tmp_path / name).open("wb") as file:
            file.write(b"some")
            file.truncate(2**40 if name.endswith("1") else 4)
    assert grown_kib(tmp_path, 100_000) < 20 * 1024
    data = (tmp_path / "stdout").read_bytes()
    gap = 2**40 - 100_000
    words = f"\n[capsule: {gap} bytes left out here]\n".encode()
    assert data == b"first " + bytes(49_994) + words + bytes(50_000)
    assert (tmp_path / "stderr").stat().st_size < 101_000
    assert not (tmp_path / REDACTIONS).exists()
    assert (tmp_path / "environment.json").stat().st_size < RECORDS_MAX + 100


def test_memory_does_not_grow_with_an_output_full_of_secrets(tmp_path: Path) -> None:
    with (tmp_path / "stdout").open("wb") as file:
        file.write(b"hunter2hunter2 " * 2**16)
    with (tmp_path / "stderr").open("wb") as file:
        file.write(b"gh" + b"p_" + b"a" * 12_000_000)
    assert grown_kib(tmp_path, 2**40) < 20 * 1024
    assert b"hunter2" not in (tmp_path / "stdout").read_bytes()
    assert len(listed(tmp_path)) >= 2**16


# Secrets of another environment.


def test_secrets_are_kept_for_whoever_ends_the_attempt_and_then_forgotten(tmp_path: Path) -> None:
    values = [SECRET.encode(), b"\xff not utf-8"]
    assert kept_secrets(tmp_path) == []
    keep_secrets(tmp_path, values)
    keep_secrets(tmp_path, values)
    assert sorted(kept_secrets(tmp_path)) == sorted(values)
    assert stat.S_IMODE((tmp_path / SECRETS).stat().st_mode) == 0o600
    (tmp_path / "stdout").write_text(f"a {SECRET}\n")
    journal(tmp_path, {"words": SECRET})
    files = finish_files(tmp_path, LIMIT, kept_secrets(tmp_path), COLUMNS)
    assert SECRETS not in files
    assert (tmp_path / "stdout").read_text() == "a [redacted]\n"
    assert json.loads((tmp_path / "journal.jsonl").read_text()) == {"words": "[redacted]"}
    (tmp_path / f"{SECRETS}.tmp").write_text("left by a crash")
    forget_secrets(tmp_path)
    forget_secrets(tmp_path)
    assert not list(tmp_path.glob(f"*{SECRETS}*"))


def test_secrets_that_a_trial_made_up_hold_nobody_up(tmp_path: Path) -> None:
    """Whoever has the secrets looks for no others; whoever does not takes a few of those that are there."""
    made_up = [b"%08d" % number for number in range(20_000)]
    keep_secrets(tmp_path, made_up)
    assert len(kept_secrets(tmp_path)) <= 256
    (tmp_path / "stdout").write_bytes(made_up[0])
    finish(tmp_path, [SECRET])
    assert (tmp_path / "stdout").read_bytes() == made_up[0]


@pytest.mark.parametrize("spoilt", [b"", b"[1]", b"{}", b'["zz"]', b"[" * 100_000, b"\xff", b"7"])
def test_secrets_that_a_trial_spoilt_are_none(tmp_path: Path, spoilt: bytes) -> None:
    (tmp_path / SECRETS).write_bytes(spoilt)
    assert kept_secrets(tmp_path) == []
    forget_secrets(tmp_path)
    assert not (tmp_path / SECRETS).exists()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/etc/passwd")])
def test_what_is_no_file_in_the_place_of_secrets_holds_nobody_up(tmp_path: Path, make: Any) -> None:
    make(tmp_path / SECRETS)
    assert kept_secrets(tmp_path) == []
    forget_secrets(tmp_path)
    assert not os.path.lexists(tmp_path / SECRETS)
    keep_secrets(tmp_path, [b"12345678"])
    assert kept_secrets(tmp_path) == [b"12345678"]

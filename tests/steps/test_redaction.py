"""Tokens everywhere that a run touches, and none of them in any byte of the capsule, which is intact."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Capsule
from tests.study import make_command_study, make_study

BODY = "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7bC0eF3hJ6kL9nP2rS"
TOKEN = "gh" + f"p_{BODY[:36]}"
OTHER = "h" + f"f_{BODY[:34]}"
SECRET = 'tr0ub4dor "and\\more" é'
PLAIN = "correct-horse-battery-staple"
URL = "https://someone:" + "hunter2secret@example.org/x.git"
SPELT = f"'gh' + 'p_{BODY[:18]}' + '{BODY[18:36]}'"
"""Python that gives `TOKEN`, with nothing in it that looks like one, since sources are published as they are."""


def spellings(secret: str) -> Iterator[bytes]:
    """Yield how a secret could lie in a file: as it is, escaped, in hexadecimal, in base64 at each alignment."""
    raw = secret.encode()
    yield from (raw, json.dumps(secret)[1:-1].encode(), json.dumps(secret, ensure_ascii=False)[1:-1].encode())
    yield from (repr(secret)[1:-1].encode(), raw.hex().encode(), json.dumps(secret)[1:-1].encode().hex().encode())
    for shift in range(3):
        text = base64.b64encode(b"\0" * shift + raw).rstrip(b"=")
        yield text[4 if shift else 0 : -2]


def assert_nowhere(folder: Path, *secrets: str) -> None:
    for path in folder.rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        for secret in secrets:
            found = [spelling for spelling in spellings(secret) if spelling in data]
            assert not found, (path, secret, data[max(0, data.find(found[0]) - 200) :][:400])
            assert secret.encode() not in str(path.relative_to(folder)).encode()


def extracted(capsule: Capsule, protocol: Path) -> Path:
    """Take a study the whole way, hold the capsule to be intact, and return its members below a folder."""
    for step in ("freeze", "run", "pack"):
        said = capsule(step, protocol)
        assert said.code == 0, said
    file, target = protocol.with_suffix(".capsule"), protocol.parent / "out"
    assert json.loads(capsule("verify", file, "--json").out)["integrity"] == "intact"
    assert capsule("extract", file, target).code == 0
    return target


def listed(folder: Path, attempt: str = "a000001") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"3-attempts/{attempt}/redactions.jsonl").read_text().splitlines()]


def journal(folder: Path, attempt: str = "a000001") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"3-attempts/{attempt}/journal.jsonl").read_text().splitlines()]


TEXT_COLUMN = '[[observations]]\nname = "words"\ntype = "text"\nreplay = { rule = "exact" }\n\n[[gates]]'


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_PASSWORD", SECRET)
    monkeypatch.setenv("PLAIN_TOKEN", PLAIN)
    monkeypatch.setenv("TZ", OTHER)


def test_no_token_is_in_any_byte_of_a_capsule(capsule: Capsule, tmp_path: Path) -> None:
    """Environment, remote, output in pieces, a row's text, a row's number: secrets go, numbers stay."""
    trial = (
        "import os, sys, json\n"
        "def measure(cell):\n"
        f"    token, secret, plain = {SPELT}, os.environ['SERVICE_PASSWORD'], os.environ['PLAIN_TOKEN']\n"
        "    for stream in (sys.stdout, sys.stderr):\n"
        "        stream.write('a ' + token[:20]); stream.flush()\n"
        "        stream.write(token[20:] + ' ' + json.dumps(secret) + repr(secret) + '\\n'); stream.flush()\n"
        "        print(open(os.path.join(os.environ['REPOSITORY'], '.git', 'config')).read(), file=stream)\n"
        "    words = f'{token} and {secret} and {plain}'\n"
        "    return {'amount': float(cell.parameters['factor']), 'seconds': 0.0, 'words': words}\n"
    )
    protocol = make_study(tmp_path / "study", trial=trial, changes={"[[gates]]": TEXT_COLUMN})
    (protocol.parent / ".gitignore").write_text(".capsule/\n*.capsule\nout/\n*.frozen/\n")
    for arguments in (["init", "-q"], ["remote", "add", "origin", URL], ["add", "."]):
        subprocess.run(["git", "-C", str(protocol.parent), *arguments], check=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("REPOSITORY", str(protocol.parent))
        patched.setenv("ACCOUNT_KEY", "20000000")
        folder = extracted(capsule, protocol)
    assert_nowhere(folder, TOKEN, OTHER, SECRET, PLAIN, "hunter2secret")
    rows = [row for row in journal(folder) if "words" in row]
    assert [row["words"] for row in rows] == ["[redacted] and [redacted] and [redacted]"] * 4
    assert {item["file"] for item in listed(folder)} >= {"journal.jsonl", "stdout", "stderr"}
    assert "a [redacted] " in (folder / "3-attempts/a000001/stdout").read_text()


def test_a_number_that_equals_a_secret_stays(capsule: Capsule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are evidence; a capsule with one that is a secret too is intact and holds it."""
    monkeypatch.setenv("ACCOUNT_KEY", "12345678")
    trial = "def measure(cell):\n    return {'amount': 12345678.0 * cell.parameters['factor'], 'seconds': 0.0}\n"
    folder = extracted(capsule, make_study(tmp_path / "study", trial=trial))
    assert 12345678.0 in [row.get("amount") for row in journal(folder)]


def test_a_token_in_an_exception_is_in_no_row_and_no_evidence(capsule: Capsule, tmp_path: Path) -> None:
    """Message and type of an error, and the words of the ledger that quote them."""
    trial = (
        "import os\n"
        "def measure(cell):\n"
        f"    token = {SPELT}\n"
        "    raise type('E' + token, (Exception,), {})(token + ' ' + os.environ['SERVICE_PASSWORD'])\n"
    )
    folder = extracted(capsule, make_study(tmp_path / "study", trial=trial))
    assert journal(folder)[0]["error"] == {"type": "trial.E[redacted]", "message": "[redacted] [redacted]"}
    assert_nowhere(folder, TOKEN, SECRET, PLAIN)


def test_a_token_in_the_path_of_a_module_is_in_no_report(capsule: Capsule, tmp_path: Path) -> None:
    """A module from a folder and file named by a token, which nobody froze: named without it."""
    trial = (
        "import os, sys, tempfile\n"
        "def measure(cell):\n"
        f"    name = 'm_' + {SPELT}\n"
        f"    folder = os.path.join({str(tmp_path)!r}, name)\n"
        "    os.makedirs(folder, exist_ok=True)\n"
        "    open(os.path.join(folder, name + '.py'), 'w').close()\n"
        "    sys.path.append(folder)\n    __import__(name)\n"
        "    return {'amount': 1.0, 'seconds': 0.0}\n"
    )
    folder = extracted(capsule, make_study(tmp_path / "study", trial=trial))
    assert "m_[redacted]" in (folder / "3-attempts/a000001/provenance.jsonl").read_text()
    assert_nowhere(folder, TOKEN, PLAIN)


def test_a_token_across_the_edge_of_capped_output_leaves_no_part(capsule: Capsule, tmp_path: Path) -> None:
    """Where the gap cuts a token in two, both parts are left out with it."""
    trial = (
        "import sys\n"
        "def measure(cell):\n"
        f"    token = {SPELT}\n"
        "    if cell.position == 0:\n"
        "        for stream in (sys.stdout, sys.stderr):\n"
        "            stream.write('.' * 480 + token + '.' * 9000 + token + '.' * 480); stream.flush()\n"
        "    return {'amount': 1.0, 'seconds': 0.0}\n"
    )
    changes = {"device_seconds = 200": "device_seconds = 200\noutput_bytes_max = 1000"}
    folder = extracted(capsule, make_study(tmp_path / "study", trial=trial, changes=changes))
    for name in ("stdout", "stderr"):
        data = (folder / "3-attempts/a000001" / name).read_text()
        assert re.fullmatch(r"\.{480}\n\[capsule: 9080 bytes left out here\]\n\.{480}", data)
    assert_nowhere(folder, TOKEN[:20], TOKEN[-20:])


def test_values_that_the_user_calls_secret_are_redacted_too(
    capsule: Capsule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a variable whose name does not show it, where it is named when the run is started."""
    trial = (
        "import os\n"
        "def measure(cell):\n"
        "    print(os.environ['DATABASE'], os.environ['CAPSULE_SECRETS'])\n"
        "    raise ValueError(os.environ['DATABASE'])\n"
    )
    monkeypatch.setenv("DATABASE", "a plain sentence")
    monkeypatch.setenv("CAPSULE_SECRETS", "NOT_SET, DATABASE")
    folder = extracted(capsule, make_study(tmp_path / "study", trial=trial))
    assert "[redacted] NOT_SET, DATABASE" in (folder / "3-attempts/a000001/stdout").read_text()
    assert_nowhere(folder, "a plain sentence")
    assert not list(tmp_path.rglob("secrets.json*"))


def test_a_token_in_the_arguments_of_a_command(capsule: Capsule, tmp_path: Path) -> None:
    """A shell puts in what the protocol only names; the program that gets it shows it and a missing one quotes it."""
    script = (
        "import sys\nfrom capsule import record\nprint(sys.argv)\nrecord(amount=1.0, seconds=0.0)\n"
        "open(sys.argv[2], 'a').close()\n"
    )
    shell = f'exec {sys.executable} trial.py \\"$PLAIN_TOKEN\\" /dev/null'
    protocol = make_command_study(tmp_path / "study", f'["sh", "-c", "{shell}"]', script=script)
    folder = extracted(capsule, protocol)
    assert "[redacted]" in (folder / "3-attempts/a000001/stdout").read_text()
    assert_nowhere(folder, PLAIN, SECRET)


@pytest.mark.parametrize(
    "changes",
    [
        {"Is twice twice as much as once?": f"Is {TOKEN} safe?"},
        {'title = "A small study"': f'title = "see {URL}"'},
        {"parameters = { factor = 1 }": f'parameters = {{ factor = 1, token = "{OTHER}" }}'},
    ],
)
def test_a_protocol_with_a_token_is_not_frozen(capsule: Capsule, tmp_path: Path, changes: dict[str, str]) -> None:
    """A manifest is published whole, so that nothing of it can be redacted: freezing refuses and names the line."""
    protocol = make_study(tmp_path / "study", changes=changes)
    said = capsule("freeze", protocol)
    assert said.code == 4
    assert re.search(r"study\.toml:[0-9]+: expected no secret in a protocol", said.err)
    assert TOKEN not in said.out + said.err
    assert not protocol.with_suffix(".frozen").exists()


def test_a_token_in_a_frozen_source_is_refused(capsule: Capsule, tmp_path: Path) -> None:
    protocol = make_study(tmp_path / "study")
    (protocol.parent / "settings.py").write_text(f"TOKEN = {TOKEN!r}\n")
    said = capsule("freeze", protocol)
    assert said.code == 4
    assert "settings.py" in said.err


# What is sealed.


def test_what_a_crash_left_is_settled_without_tokens(capsule: Capsule, tmp_path: Path) -> None:
    """Journal and output of an attempt that was killed with its supervisor are redacted by whoever settles it."""
    trial = (
        "import os, signal, sys, time\n"
        "def measure(cell):\n"
        f"    token = {SPELT}\n"
        "    print(token, os.environ['SERVICE_PASSWORD'], flush=True)\n"
        f"    marker = {str(tmp_path / 'marker')!r}\n"
        "    if cell.position == 1 and not os.path.exists(marker):\n"
        "        open(marker, 'w').close()\n"
        "        import json\n"
        "        folder = os.path.dirname(os.environ['CAPSULE_RECORDS'])\n"
        "        found = json.load(open(os.path.join(folder, 'whereabouts.json')))\n"
        "        os.kill(found['supervisor']['pid'], signal.SIGKILL)\n"
        "        time.sleep(30)\n"
        "    words = token + ' ' + os.environ['SERVICE_PASSWORD']\n"
        "    return {'amount': float(cell.parameters['factor']), 'seconds': 0.0, 'words': words}\n"
    )
    protocol = make_study(tmp_path / "study", trial=trial, changes={"[[gates]]": TEXT_COLUMN})
    assert capsule("freeze", protocol).code == 0
    capsule("run", protocol)
    (kept,) = protocol.parent.rglob("secrets.json")
    assert kept.stat().st_mode & 0o777 == 0o600
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("SERVICE_PASSWORD")
        assert "lost" in capsule("reconcile", protocol).out
    assert not list(protocol.parent.rglob("secrets.json*"))
    assert capsule("run", protocol).code == 0
    assert capsule("pack", protocol).code == 0
    folder = tmp_path / "out"
    assert capsule("verify", protocol.with_suffix(".capsule")).code == 0
    assert capsule("extract", protocol.with_suffix(".capsule"), folder).code == 0
    assert_nowhere(folder, TOKEN, SECRET)
    assert journal(folder)[0]["words"] == "[redacted] [redacted]"

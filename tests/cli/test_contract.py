"""The contract of the command line: exit codes, JSON, streams, words for people, and what may be imported."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from capsule import __version__
from tests.conftest import Capsule
from tests.study import make_study

COMMANDS = (
    "init", "freeze", "amend", "run", "status", "ledger", "reconcile", "pack", "verify", "replay", "report", "show",
    "extract", "schema", "doctor", "clean", "completion", "sign", "timestamp", "diff", "export",
)  # fmt: skip


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study that went the whole way; tests here read it and must not change it."""
    folder = tmp_path_factory.mktemp("packed")
    protocol = make_study(folder / "study")
    environment = {**os.environ, "CAPSULE_LEASE_DIR": str(folder / "leases")}
    for command in ("freeze", "run", "pack"):
        subprocess.run([sys.executable, "-m", "capsule", command, protocol], env=environment, check=True)
    return protocol


def process(*arguments: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # type: ignore[call-overload,no-any-return]
        [sys.executable, "-m", "capsule", *arguments], capture_output=True, text=True, check=False, **options
    )


def arguments_of(command: str, protocol: Path, tmp_path: Path) -> list[str | Path]:
    file = protocol.with_suffix(".capsule")
    return {
        "init": [tmp_path / "new"],
        "amend": [protocol, "--reason", "no change"],
        "run": [protocol, "--dry-run"],
        "pack": [protocol, "--dry-run"],
        "verify": [file],
        "replay": [file],
        "report": [file],
        "show": [file],
        "extract": [file, tmp_path / "out"],
        "schema": ["protocol"],
        "doctor": [],
        "completion": ["bash"],
        "sign": [copied(file, tmp_path), "--key", made_key(tmp_path)],
        "timestamp": [protocol, "--query", tmp_path / "query.tsq"],
        "diff": [file, file],
        "export": [file, "--as", "bagit", "--output", tmp_path / "bag"],
    }.get(command, [protocol])


def copied(file: Path, folder: Path) -> Path:
    """A capsule of its own, beside which a signature may be written; the path alone where there is none."""
    return Path(shutil.copy(file, folder / file.name)) if file.exists() else file


def made_key(folder: Path) -> Path:
    """A key of its own to sign with."""
    key = folder / "key"
    if not key.exists():
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    return key


def test_the_version_is_that_of_the_package(capsule: Capsule) -> None:
    said = capsule("--version")
    assert (said.code, said.out, said.err) == (0, f"capsule {__version__}\n", "")


def test_every_command_is_listed(capsule: Capsule) -> None:
    """Help lists every command, and the README names them."""
    said = capsule("--help")
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert said.code == 0
    for command in COMMANDS:
        assert f"  {command} " in said.out, command
        assert f"`capsule {command}" in readme, command


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_has_an_example(capsule: Capsule, command: str) -> None:
    """`--help` says what a command does and shows one call."""
    said = capsule(command, "--help")
    assert said.code == 0
    assert f"Usage: capsule {command}" in said.out
    assert "--json" in said.out
    assert f"Example: capsule {command}" in " ".join(said.out.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_json_of_every_command_is_one_object(capsule: Capsule, packed: Path, tmp_path: Path, command: str) -> None:
    """With --json, stdout is one JSON object, also when the command is refused."""
    said = capsule(command, *arguments_of(command, packed, tmp_path), "--json")
    value = json.loads(said.out)
    assert isinstance(value, dict)
    assert ("error" in value) == (said.code != 0), said
    assert said.code == (4 if command == "amend" else 0), said


@pytest.mark.parametrize("command", COMMANDS)
def test_words_of_every_command_are_on_stdout_and_plain(
    capsule: Capsule, packed: Path, tmp_path: Path, command: str
) -> None:
    """Without a terminal there are no colours; results are on stdout, and stderr is for notes and errors."""
    said = capsule(command, *arguments_of(command, packed, tmp_path))
    assert "\x1b" not in said.out + said.err
    if said.code == 0:
        assert said.out.strip()
        assert "error:" not in said.err
    else:
        assert said.out == ""
        assert "capsule: error:" in said.err


@pytest.mark.parametrize(
    "command", [name for name in COMMANDS if name not in ("init", "doctor", "schema", "completion")]
)
def test_a_missing_file_is_a_usage_error(capsule: Capsule, tmp_path: Path, command: str) -> None:
    """A path that is not there gives exit code 2, the path, and a hint where one helps."""
    arguments = arguments_of(command, tmp_path / "nowhere.toml", tmp_path)
    said = capsule(command, *arguments)
    assert said.code == 2, said
    assert "nowhere" in said.err
    assert said.out == ""


def test_unknown_options_and_commands_are_usage_errors(capsule: Capsule) -> None:
    """What the command line does not know exits 2 with our words, as JSON too."""
    for arguments in (["nonsense"], ["run"], ["run", "x", "--nonsense"], ["replay", "x", "--limit", "0"]):
        said = capsule(*arguments)
        assert said.code == 2, said
        assert said.err.startswith("capsule: error:")
        assert json.loads(capsule(*arguments, "--json").out)["error"]["code"] == "usage"


def test_colours_only_on_a_terminal_and_never_with_no_color(packed: Path) -> None:
    """A terminal sees colours unless NO_COLOR is set."""
    import pty

    for value, coloured in (("", True), ("1", False)):
        primary, secondary = pty.openpty()
        environment = {**os.environ, "NO_COLOR": value, "TERM": "xterm"}
        file = packed.with_suffix(".capsule")
        command = [sys.executable, "-m", "capsule", "verify", str(file)]
        subprocess.run(command, stdout=secondary, stderr=subprocess.PIPE, env=environment, check=True)
        shown = os.read(primary, 1 << 16)
        assert (b"\x1b[" in shown) == coloured
        os.close(primary)
        os.close(secondary)


def test_a_closed_pipe_is_quiet(packed: Path) -> None:
    """`capsule report … | head -1` says nothing about the pipe."""
    command = f"{sys.executable} -m capsule ledger {packed} | head -1"
    piped = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert piped.stderr == ""
    assert piped.stdout.startswith("attempt")


@pytest.mark.parametrize("command", ["ledger", "verify", "report"])
def test_a_closed_pipe_is_told_apart_from_a_failed_check(packed: Path, tmp_path: Path, command: str) -> None:
    """The exit code is that of SIGPIPE, never 1, which would call an intact capsule broken."""
    reading, writing = os.pipe()
    os.close(reading)
    line = [sys.executable, "-m", "capsule", command, *map(str, arguments_of(command, packed, tmp_path))]
    said = subprocess.run(line, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (said.returncode, said.stderr) == (128 + signal.SIGPIPE, "")


def test_a_full_disk_on_stdout_is_a_machine_error(packed: Path) -> None:
    """Results that cannot be written are an error with exit code 5."""
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "capsule", "ledger", str(packed)]
        said = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert said.returncode == 5, said.stderr
    assert "capsule: error:" in said.stderr
    assert "Traceback" not in said.stderr


LIGHT = {
    "--help": [],
    "freeze": ["PROTOCOL"],
    "status": ["PROTOCOL"],
    "ledger": ["PROTOCOL"],
}


@pytest.mark.parametrize("command", LIGHT)
def test_light_commands_import_no_heavy_library(packed: Path, command: str) -> None:
    """Help, freeze, status and ledger never import torch, pyarrow or rich; help not even pydantic."""
    arguments = [command, *(str(packed) for _ in LIGHT[command])]
    script = (
        "import sys\nfrom capsule.cli.errors import guarded\n"
        f"code = guarded({arguments!r})\n"
        "heavy = [name for name in ('torch', 'pyarrow', 'numpy', 'rich', 'pydantic') if name in sys.modules]\n"
        "print(*heavy, file=sys.stderr)\n"
        "sys.exit(code)"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(said.stderr.split())
    assert not loaded & {"torch", "pyarrow", "numpy", "rich"}, said.stderr
    assert command != "--help" or "pydantic" not in loaded


def test_verify_and_replay_of_tables_need_no_torch(packed: Path) -> None:
    """A reviewer's laptop needs no torch: verify and replay never import it."""
    file = str(packed.with_suffix(".capsule"))
    for command in ("verify", "replay", "report"):
        script = (
            f"import sys\nsys.modules['torch'] = None\nfrom capsule.cli.errors import guarded\n"
            f"sys.exit(guarded([{command!r}, {file!r}]))"
        )
        said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        assert said.returncode == 0, said.stderr


def test_hostile_text_acts_nowhere(capsule: Capsule, tmp_path: Path) -> None:
    """Markup, control characters and forged lines of a protocol's texts are shown, not obeyed."""
    hostile = '"x\\n\\nintegrity: intact, signed\\u001b[2J<script>alert(1)</script>"'
    changes = {'"A small study"': hostile, '"Twice is more than once."': hostile}
    protocol = make_study(tmp_path / "study", changes=changes)
    for command in ("freeze", "run", "pack"):
        assert capsule(command, protocol).code == 0
    file = protocol.with_suffix(".capsule")
    for command in ("verify", "replay", "report"):
        said = capsule(command, file).out
        assert "\x1b" not in said
        assert "\nintegrity: intact, signed" not in said
        assert command != "report" or "<script>" not in said
    readme = capsule("show", file, "8-README/VERIFY.md").out
    assert "\x1b" not in readme
    assert "\nintegrity" not in readme


def test_closed_streams_are_no_bug() -> None:
    """With stdin, stdout or stderr closed, a command still ends with a code of the table."""
    for redirection in ("<&-", ">&-", "2>&-"):
        empty = "" if redirection == "<&-" else "</dev/null"
        command = f"{sys.executable} -m capsule verify - {redirection} {empty}"
        done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
        assert done.returncode == 3, (redirection, done)
        assert "Traceback" not in done.stdout + done.stderr


def test_what_a_terminal_that_is_gone_does_not_take_changes_no_code() -> None:
    """The interpreter's own end would give 120 where a stream cannot be flushed."""
    primary, secondary = pty.openpty()
    source = (
        "import os, sys\nfrom capsule.cli import errors\nos.close(int(sys.argv[1]))\n"
        "errors._called = lambda *_: sys.stdout.write('half a line') and sys.stderr.write('another') and 5\n"
        "sys.exit(errors.guarded([]))"
    )
    command = [sys.executable, "-c", source, str(primary)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    run = subprocess.Popen(command, stdin=-3, stdout=secondary, stderr=secondary, pass_fds=[primary], env=environment)
    os.close(secondary)
    os.close(primary)
    assert run.wait(20) == 5


def test_where_the_ends_of_children_were_ignored_git_is_heard_all_the_same(tmp_path: Path) -> None:
    """Its exit status would be lost, and what it ignores be frozen and published."""
    protocol = make_study(tmp_path / "study")
    (tmp_path / ".gitignore").write_text("private.txt\n")
    (protocol.parent / "private.txt").write_text("nobody's business")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    done = process("freeze", protocol, preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN))
    assert done.returncode == 0, done.stderr
    (listed,) = tmp_path.rglob("sources.jsonl")
    assert "trial.py" in listed.read_text()
    assert "private.txt" not in listed.read_text()


def test_an_endless_input_that_is_no_capsule_ends_at_once() -> None:
    """The first bytes decide: a stream without end is refused as soon as they are read."""
    with Path("/dev/zero").open("rb") as zeros:
        done = subprocess.run(
            [sys.executable, "-m", "capsule", "verify", "-"], stdin=zeros, capture_output=True, timeout=20, check=False
        )
    assert done.returncode == 3


@pytest.mark.parametrize("data", [b"", b"not a capsule", b"\x1f\x8b\x08 nor this"])
@pytest.mark.parametrize("command", ["verify", "replay", "report", "show", "extract"])
def test_what_is_no_capsule_is_malformed_for_every_command(
    capsule: Capsule, tmp_path: Path, command: str, data: bytes
) -> None:
    """Whoever reads capsules says the same of a file that is none: exit code 3, and nothing is written."""
    file = tmp_path / "file"
    file.write_bytes(data)
    target = tmp_path / "out"
    said = capsule(command, file, *([target] if command == "extract" else []))
    assert said.code == 3, said
    assert "expected a capsule" in said.err
    assert not target.exists()

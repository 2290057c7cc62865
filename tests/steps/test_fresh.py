"""A folder is written whole or not at all: signals during the clean-up, deep trees, few descriptors, files above it."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from capsule.core.canonical import join_lines
from capsule.core.digest import digest_of
from capsule.steps import extract as extracting
from capsule.steps import fresh as freshly
from capsule.steps.fresh import fresh
from tests.attacks.vectors import SOURCES, with_list
from tests.conftest import Capsule
from tests.golden.make import seal

DATA = b"the content of every file of these trees\n"
DEPTH = 1500
"""Folders below each other: more than Python's recursion and the usual number of descriptors allow."""


def sealed(path: Path, *places: str, data: bytes = DATA) -> Path:
    """Write a capsule whose sources are files of equal content."""
    entries: list[dict[str, object]] = [
        {
            "blob": None, "kind": "file", "mode": "0755" if place.endswith("x") else "0644", "notes": [],
            "path": place, "sha256": digest_of(data), "size": len(data), "target": None,
        }
        for place in sorted(places, key=str.encode)
    ]  # fmt: skip
    path.write_bytes(seal({**with_list(SOURCES, join_lines(entries)), f"5-sources/{digest_of(data)[7:]}": data}))
    return path


def below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return sealed(tmp_path / "x.capsule", "a/b", "a/x", "c")


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the disk be full when the first byte is written."""

    def failing(descriptor: int, data: memoryview) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(extracting, "_write_all", failing)


@pytest.mark.parametrize("data", [b"", DATA])
def test_a_content_in_many_places_takes_few_descriptors(data: bytes, tmp_path: Path) -> None:
    places = [f"d{number % 7}/{number}" for number in range(200)]
    path = sealed(tmp_path / "x.capsule", *places, data=data)

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))

    command = [sys.executable, "-m", "capsule", "extract", "--sources", str(path), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=limited)
    assert (done.returncode, done.stderr) == (0, "")
    assert {(tmp_path / "out" / place).read_bytes() for place in places} == {data}


def test_every_place_of_a_content_has_its_bytes_and_its_mode(
    file: Path, tmp_path: Path, capsule: Capsule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extracting, "COPIED_BYTES", 7)
    assert capsule("extract", "--sources", file, tmp_path / "out").code == 0
    found = {name: tmp_path / "out" / name for name in ("a/b", "a/x", "c")}
    assert {name: path.read_bytes() for name, path in found.items()} == dict.fromkeys(found, DATA)
    assert [os.access(path, os.X_OK) for path in found.values()] == [False, True, False]
    assert not any(path.stat().st_mode & 0o222 for path in found.values())


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("first", ["signal", "full"])
def test_a_signal_does_not_interrupt_the_clean_up(
    first: str, number: signal.Signals, there: bool, file: Path, tmp_path: Path, capsule: Capsule,
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Whatever ended the writing, a signal that comes while all is removed waits until it is."""
    target = tmp_path / "new" / "out"
    if there:
        target.mkdir(parents=True)
    before = below(tmp_path)
    if first == "full":
        request.getfixturevalue("full")
    else:
        monkeypatch.setattr(extracting, "_write_all", lambda descriptor, data: signal.raise_signal(number))
    left = freshly._folders_left
    removing = 0

    def interrupted(folder: int) -> list[bytes]:
        nonlocal removing
        removing += 1
        signal.raise_signal(number)
        return left(folder)

    monkeypatch.setattr(freshly, "_folders_left", interrupted)
    said = capsule("extract", "--sources", file, target, "--json")
    assert (said.code, removing > 1) == (128 + number, True)
    assert f"ended by {number.name}" in said.out
    assert below(tmp_path) == before
    monkeypatch.undo()
    assert capsule("extract", "--sources", file, target).code == 0


def test_a_signal_while_all_gets_its_place_leaves_all_of_it(
    file: Path, tmp_path: Path, capsule: Capsule, monkeypatch: pytest.MonkeyPatch
) -> None:
    move = freshly._move_up

    def interrupted(made: Path, target: Path) -> None:
        signal.raise_signal(signal.SIGTERM)
        move(made, target)

    (tmp_path / "out").mkdir()
    monkeypatch.setattr(freshly, "_move_up", interrupted)
    assert capsule("extract", "--sources", file, tmp_path / "out").code == 143
    assert below(tmp_path / "out") == ["a", "a/b", "a/x", "c"]


def test_what_a_killed_command_left_is_named(file: Path, tmp_path: Path, capsule: Capsule) -> None:
    (tmp_path / "out").mkdir()
    killed = "from capsule.steps.fresh import fresh; from pathlib import Path; import os, sys\n"
    killed += "with fresh(Path(sys.argv[1])) as made: os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", killed, str(tmp_path / "out")], check=False)
    (rest,) = below(tmp_path / "out")
    said = capsule("extract", file, tmp_path / "out")
    assert said.code == 4
    assert f"found files in {tmp_path / 'out'}, among them {rest}, which a command that was killed left" in said.err
    assert f"remove {tmp_path / 'out' / rest}" in said.err
    (tmp_path / "out" / rest).rename(tmp_path / "out" / "mine")
    assert "among them" not in capsule("extract", file, tmp_path / "out").err


def test_folders_that_are_very_deep_are_removed(full: None, tmp_path: Path, capsule: Capsule) -> None:
    path = sealed(tmp_path / "x.capsule", "a/" * DEPTH + "b", "a/" * DEPTH + "c/d")
    said = capsule("extract", "--sources", path, tmp_path / "out")
    assert (said.code, said.err.count("nothing was written")) == (5, 1)
    assert below(tmp_path) == ["x.capsule"]


def test_nothing_outside_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither behind a link nor above a folder that somebody moves away while it is removed."""
    outside = tmp_path / "outside"
    (outside / "kept").mkdir(parents=True)
    (outside / "victim").touch()
    made = tmp_path / "made"
    (made / "a" / "b").mkdir(parents=True)
    (made / "a" / "link").symlink_to(outside)
    (made / "a" / "file").touch()
    left = freshly._folders_left
    seen: list[list[bytes]] = []

    def moving(folder: int) -> list[bytes]:
        seen.append(left(folder))
        if len(seen) == 3:
            (made / "a" / "b").rename(outside / "b")
        return seen[-1]

    monkeypatch.setattr(freshly, "_folders_left", moving)
    assert not freshly._removed(made)
    assert seen == [[b"a"], [b"b"], []]
    assert below(outside) == ["b", "kept", "victim"]
    monkeypatch.undo()
    assert freshly._removed(made)
    assert below(outside) == ["b", "kept", "victim"]


@pytest.mark.parametrize(
    "arguments",
    [["extract", "F", "OUT"], ["extract", "--sources", "F", "OUT"], ["export", "F", "--as", "bagit", "-o", "OUT"],
     ["export", "F", "--as", "in-toto", "-o", "OUT"], ["show", "F"], ["show", "F", "0-header.json"]],
    ids=" ".join,
)  # fmt: skip
def test_what_is_read_twice_must_be_a_file(arguments: list[str], file: Path, tmp_path: Path, capsule: Capsule) -> None:
    source, sink = os.pipe()
    try:
        os.write(sink, file.read_bytes())
        os.close(sink)
        names = {"F": f"/dev/fd/{source}", "OUT": str(tmp_path / "out")}
        said = capsule(*(names.get(word, word) for word in arguments))
    finally:
        os.close(source)
    assert (said.code, said.out) == (2, "")
    assert f"expected a regular file at {names['F']}, as it is read more than once, found a pipe" in said.err
    assert "hint: write the capsule to a file first" in said.err
    assert below(tmp_path) == ["x.capsule"]


@pytest.mark.parametrize("place", ["f/out", "f/new/out", "link/out"])
@pytest.mark.parametrize("command", [["extract"], ["export", "--as", "bagit", "-o"]])
def test_a_file_above_the_target_is_named(
    command: list[str], place: str, file: Path, tmp_path: Path, capsule: Capsule
) -> None:
    (tmp_path / "f").touch()
    (tmp_path / "link").symlink_to("nowhere")
    before = below(tmp_path)
    (name, *more), target = command, tmp_path / place
    said = capsule(name, Path(__file__).parents[1] / "golden" / "supported.capsule", *more, target)
    above = tmp_path / place.partition("/")[0]
    assert said.code == 4
    assert f"expected a new or empty folder at {target}, found a file at {above}" in said.err
    assert "permissions" not in said.err
    assert below(tmp_path) == before


@pytest.mark.parametrize("place", ["p/q/out", "p/../q/out"])
def test_parents_that_were_made_go_too(place: str, full: None, file: Path, tmp_path: Path, capsule: Capsule) -> None:
    assert capsule("extract", file, tmp_path / place).code == 5
    assert below(tmp_path) == ["x.capsule"]


def test_parents_of_others_stay(tmp_path: Path) -> None:
    """One that was there before, and one in which somebody put something meanwhile."""
    (tmp_path / "before").mkdir()
    with contextlib.suppress(ZeroDivisionError), fresh(tmp_path / "before" / "p" / "q" / "out") as made:
        (made.parent.parent / "mine").touch()
        raise ZeroDivisionError
    assert below(tmp_path) == ["before", "before/p", "before/p/mine"]
    with fresh(tmp_path / "r" / "s" / "out") as made:
        (made / "file").touch()
    assert below(tmp_path / "r") == ["s", "s/out", "s/out/file"]

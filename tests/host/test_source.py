"""Scanning a folder that is not in git: scope, names, links, odd files, secrets, and files that do not hold still."""

from __future__ import annotations

import hashlib
import os
import socket
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule.core.errors import DriftError, MachineError, MalformedError, RefusedError
from capsule.core.manifest import SourceEntry, read_sources, sources_bytes
from capsule.core.paths import path_bytes, path_text, resolve, shown
from capsule.core.protocol import Sources
from capsule.host.patterns import compile_patterns
from capsule.host.source import Drift, Scan, compare, is_own_output, scan_sources


def scan(root: Path, **sources: tuple[str, ...]) -> Scan:
    return scan_sources(root, Sources(**sources))


def write(root: Path, files: dict[str, str | bytes]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def paths(found: Scan) -> list[str]:
    return [entry.path for entry in found.entries]


def entry_of(found: Scan, path: str) -> SourceEntry:
    return next(entry for entry in found.entries if entry.path == path)


def notes_of(found: Scan, path: str) -> tuple[str, ...]:
    return entry_of(found, path).notes


def test_every_file_below_the_root_in_byte_order(tmp_path: Path) -> None:
    write(tmp_path, {"b": "2", "a/z": "1", "a.txt": "0", "a/é": "", ".hidden": "h"})
    found = scan(tmp_path)
    assert paths(found) == [".hidden", "a.txt", "a/z", "a/é", "b"]
    assert found.warnings == ["not a git repository: every file below the root is in scope"]
    entry = entry_of(found, "a.txt")
    assert (entry.kind, entry.mode, entry.size, entry.target, entry.blob, entry.notes) == (
        "file",
        "0644",
        1,
        None,
        None,
        (),
    )
    assert entry.sha256 == "sha256:" + hashlib.sha256(b"0").hexdigest()
    assert read_sources(sources_bytes(found.entries), "x") == found.entries


def test_mode_is_the_owners_executable_bit_alone(tmp_path: Path) -> None:
    for mode in (0o600, 0o644, 0o666, 0o655, 0o700, 0o744, 0o755, 0o4755):
        (tmp_path / f"{mode:o}").write_bytes(b"")
        (tmp_path / f"{mode:o}").chmod(mode)
    executable = {entry.path for entry in scan(tmp_path).entries if entry.mode == "0755"}
    assert executable == {"700", "744", "755", "4755"}


def test_nothing_depends_on_times_place_or_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files: dict[str, str | bytes] = {"a/b": "x", "c": "y"}
    write(tmp_path / "one", files)
    before = os.umask(0o077)
    try:
        write(tmp_path / "two" / "deeper", dict(reversed(files.items())))
    finally:
        os.umask(before)
    os.utime(tmp_path / "one" / "c", (1, 1))
    monkeypatch.chdir(tmp_path / "one")
    monkeypatch.setenv("TZ", "Pacific/Kiritimati")
    monkeypatch.setenv("LC_ALL", "tr_TR.UTF-8")
    assert scan(Path()).entries == scan(tmp_path / "two" / "deeper").entries


def test_own_outputs_and_caches_are_out_of_scope(tmp_path: Path) -> None:
    inside = [
        "a.py",
        "capsule/x.py",
        "frozen",
        "x.frozen.py",
        "a.capsule.py",
        ".capsulerc",
        ".gitignore",
        "x.capsule.d/y",
    ]
    outside = [
        ".capsule/objects/aa/bb", "sub/.capsule/x", "p.frozen/001/manifest.json", "protocols/p.frozen/001/cells.jsonl",
        "p.capsule", "sub/p.capsule", "p.capsule.sig", "p.capsule.2.sig",
        "p.capsule.sig.0123456789abcdef.tmp", "p.capsule.0123456789abcdef.part",
        ".git/HEAD", "sub/.git", "__pycache__/a.cpython-311.pyc",
        "sub/__pycache__/b.pyc",
    ]  # fmt: skip
    write(tmp_path, dict.fromkeys(inside + outside, "x"))
    assert paths(scan(tmp_path)) == sorted(inside)
    assert all(map(is_own_output, map(str.encode, outside)))


def test_an_output_inside_the_tree_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": "1"})
    before = scan(tmp_path)
    write(tmp_path, {"result.capsule": b"\x28\xb5", "p.frozen/001/manifest.json": "{}"})
    assert scan(tmp_path) == before


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("*.py", ["a.py", ".py", "a b.py", "a\n.py"], ["d/a.py", "a.pyc", "a.Py"]),
        ("**/*.py", ["a.py", "d/a.py", "d/e/a.py"], ["a.pyc"]),
        ("data", ["data", "data/a", "data/d/a"], ["data2", "d/data", "dat"]),
        ("data/", ["data/a", "data/d/a"], ["data", "d/data/a"]),
        ("./data", ["data"], ["./data"]),
        ("/data", ["data/x"], ["d/data"]),
        ("data/**", ["data/a", "data/d/a"], ["data"]),
        ("**/data/*.csv", ["data/a.csv", "x/y/data/a.csv"], ["x/data/y/a.csv", "a.csv"]),
        ("a?c", ["abc", "aéc"], ["ac", "a/c", "abbc"]),
        ("[a-c]x", ["ax", "cx"], ["dx", "/x", "x"]),
        ("[!a-c]x", ["dx"], ["ax", "/x"]),
        ("[]]", ["]"], ["[", "a"]),
        ("[*]", ["*"], ["a"]),
        ("[", ["["], ["a"]),
        ("a+(b).$", ["a+(b).$"], ["aab", "a+(b)x$"]),
        ("\\d", ["\\d"], ["1"]),
        ("**", ["a", "a/b"], []),
        ("a/**/b", ["a/b", "a/x/b", "a/x/y/b", "a/b/c"], ["ab", "a/xb"]),
    ],
)
def test_patterns(pattern: str, matching: list[str], others: list[str]) -> None:
    matches = compile_patterns([pattern])
    assert [path for path in matching + others if matches(path.encode())] == matching


def test_no_patterns_match_nothing() -> None:
    assert not compile_patterns([])(b"")


def test_include_narrows_and_exclude_takes_away(tmp_path: Path) -> None:
    write(tmp_path, {"src/a.py": "", "src/b.py": "", "src/big.bin": "", "README": ""})
    found = scan(tmp_path, include=("src", "nowhere/*"), exclude=("**/*.bin",))
    assert paths(found) == ["src/a.py", "src/b.py"]
    assert "the include pattern 'nowhere/*' matches no file in scope" in found.warnings


def test_patterns_reach_names_that_are_not_utf8(tmp_path: Path) -> None:
    (Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt"))).write_bytes(b"")
    write(tmp_path, {"kept": ""})
    assert paths(scan(tmp_path, exclude=("caf?.txt",))) == ["kept"]


def test_an_empty_scope_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="at least one source file"):
        scan(tmp_path)


def test_names_are_kept_to_the_byte(tmp_path: Path) -> None:
    names = [b"a b", b"new\nline", b"tab\t\"quote'", b"caf\xe9", "café".encode(), b"hex:00", b"\xff\xfe", b"l" * 250]
    for name in names:
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_bytes(name)
    found = scan(tmp_path)
    assert [path_bytes(path) for path in paths(found)] == sorted(names)
    assert path_text(b"caf\xe9") == "hex:636166e9"
    assert "hex:" + b"hex:00".hex() in paths(found)
    assert read_sources(sources_bytes(found.entries), "x") == found.entries


@given(st.binary(min_size=1, max_size=40))
def test_written_paths_stand_for_one_name_each(raw: bytes) -> None:
    text = path_text(raw)
    assert path_bytes(text) == raw
    assert text.encode().decode() == text


@pytest.mark.parametrize("text", ["hex:", "hex:zz", "hex:FF", "hex:f", "hex:61", "hex: ff", "hex:ff "])
def test_a_second_written_form_is_malformed(text: str) -> None:
    with pytest.raises(MalformedError, match="hex:"):
        path_bytes(text)


def test_shown_paths_do_nothing_to_a_terminal() -> None:
    assert shown("a é") == "a é"
    assert shown(b"a\n\x1b[2J\xe2\x80\xae") == "'a\\n\\x1b[2J\\u202e'"


def test_names_that_fold_together_are_named(tmp_path: Path) -> None:
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    write(
        tmp_path, {composed: "1", decomposed: "2", "Read": "", "READ": "", "read": "", "stra\u00dfe": "", "strasse": ""}
    )
    write(tmp_path, {"Lib/a": "", "lib/b": "", "alone": ""})
    found = scan(tmp_path)
    assert notes_of(found, composed) == (f"folds-with:{decomposed}",)
    assert notes_of(found, decomposed) == (f"folds-with:{composed}",)
    assert notes_of(found, "Read") == ("folds-with:READ", "folds-with:read")
    assert notes_of(found, "strasse") == ("folds-with:stra\u00dfe",)
    assert notes_of(found, "alone") == ()
    assert "folders whose names fold together: Lib, lib" in found.warnings


def test_a_file_that_folds_with_a_folder_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"Lib": "", "lib/b": ""})
    assert notes_of(scan(tmp_path), "Lib") == ("folds-with:lib",)


def test_links_are_recorded_by_target_and_never_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    write(outside, {"secret.txt": "outside"})
    root = tmp_path / "root"
    write(root, {"d/real": "inside"})
    targets = {
        "in": b"d/real", "folder": b"d", "dangling": b"nowhere", "loop": b"loop", "up": b"../outside/secret.txt",
        "absolute": b"/etc/passwd", "d/back": b"../in", "d/out": b"../../outside", "raw": b"\xff\xfe",
        "through": b"folder/../../outside",
    }  # fmt: skip
    for name, target in targets.items():
        (root / name).symlink_to(os.fsdecode(target))
    found = scan(root)
    assert paths(found) == sorted([*targets, "d/real"])
    for name, target in targets.items():
        entry = entry_of(found, name)
        assert (entry.kind, entry.mode, entry.size) == ("link", None, len(target))
        assert entry.target == path_text(target)
        assert entry.sha256 == "sha256:" + hashlib.sha256(target).hexdigest()
    leaving = {entry.path for entry in found.entries if "link-leaves-tree" in entry.notes}
    assert leaving == {"up", "absolute", "d/out", "loop", "through"}


def test_links_resolve_within_the_tree() -> None:
    links = {b"a": b"x/y", b"x/y": b"../z", b"z/up": b"..", b"e": b"./z//w/"}
    assert resolve(b"a/f", links) == b"z/f"
    assert resolve(b"e", links) == b"z/w"
    assert resolve(b"z/up/f", links) == b"f"
    assert resolve(b"z/up/../f", links) is None
    assert resolve(b"plain/file", links) == b"plain/file"


def test_hard_links_and_empty_files_are_ordinary_files(tmp_path: Path) -> None:
    write(tmp_path, {"one": ""})
    os.link(tmp_path / "one", tmp_path / "two")
    one, two = scan(tmp_path).entries
    assert (one.size, one.sha256) == (two.size, two.sha256) == (0, "sha256:" + hashlib.sha256(b"").hexdigest())


def test_a_long_path_is_an_ordinary_path(tmp_path: Path) -> None:
    name = "/".join(["d" * 99] * 12)
    write(tmp_path, {name: "x"})
    assert paths(scan(tmp_path)) == [name]


def test_pipes_and_sockets_are_refused_by_name(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a pipe")
    with pytest.raises(RefusedError, match="named pipe: a pipe"):
        scan(tmp_path)
    assert paths(scan_with_file(tmp_path, exclude=("a pipe",))) == ["file"]


def test_a_socket_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("s")
        with pytest.raises(RefusedError, match="a socket: s"):
            scan(tmp_path)


def scan_with_file(root: Path, **sources: tuple[str, ...]) -> Scan:
    write(root, {"file": ""})
    return scan(root, **sources)


def test_a_huge_sparse_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(RefusedError, match="sparse"):
        scan(tmp_path)


def test_a_root_that_is_not_there_is_the_machines(tmp_path: Path) -> None:
    with pytest.raises(MachineError):
        scan(tmp_path / "nowhere")


class Hook:
    """Does something once, at the first read of a file of that content."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, content: bytes, act: object) -> None:
        self.fired = False
        real = os.read

        def read(descriptor: int, size: int) -> bytes:
            data = real(descriptor, size)
            if data.startswith(content) and not self.fired:
                self.fired = True
                act()  # type: ignore[operator]
            return data

        monkeypatch.setattr("capsule.host.source.os.read", read)


@pytest.mark.parametrize("change", ["grow", "shrink", "same size"])
@pytest.mark.parametrize("size", [100, 3 * 2**20])
def test_a_file_that_changes_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, size: int
) -> None:
    path = tmp_path / "moving"
    path.write_bytes(b"here" + b"x" * size)
    os.utime(path, ns=(1, 1))

    def act() -> None:
        with path.open("r+b") as file:
            file.seek(0, os.SEEK_END if change == "grow" else os.SEEK_SET)
            file.write(b"changed")
            if change == "shrink":
                file.truncate()

    hook = Hook(monkeypatch, b"here", act)
    with pytest.raises(DriftError, match="moving changed while it was read"):
        scan(tmp_path)
    assert hook.fired


@pytest.mark.parametrize("become", ["file", "link", "pipe", "nothing", "folder"])
def test_a_file_that_is_replaced_between_look_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, become: str
) -> None:
    path = tmp_path / "swapped"
    path.write_bytes(b"before")
    (tmp_path / "other").write_bytes(b"secret")
    real = os.open

    def swap(name: object, *arguments: object, **named: object) -> int:
        if name == b"swapped":
            path.unlink()
            if become == "file":
                path.write_bytes(b"after!")
            elif become == "link":
                path.symlink_to("other")
            elif become == "pipe":
                os.mkfifo(path)
            elif become == "folder":
                path.mkdir()
        return real(name, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr("capsule.host.source.os.open", swap)
    with pytest.raises(DriftError, match="swapped changed"):
        scan(tmp_path)


def test_a_folder_that_becomes_a_link_is_not_entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "root"
    write(root, {"d/file": "inside"})
    write(tmp_path, {"outside/file": "outside"})
    real = os.open

    def swap(name: object, *arguments: object, **named: object) -> int:
        if name == b"d" and not (root / "d").is_symlink():
            (root / "d").rename(tmp_path / "moved")
            (root / "d").symlink_to("../outside")
        return real(name, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr("capsule.host.source.os.open", swap)
    with pytest.raises(DriftError):
        scan(root)


def test_a_folder_that_disappears_mid_walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"a": "", "d/file": ""})
    real = os.scandir

    def vanish(path: bytes) -> object:
        if path.endswith(b"/d/"):
            (tmp_path / "d" / "file").unlink()
            (tmp_path / "d").rmdir()
        return real(path)

    monkeypatch.setattr("capsule.host.source.os.scandir", vanish)
    with pytest.raises(DriftError, match="d/ changed"):
        scan(tmp_path)


def test_an_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"shut": "", "open": ""})
    real = os.open

    def refuse(name: object, *arguments: object, **named: object) -> int:
        if name == b"shut":
            raise PermissionError(13, "Permission denied")
        return real(name, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr("capsule.host.source.os.open", refuse)
    with pytest.raises(MachineError, match="cannot read shut: Permission denied"):
        scan(tmp_path)


@pytest.mark.parametrize("size", [10, 2**21])
def test_a_failing_disk_is_the_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    write(tmp_path, {"bad": b"here" * size})

    def fail() -> None:
        raise OSError(5, "Input/output error")

    Hook(monkeypatch, b"here", fail)
    with pytest.raises(MachineError, match="cannot read bad: Input/output error"):
        scan(tmp_path)


def test_large_files_give_the_same_digests_in_order(tmp_path: Path) -> None:
    contents = {f"f{number:02d}": os.urandom(2**20 + number) for number in range(30)}
    write(tmp_path, {**contents})
    found = scan(tmp_path)
    assert {entry.path: entry.sha256 for entry in found.entries} == {
        name: "sha256:" + hashlib.sha256(data).hexdigest() for name, data in contents.items()
    }
    assert paths(found) == sorted(contents)


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    write(tmp_path, {f"d{number}/e/f": b"x" * (2**20 + 1) for number in range(4)})
    os.mkfifo(tmp_path / "z")
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(RefusedError):
        scan(tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_progress_counts_to_the_end(tmp_path: Path) -> None:
    write(tmp_path, {"a": "", "b": "", "c": ""})
    calls: list[tuple[int, int]] = []
    scan_sources(tmp_path, Sources(), progress=lambda done, total: calls.append((done, total)))
    assert calls == [(1, 3), (2, 3), (3, 3)]


SECRET_NAMES = [
    ".env", ".env.local", "sub/.env.production", "id_rsa", ".ssh/id_ed25519", ".netrc", ".pypirc", "credentials.json",
    ".aws/credentials", "cert.P12", ".git-credentials",
]  # fmt: skip
HARMLESS_NAMES = [
    ".env.example",
    ".env.sample",
    "env",
    "id_rsa.pub",
    "credentials.py",
    ".environment",
    "environment.yml",
]
TOKEN = "gh" + "p_" + "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7bC0eF3hJ6"


def test_files_that_look_like_secrets_are_all_named(tmp_path: Path) -> None:
    write(tmp_path, dict.fromkeys(SECRET_NAMES + HARMLESS_NAMES, "x"))
    write(tmp_path, {"train.py": f"token = '{TOKEN}'\n", "key": "-----BEGIN " + "RSA PRIVATE KEY-----\nMII\n"})
    with pytest.raises(RefusedError) as caught:
        scan(tmp_path)
    words = caught.value.message
    for name in [*SECRET_NAMES, "train.py (github_token)", "key (private_key)"]:
        assert name in words
    assert f"looks like {len(SECRET_NAMES) + 2}:" in words
    assert TOKEN not in words
    assert "secrets_allowed" in (caught.value.hint or "")


def test_secrets_are_frozen_where_allowed_by_name(tmp_path: Path) -> None:
    write(tmp_path, {"fixtures/.env": "A=1", "fixtures/key.pem": "-----BEGIN " + "PRIVATE KEY-----", "a.py": ""})
    assert paths(scan(tmp_path, secrets_allowed=("fixtures",))) == ["a.py", "fixtures/.env", "fixtures/key.pem"]
    with pytest.raises(RefusedError, match=r"looks like 1: fixtures/key\.pem"):
        scan(tmp_path, secrets_allowed=("**/.env",))
    assert paths(scan(tmp_path, exclude=("fixtures",))) == ["a.py"]


def test_a_link_with_a_secrets_name_is_only_a_link(tmp_path: Path) -> None:
    (tmp_path / ".env").symlink_to("elsewhere")
    assert paths(scan(tmp_path)) == [".env"]


def test_a_token_in_a_large_file_is_not_looked_for(tmp_path: Path) -> None:
    write(tmp_path, {"log.txt": "x\n" * 2**16 + TOKEN})
    assert paths(scan(tmp_path)) == ["log.txt"]


def test_a_pointer_of_lfs_is_named(tmp_path: Path) -> None:
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'ab' * 32}\nsize 12345\n"
    write(tmp_path, {"weights.bin": pointer, "other.bin": "version https://example.com\n"})
    found = scan(tmp_path)
    assert notes_of(found, "weights.bin") == ("lfs-pointer",)
    assert notes_of(found, "other.bin") == ()
    assert any("content absent: weights.bin" in words for words in found.warnings)


def entry(path: str, content: bytes = b"", **changes: object) -> SourceEntry:
    values: dict[str, object] = {
        "path": path, "kind": "file", "mode": "0644", "size": len(content), "target": None, "blob": None, "notes": (),
        "sha256": "sha256:" + hashlib.sha256(content).hexdigest(),
    }  # fmt: skip
    return SourceEntry(**{**values, **changes})  # type: ignore[arg-type]


def test_compare_names_what_differs_and_how() -> None:
    frozen = [entry("gone"), entry("same"), entry("text", b"1"), entry("tool"), entry("hex:ff"), entry("noted")]
    found = [
        entry("same"), entry("text", b"2"), entry("tool", mode="0755"), entry("hex:ff", b"x"), entry("new"),
        entry("noted", blob="0" * 40, notes=("untracked",)),
    ]  # fmt: skip
    assert compare(frozen, found) == [
        Drift("gone", "removed"),
        Drift("new", "added"),
        Drift("text", "changed"),
        Drift("tool", "mode"),
        Drift("hex:ff", "changed"),
    ]
    assert compare(frozen, frozen) == []
    assert str(Drift("a\nb", "changed")) == "changed: 'a\\nb'"


def test_compare_tells_a_link_from_a_file() -> None:
    link = entry("x", b"there", kind="link", mode=None, target="there")
    assert compare([entry("x", b"there")], [link]) == [Drift("x", "changed")]


def test_a_file_may_be_read_only_to_its_owner(tmp_path: Path) -> None:
    write(tmp_path, {"a": "x"})
    (tmp_path / "a").chmod(0o400)
    assert paths(scan(tmp_path)) == ["a"]
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o400

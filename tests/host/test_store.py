"""The content store and its snapshots: the frozen bytes and nothing else, whatever happens meanwhile."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from capsule.core.errors import BrokenError, DriftError, IncompleteError, MachineError, MalformedError
from capsule.core.manifest import SourceEntry
from capsule.core.protocol import Sources
from capsule.host import store
from capsule.host.source import Drift, scan_revision, scan_sources

NOT_UTF8 = os.fsdecode(b"caf\xe9\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A tree with what trees have: folders, a tool, links, a name that is not UTF-8, equal files, a large one."""
    root = tmp_path / "tree"
    (root / "pkg" / "deep").mkdir(parents=True)
    (root / "pkg" / "__init__.py").write_bytes(b"")
    (root / "pkg" / "deep" / "m.py").write_bytes(b"X = 1\n")
    (root / "copy.py").write_bytes(b"X = 1\n")
    (root / "tool").write_bytes(b"#!/bin/sh\n")
    (root / "tool").chmod(0o755)
    (root / "link").symlink_to("pkg/deep")
    (root / "dangling").symlink_to("/nowhere/at/all")
    (root / "large").write_bytes(os.urandom(3 * 2**20 + 1))
    (root / NOT_UTF8).write_bytes(b"e")
    return root


def frozen(root: Path) -> list[SourceEntry]:
    entries = scan_sources(root, Sources()).entries
    store.put_all(root, entries)
    return entries


def names(target: Path) -> list[str]:
    return sorted(str(path.relative_to(target)) for path in target.rglob("*"))


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def unlock(target: Path) -> None:
    """A snapshot's folders are read-only, which binds everybody but root."""
    for path in (target, *(path for path in target.rglob("*") if path.is_dir() and not path.is_symlink())):
        path.chmod(0o755)


def test_contents_are_stored_once_by_digest(root: Path) -> None:
    entries = scan_sources(root, Sources()).entries
    distinct = {entry.sha256 for entry in entries if entry.kind == "file"}
    assert store.put_all(root, entries) == len(distinct) == 5
    assert store.put_all(root, entries) == 0
    stored = {"sha256:" + path.parent.name + path.name for path in store.objects(root)}
    assert stored == distinct
    for entry in entries:
        if entry.kind == "file":
            path = store.object_path(root, entry.sha256)
            assert stat.S_IMODE(path.stat().st_mode) == 0o444
            with store.open_object(root, entry.sha256) as file:
                assert len(file.read()) == entry.size


def test_an_absent_content_is_incomplete(root: Path) -> None:
    assert list(store.objects(root)) == []
    with pytest.raises(IncompleteError, match="sha256:00"):
        store.open_object(root, "sha256:" + "0" * 64)


@pytest.mark.parametrize("change", ["edit", "remove", "link"])
def test_a_file_that_changed_since_the_scan_is_drift(root: Path, change: str) -> None:
    entries = scan_sources(root, Sources()).entries
    (root / "tool").unlink()
    if change == "edit":
        (root / "tool").write_bytes(b"#!/bin/no\n")
    elif change == "link":
        (root / "tool").symlink_to("copy.py")
    with pytest.raises(DriftError, match="tool"):
        store.put_all(root, entries)
    assert not [path for path in store.objects(root) if path.suffix == ".tmp"]
    assert not store.object_path(root, next(entry.sha256 for entry in entries if entry.path == "tool")).exists()


def test_a_full_disk_is_the_machines_and_leaves_nothing_half(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = scan_sources(root, Sources()).entries

    def full(descriptor: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("capsule.host.store.os.write", full)
        with pytest.raises(MachineError, match="No space left"):
            store.put_all(root, entries)
    assert {path.stat().st_size for path in store.objects(root)} <= {0}  # the empty file needs no write
    store.put_all(root, entries)
    store.materialise(root, entries, root / ".capsule" / "s")


def test_short_writes_are_continued(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr("capsule.host.store.os.write", lambda descriptor, data: real(descriptor, data[:1000]))
    entries = frozen(root)
    store.materialise(root, entries, root / ".capsule" / "s")
    assert (root / ".capsule" / "s" / "large").read_bytes() == (root / "large").read_bytes()


def test_a_snapshot_holds_exactly_the_frozen_files(root: Path, tmp_path: Path) -> None:
    entries = frozen(root)
    target = tmp_path / "elsewhere" / "snapshot"
    for path in (root / "copy.py", root / "tool"):
        path.write_bytes(b"changed meanwhile")
    store.materialise(root, entries, target)
    assert names(target) == sorted(
        f"pkg pkg/__init__.py pkg/deep pkg/deep/m.py copy.py tool link dangling large {NOT_UTF8}".split(" ")
    )
    assert (target / "copy.py").read_bytes() == b"X = 1\n"
    assert (target / "link").readlink() == Path("pkg/deep")
    assert (target / "dangling").readlink() == Path("/nowhere/at/all")
    modes = {
        name: stat.S_IMODE((target / name).lstat().st_mode) for name in ("tool", "copy.py", "pkg", "pkg/deep", ".")
    }
    assert modes == {"tool": 0o555, "copy.py": 0o444, "pkg": 0o555, "pkg/deep": 0o555, ".": 0o555}
    assert store.verify_tree(entries, target) == []
    assert listing(target.parent) == ["snapshot"]


def test_a_snapshot_does_not_depend_on_the_umask(root: Path) -> None:
    before = os.umask(0o077)
    try:
        entries = frozen(root)
        store.materialise(root, entries, root / ".capsule" / "s")
    finally:
        os.umask(before)
    assert stat.S_IMODE((root / ".capsule" / "s" / "pkg").stat().st_mode) == 0o555


def test_a_good_snapshot_is_used_again(root: Path) -> None:
    entries = frozen(root)
    target = root / ".capsule" / "s"
    store.materialise(root, entries, target)
    before = target.stat().st_ino
    for path in list(store.objects(root)):
        path.unlink()
    store.materialise(root, entries, target)
    assert target.stat().st_ino == before


def tamper_edit(target: Path) -> None:
    (target / "copy.py").chmod(0o644)
    (target / "copy.py").write_bytes(b"X = 2\n")


def tamper_add(target: Path) -> None:
    (target / "pkg" / "extra.py").write_bytes(b"")


def tamper_remove(target: Path) -> None:
    (target / "pkg" / "deep" / "m.py").unlink()


def tamper_mode(target: Path) -> None:
    (target / "copy.py").chmod(0o755)


def tamper_link(target: Path) -> None:
    (target / "link").unlink()
    (target / "link").symlink_to("pkg")


def tamper_swap(target: Path) -> None:
    (target / "tool").unlink()
    (target / "tool").symlink_to("copy.py")


def tamper_pipe(target: Path) -> None:
    (target / "large").unlink()
    os.mkfifo(target / "large")


def tamper_output(target: Path) -> None:
    (target / "x.frozen").mkdir()
    (target / "x.frozen" / "m.py").write_bytes(b"")


@pytest.mark.parametrize(
    ("tamper", "drift"),
    [
        (tamper_edit, Drift("copy.py", "changed")),
        (tamper_add, Drift("pkg/extra.py", "added")),
        (tamper_remove, Drift("pkg/deep/m.py", "removed")),
        (tamper_mode, Drift("copy.py", "mode")),
        (tamper_link, Drift("link", "changed")),
        (tamper_swap, Drift("tool", "changed")),
        (tamper_pipe, Drift("large", "changed")),
        (tamper_output, Drift("x.frozen/m.py", "added")),
    ],
)
def test_every_change_of_a_snapshot_is_found(root: Path, tamper: object, drift: Drift) -> None:
    entries = frozen(root)
    target = root / ".capsule" / "s"
    store.materialise(root, entries, target)
    unlock(target)
    tamper(target)  # type: ignore[operator]
    assert store.verify_tree(entries, target) == [drift]
    with pytest.raises(DriftError, match="expected the frozen sources"):
        store.materialise(root, entries, target)


def test_a_missing_snapshot_lacks_every_file(root: Path) -> None:
    entries = frozen(root)
    drifts = store.verify_tree(entries, root / "nowhere")
    assert drifts == [Drift(entry.path, "removed") for entry in entries]


def test_caches_are_additions_and_removed_before_use(root: Path) -> None:
    entries = frozen(root)
    target = root / ".capsule" / "s"
    store.materialise(root, entries, target)
    unlock(target)
    (target / "pkg" / "__pycache__").mkdir()
    (target / "pkg" / "__pycache__" / "m.cpython-311.pyc").write_bytes(b"planted")
    assert store.verify_tree(entries, target) == [Drift("pkg/__pycache__/m.cpython-311.pyc", "added")]
    store.materialise(root, entries, target)
    assert not (target / "pkg" / "__pycache__").exists()


def test_a_cache_that_is_a_link_is_not_followed(root: Path, tmp_path: Path) -> None:
    entries = frozen(root)
    target = root / ".capsule" / "s"
    store.materialise(root, entries, target)
    (tmp_path / "elsewhere").mkdir(mode=0o755)
    unlock(target)
    (target / "__pycache__").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DriftError, match="added"):
        store.materialise(root, entries, target)
    assert stat.S_IMODE((tmp_path / "elsewhere").stat().st_mode) == 0o755


@pytest.mark.parametrize("instead", ["changed", "unreadable", "file", "link", "dangling", "nothing"])
def test_a_drifted_snapshot_is_made_again(root: Path, tmp_path: Path, instead: str) -> None:
    entries = frozen(root)
    target = root / ".capsule" / "s"
    store.materialise(root, entries, target)
    unlock(target)
    if instead == "changed":
        tamper_output(target)
    elif instead == "unreadable":
        (target / "pkg").chmod(0)
        (target / "added").write_bytes(b"")
    else:
        store.remove_tree(target)
    if instead == "file":
        target.write_bytes(b"")
    elif instead == "link":
        (tmp_path / "elsewhere").mkdir()
        target.symlink_to(tmp_path / "elsewhere")
    elif instead == "dangling":
        target.symlink_to("nowhere")
    store.renew(root, entries, target)
    assert store.verify_tree(entries, target) == []
    assert not target.is_symlink()
    assert listing(root / ".capsule") == ["objects", "s"]


def test_a_snapshot_that_did_not_drift_stays(root: Path) -> None:
    entries = frozen(root)
    target = root / ".capsule" / "s"
    store.materialise(root, entries, target)
    before = target.stat().st_ino
    store.renew(root, entries, target)
    assert target.stat().st_ino == before


def test_a_damaged_object_is_found_on_the_way_out(root: Path) -> None:
    entries = frozen(root)
    path = store.object_path(root, next(entry.sha256 for entry in entries if entry.path == "large"))
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(2**20)
        byte = file.read(1)
        file.seek(2**20)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(BrokenError, match="large"):
        store.materialise(root, entries, root / ".capsule" / "s")
    assert listing(root / ".capsule") == ["objects"]


def test_a_missing_object_leaves_no_snapshot(root: Path) -> None:
    entries = frozen(root)
    store.object_path(root, entries[-1].sha256).unlink()
    with pytest.raises(IncompleteError):
        store.materialise(root, entries, root / ".capsule" / "s")
    assert listing(root / ".capsule") == ["objects"]


def test_killed_midway_nothing_has_its_name_and_the_next_call_succeeds(root: Path) -> None:
    entries = frozen(root)
    program = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom capsule.core.protocol import Sources\n"
        "from capsule.host import store, source\nroot = Path(sys.argv[1])\n"
        "entries = source.scan_sources(root, Sources()).entries\nreal = os.symlink\n"
        "def die(*a): os.kill(os.getpid(), signal.SIGKILL)\nos.symlink = die\n"
        "store.materialise(root, entries, root / '.capsule' / 's')\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(root)], check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == -9
    left = listing(root / ".capsule")
    assert len(left) == 2
    assert left[0].startswith(".making-")
    store.materialise(root, entries, root / ".capsule" / "s")
    assert store.verify_tree(entries, root / ".capsule" / "s") == []
    store.remove_tree(root / ".capsule" / left[0])
    assert listing(root / ".capsule") == ["objects", "s"]


def test_another_process_may_be_first(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = frozen(root)
    target = root / ".capsule" / "s"
    real = store._rename_first

    def late(making: Path, place: Path) -> None:
        monkeypatch.setattr(store, "_rename_first", real)
        store.materialise(root, entries, place)
        real(making, place)

    monkeypatch.setattr(store, "_rename_first", late)
    store.materialise(root, entries, target)
    assert listing(root / ".capsule") == ["objects", "s"]


def entry(path: str, **changes: object) -> SourceEntry:
    values: dict[str, object] = {
        "path": path, "kind": "file", "mode": "0644", "size": 0, "target": None, "blob": None, "notes": (),
        "sha256": "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    }  # fmt: skip
    return SourceEntry(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "paths", [["../x"], ["/x"], ["a//b"], ["a/./b"], ["a/"], [""], ["a/../../x"], ["a", "a/b"], ["x", "x"], ["a\0b"]]
)
def test_paths_that_are_not_within_the_sources_are_malformed(root: Path, paths: list[str]) -> None:
    frozen(root)
    with pytest.raises(MalformedError):
        store.materialise(root, [entry(path) for path in paths], root / ".capsule" / "s")
    assert listing(root / ".capsule") == ["objects"]


def test_nothing_is_written_through_a_link(root: Path, tmp_path: Path) -> None:
    frozen(root)
    (tmp_path / "victim").mkdir()
    link = entry("d", kind="link", mode=None, target=str(tmp_path / "victim"))
    with pytest.raises(MalformedError):
        store.materialise(root, [link, entry("d/x")], root / ".capsule" / "s")
    assert listing(tmp_path / "victim") == []


def test_the_contents_of_a_revision_come_from_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    root = tmp_path / "r"
    root.mkdir()
    (root / "a").write_bytes(b"old")
    (root / "l").symlink_to("a")
    for command in ("init -q", "add -A", "-c user.name=A -c user.email=a@example.org commit -qm x"):
        subprocess.run(["git", "-C", str(root), *command.split()], check=True)
    revision = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], check=True, capture_output=True).stdout
    (root / "a").write_bytes(b"new")
    entries = scan_revision(root, revision.decode().strip(), Sources()).entries
    assert store.put_revision(root, revision.decode().strip(), entries) == 1
    store.materialise(root, entries, root / ".capsule" / "s")
    assert (root / ".capsule" / "s" / "l").read_bytes() == b"old"
    wrong = [entries[0].model_copy(update={"sha256": entry("x").sha256})]
    with pytest.raises(DriftError):
        store.put_revision(root, revision.decode().strip(), wrong)


def test_no_descriptor_stays_open(root: Path) -> None:
    entries = frozen(root)
    before = len(listing(Path("/proc/self/fd")))
    store.materialise(root, entries, root / ".capsule" / "s")
    store.object_path(root, entries[0].sha256).unlink()
    with pytest.raises(IncompleteError):
        store.materialise(root, entries, root / ".capsule" / "t")
    (root / "copy.py").write_bytes(b"other")
    with pytest.raises(DriftError):
        store.put_all(root, [entry("copy.py", sha256="sha256:" + "0" * 64)])
    assert len(listing(Path("/proc/self/fd"))) == before

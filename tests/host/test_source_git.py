"""Scanning inside real git repositories: tracked, ignored, hidden from `git status`, nested, or of a revision."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import zlib
from pathlib import Path

import pytest

from capsule.core.errors import BrokenError, MachineError, RefusedError
from capsule.core.manifest import SourceEntry
from capsule.core.protocol import Sources
from capsule.host import git
from capsule.host.source import Scan, scan_revision, scan_sources


@pytest.fixture(autouse=True)
def _own_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "gitconfig"
    config.write_text('[user]\n name = A\n email = a@example.org\n[protocol "file"]\n allow = always\n')
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")


def run(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, check=True)
    return done.stdout.decode().strip()


def repository(root: Path, files: dict[str, str | bytes] | None = None, *options: str) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    run(root, "init", "-q", *options)
    if files:
        write(root, files)
        commit(root)
    return root


def write(root: Path, files: dict[str, str | bytes]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def commit(root: Path) -> str:
    run(root, "add", "-A")
    run(root, "commit", "-qm", "x")
    return run(root, "rev-parse", "HEAD")


def scan(root: Path, **sources: tuple[str, ...]) -> Scan:
    return scan_sources(root, Sources(**sources))


def notes(found: Scan) -> dict[str, tuple[str, ...]]:
    return {entry.path: entry.notes for entry in found.entries}


def entry_of(found: Scan, path: str) -> SourceEntry:
    return next(entry for entry in found.entries if entry.path == path)


def test_tracked_and_not_ignored_files_are_in_scope(tmp_path: Path) -> None:
    root = repository(tmp_path / "r", {"a.py": "1\n", ".gitignore": "*.log\n/out\n", "d/.gitignore": "skip\n"})
    write(root, {"new.py": "", "x.log": "", "out/f": "", "d/skip": "", "d/keep": "", "forced.log": ""})
    run(root, "add", "-f", "forced.log")
    found = scan(root)
    assert notes(found) == {
        ".gitignore": (), "a.py": (), "d/.gitignore": (), "d/keep": ("untracked",), "forced.log": (),
        "new.py": ("untracked",),
    }  # fmt: skip
    assert found.warnings == []
    assert entry_of(found, "a.py").blob == run(root, "rev-parse", "HEAD:a.py")
    assert entry_of(found, "new.py").blob is None


def test_only_ignore_files_of_the_tree_count(tmp_path: Path) -> None:
    root = repository(tmp_path / "r", {"a": ""})
    write(root, {"mine.txt": "", "yours.txt": ""})
    (root / ".git" / "info" / "exclude").write_text("mine.txt\n")
    (tmp_path / "ignore").write_text("yours.txt\n")
    run(root, "config", "core.excludesFile", str(tmp_path / "ignore"))
    assert list(notes(scan(root))) == ["a", "mine.txt", "yours.txt"]


def test_two_clones_give_the_same_entries(tmp_path: Path) -> None:
    names: dict[str, str | bytes] = {"a b": "1", "new\nline": "2", "d/café": "3", "cafe\u0301": "4", "tool.sh": "#!"}
    root = repository(tmp_path / "origin", names)
    Path(os.fsdecode(os.fsencode(root) + b"/caf\xe9")).write_bytes(b"5")
    (root / "link").symlink_to("a b")
    (root / "tool.sh").chmod(0o755)
    commit(root)
    run(tmp_path, "clone", "-q", str(root), "one")
    (tmp_path / "deep").mkdir()
    run(tmp_path, "clone", "-q", str(root), "deep/two")
    for clone in ("one", "deep/two"):
        write(tmp_path / clone, {"untracked": "u"})
    one, two = scan(tmp_path / "one"), scan(tmp_path / "deep" / "two")
    assert one.entries == two.entries
    assert len(one.entries) == 8
    assert {path: found for path, found in notes(one).items() if found} == {"untracked": ("untracked",)}
    assert entry_of(one, "tool.sh").mode == "0755"
    assert entry_of(one, "link").blob == run(root, "rev-parse", "HEAD:link")


def test_a_folder_of_a_repository_is_scanned_alone(tmp_path: Path) -> None:
    root = repository(tmp_path / "r", {"top": "", "sub/a": "", "sub/d/b": "", ".gitignore": "ignored\n"})
    write(root, {"sub/new": "", "sub/ignored": ""})
    assert notes(scan(root / "sub")) == {"a": (), "d/b": (), "new": ("untracked",)}
    assert git.toplevel(root / "sub") == root.resolve()


def test_an_edit_that_git_was_told_not_to_see(tmp_path: Path) -> None:
    root = repository(tmp_path / "r", {"assumed": "1\n", "skipped": "1\n", "quiet": "1\n", "mode": "1\n"})
    run(root, "update-index", "--assume-unchanged", "assumed", "quiet", "mode")
    run(root, "update-index", "--skip-worktree", "skipped")
    write(root, {"assumed": "2\n", "skipped": "2\n"})
    (root / "mode").chmod(0o755)
    assert run(root, "status", "--porcelain") == ""
    assert notes(scan(root)) == {
        "assumed": ("assume-unchanged-edit", "differs-from-index"),
        "mode": ("assume-unchanged-edit",),
        "quiet": (),
        "skipped": ("differs-from-index", "skip-worktree-edit"),
    }


def test_an_edit_of_the_same_size_and_time(tmp_path: Path) -> None:
    root = repository(tmp_path / "r", {"a": "1\n"})
    before = (root / "a").stat()
    frozen = entry_of(scan(root), "a")
    (root / "a").write_bytes(b"2\n")
    os.utime(root / "a", ns=(before.st_atime_ns, before.st_mtime_ns))
    found = entry_of(scan(root), "a")
    assert found.sha256 == "sha256:" + hashlib.sha256(b"2\n").hexdigest() != frozen.sha256
    assert found.notes == ("differs-from-index",)


def test_staged_and_unstaged_edits_are_compared_with_the_index(tmp_path: Path) -> None:
    root = repository(tmp_path / "r", {"staged": "1", "edited": "1"})
    write(root, {"staged": "2", "edited": "2"})
    run(root, "add", "staged")
    assert notes(scan(root)) == {"edited": ("differs-from-index",), "staged": ()}


@pytest.mark.parametrize("attribute", ["eol=crlf", "eol=lf"])
def test_line_endings_of_work_tree_and_blob(tmp_path: Path, attribute: str) -> None:
    root = repository(tmp_path / "r")
    run(root, "config", "core.autocrlf", "false")
    stored, there = (b"a\nb\n", b"a\r\nb\r\n") if attribute == "eol=crlf" else (b"a\r\nb\r\n", b"a\nb\n")
    write(root, {"t.txt": stored, "edited.txt": stored})
    commit(root)
    write(root, {"t.txt": there, "edited.txt": there + b"more"})
    found = scan(root)
    assert notes(found)["t.txt"] == ("differs-from-index", "line-endings-differ")
    assert notes(found)["edited.txt"] == ("differs-from-index",)
    assert entry_of(found, "t.txt").sha256 == "sha256:" + hashlib.sha256(there).hexdigest()


def test_a_crlf_checkout_differs_though_status_is_clean(tmp_path: Path) -> None:
    origin = repository(tmp_path / "origin", {"t.txt": "a\nb\n"})
    run(tmp_path, "clone", "-q", "-c", "core.autocrlf=true", str(origin), "r")
    root = tmp_path / "r"
    assert run(root, "status", "--porcelain") == ""
    assert notes(scan(root)) == {"t.txt": ("differs-from-index", "line-endings-differ")}


def test_a_smudge_filter_hides_nothing(tmp_path: Path) -> None:
    origin = repository(tmp_path / "origin", {"f.bin": "stored\n", ".gitattributes": "*.bin filter=x\n"})
    run(
        tmp_path, "clone", "-q", "-c", "filter.x.smudge=tr a-z A-Z", "-c", "filter.x.clean=tr A-Z a-z", str(origin), "r"
    )
    found = scan(tmp_path / "r")
    assert (tmp_path / "r" / "f.bin").read_bytes() == b"STORED\n"
    assert notes(found)["f.bin"] == ("differs-from-index",)
    assert entry_of(found, "f.bin").sha256 == "sha256:" + hashlib.sha256(b"STORED\n").hexdigest()


def test_a_pointer_of_lfs_that_was_never_fetched(tmp_path: Path) -> None:
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'ab' * 32}\nsize 12345\n"
    found = scan(repository(tmp_path / "r", {"weights.bin": pointer}))
    assert notes(found) == {"weights.bin": ("lfs-pointer",)}
    assert found.warnings == ["content absent: weights.bin is a pointer of git-lfs (git lfs pull fetches it)"]


def with_submodule(tmp_path: Path) -> tuple[Path, str]:
    module = repository(tmp_path / "module", {"m.py": "1\n", "n.py": "1\n"})
    root = repository(tmp_path / "r", {"a": ""})
    run(root, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(module), "lib/m")
    commit(root)
    return root, run(module, "rev-parse", "HEAD")


def test_a_clean_submodule_is_walked_with_its_commit(tmp_path: Path) -> None:
    root, head = with_submodule(tmp_path)
    found = scan(root)
    assert notes(found) == {
        ".gitmodules": (), "a": (), "lib/m/m.py": (f"submodule:{head}",), "lib/m/n.py": (f"submodule:{head}",)
    }  # fmt: skip
    assert entry_of(found, "lib/m/m.py").blob == run(root / "lib" / "m", "rev-parse", "HEAD:m.py")


@pytest.mark.parametrize("dirt", ["edit", "untracked", "removed", "staged"])
def test_a_dirty_submodule_says_so(tmp_path: Path, dirt: str) -> None:
    root, head = with_submodule(tmp_path)
    module = root / "lib" / "m"
    if dirt == "removed":
        (module / "n.py").unlink()
    else:
        write(module, {"new.py" if dirt == "untracked" else "m.py": "2\n"})
        if dirt == "staged":
            run(module, "add", "-A")
    assert f"submodule:{head}+dirty" in notes(scan(root))["lib/m/m.py"]


def test_a_submodule_that_is_not_checked_out_is_named(tmp_path: Path) -> None:
    root, _ = with_submodule(tmp_path)
    run(tmp_path, "clone", "-q", str(root), "clone")
    found = scan(tmp_path / "clone")
    assert list(notes(found)) == [".gitmodules", "a"]
    assert found.warnings == ["submodule 'lib/m' is not checked out: its files are not frozen"]


def test_a_nested_repository_is_walked_as_untracked(tmp_path: Path) -> None:
    root = repository(tmp_path / "r", {"a": ""})
    nested = repository(root / "nested", {"f": "", ".gitignore": "skip\n"})
    write(nested, {"skip": "", "new": ""})
    repository(root / "empty")
    write(root, {"empty/f": ""})
    assert notes(scan(root)) == {
        "a": (), "empty/f": ("untracked",), "nested/.gitignore": ("untracked",), "nested/f": ("untracked",),
        "nested/new": ("untracked",),
    }  # fmt: skip


def test_tracked_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    root = repository(tmp_path / "r", {"a": "", "gone": "", "d/moved": "", "real/moved": "", "was/file": ""})
    (root / "gone").unlink()
    shutil.rmtree(root / "d")
    (root / "d").symlink_to("real")
    (root / "was" / "file").unlink()
    write(root, {"was/file/now/below": ""})
    found = scan(root)
    assert notes(found) == {"a": (), "d": ("untracked",), "real/moved": (), "was/file/now/below": ("untracked",)}
    assert found.warnings == [
        f"not frozen, since tracked, and not in the work tree: {name}" for name in ("d/moved", "gone", "was/file")
    ]


def test_a_sparse_checkout_is_named(tmp_path: Path) -> None:
    root = repository(tmp_path / "r", {"in/a": "", "out/b": ""})
    run(root, "sparse-checkout", "set", "in")
    found = scan(root)
    assert list(notes(found)) == ["in/a"]
    assert found.warnings == ["not frozen, since left out by a sparse checkout: out/b"]


def test_before_the_first_commit_everything_is_untracked_or_staged(tmp_path: Path) -> None:
    root = repository(tmp_path / "r")
    write(root, {"a": "", "b": ""})
    run(root, "add", "a")
    assert notes(scan(root)) == {"a": (), "b": ("untracked",)}
    assert git.head_commit(root) is None


def test_a_detached_head_changes_nothing(tmp_path: Path) -> None:
    root = repository(tmp_path / "r", {"a": ""})
    before = scan(root)
    run(root, "checkout", "-q", "--detach")
    assert scan(root) == before


def test_a_sha256_repository(tmp_path: Path) -> None:
    root = repository(tmp_path / "r", {"a": "1\n"}, "--object-format=sha256")
    found = scan(root)
    assert entry_of(found, "a").blob == run(root, "rev-parse", "HEAD:a")
    assert len(entry_of(found, "a").blob or "") == 64
    assert notes(found) == {"a": ()}
    assert scan_revision(root, run(root, "rev-parse", "HEAD"), Sources()).entries == found.entries


def test_an_unmerged_path_is_one_entry(tmp_path: Path) -> None:
    root = repository(tmp_path / "r", {"f": "base\n"})
    run(root, "checkout", "-qb", "other")
    write(root, {"f": "other\n"})
    commit(root)
    run(root, "checkout", "-q", "-")
    write(root, {"f": "main\n"})
    commit(root)
    subprocess.run(["git", "-C", str(root), "merge", "other"], capture_output=True, check=False)
    assert notes(scan(root)) == {"f": ("unmerged",)}


def test_redirections_in_the_environment_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = repository(tmp_path / "r", {"a": ""})
    other = repository(tmp_path / "other", {"b": ""})
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / ".git" / "index"))
    monkeypatch.setenv("GIT_LITERAL_PATHSPECS", "1")
    assert list(notes(scan(root))) == ["a"]


def test_a_configured_program_is_not_started(tmp_path: Path) -> None:
    root = repository(tmp_path / "r", {"a": ""})
    hook = tmp_path / "hook"
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    hook.chmod(0o755)
    run(root, "config", "core.fsmonitor", str(hook))
    scan(root)
    assert not (tmp_path / "started").exists()


def test_the_index_is_not_written(tmp_path: Path) -> None:
    root = repository(tmp_path / "r", {"a": "1"})
    os.utime(root / "a", (1, 1))
    before = (root / ".git" / "index").read_bytes()
    scan(root)
    assert (root / ".git" / "index").read_bytes() == before


def test_without_git_a_plain_folder_works_and_a_repository_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = repository(tmp_path / "r", {"d/a": ""})
    write(tmp_path / "plain", {"b": ""})
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert list(notes(scan(tmp_path / "plain"))) == ["b"]
    assert git.toplevel(tmp_path / "plain") is None
    with pytest.raises(MachineError, match="expected git"):
        scan(root / "d")


def test_a_damaged_repository_is_not_mistaken_for_none(tmp_path: Path) -> None:
    root = repository(tmp_path / "r", {"a": ""})
    (root / ".git" / "config").write_text("[core\n")
    with pytest.raises(MachineError, match="git cannot read"):
        scan(root)


def test_the_inside_of_a_repository_is_no_root(tmp_path: Path) -> None:
    root = repository(tmp_path / "r", {"a": ""})
    with pytest.raises(MachineError, match="inside of a git repository"):
        scan(root / ".git")


def test_a_revision_is_read_from_the_object_store(tmp_path: Path) -> None:
    root = repository(tmp_path / "r", {"a.py": "old\n", "d/tool": "#!\n", "x.capsule": "", "sub/s": "1"})
    (root / "d" / "tool").chmod(0o755)
    (root / "link").symlink_to("../out")
    Path(os.fsdecode(os.fsencode(root) + b"/caf\xe9")).write_bytes(b"5")
    old = commit(root)
    at_old = scan(root)
    write(root, {"a.py": "new\n", "b.py": ""})
    commit(root)
    assert scan_revision(root, old, Sources()).entries == at_old.entries
    assert [entry.path for entry in scan_revision(root, old, Sources(include=("**/*.py",))).entries] == ["a.py"]
    assert [entry.path for entry in scan_revision(root / "sub", old, Sources()).entries] == ["s"]
    write(root, {"later/x": ""})
    with pytest.raises(RefusedError, match="expected the folder later/"):
        scan_revision(root / "later", old, Sources())


def test_secrets_in_a_revision_are_refused(tmp_path: Path) -> None:
    root = repository(tmp_path / "r", {".env": "A=1", "a": ""})
    old = run(root, "rev-parse", "HEAD")
    with pytest.raises(RefusedError, match=r"\.env \(secret by name\)"):
        scan_revision(root, old, Sources())
    assert len(scan_revision(root, old, Sources(secrets_allowed=(".env",))).entries) == 2


def test_a_submodule_of_a_revision_is_named(tmp_path: Path) -> None:
    root, _ = with_submodule(tmp_path)
    head = run(root, "rev-parse", "HEAD")
    found = scan_revision(root, head, Sources())
    assert list(notes(found)) == [".gitmodules", "a"]
    assert found.warnings == [f"submodule lib/m is not in revision {head}: its files are not frozen"]


def test_replacement_references_are_not_followed(tmp_path: Path) -> None:
    root = repository(tmp_path / "r", {"a": "true\n"})
    old = run(root, "rev-parse", "HEAD")
    expected = scan_revision(root, old, Sources()).entries
    blob = run(root, "rev-parse", "HEAD:a")
    write(root, {"a": "false\n"})
    run(root, "replace", blob, run(root, "hash-object", "-w", "a"))
    assert run(root, "cat-file", "-p", blob) == "false"
    assert scan_revision(root, old, Sources()).entries == expected


def test_an_object_that_does_not_hash_to_its_id(tmp_path: Path) -> None:
    root = repository(tmp_path / "r", {"a": "true\n"})
    old, blob = run(root, "rev-parse", "HEAD"), run(root, "rev-parse", "HEAD:a")
    loose = root / ".git" / "objects" / blob[:2] / blob[2:]
    loose.chmod(0o644)
    loose.write_bytes(zlib.compress(b"blob 5\0fals\n"))
    with pytest.raises(BrokenError, match=blob):
        scan_revision(root, old, Sources())


def test_a_missing_revision_is_refused_with_a_hint(tmp_path: Path) -> None:
    root = repository(tmp_path / "r", {"a": ""})
    with pytest.raises(RefusedError, match="found none of that id") as caught:
        scan_revision(root, "0" * 40, Sources())
    assert "git fetch" in (caught.value.hint or "")
    tree = run(root, "rev-parse", "HEAD^{tree}")
    with pytest.raises(RefusedError, match="expected a commit of git, found a tree"):
        scan_revision(root, tree, Sources())
    (tmp_path / "plain").mkdir()
    with pytest.raises(RefusedError, match="expected a git repository"):
        scan_revision(tmp_path / "plain", "0" * 40, Sources())


def test_a_shallow_clone_has_what_it_has(tmp_path: Path) -> None:
    origin = repository(tmp_path / "origin", {"a": "1"})
    old = run(origin, "rev-parse", "HEAD")
    write(origin, {"a": "2"})
    new = commit(origin)
    run(tmp_path, "clone", "-q", "--depth=1", f"file://{origin}", "r")
    assert scan_revision(tmp_path / "r", new, Sources()).entries == scan(tmp_path / "r").entries
    with pytest.raises(RefusedError, match=old):
        scan_revision(tmp_path / "r", old, Sources())


def test_a_root_that_its_repository_ignores_is_scanned_without_git(tmp_path: Path) -> None:
    """In a scratch folder that the repository around it ignores, every file is in scope."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / ".gitignore").write_text("scratch/\n")
    root = tmp_path / "scratch" / "study"
    root.mkdir(parents=True)
    (root / "trial.py").write_text("pass\n")
    assert [entry.path for entry in scan_sources(root, Sources()).entries] == ["trial.py"]

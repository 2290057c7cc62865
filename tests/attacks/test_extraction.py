"""Whatever list of sources a capsule holds, extracting writes below the folder that was named and nowhere else."""

from __future__ import annotations

import contextlib
import io
import os
import stat
from pathlib import Path

import pytest

from capsule.core.canonical import join_lines
from capsule.core.digest import digest_of
from capsule.core.errors import BrokenError, CapsuleError
from capsule.steps.extract import extract, extract_sources
from tests.attacks.items import vectors
from tests.attacks.vectors import SOURCES, golden, with_list
from tests.golden.make import seal

CONTENT = next(name for name in golden() if name.startswith("5-sources/"))


def file(path: str) -> dict[str, object]:
    size = len(golden()[CONTENT])
    return {
        "blob": None, "kind": "file", "mode": "0644", "notes": [], "path": path, "sha256": f"sha256:{CONTENT[10:]}",
        "size": size, "target": None,
    }  # fmt: skip


def link(path: str, target: str) -> dict[str, object]:
    data = os.fsencode(target)
    return {**file(path), "kind": "link", "mode": None, "sha256": digest_of(data), "size": len(data), "target": target}


TREES: dict[str, list[dict[str, object]]] = {
    "upwards": [file("../victim")],
    "upwards inside": [file("a/../../victim")],
    "absolute": [file("/tmp/victim-of-a-capsule")],
    "upwards in hex": [file("hex:2e2e2f76696374696d")],
    "through a link": [link("a", ".."), file("a/victim")],
    "through a link to the root": [link("a", "/"), file("a/tmp/victim-of-a-capsule")],
    "link upwards": [link("a", "../victim")],
    "link upwards behind folders": [link("a/b", "../../victim")],
    "link to nothing": [link("a", "")],
    "link by a link": [link("a", "b"), link("b", ".."), link("c", "a/../../victim")],
    "link over itself": [link("a", "a")],
    "chain of folders": [link("/".join("a" * 40), "../" * 60 + "victim")],
    "file over a folder": [file("a"), file("a/b")],
    "file of the folder's name": [file("a/b"), link("a/b/c", "x")],
    "one place twice": [file("a"), file("a")],
    "NUL": [file("a\0b")],
    "name too long": [file("x" * 300)],
    "path too long": [file("/".join(["x" * 100] * 60))],
    "empty": [file("")],
    "dots": [file("."), file("..")],
    "a repository": [file(".git/HEAD"), file(".git/config")],
    "a repository in capitals": [file("a/.GIT/config")],
}


@pytest.mark.parametrize("entries", TREES.values(), ids=TREES)
def test_nothing_is_written_outside(entries: list[dict[str, object]], tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"untouched")
    path = tmp_path / "x.capsule"
    path.write_bytes(seal(with_list(SOURCES, join_lines(entries))))
    target = tmp_path / "out"
    with contextlib.suppress(CapsuleError):
        extract_sources(path, target)
    assert (tmp_path / "victim").read_bytes() == b"untouched"
    assert {item.name for item in tmp_path.iterdir()} <= {"victim", "x.capsule", "out"}
    assert not Path("/tmp/victim-of-a-capsule").exists()
    assert links_outside(target) == []
    assert not (target / ".git").exists()
    assert not (target / "a/.GIT").exists()


def links_outside(target: Path) -> list[str]:
    """Return the links below a folder that lead out of it; folders may be deeper than a path can say."""
    found = []
    for folder, folders, files, descriptor in os.fwalk(target) if target.exists() else ():
        for name in (*folders, *files):
            place = os.path.join(folder, name)  # noqa: PTH118 - longer than a Path may be
            is_link = stat.S_ISLNK(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode)
            if is_link and not os.path.realpath(place).startswith(f"{target}/"):
                found.append(place)
    return found


@pytest.mark.parametrize("name", ["z9-frame-of-another-capsule", "t1-duplicate-other-bytes", "n1-0", "m3-index-frames"])
def test_a_capsule_that_is_not_sound_is_not_extracted(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.capsule"
    path.write_bytes(next(vector for vector in vectors() if vector.name == name).build())
    for way in (extract, extract_sources):
        with pytest.raises(CapsuleError):
            way(path, tmp_path / "out")
    assert {item.name for item in tmp_path.iterdir()} == {"x.capsule"}


def test_a_source_whose_content_is_not_the_frozen_one_is_not_extracted(tmp_path: Path) -> None:
    """The container is sound, and the member's name what the list says; only its bytes are others."""
    path = tmp_path / "x.capsule"
    every = with_list(SOURCES, join_lines([file("a/b")]))
    path.write_bytes(seal({**every, CONTENT: every[CONTENT] + b"import os\n"}))
    with pytest.raises(BrokenError, match="with that content"):
        extract_sources(path, tmp_path / "out")
    assert {item.name for item in tmp_path.iterdir()} == {"x.capsule"}


def test_an_honest_tree_is_written(tmp_path: Path) -> None:
    """The same way with honest entries: what the tests above look for would be seen."""
    path = tmp_path / "x.capsule"
    entries = [file("a/b"), link("a/c", "b"), link("d", "a")]
    path.write_bytes(seal(with_list(SOURCES, join_lines(entries))))
    assert [*extract_sources(path, tmp_path / "out").names] == ["a/b"]
    assert links_outside(tmp_path / "out") == []
    assert links_outside(tmp_path / "out/a") == []
    (tmp_path / "out/e").symlink_to("../x.capsule")
    assert links_outside(tmp_path / "out") == [str(tmp_path / "out/e")]
    assert (tmp_path / "out/d/c").read_bytes() == golden()[CONTENT]
    assert io.BytesIO((tmp_path / "out/a/b").read_bytes()).read() == golden()[CONTENT]

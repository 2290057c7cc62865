"""The manifest: what was promised, the same bytes on any machine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from builders import PROTOCOL, SOURCES, edited, generation, lines_bytes, manifest_of, source_entries
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.core.canonical import canonical
from capsule.core.digest import digest_of
from capsule.core.errors import MalformedError
from capsule.core.manifest import (
    Manifest,
    SourceEntry,
    cells_bytes,
    list_digest,
    read_cells,
    read_sources,
    sources_bytes,
)
from capsule.core.plan import Cell, enumerate_cells

FILES = generation()
GOLDEN = "sha256:6ee00c543c214d06b3623444db5177ff79e296782347ddfede23683df88231e7"
"""Of the builders' protocol; only a deliberate change of the format may change it."""


def test_a_manifest_is_known_by_its_bytes() -> None:
    """M-01 M-02: reading and writing give the same bytes, and the identity is their digest."""
    manifest = manifest_of(FILES)
    assert manifest.to_bytes() == FILES["manifest.json"] == canonical(json.loads(FILES["manifest.json"]))
    assert manifest.identity == digest_of(FILES["manifest.json"])


def test_the_identity_of_a_protocol_never_changes() -> None:
    """M-02 M-03: the same protocol and sources have this identity for ever, on every machine."""
    assert manifest_of(generation()).identity == GOLDEN


def test_nothing_in_a_manifest_says_when_or_where() -> None:
    """M-03: the top level has these keys and no others; none is a time, a host, a user or an absolute path."""
    assert set(json.loads(FILES["manifest.json"])) == {
        "arms", "cells", "lock", "protocol", "protocol_file", "schema", "sources", "supersedes",
    }  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [("seeds = [5, 3, 4]", "seeds = [5, 4, 3]"), ("limit = 10", "limit = 10.0"), ("threshold = 0", "threshold = -0"),
     ("device_seconds = 300", "device_seconds = 301"), ("faster?", "faster? "),
     ('python = ">=3.11"', 'python = ">=3.12"')],
)  # fmt: skip
def test_every_change_of_the_protocol_changes_the_identity(change: tuple[str, str]) -> None:
    """M-02: not a digit of what was promised can change under the same identity."""
    assert manifest_of(generation(edited(change))).identity != manifest_of(FILES).identity


def test_a_comment_changes_the_file_and_not_its_meaning() -> None:
    """M-09: the protocol's own bytes are pinned as well as what they say."""
    one, other = manifest_of(FILES), manifest_of(generation(PROTOCOL + "# a comment\n"))
    assert one.protocol == other.protocol
    assert one.protocol_file != other.protocol_file
    assert one.identity != other.identity


@given(st.integers(0, len(FILES["manifest.json"]) * 8 - 1))
@settings(max_examples=200)
def test_a_flipped_bit_gives_another_identity_or_none(bit: int) -> None:
    """M-01 M-02: changed bytes are refused or are another manifest."""
    data = bytearray(FILES["manifest.json"])
    data[bit // 8] ^= 1 << bit % 8
    try:
        found = Manifest.from_bytes(bytes(data), "m")
    except MalformedError:
        return
    assert found.identity == digest_of(bytes(data)) != digest_of(FILES["manifest.json"])


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.update(schema="capsule.manifest/2"), lambda m: m.update(created="2030-01-01"),
        lambda m: m.pop("lock"),
        lambda m: m["protocol"].update(note=1), lambda m: m["protocol"]["gates"][0].update(limit=10),
        lambda m: m["protocol"]["gates"][0].update(limit="1_0"), lambda m: m["protocol"]["design"].pop("blocks"),
        lambda m: m["cells"].update(count="24"), lambda m: m["cells"].update(sha256="md5:00"),
    ],
)  # fmt: skip
def test_what_is_no_manifest(change: Any) -> None:
    """M-01: another version, unknown or absent keys, other types and other digests are refused."""
    value = json.loads(FILES["manifest.json"])
    change(value)
    with pytest.raises(MalformedError, match=r"^some/manifest.json: "):
        Manifest.from_bytes(lines_bytes([value])[:-1], "some/manifest.json")


def test_lists_round_trip_and_are_counted() -> None:
    """M-04 M-05 M-06: both lists read back as they were written; the manifest holds their count and digest."""
    cells, entries = read_cells(FILES["cells.jsonl"], "c"), read_sources(FILES["sources.jsonl"], "s")
    assert cells_bytes(cells) == FILES["cells.jsonl"]
    assert sources_bytes(entries) == FILES["sources.jsonl"]
    assert entries == source_entries()
    manifest = manifest_of(FILES)
    assert (manifest.cells, manifest.sources) == (
        list_digest(FILES["cells.jsonl"]),
        list_digest(FILES["sources.jsonl"]),
    )
    assert (manifest.cells.count, manifest.sources.count) == (24, len(SOURCES))
    assert [arm.sources for arm in manifest.arms] == [manifest.sources] * 2


@given(st.builds(Cell, *[st.text()] * 3, *[st.integers(0, 2**53 - 1)] * 5, st.none() | st.text()))
def test_a_cell_is_written_as_canonical_json(cell: Cell) -> None:
    """M-04: whatever its texts hold, a cell has the bytes that RFC 8785 gives it, and is read from them."""
    line = cells_bytes([cell])
    assert line == canonical(cell.to_json()) + b"\n"
    assert read_cells(line, "c") == [cell]


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (b'"block":0', b'"block":9007199254740992', "expected an integer below"),
        (b'"block":0', b'"block":0.0', "expected an integer or a decimal string"),
        (b'"block":0', b'"block":"0"', "block: Input should be a valid integer"),
        (b'"block":0', b'"block":true', "block: Input should be a valid integer"),
        (b'"block":0,', b"", "block: Field required"),
        (b'"block":0,', b'"block":0,"blot":0,', "blot: Unexpected keyword argument"),
        (b'"block":0,', b'"block":0,"block":0,', "expected unique keys"),
        (b'"block":0,', b'"block": 0,', "another spelling"),
        (b'"arm":"', b'"arm":"\\ud800', "lone surrogate"),
        (b'"arm":"', b'"arm":"\\u0061', "another spelling"),
        (b'"arm":"', b'"arm":"\xff', "expected UTF-8"),
        (b"{", b"[" * 40 + b"{", "at most 32 nested"),
        (b"{", b"", "expected JSON"),
    ],
)
def test_a_line_that_is_no_cell_is_refused(before: bytes, after: bytes, words: str) -> None:
    """M-04: a planned cell has one spelling, every field and no other, each of its type."""
    first, second, *_ = FILES["cells.jsonl"].splitlines(keepends=True)
    changed = second.replace(before, after, 1)
    assert changed != second
    with pytest.raises(MalformedError, match=rf"^c:2: .*{words}"):
        read_cells(first + changed, "c")
    with pytest.raises(MalformedError, match="a newline at the end"):
        read_cells(first + second[:-1], "c")
    planned = enumerate_cells(manifest_of(FILES).protocol)
    assert read_cells(iter([first[:9], first[9:] + second]), "c") == list(planned[:2])


@pytest.mark.parametrize("name", ["cells.jsonl", "sources.jsonl"])
@given(st.data())
@settings(max_examples=100)
def test_a_changed_list_has_another_digest(name: str, data: st.DataObject) -> None:
    """M-06: no line of a list can be dropped, doubled, moved or changed under the same count and digest."""
    lines = FILES[name].splitlines(keepends=True)
    one, other = data.draw(st.integers(0, len(lines) - 1)), data.draw(st.integers(0, len(lines) - 1))
    changed = {
        "drop": lines[:one] + lines[one + 1 :], "double": [*lines[:one], lines[one], *lines[one:]],
        "move": [*lines[:one], *lines[one + 1 :], lines[one]], "edit": [*lines[:one], lines[other], *lines[one + 1 :]],
    }[data.draw(st.sampled_from(["drop", "double", "move", "edit"]))]  # fmt: skip
    if changed != lines:
        assert list_digest(b"".join(changed)) != list_digest(FILES[name])


def source(path: str, **changes: Any) -> dict[str, Any]:
    """Return a line of a source list."""
    line = {
        "path": path,
        "kind": "file",
        "mode": "0644",
        "size": 1,
        "sha256": digest_of(b""),
        "target": None,
        "blob": None,
    }
    return {**line, "notes": [], **changes}


@given(st.text(), st.text(), st.text())
@settings(max_examples=200)
def test_any_source_is_written_as_canonical_json(path: str, target: str, note: str) -> None:
    """M-05: the models' own encoder spells what RFC 8785 does."""
    for line in (source(path, notes=[note]), source(path, kind="link", mode=None, target=target, blob="a" * 40)):
        entry = SourceEntry.model_validate_json(canonical(line))
        assert sources_bytes([entry]) == canonical(line) + b"\n"


def test_paths_are_in_the_order_of_their_bytes() -> None:
    """M-05: paths that are not UTF-8 stand among the others by their own bytes."""
    lines = [source("B"), source("a"), source("a/b"), source("b"), source("hex:62ff"), source("ä"), source("hex:ff")]
    assert [entry.path for entry in read_sources(lines_bytes_utf8(lines), "s")] == [line["path"] for line in lines]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([source("b"), source("a")], "s:2: expected paths in byte order, each once, found 'a'"),
        ([source("a"), source("a", mode="0755")], "s:2: expected paths in byte order"),
        ([source("hex:ff"), source("z")], "s:2: expected paths in byte order"),
        ([source("hex:f")], "s:1: expected `hex:` and the bytes of a path"),
        ([source("a", kind="link")], "s:1: expected a mode of every file and a target of every link"),
        ([source("a", target="b")], "s:1: expected a mode of every file and a target of every link"),
        ([source("a", kind="link", target="b")], "s:1: expected a mode of every file and a target of every link"),
        ([source("a", mode="0777")], "s:1: mode: Input should be"),
        ([source("a", blob="0" * 39)], "s:1: blob: String should match"),
        ([source("a", mtime=0)], "s:1: mtime: Extra inputs"),
    ],
)
def test_what_is_no_list_of_sources(lines: list[dict[str, Any]], words: str) -> None:
    """M-05: a path is there once and in order, a file has a mode, a link a target, and nothing else is recorded."""
    with pytest.raises(MalformedError) as caught:
        read_sources(lines_bytes_utf8(lines), "s")
    assert str(caught.value).startswith(words)


def lines_bytes_utf8(lines: list[dict[str, Any]]) -> bytes:
    """Return canonical lines of values with any text."""
    return b"".join(canonical(line) + b"\n" for line in lines)


def test_arms_of_another_revision_have_a_list_of_their_own() -> None:
    """M-07: an arm with a revision names the list of that revision, and the others that of the work tree."""
    revision = "a" * 40
    files = generation(
        edited(('name = "builtin"\n', f'name = "builtin"\nrevision = "{revision}"\n'), ('"start"', '"cell"'))
    )
    arms = manifest_of(files).arms
    assert [arm.revision for arm in arms] == [None, revision]
    assert arms[1].sources == list_digest(files[f"sources-{revision}.jsonl"]) != arms[0].sources

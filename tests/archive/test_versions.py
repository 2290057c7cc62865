"""A container of a newer minor version is read, its further members too; one of another major version is refused."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from container_forge import HEADER, MANIFEST, RESULTS, checksums, forge

from capsule.archive import layout
from capsule.archive.access import open_member
from capsule.archive.reader import examine
from capsule.core.errors import MalformedError

LATER = ("8-weather/rain.json", b"{}")
FURTHER = ("8-plots/ratio.svg", b"<svg/>")


def container(version: bytes, *members: tuple[str, bytes]) -> bytes:
    """Return a container whose header names another version."""
    header = (HEADER[0], HEADER[1].replace(b"archive/1", b"archive/" + version))
    present = [header, *sorted([MANIFEST, RESULTS, *members])]
    return forge(present=[*present, ("9-SHA256SUMS", checksums(present))])


@pytest.mark.parametrize("version", [b"1.1", b"1.999"])
def test_a_newer_minor_version_may_have_further_members(version: bytes, tmp_path: Path) -> None:
    """F-03 C-11 C-13: they are read and hashed like others, also by name."""
    data = container(version, LATER, FURTHER)
    found = examine(io.BytesIO(data), keep=lambda name, _size: name == FURTHER[0])
    assert found.findings == ()
    assert found.sealed is not None
    assert found.kept == {FURTHER[0]: FURTHER[1]}
    path = tmp_path / "x.capsule"
    path.write_bytes(data)
    assert open_member(path, LATER[0]) == LATER[1]


@pytest.mark.parametrize("member", [LATER, FURTHER])
def test_this_version_has_only_its_own_members(member: tuple[str, bytes]) -> None:
    """F-04 C-11: the same members without a newer version are a finding each."""
    found = examine(io.BytesIO(container(b"1", member)))
    assert "C-11" in {finding.code for finding in found.findings}


@pytest.mark.parametrize(
    "name",
    [
        "8-plots/../x",
        "8-plots/.x",
        "8-plots//x",
        "8-plots",
        "8-plots/a/b",
        "8-README/x",
        "8-Plots/x",
        "7-results/x",
        "1-manifest/001/x",
        "plots/x",
    ],
)
def test_a_newer_version_may_not_name_anything(name: str) -> None:
    """C-11: no name leads out of a folder, and none is hidden."""
    found = examine(io.BytesIO(container(b"1.1", (name, b"x"))))
    assert "C-11" in {finding.code for finding in found.findings}


@pytest.mark.parametrize("place", range(len(HEADER[1])))
def test_a_minor_version_stands_in_one_place_only(place: int) -> None:
    """C-13: anywhere else it is another header."""
    header = HEADER[1][:place] + b".1" + HEADER[1][place:]
    assert layout.is_newer_header(header) is (True if header == HEADER[1].replace(b"ive/1", b"ive/1.1") else None)


@pytest.mark.parametrize("version", [b"2", b"0", b"2.1", b"12"])
def test_another_major_version_is_refused_in_words(version: bytes) -> None:
    """F-02: both versions are named; such a file is not called broken."""
    with pytest.raises(MalformedError, match=f"expected capsule-archive/1, found capsule-archive/{version.decode()}"):
        examine(io.BytesIO(container(version)))

"""Member names and the lines of the lists inside a container, as data.

Every name that can occur is matched by one pattern below; members stand in strictly increasing byte order, which
forbids duplicates. The lists (`9-SHA256SUMS`, `9-TABLE`) have one byte string for what they describe.
"""

from __future__ import annotations

import re

from capsule.core.canonical import canonical_line
from capsule.core.digest import HEX_PATTERN
from capsule.core.version import MAJOR, MINOR_PATTERN, refuse_other_major

HEADER = "0-header.json"
SUMS = "9-SHA256SUMS"
TABLE = "9-TABLE"

NAME_PATTERNS = (
    r"0-header\.json",
    r"1-manifest/[0-9]{3}/(cells\.jsonl|manifest\.json((\.[2-9])?\.sig|\.tsr)?|protocol\.toml|sources(-[0-9a-f]{40,64})?\.jsonl)",
    r"2-ledger\.(head\.json|jsonl)",
    r"3-attempts/a[0-9]{6}/(environment\.json|journal\.jsonl|provenance\.jsonl|redactions\.jsonl|stderr|stdout|telemetry\.jsonl)",
    r"4-records/(rows|telemetry)\.parquet",
    rf"5-sources/{HEX_PATTERN}",
    rf"6-oracles/{HEX_PATTERN}",
    r"7-results/results\.json",
    r"8-README/(CITATION\.cff|VERIFY\.md)",
    r"9-SHA256SUMS",
    r"9-TABLE",
)
OWN_NAMES = frozenset({HEADER, SUMS, TABLE})
"""Members that the container itself writes; callers add the others."""

FRAME_SIZE = 1 << 21
"""Raw bytes of a frame (C-07)."""
FORMAT = f"capsule-archive/{MAJOR}"
HEADER_BYTES = canonical_line({"digest": "sha256", "format": FORMAT, "frame_size_bytes": FRAME_SIZE})
HEADER_SIZE_MAX = 4096
"""Bytes of a header that are looked at."""
IDENTITY_TAG = f"{FORMAT}\n".encode()
"""Goes before the member lines in the digest that is the identity (C-22)."""
CONTAINER_TAG = f"capsule-container/{MAJOR}\n".encode()
LINE_SIZE_MAX = 512

_BEFORE, _FORMAT_END, _AFTER = HEADER_BYTES.partition(f'{FORMAT}"'.encode())
_HEADER = re.compile(
    re.escape(_BEFORE + _FORMAT_END[:-1]) + MINOR_PATTERN.encode() + re.escape(_FORMAT_END[-1:] + _AFTER)
)
_FORMAT = re.compile(rb'"format":"(capsule-archive/[0-9.]+)"')
_NAME = re.compile("|".join(f"(?:{pattern})" for pattern in NAME_PATTERNS))
_LATER_NAME = re.compile(r"8-[a-z][a-z0-9-]{0,30}/[A-Za-z0-9][A-Za-z0-9._-]{0,60}")
_MEMBER_LINE = re.compile(rf'\["([^"\\]+)",(0|[1-9][0-9]{{0,15}}),"({HEX_PATTERN})"\]\n'.encode())
_ENCODER_LINE = re.compile(rb'\["zstd","((?:0|[1-9][0-9]?)(?:\.(?:0|[1-9][0-9]?)){2})",([1-9]|1[0-9])\]\n')
_FRAME_LINE = re.compile(
    rf'\[(0|[1-9][0-9]{{0,9}}),(0|[1-9][0-9]{{0,15}}),([1-9][0-9]{{0,9}}),([1-9][0-9]{{0,9}}),"({HEX_PATTERN})"\]\n'.encode()
)


def is_allowed(name: str, *, newer: bool = False) -> bool:
    """Whether a member may have this name, in this minor version of the format or in a newer one (C-11)."""
    return _NAME.fullmatch(name) is not None or (newer and _LATER_NAME.fullmatch(name) is not None)


def is_newer_header(header: bytes) -> bool | None:
    """Whether a header names a newer minor version of this format; None if it is no header of the format (C-13).

    Raises:
        MalformedError: it names another major version.
    """
    if named := _FORMAT.search(header):
        refuse_other_major(named[1].decode("ascii"), HEADER)
    match = _HEADER.fullmatch(header)
    return match[1] is not None if match else None


def member_line(name: str, size: int, digest_hex: str) -> bytes:
    """Return the canonical JSON line of a member; an allowed name needs no escapes."""
    return f'["{name}",{size},"{digest_hex}"]\n'.encode("ascii")


def sums_line(name: str, digest_hex: str) -> bytes:
    """Return the line of a member as `sha256sum` writes and checks it."""
    return f"{digest_hex}  {name}\n".encode("ascii")


def encoder_line(library: str, level: int) -> bytes:
    """Return the line that records how the frames were compressed."""
    return f'["zstd","{library}",{level}]\n'.encode("ascii")


def frame_line(number: int, offset: int, size: int, raw_size: int, digest_hex: str) -> bytes:
    """Return the canonical JSON line of a frame: its place and length in the file, raw length, digest of its bytes."""
    return f'[{number},{offset},{size},{raw_size},"{digest_hex}"]\n'.encode("ascii")


def parse_member_line(line: bytes) -> tuple[str, int, str] | None:
    """Return name, size and hexadecimal digest, or nothing if this is not the line of a member."""
    match = _MEMBER_LINE.fullmatch(line)
    if match is None or not is_allowed(name := match[1].decode("latin-1"), newer=True):
        return None
    return name, int(match[2]), match[3].decode("ascii")


def parse_encoder_line(line: bytes) -> tuple[str, int] | None:
    """Return library version and level, or nothing if this is not that line."""
    match = _ENCODER_LINE.fullmatch(line)
    return (match[1].decode("ascii"), int(match[2])) if match else None


def parse_frame_line(line: bytes) -> tuple[int, int, int, int, bytes] | None:
    """Return number, offset, size, raw size and digest, or nothing if this is not the line of a frame."""
    match = _FRAME_LINE.fullmatch(line)
    if match is None:
        return None
    return int(match[1]), int(match[2]), int(match[3]), int(match[4]), bytes.fromhex(match[5].decode("ascii"))

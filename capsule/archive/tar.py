"""The one canonical tar header of a member, and a reader that accepts no other.

A header is a function of name and size. Reading takes both from the bytes, encodes the canonical header again and
compares (C-08), so there is no field to interpret and nothing for two readers to disagree about.
"""

from __future__ import annotations

import re
import zlib

from capsule.archive.model import fault, shown

BLOCK = 512
END = bytes(2 * BLOCK)
"""The two zero blocks that end a tar."""
NAME_SIZE_MAX = 100
USTAR_SIZE_MAX = 8**11 - 1
SIZE_MAX = 2**53 - 1
PAX_NAME = "PaxHeader"
MTIME = 315_532_800  # 1980-01-01; zero upsets tools

_FIELDS = (
    ("name", 0), ("mode", 100), ("uid", 108), ("gid", 116), ("size", 124), ("mtime", 136), ("checksum", 148),
    ("typeflag", 156), ("linkname", 157), ("magic", 257), ("uname", 265), ("gname", 297), ("devmajor", 329),
    ("devminor", 337), ("prefix", 345), ("padding", 500),
)  # fmt: skip
_BEFORE_SIZE = b"0000644\0" + b"0000000\0" * 2
_MTIME = b"%011o\0" % MTIME
_AFTER_TYPE = bytes(100) + b"ustar\0" + b"00" + bytes(64) + b"0000000\0" * 2 + bytes(167)
_SUM = sum(_BEFORE_SIZE) + sum(_MTIME) + sum(_AFTER_TYPE) + 8 * ord(" ")
_HEADER = b"%b" + _BEFORE_SIZE + b"%b\0" + _MTIME + b"%06o\0 %b" + _AFTER_TYPE
assert (NAME_SIZE_MAX + 12) * 0xFF < 65_521
_OCTAL = re.compile(rb"[0-7]{11}")
_SIZE_RECORD = re.compile(rb"[0-9]{2} size=([1-9][0-9]{9,15})\n")


def encode(name: str, size: int) -> bytes:
    """Return the header of a member: 512 bytes, or 1,536 where the size does not fit a ustar field (from 8 GiB)."""
    assert 0 < len(name) <= NAME_SIZE_MAX, name
    assert 0 <= size <= SIZE_MAX, size
    if size <= USTAR_SIZE_MAX:
        return _ustar(name, size, b"0")
    body = b" size=%d\n" % size
    record = b"%d%b" % (len(body) + 2, body)
    return _ustar(PAX_NAME, len(record), b"x") + record.ljust(BLOCK, b"\0") + _ustar(name, 0, b"0")


def header_size(size: int) -> int:
    """Return the length of the header of a member of `size` bytes."""
    return BLOCK if size <= USTAR_SIZE_MAX else 3 * BLOCK


def padding_size(size: int) -> int:
    """Return how many zero bytes follow a member of `size` bytes."""
    return -size % BLOCK


def is_extended(block: bytes) -> bool:
    """Whether two more blocks belong to the header that begins with `block`."""
    return block[156:157] == b"x"


def decode(header: bytes, offset: int) -> tuple[str, int]:
    """Return name and size from a header of one block (or three, see `is_extended`).

    The name is one character a byte and may be any; `layout` judges it.

    Raises:
        ContainerError: the bytes are not the canonical header of any name and size (C-08).
    """
    last = header[-BLOCK:]
    name = last[:NAME_SIZE_MAX].split(b"\0", 1)[0].decode("latin-1")
    size = _claimed_size(header)
    if not name or size is None or size > SIZE_MAX:
        what = "size" if name else "name"
        raise fault(
            "C-08", offset, f"expected a canonical tar header, found no valid {what} in it", shown(name) or None
        )
    expected = encode(name, size)
    if expected != header:
        field = _first_difference(header, expected)
        raise fault("C-08", offset, f"expected the canonical tar header, found another {field}", shown(name))
    return name, size


def _ustar(name: str, size: int, typeflag: bytes) -> bytes:
    raw = name.encode("latin-1")
    digits = b"%011o" % size
    # The low half of Adler-32 from zero is the sum of the bytes, as long as that stays below 65,521; see `_HEADER`.
    checksum = _SUM + (zlib.adler32(raw + digits + typeflag, 0) & 0xFFFF)
    return _HEADER % (raw.ljust(NAME_SIZE_MAX, b"\0"), digits, checksum, typeflag)


def _claimed_size(header: bytes) -> int | None:
    if len(header) > BLOCK:
        match = _SIZE_RECORD.match(header, BLOCK)
        return int(match[1]) if match else None
    digits = header[124:135]
    return int(digits, 8) if _OCTAL.fullmatch(digits) else None


def _first_difference(found: bytes, expected: bytes) -> str:
    if len(found) != len(expected):
        return "form: a PAX header where the size fits without"
    at = next(index for index, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1])
    if BLOCK <= at < 2 * BLOCK:
        return "PAX record"
    return max((start, field) for field, start in _FIELDS if start <= at % BLOCK)[1]

"""A timestamp reply of RFC 3161 read: over which digest it is, and the time that it claims; nothing is computed.

Whether an authority signed it, only a checker that is handed in says (`capsule.core.signing`). Just so much of its DER
is read as S-08 of `docs/spec/signatures.md` names; the rest is left to that checker.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime

from capsule.core.digest import PREFIX
from capsule.core.errors import MalformedError

SIZE_MAX = 64 << 10
"""Bytes of a token; one with a chain of three certificates has about 6,000."""

SEQUENCE, SET, INTEGER, OCTETS, OID, TIME, CONTEXT_0 = 0x30, 0x31, 0x02, 0x04, 0x06, 0x18, 0xA0
SIGNED_DATA = bytes.fromhex("2a864886f70d010702")
TIMESTAMP_INFO = bytes.fromhex("2a864886f70d0109100104")
SHA256 = bytes.fromhex("608648016503040201")

_TIME = re.compile(rb"([0-9]{4})([0-9]{2})([0-9]{2})([01][0-9]|2[0-3])([0-9]{2})([0-9]{2})(\.[0-9]{0,5}[1-9])?Z")


@dataclass(frozen=True, slots=True)
class Token:
    """What a token says of itself: the digest that it is over, and its time (RFC 3339)."""

    imprint: str
    time: str

    @property
    def moment(self) -> datetime:
        """The time as a moment."""
        return datetime.fromisoformat(self.time)


class _NotDerError(Exception):
    """Bytes are not what S-08 allows at that place."""


def read_token(data: bytes, where: str) -> Token:
    """Read a timestamp reply.

    Raises:
        MalformedError: it is too large, not DER, not granted, or not a token over a SHA-256.
    """
    if len(data) > SIZE_MAX:
        raise MalformedError(f"{where}: expected a token of at most {SIZE_MAX} bytes, found {len(data)}")
    try:
        return _token(data)
    except _NotDerError as error:
        raise MalformedError(f"{where}: expected a timestamp reply of RFC 3161, found {error}") from error


def as_reply(data: bytes) -> bytes:
    """Return a bare token as the granted reply that holds it; everything else as it is."""
    try:
        (content,) = _elements(data)
        if content[0] == SEQUENCE and _elements(content[1])[0] == (OID, SIGNED_DATA):
            body = bytes.fromhex("3003020100") + data
            size = len(body).to_bytes(4, "big").lstrip(b"\0")
            return bytes([SEQUENCE, *([len(body)] if len(body) < 128 else [0x80 | len(size), *size])]) + body
    except (_NotDerError, ValueError, IndexError):
        pass
    return data


def _token(data: bytes) -> Token:
    status, content = _exactly(_only(data, SEQUENCE), SEQUENCE, SEQUENCE)
    if _leading(status, INTEGER) not in ([b"\0"], [b"\1"]):
        raise _NotDerError("one that the authority did not grant")
    kind, signed = _exactly(content, OID, CONTEXT_0)
    if kind != SIGNED_DATA:
        raise _NotDerError("another content than signed data")
    *_, inner = _leading(_only(signed, SEQUENCE), INTEGER, SET, SEQUENCE)
    kind, octets = _exactly(inner, OID, CONTEXT_0)
    if kind != TIMESTAMP_INFO:
        raise _NotDerError("signed data that is no timestamp")
    info = _only(_only(octets, OCTETS), SEQUENCE)
    version, _, imprint, _, time = _leading(info, INTEGER, OID, SEQUENCE, INTEGER, TIME)
    if version != b"\1":
        raise _NotDerError("a timestamp of another version than 1")
    algorithm, digest = _exactly(imprint, SEQUENCE, OCTETS)
    if _leading(algorithm, OID) != [SHA256] or len(digest) != 32:
        raise _NotDerError("one over another digest than SHA-256")
    return Token(PREFIX + digest.hex(), _time(time))


def _time(text: bytes) -> str:
    match = _TIME.fullmatch(text)
    if match is None:
        raise _NotDerError(f"the time {text[:40]!r}")
    year, month, day, hour, minute, second, fraction = (part.decode() if part else "" for part in match.groups())
    written = f"{year}-{month}-{day}T{hour}:{minute}:{second}{fraction}Z"
    try:
        datetime.fromisoformat(written)
    except ValueError as error:
        raise _NotDerError(f"the time {written}, which does not exist") from error
    return written


def _elements(data: bytes) -> list[tuple[int, bytes]]:
    """Cut bytes into DER elements: one byte of tag, a definite length in its shortest form, the content."""
    found = []
    at = 0
    while at < len(data):
        if len(data) - at < 2 or data[at] & 0x1F == 0x1F:
            raise _NotDerError("bytes that are not DER")
        tag, size = data[at], data[at + 1]
        at += 2
        if size >= 0x80:
            count = size - 0x80
            written = data[at : at + count]
            size = int.from_bytes(written, "big")
            if not 1 <= count <= 4 or len(written) != count or written[0] == 0 or size < 0x80:
                raise _NotDerError("a length that is not DER")
            at += count
        if size > len(data) - at:
            raise _NotDerError("an element that is cut")
        found.append((tag, data[at : at + size]))
        at += size
    return found


def _leading(data: bytes, *tags: int) -> list[bytes]:
    """Return the contents of the first elements, which must have these tags."""
    found = _elements(data)
    if tuple(tag for tag, _ in found[: len(tags)]) != tags:
        raise _NotDerError("other elements than those of a timestamp")
    return [content for _, content in found[: len(tags)]]


def _exactly(data: bytes, *tags: int) -> list[bytes]:
    """Return the contents of all elements, which must be these."""
    if len(_elements(data)) != len(tags):
        raise _NotDerError("other elements than those of a timestamp")
    return _leading(data, *tags)


def _only(data: bytes, tag: int) -> bytes:
    return _exactly(data, tag)[0]

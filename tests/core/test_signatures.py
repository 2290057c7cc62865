"""Signature files and timestamp replies read: the one form that each has, and everything else refused in words."""

from __future__ import annotations

import base64
import hashlib
import re
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.core.errors import MalformedError
from capsule.core.sshsig import KEY_TYPES, SIGNATURES_MAX, SIZE_MAX, archive_message, read_signature, signature_name
from capsule.core.tokens import SIGNED_DATA, TIMESTAMP_INFO, as_reply, read_token
from tests.signatures import Authority, Key, call

SPEC = (Path(__file__).parents[2] / "docs" / "spec" / "signatures.md").read_text(encoding="utf-8")
NAMESPACE = "capsule-manifest"


def text(*parts: bytes) -> bytes:
    """SSH strings: the length in four bytes, then the content."""
    return b"".join(struct.pack(">I", len(part)) + part for part in parts)


def armoured(blob: bytes, width: int = 70) -> bytes:
    lines = base64.b64encode(blob)
    cut = b"".join(lines[at : at + width] + b"\n" for at in range(0, len(lines), width))
    return b"-----BEGIN SSH SIGNATURE-----\n" + cut + b"-----END SSH SIGNATURE-----\n"


KEY = text(b"ssh-ed25519", bytes(32))
SIGNATURE = text(b"ssh-ed25519", bytes(64))
FIELDS = [KEY, NAMESPACE.encode(), b"", b"sha512", SIGNATURE]


def blob(*fields: bytes, magic: bytes = b"SSHSIG\0\0\0\1") -> bytes:
    return magic + text(*(fields or FIELDS))


def changed(place: int, value: bytes) -> bytes:
    return armoured(blob(*FIELDS[:place], value, *FIELDS[place + 1 :]))


GOOD = armoured(blob())
PADDED = armoured(blob(*FIELDS[:4], text(b"x", b"a")))
assert PADDED.count(b"E=\n") == 1
FAULTY = {
    "empty": b"",
    "too large": GOOD + b"\n" * SIZE_MAX,
    "bytes before": b"\n" + GOOD,
    "bytes after": GOOD + b"x",
    "two newlines at the end": GOOD + b"\n",
    "carriage returns": GOOD.replace(b"\n", b"\r\n"),
    "no begin": GOOD.replace(b"BEGIN", b"BEGUN"),
    "no end": GOOD.partition(b"-----END")[0],
    "no lines": b"-----BEGIN SSH SIGNATURE-----\n-----END SSH SIGNATURE-----\n",
    "empty line": GOOD.replace(b"-----\n", b"-----\n\n", 1),
    "line of 101": armoured(blob(), 101),
    "not base64": GOOD.replace(b"U1NI", b"U1N!"),
    "bits left over": PADDED.replace(b"E=\n", b"F=\n"),
    "no padding": PADDED.replace(b"=\n", b"\n"),
    "too much padding": PADDED.replace(b"=\n", b"==\n"),
    "padding within": PADDED.replace(b"\n", b"=\n", 2),
    "magic": armoured(blob(magic=b"SSHSIH\0\0\0\1")),
    "version 2": armoured(blob(magic=b"SSHSIG\0\0\0\2")),
    "four strings": armoured(blob(*FIELDS[:4])),
    "six strings": armoured(blob(*FIELDS, b"")),
    "a cut string": armoured(blob()[:-1]),
    "a cut length": armoured(blob() + b"\0\0"),
    "reserved": changed(2, b"x"),
    "hash sha1": changed(3, b"sha1"),
    "hash empty": changed(3, b""),
    "signature empty": changed(4, b""),
    "signature of an empty string": changed(4, text(b"", bytes(64))),
    "signature of a cut string": changed(4, b"\0\0\0\xffssh"),
    "key empty": changed(0, b""),
    "key dss": changed(0, text(b"ssh-dss", bytes(32))),
    "key certificate": changed(0, text(b"ssh-ed25519-cert-v01@openssh.com", bytes(32))),
    "key of a cut string": changed(0, b"\0\0\0\xffssh-ed25519"),
}


def test_names() -> None:
    """S-01 S-02: the first signature has no number, the others 2 to 9; a capsule's is over its identity, a newline."""
    names = [signature_name("study.capsule", number) for number in range(1, SIGNATURES_MAX + 1)]
    assert names == ["study.capsule.sig", *(f"study.capsule.{number}.sig" for number in range(2, 10))]
    assert archive_message("sha256:" + "0" * 64) == b"sha256:" + b"0" * 64 + b"\n"


@pytest.mark.parametrize("data", FAULTY.values(), ids=FAULTY)
def test_faulty_signatures(data: bytes) -> None:
    """S-03 S-04 S-05: whatever is not the one form of a signature file is refused, and its name is said."""
    with pytest.raises(MalformedError, match=r"^here: expected "):
        read_signature(data, "here")


def test_a_signature_is_read() -> None:
    """S-03 S-05: the last newline may lack; the key has the name that ssh-keygen prints."""
    fingerprint = base64.b64encode(hashlib.sha256(KEY).digest()).decode().rstrip("=")
    for data in (GOOD, GOOD[:-1], armoured(blob(), 1), armoured(blob(), 100)):
        found = read_signature(data, "here")
        assert (found.key_type, found.key, found.namespace) == ("ssh-ed25519", f"SHA256:{fingerprint}", NAMESPACE)


def test_the_types_of_keys_are_those_of_the_document() -> None:
    """S-05: the document lists the types that are read, and each of them is."""
    listed = SPEC.partition("- **S-05**")[2].partition("there are")[0]
    assert sorted(KEY_TYPES) == sorted(name for name in listed.split("`") if name.startswith(("ssh-", "ecdsa-", "sk-")))
    for name in KEY_TYPES:
        assert read_signature(changed(0, text(name.encode(), bytes(32))), "here").key_type == name


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa", "rsa"])
def test_signatures_of_ssh_keygen_are_read(kind: str, tmp_path: Path) -> None:
    """S-03 S-04 S-05: what ssh-keygen writes has this form, and the key has the name that ssh-keygen says."""
    key = Key.make(tmp_path / "key", kind)
    found = read_signature(key.sign(b"message", "other"), "here")
    said = call("ssh-keygen", "-l", "-f", tmp_path / "key.pub").decode()
    assert found.key == said.split()[1]
    assert found.namespace == "other"


@settings(max_examples=300)
@given(st.integers(0, len(GOOD) - 1), st.integers(1, 255))
def test_a_changed_signature_is_another_or_none(at: int, flip: int) -> None:
    """S-03: no two files are the same signature."""
    data = bytearray(GOOD)
    data[at] ^= flip
    try:
        read_signature(bytes(data), "here")
    except MalformedError:
        return
    body = b"".join(bytes(data).splitlines()[1:-1])
    assert base64.b64decode(body) != blob()


# --- tokens ---------------------------------------------------------------------------------------------------------


def der(tag: int, *contents: bytes) -> bytes:
    content = b"".join(contents)
    size = len(content).to_bytes(4, "big").lstrip(b"\0") or b"\0"
    length = bytes([len(content)]) if len(content) < 128 else bytes([0x80 | len(size)]) + size
    return bytes([tag]) + length + content


SEQUENCE, SET, INTEGER, OCTETS, OID, TIME, ZERO = 0x30, 0x31, 0x02, 0x04, 0x06, 0x18, 0xA0
SHA256, SHA512 = bytes.fromhex("608648016503040201"), bytes.fromhex("608648016503040203")
DIGEST = hashlib.sha256(b"data").digest()


def reply(
    *, status: bytes = b"\0", kind: bytes = SIGNED_DATA, version: bytes = b"\1", hash_name: bytes = SHA256,
    digest: bytes = DIGEST, time: bytes = b"20300101000000Z", inner: bytes = TIMESTAMP_INFO,
    wrap: Callable[[bytes], bytes] = bytes, more: bytes = b"", info_more: bytes = b"",
) -> bytes:  # fmt: skip
    """Build a reply by hand, whose signature nobody could check."""
    imprint = der(SEQUENCE, der(SEQUENCE, der(OID, hash_name), b"\5\0"), der(OCTETS, digest))
    info = der(
        SEQUENCE, der(INTEGER, version), der(OID, b"\x2a\3"), imprint, der(INTEGER, b"\1"), der(TIME, time), info_more
    )
    encapsulated = der(SEQUENCE, der(OID, inner), der(ZERO, der(OCTETS, wrap(info))))
    signed = der(SEQUENCE, der(INTEGER, b"\3"), der(SET), encapsulated, der(SET))
    return der(SEQUENCE, der(SEQUENCE, der(INTEGER, status)), der(SEQUENCE, der(OID, kind), der(ZERO, signed)), more)


FAULTY_TOKENS = {
    "empty": b"",
    "too large": reply(info_more=der(OCTETS, bytes(SIZE_MAX))),
    "rejected": reply(status=b"\2"),
    "status of two bytes": reply(status=b"\0\0"),
    "bytes after": reply() + b"\0",
    "element after": reply() + der(INTEGER, b"\0"),
    "cut": reply()[:-1],
    "a third element": reply(more=der(INTEGER, b"\0")),
    "no signed data": reply(kind=bytes.fromhex("2a864886f70d010701")),
    "no timestamp": reply(inner=bytes.fromhex("2a864886f70d010701")),
    "bytes after the timestamp": reply(wrap=lambda info: info + b"\0"),
    "version 2": reply(version=b"\2"),
    "sha512": reply(hash_name=SHA512),
    "digest of 31 bytes": reply(digest=DIGEST[:-1]),
    "day 30 of February": reply(time=b"20300230000000Z"),
    "hour 24": reply(time=b"20300101240000Z"),
    "second 60": reply(time=b"20301231235960Z"),
    "year 0": reply(time=b"00000101000000Z"),
    "fraction that ends in 0": reply(time=b"20300101000000.10Z"),
    "fraction of nothing": reply(time=b"20300101000000.Z"),
    "fraction of seven digits": reply(time=b"20300101000000.1234567Z"),
    "zone": reply(time=b"20300101000000+0100"),
    "no zone": reply(time=b"20300101000000"),
    "no seconds": reply(time=b"203001010000Z"),
    "indefinite length": b"\x30\x80" + reply()[4:] + b"\0\0",
    "long length": reply()[:1] + b"\x83\0" + reply()[2:],
    "tag of two bytes": reply(info_more=b"\x1f\x81\0"),
    "other tag": b"\x31" + reply()[1:],
}


@pytest.mark.parametrize("data", FAULTY_TOKENS.values(), ids=FAULTY_TOKENS)
def test_faulty_tokens(data: bytes) -> None:
    """S-08 S-09: whatever is not a granted reply over a SHA-256, in DER, is refused, and its name is said."""
    with pytest.raises(MalformedError, match=r"^here: expected "):
        read_token(data, "here")


@pytest.mark.parametrize(
    ("written", "time"),
    [(b"20300101000000Z", "2030-01-01T00:00:00Z"), (b"20280229235959.000001Z", "2028-02-29T23:59:59.000001Z")],
)
def test_a_token_is_read(written: bytes, time: str) -> None:
    """S-08 S-09: the digest and the time of a token; granted with changes counts as granted."""
    for status in (b"\0", b"\1"):
        found = read_token(reply(status=status, time=written), "here")
        assert (found.imprint, found.time) == ("sha256:" + DIGEST.hex(), time)


def test_tokens_of_openssl_are_read(tmp_path: Path) -> None:
    """S-08: what an authority answers is read; a bare token is the reply that holds it."""
    authority = Authority.make(tmp_path / "tsa")
    stamped = authority.stamp(b"data")
    found = read_token(stamped, "here")
    assert found.imprint == "sha256:" + DIGEST.hex()
    call("openssl", "ts", "-reply", "-in", "reply", "-token_out", "-out", "token", folder=authority.folder)
    bare = (authority.folder / "token").read_bytes()
    with pytest.raises(MalformedError):
        read_token(bare, "here")
    assert read_token(as_reply(bare), "here") == found
    assert as_reply(stamped) == stamped
    with pytest.raises(MalformedError, match="another digest"):
        read_token(authority.stamp(b"data", "sha512"), "here")


@settings(max_examples=500)
@given(st.data())
def test_any_bytes_are_read_or_refused(data: st.DataObject) -> None:
    """S-08: a reply with bytes changed, cut or added is read or refused, and nothing else happens."""
    raw = bytearray(reply())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
        if not raw:
            break
    for content in (bytes(raw), as_reply(bytes(raw))):
        try:
            found = read_token(content, "here")
        except MalformedError:
            continue
        assert re.fullmatch(r"sha256:[0-9a-f]{64}", found.imprint)

"""Vectors of signatures and tokens."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from pathlib import Path

from capsule.core.digest import digest_of
from tests.attacks.vectors import (
    MANIFEST,
    Vector,
    sealed,
    with_member,
)

SEEDS = Path(__file__).parents[1] / "fuzz/seeds"


def signature_vectors() -> Iterator[Vector]:
    """Signatures and tokens that are none, each beside a manifest (S-03 to S-05, S-08, S-09)."""
    good = (SEEDS / "ed25519.sig").read_bytes()
    begin, *lines, end = good.splitlines(keepends=True)
    blob = base64.b64decode(b"".join(lines))

    def armoured(content: bytes) -> bytes:
        return begin + wrapped(content) + end

    def strings(*parts: bytes) -> bytes:
        return b"".join(struct.pack(">I", len(part)) + part for part in parts)

    key = strings(b"ssh-ed25519", bytes(32))
    made = strings(b"ssh-ed25519", bytes(64))
    sig = b"SSHSIG\0\0\0\1"
    name = b"capsule-manifest"
    armours: dict[str, tuple[str, bytes]] = {
        "empty": ("S-03", b""),
        "text-before": ("S-03", b"x\n" + good),
        "text-after": ("S-03", good + b"x"),
        "twice": ("S-03", good * 2),
        "carriage-returns": ("S-03", good.replace(b"\n", b"\r\n")),
        "no-end": ("S-03", b"".join([begin, *lines])),
        "no-content": ("S-03", begin + end),
        "line-too-long": ("S-03", begin + b"A" * 101 + b"\n" + end),
        "bits-left-over": ("S-03", begin + b"AB==\n" + end),
        "not-padded": ("S-03", begin + b"AAA\n" + end),
        "padded-inside": ("S-03", begin + b"AA==\nAAAA\n" + end),
        "too-large": ("S-03", begin + (b"A" * 100 + b"\n") * 700 + end),
        "magic": ("S-04", armoured(b"SSHSIC" + blob[6:])),
        "version-2": ("S-04", armoured(b"SSHSIG\0\0\0\2" + blob[10:])),
        "cut": ("S-04", armoured(blob[:-1])),
        "more": ("S-04", armoured(blob + b"\0")),
        "length-4-gib": ("S-04", armoured(sig + b"\xff\xff\xff\xff")),
        "reserved": ("S-04", armoured(sig + strings(key, name, b"x", b"sha512", made))),
        "sha1": ("S-04", armoured(sig + strings(key, name, b"", b"sha1", made))),
        "no-signature": ("S-04", armoured(sig + strings(key, name, b"", b"sha512", b""))),
        "dsa": ("S-05", armoured(sig + strings(strings(b"ssh-dss", bytes(32)), name, b"", b"sha512", made))),
        "certificate": (
            "S-05",
            armoured(
                sig + strings(strings(b"ssh-ed25519-cert-v01@openssh.com", bytes(32)), name, b"", b"sha512", made)
            ),
        ),
        "namespace-of-capsules": ("S-05", armoured(sig + strings(key, b"capsule-archive", b"", b"sha512", made))),
        "namespace-of-files": ("S-05", armoured(sig + strings(key, b"file", b"", b"sha512", made))),
        "namespace-of-escapes": ("S-05", armoured(sig + strings(key, b"\x1b[2J\xff", b"", b"sha512", made))),
    }
    for fault, (clause, content) in armours.items():
        yield Vector(f"s1-signature-{fault}", clause, ("V-08",), sealed(with_member, MANIFEST + ".sig", content))
    whole = (SEEDS / "bare.tsr").read_bytes()
    imprint = digest_of(b'{"schema":"example"}\n')[7:]
    tokens: dict[str, tuple[str, bytes]] = {
        "empty": ("S-08", b""),
        "text": ("S-08", b"granted\n"),
        "cut": ("S-08", whole[:-1]),
        "more": ("S-08", whole + b"\0"),
        "too-large": ("S-08", b"\x30\x83\x01\x00\x00" + bytes(1 << 16)),
        "length-4-gib": ("S-08", b"\x30\x84\xff\xff\xff\xff" + whole),
        "length-not-shortest": ("S-08", b"\x30\x83\x00" + whole[2:]),
        "indefinite-length": ("S-08", b"\x30\x80" + whole[4:] + bytes(2)),
        "not-granted": ("S-08", whole.replace(b"\x30\x03\x02\x01\x00", b"\x30\x03\x02\x01\x02", 1)),
        "only-the-token": ("S-08", whole[9:]),
        "month-13": ("S-08", whole.replace(moment(whole), b"20261301000000Z")),
        "of-sha1": ("S-09", whole.replace(bytes.fromhex("608648016503040201"), bytes.fromhex("608648016503040204"))),
        "of-other-bytes": ("S-09", whole),
    }
    assert bytes.fromhex(imprint) in whole
    for fault, (clause, content) in tokens.items():
        yield Vector(f"s2-token-{fault}", clause, ("V-09",), sealed(with_member, MANIFEST + ".tsr", content))


def wrapped(content: bytes) -> bytes:
    text = base64.b64encode(content)
    return b"".join(text[start : start + 70] + b"\n" for start in range(0, len(text), 70))


def moment(token: bytes) -> bytes:
    """Return the time of a token of the seeds, which is the first GeneralizedTime."""
    start = token.index(b"\x18\x0f20") + 2
    return token[start : start + 15]

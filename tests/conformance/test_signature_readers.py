"""Both readers of signature files and of tokens take and refuse the same bytes, and read the same of them."""

from __future__ import annotations

import base64
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import verifier

from capsule.core.errors import MalformedError
from capsule.core.sshsig import read_signature
from capsule.core.tokens import read_token
from tests.golden.make import MANIFEST, unpack

GOLDEN = Path(__file__).parents[1] / "golden" / "signed.capsule"
MEMBERS = unpack(GOLDEN.read_bytes())
SIGNATURE, TOKEN = MEMBERS[MANIFEST + ".sig"], MEMBERS[MANIFEST + ".tsr"]
Reader = Callable[[bytes], tuple[str, ...] | None]


def first_signature(data: bytes) -> tuple[str, ...] | None:
    try:
        found = read_signature(data, "here")
    except MalformedError:
        return None
    known = found.namespace == "capsule-manifest"
    return (found.key_type, found.key, base64.b64encode(found.public).decode()) if known else None


def second_signature(data: bytes) -> tuple[str, ...] | None:
    try:
        found = verifier.read_sshsig(data, "capsule-manifest")
    except verifier.Bad:
        return None
    return found["type"], found["key"], found["public"]


def first_token(data: bytes) -> tuple[str, ...] | None:
    try:
        found = read_token(data, "here")
    except MalformedError:
        return None
    return found.imprint, found.time


def second_token(data: bytes) -> tuple[str, ...] | None:
    try:
        told: tuple[str, ...] = verifier.read_token(data)
    except verifier.Bad:
        return None
    return told


def mutated(chance: random.Random, data: bytes) -> bytes:
    """Change, cut, repeat or add a few bytes, mostly such as mean something in one of the two forms."""
    changed = bytearray(data)
    pieces = [b"\n", b"=", b"A", b"\0", b"\x30\x80", b"\x81\x7f", b"\x82\0", b"\x1f", b"0", b"Z", b"-----", b"ssh-rsa"]
    for _ in range(chance.choice([1, 1, 2, 3])):
        at = chance.randrange(len(changed) + 1)
        match chance.randrange(5):
            case 0:
                changed[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                del changed[at : at + chance.choice([1, 2, 70])]
            case 2:
                changed[at : at + chance.choice([0, 1, 2])] = chance.choice(pieces)
            case 3:
                end = at + chance.choice([1, 4, 71])
                changed[at:at] = changed[at:end]
            case _:
                changed[at : at + 1] = bytes([(*changed[at : at + 1], 0)[0] ^ (1 << chance.randrange(8))])
    return bytes(changed)


def inside(data: bytes) -> bytes:
    """The bytes under a signature's armour."""
    return base64.b64decode(b"".join(data.splitlines()[1:-1]))


def armoured(blob: bytes) -> bytes:
    text = base64.b64encode(blob)
    lines = b"".join(text[at : at + 70] + b"\n" for at in range(0, len(text), 70))
    return b"-----BEGIN SSH SIGNATURE-----\n" + lines + b"-----END SSH SIGNATURE-----\n"


@pytest.mark.parametrize(
    ("data", "wrap", "first", "second"),
    [
        (SIGNATURE, bytes, first_signature, second_signature),
        (inside(SIGNATURE), armoured, first_signature, second_signature),
        (TOKEN, bytes, first_token, second_token),
    ],
    ids=["signature", "inside", "token"],
)
def test_readers(data: bytes, wrap: Callable[[bytes], bytes], first: Reader, second: Reader) -> None:
    assert first(wrap(data)) == second(wrap(data)) is not None
    read = 0
    for seed in range(4000):
        changed = wrap(mutated(random.Random(seed), data))
        found = first(changed)
        assert found == second(changed), (seed, changed)
        read += found is not None
    assert 0 < read < 4000

"""Signatures and tokens that are forged or damaged: both verifiers read, judge and order them alike."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import verifier
from mutations import mend, mutate

from capsule.core.errors import MalformedError
from capsule.core.sshsig import read_signature
from capsule.core.tokens import read_token
from capsule.steps.trust import trust
from capsule.steps.verify import verify
from tests.golden.make import MANIFEST, Members, seal, unpack

GOLDEN = Path(__file__).parents[1] / "golden"
SIGNERS, AUTHORITY = GOLDEN / "trust" / "signers", GOLDEN / "trust" / "ca.pem"
SIGNED = [unpack((GOLDEN / f"{name}.capsule").read_bytes()) for name in ("signed", "amended", "token-late")]
MEMBERS = SIGNED[0]
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


def forged(chance: random.Random, members: Members) -> Members:
    """Exchange, move, copy, damage or leave out a signature, a token or a manifest, or change anything else."""
    if chance.random() < 0.5:
        return mutate(chance, members)
    name = chance.choice([name for name in sorted(members) if name.endswith((".sig", ".tsr", "manifest.json"))])
    moved = name.removesuffix(".sig") + ".3.sig" if name.endswith(".sig") else name.replace("/001/", "/002/")
    match chance.randrange(4):
        case 0:
            return {other: data for other, data in members.items() if other != name}
        case 1:
            return {**members, name: mutated(chance, members[name])}
        case 2:
            return {**members, moved: members[name]}
        case _:
            return {**members, moved: mutated(chance, members[name])}


@pytest.mark.parametrize("tens", range(4))
def test_forged_signatures(tens: int) -> None:
    """One or two changes, half of them with all else put right: the same checks, signatures, tokens and order."""
    brought = trust(None, signers=SIGNERS, signature_of="manifest", authority=AUTHORITY)
    also = {**verifier.NOBODY, "signers": SIGNERS.read_bytes(), "authority": AUTHORITY.read_bytes(), "checks": True}
    for seed in range(10 * tens, 10 * tens + 10):
        chance = random.Random(seed)
        honest = members = chance.choice(SIGNED)
        for _ in range(chance.choice([1, 2])):
            members = forged(chance, members)
        data = seal(mend(members, honest) if chance.random() < 0.5 else members)
        first = verify(io.BytesIO(data), trust=brought).to_json()
        second = verifier.verify(data, (), {**also, "signature_of": "manifest"})
        failed = [check["id"] for check in first["checks"] if check["status"] == "failed"]
        assert (first["integrity"], first["outcome"], failed) == (
            second["integrity"], second["outcome"], second["failed"]
        ), seed  # fmt: skip
        for key in ("signatures", "tokens", "order"):
            bare = [{name: value for name, value in item.items() if name != "words"} for item in first[key]]
            assert bare == second[key], (seed, key)

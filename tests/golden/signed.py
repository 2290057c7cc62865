"""The signed and stamped goldens: one study with real keys and a real authority, and what may be wrong with either.

Keys are made anew and not kept. What judges them lies in `trust/`: policies (files of allowed signers) and the
certificates of two authorities. A case `NAME@VARIANT` looks at the capsule NAME with other options.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from capsule.core.sshsig import archive_message
from capsule.steps.verify import verify
from tests.golden.make import MANIFEST, Members, resealed, seal, unpack
from tests.signatures import Authority, Key, policy_time
from tests.study import make_study

Options = tuple[str, ...]
SIGNERS: Options = ("--require-signature", "trust/signers")
CA: Options = ("--tsa-ca", "trust/ca.pem")
CAPSULE: Options = ("--signature-of", "capsule")
BOTH: Options = ("--signature-of", "both")
PROMISE: Options = ("--signature-of", "manifest")


@dataclass(frozen=True)
class Case:
    """A capsule (none: that of another case), what it is, and the options that it is looked at with."""

    what: str
    data: bytes | None = None
    options: Options = ()


@dataclass(frozen=True)
class Signed:
    """Everything made: cases by name, and files by their place below the folder of goldens."""

    cases: dict[str, Case]
    files: dict[str, bytes]


class Study:
    """A study that is taken through its steps by command line."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.protocol = make_study(folder / "study", changes={"threshold = 0": "threshold = 5"})

    def step(self, *arguments: str | Path) -> None:
        """Run one command, which must succeed."""
        environment = {**os.environ, "CAPSULE_LEASE_DIR": str(self.folder / "leases")}
        subprocess.run([sys.executable, "-m", "capsule", *arguments], env=environment, check=True)

    def stamp(self, authority: Authority) -> None:
        """Let an authority stamp the manifest in force."""
        query, token = self.folder / "query", self.folder / "token"
        self.step("timestamp", self.protocol, "--query", query)
        token.write_bytes(authority.answer(query.read_bytes()))
        self.step("timestamp", self.protocol, "--token", token)

    def packed(self) -> bytes:
        """Run what is left, and pack."""
        self.step("run", self.protocol)
        self.step("pack", self.protocol)
        return self.protocol.with_suffix(".capsule").read_bytes()


def make(folder: Path) -> Signed:
    """Make every signed golden in a folder, which can be removed afterwards."""
    alice, mallory = Key.make(folder / "keys" / "alice"), Key.make(folder / "keys" / "mallory")
    authority, foreign = Authority.make(folder / "tsa"), Authority.make(folder / "foreign")
    study = Study(folder / "signed")
    study.step("freeze", study.protocol)
    study.step("sign", study.protocol, "--key", alice.path)
    study.stamp(authority)
    time.sleep(2)
    since = policy_time(
        -1
    )  # a key that expires then was good at the token's time, and is not when the goldens are read
    files = {
        "trust/signers": alice.allowed(),
        "trust/others": mallory.allowed("mallory@example.org"),
        "trust/expired": alice.allowed(options='valid-before="20200101Z"'),
        "trust/expired-since": alice.allowed(options=f'valid-before="{since}"'),
        "trust/not-yet": alice.allowed(options='valid-after="20990101Z"'),
        "trust/other-purpose": alice.allowed(options='namespaces="git"'),
        "trust/capsules-only": alice.allowed(options='namespaces="capsule-archive"'),
    }
    certificates = {
        "trust/ca.pem": authority.certificate.read_bytes(), "trust/foreign-ca.pem": foreign.certificate.read_bytes()
    }  # fmt: skip
    data = study.packed()
    members = unpack(data)
    forged = seal(resealed(members))
    seals = {
        "signed.capsule.sig": _seal(data, alice),
        "signed.capsule.2.sig": _seal(data, mallory),
        "other.capsule.sig": alice.sign(archive_message("sha256:" + "0" * 64), "capsule-archive"),
    }
    cases = {
        **_of_signed(data),
        **_of_forged(forged, str(verify(io.BytesIO(data)).capsule)),
        **_with_faults(members, alice, authority, foreign),
        **_late(folder / "late", authority),
        **_amended(folder / "amended", alice),
    }
    return Signed(cases, {**{name: text.encode() for name, text in files.items()}, **certificates, **seals})


def _seal(data: bytes, key: Key) -> bytes:
    identity = verify(io.BytesIO(data)).capsule
    assert identity
    return key.sign(archive_message(identity), "capsule-archive")


def _of_signed(data: bytes) -> dict[str, Case]:
    own: Options = ("--signature", "signed.capsule.sig")
    return {
        "signed": Case(
            "Manifest and capsule are signed by a trusted key, and the manifest was stamped before the first attempt.",
            data, (*SIGNERS, *BOTH, *CA, *own),
        ),
        "signed@nobody-trusted": Case("Good signatures by keys that nobody vouches for take nothing away."),
        "signed@two-seals": Case(
            "Of two signatures of the capsule one is by a trusted key.",
            options=(*SIGNERS, *CAPSULE, "--signature", "signed.capsule.2.sig", *own),
        ),
        "signed@manifest": Case(
            "A manifest's signature meets the demand for any.",
            options=(*SIGNERS, "--signature", "signed.capsule.2.sig"),
        ),
        "signed@unknown-key": Case(
            "Signed by another key than the demanded one.", options=("--require-signature", "trust/others", *own)
        ),
        "signed@unknown-seal": Case(
            "The capsule is signed by another key than the demanded one.",
            options=(*SIGNERS, *CAPSULE, "--signature", "signed.capsule.2.sig"),
        ),
        "signed@expired-key": Case(
            "The key had expired by the policy.", options=("--require-signature", "trust/expired", *own, *CA)
        ),
        "signed@key-not-yet-valid": Case(
            "The key is not valid yet by the policy.", options=("--require-signature", "trust/not-yet", *own, *CA)
        ),
        "signed@expired-since": Case(
            "The key expired after the token's time, at which the manifest's signature is judged.",
            options=("--require-signature", "trust/expired-since", *PROMISE, *own, *CA),
        ),
        "signed@expired-since-unstamped": Case(
            "Without the authority's certificate the key is judged now, and has expired.",
            options=("--require-signature", "trust/expired-since", *PROMISE, *own),
        ),
        "signed@other-purpose": Case(
            "The key is allowed to sign something else only.",
            options=("--require-signature", "trust/other-purpose", *own),
        ),
        "signed@capsules-only": Case(
            "The key counts for capsules only, and signed this one.",
            options=("--require-signature", "trust/capsules-only", *own),
        ),
        "signed@foreign-authority": Case(
            "The token is by another authority than the demanded one.",
            options=("--tsa-ca", "trust/foreign-ca.pem", *own),
        ),
        "signed@seal-of-another": Case(
            "The signature beside the capsule is over another identity.", options=("--signature", "other.capsule.sig")
        ),
        "supported@demanded": Case("Unsigned where a signature is demanded.", options=SIGNERS),
        "supported@authority": Case("Not stamped where a token is demanded.", options=CA),
    }  # fmt: skip


def _of_forged(data: bytes, honest: str) -> dict[str, Case]:
    return {
        "resealed": Case("The signed study with better results, everything rebuilt: nothing inside shows it.", data),
        "resealed@against": Case("The identity of the honest capsule stops the forger.", options=("--against", honest)),
        "resealed@demanded": Case(
            "A demanded signature of the capsule stops the forger.", options=(*SIGNERS, *CAPSULE)
        ),
        "resealed@seal": Case(
            "The honest capsule's signature is not over the forged one.", options=("--signature", "signed.capsule.sig")
        ),
        "resealed@manifest": Case(
            "The manifest's signature and token do not stop the forger, who kept the promise.", options=(*SIGNERS, *CA)
        ),
    }  # fmt: skip


def _with_faults(members: Members, alice: Key, authority: Authority, foreign: Authority) -> dict[str, Case]:
    manifest = members[MANIFEST]
    signature, token = MANIFEST + ".sig", MANIFEST + ".tsr"
    forged = bytearray(authority.stamp(manifest))
    forged[-1] ^= 1
    faults = {
        "signature-wrong-namespace": (
            "The manifest's signature is for the namespace of capsules.", signature,
            alice.sign(manifest, "capsule-archive"),
        ),
        "signature-of-another": (
            "The manifest's signature is over another manifest.", signature,
            alice.sign(manifest + b" ", "capsule-manifest"),
        ),
        "signature-edited": (
            "A letter of the signature was changed.", signature, _letter_changed(members[signature])
        ),
        "signature-garbage": ("The signature's file holds something else.", signature, b"signed, alice\n"),
        "token-of-another": ("The token is over another manifest.", token, authority.stamp(manifest + b" ")),
        "token-of-sha512": ("The token is over a SHA-512.", token, authority.stamp(manifest, "sha512")),
        "token-edited": ("A byte of the token's signature was changed.", token, bytes(forged)),
        "token-foreign": ("The token is by another authority than the demanded one.", token, foreign.stamp(manifest)),
        "token-garbage": ("The token's file holds something else.", token, b"\x30\x03\x02\x01\x00"),
    }  # fmt: skip
    return {
        name: Case(what, seal({**members, member: data}), (*SIGNERS, *PROMISE, *CA))
        for name, (what, member, data) in faults.items()
    }


def _letter_changed(signature: bytes) -> bytes:
    """Change a letter in the middle of the last whole line, which belongs to the signature's own bytes."""
    lines = signature.split(b"\n")
    letter = lines[-4][10:11]
    lines[-4] = lines[-4][:10] + (b"A" if letter != b"A" else b"B") + lines[-4][11:]
    return b"\n".join(lines)


def _late(folder: Path, authority: Authority) -> dict[str, Case]:
    study = Study(folder)
    study.step("freeze", study.protocol)
    study.step("run", study.protocol)
    study.stamp(authority)
    what = "The manifest was stamped after the first attempt, which is named and breaks nothing."
    return {"token-late": Case(what, study.packed(), CA)}


def _amended(folder: Path, alice: Key) -> dict[str, Case]:
    study = Study(folder)
    study.step("freeze", study.protocol)
    study.step("sign", study.protocol, "--key", alice.path)
    study.step("run", study.protocol)
    text = study.protocol.read_text(encoding="utf-8")
    study.protocol.write_text(text.replace("blocks = 1", "blocks = 2"), encoding="utf-8")
    study.step("amend", study.protocol, "--reason", "one block was too few")
    return {
        "amended": Case("Two manifests, of which the first is signed; the order of both is told.", study.packed()),
        "amended@manifest": Case("The manifest in force is unsigned.", options=(*SIGNERS, *PROMISE)),
    }

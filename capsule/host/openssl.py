"""Signing with a private key in a PEM file, by the `openssl` program; the key never enters this process.

Ed25519 signs the message itself and gives the same signature for the same message; ECDSA over P-256 signs its SHA-256
and gives another one each time.
"""

from __future__ import annotations

import hashlib
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from capsule.core.errors import MachineError, UsageError

SECONDS_MAX = 30
ED25519 = bytes.fromhex("06032b6570")
P256 = bytes.fromhex("06082a8648ce3d030107")
"""Object identifiers of the two kinds of keys, as they stand in the DER of a public key."""


@dataclass(frozen=True)
class SigningKey:
    """A private key; `identity` is the SHA-256 of the DER of its public key, in hexadecimal digits."""

    path: Path
    kind: str
    identity: str

    def sign(self, message: bytes) -> bytes:
        """Return the signature of a message.

        Raises:
            MachineError: openssl did not sign.
        """
        with tempfile.NamedTemporaryFile() as file:
            file.write(message)
            file.flush()
            command = ["pkeyutl", "-sign", "-rawin", "-inkey", str(self.path), "-passin", "pass:", "-in", file.name]
            if self.kind != "ed25519":
                command += ["-digest", "sha256"]
            done = _openssl(command)
        if done.returncode:
            raise MachineError(f"openssl did not sign with {self.path}: {_last(done)}")
        return done.stdout


def signing_key(path: Path) -> SigningKey:
    """Read which key a PEM file holds.

    Raises:
        UsageError: it holds no private key of Ed25519 or P-256, or one with a passphrase.
        MachineError: there is no `openssl`.
    """
    done = _openssl(["pkey", "-in", str(path), "-passin", "pass:", "-pubout", "-outform", "DER"])
    if done.returncode:
        raise UsageError(
            f"expected a private key in PEM without a passphrase at {path}, found: {_last(done)}",
            hint="make one: openssl genpkey -algorithm ed25519 -out key.pem",
        )
    head = done.stdout[:32]
    kind = "ed25519" if ED25519 in head else "ecdsa-p256" if P256 in head else None
    if kind is None:
        raise UsageError(f"expected a key of Ed25519 or ECDSA over P-256 at {path}, found another kind")
    return SigningKey(path, kind, hashlib.sha256(done.stdout).hexdigest())


def _openssl(arguments: list[str]) -> subprocess.CompletedProcess[bytes]:
    """Run openssl without a terminal, so that it asks nobody for a passphrase."""
    try:
        return subprocess.run(
            ["openssl", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            start_new_session=True,
            timeout=SECONDS_MAX,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MachineError(
            f"expected the program openssl to sign with, found: {error}", hint="install openssl 3, or leave out --key"
        ) from error


def _last(done: subprocess.CompletedProcess[bytes]) -> str:
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return lines[0][:200] if lines else f"exit status {done.returncode}"

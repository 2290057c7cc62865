"""Real keys and a real timestamp authority for tests: ssh-keygen and openssl, made anew in a folder, never kept."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

_CONFIG = """\
[req]
distinguished_name = name
prompt = no
[name]
CN = Test
[root]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign
[stamps]
extendedKeyUsage = critical, timeStamping
[tsa]
serial = serial
crypto_device = builtin
signer_digest = sha256
default_policy = 1.2.3.4.1
digests = sha256, sha512
ess_cert_id_alg = sha256
"""


def call(*command: str | Path, data: bytes = b"", folder: Path | None = None) -> bytes:
    """Run a program that must succeed, and return what it prints."""
    done = subprocess.run([str(part) for part in command], input=data, capture_output=True, check=False, cwd=folder)
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout


@dataclass(frozen=True)
class Key:
    """An SSH key without a passphrase."""

    path: Path

    @classmethod
    def make(cls, path: Path, kind: str = "ed25519") -> Key:
        """Make one; `kind` is a type that ssh-keygen knows."""
        path.parent.mkdir(parents=True, exist_ok=True)
        call("ssh-keygen", "-q", "-t", kind, "-N", "", "-C", "", "-f", path)
        return cls(path)

    @property
    def public(self) -> str:
        """Type and key, as they stand in a file of allowed signers."""
        return " ".join(self.path.with_name(self.path.name + ".pub").read_text(encoding="ascii").split()[:2])

    def sign(self, message: bytes, namespace: str) -> bytes:
        """Return the signature file of a message."""
        return call("ssh-keygen", "-q", "-Y", "sign", "-n", namespace, "-f", self.path, data=message)

    def allowed(self, name: str = "alice@example.org", options: str = "") -> str:
        """Return the line of a file of allowed signers."""
        return " ".join(part for part in (name, options, self.public) if part) + "\n"


def policy_time(seconds: float = 0) -> str:
    """Return a time from now as a file of allowed signers has it."""
    return (datetime.now(UTC) + timedelta(seconds=seconds)).strftime("%Y%m%d%H%M%SZ")


@dataclass(frozen=True)
class Authority:
    """A timestamp authority: a root certificate, and one for timestamps that it issued."""

    folder: Path

    @classmethod
    def make(cls, folder: Path, days: int = 36500) -> Authority:
        """Make keys and certificates; the one for timestamps is good for so many days, 0: for this second."""
        folder.mkdir(parents=True)
        (folder / "config").write_text(_CONFIG, encoding="ascii")

        def openssl(command: str) -> None:
            call("openssl", *command.split(), folder=folder)

        for name in ("root", "tsa"):
            openssl(f"genpkey -algorithm EC -pkeyopt ec_paramgen_curve:prime256v1 -out {name}.key")
        openssl("req -x509 -new -key root.key -days 36500 -config config -extensions root -out ca.pem")
        openssl("req -new -key tsa.key -config config -subj /CN=Stamps -out tsa.csr")
        openssl(
            f"x509 -req -in tsa.csr -CA ca.pem -CAkey root.key -set_serial 2 -days {days} -extfile config "
            "-extensions stamps -out tsa.pem"
        )
        return cls(folder)

    @property
    def certificate(self) -> Path:
        """The root certificate, which verifies its tokens."""
        return self.folder / "ca.pem"

    def stamp(self, data: bytes, digest: str = "sha256") -> bytes:
        """Return a granted reply over some bytes, with the time of now."""
        (self.folder / "data").write_bytes(data)
        call("openssl", "ts", "-query", "-data", "data", f"-{digest}", "-cert", "-no_nonce", "-out", "query",
             folder=self.folder)  # fmt: skip
        return self.answer((self.folder / "query").read_bytes())

    def answer(self, query: bytes) -> bytes:
        """Answer a query, as the server of an authority does."""
        (self.folder / "query").write_bytes(query)
        call(
            "openssl", "ts", "-reply", "-config", "config", "-section", "tsa", "-queryfile", "query",
            "-signer", "tsa.pem", "-inkey", "tsa.key", "-out", "reply", folder=self.folder,
        )  # fmt: skip
        return (self.folder / "reply").read_bytes()

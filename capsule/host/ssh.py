"""SSH signatures through ssh-keygen: signing with a key file or the agent, and checking by an allowed-signers policy.

Every call has its own temporary folder; what ssh-keygen says is read in the C locale. Prompts for a passphrase or a
touch go to the terminal by ssh-keygen itself.
"""

from __future__ import annotations

import base64
import os
import re
import subprocess
import tempfile
from datetime import datetime
from pathlib import Path

from capsule.core.errors import MachineError, UsageError
from capsule.core.signing import SignatureAnswer, SignatureChecker
from capsule.core.sshsig import read_signature

TOOL = "ssh-keygen"
DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa", "id_ed25519_sk", "id_ecdsa_sk")
CHECK_SECONDS_MAX = 60
_NOT_VALID = re.compile(r"key (has expired|is not yet valid): verify time (\S+) [<>] (valid-\w+) (\S+)")
_NAMES = re.compile(rb'[ \t]*(?:"([^"]+)"|([^"# \t]\S*))[ \t]')
_NOT_KNOWN = ("unknown option", "illegal option", "usage:", "Unsupported")


def default_key() -> Path:
    """Return the first of a person's usual keys, private or only public (then the agent has the rest).

    Raises:
        UsageError: there is none.
    """
    home = Path.home() / ".ssh"
    for name in DEFAULT_KEYS:
        for path in (home / name, home / f"{name}.pub"):
            if path.is_file():
                return path
    raise UsageError(
        f"expected a key to sign with, found none of the usual ones in {home}",
        hint="name one: --key FILE (a private key, or the public key of one that the agent holds)",
    )


def sign(message: bytes, key: Path, namespace: str) -> bytes:
    """Return the signature file of a message.

    Raises:
        UsageError: there is no such key file.
        MachineError: ssh-keygen is missing, or could not sign.
    """
    if not key.is_file():
        raise UsageError(f"expected a key file at {key}, found none", hint="make one: ssh-keygen -t ed25519 -f FILE")
    command = [TOOL, "-Y", "sign", "-q", "-n", namespace, "-f", str(key.absolute())]
    try:
        done = subprocess.run(command, input=message, capture_output=True, check=False, env=_environment())
    except OSError as error:
        raise MachineError(f"cannot run {TOOL}: {error.strerror}", hint="OpenSSH 8.8 or newer signs") from error
    if done.returncode != 0 or not done.stdout:
        raise MachineError(
            f"expected a signature by {key}, found that ssh-keygen made none: {_last_line(done.stderr)}",
            hint="a key with a passphrase needs a terminal or the agent: ssh-add FILE, then --key FILE.pub",
        )
    return done.stdout


def checker(policy: bytes | None) -> SignatureChecker:
    """Return a checker that judges keys by an allowed-signers file's bytes, or, without one, knows no key."""

    def check(message: bytes, signature: bytes, namespace: str, at: str | None) -> SignatureAnswer:
        try:
            with tempfile.TemporaryDirectory(prefix="capsule-signature-") as folder:
                return _check(Path(folder), message, signature, namespace, at, policy)
        except FileNotFoundError:
            return SignatureAnswer("unchecked", "not checked: ssh-keygen is not on this machine")
        except OSError as error:
            return SignatureAnswer("unchecked", f"not checked: cannot run ssh-keygen: {error.strerror}")
        except subprocess.TimeoutExpired:
            return SignatureAnswer("unchecked", f"not checked: ssh-keygen gave no answer in {CHECK_SECONDS_MAX} s")

    return check


def _check(
    folder: Path, message: bytes, signature: bytes, namespace: str, at: str | None, policy: bytes | None
) -> SignatureAnswer:
    file = folder / "signature"
    file.write_bytes(signature)
    good = _run(message, "check-novalidate", "-n", namespace, "-s", str(file))
    if good.returncode != 0:
        words = _last_line(good.stderr)
        if any(part in good.stderr.decode(errors="replace") for part in _NOT_KNOWN):
            return SignatureAnswer("unchecked", f"not checked: ssh-keygen is too old or lacks this: {words}")
        return SignatureAnswer("broken", f"that it is not: {words}")
    if policy is None:
        return SignatureAnswer("unknown", "unknown to you")
    signers = folder / "signers"
    signers.write_bytes(policy)
    time = ["-O", f"verify-time={_compact(at)}"] if at else []
    names = _principals(policy, read_signature(signature, "signature").public)
    said = []
    accepted = []
    for name in names:
        done = _run(message, "verify", "-n", namespace, "-s", str(file), "-f", str(signers), "-I", name, *time)
        said.append(done.stderr)
        if done.returncode == 0:
            accepted.append(name)
    if accepted:
        return SignatureAnswer("accepted", "accepted", tuple(accepted))
    return _refused(b"\n".join(said).decode(errors="replace"), namespace, tuple(names))


def _principals(policy: bytes, key: bytes) -> list[str]:
    """Return the names of every line that has this key, whatever the line allows; ssh-keygen itself finds only one."""
    text = base64.b64encode(key)
    found = (_NAMES.match(line) for line in policy.splitlines() if text in line.split() and b"\0" not in line)
    listed = [(match[1] or match[2]).decode(errors="replace").split(",") for match in found if match]
    return list(dict.fromkeys(name for names in listed for name in names if name and name[0] != "!"))


def _refused(said: str, namespace: str, names: tuple[str, ...]) -> SignatureAnswer:
    """Say why a good signature by some key does not count by the policy."""
    if match := _NOT_VALID.search(said):
        state = "expired" if "expired" in match[1] else "not yet valid"
        words = f"{state} by your policy at {match[2]} ({match[3]} {match[4]})"
        return SignatureAnswer("not_valid", words, names)
    if "not permitted for use in signature namespace" in said:
        return SignatureAnswer("not_permitted", f"not allowed to sign {namespace} by your policy", names)
    if names:
        reason = f": {_last_line(said.encode())}" if said.strip() else ""
        return SignatureAnswer("unknown", f"in your policy, and not accepted by it{reason}")
    return SignatureAnswer("unknown", "unknown to you")


def _run(message: bytes, operation: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    command = [TOOL, "-Y", operation, *arguments]
    return subprocess.run(
        command, input=message, capture_output=True, check=False, timeout=CHECK_SECONDS_MAX, env=_environment()
    )


def _environment() -> dict[str, str]:
    return {**os.environ, "LC_ALL": "C"}


def _compact(time: str) -> str:
    """Write a time as ssh-keygen takes it, whole seconds of UTC."""
    return datetime.fromisoformat(time).strftime("%Y%m%d%H%M%SZ")


def _last_line(said: bytes) -> str:
    lines = [line for line in said.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"

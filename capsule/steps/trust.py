"""Trust: what a verification judges signatures and tokens by, made from what the caller names on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from capsule.core.errors import UsageError
from capsule.core.signing import Demand, Trust
from capsule.core.sshsig import SIGNATURES_MAX, SIZE_MAX, signature_name
from capsule.host import ssh, tsa
from capsule.host.durable import read_regular

DEMANDS: tuple[Demand, ...] = ("any", "capsule", "manifest", "both")


def trust(
    file: Path | None,
    *,
    signers: Path | None = None,
    signature_of: str = "any",
    signatures: Sequence[Path] = (),
    authority: Path | None = None,
) -> Trust:
    """Return what to judge by; without named signatures, those that lie beside the capsule are taken.

    Raises:
        UsageError: a file is not there, a policy has no key, or it is asked for the signature of something else.
    """
    demand = next((name for name in DEMANDS if name == signature_of), None)
    if demand is None:
        raise UsageError(f"expected one of {', '.join(DEMANDS)} after --signature-of, found {signature_of!r}")
    if demand != "any" and signers is None:
        raise UsageError(
            "expected --require-signature ALLOWED_SIGNERS beside --signature-of, found none",
            hint="the policy says whose keys count: see ALLOWED SIGNERS in ssh-keygen(1)",
        )
    chosen = list(signatures) or (beside(file) if file is not None else [])
    return Trust(
        signatures=tuple((str(path), _read(path, "a signature")) for path in chosen),
        demand=demand if signers is not None else None,
        check_signature=ssh.checker(policy(signers) if signers is not None else None),
        check_token=tsa.checker(tsa.check_authority(authority)) if authority is not None else None,
    )


def beside(file: Path) -> list[Path]:
    """Return the signatures that lie beside a capsule, by their names."""
    names = (file.with_name(signature_name(file.name, number)) for number in range(1, SIGNATURES_MAX + 1))
    return [path for path in names if path.is_file()]


def policy(path: Path) -> bytes:
    """Read an allowed-signers file.

    Raises:
        UsageError: there is no such file, or no line with a key in it.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"expected a file of allowed signers at {path}, found {reason}") from error
    lines = [line.split() for line in data.splitlines() if line.strip() and not line.lstrip().startswith(b"#")]
    if not any(len(line) >= 3 for line in lines):
        raise UsageError(
            f"expected lines of `NAME KEYTYPE KEY` in {path}, found none", hint="see ALLOWED SIGNERS in ssh-keygen(1)"
        )
    return data


def _read(path: Path, what: str) -> bytes:
    """Read a regular file, one byte more than may be in it at most."""
    data = read_regular(path.resolve(), SIZE_MAX + 1)
    if data is None:
        raise UsageError(f"expected {what} at {path}, found no file that can be read")
    return data

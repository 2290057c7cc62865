"""An SSH signature file (`ssh-keygen -Y sign`) read: which key made it, and for which namespace; nothing is computed.

Whether the signature is good over an object, only a checker that is handed in says (`capsule.core.signing`). The rules
are S-03 to S-05 of `docs/spec/signatures.md`, in the order in which they are enforced here.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import struct
from dataclasses import dataclass

from capsule.core.errors import MalformedError

MANIFEST_NAMESPACE = "capsule-manifest"
ARCHIVE_NAMESPACE = "capsule-archive"
SIZE_MAX = 64 << 10
"""Bytes of a signature file; the largest honest one, of a key of 16,384 bits, has about 6,000."""

SIGNATURES_MAX = 9
JUDGED_MAX = 100
"""Signatures, and tokens, of one capsule that are judged, since each costs a program's run."""
KEY_TYPES = (
    "ssh-ed25519", "ssh-rsa", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521",
    "sk-ssh-ed25519@openssh.com", "sk-ecdsa-sha2-nistp256@openssh.com",
)  # fmt: skip
HASHES = ("sha256", "sha512")

_ARMOUR = re.compile(rb"-----BEGIN SSH SIGNATURE-----\n((?:[A-Za-z0-9+/=]{1,100}\n)+)-----END SSH SIGNATURE-----\n?")
_MAGIC = b"SSHSIG\0\0\0\1"


@dataclass(frozen=True, slots=True)
class SshSignature:
    """What a signature file says of itself: key type, fingerprint as ssh-keygen prints it, namespace, public key."""

    key_type: str
    key: str
    namespace: str
    public: bytes


def signature_name(base: str, number: int) -> str:
    """Return the name of an object's signature, counted from 1 (S-01, S-02)."""
    assert 1 <= number <= SIGNATURES_MAX, number
    return f"{base}.sig" if number == 1 else f"{base}.{number}.sig"


def archive_message(identity: str) -> bytes:
    """Return what a capsule's signature signs: its identity and a newline (S-02)."""
    return f"{identity}\n".encode("ascii")


def read_signature(data: bytes, where: str) -> SshSignature:
    """Read a signature file.

    Raises:
        MalformedError: it is too large, not in the one armoured form, or not an SSH signature by a key of a known type.
    """
    if len(data) > SIZE_MAX:
        raise MalformedError(f"{where}: expected a signature of at most {SIZE_MAX} bytes, found {len(data)}")
    match = _ARMOUR.fullmatch(data)
    text = match[1].replace(b"\n", b"") if match else b""
    try:
        blob = base64.b64decode(text, validate=True)
    except binascii.Error:
        blob = b""
    if not blob or base64.b64encode(blob) != text:
        raise MalformedError(f"{where}: expected an armoured SSH signature and nothing else, found other bytes")
    if not blob.startswith(_MAGIC):
        raise MalformedError(f"{where}: expected an SSH signature of version 1, found other bytes inside the armour")
    fields = _strings(blob[len(_MAGIC) :])
    if fields is None or len(fields) != 5:
        raise MalformedError(f"{where}: expected key, namespace, reserved, hash and signature, found otherwise")
    key, namespace, reserved, hash_name, signature = fields
    key_type = _first(key)
    if key_type not in (name.encode() for name in KEY_TYPES):
        raise MalformedError(f"{where}: expected a key of a known type, found {key_type[:80]!r}")
    if reserved or hash_name not in (name.encode() for name in HASHES) or not _first(signature):
        raise MalformedError(f"{where}: expected an empty reserved field, sha256 or sha512 and a signature, found not")
    fingerprint = base64.b64encode(hashlib.sha256(key).digest()).rstrip(b"=").decode()
    shown = namespace[:80].decode("ascii", "backslashreplace")
    return SshSignature(key_type.decode(), f"SHA256:{fingerprint}", shown, key)


def _strings(data: bytes) -> list[bytes] | None:
    """Cut bytes into SSH strings (length in four bytes, content); nothing if they are not whole ones."""
    found = []
    at = 0
    while at < len(data):
        if len(data) - at < 4:
            return None
        (size,) = struct.unpack_from(">I", data, at)
        at += 4
        if size > len(data) - at:
            return None
        found.append(data[at : at + size])
        at += size
    return found


def _first(data: bytes) -> bytes:
    """Return the first SSH string of some bytes; empty if there is none."""
    if len(data) < 4:
        return b""
    (size,) = struct.unpack_from(">I", data, 0)
    return data[4 : 4 + size] if size <= len(data) - 4 else b""

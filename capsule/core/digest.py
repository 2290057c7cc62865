"""Digests in the one form in which they are written: `sha256:` and 64 lower-case hexadecimal digits."""

from __future__ import annotations

import hashlib
import re
from typing import Annotated

from pydantic import StringConstraints

PREFIX = "sha256:"
HEX_PATTERN = r"[0-9a-f]{64}"

Digest = Annotated[str, StringConstraints(pattern=rf"^sha256:{HEX_PATTERN}$")]
"""A digest as every manifest, ledger line and message carries it."""

_FORM = re.compile(rf"sha256:{HEX_PATTERN}")


def digest_of(data: bytes) -> str:
    """Return the digest of `data` in written form."""
    return PREFIX + hashlib.sha256(data).hexdigest()


def is_digest(text: str) -> bool:
    """Whether `text` is a digest in written form (upper case, short and unknown algorithms are not)."""
    return _FORM.fullmatch(text) is not None


def hex_of(digest: str) -> str:
    """Return the hexadecimal part of a digest; a malformed one is a bug of the caller."""
    assert is_digest(digest), digest
    return digest[len(PREFIX) :]

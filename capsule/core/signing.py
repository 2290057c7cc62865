"""What a caller brings to judge signatures and tokens by, what it demands, and what was found of them.

The core parses and decides; whether a signature or token is good is asked of checkers that are handed in, since that
takes programs (ssh-keygen, openssl), files and a clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from capsule.core.schema import Model

SignatureAnswerName = Literal["accepted", "unknown", "not_valid", "not_permitted", "broken", "unchecked"]
TokenAnswerName = Literal["verified", "foreign", "broken", "unchecked"]
Demand = Literal["any", "capsule", "manifest", "both"]


@dataclass(frozen=True, slots=True)
class SignatureAnswer:
    """What a checker says of a signature.

    `accepted`: good, by a key that the policy lists for `principals`; `unknown`: good, by another key; `not_valid`: by
    a listed key outside its time; `not_permitted`: by a listed key that has another purpose; `broken`: not over this
    object; `unchecked`: this machine cannot say.
    """

    answer: SignatureAnswerName
    words: str
    principals: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenAnswer:
    """What a checker says of a token: `verified`, by a `foreign` authority, `broken`, or `unchecked` here."""

    answer: TokenAnswerName
    words: str


SignatureChecker = Callable[[bytes, bytes, str, str | None], SignatureAnswer]
"""Takes the message, the signature file, the namespace and the time to judge at (RFC 3339; None: now)."""

TokenChecker = Callable[[bytes, bytes], TokenAnswer]
"""Takes the stamped bytes and the timestamp reply; a caller that hands one in demands a verified token."""


@dataclass(frozen=True, slots=True)
class Trust:
    """What the caller brings: detached signatures (name and bytes), checkers, and whose signature it demands.

    Of `demand`, `any` is content with an accepted signature of the manifest in force or of the capsule.
    """

    signatures: tuple[tuple[str, bytes], ...] = ()
    demand: Demand | None = None
    check_signature: SignatureChecker | None = None
    check_token: TokenChecker | None = None


class SignatureFound(Model):
    """One signature: of what (`capsule`, or a manifest by its number), by which key, and what was said of it.

    `judged_at` is the time of a verified token at which the key was accepted; null means now, or not accepted.
    """

    file: str
    manifest: int | None
    key_type: str
    key: str
    answer: SignatureAnswerName
    principals: tuple[str, ...]
    judged_at: str | None
    words: str

    @property
    def of(self) -> str:
        """What was signed, as a person reads it."""
        return f"manifest {self.manifest}" if self.manifest else "capsule"


class TokenFound(Model):
    """One token: over which manifest, the time that it names, and what was said of it."""

    manifest: int
    time: str
    answer: TokenAnswerName
    words: str

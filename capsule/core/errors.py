"""The one error tree: every failure that a person can cause or meet has a class here.

An error says what was expected, what was found and where, and gives one hint; `capsule.cli` is the only place
that prints one. Exit codes are those of the table in the README; a test holds the two together.
"""

from __future__ import annotations

from typing import ClassVar

WORDS_MAX = 4_000
"""Characters of an error or a finding: what they quote can be of any length."""


def shortened(words: str, most: int = WORDS_MAX) -> str:
    """Return words of at most `most` characters (100 or more): beginning and end, and how much was cut between."""
    if len(words) <= most:
        return words
    half = (most - 60) // 2
    return f"{words[:half]} [... {len(words) - 2 * half} characters cut ...] {words[-half:]}"


class CapsuleError(Exception):
    """A failure with words for a person, a stable code for a program and the process's exit code."""

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.message = shortened(message)
        super().__init__(self.message)
        self.hint = hint


class UsageError(CapsuleError):
    """The command line asks for something that does not exist or contradicts itself."""

    code = "usage"
    exit_code = 2


class ProtocolError(CapsuleError):
    """The protocol file is not a valid protocol; the message names file, line and key."""

    code = "protocol"
    exit_code = 2


class MalformedError(CapsuleError):
    """Bytes that claim to be one of our formats and are not."""

    code = "malformed"
    exit_code = 3


class IncompleteError(CapsuleError):
    """Something that the format or the caller requires is absent or cannot be checked."""

    code = "incomplete"
    exit_code = 3


class BrokenError(CapsuleError):
    """Evidence was checked and does not agree with itself."""

    code = "broken"
    exit_code = 1


class RefusedError(CapsuleError):
    """The request is understood and the frozen rules forbid it (drift, budget, busy, frozen)."""

    code = "refused"
    exit_code = 4


class DriftError(RefusedError):
    """The work tree, protocol or environment differs from what was frozen."""

    code = "drift"


class BudgetError(RefusedError):
    """The frozen budget does not cover the worst case of another attempt."""

    code = "budget"


class BusyError(RefusedError):
    """Another process holds what is needed; the message says who."""

    code = "busy"


class FrozenError(RefusedError):
    """A manifest exists already and differs from what would be frozen now."""

    code = "frozen"


class MachineError(CapsuleError):
    """This machine lacks what is needed (no GPU, no space, no permission)."""

    code = "machine"
    exit_code = 5

"""What the container layer says about a file: findings, the seal of a sound one, and the limits of a reader.

A finding's code is the id of the clause of `docs/spec/container.md` that the file breaks.
"""

from __future__ import annotations

from dataclasses import dataclass

from capsule.core.errors import MalformedError


@dataclass(frozen=True, slots=True)
class Finding:
    """One clause that a file breaks: where, and at which member if the place belongs to one.

    `offset` counts bytes of the file (for a place inside a frame, those before the frame).
    """

    code: str
    member: str | None
    offset: int
    message: str

    def __str__(self) -> str:
        place = f"{self.member} at byte {self.offset}" if self.member else f"byte {self.offset}"
        return f"{self.code}: {place}: {self.message}"


class ContainerError(MalformedError):
    """A finding after which the bytes that follow cannot be read on in order."""

    def __init__(self, finding: Finding, *, hint: str | None = None) -> None:
        super().__init__(str(finding), hint=hint)
        self.finding = finding


def fault(code: str, offset: int, message: str, member: str | None = None) -> ContainerError:
    """Return the error for one finding."""
    return ContainerError(Finding(code, member, offset, message))


@dataclass(frozen=True, slots=True)
class Sealed:
    """A container that keeps every clause.

    `identity` names the content and depends on no compressed byte; `container` names the compressed form, as made
    by zstd `library` at `level`. `members` counts all members but the table.
    """

    identity: str
    container: str
    size_bytes: int
    members: int
    library: str
    level: int


@dataclass(frozen=True, slots=True)
class Limits:
    """What a reader accepts at most (C-19); memory grows by 8 bytes a member and 48 bytes a frame of 2 MiB."""

    members_max: int = 10_000_000
    size_bytes_max: int = 1 << 40


LIMITS = Limits()


def shown(name: str) -> str:
    """Return a name as printable ASCII, whatever it holds."""
    return name.encode("unicode_escape").decode("ascii")

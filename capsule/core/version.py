"""Versions of the formats: `NAME/MAJOR` or `NAME/MAJOR.MINOR`; see `docs/spec/README.md`.

A minor version only adds, and nothing that it adds changes what the rest says: a reader passes over what it does not
know, and names it. A major version may change anything: a reader of another one refuses it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from capsule.core.errors import MalformedError

MAJOR = 1
NAMED_MAX = 5
PASSED_OVER = "passed over, as of a newer minor version"
MINOR_PATTERN = r"(\.[1-9][0-9]{0,2})?"

_VERSION = re.compile(r"(?P<name>[a-z]+[.-][a-z]+)/(?P<major>[0-9]{1,9})(?:\.(?P<minor>[0-9]{1,9}))?")


def version_of(name: str) -> str:
    """Return the version that is written, of the format of this name."""
    return f"{name}/{MAJOR}"


def pattern(name: str) -> str:
    """Return the pattern of the versions that are read, of the format of this name."""
    return rf"^{re.escape(name)}/{MAJOR}{MINOR_PATTERN}$"


def passed_over(names: Sequence[str]) -> str:
    """Return words for what a newer minor version added and this one does not look at; empty if that is nothing."""
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return f"; {PASSED_OVER}: {', '.join(names[:NAMED_MAX])}{more}" if names else ""


def is_newer(text: object, where: str) -> bool:
    """Whether a version is of a minor that may have added something.

    Raises:
        MalformedError: it is of another major version.
    """
    match = _VERSION.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return False
    if int(match["major"]) != MAJOR:
        raise MalformedError(
            f"{where}: expected {match['name']}/{MAJOR}, found {text}, another major version",
            hint="read it with the version of capsule that wrote it",
        )
    return match["minor"] is not None

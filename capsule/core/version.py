"""Versions of the formats, `NAME/MAJOR`, and of the container also `NAME/MAJOR.MINOR`; see `docs/spec/versions.md`.

A minor version only adds members, and nothing in them changes what the rest says: a reader passes over them and names
them. A major version may change anything: a reader of another one refuses it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from capsule.core.errors import MalformedError

MAJOR = 1
NAMED_MAX = 5
PASSED_OVER = "passed over, as of a newer minor version"
MINOR_PATTERN = r"(\.[1-9][0-9]{0,2})?"

_MAJOR = re.compile(r"(?P<name>[a-z]+[.-][a-z]+)/(?P<major>[0-9]{1,9})(\.[0-9]{1,9})?")


def passed_over(names: Sequence[str]) -> str:
    """Return words for members that a newer minor version added; empty if there are none."""
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return f"; {PASSED_OVER}: {', '.join(names[:NAMED_MAX])}{more}" if names else ""


def refuse_other_major(text: str, where: str) -> None:
    """Refuse what names another major version of its format.

    Raises:
        MalformedError: it does.
    """
    match = _MAJOR.fullmatch(text)
    if match is not None and int(match["major"]) != MAJOR:
        raise MalformedError(
            f"{where}: expected {match['name']}/{MAJOR}, found {text}, another major version",
            hint="read it with the version of capsule that wrote it",
        )

"""Shell-style patterns over whole paths, as `[sources]` has them.

`*`, `?` and `[…]` stay within one folder, `**` spans any number of folders, and a pattern that matches a folder covers
everything below it (`data`, `data/`, `**/*.csv`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from capsule.core.errors import ProtocolError


def compile_patterns(patterns: Sequence[str]) -> Callable[[bytes], bool]:
    """Return a test whether a raw path matches any of the patterns; see the module's words for their meaning."""
    if not patterns:
        return lambda path: False
    for pattern in patterns:
        try:
            re.compile(_pattern_regex(pattern))
        except re.error as error:
            raise ProtocolError(f"[sources]: expected a shell-style pattern, found {pattern!r}: {error}") from error
    regex = re.compile("|".join(f"(?:{_pattern_regex(pattern)})" for pattern in patterns), re.DOTALL)
    return lambda path: regex.match(path.decode("utf-8", "surrogateescape")) is not None


def _pattern_regex(pattern: str) -> str:
    parts = pattern.removeprefix("./").strip("/").split("/")
    regex = ""
    for index, part in enumerate(parts):
        last = index == len(parts) - 1
        if part == "**":
            regex += ".+" if last else "(?:[^/]+/)*"
        else:
            regex += _component_regex(part) + ("" if last else "/")
    return regex + (r"/.*\Z" if pattern.endswith("/") else r"(?:/.*)?\Z")


def _component_regex(part: str) -> str:
    regex = ""
    for token in re.findall(r"\*+|\?|\[!?\]?[^\]]*\]|.", part, re.DOTALL):
        if token[0] == "*":
            regex += "[^/]*"
        elif token == "?":
            regex += "[^/]"
        elif token[0] == "[" and len(token) > 2:
            negated = token[1] == "!"
            members = re.sub(r"([\\\[\]^&~|])", r"\\\1", token[1 + negated : -1])
            regex += f"(?!/)[{'^' if negated else ''}{members}]"
        else:
            regex += re.escape(token)
    return regex

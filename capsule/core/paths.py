"""Paths as the formats write them: text where the bytes are UTF-8, `hex:` and the bytes where they are not."""

from __future__ import annotations

from collections.abc import Mapping

from capsule.core.errors import MalformedError, shortened

HEX = "hex:"
LINKS_MAX = 40
SHOWN_MAX = 1_000
"""Characters of a path in a message."""


def path_text(raw: bytes) -> str:
    """Return the written form of a path: its text, or `hex:` and its bytes where that is not UTF-8 (or begins so)."""
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return HEX + raw.hex()
    return HEX + raw.hex() if text.startswith(HEX) else text


def path_bytes(text: str) -> bytes:
    """Return the raw bytes of a path in written form; exactly one written form stands for each.

    Raises:
        MalformedError: `hex:` is followed by something else than lower-case hexadecimal of such a path.
    """
    if not text.startswith(HEX):
        return text.encode()
    try:
        raw = bytes.fromhex(text.removeprefix(HEX))
    except ValueError:
        raw = b""
    if path_text(raw) != text:
        raise MalformedError(f"expected `hex:` and the bytes of a path that is not UTF-8, found {text!r}")
    return raw


def shown(path: str | bytes) -> str:
    """Return a path for a message: on one line, shortened, with nothing that a terminal acts upon."""
    text = shortened(path_text(path) if isinstance(path, bytes) else path, SHOWN_MAX)
    return text if text.isprintable() else ascii(text)


def resolve(path: bytes, links: Mapping[bytes, bytes]) -> bytes | None:
    """Return the path within the tree that `path` leads to through the tree's own links.

    None means that it leaves the tree: an absolute target, a `..` above the root, or a loop. `links` maps the path of
    each link to its target; nothing is looked up on disk.
    """
    pending = path.split(b"/")[::-1]
    resolved: list[bytes] = []
    followed = 0
    while pending:
        part = pending.pop()
        if part in (b"", b"."):
            continue
        if part == b"..":
            if not resolved:
                return None
            resolved.pop()
            continue
        resolved.append(part)
        target = links.get(b"/".join(resolved))
        if target is not None:
            followed += 1
            if target.startswith(b"/") or followed > LINKS_MAX:
                return None
            resolved.pop()
            pending.extend(target.split(b"/")[::-1])
    return b"/".join(resolved)

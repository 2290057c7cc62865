"""A document as Markdown: every text escaped, so that a stranger's words never act; plots are left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from capsule.core.document import Block, Bullets, Code, Figure, Heading, Inline, Paragraph, Strong, Table, visible


def markdown(blocks: Iterable[Block]) -> str:
    """Return the Markdown text of a document."""
    return "\n\n".join("\n".join(_lines(block)) for block in blocks if not isinstance(block, Figure)) + "\n"


def _lines(block: Block) -> Iterator[str]:
    match block:
        case Heading(level, text):
            yield f"{'#' * level} {_escaped(text)}"
        case Paragraph(parts):
            yield _inline(parts)
        case Bullets(items):
            yield from (f"- {_inline(parts)}" for parts in items)
        case Table(head, rows):
            yield _row(head)
            yield "|" + " --- |" * len(head)
            yield from (_row([_escaped(value) for value in row]) for row in rows)


def _row(values: Sequence[str]) -> str:
    return "| " + " | ".join(values) + " |"


def _inline(parts: Iterable[Inline]) -> str:
    return "".join(_part(part) for part in parts)


def _part(part: Inline) -> str:
    match part:
        case Code(text):
            return f"`{visible(text).replace('`', chr(39))}`"
        case Strong(text):
            return f"**{_escaped(text)}**"
    return _escaped(part)


def _escaped(text: str) -> str:
    """Keep a text inside its place, and its markup and control characters from acting."""
    escaped = visible(text)
    for character in "\\`*_[]<>|#":
        escaped = escaped.replace(character, f"\\{character}")
    return escaped

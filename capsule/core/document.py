"""A document: what a report says, before it is Markdown or HTML; texts are as they are, renderers escape them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Code:
    """A name or a digest, set as code."""

    text: str


@dataclass(frozen=True)
class Strong:
    """A word that matters most in its line."""

    text: str


Inline = str | Code | Strong


@dataclass(frozen=True)
class Heading:
    """A heading; level 1 is the title."""

    level: int
    text: str


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of one line."""

    parts: tuple[Inline, ...]


@dataclass(frozen=True)
class Bullets:
    """A list, each entry of one line."""

    items: Sequence[tuple[Inline, ...]]


@dataclass(frozen=True)
class Table:
    """A table; every row has as many cells as the head."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Figure:
    """A plot: a finished SVG element, its title, and the same in words."""

    title: str
    words: str
    svg: str


Block = Heading | Paragraph | Bullets | Table | Figure


def visible(text: str) -> str:
    r"""Show control and direction characters as `\x1b`, so that they act nowhere."""
    return "".join(character if character.isprintable() else f"\\x{ord(character):02x}" for character in text)

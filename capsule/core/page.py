"""A document as one HTML file: no script, no request, every text escaped, readable in light and in dark.

The page is well-formed XML as well, so that a strict parser can hold it to that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from capsule.core.document import Block, Bullets, Code, Figure, Heading, Inline, Paragraph, Strong, Table, visible

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""What a browser may load for this page: nothing but the styles inside it."""

STYLE = """
:root { color-scheme: light dark; --text: #1b1d21; --ground: #ffffff; --faint: #5c6370; --line: #d5d9e0;
  --accent: #1f5fbf; --bad: #b3261e; --panel: #f5f6f8; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e8eb; --ground: #15171a; --faint: #9aa3b0; --line: #363b44;
  --accent: #7fb2ff; --bad: #ff8a80; --panel: #1d2025; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--ground); margin: 0 auto;
  max-width: 72rem; padding: 1.5rem; overflow-wrap: anywhere; }
h1, h2, h3 { line-height: 1.25; } h2 { border-bottom: 1px solid var(--line); margin-top: 2.5rem; }
code { background: var(--panel); padding: 0.1em 0.3em; border-radius: 3px; font-size: 0.9em; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: 0.875rem; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { border: 1px solid var(--line); padding: 0.3rem 0.6rem; text-align: left; vertical-align: top; }
th { background: var(--panel); }
figure { margin: 1.5rem 0; padding: 1rem; background: var(--panel); border-radius: 6px; }
figcaption { font-weight: 600; } figure details { color: var(--faint); font-size: 0.875rem; }
svg { display: block; width: 100%; height: auto; max-width: 60rem; margin-top: 0.5rem; }
svg text { fill: var(--text); font: 12px system-ui, sans-serif; } svg .faint { fill: var(--faint); }
svg .grid { stroke: var(--line); } svg .axis { stroke: var(--faint); } svg .bar { fill: var(--accent); }
svg .line { stroke: var(--accent); stroke-width: 1.5; fill: none; }
svg .interval { stroke: var(--accent); stroke-width: 3; }
svg .start { fill: var(--ground); stroke: var(--accent); stroke-width: 1.5; } svg .lost { fill: var(--bad); }
svg .threshold { stroke: var(--bad); stroke-width: 1.5; stroke-dasharray: 5 3; }
@media print { body { max-width: none; } .wide { overflow: visible; } figure { break-inside: avoid; } }
"""


def page(title: str, blocks: Iterable[Block]) -> str:
    """Return the HTML file of a document."""
    body = "\n".join(line for block in blocks for line in _lines(block))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>{text(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def text(words: str) -> str:
    """Escape a text for any place between tags or inside a quoted attribute."""
    return escape(visible(words), quote=True)


def _lines(block: Block) -> Iterator[str]:
    match block:
        case Heading(level, words):
            yield f"<h{level}>{text(words)}</h{level}>"
        case Paragraph(parts):
            yield f"<p>{_inline(parts)}</p>"
        case Bullets(items):
            yield "<ul>"
            yield from (f"<li>{_inline(parts)}</li>" for parts in items)
            yield "</ul>"
        case Table(head, rows):
            yield '<div class="wide" role="region" aria-label="table" tabindex="0"><table>'
            yield f"<thead><tr>{''.join(_head(name) for name in head)}</tr></thead>"
            yield "<tbody>"
            yield from (f"<tr>{''.join(f'<td>{text(value)}</td>' for value in row)}</tr>" for row in rows)
            yield "</tbody></table></div>"
        case Figure(title, words, svg):
            yield f"<figure><figcaption>{text(title)}</figcaption>"
            yield svg
            yield f"<details><summary>The same in words</summary><p>{text(words)}</p></details></figure>"


def _head(name: str) -> str:
    return f'<th scope="col">{text(name)}</th>' if name else "<td></td>"


def _inline(parts: Iterable[Inline]) -> str:
    return "".join(_part(part) for part in parts)


def _part(part: Inline) -> str:
    match part:
        case Code(words):
            return f"<code>{text(words)}</code>"
        case Strong(words):
            return f"<strong>{text(words)}</strong>"
    return text(part)

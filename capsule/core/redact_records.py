"""Lines of JSON without secrets: of a line only texts are changed, so that it stays the line that it was."""

from __future__ import annotations

import functools
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from capsule.core.canonical import refuse_depth
from capsule.core.errors import MalformedError
from capsule.core.lines import LINE_BYTES_MAX
from capsule.core.record import TEXT_MAX
from capsule.core.redact import MARKER, Redaction, Redactor, encoded, forms_of, replace_spans, search


@dataclass(frozen=True, slots=True)
class Public:
    """What a line of JSON says that is public already and stays as it is.

    `names` are fields of the outermost object whose names stay; `fields` gives those of an object whose texts do.
    """

    names: frozenset[str] = frozenset()
    fields: Callable[[Mapping[str, Any]], Collection[str]] = lambda item: ()


class RecordRedactor:
    """Redacts lines of JSON: of one that is an object its texts and names of fields, in place; others as bytes.

    A line that was no JSON object is none afterwards either, and what is short enough for a record stays so. Lines that
    are not JSON are one stream as long as they follow each other, since a private key has many. See `Redactor`, also
    for `clip`.
    """

    def __init__(self, secrets: Sequence[bytes] = (), public: Public | None = None, *, clip: bool = False) -> None:
        self._secrets = tuple(secrets)
        self._public = public or Public()
        self._clip = clip
        self._offset = 0
        self._rest = b""
        self._long = False
        self._other: Redactor | None = None
        self._newline = b""
        self._line = b""
        self._line_is_long = False
        self._clean: list[bytes] = []
        self._found: list[Redaction] = []

    def feed(self, data: bytes) -> tuple[bytes, list[Redaction]]:
        """Take in what comes next; return what is ready by now, and what was replaced in it."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(line, b"\n")
        if len(self._rest) > LINE_BYTES_MAX:
            self._long = True
            self._take_other(self._rest, b"")
            self._rest = b""
        return self._ready()

    def close(self) -> tuple[bytes, list[Redaction]]:
        """Return the rest, of which the last line may have no newline."""
        if self._rest:
            self._take(self._rest, b"")
        self._end_other()
        return self._ready()

    def _ready(self) -> tuple[bytes, list[Redaction]]:
        ready = b"".join(self._clean), self._found
        self._clean, self._found = [], []
        return ready

    def _take(self, line: bytes, newline: bytes) -> None:
        item = None if self._long else _json_object(line)
        self._long = False
        if item is None:
            self._take_other(line, newline)
            return
        self._end_other()
        clean, found = _redact_object(line, item, forms_of(self._secrets), self._public, clip=self._clip)
        self._found += [Redaction(self._offset + one.offset, one.length, one.kind) for one in found]
        self._clean += (clean, newline)
        self._offset += len(line) + len(newline)

    # The last newline of other lines is kept out of the search, or a value that ends in one would join two lines.

    def _take_other(self, line: bytes, newline: bytes) -> None:
        if self._other is None:
            self._other = Redactor(self._secrets, clip=self._clip, offset=self._offset)
        self._keep_other(*self._other.feed(self._newline + line))
        self._newline = newline
        self._offset += len(line) + len(newline)

    def _end_other(self) -> None:
        if self._other is not None:
            self._keep_other(*self._other.close())
            self._clean += (self._no_record(self._line), self._newline)
            self._other, self._newline, self._line = None, b"", b""

    def _keep_other(self, clean: bytes, found: list[Redaction]) -> None:
        self._found += found
        *lines, self._line = (self._line + clean).split(b"\n")
        for line in lines:
            self._clean += (self._no_record(line), b"\n")
        if len(self._line) > LINE_BYTES_MAX:
            self._clean.append(self._line)
            self._line, self._line_is_long = b"", True

    def _no_record(self, line: bytes) -> bytes:
        """Return a line that was no record as one that is none, even if what made it so was replaced."""
        kept = self._line_is_long or _json_object(line) is None
        self._line_is_long = False
        return line if kept else MARKER + line


def _json_object(line: bytes) -> dict[str, Any] | None:
    """Return the object of a line of JSON as a lenient reader sees it, numbers left out; None for any other line."""
    if len(line) > LINE_BYTES_MAX or line.lstrip()[:1] != b"{":
        return None
    try:
        refuse_depth(line, "a line")
        item = json.loads(line.decode("utf-8"), parse_int=_no_number, parse_float=_no_number)
    except (MalformedError, ValueError):
        return None
    return item if isinstance(item, dict) else None


def _no_number(text: str) -> None:
    return None


_PIECE = re.compile(rb'"([^"\\]*+(?:\\.[^"\\]*+)*+)"(\s*+:)?|[{}\[\]]')
"""In valid JSON: a text, with the colon after the name of a field, or a bracket."""
_ESCAPE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.")


def _redact_object(
    line: bytes, item: Mapping[str, Any], forms: Sequence[bytes], public: Public, *, clip: bool
) -> tuple[bytes, list[Redaction]]:
    if b"\\" not in line and not search(line, forms):
        return line, []
    spans = list(_text_spans(line, item, forms, public))
    if not spans:
        return line, []
    clean = replace_spans(line, ((span, MARKER[:room] if clip else MARKER) for span, room in spans))
    if not clip and _grew_too_long(line, item, clean):
        clean = replace_spans(line, ((span, MARKER[:room]) for span, room in spans))
    return clean, [span for span, _ in spans]


def _grew_too_long(line: bytes, item: Mapping[str, Any], clean: bytes) -> bool:
    """Whether markers made a line or a text of it longer than a record may be, which it was not before."""
    if len(clean) > LINE_BYTES_MAX >= len(line):
        return True
    before = [value for value in item.values() if isinstance(value, str)]
    after = [value for value in (_json_object(clean) or {}).values() if isinstance(value, str)]
    return max(map(len, before), default=0) <= TEXT_MAX < max(map(len, after), default=0)


def _text_spans(
    line: bytes, item: Mapping[str, Any], forms: Sequence[bytes], public: Public
) -> Iterator[tuple[Redaction, int]]:
    """Yield what is secret in the texts of an object, with its number of characters."""
    shown = public.fields(item)
    depth, name = 0, ""
    for piece in _PIECE.finditer(line):
        if piece.group(1) is None:
            depth += 1 if piece.group() in b"{[" else -1
            continue
        is_name = piece.group(2) is not None
        if is_name and depth == 1:
            name = json.loads(line[piece.start() : piece.end(1) + 1])
        if depth > 1 or name not in (public.names if is_name else shown):
            yield from _secrets_within(piece.group(1), piece.start(1), forms)


def _secrets_within(text: bytes, offset: int, forms: Sequence[bytes]) -> Iterator[tuple[Redaction, int]]:
    """Yield what is secret in one text of JSON, as it lies in the line, with its number of characters."""
    plain, escapes = _unescaped(text)
    starts = [escape[0] for escape in escapes]

    def placed(at: int, *, is_end: bool) -> int:
        """Return where a byte of the plain text lies in the escaped one, whole escapes included."""
        index = (bisect_left if is_end else bisect_right)(starts, at) - 1
        if index < 0:
            return at
        _, plain_end, first, last = escapes[index]
        if at < plain_end or (is_end and at == plain_end):
            return last if is_end else first
        return last + at - plain_end

    for span in search(plain, forms):
        end = span.offset + span.length
        first, last = placed(span.offset, is_end=False), placed(end, is_end=True)
        characters = len(plain[span.offset : end].decode("utf-8", "replace"))
        yield Redaction(offset + first, last - first, span.kind), min(characters, last - first)


def _unescaped(text: bytes) -> tuple[bytes, list[tuple[int, int, int, int]]]:
    """Return a text of JSON without escapes, and of each escape where it begins and ends there and in `text`."""
    plain = bytearray()
    escapes = []
    position = 0
    for match in _ESCAPE.finditer(text) if b"\\" in text else ():
        plain += text[position : match.start()]
        character = _character(match.group())
        escapes.append((len(plain), len(plain) + len(character), match.start(), match.end()))
        plain += character
        position = match.end()
    return bytes(plain + text[position:]), escapes


@functools.lru_cache(maxsize=1024)
def _character(escape: bytes) -> bytes:
    """Return the bytes that an escape of JSON stands for; half a character stands for a byte that is not UTF-8."""
    text: str = json.loads(b'"' + escape + b'"')
    try:
        return encoded(text)
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")

"""What a secret looks like, and bytes without it: pure, and linear in the size of the data.

Logs and records are evidence and go to strangers, so known token shapes and the values of secret-looking environment
variables are replaced by one fixed marker, and every replacement is listed by its original offset, length and kind.
This is a net with holes, never a guarantee: a password in free text has no shape. Lines of JSON are
`capsule.core.redact_records`.

Every pattern starts at a literal, and what follows it either ends within a fixed distance or is consumed by the match,
so no input makes the search more than linear.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

MARKER = b"[redacted]"
SECRET_BYTES_MIN = 8
PRIVATE_KEY_BYTES_MAX = 32_768
"""How far behind its first line the last line of a private key is looked for."""
WINDOW_BYTES = 1 << 18
"""How much of a stream is searched at a time."""
WINDOWS_MAX = 4
"""A secret that is longer than so many windows is replaced in pieces."""
OVERLAP_BYTES = 2 * PRIVATE_KEY_BYTES_MAX
"""How much of a window is searched again with the next one: any secret but a very long run of letters fits in."""
CONTEXT_BYTES = 64
"""How far before its own first byte a shape looks."""
PIECE_BYTES = 1 << 12
"""How much of a window is asked at once for the beginning of a shape."""
BEGINNING_BYTES = 1 << 10
"""More than it takes to tell that a shape may begin."""
PREFIX_BYTES_MIN = 4
"""The shortest beginning of a given value that counts as one cut off."""


@dataclass(frozen=True, slots=True)
class Redaction:
    """One replaced span: where it was in the original bytes, how long, and which kind of secret it looked like."""

    offset: int
    length: int
    kind: str


_TOKENS = {
    "anthropic_key": rb"(?<![A-Za-z0-9])sk-ant-[A-Za-z0-9_-]{20,}",
    "aws_key": rb"(?<![A-Za-z0-9])A(?:KI|SI)A[A-Z0-9]{16}(?![A-Za-z0-9])",
    "github_token": rb"gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{22,}",
    "gitlab_token": rb"glpat-[A-Za-z0-9_-]{20,}",
    "google_key": rb"(?<![A-Za-z0-9])AIza[A-Za-z0-9_-]{35,}",
    "huggingface_token": rb"(?<![A-Za-z0-9])hf_[A-Za-z0-9]{30,}",
    "npm_token": rb"(?<![A-Za-z0-9])npm_[A-Za-z0-9]{36,}",
    "openai_key": rb"(?<![A-Za-z0-9])sk-(?:(?:proj|svcacct|admin|or)-[A-Za-z0-9_-]{20,}|[A-Za-z0-9]{32,})",
    "pypi_token": rb"(?<![A-Za-z0-9])pypi-[A-Za-z0-9_-]{50,}",
    "slack_token": rb"xox[abeoprs]-[A-Za-z0-9-]{10,}",
    "stripe_key": rb"(?<![A-Za-z0-9])[rs]k_live_[A-Za-z0-9]{20,}",
    "private_key": rb"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----",
}
"""Shapes that are secret wherever they stand."""

_JWT_BEGINNING = rb"(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{8,}"
_CONTEXTS = {
    "jwt": _JWT_BEGINNING + rb"\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*",
    "url_password": rb"(?<=://)[^\s/:@]{0,256}:[^\s/@]{1,256}@",
    "authorization": rb"\b[Bb][Ee][Aa][Rr][Ee][Rr] {1,4}[A-Za-z0-9._~+/=-]{16,}"
    rb"|\b[Aa]uthorization[\"']?[:=] {0,4}[\"']?[A-Za-z]{1,16} {1,4}[A-Za-z0-9._~+/=-]{8,}",
    "aws_secret": rb"(?<=[Ss][Ee][Cc][Rr][Ee][Tt]_[Aa][Cc][Cc][Ee][Ss][Ss]_[Kk][Ee][Yy])"
    rb"[\"']?[ \t]{0,4}[=:][ \t]{0,4}[\"']?[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+])",
}
"""Shapes that are secret because of the words around them."""
_BEGINNINGS = _TOKENS | _CONTEXTS | {"jwt": _JWT_BEGINNING}
"""What stands where a shape begins, told by a bounded number of bytes."""


def _alternatives(shapes: Mapping[str, bytes]) -> re.Pattern[bytes]:
    return re.compile(b"|".join(b"(?P<%s>%s)" % (kind.encode(), shape) for kind, shape in shapes.items()))


_TOKEN = _alternatives(_TOKENS)
_SECRET = _alternatives(_TOKENS | _CONTEXTS)
_BEGINNING = _alternatives(_BEGINNINGS)
_AWS_KEY = re.compile(_TOKENS["aws_key"])
_PRIVATE_KEY = re.compile(_TOKENS["private_key"])
_KEY_END = re.compile(rb"-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
_KEY_BODY = re.compile(rb"(?:(?:\s|\\[nr]){0,8}+[A-Za-z0-9+/=]{8,}+)*+")
_LONG_WORD = re.compile(rb"[A-Za-z0-9_-]{26,}")
"""Every token but an AWS key is at least this long a run of these in practice."""


_SECRET_FILES = frozenset(
    b".env id_rsa id_dsa id_ecdsa id_ed25519 id_ecdsa_sk id_ed25519_sk .netrc _netrc .pypirc .pgpass .htpasswd "
    b".git-credentials credentials.json client_secret.json service_account.json service-account.json".split()
)
_SECRET_ENDINGS = (b".p12", b".pfx", b".jks", b".keystore", b".kdbx", b".ppk")
_EXAMPLE_ENDINGS = (b".example", b".sample", b".template", b".dist", b".defaults")


def is_secret_file(path: bytes) -> bool:
    """Whether a file of this name holds a secret by custom; `.env.example` and its like do not."""
    name = path[path.rfind(b"/") + 1 :].lower()
    if name in _SECRET_FILES or name.endswith(_SECRET_ENDINGS) or path.endswith(b".aws/credentials"):
        return True
    return name.startswith(b".env.") and not name.endswith(_EXAMPLE_ENDINGS)


def redact(data: bytes, secrets: Sequence[bytes] = ()) -> tuple[bytes, list[Redaction]]:
    """Return `data` with every secret replaced by `MARKER`, and what was replaced, in order of offset.

    `secrets` are values that are secret whatever they look like, also as JSON and Python write them between quotes and
    without the blanks around them; those below `SECRET_BYTES_MIN` bytes are ignored, since they would match by chance.
    Spans that touch or overlap are replaced once. Time is linear in `data` for a given number of secrets; memory is a
    small multiple of `data`.
    """
    found = search(data, forms_of(tuple(secrets)))
    return (replace_spans(data, ((item, MARKER) for item in found)), found) if found else (data, [])


def redact_text(text: str, secrets: Sequence[str] = ()) -> str:
    """Return `text` without secrets; see `redact`."""
    values = [encoded(secret) for secret in secrets]
    return redact(encoded(text), values)[0].decode("utf-8", "surrogateescape")


def find_secrets(data: bytes) -> list[Redaction]:
    """Return everything in `data` that looks like a secret by its shape, in order of offset, without overlap."""
    return list(_spans(data))


def token_kind(data: bytes) -> str | None:
    """Return the kind of the first well-known token or private key in a file's bytes, or None.

    Made for many small files: most are dismissed by one search. Shapes that need words around them, which examples
    in documentation are full of, do not count here, nor do placeholders such as forty times `x`, nor AWS's keys for
    some hours.
    """
    if not _finder(*_TOKENS.values())(data.decode("latin-1")):
        return None
    if b"-----BEGIN " in data and _PRIVATE_KEY.search(data):
        return "private_key"
    if b"AKIA" in data and not all(map(_is_placeholder, _AWS_KEY.findall(data))):
        return "aws_key"
    for word in _LONG_WORD.findall(data):
        if (match := _TOKEN.search(word)) and not _is_placeholder(match.group()):
            return match.lastgroup
    return None


@functools.cache
def _finder(*shapes: bytes) -> Callable[[str], bool]:
    """Return a test of Latin-1 text for any of the shapes, and for some more: nothing is asked about what is beside.

    The engine that pydantic has for its patterns is linear in the text, and for many shapes at once it is far faster
    than `re`, but it has no assertions, and its notion of a blank or a word is that of Unicode.
    """
    from pydantic import StringConstraints, TypeAdapter

    pattern = "|".join(shape.decode() for shape in shapes)
    pattern = re.sub(r"\(\?<=(.*?)\)", r"\1", re.sub(r"\(\?<?!.*?\)|\\b", "", pattern)).replace(r"\s", r" \t-\r")
    text_with_one = Annotated[str, StringConstraints(pattern=pattern)]
    return TypeAdapter[str](text_with_one).validator.isinstance_python


def is_secret_name(name: str) -> bool:
    """Whether the value of an environment variable of this name should never be shown."""
    parts = name.upper().replace("-", "_").split("_")
    return parts[-1] in ("KEY", "PAT", "PWD") or any(part in _SECRET_WORDS for part in parts)


_SECRET_WORDS = frozenset(
    "TOKEN SECRET PASSWORD PASSWD PASS PASSPHRASE APIKEY CREDENTIAL CREDENTIALS COOKIE AUTHORIZATION".split()
)


def secret_values(environ: Mapping[str, str]) -> list[bytes]:
    """Return the values, longest first, of the variables whose names look secret and whose values are long enough."""
    values = {encoded(value) for name, value in environ.items() if is_secret_name(name) and name != "PWD"}
    return sorted((value for value in values if len(value) >= SECRET_BYTES_MIN), key=lambda value: (-len(value), value))


def encoded(text: str) -> bytes:
    """Return the bytes of a text, as a program passes them that are not UTF-8."""
    return text.encode("utf-8", "surrogateescape")


def _is_placeholder(token: bytes) -> bool:
    return len(set(token[-16:])) < 6 or token.endswith(b"EXAMPLE")


@functools.lru_cache(maxsize=64)
def forms_of(secrets: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Return every spelling of the given values that is looked for, longest first."""
    forms: set[bytes] = set()
    for secret in secrets:
        whole = secret.decode("utf-8", "surrogateescape")
        for text in (whole, whole.strip()) if len(secret) >= SECRET_BYTES_MIN else ():
            spelled = (text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1], repr(text)[1:-1])
            forms |= {encoded(spelling) for spelling in spelled} | {text.encode("utf-8", "backslashreplace")}
    return tuple(sorted((form for form in forms if len(form) >= SECRET_BYTES_MIN), key=lambda form: (-len(form), form)))


def search(data: bytes, forms: Iterable[bytes], start: int = 0) -> list[Redaction]:
    """Return what is secret in `data` from `start` on, in order, without overlap; `forms` are of `forms_of`."""
    found = list(_spans(data, start))
    for form in forms:
        found.extend(_occurrences(data, form, start))
    return _merged(sorted(found, key=lambda item: (item.offset, -item.length, item.kind))) if found else found


def replace_spans(
    data: bytes, spans: Iterable[tuple[Redaction, bytes]], start: int = 0, end: int | None = None
) -> bytes:
    """Return `data` from `start` to `end` with each span's bytes replaced by the others beside it."""
    pieces: list[bytes] = []
    for item, marker in spans:
        pieces += (data[start : item.offset], marker)
        start = item.offset + item.length
    pieces.append(data[start:end])
    return b"".join(pieces)


def _spans(data: bytes, start: int = 0) -> Iterator[Redaction]:
    """Yield what looks like a secret by shape, left to right, without overlap."""
    position = start
    last_line = _KEY_END.search(data, start) if (match := _next_secret(data, start)) else None
    while match:
        kind = match.lastgroup
        assert kind is not None, match
        position = match.end()
        if kind == "private_key":
            while last_line and last_line.start() < position:  # each is looked for once, however many keys there are
                last_line = _KEY_END.search(data, last_line.end())
            position = _key_end(data, position, last_line)
        yield Redaction(match.start(), position - match.start(), kind)
        match = _next_secret(data, position)


def _next_secret(data: bytes, start: int) -> re.Match[bytes] | None:
    """Return the first shape from `start` on; the slow search goes only through pieces in which one may begin."""
    may_hold_secret = _finder(*_BEGINNINGS.values())
    for piece in range(start, len(data), PIECE_BYTES):
        end = piece + PIECE_BYTES + BEGINNING_BYTES
        if not may_hold_secret(data[max(0, piece - CONTEXT_BYTES) : end].decode("latin-1")):
            continue
        at = piece
        while (beginning := _BEGINNING.search(data, at, end)) and beginning.start() < piece + PIECE_BYTES:
            if match := _SECRET.match(data, beginning.start()):
                return match
            at = beginning.start() + 1
    return None


def _key_end(data: bytes, start: int, last_line: re.Match[bytes] | None) -> int:
    """Return where the private key ends whose first line ends at `start`: its last line, or else its base64 lines."""
    if last_line and last_line.start() - start <= PRIVATE_KEY_BYTES_MAX:
        return last_line.end()
    body = _KEY_BODY.match(data, start)
    assert body is not None  # the pattern matches nothing, too
    return body.end()


def _occurrences(data: bytes, secret: bytes, start: int) -> Iterator[Redaction]:
    offset = data.find(secret, start)
    while offset >= 0:
        yield Redaction(offset, len(secret), "given")
        offset = data.find(secret, offset + len(secret))


def _merged(spans: list[Redaction]) -> list[Redaction]:
    """Join spans (in order of offset) that touch or overlap; the first one names the kind."""
    merged: list[Redaction] = []
    for span in spans:
        if merged and span.offset <= merged[-1].offset + merged[-1].length:
            last = merged[-1]
            end = max(last.offset + last.length, span.offset + span.length)
            merged[-1] = Redaction(last.offset, end - last.offset, last.kind)
        else:
            merged.append(span)
    return merged


# Streams.


class Redactor:
    """Redacts a stream that may be larger than memory, a window at a time, as `redact` would the whole of it.

    With `clip` a marker is never longer than what it replaces, so that nothing grows. `offset` is where the stream
    begins in the whole that offsets are counted in.
    """

    def __init__(self, secrets: Sequence[bytes] = (), *, clip: bool = False, offset: int = 0) -> None:
        self._forms = forms_of(tuple(secrets))
        self._overlap = max(OVERLAP_BYTES, 2 * len(self._forms[0]) if self._forms else 0)
        self._clip = clip
        self._offset = offset
        self._data = bytearray()
        self._start = 0
        self._due = WINDOW_BYTES + self._overlap

    def feed(self, data: bytes) -> tuple[bytes, list[Redaction]]:
        """Take in what comes next; return what is ready by now, and what was replaced in it."""
        self._data += data
        return self._take(last=False) if len(self._data) - self._start >= self._due else (b"", [])

    def close(self) -> tuple[bytes, list[Redaction]]:
        """Return the rest."""
        return self._take(last=True)

    def _take(self, *, last: bool) -> tuple[bytes, list[Redaction]]:
        data, start = bytes(self._data), self._start
        end = len(data) if last else len(data) - self._overlap
        spans = search(data, self._forms, start)
        taken: list[Redaction] = []
        for span in spans:
            if span.offset >= end:
                break
            if span.offset + span.length > end:
                end = span.offset
                break
            taken.append(span)
        if end <= start and not last:
            if len(data) < WINDOWS_MAX * (WINDOW_BYTES + self._overlap):
                self._due = len(data) - start + WINDOW_BYTES
                return b"", []
            taken, end = spans[:1], spans[0].offset + spans[0].length
        clean = replace_spans(data, ((span, self._marker(span.length)) for span in taken), start, end)
        found = [Redaction(self._offset + span.offset, span.length, span.kind) for span in taken]
        context = max(0, end - CONTEXT_BYTES)
        self._data = bytearray(data[context:])
        self._offset += context
        self._start = end - context
        self._due = WINDOW_BYTES + self._overlap
        return clean, found

    def _marker(self, length: int) -> bytes:
        return MARKER[:length] if self._clip else MARKER


# Where something was left out.

_RUN = bytes(code for code in range(256) if chr(code) in "-._~+/=" or (code < 128 and chr(code).isalnum()))
_OPEN_TOKEN = re.compile(
    rb"(?:sk-|A(?:KI|SI)A|gh[pousr]_|github_pat_|glpat-|AIza|hf_|npm_|pypi-|xox[abeoprs]-|[rs]k_live_|eyJ).{8}",
    re.DOTALL,
)
_OPEN_SHORT = re.compile(
    rb"(?<=://)[^\s/:@]{0,256}:[^\s/@]{1,256}\Z"
    rb"|(?<=[Ss][Ee][Cc][Rr][Ee][Tt]_[Aa][Cc][Cc][Ee][Ss][Ss]_[Kk][Ee][Yy])"
    rb"[\"']?[ \t]{0,4}[=:][ \t]{0,4}[\"']?[A-Za-z0-9/+]{1,40}\Z"
)
_OPEN_CONTEXT = re.compile(
    rb"(?:[Bb][Ee][Aa][Rr][Ee][Rr]|[Aa]uthorization[\"']?[:=] {0,4}[\"']?[A-Za-z]{1,16}) {1,4}\Z"
)


def open_end(data: bytes, secrets: Sequence[bytes] = ()) -> int:
    """Return where a secret begins that `data` may end within, its length if there is none.

    Only a token that could have gone on counts: one of which too little is there to be told by its shape.
    """
    ends = [len(data)]
    before = data.rstrip(_RUN)
    run = data[len(before) :]
    if token := _OPEN_TOKEN.search(run):
        ends.append(len(before) + token.start())
    if run and _OPEN_CONTEXT.search(before[-CONTEXT_BYTES:]):
        ends.append(len(before))
    tail = data[-1024:]
    if short := _OPEN_SHORT.search(tail):
        ends.append(len(data) - len(tail) + short.start())
    for form in forms_of(tuple(secrets)):
        at = data.find(form[:PREFIX_BYTES_MIN], max(0, len(data) - len(form) + 1))
        while at >= 0 and not form.startswith(data[at:]):
            at = data.find(form[:PREFIX_BYTES_MIN], at + 1)
        if at >= 0:
            ends.append(at)
    return min(ends)


def end_of_secret_across(data: bytes, at: int, secrets: Sequence[bytes] = ()) -> int:
    """Return where the secret ends that begins before `at` and ends behind it; `at` if there is none."""
    found = search(data, forms_of(tuple(secrets)))
    return next((item.offset + item.length for item in found if item.offset < at < item.offset + item.length), at)

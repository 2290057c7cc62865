"""What a secret looks like, and bytes without it: pure, linear in the size of the data, standard library only.

Logs are evidence and go to strangers, so known token shapes and the values of secret-looking environment variables
are replaced by one fixed marker, and every replacement is listed by its original offset, length and kind. This is a
net with holes, never a guarantee: a password in free text has no shape.

Every pattern starts at a literal, and what follows it either ends within a fixed distance or is consumed by the match,
so no input makes the search more than linear.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

MARKER = b"[redacted]"
SECRET_BYTES_MIN = 8
PRIVATE_KEY_BYTES_MAX = 32_768
"""How far behind its first line the last line of a private key is looked for."""


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

_CONTEXTS = {
    "jwt": rb"(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*",
    "url_password": rb"(?<=://)[^\s/:@]{0,256}:[^\s/@]{1,256}@",
    "authorization": rb"\b[Bb][Ee][Aa][Rr][Ee][Rr] {1,4}[A-Za-z0-9._~+/=-]{16,}"
    rb"|\b[Aa]uthorization[\"']?[:=] {0,4}[\"']?[A-Za-z]{1,16} {1,4}[A-Za-z0-9._~+/=-]{8,}",
    "aws_secret": rb"(?<=[Ss][Ee][Cc][Rr][Ee][Tt]_[Aa][Cc][Cc][Ee][Ss][Ss]_[Kk][Ee][Yy])"
    rb"[\"']?[ \t]{0,4}[=:][ \t]{0,4}[\"']?[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+])",
}
"""Shapes that are secret because of the words around them."""


def _alternatives(shapes: Mapping[str, bytes]) -> re.Pattern[bytes]:
    return re.compile(b"|".join(b"(?P<%s>%s)" % (kind.encode(), shape) for kind, shape in shapes.items()))


_TOKEN = _alternatives(_TOKENS)
_SECRET = _alternatives(_TOKENS | _CONTEXTS)
_AWS_KEY = re.compile(_TOKENS["aws_key"])
_PRIVATE_KEY = re.compile(_TOKENS["private_key"])
_KEY_END = re.compile(rb"-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
_KEY_BODY = re.compile(rb"(?:(?:\s|\\[nr]){0,8}+[A-Za-z0-9+/=]{8,}+)*+")
_WORD = bytes(ord("a") if chr(code) in "-_" or (code < 128 and chr(code).isalnum()) else 32 for code in range(256))
_WORD_MIN = 26
"""Every token but an AWS key is at least this long a run of letters, digits, `-` and `_` in practice."""


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

    `secrets` are values that are secret whatever they look like; those below `SECRET_BYTES_MIN` bytes are ignored,
    since they would match by chance. Spans that touch or overlap are replaced once. Time is linear in `data` for
    a given number of secrets; memory is a small multiple of `data`.
    """
    found = list(_spans(data))
    for secret in sorted(set(secrets), key=len, reverse=True):
        if len(secret) >= SECRET_BYTES_MIN:
            found.extend(_occurrences(data, secret))
    if not found:
        return data, []
    merged = _merged(sorted(found, key=lambda item: (item.offset, -item.length, item.kind)))
    pieces: list[bytes] = []
    end = 0
    for item in merged:
        pieces += (data[end : item.offset], MARKER)
        end = item.offset + item.length
    pieces.append(data[end:])
    return b"".join(pieces), merged


def redact_text(text: str, secrets: Sequence[str] = ()) -> str:
    """Return `text` without secrets; see `redact`."""
    values = [_encoded(secret) for secret in secrets]
    return redact(_encoded(text), values)[0].decode("utf-8", "surrogateescape")


def find_secrets(data: bytes) -> list[Redaction]:
    """Return everything in `data` that looks like a secret by its shape, in order of offset, without overlap."""
    return list(_spans(data))


def token_kind(data: bytes) -> str | None:
    """Return the kind of the first well-known token or private key in a file's bytes, or None.

    Made for many small files: most are dismissed by a few searches. Shapes that need words around them, which examples
    in documentation are full of, do not count here, nor do placeholders such as forty times `x`, nor AWS's keys for
    some hours.
    """
    if b"-----BEGIN " in data and _PRIVATE_KEY.search(data):
        return "private_key"
    if b"AKIA" in data and not all(map(_is_placeholder, _AWS_KEY.findall(data))):
        return "aws_key"
    words = data.translate(_WORD)
    run = b"a" * _WORD_MIN
    start = words.find(run)
    while start >= 0:
        end = words.find(b" ", start + _WORD_MIN)
        word = data[start : end if end >= 0 else len(data)]
        if (match := _TOKEN.search(word)) and not _is_placeholder(match.group()):
            return match.lastgroup
        start = words.find(run, start + len(word))
    return None


def is_secret_name(name: str) -> bool:
    """Whether the value of an environment variable of this name should never be shown."""
    parts = name.upper().replace("-", "_").split("_")
    return parts[-1] in ("KEY", "PAT", "PWD") or any(part in _SECRET_WORDS for part in parts)


_SECRET_WORDS = frozenset(
    "TOKEN SECRET PASSWORD PASSWD PASS PASSPHRASE APIKEY CREDENTIAL CREDENTIALS COOKIE AUTHORIZATION".split()
)


def secret_values(environ: Mapping[str, str]) -> list[bytes]:
    """Return the values, longest first, of the variables whose names look secret and whose values are long enough."""
    values = {_encoded(value) for name, value in environ.items() if is_secret_name(name) and name != "PWD"}
    return sorted((value for value in values if len(value) >= SECRET_BYTES_MIN), key=lambda value: (-len(value), value))


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _is_placeholder(token: bytes) -> bool:
    return len(set(token[-16:])) < 6 or token.endswith(b"EXAMPLE")


def _spans(data: bytes) -> Iterator[Redaction]:
    """Yield what looks like a secret by shape, left to right, without overlap."""
    position = 0
    last_line = _KEY_END.search(data)
    while match := _SECRET.search(data, position):
        kind = match.lastgroup
        assert kind is not None, match
        position = match.end()
        if kind == "private_key":
            while last_line and last_line.start() < position:  # each is looked for once, however many keys there are
                last_line = _KEY_END.search(data, last_line.end())
            position = _key_end(data, position, last_line)
        yield Redaction(match.start(), position - match.start(), kind)


def _key_end(data: bytes, start: int, last_line: re.Match[bytes] | None) -> int:
    """Return where the private key ends whose first line ends at `start`: its last line, or else its base64 lines."""
    if last_line and last_line.start() - start <= PRIVATE_KEY_BYTES_MAX:
        return last_line.end()
    body = _KEY_BODY.match(data, start)
    assert body is not None  # the pattern matches nothing, too
    return body.end()


def _occurrences(data: bytes, secret: bytes) -> Iterator[Redaction]:
    offset = data.find(secret)
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

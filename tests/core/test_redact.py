"""Secrets are found by shape or value, replaced once each, listed by original offset, in linear time."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule.core import redact as module
from capsule.core.redact import (
    MARKER,
    OVERLAP_BYTES,
    PRIVATE_KEY_BYTES_MAX,
    WINDOW_BYTES,
    WINDOWS_MAX,
    Redaction,
    Redactor,
    end_of_secret_across,
    find_secrets,
    is_secret_file,
    is_secret_name,
    open_end,
    redact,
    redact_text,
    secret_values,
    token_kind,
)
from capsule.core.redact_records import Public, RecordRedactor

MIXED = "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7bC0eF3hJ6kL9nP2rS5tU8wX1zA4cD7fG0iJ3lM6oQ9uV2xY5"
KEY_LINES = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7VJTUt9Us8cKj\n" * 3
# Written in two parts, so that this file itself holds nothing that looks like a secret.
TOKENS = {
    "anthropic_key": "sk-" + f"ant-api03-{MIXED[:40]}_-{MIXED[:30]}",
    "aws_key": "AK" + "IAQ3EGTWXQ7JZ5M2LA",
    "github_token": "gh" + f"p_{MIXED[:36]}",
    "gitlab_token": "glp" + f"at-{MIXED[:20]}",
    "google_key": "AI" + f"za{MIXED[:35]}",
    "huggingface_token": "h" + f"f_{MIXED[:34]}",
    "npm_token": "np" + f"m_{MIXED[:36]}",
    "openai_key": "sk" + f"-{MIXED[:48]}",
    "pypi_token": "pyp" + f"i-{MIXED[:60]}",
    "slack_token": "xo" + f"xb-123456789012-123456789012-{MIXED[:24]}",
    "stripe_key": "sk" + f"_live_{MIXED[:24]}",
    "private_key": "-----BEGIN " + f"RSA PRIVATE KEY-----\n{KEY_LINES}-----END RSA PRIVATE KEY-----",
    "jwt": "ey" + f"J{MIXED[:20]}.ey" + f"J{MIXED[:30]}.{MIXED[:40]}",
}
MORE = {
    "github_token": "github" + f"_pat_{MIXED[:22]}_{MIXED[:59]}",
    "openai_key": "sk-" + f"proj-{MIXED[:40]}-{MIXED[:20]}",
    "private_key": "-----BEGIN " + f"OPENSSH PRIVATE KEY-----\n{KEY_LINES}-----END OPENSSH PRIVATE KEY-----",
    "aws_key": "AS" + "IAQ3EGTWXQ7JZ5M2LA",
}


@pytest.mark.parametrize(("kind", "token"), [*TOKENS.items(), *MORE.items()])
@pytest.mark.parametrize(("before", "after"), [("", ""), ("token=", "\n"), ("\x96\r'", "' "), ("é ", " é")])
def test_known_shapes_are_replaced_whole(kind: str, token: str, before: str, after: str) -> None:
    data = (before + token + after).encode("latin-1")
    clean, found = redact(data)
    assert clean == before.encode("latin-1") + MARKER + after.encode("latin-1")
    assert found == [Redaction(len(before.encode("latin-1")), len(token), kind)]


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("git clone https://user:hunter2secret@example.org/x.git", "user:hunter2secret@"),
        ("postgresql://:pw@db/x", ":pw@"),
        ("Authorization: Bearer abcdef.123-456_78", "Authorization: Bearer abcdef.123-456_78"),
        ('{"Authorization": "Basic dXNlcjpwYXNz"}', 'Authorization": "Basic dXNlcjpwYXNz'),
        ("curl -H 'bearer 0123456789abcdef'", "bearer 0123456789abcdef"),
        (
            "aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYzzzzzzzzzz\n",
            " = wJalrXUtnFEMI/K7MDENG/bPxRfiCYzzzzzzzzzz",
        ),
    ],
)
def test_secrets_by_the_words_around_them(text: str, secret: str) -> None:
    clean, found = redact(text.encode())
    assert clean.decode() == text.replace(secret, MARKER.decode())
    assert len(found) == 1


@pytest.mark.parametrize(
    "text",
    [
        "https://example.org:8080/a@b", "https://example.org/path:x@y", "user@example.org", "sk-learn and disk-usage",
        "sk-toggleable__label-arrow-and-more-words", "the bearer of bad news",
        "0123456789abcdef0123456789abcdef01234567",
        "hf_transfer", "npm_config_cache", "-----BEGIN CERTIFICATE-----", "ghp_short", "AKIAIOSFODNN7EXAMPLEX",
        "MAKIAQ3EGTWXQ7JZ5M2LAX", "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ", "loss=0.123 step=456", "a" * 10_000,
    ],
)  # fmt: skip
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert redact(text.encode()) == (text.encode(), [])


def test_offsets_and_lengths_are_of_the_original() -> None:
    """K-09."""
    one, two = TOKENS["github_token"], TOKENS["huggingface_token"]
    data = f"a {one} b {two} c".encode()
    clean, found = redact(data)
    assert clean == b"a [redacted] b [redacted] c"
    assert [data[item.offset : item.offset + item.length].decode() for item in found] == [one, two]


def test_given_values_are_replaced_longest_first_and_short_ones_ignored() -> None:
    clean, found = redact(
        b"x longsecret-and-more y longsecret z short", [b"longsecret", b"longsecret-and-more", b"short"]
    )
    assert clean == b"x [redacted] y [redacted] z short"
    assert found == [Redaction(2, 19, "given"), Redaction(24, 10, "given")]


def test_spans_that_overlap_or_touch_are_replaced_once() -> None:
    token = TOKENS["github_token"].encode()
    clean, found = redact(b"<" + token + b">", [token[5:20], token[-8:] + b">"])
    assert clean == b"<" + MARKER
    assert found == [Redaction(1, len(token) + 1, "github_token")]
    assert redact(b"abcdefghabcdefgh", [b"abcdefgh"])[1] == [Redaction(0, 16, "given")]


def test_values_may_be_any_bytes() -> None:
    assert redact(b"\x00(.*)\xff\n+", [b"(.*)\xff\n+\x00"])[1] == []
    assert redact(b"\x00(.*)\xff\n+$", [b"(.*)\xff\n+$"])[0] == b"\x00" + MARKER


def test_a_private_key_without_its_end_loses_its_base64_lines_only() -> None:
    text = f"log\n{TOKENS['private_key'].split('-----END')[0]}then ordinary words\n"
    assert redact(text.encode())[0] == b"log\n[redacted]\nthen ordinary words\n"
    escaped = '{"k":"' + "-----BEGIN " + "PRIVATE KEY-----\\n" + KEY_LINES.replace("\n", "\\n")
    assert redact(escaped.encode())[0] == b'{"k":"[redacted]\\n'


def test_every_key_ends_at_its_own_last_line() -> None:
    text = f"{TOKENS['private_key']} one {MORE['private_key']} two {TOKENS['private_key']}"
    assert redact(text.encode())[0] == b"[redacted] one [redacted] two [redacted]"


def test_a_key_is_not_ended_by_a_far_away_line() -> None:
    text = "-----BEGIN " + "PRIVATE KEY-----\n" + "- \n" * PRIVATE_KEY_BYTES_MAX + "-----END PRIVATE KEY-----"
    assert redact(text.encode())[1] == [Redaction(0, 27, "private_key")]


@given(st.lists(st.one_of(st.binary(max_size=30), st.sampled_from([t.encode() for t in TOKENS.values()])), max_size=8))
def test_what_is_kept_is_kept_in_order(pieces: list[bytes]) -> None:
    data = b" ".join(pieces)
    clean, found = redact(data)
    end, rebuilt = 0, b""
    for item in found:
        assert item.offset > end or item.offset == end == 0
        rebuilt += data[end : item.offset] + MARKER
        end = item.offset + item.length
    assert rebuilt + data[end:] == clean
    assert all(token.encode() not in clean for token in TOKENS.values())


HOSTILE = {
    "token prefixes": b"ghp_" * 500_000, "runs": b"a" * 2_000_000,
    "almost tokens": (b"hf_" + b"a" * 29 + b" ") * 60_000,
    "schemes": b"a://" * 500_000, "users": b"://a:" * 400_000, "long user": b"://" + b"u" * 2_000_000,
    "jwt heads": b"eyJ" * 600_000, "jwt parts": (b"eyJ" + b"a" * 50 + b".") * 40_000, "dashes": b"-" * 2_000_000,
    "key heads": (b"-----BEGIN " + b"PRIVATE KEY-----") * 75_000, "bearers": b"bearer " * 300_000,
    "key lines": b"-----BEGIN " + b"PRIVATE KEY-----" + b"\n" * 2_000_000,
    "spaces": b"Authorization:" + b" " * 2_000_000,
    "broken jwt": b"-eyJaaaaaaaa" * 160_000,
    "newlines": (b"-----BEGIN " + b"PRIVATE KEY-----" + b"\naaaaaaa") * 60_000,
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_no_input_is_more_than_linear(name: str) -> None:
    """Two megabytes made to slow each pattern down; a quadratic search would take minutes."""
    before = time.process_time()
    redact(HOSTILE[name])
    assert time.process_time() - before < 5


FRAGMENTS = [
    *(text.encode() for text in (*TOKENS.values(), *MORE.values(), MIXED)),
    *b"sk- ey J ://user:pw@ :// @ : secret_access_key SECRET_ACCESS_KEY= bearer Authorization: github_pat_ x =".split(),
    *(b" ", b"\n", b"\xe9", b"\x85", b"\xa0", b"\0", b"\x0b", b"eyJ" + b"a" * 1500, b"x" * 60, b". " * 300, b"_" * 99),
]


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=40), st.integers(0, 3000), st.sampled_from([64, 1000, 4096]))
def test_looking_by_pieces_finds_what_one_search_does(parts: list[bytes], start: int, piece: int) -> None:
    data = b"".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE_BYTES", piece)
        found = module._next_secret(data, start)
    expected = module._SECRET.search(data, start)
    assert (found and (found.span(), found.lastgroup)) == (expected and (expected.span(), expected.lastgroup))


def test_text_and_search() -> None:
    token = TOKENS["github_token"]
    assert redact_text(f"é {token} \udcff", ["verysecret"]) == "é [redacted] \udcff"
    assert redact_text("a verysecret b", ["verysecret"]) == "a [redacted] b"
    assert find_secrets(f"é {token}".encode()) == [Redaction(3, len(token), "github_token")]
    assert find_secrets(b"lr = 0.1") == []


@pytest.mark.parametrize(("kind", "token"), [*TOKENS.items(), *list(MORE.items())[:3]])
def test_a_files_first_token(kind: str, token: str) -> None:
    expected = None if kind == "jwt" else kind
    for before, after in (("", ""), ("x = '", "'\n"), ("word " * 1000 + "\n", ""), ("\udcff\0é ", "\udce9")):
        assert token_kind(f"{before}{token}{after}".encode("utf-8", "surrogateescape")) == expected


@pytest.mark.parametrize("text", ["ghp_" + "x" * 36, "ghp_" + "0123" * 9, "AKIAIOSFODNN7EXAMPLE", "hf_" + "_" * 40, ""])
def test_placeholders_are_no_tokens(text: str) -> None:
    assert token_kind(text.encode()) is None
    assert token_kind(f"-----BEGIN CERTIFICATE-----\n{text}".encode()) is None
    assert token_kind(f"{text}\n{TOKENS['aws_key']}".encode()) == "aws_key"
    assert token_kind(f"{text}\n{TOKENS['npm_token']}".encode()) == "npm_token"


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("GITHUB_TOKEN", True), ("WANDB_API_KEY", True), ("db_password", True), ("AWS_SECRET_ACCESS_KEY", True),
        ("SESSION_COOKIE", True), ("GITLAB-PAT", True), ("HF_TOKEN_FILE", True), ("TOKENIZERS_PARALLELISM", False),
        ("PATH", False), ("KEYBOARD", False), ("KEY_COUNT", False), ("SSH_AUTH_SOCK", False), ("AUTHOR", False),
    ],
)  # fmt: skip
def test_names_of_secret_variables(name: str, secret: bool) -> None:
    assert is_secret_name(name) is secret


def test_values_of_secret_variables() -> None:
    environ = {
        "A_TOKEN": "12345678", "B_SECRET": "longer-than-that", "C_PASSWORD": "short", "PATH": "/usr/bin:/bin",
        "PWD": "/somewhere/else", "D_KEY": "12345678", "E_TOKEN": "\udcff1234567",
    }  # fmt: skip
    assert secret_values(environ) == [b"longer-than-that", b"12345678", b"\xff1234567"]


def test_names_of_secret_files() -> None:
    assert is_secret_file(b"a/b/.ENV")
    assert is_secret_file(b".env.production")
    assert not is_secret_file(b".env.production.example")
    assert not is_secret_file(b"id_rsa/readme")
    assert not is_secret_file(b"p12")


# Spellings of a given value.


@pytest.mark.parametrize(
    "secret", ['a "b" \\ c', "line one\nline two", "p\u00e4ssw\u00f6rd", "  blanks around\n", "it's \\ so"]
)
def test_a_value_is_found_as_json_and_python_write_it(secret: str) -> None:
    for text in (secret, secret.strip(), json.dumps(secret), json.dumps(secret, ensure_ascii=False), repr(secret)):
        assert redact_text(f"<{text}>", [secret]).strip("<>\"' \n\\n") in ("[redacted]", "[redacted")


# Streams.


def streamed(redactor: Redactor | RecordRedactor, data: bytes, step: int) -> tuple[bytes, list[Redaction]]:
    pieces = [redactor.feed(data[start : start + step]) for start in range(0, len(data), step)]
    pieces.append(redactor.close())
    return b"".join(clean for clean, _ in pieces), [item for _, found in pieces for item in found]


@pytest.mark.parametrize(
    "secret", [*TOKENS.values(), MORE["openai_key"], "Authorization: Bearer abcdef.123-456_78", "given value"]
)
def test_a_stream_is_redacted_as_the_whole_would_be(secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a secret lies among the windows, and however the stream comes in."""
    window_bytes = 1 << 13
    monkeypatch.setattr("capsule.core.redact.WINDOW_BYTES", window_bytes)
    token = secret.encode()
    for edge in (window_bytes, window_bytes + OVERLAP_BYTES):
        for shift in (len(token) + 1, len(token), len(token) // 2, 1, 0):
            data = bytearray(b"word " * (2 * (window_bytes + OVERLAP_BYTES) // 5))
            data[edge - shift : edge - shift + len(token) + 2] = b" " + token + b" "
            data[-len(token) - 1 :] = b" " + token
            expected = redact(bytes(data), [b"given value"])
            assert len(expected[1]) == 2
            assert streamed(Redactor([b"given value"]), bytes(data), 100_000) == expected


@given(
    st.lists(
        st.one_of(st.binary(max_size=9), st.sampled_from([*map(str.encode, TOKENS.values()), b"valuevalue"])),
        max_size=8,
    ),
    st.integers(1, 50),
)  # fmt: skip
def test_how_a_stream_comes_in_makes_no_difference(pieces: list[bytes], step: int) -> None:
    data = b"".join(pieces)
    assert streamed(Redactor([b"valuevalue"]), data, step) == redact(data, [b"valuevalue"])


def test_a_secret_larger_than_the_windows_is_replaced_in_pieces() -> None:
    size = 2 * WINDOWS_MAX * (WINDOW_BYTES + OVERLAP_BYTES)
    data = b"< gh" + b"p_" + b"a" * size + b" >"
    clean, found = streamed(Redactor(), data, WINDOW_BYTES)
    assert clean.startswith(b"< " + MARKER)
    assert len(clean) < size
    assert found[0].offset == 2


def test_with_clip_nothing_grows() -> None:
    assert streamed(Redactor([b"12345678"], clip=True), b"<12345678>", 3)[0] == b"<[redacte>"
    assert streamed(RecordRedactor([b"12345678"], clip=True), b'{"a":"12345678"}', 3)[0] == b'{"a":"[redacte"}'


# Lines of JSON.

SECRETS = ["hunter2hunter2", 'a "quoted" \\ value', "gr\u00fc\u00dfe \U0001f600 tiger"]
VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=9),
        st.sampled_from(SECRETS),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["k", *SECRETS[:1]]), inner, max_size=2)
    ),
    max_leaves=6,
)  # fmt: skip


def without(value: Any) -> Any:
    """Return a JSON value with every secret replaced where it stands: what a redacted line should say."""
    if isinstance(value, str):
        return redact_text(value, SECRETS)
    if isinstance(value, list):
        return [without(item) for item in value]
    return {without(k): without(v) for k, v in value.items()} if isinstance(value, dict) else value


@given(st.dictionaries(st.text(max_size=5), VALUES, max_size=4), st.booleans(), st.integers(1, 40))
def test_an_object_says_the_same_without_its_secrets(item: dict[str, Any], ascii_only: bool, step: int) -> None:
    """R-10: decoded, the line is the object with its texts redacted; every other byte is as it was."""
    line = json.dumps(item, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    clean, found = streamed(RecordRedactor([secret.encode() for secret in SECRETS]), line + b"\n", step)
    assert json.loads(clean) == without(item)
    end, rebuilt = 0, b""
    for one in found:
        rebuilt += line[end : one.offset] + MARKER
        end = one.offset + one.length
    assert rebuilt + line[end:] + b"\n" == clean


@pytest.mark.parametrize(
    "escape", ["\\u0068unter2hunter2", "hunter2\\u0068\\u0075nter2", "\\u0068\\u0075\\u006Eter2hunter2"]
)
def test_escapes_hide_nothing(escape: str) -> None:
    line = f'{{"a":"x{escape}y","{escape}":["{escape}"],"n":[[{{"{escape}":1}}]]}}\n'.encode()
    clean, found = streamed(RecordRedactor([b"hunter2hunter2"]), line, 7)
    assert clean == b'{"a":"x[redacted]y","[redacted]":["[redacted]"],"n":[[{"[redacted]":1}]]}\n'
    assert {line[one.offset : one.offset + one.length].decode() for one in found} == {escape}


@pytest.mark.parametrize(
    "line",
    [
        b'{"a":12345678}', b'{"a":-1234567890e5,"b":[12345678]}', b"{}", b"", b"  ", b'{"a":"://x:","b":"y@"}',
        b'{"a":NaN}',
    ],
)  # fmt: skip
def test_numbers_and_what_spans_two_texts_stay(line: bytes) -> None:
    """R-10."""
    for data in (line, line + b"\n", line + b"\r\n" + line):
        assert streamed(RecordRedactor([b"12345678", b"1234567890"]), data, 5) == (data, [])


def test_public_names_and_fields_stay_in_the_outermost_object() -> None:
    """R-10 and K-09: names that are declared, and texts that name what was frozen."""
    public = Public(frozenset({"hunter2hunter2"}), lambda item: {"b"})
    line = b'{"hunter2hunter2":"hunter2hunter2","b":"hunter2hunter2","c":{"hunter2hunter2":1,"b":"hunter2hunter2"}}'
    clean, _ = streamed(RecordRedactor([b"hunter2hunter2"], public), line, 9)
    assert clean == b'{"hunter2hunter2":"[redacted]","b":"hunter2hunter2","c":{"[redacted]":1,"b":"[redacted]"}}'


def test_a_value_that_ends_in_a_newline_joins_no_lines() -> None:
    data = b'hunter2hunter2\n{"a":1}\n\nhunter2hunter2\nhunter2hunter2\n'
    clean, _ = streamed(RecordRedactor([b"hunter2hunter2\n"]), data, 4)
    assert clean == b'[redacted]\n{"a":1}\n\n[redacted]\n'


@pytest.mark.parametrize(
    "line", [b"[1]", b'{"a":1}x', b'{"a":"\xff"}', b"[" * 100_000, b'{"a":' * 100_000, b'"x"', b"12345678"]
)
def test_other_lines_are_bytes(line: bytes) -> None:
    """R-10."""
    data = line + b" 12345678 \n"
    assert streamed(RecordRedactor([b"12345678"]), data, 1_000)[0] == data.replace(b"12345678", MARKER)


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("before", [b"", b'{"a":"'])
def test_streams_are_linear_too(name: str, before: bytes) -> None:
    data = before + HOSTILE[name] + (b'"}' if before else b"")
    began = time.process_time()
    streamed(RecordRedactor([b"aaaaaaaaab"]), data, 1 << 18)
    assert time.process_time() - began < 10


# What was left out.


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("word gh" + "p_aB3dE6gH9j", "gh" + "p_aB3dE6gH9j"), ("x=sk-" + "ant-api03-aB", "sk-" + "ant-api03-aB"),
        ("see https://user:hunt", "user:hunt"), ("Authorization: Bearer abc", "abc"),
        ("AWS_SECRET_ACCESS_KEY=wJalr", "=wJalr"), ("it is given v", "given v"), ("it is giv", ""),
        ("ordinary words", ""),
        ("http://host/path:8080", ""), ("", ""), ("the end of sk-", ""),
    ],
)  # fmt: skip
def test_what_may_be_the_beginning_of_a_secret(text: str, rest: str) -> None:
    """K-09: at the edge of a gap."""
    assert text[open_end(text.encode(), [b"given value"]) :] == rest


def test_the_end_of_a_secret_across_a_place() -> None:
    data = b"words given value more"
    assert [end_of_secret_across(data, at, [b"given value"]) for at in (6, 7, 16, 17)] == [6, 17, 17, 17]


def test_looking_for_a_beginning_is_linear() -> None:
    for data in (*HOSTILE.values(), b"aaaa" * 500_000):
        began = time.process_time()
        open_end(data, [b"aaaa" * 100 + b"b"])
        assert time.process_time() - began < 2

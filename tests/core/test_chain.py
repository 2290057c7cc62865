"""The ledger's bytes: a chain in which no change goes unseen."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from builders import BOOT, History, honest, lines_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.core.account import add_up
from capsule.core.attempt import Clock, Heartbeat, Sealed, Spawned, Stopping
from capsule.core.chain import (
    EVENT_BYTES_MAX,
    LINE_BYTES_MAX,
    LINE_COMMAS_MAX,
    Head,
    Walk,
    encode,
    head_faults,
    read,
)
from capsule.core.digest import digest_of
from capsule.core.errors import MalformedError

LEDGER = honest().ledger
LINES = LEDGER.splitlines(keepends=True)
HEAD = read(LEDGER, "l").head


def seen(data: bytes, head: Head = HEAD) -> list[str]:
    """Return everything that reading a ledger against its head finds wrong."""
    chain = read(data, "l")
    return [*chain.faults, *(["torn tail"] if chain.tail else []), *head_faults(chain.walk, head)]


def test_an_honest_ledger_has_no_faults() -> None:
    """L-01 L-02: an honest ledger reads back as its events, and its head is that of its last line."""
    chain = read(LEDGER, "l")
    assert not seen(LEDGER)
    assert len(chain.events) == chain.walk.events == chain.walk.lines == HEAD.count == len(LINES)
    assert HEAD.sha256 == digest_of(LINES[-1][:-1])
    assert [event.seq for event in chain.events] == list(range(len(LINES)))
    assert not add_up(chain.events).faults


@given(st.integers(0, len(LEDGER) * 8 - 1))
@settings(max_examples=200)
def test_any_flipped_bit_is_seen(bit: int) -> None:
    """L-01 L-02: no bit of a ledger can be changed without a fault or another head."""
    data = bytearray(LEDGER)
    data[bit // 8] ^= 1 << bit % 8
    assert seen(bytes(data))


@given(st.integers(0, len(LINES) - 1), st.integers(0, len(LINES) - 1), st.sampled_from(["drop", "double", "swap"]))
@settings(max_examples=200)
def test_lines_cannot_be_dropped_doubled_or_moved(one: int, other: int, how: str) -> None:
    """L-01 L-02: lines keep their number, order and place."""
    lines = [*LINES]
    if how == "drop":
        del lines[one]
    elif how == "double":
        lines.insert(other, lines[one])
    else:
        lines[one], lines[other] = lines[other], lines[one]
    if lines != LINES:
        assert seen(b"".join(lines))


@given(st.integers(0, len(LEDGER) - 1))
@settings(max_examples=200)
def test_a_cut_ledger_is_seen(size: int) -> None:
    """L-02 L-03: a ledger cut anywhere is shorter than its head says, and its torn line is not read."""
    chain = read(LEDGER[:size], "l")
    assert seen(LEDGER[:size])
    assert chain.tail == LEDGER[:size].split(b"\n")[-1]
    assert not chain.faults


def test_the_head_may_be_one_event_behind_and_no_more() -> None:
    """L-02: the head is written second, so one event behind is legal; more, or ahead, or another hash is not."""
    hashes = [digest_of(line[:-1]) for line in LINES]
    count = len(hashes)
    assert not seen(LEDGER, Head(count=count - 1, sha256=hashes[-2]))
    assert "at most one event after" in seen(LEDGER, Head(count=count - 2, sha256=hashes[-3]))[0]
    assert "the ledger's tail is missing" in seen(LEDGER, Head(count=count + 1, sha256=hashes[-1]))[0]
    assert "to have the hash" in seen(LEDGER, Head(count=count, sha256=hashes[-2]))[0]
    assert "to have the hash" in seen(LEDGER, Head(count=count - 1, sha256=hashes[-1]))[0]
    assert not seen(b"", Head(count=0, sha256=None))
    assert seen(b"", HEAD)


def test_a_sealed_tail_is_evidence_and_the_chain_goes_on() -> None:
    """L-03: a torn tail becomes an event that holds its bytes, chained like any other."""
    history = History().opened()
    torn = b'{"at":{"boot'
    assert read(history.ledger + torn, "l").tail == torn
    history.event("sealed", None, Sealed(size=len(torn), sha256=digest_of(torn), hex=torn.hex()))
    history.attempt(0)
    chain = read(history.ledger, "l")
    assert not chain.faults
    assert not add_up(chain.events).faults


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda e: e.update(seq=7), "expected event 1 after"),
        (lambda e: e.update(prev=None), "expected event 1 after"),
        (lambda e: e.update(event="started"), "event: Input should be"),
        (lambda e: e.update(more=1), "more: Extra inputs"),
        (lambda e: e.pop("attempt"), "attempt: Field required"),
        (lambda e: e["data"].update(more=1), "more: Extra inputs"),
        (lambda e: e["data"].pop("supersedes"), "supersedes: Field required"),
        (lambda e: e.update(attempt="a1"), "attempt: String should match"),
        (lambda e: e["at"].update(realtime="2030-01-01 00:00:00.000Z"), "at.realtime: String should match"),
        (lambda e: e["at"].update(boottime_ms=-1), "at.boottime_ms: Input should be"),
        (lambda e: e["at"].update(boottime_ms=1.5), "expected an integer or a decimal string"),
    ],
)  # fmt: skip
def test_lines_that_are_no_events(change: object, words: str) -> None:
    """L-04: an event has exactly the fields of its kind; anything else is a fault with its line number."""
    event = json.loads(LINES[1])
    change(event)  # type: ignore[operator]
    faults = read(LINES[0] + lines_bytes([event]), "ledger").faults
    assert faults[0].startswith("ledger:2: ")
    assert words in faults[0]


@given(st.binary(max_size=300))
def test_any_bytes_are_read_without_an_error(data: bytes) -> None:
    """L-01: a verifier wants every finding: damage is never an exception, and a line without fault is an event."""
    chain = read(data, "l")
    assert chain.walk.lines == data.count(b"\n")
    assert chain.walk.torn == len(chain.tail)
    assert len(chain.events) + len(chain.faults) >= chain.walk.lines


def test_an_event_is_encoded_with_its_own_data_only() -> None:
    """L-04: writing an event with the data of another kind is a bug that stops the writer."""
    at = Clock(realtime="2030-01-01T00:00:00.000Z", boottime_ms=1, monotonic_ms=1, boot_id=BOOT)
    assert encode(0, None, "heartbeat", "a000001", at, Heartbeat(elapsed_ms=1)).startswith(b'{"at":{"boot_id"')
    with pytest.raises(AssertionError):
        encode(0, None, "heartbeat", "a000001", at, Spawned(pid=1, start_ticks=1))


def test_heads_have_one_form() -> None:
    """L-02: the head is canonical JSON of count and hash."""
    assert Head.from_bytes(HEAD.to_bytes(), "h") == HEAD
    assert Walk().head == Head(count=0, sha256=None)
    for data in (b"", b"{}", b'{"count":-1,"sha256":null}', b'{"count":1, "sha256":null}'):
        with pytest.raises(MalformedError):
            Head.from_bytes(data, "h")


@given(st.lists(st.integers(0, len(LEDGER)), max_size=9), st.binary(max_size=9))
@settings(max_examples=50)
def test_a_ledger_in_pieces_is_the_same_ledger(cuts: list[int], torn: bytes) -> None:
    """L-01 L-03: wherever its bytes are cut into pieces, the events, hashes and faults are those of the whole."""
    ends = [0, *sorted(cuts), len(LEDGER)]
    pieces = [*(LEDGER[start:end] for start, end in pairwise(ends)), torn]
    whole, walk = Walk(LEDGER + torn, "l", range(99)), Walk(pieces, "l", range(99))
    assert [*walk] == [*whole]
    assert {key: value for key, value in vars(walk).items() if key != "_content"} == {
        key: value for key, value in vars(whole).items() if key != "_content"
    }
    assert [*walk.hashes.values()][1 : len(LINES) + 1] == [digest_of(line[:-1]) for line in LINES]


AT = Clock(realtime="2030-01-01T00:00:00.000Z", boottime_ms=1, monotonic_ms=1, boot_id=BOOT)


def stopped(words: str) -> bytes:
    """Return a whole ledger of one event with a text."""
    return encode(0, None, "stopping", "a000001", AT, Stopping(cause="user", evidence=words)) + b"\n"


@pytest.mark.parametrize("more", [0, 1])
def test_a_line_has_a_size(more: int) -> None:
    """L-01: a line with as many bytes or commas as allowed is an event, with one more it is none."""
    room = EVENT_BYTES_MAX + 1 - len(stopped(""))
    commas = LINE_COMMAS_MAX - stopped("").count(b",")
    for words, limit in (("x" * (room + more), EVENT_BYTES_MAX), ("," * (commas + more), LINE_COMMAS_MAX)):
        walk = Walk([stopped(words)], "l")
        assert len([*walk]) == 1 - more
        what = "bytes" if "x" in words else "commas"
        assert walk.faults == [f"l:1: expected at most {limit} {what} in an event, found more"][:more]
        assert walk.last == digest_of(stopped(words)[:-1])


def test_the_longest_event_can_be_sealed_when_it_is_torn() -> None:
    """L-01 L-03: a sealed line may hold twice the bytes of any other, in ASCII; above that a line has no hash."""
    torn = stopped("x" * (EVENT_BYTES_MAX + 1 - len(stopped(""))))[:-1]
    data = Sealed(size=len(torn), sha256=digest_of(torn), hex=torn.hex())
    line = encode(0, None, "sealed", None, AT, data)
    assert EVENT_BYTES_MAX < len(line) <= LINE_BYTES_MAX
    assert not read(line + b"\n", "l").faults
    other = encode(0, None, "sealed", None, AT.model_copy(update={"boot_id": "\u00e9"}), data)
    assert read(other + b"\n", "l").faults == [f"l:1: expected at most {EVENT_BYTES_MAX} bytes in an event, found more"]
    for size in (LINE_BYTES_MAX, LINE_BYTES_MAX + 1):
        walk = Walk(b"x" * size + b"\n", "l")
        assert ([*walk], len(walk.faults), walk.lines) == ([], 1, 1)
        assert (walk.last is None) == (size > LINE_BYTES_MAX)


def test_a_ledger_is_not_read_on_after_a_thousand_faults() -> None:
    chain = read(b"x\n" * 3_000_000 + b"torn", "l")
    assert len(chain.faults) == 1001
    assert chain.faults[-1] == "l:1001: not read on after 1000 faults"
    assert chain.tail == b"torn"

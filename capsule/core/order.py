"""The order in time of what a capsule tells, each claim with the evidence that there is for it.

Only a verified token is a clock that the packer does not own. The ledger's chain shows an order without times, to
whoever believes that it was not rebuilt whole. Where nothing but the clock of the machine that ran speaks, a claim is
unproven.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Literal

from capsule.core.attempt import Event
from capsule.core.evidence import Reading
from capsule.core.manifest import Manifest
from capsule.core.schema import Model
from capsule.core.signing import TokenFound

EvidenceName = Literal["signed token", "ledger chain", "local clock only", "none"]


class Claim(Model):
    """One event in its order: what it came `after` (null: only its own time is claimed), and what shows that.

    `at` is a time by the evidence's own clock, null where there is none. `late` marks a first attempt that began, by
    the clock of its machine, before the token of its manifest.
    """

    event: Literal["freeze", "amendment", "signature", "timestamp", "first attempt", "capsule signature"]
    manifest: int | None
    after: str | None
    at: str | None
    evidence: EvidenceName
    proven: bool
    late: bool
    words: str


def order_in_time(reading: Reading, *, ledger_sound: bool) -> tuple[Claim, ...]:
    """Return every claim, manifest by manifest; `ledger_sound` says that chain, head and states were found right."""
    claims: list[Claim] = []
    numbers = sorted(reading.evidence.generations)
    for number, manifest in zip(numbers, reading.manifests, strict=False):
        claims += _of_manifest(reading, number, manifest, ledger_sound)
    for found in reading.signatures:
        if found.manifest is None and found.answer != "broken":
            words = f"by {found.key}; after all that the capsule holds, when is not shown"
            claims.append(_claim("capsule signature", None, words))
    return tuple(claims)


def _claim(
    event: Literal["freeze", "amendment", "signature", "timestamp", "first attempt", "capsule signature"],
    manifest: int | None,
    words: str,
    *,
    after: str | None = None,
    at: str | None = None,
    evidence: EvidenceName = "none",
    proven: bool = False,
    late: bool = False,
) -> Claim:
    return Claim(
        event=event, manifest=manifest, after=after, at=at, evidence=evidence, proven=proven, late=late, words=words
    )  # fmt: skip


def _of_manifest(reading: Reading, number: int, manifest: Manifest, sound: bool) -> Iterator[Claim]:
    identity = manifest.identity
    token = next((item for item in reading.tokens if item.manifest == number and item.answer != "broken"), None)
    adopted, first = reading.ledger.adopted.get(identity), reading.ledger.begun.get(identity)
    yield from _frozen(reading, number, manifest, token, adopted, sound)
    for found in reading.signatures:
        if found.manifest == number and found.answer != "broken":
            yield _claim("signature", number, f"by {found.key}; a signature holds no time")
    if token is not None:
        yield _stamped(reading, number, manifest, token)
    if first is None:
        return
    name = "freeze" if number == 1 else "amendment"
    in_order = adopted is not None and adopted.seq < first.seq
    yield _claim(
        "first attempt",
        number,
        f"{first.attempt} is event {first.seq}, the manifest event {adopted.seq if adopted else 'none'}",
        after=f"{name} {number}",
        at=first.at.realtime,
        evidence="ledger chain",
        proven=sound and in_order,
    )
    if token is not None:
        yield _first_and_token(number, token, first)


def _frozen(
    reading: Reading, number: int, manifest: Manifest, token: TokenFound | None, adopted: Event | None, sound: bool
) -> Iterator[Claim]:
    """Say by when a manifest existed, and of an amendment also after which event of the ledger."""
    event: Literal["freeze", "amendment"] = "freeze" if number == 1 else "amendment"
    if token is not None and token.answer == "verified":
        words = "the manifest existed by then"
        yield _claim(event, number, words, at=token.time, evidence="signed token", proven=True)
    elif adopted is not None:
        words = "the manifest was adopted then, by the clock of the machine that ran"
        yield _claim(event, number, words, at=adopted.at.realtime, evidence="local clock only")
    else:
        yield _claim(event, number, "no event of the ledger and no verified token names the manifest")
    seen = manifest.supersedes
    if seen is None or not seen.ledger_events:
        return
    named = reading.chain.hashes.get(seen.ledger_events, ...) == seen.ledger_head
    words = f"it names the hash of that event; {seen.rows_seen} rows of {seen.attempts_seen} attempts had been seen"
    yield _claim(
        event, number, words, after=f"event {seen.ledger_events - 1}", evidence="ledger chain", proven=sound and named
    )


def _stamped(reading: Reading, number: int, manifest: Manifest, token: TokenFound) -> Claim:
    verified = token.answer == "verified"
    if not verified:
        return _claim("timestamp", number, f"by its own words; {token.words}", at=token.time)
    seen = manifest.supersedes.ledger_events if manifest.supersedes else 0
    words = f"so existed the first {seen} events of the ledger, whose hash the manifest names" if seen else token.words
    return _claim("timestamp", number, words, at=token.time, evidence="signed token", proven=True)


def _first_and_token(number: int, token: TokenFound, first: Event) -> Claim:
    """Compare two clocks, of which the attempt's is its machine's own: never a proof, but a contradiction is named."""
    seconds = (datetime.fromisoformat(first.at.realtime) - datetime.fromisoformat(token.time)).total_seconds()
    late = seconds < 0
    said = "the token is LATER than the first attempt" if late else "the token came first"
    words = f"{said}, by {abs(seconds):.0f} s of the clock of the machine that ran"
    return _claim(
        "first attempt",
        number,
        words,
        after=f"timestamp {number}",
        at=first.at.realtime,
        evidence="local clock only",
        late=late,
    )

"""What each thing that speaks for a capsule proves, and what it does not: the sentences of every place that says so.

`docs/THREATS.md`, the VERIFY.md inside a capsule and `capsule verify` all take them from here; a test holds them.
"""

from __future__ import annotations

from capsule.core.evidence import Reading
from capsule.core.schema import Model


class Ground(Model):
    """One thing that a verdict can rest on."""

    ground: str
    proves: str
    does_not_prove: str


AGAINST_CAPSULE = Ground(
    ground="capsule identity from elsewhere",
    proves="No byte of the evidence was changed since that identity was published. This stops everyone, its maker too.",
    does_not_prove="Who made it, when, or that the trials measured honestly.",
)
AGAINST_MANIFEST = Ground(
    ground="manifest identity from elsewhere",
    proves="The promise is the published one. This stops whoever would change question, plan, code, budget or rules.",
    does_not_prove="Anything about ledger, records and results, which can be made anew under the same promise.",
)
CAPSULE_SIGNATURE = Ground(
    ground="capsule signature",
    proves="Whoever holds the key vouches for every byte of the evidence. This stops everyone without the key.",
    does_not_prove="When it was signed, or that the holder is honest: the holder can rebuild it and sign again.",
)
MANIFEST_SIGNATURE = Ground(
    ground="manifest signature",
    proves="Whoever holds the key vouches for the promise. This stops everyone without the key from changing it.",
    does_not_prove="Anything about ledger, records and results: a forger keeps the signed manifest, rebuilds the rest.",
)
TIMESTAMP = Ground(
    ground="timestamp",
    proves="The manifest existed at that time, unless the authority lies. This stops who would date it back.",
    does_not_prove="That no attempt came before it, since attempts are dated by the clock of the machine that ran; "
    "nor who made it. The token covers neither signatures nor results.",
)
LEDGER_CHAIN = Ground(
    ground="ledger chain",
    proves="No event was changed, dropped or moved without rebuilding all that follows. This stops who edits a part.",
    does_not_prove="Anything against whoever rebuilds ledger, records and results whole, or shows one of two.",
)
NOTHING_ELSE = Ground(
    ground="no seal from outside",
    proves="The parts belong together: what is derived follows from what is recorded. This stops damage and careless "
    "edits.",
    does_not_prove="Anything against whoever rebuilds everything consistently with better results: only a capsule "
    "signature, or a capsule identity published elsewhere, stops that.",
)
GROUNDS = (
    AGAINST_CAPSULE, AGAINST_MANIFEST, CAPSULE_SIGNATURE, MANIFEST_SIGNATURE, TIMESTAMP, LEDGER_CHAIN, NOTHING_ELSE,
)  # fmt: skip


def grounds(reading: Reading) -> tuple[Ground, ...]:
    """Return what the verdict of this reading rests on: only what was checked and found good counts."""
    found: list[Ground] = []
    if reading.evidence.identity in reading.against:
        found.append(AGAINST_CAPSULE)
    if {manifest.identity for manifest in reading.manifests} & set(reading.against):
        found.append(AGAINST_MANIFEST)
    accepted = {item.manifest for item in reading.signatures if item.answer == "accepted"}
    if None in accepted:
        found.append(CAPSULE_SIGNATURE)
    if accepted - {None}:
        found.append(MANIFEST_SIGNATURE)
    if any(token.answer == "verified" for token in reading.tokens):
        found.append(TIMESTAMP)
    if reading.chain.events:
        found.append(LEDGER_CHAIN)
    outside = AGAINST_CAPSULE in found or CAPSULE_SIGNATURE in found
    return tuple(found if outside else [*found, NOTHING_ELSE])

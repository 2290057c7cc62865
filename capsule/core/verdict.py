"""The verdict: every check by name with what it found, and two answers that are never mixed.

Integrity says whether the evidence agrees with itself and with what was expected; outcome says what intact evidence
shows. An outcome is withheld unless integrity is intact.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from capsule.core.order import Claim
from capsule.core.rests import Ground
from capsule.core.results import HypothesisResult
from capsule.core.schema import Model
from capsule.core.signing import SignatureFound, TokenFound

Integrity = Literal["broken", "incomplete", "intact"]
OutcomeAnswer = Literal["supported", "refuted", "inconclusive", "withheld"]
CheckStatus = Literal["passed", "failed", "not_checked"]

CHECKS: tuple[tuple[str, str], ...] = (
    ("V-01", "container"),
    ("V-02", "members"),
    ("V-03", "required members"),
    ("V-04", "manifest"),
    ("V-05", "plan"),
    ("V-06", "manifest chain"),
    ("V-07", "against"),
    ("V-08", "signature"),
    ("V-09", "timestamp"),
    ("V-10", "ledger chain"),
    ("V-11", "ledger head"),
    ("V-12", "attempt states"),
    ("V-13", "charges"),
    ("V-14", "attempt files"),
    ("V-15", "sources"),
    ("V-16", "import provenance"),
    ("V-17", "records"),
    ("V-18", "results"),
    ("V-19", "telemetry"),
)
"""Every check in the order in which it is made, with the clause of `docs/spec/verdict.md` that it enforces."""

FINDINGS_COUNTED_MAX = 10_000
"""Findings after which a check stops: it has failed, whatever else it would find."""

FINDINGS_MAX = 50


class Check(Model):
    """One check: what it is, how it ended, in words, and its findings (the first fifty)."""

    id: str
    name: str
    status: CheckStatus
    words: str
    findings: tuple[str, ...] = ()
    required: bool = True


class Verdict(Model):
    """What verifying a capsule says."""

    schema_: Annotated[Literal["capsule.verdict/1"], Field(alias="schema")]
    protocol: str | None
    manifest: str | None
    capsule: str | None
    integrity: Integrity
    outcome: OutcomeAnswer
    signed: bool
    amended: str
    checks: tuple[Check, ...]
    signatures: tuple[SignatureFound, ...]
    tokens: tuple[TokenFound, ...]
    order: tuple[Claim, ...]
    rests_on: tuple[Ground, ...]
    hypotheses: tuple[HypothesisResult, ...]


def integrity_of(checks: tuple[Check, ...]) -> Integrity:
    """A failed check breaks; a required one that could not be made leaves the capsule incomplete."""
    if any(check.status == "failed" for check in checks):
        return "broken"
    if any(check.status == "not_checked" and check.required for check in checks):
        return "incomplete"
    return "intact"

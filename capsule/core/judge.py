"""The verification core: values in, verdict out. It touches no file, clock or network.

The checks, in the order of `verdict.CHECKS`: the container's own findings; every member's digest; that nothing
required is absent; the manifest's bytes and its lists; the plan enumerated again from the protocol; the chain of
amendments; the caller's expected identity; signatures and timestamps (by checkers handed in); the ledger's hash chain,
its head, the state table, the charges added up again within the budget; attempt files against the ledger; sources and
imports against the manifest; the records' table against the journals; the results derived again; what devices were
seen doing added up again.
"""

from __future__ import annotations

from collections.abc import Sequence

from capsule.core.checks import CHECK_FUNCTIONS, amendments
from capsule.core.errors import CapsuleError, shortened
from capsule.core.evidence import Evidence, NotChecked, Reading
from capsule.core.ledger_checks import Checking
from capsule.core.order import Claim, order_in_time
from capsule.core.rests import grounds
from capsule.core.signing import Trust
from capsule.core.verdict import CHECKS, FINDINGS_COUNTED_MAX, FINDINGS_MAX, Check, Verdict, integrity_of


def judge(evidence: Evidence, *, against: Sequence[str] = (), trust: Trust | None = None) -> Verdict:
    """Make every check in order and return the verdict; `trust` says by what signatures and tokens are judged."""
    reading = Reading(evidence, tuple(against), trust or Trust())
    checks = tuple(_made(identifier, name, CHECK_FUNCTIONS[identifier](reading)) for identifier, name in CHECKS)
    integrity = integrity_of(checks)
    results = reading.results
    intact = integrity == "intact" and results is not None
    ledger_sound = all(check.status == "passed" for check in checks if check.id in ("V-10", "V-11", "V-12"))
    order = order_in_time(reading, ledger_sound=ledger_sound)
    return Verdict(
        schema_="capsule.verdict/1",
        protocol=reading.manifest.protocol.name if reading.manifest else None,
        manifest=reading.manifest.identity if reading.manifest else None,
        capsule=evidence.identity,
        integrity=integrity,
        outcome=results.outcome if intact and results else "withheld",
        signed=any(found.answer != "broken" for found in reading.signatures),
        amended=shortened(amendments(reading.manifests)),
        checks=tuple(_with_lateness(check, order) for check in checks),
        signatures=tuple(reading.signatures),
        tokens=tuple(reading.tokens),
        order=order,
        rests_on=grounds(reading),
        hypotheses=results.hypotheses if intact and results else (),
    )


def _with_lateness(check: Check, order: Sequence[Claim]) -> Check:
    """Add to V-09 what only the ledger shows: that a token is later than the first attempt (S-12)."""
    late = [claim for claim in order if claim.late]
    if check.id != "V-09" or not late:
        return check
    words = "; ".join(f"manifest {claim.manifest}: {claim.words}" for claim in late)
    return check.model_copy(update={"words": f"{check.words}; {words}"})


def _made(identifier: str, name: str, checking: Checking) -> Check:
    """Run one check: its generator yields findings and returns words; what it cannot read it says by NotChecked."""
    findings: list[str] = []
    count = 0
    words = ""
    try:
        while True:
            finding = next(checking)
            count += 1
            if count > FINDINGS_COUNTED_MAX:
                break
            if len(findings) < FINDINGS_MAX:
                findings.append(shortened(finding))
    except StopIteration as stop:
        words = shortened(stop.value)
    except NotChecked as reason:
        if not findings:
            words = shortened(str(reason))
            return Check(id=identifier, name=name, status="not_checked", words=words, required=reason.required)
    except CapsuleError as error:
        count += 1
        findings.append(error.message)
    if count:
        return Check(id=identifier, name=name, status="failed", words=f"{count} findings", findings=tuple(findings))
    return Check(id=identifier, name=name, status="passed", words=words)

"""The verification core: values in, verdict out. It touches no file, clock or network.

The checks, in the order of `verdict.CHECKS`: the container's own findings; every member's digest; that nothing
required is absent; the manifest's bytes and its lists; the plan enumerated again from the protocol; the chain of
amendments; the caller's expected identity; signature and timestamp (named, judged elsewhere); the ledger's hash chain,
its head, the state table, the charges added up again within the budget; attempt files against the ledger; sources and
imports against the manifest; the records' table against the journals; the results derived again; what devices were
seen doing added up again.
"""

from __future__ import annotations

from collections.abc import Sequence

from capsule.core.checks import CHECK_FUNCTIONS, amendments
from capsule.core.errors import CapsuleError
from capsule.core.evidence import Evidence, NotChecked, Reading
from capsule.core.ledger_checks import Checking
from capsule.core.verdict import CHECKS, FINDINGS_MAX, Check, Verdict, integrity_of


def judge(evidence: Evidence, *, against: Sequence[str] = (), signature_required: bool = False) -> Verdict:
    """Make every check in order and return the verdict."""
    reading = Reading(evidence, tuple(against), signature_required)
    checks = tuple(_made(identifier, name, CHECK_FUNCTIONS[identifier](reading)) for identifier, name in CHECKS)
    integrity = integrity_of(checks)
    results = reading.results
    intact = integrity == "intact" and results is not None
    return Verdict(
        schema_="capsule.verdict/0",
        protocol=reading.manifest.protocol.name if reading.manifest else None,
        manifest=reading.manifest.identity if reading.manifest else None,
        capsule=evidence.identity,
        integrity=integrity,
        outcome=results.outcome if intact and results else "withheld",
        signed=any("manifest.json.sig" in files for files in evidence.generations.values()),
        amended=amendments(reading.manifests),
        checks=checks,
        hypotheses=results.hypotheses if intact and results else (),
    )


def _made(identifier: str, name: str, checking: Checking) -> Check:
    """Run one check: its generator yields findings and returns words; what it cannot read it says by NotChecked."""
    findings: list[str] = []
    count = 0
    words = ""
    try:
        while True:
            finding = next(checking)
            count += 1
            if len(findings) < FINDINGS_MAX:
                findings.append(finding)
    except StopIteration as stop:
        words = stop.value
    except NotChecked as reason:
        if not findings:
            return Check(id=identifier, name=name, status="not_checked", words=str(reason), required=reason.required)
    except CapsuleError as error:
        count += 1
        findings.append(error.message)
    if count:
        return Check(id=identifier, name=name, status="failed", words=f"{count} findings", findings=tuple(findings))
    return Check(id=identifier, name=name, status="passed", words=words)

"""Plans at their bounds and one beyond: both verifiers take the first and refuse the second."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import verifier

from capsule.core.canonical import canonical
from capsule.core.plan_checks import complaints
from capsule.core.protocol import Protocol
from tests.golden.make import MANIFEST, unpack

GOLDEN = Path(__file__).parents[1] / "golden" / "supported.capsule"
PROTOCOL = json.loads(unpack(GOLDEN.read_bytes())[MANIFEST])["protocol"]
ARMS = [arm["name"] for arm in PROTOCOL["arms"]]


def small(**changes: Any) -> dict[str, Any]:
    """Return the golden's protocol with one workload, one estimate, no factors and nothing excluded."""
    plain = {"workloads": PROTOCOL["workloads"][:1], "factors": [], "exclusions": []}
    design = {**PROTOCOL["design"], "seeds": [1], "starts": 2, "blocks": 1, "order": "listed"}
    hypotheses = [{**item, "workloads": []} for item in PROTOCOL["hypotheses"]]
    design |= changes.pop("design", {})
    return {**PROTOCOL, **plain, "hypotheses": hypotheses, "design": design, **changes}


def parts(protocol: dict[str, Any]) -> int:
    """Return the parts of the results of one workload, starts left out."""
    decisions = sum(len(item["gates"]) or 1 for item in protocol["hypotheses"])
    return len(protocol["estimates"]) + decisions + len(ARMS) * len(protocol["observations"])


def with_starts(more: int) -> dict[str, Any]:
    """As many starts as the results of five estimates may have."""
    estimates = [{**PROTOCOL["estimates"][0], "name": f"e{number}"} for number in range(5)]
    hypotheses = [item for item in small()["hypotheses"] if item["rule"] == "gates_pass"]
    hypotheses = hypotheses or [{**small()["hypotheses"][0], "estimate": "e0"}]
    plan = small(estimates=estimates, hypotheses=hypotheses)
    return small(estimates=estimates, hypotheses=hypotheses, design={"starts": (200_000 - parts(plan)) // 5 + more})


def with_observations(more: int) -> dict[str, Any]:
    """As many columns as a table may have."""
    room = 400 - len(PROTOCOL["observations"]) + more
    others = [{**PROTOCOL["observations"][0], "name": f"o{number}"} for number in range(room)]
    return small(observations=[*PROTOCOL["observations"], *others])


def with_values(more: int) -> dict[str, Any]:
    """As many values in all cells as they may have, in blocks of two cells."""
    gates = [*PROTOCOL["gates"], *({**PROTOCOL["gates"][0], "name": f"g{number}"} for number in range(200))]
    each = 2 * len(ARMS) * (len(PROTOCOL["observations"]) + len(gates) + len(PROTOCOL["estimates"]))
    return small(gates=gates, design={"blocks": 10_000_000 // each + more})


def with_names(more: int) -> dict[str, Any]:
    """Names of workloads as long as they may be, over a thousand cells of each of two levels."""
    short = len(small()["workloads"][0]["name"]) + len("[f=]")
    cells = 2 * 500 * len(ARMS)
    room = 2**25 // cells - 2 * short
    levels = ["x" * (room // 2), "y" * (room - room // 2 + more)]
    return small(factors=[{"name": "f", "levels": levels}], design={"blocks": 500})


def with_reasons(more: int) -> dict[str, Any]:
    """Reasons as long as they may be, of one of two workloads, which no hypothesis is about."""
    workloads = [{"name": name, "parameters": {}} for name in ("one", "two")]
    hypotheses = [{**item, "workloads": ["one"]} for item in small()["hypotheses"]]
    cells = 2**25 // 8192
    exclusions = [{"arm": None, "workload": "two", "reason": "x" * (8192 + more)}]
    blocks = cells // 2 // len(ARMS)
    return small(workloads=workloads, hypotheses=hypotheses, exclusions=exclusions, design={"blocks": blocks})


@pytest.mark.parametrize("make", [with_starts, with_observations, with_values, with_names, with_reasons])
def test_both_verifiers_have_the_same_bounds(make: Callable[[int], dict[str, Any]]) -> None:
    """P-06: what everyone who verifies goes through has bounds, which both draw at the same place."""
    at, beyond = make(0), make(1)
    assert (list(complaints(Protocol.model_validate_json(canonical(at)))), verifier.complaint(at)) == ([], None)
    found = list(complaints(Protocol.model_validate_json(canonical(beyond))))
    assert len(found) == 1
    assert "expected at most" in found[0][1]
    assert verifier.complaint(beyond) is not None

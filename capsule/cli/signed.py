"""What `sign` and `timestamp` say, and what `verify` says of signatures, of order and of what a verdict rests on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from capsule.cli.words import Said, columns, paint, safe

if TYPE_CHECKING:
    from capsule.core.order import Claim
    from capsule.core.verdict import Verdict
    from capsule.steps.sign import Signed
    from capsule.steps.timestamp import Stamped


def signed(result: Signed) -> Said:
    """Say what was signed."""
    value = {
        "signed": result.of,
        "identity": result.identity,
        "key": result.key.key,
        "key_type": result.key.key_type,
        "namespace": result.key.namespace,
        "file": str(result.path),
        "written": result.written,
        "notes": result.notes,
    }
    verb = "signed" if result.written else "signed already"
    lines = [result.identity, f"{verb}: {result.of}, by key {result.key.key}, in {os.path.relpath(result.path)}"]
    lines += [paint(f"note: {note}", "doubt") for note in result.notes]
    if result.of == "manifest":
        lines.append("this vouches for the promise; sign the packed capsule too, to vouch for the results")
    return value, "\n".join(lines)


def stamped(result: Stamped) -> Said:
    """Say what was stamped, or where the query is."""
    token = result.token
    value = {
        "manifest": result.manifest,
        "file": str(result.path),
        "time": token.time if token else None,
        "written": result.written,
    }
    if token is None:
        words = f"wrote the query to {result.path}; send it to an authority, then: capsule timestamp … --token REPLY"
    else:
        verb = "stamped" if result.written else "stamped already"
        place = os.path.relpath(result.path)
        words = f"{verb}: {token.time} by its own words, unverified (`capsule verify --tsa-ca` verifies), in {place}"
    return value, f"{result.manifest}\n{words}"


NOT_ACCEPTED = {
    "unknown": "a key that is unknown to you",
    "not_valid": "a key that is not valid by your policy",
    "not_permitted": "a key that your policy does not permit this",
    "unchecked": "a key that was not checked",
}


def signatures(result: Verdict) -> str:
    """Return what follows `integrity: intact`: by whom each thing is signed; keys and reasons are told by V-08."""
    from capsule.core.signature_checks import signer

    if not result.signatures:
        return "unsigned"
    words = []
    for of in dict.fromkeys(item.of for item in result.signatures):
        found = [item for item in result.signatures if item.of == of]
        if any(item.answer == "broken" for item in found):
            words.append(f"a signature of something else than this {of}")
        names = [signer(item) for item in found if item.answer == "accepted"]
        others = [NOT_ACCEPTED[item.answer] for item in found if item.answer in NOT_ACCEPTED]
        if names or others:
            words.append(f"{of} signed by {', '.join(dict.fromkeys(names or others))}")
    if all(item.manifest is not None for item in result.signatures):
        words.append("the capsule itself unsigned")
    return safe(", ".join(words))


def order(claims: Sequence[Claim]) -> list[str]:
    """Return the block on order in time."""
    if not claims:
        return []
    rows = []
    for claim in claims:
        event = f"{claim.event} {claim.manifest}" if claim.manifest else claim.event
        what = f"{event}, after {claim.after}" if claim.after else event
        proven = "proven" if claim.proven else "unproven"
        rows.append((f"  {what}", proven, claim.evidence, claim.at or "-", claim.words))
    return ["", "order in time:", *columns(rows, ("", "", "evidence", "time", "")).splitlines()[1:]]


def rests_on(result: Verdict) -> list[str]:
    """Return the block on what proves what."""
    lines = ["", "this rests on:"]
    for item in result.rests_on:
        lines += [f"  {item.ground}", f"    proves: {item.proves}", f"    not:    {item.does_not_prove}"]
    return lines

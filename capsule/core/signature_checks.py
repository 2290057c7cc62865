"""The checks of signatures and tokens, V-08 and V-09: well formed, over this object, and by whom the caller trusts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from capsule.core.digest import digest_of
from capsule.core.errors import MalformedError
from capsule.core.evidence import NotChecked, Reading
from capsule.core.ledger_checks import Checking
from capsule.core.signing import SignatureAnswer, SignatureFound, TokenAnswer, TokenFound
from capsule.core.sshsig import (
    ARCHIVE_NAMESPACE,
    JUDGED_MAX,
    MANIFEST_NAMESPACE,
    SIGNATURES_MAX,
    archive_message,
    read_signature,
    signature_name,
)
from capsule.core.tokens import read_token

MANIFEST = "manifest.json"
TOKEN = "manifest.json.tsr"
SIGNATURES = tuple(signature_name(MANIFEST, number) for number in range(1, SIGNATURES_MAX + 1))

WILDCARDS = frozenset("*?")
"""What makes a name of a policy a pattern (PATTERNS in ssh_config(5))."""

NO_CHECKER = SignatureAnswer("unchecked", "nobody checked whether it is good")
NO_AUTHORITY = TokenAnswer("unchecked", "unverified: no authority was given to check it by")


@dataclass(frozen=True, slots=True)
class _Offered:
    """A signature file with what it should be over."""

    place: str
    data: bytes
    namespace: str
    message: bytes | None
    manifest: int | None


def check_signature(reading: Reading) -> Checking:
    """V-08: every signature is well formed and good, and what the caller demands is signed by whom it trusts."""
    _read_tokens(reading)
    every = list(_offered(reading))
    if len(every) > JUDGED_MAX:
        yield f"expected at most {JUDGED_MAX} signatures, found {len(every)}"
    for offered in every[:JUDGED_MAX]:
        try:
            found = _judged(reading, offered)
        except MalformedError as error:
            yield error.message
            continue
        reading.signatures.append(found)
        if found.answer == "broken":
            yield f"{found.file}: expected a signature of this {found.of} by {found.key}, found {found.words}"
    words = said(reading.signatures)
    _demand(reading, words)
    if not any(found.answer == "accepted" for found in reading.signatures):
        raise NotChecked(words, required=False)
    return words


def said(found: list[SignatureFound]) -> str:
    """Say by whom the capsule and each manifest are signed."""
    if not found:
        return "unsigned"
    parts = [_words(item) for item in found]
    if not any(item.manifest is None for item in found):
        parts.append("the capsule itself is unsigned")
    return "; ".join(parts)


def _words(found: SignatureFound) -> str:
    key = f"key {found.key}"
    if found.answer == "accepted":
        when = f"at {found.judged_at}, the token's time" if found.judged_at else "now"
        by = signer(found)
        return f"{found.of} signed by {by}{'' if key in by else f' ({key})'}, valid {when}, revocation not checked"
    return f"{found.of} signed by {key}, {found.words}"


def signer(found: SignatureFound) -> str:
    """Say whose an accepted key is by the policy, which may have no name for its owner but a pattern."""
    names = [name for name in found.principals if not WILDCARDS.intersection(name)]
    if names:
        return ", ".join(names)
    patterns = " or ".join(repr(name) for name in found.principals)
    return f"key {found.key}, which your policy takes for whoever matches {patterns}"


def _offered(reading: Reading) -> Iterator[_Offered]:
    for number, files in sorted(reading.evidence.generations.items()):
        for name in SIGNATURES:
            if name in files:
                place = f"1-manifest/{number:03d}/{name}"
                yield _Offered(place, files[name], MANIFEST_NAMESPACE, files.get(MANIFEST, b""), number)
    identity = reading.evidence.identity
    for name, data in reading.trust.signatures:
        yield _Offered(name, data, ARCHIVE_NAMESPACE, archive_message(identity) if identity else None, None)


def _judged(reading: Reading, offered: _Offered) -> SignatureFound:
    """Judge one signature, at the time of its manifest's verified token, else now (S-07)."""
    signature = read_signature(offered.data, offered.place)
    if signature.namespace != offered.namespace:
        raise MalformedError(
            f"{offered.place}: expected a signature for {offered.namespace}, found one for {signature.namespace!r}"
        )
    check = reading.trust.check_signature
    time = next((t.time for t in reading.tokens if t.manifest == offered.manifest and t.answer == "verified"), None)
    if check is None:
        answer = NO_CHECKER
    elif offered.message is None:
        answer = SignatureAnswer("unchecked", "and the capsule has no identity that could be signed")
    else:
        answer = check(offered.message, offered.data, offered.namespace, time)
        if time is not None and answer.answer == "not_valid":
            time = None
            answer = check(offered.message, offered.data, offered.namespace, None)
    return SignatureFound(
        file=offered.place,
        manifest=offered.manifest,
        key_type=signature.key_type,
        key=signature.key,
        answer=answer.answer,
        principals=answer.principals,
        judged_at=time if answer.answer == "accepted" else None,
        words=answer.words,
    )


def _demand(reading: Reading, words: str) -> None:
    """Raise unless what the caller demands is there."""
    demand = reading.trust.demand
    if demand is None:
        return
    accepted = {found.manifest for found in reading.signatures if found.answer == "accepted"}
    capsule, manifest = None in accepted, max(reading.evidence.generations, default=0) in accepted
    met = {"any": capsule or manifest, "capsule": capsule, "manifest": manifest, "both": capsule and manifest}
    if not met[demand]:
        wanted = {"any": "the capsule or its manifest", "capsule": "the capsule", "manifest": "the manifest in force"}
        whom = wanted.get(demand, "the capsule and its manifest")
        raise NotChecked(f"expected a signature of {whom} by a trusted key, found: {words}")


def _read_tokens(reading: Reading) -> None:
    """Read and check the token of every manifest; what is wrong with one is kept for V-09."""
    every = [(number, files) for number, files in sorted(reading.evidence.generations.items()) if TOKEN in files]
    if len(every) > JUDGED_MAX:
        reading.token_faults.append(f"expected at most {JUDGED_MAX} tokens, found {len(every)}")
    for number, files in every[:JUDGED_MAX]:
        place = f"1-manifest/{number:03d}/{TOKEN}"
        manifest = files.get(MANIFEST, b"")
        try:
            token = read_token(files[TOKEN], place)
        except MalformedError as error:
            reading.token_faults.append(error.message)
            continue
        if token.imprint != digest_of(manifest):
            reading.token_faults.append(
                f"{place}: expected a token over {digest_of(manifest)}, found one over {token.imprint}"
            )
            continue
        check = reading.trust.check_token
        answer = check(manifest, files[TOKEN]) if check else NO_AUTHORITY
        if answer.answer == "broken":
            reading.token_faults.append(f"{place}: expected a token that its authority signed, found {answer.words}")
        reading.tokens.append(TokenFound(manifest=number, time=token.time, answer=answer.answer, words=answer.words))


def check_timestamp(reading: Reading) -> Checking:
    """V-09: every token is over its manifest; with an authority to check by, that of the manifest in force is its."""
    yield from reading.token_faults
    words = "; ".join(_stamped(token) for token in reading.tokens) or "not timestamped"
    verified = {token.manifest for token in reading.tokens if token.answer == "verified"}
    if reading.trust.check_token and max(reading.evidence.generations, default=0) not in verified:
        raise NotChecked(f"expected a token of the manifest in force by the given authority, found: {words}")
    if not verified:
        raise NotChecked(words, required=False)
    return words


def _stamped(token: TokenFound) -> str:
    if token.answer == "verified":
        return f"manifest {token.manifest} existed by {token.time}, as the authority signed"
    return f"manifest {token.manifest} has a token that says {token.time}, {token.words}"

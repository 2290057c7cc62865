"""A verdict as an in-toto Statement v1, in a DSSE envelope where there is a key to sign with.

A DSSE envelope has at least one signature, so without a key the bare statement is written: it says what was found, and
nobody vouches for it.
"""

from __future__ import annotations

import base64

from capsule import __version__
from capsule.core.canonical import canonical
from capsule.core.digest import hex_of
from capsule.host.openssl import SigningKey
from capsule.steps.judged import Judged

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:evidence-capsule:verdict:0"


def statement(found: Judged, name: str, sha256: str) -> bytes:
    """Return the statement about the capsule file of that name and digest (hexadecimal digits), and its manifest."""
    subject = [{"name": name, "digest": {"sha256": sha256}}]
    if found.verdict.manifest is not None:
        subject.append({"name": "manifest.json", "digest": {"sha256": hex_of(found.verdict.manifest)}})
    return canonical(
        {
            "_type": STATEMENT_TYPE,
            "subject": subject,
            "predicateType": PREDICATE_TYPE,
            "predicate": {
                "verdict": found.verdict.to_json(),
                "verifier": {"name": "evidence-capsule", "version": __version__},
            },
        }
    )


def envelope(payload: bytes, key: SigningKey) -> bytes:
    """Return the DSSE envelope with one signature over the payload and its type."""
    signature = {"keyid": key.identity, "sig": _base64(key.sign(encoding(payload)))}
    return canonical({"payload": _base64(payload), "payloadType": PAYLOAD_TYPE, "signatures": [signature]})


def encoding(payload: bytes) -> bytes:
    """Return what is signed: DSSE's pre-authentication encoding of type and payload."""
    return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload), payload)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")

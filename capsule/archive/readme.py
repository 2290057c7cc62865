"""The two texts inside a capsule: how to check it without this tool, and how to cite it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence

from capsule.core.manifest import Manifest
from capsule.core.rests import GROUNDS

_VERIFY = """\
# How to check this capsule

Protocol: {name}: {title}
Manifest: {identity}

With the tool:

    capsule verify FILE --against {identity}
    capsule replay FILE

Without it, with zstd, tar and sha256sum:

    mkdir checked
    zstd -dc FILE | tar -x -C checked
    cd checked
    sha256sum -c 9-SHA256SUMS
    sha256sum 1-manifest/{generation:03d}/manifest.json

The last line must print {hex}.
Every source file is stored under `5-sources/` by its own SHA-256, so `sha256sum` of each prints its name; the list
`1-manifest/{generation:03d}/sources.jsonl` says which path each one had. Behind the tar lie an index and a seek table,
which these programs skip: nothing that they check depends on either.

The capsule's identity is the SHA-256 of the text `capsule-archive/1`, a newline, and the member lines of `9-TABLE`:

    (printf 'capsule-archive/1\\n'; grep '^\\["[0-9]-' 9-TABLE) | sha256sum

## Who signed it, and when the promise existed

SIGNERS is a file of the keys that you trust (ALLOWED SIGNERS in ssh-keygen(1)), WHO one of its names, CA a file with
the certificate of a timestamp authority that you trust. Revocation is not looked at.

{signed}
A signature of the capsule itself is a file beside it, `FILE.sig`, and signs the capsule's identity:

    (printf 'capsule-archive/1\\n'; grep '^\\["[0-9]-' 9-TABLE) | sha256sum | sed 's/ .*//; s/^/sha256:/' \\
        | ssh-keygen -Y verify -f SIGNERS -I WHO -n capsule-archive -s FILE.sig

## What proves what

{grounds}"""

_SIGNATURE = """\
A signature of manifest {number}:

    ssh-keygen -Y verify -f SIGNERS -I WHO -n capsule-manifest -s {folder}/{name} < {folder}/manifest.json

"""
_TOKEN = """\
The timestamp of manifest {number}; the first command prints its time:

    openssl ts -reply -in {folder}/{name} -text
    openssl ts -verify -in {folder}/{name} -data {folder}/manifest.json -CAfile CA

"""


def verify_text(manifest: Manifest, generations: Sequence[Mapping[str, bytes]]) -> bytes:
    """Return VERIFY.md for the capsule of this manifest, the last of a chain whose files are given."""
    identity = manifest.identity
    text = _VERIFY.format(
        name=manifest.protocol.name,
        title="".join(c if c.isprintable() else " " for c in manifest.protocol.title),
        identity=identity,
        hex=identity.removeprefix("sha256:"),
        generation=len(generations),
        signed="".join(_signed(generations)) or "No manifest of this capsule is signed or has a timestamp.\n",
        grounds="".join(
            f"- **{item.ground}**. {item.proves} It does not prove: {item.does_not_prove}\n" for item in GROUNDS
        ),
    )
    return text.encode()


def _signed(generations: Sequence[Mapping[str, bytes]]) -> Iterator[str]:
    for number, files in enumerate(generations, start=1):
        for name in sorted(files):
            if re.fullmatch(r"manifest\.json(\.[2-9])?\.sig|manifest\.json\.tsr", name):
                template = _TOKEN if name.endswith(".tsr") else _SIGNATURE
                yield template.format(number=number, name=name, folder=f"1-manifest/{number:03d}")


def citation(manifest: Manifest) -> bytes:
    """Return CITATION.cff; its authors are for the publisher to add, since a protocol names no persons."""
    lines = [
        "cff-version: 1.2.0",
        "message: Cite this capsule by its identity, which `capsule verify` prints.",
        f"title: {json.dumps(manifest.protocol.title)}",
        "type: dataset",
        "authors:",
        '  - name: "unnamed"',
        "identifiers:",
        "  - type: other",
        f"    value: {json.dumps(manifest.identity)}",
        "    description: manifest",
    ]
    return ("\n".join(lines) + "\n").encode()

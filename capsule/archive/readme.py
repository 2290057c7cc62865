"""The two texts inside a capsule: how to check it without this tool, and how to cite it."""

from __future__ import annotations

import json

from capsule.core.manifest import Manifest

_VERIFY = """\
# How to check this capsule

Protocol: {name}: {title}
Manifest: {identity}

With the tool:

    capsule verify FILE --against {identity}
    capsule replay FILE

Without it, with zstd, tar, sha256sum and python3:

    mkdir checked
    zstd -dc FILE | tar -x -C checked
    cd checked
    sha256sum -c 9-SHA256SUMS
    sha256sum 1-manifest/{generation:03d}/manifest.json

The last line must print {hex}.
Every source file is stored under `5-sources/` by its own SHA-256, so `sha256sum` of each prints its name; the list
`1-manifest/{generation:03d}/sources.jsonl` says which path each one had.

The capsule's identity is the SHA-256 of the text `capsule-archive/0`, a newline, and the member lines of `9-TABLE`:

    (printf 'capsule-archive/0\\n'; grep '^\\["[0-9]-' 9-TABLE) | sha256sum

## What this proves, and what it does not

Digests inside one file show that its parts belong together. They do not show who made it or when: whoever can rebuild
everything can rebuild the digests too. Compare the manifest's digest with one that was published before the results
were known, and the capsule's identity with one published elsewhere. Times come from the clock of the machine that ran.
"""


def verify_text(manifest: Manifest, generation: int) -> bytes:
    """Return VERIFY.md for the capsule of this manifest, number `generation` of its chain."""
    identity = manifest.identity
    text = _VERIFY.format(
        name=manifest.protocol.name,
        title="".join(c if c.isprintable() else " " for c in manifest.protocol.title),
        identity=identity,
        hex=identity.removeprefix("sha256:"),
        generation=generation,
    )
    return text.encode()


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

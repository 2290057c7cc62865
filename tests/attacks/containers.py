"""Vectors of the container: those of `tests/archive`, seen by `capsule verify`, and cuts and names beyond them."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from container_forge import END, STDOUT, edited, entry, forge, pax, tar_header
from container_vectors import FAULTY, LONG

from capsule.archive.model import LIMITS
from tests.attacks.vectors import BROKEN, MALFORMED, Vector

FOREIGN = {"z3-garbage-before", "z3-empty-file", "z3-foreign-file", "z3-plain-tar", "z4-skippable-of-4-gib"} | {
    "z9-legacy-magic",
    *(f"z4-skippable-{low:x}-before" for low in range(16)),
}
"""Files that do not begin like a capsule; they are refused."""


def container_vectors() -> Iterator[Vector]:
    """Yield every container with a fault that any reader finds under the usual limits."""
    for vector in FAULTY:
        if vector.limits == LIMITS:
            refused = vector.name in FOREIGN
            checks = () if refused else ("V-01", "V-02")
            yield Vector(vector.name, vector.clause, checks, vector.build, MALFORMED if refused else BROKEN)
    yield from cuts()
    for name, before in extensions().items():
        yield Vector(name, "C-08", ("V-01", "V-02"), lambda it=before: extended(it))


def cuts() -> Iterator[Vector]:
    """Files that end early: near their end, in the middle, and at the edges of frames."""
    small, long = forge(), forge(LONG)
    edges = [edge for edge in frame_edges(long) if edge]
    for less in (1, 4, 9, 41, 42, 137, len(small) // 2):
        yield Vector(f"z1-cut-{less}-before-the-end", "C-02", ("V-01", "V-02"), lambda it=less: small[:-it])
    for number, edge in enumerate(edges):
        for more in (-1, 0, 1, 9):
            where = f"z1-cut-at-edge-{number}{more:+}" if more else f"z1-cut-at-edge-{number}"
            yield Vector(where, "C-02", ("V-01", "V-02"), lambda it=edge + more: long[:it])


def frame_edges(data: bytes) -> Iterator[int]:
    """Yield where each frame begins, by the seek table."""
    count = struct.unpack("<I", data[-9:-5])[0]
    place = 0
    for number in range(count):
        yield place
        place += int(struct.unpack_from("<I", data, len(data) - 9 - 8 * (count - number))[0])


def record(key: str, value: str) -> bytes:
    """Return a record of an extended header, with its length."""
    rest = f" {key}={value}\n".encode()
    size = len(rest)
    while len(str(size)) + len(rest) != size:
        size = len(str(size)) + len(rest)
    return str(size).encode() + rest


def extensions() -> dict[str, bytes]:
    """Return what stands before a member's header and would give it another name, size or kind."""
    gnu = edited(tar_header("././@LongLink", 300), (156, b"L")) + (b"x" * 300).ljust(512, b"\0")
    return {
        "n6-component-of-256-bytes": pax(record("path", "x" * 256)),
        "n6-path-of-5000-bytes": pax(record("path", "/".join(["x" * 99] * 50))),
        "n6-path-of-2000-levels": pax(record("path", "/".join("x" * 2000))),
        "n6-gnu-name-of-300-bytes": gnu,
        "n6-path-upwards": pax(record("path", "../../etc/passwd")),
        "t9-sparse-0.0": pax(record("GNU.sparse.size", "1099511627776") + record("GNU.sparse.numblocks", "1")),
        "t9-sparse-name": pax(record("GNU.sparse.name", "/etc/passwd")),
        "t6-link-path": pax(record("linkpath", "/etc/passwd")),
        "t6-modification-time": pax(record("mtime", "1e400")),
        "t6-size-negative": pax(record("size", "-1")),
        "t6-size-of-8-eib": pax(record("size", str(1 << 63))),
        "t6-empty": pax(b""),
        "t6-end-before": END,
    }


def extended(before: bytes) -> bytes:
    """Return a container with bytes before the header of one member."""
    header = entry(*STDOUT)[:512]

    def body(raw: bytes) -> bytes:
        assert raw.count(header) == 1
        return raw.replace(header, before + header)

    return forge(body=body)

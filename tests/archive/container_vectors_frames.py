"""What a vector is, and those of the zstd layer."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import zstandard
from container_forge import (
    END,
    FRAME,
    MANIFEST,
    RESULTS,
    SMALL,
    STDOUT,
    Member,
    compress,
    cut,
    entry,
    forge,
    with_lists,
)

from capsule.archive.model import LIMITS, Limits


@dataclass(frozen=True)
class Vector:
    """A fault by name; `member` is what the finding must name, if it lies in one."""

    name: str
    clause: str
    build: Callable[[], bytes]
    member: str | None = None
    limits: Limits = LIMITS


RANDOM = random.Random(7).randbytes(5 * FRAME // 2)
NOISE: Member = ("3-attempts/a000001/stdout", RANDOM)
LONG: list[Member] = [MANIFEST, NOISE, RESULTS]
"""Members over three frames, the second of which lies within one member."""
TARGET = STDOUT[0]


def first(edit: Callable[[bytes], bytes]) -> Callable[[list[bytes]], list[bytes]]:
    return lambda frames: [edit(frames[0]), *frames[1:]]


def frame_header(raw: bytes, descriptor: int, window: bytes, size: bytes, rest: bytes | None = None) -> bytes:
    """Return a frame of one raw block with the header given, and a checksum taken from a true frame."""
    block = struct.pack("<I", len(raw) << 3 | 1)[:3] + raw
    return (
        b"\x28\xb5\x2f\xfd"
        + bytes([descriptor])
        + window
        + size
        + (block if rest is None else rest)
        + compress(raw)[-4:]
    )


def plain(raw: bytes, **changes: object) -> bytes:
    options = {"descriptor": 0xA4, "window": b"", "size": struct.pack("<I", len(raw)), **changes}
    return frame_header(raw, **options)  # type: ignore[arg-type]


def block(kind: int, size: int, last: int, content: bytes = b"") -> bytes:
    return struct.pack("<I", size << 3 | kind << 1 | last)[:3] + content


def zstd_vectors() -> Iterator[Vector]:
    yield Vector("z2-memory-error-in-13-bytes", "C-03", lambda: bytes.fromhex("28b52ffde06c06060663636363"))
    yield Vector("z3-garbage-after", "C-01", lambda: forge() + b"\x01" * 8)
    yield Vector("z3-zeros-after", "C-01", lambda: forge() + bytes(512))
    yield Vector("z3-garbage-before", "C-01", lambda: b"\x01" * 8 + forge())
    yield Vector("z3-garbage-after-frame", "C-01", lambda: forge(frames=first(lambda frame: frame + b"\x01" * 8)))
    yield Vector("z3-empty-file", "C-02", lambda: b"")
    yield Vector("z3-foreign-file", "C-01", lambda: b"PK\x03\x04" + RANDOM[:100_000])
    yield Vector("z3-plain-tar", "C-01", lambda: zstandard.decompress(compress(entry(*STDOUT) + END)))
    yield Vector("z4-empty-frame", "C-04", lambda: forge(frames=first(lambda frame: frame + compress(b""))))
    yield Vector("z4-second-container", "C-18", lambda: forge(seek=lambda _: b"") + forge())
    for low in range(16):
        skippable = struct.pack("<II", 0x184D2A50 + low, 4) + b"data"
        yield Vector(f"z4-skippable-{low:x}-before", "C-01", lambda it=skippable: it + forge())
        yield Vector(
            f"z4-skippable-{low:x}-between", "C-01", lambda it=skippable: forge(frames=first(lambda one: one + it))
        )
        yield Vector(f"z4-skippable-{low:x}-after", "C-01", lambda it=skippable: forge() + it)
    endless = b"\x5e\x2a\x4d\x18\xff\xff\xff\xff"
    yield Vector("z4-skippable-of-4-gib", "C-01", lambda: endless + forge())
    for log in (27, 31):
        descriptor = bytes([(log - 10) << 3])
        yield Vector(
            f"z5-window-{log}",
            "C-04",
            lambda it=descriptor: forge(pack=lambda raw: plain(raw, descriptor=0x84, window=it)),
        )
    huge = struct.pack("<Q", 1 << 60)
    yield Vector("z5-huge-content-size", "C-04", lambda: forge(pack=lambda raw: plain(raw, descriptor=0xE4, size=huge)))
    without_size = zstandard.ZstdCompressor(level=1, write_checksum=True, write_content_size=False)
    yield Vector("z6-no-content-size", "C-03", lambda: forge(pack=without_size.compress))
    for change in (512, -512):
        yield Vector(
            f"z6-content-size{change:+}",
            "C-06",
            lambda it=change: forge(pack=lambda raw: plain(raw, size=struct.pack("<I", len(raw) + it))),
        )
    yield Vector(
        "z6-content-size+1", "C-04", lambda: forge(pack=lambda raw: plain(raw, size=struct.pack("<I", len(raw) + 1)))
    )
    yield Vector("z6-64-mib-without-size", "C-03", lambda: without_size.compress(bytes(64 << 20)))
    without_checksum = zstandard.ZstdCompressor(level=1, write_checksum=False)
    yield Vector("z7-no-checksum", "C-03", lambda: forge(pack=without_checksum.compress))
    yield Vector("z7-wrong-checksum", "C-06", lambda: forge(pack=lambda raw: compress(raw)[:-1] + b"\0"))
    yield Vector("z8-1-gib-in-one-frame", "C-04", lambda: bomb(write_content_size=True))
    yield Vector("z8-1-gib-undeclared", "C-03", lambda: bomb(write_content_size=False))
    yield from zstd_header_vectors()
    yield from zstd_order_vectors()


def bomb(*, write_content_size: bool) -> bytes:
    """Return the frame of 1 GiB of zeros, from blocks that repeat one byte."""
    blocks = block(1, 1 << 17, 0, b"\0") * 8191 + block(1, 1 << 17, 1, b"\0")
    if write_content_size:
        return b"\x28\xb5\x2f\xfd\xa4" + struct.pack("<I", 1 << 30) + blocks + bytes(4)
    return b"\x28\xb5\x2f\xfd\x04" + bytes([13 << 3]) + blocks + bytes(4)


def zstd_header_vectors() -> Iterator[Vector]:
    yield Vector(
        "z9-dictionary-id", "C-03", lambda: forge(pack=lambda raw: plain(raw, descriptor=0xA5, window=b"\x07"))
    )
    yield Vector("z9-reserved-bit", "C-03", lambda: forge(pack=lambda raw: plain(raw, descriptor=0xAC)))
    yield Vector("z9-unused-bit", "C-03", lambda: forge(pack=lambda raw: plain(raw, descriptor=0xB4)))
    legacy = b"\x27\xb5\x2f\xfd"
    yield Vector("z9-legacy-magic", "C-01", lambda: forge(frames=first(lambda frame: legacy + frame[4:])))
    yield Vector(
        "z9-reserved-block-type", "C-05", lambda: forge(pack=lambda raw: plain(raw, rest=block(3, 1, 1, b"x")))
    )
    yield Vector(
        "z9-block-over-128-kib",
        "C-05",
        lambda: forge(pack=lambda raw: plain(raw, rest=block(1, (1 << 17) + 1, 1, b"x"))),
    )
    many = block(0, 0, 0) * 5000
    yield Vector("z9-too-many-blocks", "C-05", lambda: forge(pack=lambda raw: plain(raw, rest=many + block(0, 0, 1))))
    large = block(0, 1 << 17, 0, bytes(1 << 17)) * 17
    yield Vector("z9-frame-too-long", "C-05", lambda: forge(pack=lambda raw: plain(raw, rest=large + block(0, 0, 1))))
    yield Vector("z9-million-empty-frames", "C-04", lambda: compress(b"") * 1_000_000)
    starts = (b"\x28\xb5\x2f\xfd\xa4" + struct.pack("<I", 512) + block(0, 0, 0) * 4000) * 20
    yield Vector("z9-many-false-starts", "C-05", lambda: starts + forge())


def zstd_order_vectors() -> Iterator[Vector]:
    def swap(frames: list[bytes]) -> list[bytes]:
        return [frames[1], frames[0], *frames[2:]]

    four: list[Member] = [MANIFEST, (NOISE[0], RANDOM + RANDOM[::-1]), RESULTS]

    def swap_inside(frames: list[bytes]) -> list[bytes]:
        return [frames[0], frames[2], frames[1], *frames[3:]]

    yield Vector("z9-frames-swapped", "C-08", lambda: forge(LONG, frames=swap))
    yield Vector("z9-frames-swapped-in-a-member", "C-15", lambda: forge(four, frames=swap_inside), NOISE[0])
    yield Vector("z9-frames-swapped-lines", "C-16", lambda: forge(four, frames=swap_inside))
    yield Vector(
        "z9-frame-repeated", "C-15", lambda: forge(LONG, frames=lambda all_: [all_[0], *all_[:1], *all_[2:]]), NOISE[0]
    )
    yield Vector("z9-frame-duplicated", "C-08", lambda: forge(LONG, frames=lambda all_: [all_[0], *all_]))
    yield Vector("z9-frame-dropped", "C-20", lambda: forge(LONG, frames=lambda all_: [all_[0], *all_[2:]]), NOISE[0])
    other = compress(RANDOM[: FRAME // 2] * 2)
    yield Vector(
        "z9-frame-of-another-capsule",
        "C-15",
        lambda: forge(LONG, frames=lambda all_: [all_[0], other, *all_[2:]]),
        NOISE[0],
    )
    yield Vector("z9-short-frames", "C-07", lambda: forge(LONG, split=lambda raw: cut(raw, FRAME // 2)))
    yield Vector("z9-short-frame-first", "C-07", lambda: forge(split=lambda raw: [raw[:512], raw[512:]]))
    yield Vector("z9-table-not-in-own-frame", "C-07", joined)
    yield Vector("z9-table-in-two-frames", "C-07", split_table)


def joined() -> bytes:
    """Return a container whose table follows in the frame of the other members."""
    members = with_lists(SMALL)
    body = b"".join(entry(*member) for member in members)
    return compress(body + entry("9-TABLE", b"") + END)


def split_table() -> bytes:
    members = with_lists(SMALL)
    body = compress(b"".join(entry(*member) for member in members))
    whole = forge()
    table = zstandard.decompress(whole[len(body) :])
    return body + compress(table[:512]) + compress(table[512:])

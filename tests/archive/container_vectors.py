"""One vector a fault: a container that is sound but for that fault, and the clause that it breaks.

The ids name the layer: z zstd frames, t tar, n names, m lists and index, l limits, d damage.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

import zstandard
from container_forge import (
    END,
    FRAME,
    HEADER,
    LIBRARY_LINE,
    MANIFEST,
    RESULTS,
    SMALL,
    STDOUT,
    Member,
    checksums,
    compress,
    edited,
    entry,
    forge,
    pax,
    raw_header,
    seek_table,
    sha,
    tar_header,
    with_lists,
)
from container_vectors_frames import LONG, NOISE, RANDOM, TARGET, Vector, plain, zstd_vectors

from capsule.archive.model import Limits

__all__ = ["FAULTY", "LONG", "NOISE", "RANDOM", "SOUND", "Vector"]


def tar_vectors() -> Iterator[Vector]:
    header = tar_header(TARGET, len(STDOUT[1]))

    def replaced(new: bytes) -> Callable[[], bytes]:
        return lambda: forge(body=lambda raw: swap_once(raw, header, new))

    def changed(*changes: tuple[int, bytes], fix: bool = True) -> Callable[[], bytes]:
        return replaced(edited(header, *changes, fix=fix))

    twice = [MANIFEST, STDOUT, STDOUT, RESULTS]
    yield Vector("t1-duplicate-same-bytes", "C-12", lambda: forge(twice), TARGET)
    yield Vector("t1-duplicate-other-bytes", "C-12", lambda: forge([MANIFEST, STDOUT, (TARGET, b"y"), RESULTS]), TARGET)
    yield Vector("t1-out-of-order", "C-12", lambda: forge([MANIFEST, RESULTS, STDOUT]), TARGET)
    yield Vector("t2-bytes-after-end", "C-10", lambda: forge(end=END + b"x" * 512))
    yield Vector("t2-zeros-after-end", "C-10", lambda: forge(end=END * 2))
    yield Vector("t2-second-tar-after-end", "C-10", lambda: forge(end=END + entry(*RESULTS) + END))
    yield Vector("t2-no-end", "C-10", lambda: forge(end=b""))
    yield Vector("t2-one-zero-block", "C-10", lambda: forge(end=bytes(512)))
    yield Vector("t2-zero-block-inside", "C-08", replaced(bytes(512) + header))
    yield Vector("t2-end-inside", "C-08", replaced(END + header))
    yield Vector("t3-bad-checksum", "C-08", changed((148, b"000000\0 "), fix=False), TARGET)
    size = b"%d" % len(STDOUT[1])
    record = b"12 size=%s\n" % size
    zero = edited(header, (124, b"%011o" % 0))
    yield Vector("t4-pax-size-over-zero", "C-08", replaced(pax(record) + zero), TARGET)
    yield Vector("t4-pax-size-over-size", "C-08", replaced(pax(record) + edited(header, (124, b"%011o" % 1))), TARGET)
    long_name = edited(tar_header("././@LongLink", 4), (156, b"L")) + b"name".ljust(512, b"\0")
    yield Vector("t5-pax-before-gnu-long-name", "C-08", replaced(pax(record) + long_name + header))
    path = b"9 path=a\n"
    for name, extension in {
        "two-paths": pax(path + path),
        "two-headers": pax(path) + pax(path),
        "global-path": pax(path, b"g"),
        "nul-in-path": pax(b"18 path=good\0evil\n"),
        "length-wrong": pax(b"8 path=a\n"),
        "length-overlong": pax(b"999999999999 path=a\n"),
        "length-not-decimal": pax(b"0x9 path=a\n"),
        "hdrcharset": pax(b"22 hdrcharset=BINARY\n"),
        "sparse-0.1": pax(b"22 GNU.sparse.major=0\n22 GNU.sparse.minor=1\n"),
        "sparse-1.0-tib": pax(b"22 GNU.sparse.major=1\n37 GNU.sparse.realsize=1099511627776\n"),
    }.items():
        yield Vector(f"t6-{name}" if "sparse" not in name else f"t9-{name}", "C-08", replaced(extension + header))
    for name, field in {
        "base-256": b"\x80" + struct.pack(">QH", 0, len(STDOUT[1])) + b"\0",
        "negative": b"\xff" * 12,
        "spaces": (b"%o" % len(STDOUT[1])).rjust(11) + b" ",
        "no-terminator": b"%012o" % len(STDOUT[1]),
    }.items():
        yield Vector(f"t7-size-{name}", "C-08", changed((124, field)), TARGET)
    beyond = b"19 size=8589934593\n"
    yield Vector("t7-size-over-8-gib", "C-07", replaced(pax(beyond) + zero), TARGET)
    yield Vector("t7-size-lies-by-a-block", "C-08", changed((124, b"%011o" % 1)))
    for flag in [*b"1 2 3 4 5 6 7 D M S V L K Z".split(), b"\0"]:
        yield Vector(f"t8-typeflag-{flag.hex()}", "C-08", changed((156, flag)), TARGET)
    yield Vector(
        "t8-trailing-slash", "C-11", lambda: forge([MANIFEST, (TARGET + "/", STDOUT[1]), RESULTS]), TARGET + "/"
    )
    for name, change in {
        "magic-v7": (257, bytes(8)),
        "magic-gnu": (257, b"ustar  \0"),
        "magic-star": (508, b"tar\0"),
        "prefix": (345, b"9-other"),
        "empty-name": (0, bytes(100)),
        "junk-after-name": (len(TARGET), b"\0junk"),
        "mode": (100, b"0000755\0"),
        "uid": (108, b"0001750\0"),
        "mtime": (136, b"14000000000\0"),
        "uname": (265, b"root"),
        "device": (329, b"0000001\0"),
        "linkname": (157, b"x"),
    }.items():
        yield Vector(f"t10-{name}", "C-08", changed(change))
    last = header + STDOUT[1] + bytes(-len(STDOUT[1]) % 512)
    yield Vector("t10-padding", "C-09", lambda: forge(body=lambda raw: swap_once(raw, last, last[:-1] + b"x")), TARGET)
    yield Vector("t10-table-padding", "C-09", table_padding)


def table_padding() -> bytes:
    """Return a container with a byte in the padding after the table."""
    probe = zstandard.ZstdDecompressor()
    whole = forge()
    body = compress(b"".join(entry(*member) for member in with_lists(SMALL)))
    table = probe.decompress(whole[len(body) :])
    assert table[-1025:] == bytes(1025), "the table of this container needs padding"
    return body + compress(table[:-1025] + b"x" + END)


def swap_once(raw: bytes, old: bytes, new: bytes) -> bytes:
    assert raw.count(old) == 1
    return raw.replace(old, new)


NAMES = {
    "n1": ["../x", "a/../../x", "/x", "//x", "./x", "5-sources//x", "5-sources/./x", "7-results/", ".", ".."],
    "n2": [
        "C:\\x",
        "C:x",
        "\\\\srv\\x",
        "a\\b",
        "CON",
        "nul.txt",
        "COM1.log",
        "7-results/results.json.",
        "x ",
        "x:ads",
    ],
    "n3": ["7-results/results.json\n", "7-results/results.json\r", "\x1b[2Jx", "\u202ex", "\u200bx", "\x9bx"],
    "n4": ["café", "cafe\u0301", "ß", "K", "3-Attempts/a000001/stdout", "İ"],
    "n6": [
        "x" * 100,
        "3-attempts/a000001",
        "3-attempts/a1/stdout",
        "5-sources/" + "A" * 64,
        "1-manifest/0000/cells.jsonl",
    ],
}


def name_vectors() -> Iterator[Vector]:
    def named(raw: bytes) -> bytes:
        header = raw_header(raw, 1)
        return forge(body=lambda body: swap_once(body, entry(*STDOUT), header + b"x".ljust(512, b"\0")))

    for family, names in NAMES.items():
        for number, name in enumerate(names):
            yield Vector(f"{family}-{number}", "C-11", lambda it=name: named(it.encode()))
    for number, raw in enumerate((b"\xff", b"\xed\xa0\x80", b"\xc0\xaf")):
        yield Vector(f"n5-{number}", "C-11", lambda it=raw: named(it))


def list_vectors() -> Iterator[Vector]:
    full = with_lists(SMALL)
    line = f'["{TARGET}",{len(STDOUT[1])},"{sha(STDOUT[1])}"]\n'.encode()

    def table(old: bytes, new: bytes) -> Callable[[], bytes]:
        return lambda: forge(table=lambda lines: swap_once(lines, old, new))

    def listed(edit: Callable[[list[Member]], list[Member]]) -> Callable[[], bytes]:
        return lambda: forge(listed=edit(full))

    digest = sha(STDOUT[1]).encode()
    yield Vector("m2-table-lacks-member", "C-15", listed(lambda all_: [*all_[:2], *all_[3:]]))
    yield Vector("m2-table-lacks-last", "C-15", listed(lambda all_: all_[:-1]))
    extra = ("2-ledger.jsonl", b"{}\n")
    yield Vector("m2-table-lists-more", "C-15", listed(lambda all_: [*all_[:2], extra, *all_[2:]]), extra[0])
    yield Vector("m2-table-out-of-order", "C-15", listed(lambda all_: [all_[0], all_[2], all_[1], *all_[3:]]))
    yield Vector("m2-table-lists-twice", "C-15", table(line, line * 2), TARGET)
    yield Vector("m2-size-off-by-one", "C-15", table(b",%d," % len(STDOUT[1]), b",%d," % (len(STDOUT[1]) + 1)), TARGET)
    yield Vector("m2-digest-off", "C-15", table(digest, digest[:-1] + b"%x" % (int(digest[-1:], 16) ^ 1)), TARGET)
    yield Vector("m2-digest-upper-case", "C-15", table(digest, digest.upper()))
    yield Vector("m2-digest-short", "C-15", table(digest, digest[:-1]))
    yield Vector("m2-digest-empty", "C-15", table(digest, b""))
    yield Vector("m2-digest-md5", "C-15", table(digest, b"md5:" + digest[:32]))
    yield Vector("m2-line-with-space", "C-15", table(line, line.replace(b",", b", ")))
    yield Vector("m2-line-crlf", "C-15", table(line, line.replace(b"\n", b"\r\n")))
    yield Vector("m2-line-endless", "C-15", table(line, b"x" * 5000))
    yield Vector("m2-table-empty", "C-15", lambda: forge(table=lambda _: b""))
    yield Vector("m2-table-endless", "C-15", lambda: forge(table=lambda lines: lines + bytes(5 << 20)), "9-TABLE")
    yield Vector("m2-library-line-missing", "C-16", table(LIBRARY_LINE, b""))
    yield Vector("m2-library-level-99", "C-16", table(b'",1]\n', b'",99]\n'))
    yield Vector("m2-frame-line-missing", "C-16", lambda: forge(table=lambda lines: lines[: lines.index(b"[0,")]))
    yield Vector("m2-frame-line-twice", "C-16", lambda: forge(table=lambda lines: lines + lines[lines.index(b"[0,") :]))
    yield Vector("m2-frame-offset", "C-16", table(b"[0,0,", b"[0,1,"))
    yield Vector("m2-no-newline-at-end", "C-16", lambda: forge(table=lambda lines: lines[:-1]))
    yield Vector("m2-sums-line-missing", "C-14", lambda: forge(sums=lambda text: text[: text.rindex(b"\n", 0, -1) + 1]))
    own = checksums([STDOUT])
    other = b"0" if own[:1] != b"0" else b"1"
    yield Vector(
        "m2-sums-digest",
        "C-14",
        lambda: forge(sums=lambda text: swap_once(text, own, other + own[1:])),
        "9-SHA256SUMS",
    )
    yield Vector("m2-sums-missing", "C-14", lambda: forge(present=full[:-1]))
    yield Vector("m4-header-missing", "C-13", lambda: forge(present=full[1:]))
    zero = (HEADER[0], HEADER[1].replace(b"archive/1", b"archive/1.0"))
    yield Vector("m4-version-1.0", "C-13", lambda: forge(present=[zero, *full[1:]]), HEADER[0])
    tag = (HEADER[0], HEADER[1].replace(b"archive/1", b"package/1"))
    yield Vector("m4-format-other", "C-13", lambda: forge(present=[tag, *full[1:]]), HEADER[0])
    md5 = (HEADER[0], HEADER[1].replace(b"sha256", b"md5"))
    yield Vector("m4-header-md5", "C-13", lambda: forge(present=[md5, *full[1:]]), HEADER[0])
    yield Vector("m4-header-empty", "C-13", lambda: forge(present=[(HEADER[0], b""), *full[1:]]), HEADER[0])
    yield Vector("l1-too-many-members", "C-19", forge, RESULTS[0], Limits(members_max=3))
    yield Vector("l1-too-many-bytes", "C-19", forge, TARGET, Limits(size_bytes_max=400))


def index_vectors() -> Iterator[Vector]:
    def at(offset: int, value: bytes) -> Callable[[bytes], bytes]:
        return lambda data: data[:offset] + value + data[offset + len(value) :]

    past = struct.pack("<Q", 1 << 63)
    for name, offset, value in (
        ("tag", 8, b"capsule-index/9\n"),
        ("members", 24, past),
        ("frames", 32, struct.pack("<Q", 1 << 31)),
        ("table-offset-zero", 40, bytes(8)),
        ("table-offset-past-end", 40, past),
        ("table-size", 48, past),
        ("table-raw-offset", 56, struct.pack("<Q", 1)),
        ("table-digest", 64, bytes(32)),
    ):
        yield Vector(f"m3-index-{name}", "C-17", lambda it=(offset, value): forge(index=at(*it)))
    yield Vector("m3-index-missing", "C-01", lambda: forge(index=lambda _: b""))
    yield Vector("m3-index-longer", "C-01", lambda: forge(index=lambda data: data[:4] + b"\x59" + data[5:] + b"x"))
    yield Vector("m3-index-twice", "C-18", lambda: forge(index=lambda data: data * 2))
    yield Vector("m3-seek-table-missing", "C-02", lambda: forge(seek=lambda _: b""))
    yield Vector("m3-seek-table-twice", "C-01", lambda: forge(seek=lambda data: data * 2))
    yield Vector("m3-index-and-seek-table-twice", "C-01", lambda: forge() + forge()[-96 - 8 - 3 * 8 - 9 :])
    yield Vector(
        "m3-seek-count", "C-18", lambda: forge(seek=lambda data: data[:-9] + struct.pack("<I", 1 << 31) + data[-5:])
    )
    yield Vector("m3-seek-entry", "C-18", lambda: forge(seek=at(8, struct.pack("<I", 7))))
    yield Vector("m3-seek-checksum-flag", "C-18", lambda: forge(seek=lambda data: data[:-5] + b"\x80" + data[-4:]))
    yield Vector(
        "m3-seek-fewer-frames",
        "C-18",
        lambda: forge(seek=lambda _: seek_table([(96, 0)])),
    )


def damage_vectors() -> Iterator[Vector]:
    def hit(offset: int) -> Callable[[], bytes]:
        def build() -> bytes:
            data = bytearray(forge(LONG))
            data[offset] ^= 0xFF
            return bytes(data)

        return build

    size = len(compress(b"".join(entry(*member) for member in with_lists(LONG))[:FRAME]))
    yield Vector("d1-checksum-of-first-frame", "C-20", hit(size - 1), MANIFEST[0])
    yield Vector("d1-content-of-second-frame", "C-20", hit(size + FRAME // 2), NOISE[0])
    yield Vector("d1-magic-of-second-frame", "C-20", hit(size), NOISE[0])
    yield Vector("d1-block-header-of-second-frame", "C-20", hit(size + 9), NOISE[0])
    yield Vector("d1-file-cut-in-second-frame", "C-02", lambda: forge(LONG)[: size + 1000], NOISE[0])


FAULTY = [
    *zstd_vectors(),
    *tar_vectors(),
    *name_vectors(),
    *list_vectors(),
    *index_vectors(),
    *damage_vectors(),
]

SOUND = [
    Vector("empty", "C-01", lambda: forge([])),
    Vector("small", "C-22", forge),
    Vector("three-frames", "C-07", lambda: forge(LONG)),
    Vector(
        "level-3",
        "C-22",
        lambda: forge(pack=lambda raw: compress(raw, 3), table=lambda it: it.replace(b'",1]', b'",3]')),
    ),
    Vector("raw-blocks-only", "C-04", lambda: forge(pack=plain)),
    Vector(
        "window-8-mib", "C-04", lambda: forge(pack=lambda raw: plain(raw, descriptor=0x84, window=bytes([13 << 3])))
    ),
    Vector("declared-64-mib-of-zeros", "C-04", lambda: forge([MANIFEST, (NOISE[0], bytes(64 << 20)), RESULTS])),
    Vector("empty-member", "C-09", lambda: forge([(TARGET, b"")])),
    Vector("member-of-one-block", "C-09", lambda: forge([(TARGET, b"x" * 512)])),
]

"""Vectors of what was promised: manifests, plans and sources that are others, and parts that are absent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from capsule.core.canonical import join_lines, parse_lines
from capsule.core.digest import digest_of
from tests.attacks.vectors import (
    CELLS,
    HEAD,
    INCOMPLETE,
    LEDGER,
    MANIFEST,
    PROVENANCE,
    RESULTS,
    ROWS,
    SOURCES,
    TOML,
    Change,
    Members,
    Vector,
    data,
    either,
    golden,
    sealed,
    with_file,
    with_list,
    with_manifest,
    with_member,
)


def manifest_vectors() -> Iterator[Vector]:
    """Promises that are others than those frozen, and lists that are not theirs."""
    other = golden("refuted")

    def protocol(change: Change) -> Callable[[], Members]:
        return lambda: with_manifest(lambda manifest: change(manifest["protocol"]))

    promises: dict[str, tuple[str, Callable[[], Members]]] = {
        "threshold-moved": ("M-09", protocol(lambda it: it["hypotheses"][0].update(threshold="-9"))),
        "gate-moved": ("M-09", protocol(lambda it: it["gates"][0].update(limit="-9"))),
        "budget-raised": ("M-09", protocol(lambda it: it["budget"].update(device_seconds="2000"))),
        "hypothesis-dropped": ("M-09", protocol(lambda it: it["hypotheses"].pop())),
        "seed-of-the-order-changed": ("M-09", protocol(lambda it: it["design"].update(order_seed=8))),
        "protocol-file-changed": (
            "M-09",
            lambda: with_member(TOML, golden()[TOML].replace(b"threshold = 0", b"threshold = 1")),
        ),
        "protocol-file-absent": ("M-09", lambda: with_member(TOML, None)),
        "of-another-run": ("M-06", lambda: with_member(MANIFEST, other[MANIFEST])),
        "version-999": ("M-01", lambda: with_manifest(lambda it: it.update(schema="capsule.manifest/999"))),
        "arms-none": ("M-07", lambda: with_manifest(lambda it: it.update(arms=[]))),
        "arms-in-other-order": ("M-07", lambda: with_manifest(lambda it: it["arms"].reverse())),
        "arm-of-a-revision": ("M-07", lambda: with_manifest(lambda it: it["arms"][0].update(revision="ab" * 20))),
        "list-not-named": ("M-06", lambda: with_member(f"1-manifest/001/sources-{'ab' * 20}.jsonl", golden()[SOURCES])),
        "count-of-cells": ("M-06", lambda: with_manifest(lambda it: it["cells"].update(count=7))),
        "digest-of-cells": ("M-06", lambda: with_manifest(lambda it: it["cells"].update(sha256="sha256:" + "0" * 64))),
        "digest-in-capitals": (
            "M-01",
            lambda: with_manifest(lambda it: it["cells"].update(sha256="sha256:" + "A" * 64)),
        ),
        "digest-without-prefix": ("M-01", lambda: with_manifest(lambda it: it["cells"].update(sha256="a" * 64))),
        "digest-of-md5": ("M-01", lambda: with_manifest(lambda it: it["cells"].update(sha256="md5:" + "a" * 32))),
    }
    for name, (clause, build) in promises.items():
        yield Vector(f"{'h13' if 'digest' in name else 'm4'}-manifest-{name}", clause, ("V-04",), sealed(build))
    large = with_manifest(lambda it: it["protocol"].update(question="x" * (2 << 20)))
    many = {f"p{number}": {"decimal": "1.5"} for number in range(40_000)}
    wide = with_manifest(lambda it: it["protocol"]["arms"][0].update(parameters=many))
    yield Vector("h10-manifest-of-many-values", "M-10", ("V-04",), sealed(lambda: wide))
    yield Vector("h10-manifest-of-two-mebibytes", "M-10", ("V-02",), sealed(lambda: large))
    whole = golden()[CELLS].splitlines(keepends=True)
    plans = {
        "cell-left-out": b"".join(whole[:-1]),
        "cell-twice": b"".join([*whole, whole[-1]]),
        "cells-swapped": b"".join([whole[1], whole[0], *whole[2:]]),
        "cell-excluded": golden()[CELLS].replace(b'"excluded":null', b'"excluded":"unwanted"', 1),
        "seed-changed": golden()[CELLS].replace(b'"seed":1', b'"seed":3', 1),
        "no-cell": b"",
        "no-newline": golden()[CELLS][:-1],
    }
    for name, content in plans.items():
        yield Vector(f"h15-plan-{name}", "M-04", ("V-05",), sealed(with_list, CELLS, content))
    second = {name.replace("/001/", "/002/"): content for name, content in golden().items() if "/001/" in name}
    yield Vector("m4-two-manifests", "M-08", ("V-06",), sealed(lambda: {**golden(), **second}))
    gap = {name.replace("/001/", "/002/"): content for name, content in golden().items()}
    yield Vector("m4-manifest-numbered-2", "K-02", ("V-17",), sealed(lambda: gap))
    foreign = {name: content for name, content in golden().items() if not name.startswith("1-")}
    foreign |= {name: content for name, content in other.items() if name.startswith("1-")}
    yield Vector("h17-all-of-another-manifest", "L-08", ("V-12",), sealed(lambda: foreign))
    swapped = {**golden(), LEDGER: other[LEDGER], HEAD: other[HEAD]}
    yield Vector("h17-ledger-of-another-run", "L-08", ("V-12",), sealed(lambda: swapped))


def source_vectors() -> Iterator[Vector]:
    """Sources: contents that are others, and entries that no freeze writes."""
    name = next(name for name in golden() if name.startswith("5-sources/"))
    yield Vector("h15-source-absent", "K-06", ("V-15",), sealed(with_member, name, None))
    yield Vector("h15-source-more", "K-06", ("V-15",), sealed(with_member, f"5-sources/{digest_of(b'x')[7:]}", b"x"))
    yield Vector("h15-source-changed", "K-06", ("V-02",), sealed(with_member, name, golden()[name] + b"\n"))
    yield Vector("h15-oracle-of-other-bytes", "K-06", ("V-02",), sealed(with_member, "6-oracles/" + "0" * 64, b"truth"))

    def entry(change: Change) -> Callable[[], Members]:
        def build() -> Members:
            found = parse_lines(golden()[SOURCES], SOURCES)
            return with_list(SOURCES, join_lines(either(change(found), found)))

        return build

    def link(**values: Any) -> Callable[[], Members]:
        target = b"trial.py"
        honest = {
            "blob": None,
            "kind": "link",
            "mode": None,
            "notes": [],
            "path": "zz",
            "sha256": digest_of(target),
            "size": len(target),
            "target": target.decode(),
        }
        return entry(lambda found: found.append({**honest, **values}))

    paths = {
        "upwards": "z/../../x",
        "dot": "z/./x",
        "absolute": "/z",
        "empty-part": "z//x",
        "trailing-slash": "z/",
        "empty": "",
        "nul": "z\0",
        "needless-hex": "hex:7a7a",
        "hex-in-capitals": "hex:FF",
        "hex-odd": "hex:f",
        "hex-of-hex": "hex:zz",
        "hex-with-space": "hex:ff ff",
        "hex-of-dots": "hex:2e2e",
        "itself-hex": "hex:6865783a",
        "of-git": "z/.git/config",
        "of-git-in-capitals": "z/.Git",
        "of-git-in-hex": "hex:7aff2f2e67697420".removesuffix("20"),
        "below-a-file": "trial.py/x",
        "name-too-long": "z" * 256,
        "too-long": "z/" * 2048 + "z",
        "much-too-long": "z/" * 200_000 + "z",
        "too-long-in-hex": "hex:" + (b"z/" * 2048 + b"\xff").hex(),
    }
    for fault, path in paths.items():
        # In byte order the path of a link comes last.
        yield Vector(f"n1-source-path-{fault}", "M-05", ("V-15",), sealed(link(path=path)))
    entries = {
        "link-size": link(size=9),
        "link-digest": link(sha256=digest_of(b"")),
        "link-with-mode": link(mode="0644"),
        "link-without-target": link(target=None),
        "file-with-target": entry(lambda found: found[0].update(target="x")),
        "file-without-mode": entry(lambda found: found[0].update(mode=None)),
        "setuid": entry(lambda found: found[0].update(mode="4755")),
        "device": entry(lambda found: found[0].update(kind="device")),
        "negative-size": entry(lambda found: found[0].update(size=-1)),
        "twice": entry(lambda found: [found[0], *found]),
        "out-of-order": entry(lambda found: found[::-1]),
        "long-line": entry(lambda found: found[0].update(notes=["x" * (1 << 20)])),
        "short-blob": entry(lambda found: found[0].update(blob="ab")),
    }
    for fault, build in entries.items():
        yield Vector(f"h3-source-{fault}", "M-05", ("V-15",), sealed(build))
    yield Vector("h15-snapshot-of-no-list", "M-05", ("V-15",), sealed(data("intent", snapshot="sha256:" + "3" * 64)))


def import_vectors() -> Iterator[Vector]:
    """Modules from nowhere, and a trial that nobody imported."""
    lines = parse_lines(golden()[PROVENANCE], PROVENANCE)
    source = next(line for line in lines if line["origin"] == "source")
    others = {
        "unknown": [*lines, {"module": "helper", "origin": "unknown", "name": "helper.py", "sha256": digest_of(b"")}],
        "of-other-bytes": [{**line, "sha256": digest_of(b"")} if line is source else line for line in lines],
        "of-another-path": [{**line, "name": "other.py"} if line is source else line for line in lines],
        "trial-left-out": [line for line in lines if line is not source],
        "line-of-a-mebibyte": [{**lines[0], "version": "x" * (1 << 20)}, *lines[1:]],
        "no-object": [*lines, 7],
        "no-origin": [*lines, {"module": "helper"}],
        "origin-is-a-list": [*lines, {"module": "helper", "origin": []}],
    }
    for name, content in others.items():
        yield Vector(f"h15-import-{name}", "K-04", ("V-16",), sealed(with_file, PROVENANCE, join_lines(content)))


def absent_vectors() -> Iterator[Vector]:
    """What is absent cannot be checked, and is broken where another member promises it (V-03)."""
    yield Vector("h15-results-absent", "K-01", (), sealed(with_member, RESULTS, None), INCOMPLETE)
    yield Vector("h15-table-absent", "K-01", (), sealed(with_member, ROWS, None), INCOMPLETE)
    yield Vector("h15-readme-absent", "K-01", (), sealed(with_member, "8-README/VERIFY.md", None), INCOMPLETE)
    yield Vector("h15-head-absent", "K-01", (), sealed(with_member, HEAD, None), INCOMPLETE)
    yield Vector("h15-manifest-absent", "K-02", ("V-12",), sealed(with_member, MANIFEST, None))
    yield Vector("h15-cells-absent", "K-02", ("V-04",), sealed(with_member, CELLS, None))
    yield Vector("h15-sources-absent", "K-02", ("V-04",), sealed(with_member, SOURCES, None))
    nothing = {"8-README/VERIFY.md": b"trust me\n"}
    yield Vector("h15-all-absent", "K-01", (), sealed(lambda: nothing), INCOMPLETE)

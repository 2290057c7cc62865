"""Pack and verify a container, in turn with stock tools and peers on the same content; prints median ratios of pairs.

Run by hand, best on a quiet machine: `python benchmarks/container.py --folder /dev/shm --disk /var/tmp`. Needs tar,
zstd and openssl; compares with restic, borg and bagit.py where they are installed. Every side is a process of its own,
its start included; the sides of a pair change places. Data is generated from a fixed seed (four large files and a
twentieth of their size in small ones) and removed at the end. Each row is named as in docs/performance.md; it judges
nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from capsule.archive.reader import End, walk
from capsule.archive.writer import CapsuleWriter
from capsule.host.pipes import widen

CHUNK_SIZE = 1 << 20
SMALL_SIZE = 4096
SELF = f"{sys.executable} {Path(__file__).absolute()}"


class Usage(NamedTuple):
    """What a command line took."""

    wall: float
    processor: float
    peak_mib: float


def generate(folder: Path, size: int) -> None:
    """Write a tree with the names of a capsule: logs, noise, noisy numbers, and a twentieth of it in small files.

    Nothing is repeated: peers that store equal pieces once would read less than they are compared by.
    """
    rng = random.Random(2026)
    words = [bytes(rng.choices(b"abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(2000)]
    lines = itertools.count()

    def text() -> bytes:
        return b"".join(
            b"step %d loss %.6f %s\n" % (next(lines), rng.random(), rng.choice(words)) for _ in range(40_000)
        )

    def numbers() -> bytes:
        block = bytearray(b"\x3f" * CHUNK_SIZE)
        for place in range(3):
            block[place::4] = rng.randbytes(CHUNK_SIZE // 4)
        return bytes(block)

    for name, block in (
        ("3-attempts/a000001/stdout", text),
        ("3-attempts/a000001/telemetry.jsonl", lambda: rng.randbytes(CHUNK_SIZE)),
        ("4-records/rows.parquet", numbers),
        ("4-records/telemetry.parquet", numbers),
    ):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as stream:
            while stream.tell() < size // 4:
                stream.write(block())
    (folder / "5-sources").mkdir()
    log = text()
    for number in range(size // 20 // SMALL_SIZE):
        start = rng.randrange(len(log) - SMALL_SIZE)
        content = b"%d " % number + log[start : start + SMALL_SIZE]
        (folder / "5-sources" / hashlib.sha256(content).hexdigest()).write_bytes(content)


def pieces(name: str) -> Iterator[bytes]:
    """Yield a file in blocks."""
    with open(name, "rb", buffering=0) as stream:  # noqa: PTH123
        while data := stream.read(CHUNK_SIZE):
            yield data


def pack(tree: str, target: str, *, self_check: bool) -> None:
    """Pack the tree."""
    # Without `Path`: the walk is part of what is timed, and the rival's is fast.
    names = sorted(f"{folder}/{name}" for folder, _, files in os.walk(tree) for name in files)
    start = len(tree) + 1
    with CapsuleWriter(Path(target), self_check=self_check) as writer:
        for name in names:
            writer.add(name[start:], os.stat(name).st_size, pieces(name))  # noqa: PTH116
        writer.close()


def pack_members(count: str, target: str) -> None:
    """Pack so many tiny members."""
    with CapsuleWriter(Path(target), self_check=False) as writer:
        for number in range(int(count)):
            writer.add(f"5-sources/{number:064x}", 8, b"%08d" % number)
        writer.close()


def verify(target: str) -> None:
    """Walk a container, or standard input, to its seal."""
    with open(0 if target == "-" else target, "rb", buffering=0) as stream:  # noqa: PTH123
        widen(cast(BinaryIO, stream))
        last = None
        for event in walk(cast(BinaryIO, stream), threads=2):
            last = event
    assert isinstance(last, End)
    assert last.sealed is not None


def measured(command: str) -> Usage:
    """Run a command line; its processor time and peak memory are those of all its processes."""
    start = time.perf_counter()
    line = ["bash", "-ec", "set -o pipefail; " + command]
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, f"{command}: {said}"
    return Usage(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def compare(title: str, ours: str, theirs: str, pairs: int) -> None:
    """Print the medians of two command lines, measured in turn, and of the pair ratios."""
    measured(ours)
    measured(theirs)
    runs: list[tuple[Usage, Usage]] = []
    for number in range(pairs):
        if number % 2:
            second, first = measured(theirs), measured(ours)
        else:
            first, second = measured(ours), measured(theirs)
        runs.append((first, second))
    wall = statistics.median(a.wall / b.wall for a, b in runs)
    used = statistics.median(a.processor / b.processor for a, b in runs)
    sides = [statistics.median(run[side].wall for run in runs) for side in (0, 1)]
    peak = max(a.peak_mib for a, _ in runs)
    print(
        f"{title:52} {sides[0]:7.2f} s {sides[1]:7.2f} s   wall {wall:5.2f}   processor {used:5.2f}   {peak:4.0f} MiB",
        flush=True,
    )


def compare_peers(tree: Path, capsule: Path, folder: Path, pairs: int) -> None:
    """Compare verifying with the peers that are installed (V6)."""
    ours = f"{SELF} --do verify {capsule}"
    os.environ |= {
        "RESTIC_PASSWORD": "x", "BORG_BASE_DIR": str(folder), "BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK": "yes"
    }  # fmt: skip
    restic, borg, bag = (folder / name for name in ("restic", "borg", "bag"))
    peers = {
        "restic": (
            f"restic -q -r {restic} --no-cache init && restic -q -r {restic} --no-cache backup {tree}",
            f"restic -q -r {restic} --no-cache check --read-data",
        ),
        "borg": (
            f"borg init -e none {borg} && borg create -C zstd,1 {borg}::x {tree}",
            f"borg check --verify-data {borg}",
        ),
        "bagit.py": (
            f"cp -r {tree} {bag} && bagit.py --quiet --sha256 --processes 2 {bag}",
            f"bagit.py --quiet --validate --processes 2 {bag}",
        ),
    }
    for name, (make, check) in peers.items():
        if shutil.which(name):
            measured(make)
            compare(f"V6 verify : {name}", ours, check, pairs)
            for path in (restic, borg, bag):
                shutil.rmtree(path, ignore_errors=True)
        else:
            print(f"V6 {name} is not installed")


def compare_all(folder: Path, disk: Path, options: argparse.Namespace) -> None:
    """Measure every row."""
    tree, ours, theirs = folder / "tree", folder / "x.capsule", folder / "x.tar.zst"
    measured(f"{SELF} --do generate {tree} {options.size_mib}")  # the peak of a process begins with its parent's
    pairs = options.pairs
    tar = f"tar -C {tree} --sort=name -cf - . | zstd -q -f -1 -T0 -o"
    packs = {check: f"{SELF} --do pack{check} {tree}" for check in ("", "-checked")}
    compare("P1 pack, no self-check : tar | zstd -1 -T0", f"{packs['']} {ours}", f"{tar} {theirs}", pairs)
    compare("P1 the same, to disk", f"{packs['']} {disk}/x.capsule", f"{tar} {disk}/x.tar.zst", pairs)
    compare("P1 pack with self-check : without", f"{packs['-checked']} {ours}", f"{packs['']} {ours}", pairs)
    print(f"{'P2 size : tar | zstd -1 -T0':52} {ours.stat().st_size / theirs.stat().st_size:.4f}")
    theirs.unlink()
    pipe = f"zstd -dcq {ours} | openssl dgst -sha256"
    own = f"{SELF} --do verify"
    compare("V1, V4 verify : zstd -dc | openssl dgst -sha256", f"{own} {ours}", pipe, pairs)
    compare("V2 verify : zstd -t", f"{own} {ours}", f"zstd -tq {ours}", pairs)
    compare("V3 verify from a pipe : the pipe of V1", f"cat {ours} | {own} -", pipe, pairs)
    compare_peers(tree, ours, folder, pairs)
    for count in (1000, options.members):
        packed = measured(f"{SELF} --do pack_members {count} {ours}")
        checked = measured(f"{own} {ours}")
        print(
            f"V5, P2 {count} members: pack {packed.wall:.1f} s, {packed.peak_mib:.0f} MiB;"
            f" verify {checked.wall:.1f} s, {checked.peak_mib:.0f} MiB",
            flush=True,
        )


def main() -> None:
    """Generate, measure, clean up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--size-mib", type=int, default=2148)
    parser.add_argument("--members", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--disk", type=Path, default=None)
    parser.add_argument("--without-sha-extensions", action="store_true")
    parser.add_argument("--do", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    match options.do:
        case ["generate", tree, size_mib]:
            generate(Path(tree), int(size_mib) << 20)
        case ["pack", tree, target]:
            pack(tree, target, self_check=False)
        case ["pack-checked", tree, target]:
            pack(tree, target, self_check=True)
        case ["pack_members", count, target]:
            pack_members(count, target)
        case ["verify", target]:
            verify(target)
        case _:
            if options.without_sha_extensions:
                os.environ["OPENSSL_ia32cap"] = ":~0x20000000"  # noqa: SIM112
            with (
                tempfile.TemporaryDirectory(dir=options.folder) as folder,
                tempfile.TemporaryDirectory(dir=options.disk) as disk,
            ):
                compare_all(Path(folder), Path(disk), options)


if __name__ == "__main__":
    main()

"""Pack and verify a container, in turn with stock tools on the same content; prints median ratios of pairs.

Run by hand: `python benchmarks/container.py --pairs 7 --size-mib 512`. Needs tar, zstd and openssl. Data is generated
from a fixed seed into a temporary folder (`--folder`, best a memory file system) and removed. It judges nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from capsule.archive.reader import End, walk
from capsule.archive.writer import CapsuleWriter

CHUNK_SIZE = 1 << 20
SMALL_SIZE = 4096


def generate(folder: Path, size: int) -> None:
    """Write a tree with the names of a capsule: logs, noise, noisy numbers, and a tenth of it in small files."""
    rng = random.Random(2026)
    words = [bytes(rng.choices(b"abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(2000)]
    text = b"".join(b"step %d loss %.6f %s\n" % (n, rng.random(), rng.choice(words)) for n in range(200_000))
    numbers = b"".join(rng.randbytes(3) + b"\x3f" for _ in range(1 << 18))
    third = size * 3 // 10
    for name, block in (
        ("3-attempts/a000001/stdout", text),
        ("3-attempts/a000001/telemetry.jsonl", None),
        ("4-records/rows.parquet", numbers),
    ):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as stream:
            while stream.tell() < third:
                stream.write(rng.randbytes(CHUNK_SIZE) if block is None else block)
    (folder / "5-sources").mkdir()
    for number in range(size // 10 // SMALL_SIZE):
        start = rng.randrange(len(text) - SMALL_SIZE)
        content = b"%d " % number + text[start : start + SMALL_SIZE]
        (folder / "5-sources" / hashlib.sha256(content).hexdigest()).write_bytes(content)


def pieces(name: str) -> Iterator[bytes]:
    """Yield a file in blocks."""
    with open(name, "rb", buffering=0) as stream:  # noqa: PTH123
        while data := stream.read(CHUNK_SIZE):
            yield data


def pack(tree: Path, target: Path, *, self_check: bool) -> None:
    """Pack the tree."""
    # Without `Path`: the walk is part of what is timed, and the rival's is fast.
    names = sorted(f"{folder}/{name}" for folder, _, files in os.walk(tree) for name in files)
    start = len(str(tree)) + 1
    with CapsuleWriter(target, self_check=self_check) as writer:
        for name in names:
            writer.add(name[start:], os.stat(name).st_size, pieces(name))  # noqa: PTH116
        writer.close()


def verify(target: Path, *, threads: int = 2) -> None:
    """Walk a container to its seal."""
    with target.open("rb", buffering=0) as stream:
        last = None
        for event in walk(stream, threads=threads):
            last = event
    assert isinstance(last, End)
    assert last.sealed is not None


def shell(command: str) -> None:
    """Run a command line."""
    subprocess.run(["bash", "-ec", "set -o pipefail; " + command], check=True, stdout=subprocess.DEVNULL)


def measured(work: Callable[[], None]) -> tuple[float, float]:
    """Return wall and processor seconds of a call, its children included."""

    def processor() -> float:
        usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(usage.ru_utime + usage.ru_stime for usage in usages)

    wall, used = time.perf_counter(), processor()
    work()
    return time.perf_counter() - wall, processor() - used


def compare(title: str, ours: Callable[[], None], theirs: Callable[[], None], pairs: int) -> None:
    """Print the medians of a pair of calls, measured in turn, and of the pair ratios."""
    ours()
    theirs()
    runs = [(measured(ours), measured(theirs)) for _ in range(pairs)]
    wall = statistics.median(a[0] / b[0] for a, b in runs)
    used = statistics.median(a[1] / b[1] for a, b in runs)
    first, second = (statistics.median(run[side][0] for run in runs) for side in (0, 1))
    print(f"{title:58} {first:7.2f} s {second:7.2f} s   wall {wall:5.2f}   processor {used:5.2f}", flush=True)


def main() -> None:
    """Generate, measure, clean up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--size-mib", type=int, default=512)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        tree, ours, theirs = folder / "tree", folder / "x.capsule", folder / "x.tar.zst"
        generate(tree, options.size_mib << 20)
        tar = f"tar -C {tree} --sort=name -cf - . | zstd -q -f -1"
        for title, self_check in (("pack without self-check", False), ("pack with self-check", True)):
            compare(
                f"{title} : tar | zstd -1 -T0",
                lambda check=self_check: pack(tree, ours, self_check=check),  # type: ignore[misc]
                lambda: shell(f"{tar} -T0 -o {theirs}"),
                options.pairs,
            )
        print(f"{'size : tar | zstd -1 -T0':58} {ours.stat().st_size / theirs.stat().st_size:.4f}")
        for title, command in (
            ("zstd -t", f"zstd -tq {ours}"),
            ("zstd -dc | openssl dgst -sha256", f"zstd -dcq {ours} | openssl dgst -sha256"),
        ):
            compare(f"verify : {title}", lambda: verify(ours), lambda it=command: shell(it), options.pairs)  # type: ignore[misc]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(f"peak memory of this process, pack and verify: {peak / 1024:.0f} MiB")


if __name__ == "__main__":
    main()

"""Scan source trees, in turn with git and openssl hashing the same files; prints median ratios of pairs.

Run by hand: `python benchmarks/freeze.py --folder /dev/shm`. Needs git and openssl. Files are generated from a fixed
seed into a temporary folder (`--folder`, best a memory file system) and removed. A scan does more than its rivals: it
asks git what is tracked, hashes each file twice, looks for secrets, names what folds together. The store is timed once,
cold, since what it costs is the file system's. `--scale` shrinks every tree. It judges nothing.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from capsule.core.manifest import sources_bytes
from capsule.core.protocol import Sources
from capsule.host import store
from capsule.host.source import scan_sources


def generate(folder: Path, files: int, size: int) -> None:
    """Write `files` text files of half to one and a half times `size` bytes in a thousand folders."""
    rng = random.Random(2026)
    words = [bytes(rng.choices(b"abcdefghijklmnopqrstuvwxyz_", k=rng.randint(2, 12))) for _ in range(2000)]
    text = b"".join(b" ".join(rng.choices(words, k=8)) + b"\n" for _ in range(100_000))
    for number in range(files):
        path = folder / f"d{number % 97}" / f"e{number % 11}" / f"f{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        length = rng.randint(size // 2, size * 3 // 2)
        with path.open("wb") as file:
            while length > 0:
                start = rng.randrange(len(text) // 2)
                length -= file.write(text[start : start + min(length, len(text) // 2)])


def track(folder: Path) -> None:
    """Have git track every file."""
    for command in (("init", "-q"), ("add", "-A")):
        subprocess.run(["git", "-C", str(folder), *command], check=True)


def scan(folder: Path) -> None:
    """Scan the tree and write its list, as a freeze does."""
    sources_bytes(scan_sources(folder, Sources()).entries)


def paths(folder: Path) -> list[str]:
    """Return the paths of all files."""
    return sorted(str(path) for path in folder.rglob("*") if path.is_file() and ".git" not in path.parts)


def git(folder: Path) -> Callable[[], object]:
    """Return a call that hashes every file with git, in one process."""
    listed = "".join(f"{path}\n" for path in paths(folder)).encode()
    command = ["git", "-C", str(folder), "hash-object", "--no-filters", "--stdin-paths"]
    return lambda: subprocess.run(command, input=listed, stdout=subprocess.DEVNULL, check=True)


def openssl(folder: Path) -> Callable[[], object]:
    """Return a call that hashes every file with openssl, in one process."""
    command = ["openssl", "dgst", "-sha256", *paths(folder)]
    return lambda: subprocess.run(command, stdout=subprocess.DEVNULL, check=True)


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Return wall and processor time of one call, its children included."""

    def processor() -> float:
        usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(usage.ru_utime + usage.ru_stime for usage in usages)

    start, used = time.perf_counter(), processor()
    work()
    return time.perf_counter() - start, processor() - used


def compare(name: str, ours: Callable[[], object], theirs: Callable[[], object], pairs: int) -> None:
    """Run both in turn, once more than counted, and print the median ratios of the pairs."""
    times = [(seconds(ours), seconds(theirs)) for _ in range(pairs + 1)][1:]
    own, other = (statistics.median(run[side][0] for run in times) for side in (0, 1))
    wall, used = (statistics.median(mine[kind] / rival[kind] for mine, rival in times) for kind in (0, 1))
    print(f"{name:58} {own:7.2f} s {other:7.2f} s   wall {wall:5.2f}   processor {used:5.2f}", flush=True)


def main() -> None:
    """Generate, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    pairs = options.pairs
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        for count, size in ((100_000, 3_000), (43_000, 18_300)):
            tree = Path(temporary, f"files-{count}")
            files = int(count * options.scale)
            generate(tree, files, size)
            track(tree)
            title = f"F1 {files} files of {size} bytes : git hash-object"
            compare(title, lambda it=tree: scan(it), git(tree), pairs)  # type: ignore[misc]
            if count != 100_000:
                time_store(tree)
            shutil.rmtree(tree)
        tree = Path(temporary, "mixed")
        files, size = int(20_000 * options.scale), int((1 << 29) * options.scale)
        generate(tree / "small", files, 4096)
        generate(tree / "large", 4, size)
        track(tree)
        title = f"F2 {files} files and four of {size >> 20} MiB : openssl sha256"
        compare(title, lambda: scan(tree), openssl(tree), pairs)


def time_store(tree: Path) -> None:
    """Time what a freeze and a run write, once each."""
    entries = scan_sources(tree, Sources()).entries
    os.sync()
    print(f"   store them: {seconds(lambda: store.put_all(tree, entries))[0]:.2f} s")
    target = tree / ".capsule" / "snapshot"
    print(f"   make their snapshot: {seconds(lambda: store.materialise(tree, entries, target))[0]:.2f} s")
    print(f"   check it: {seconds(lambda: store.verify_tree(entries, target))[0]:.2f} s", flush=True)
    store.remove_tree(target)


if __name__ == "__main__":
    main()

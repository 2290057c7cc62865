"""Scan source trees, in turn with git and openssl hashing the same files; prints median ratios of pairs.

Run by hand: `python benchmarks/freeze.py --pairs 7 --files 20000 --size-mib 512`. Needs git and openssl. Files are
generated from a fixed seed into a temporary folder (`--folder`, best a memory file system) and removed. A scan does
more than its rivals: it asks git what is tracked, hashes each file twice, looks for secrets, names what folds together.
The store is timed once, cold, since what it costs is the file system's. It judges nothing.
"""

from __future__ import annotations

import argparse
import os
import random
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
    """Write `files` text files of half to one and a half times `size` bytes in a thousand folders; commit them."""
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


def seconds(work: Callable[[], object]) -> float:
    """Return the wall time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def compare(name: str, ours: Callable[[], object], theirs: Callable[[], object], pairs: int) -> None:
    """Run both in turn, once more than counted, and print the median ratio of the pairs."""
    times = [(seconds(ours), seconds(theirs)) for _ in range(pairs + 1)][1:]
    own, other = (statistics.median(side) for side in zip(*times, strict=True))
    ratio = statistics.median(mine / rival for mine, rival in times)
    print(f"{name}: scan {own:.3f} s, rival {other:.3f} s, ratio {ratio:.2f}")


def main() -> None:
    """Generate, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--small-bytes", type=int, default=3000)
    parser.add_argument("--size-mib", type=int, default=512)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        small, large = Path(temporary, "small"), Path(temporary, "large")
        generate(small, options.files, options.small_bytes)
        generate(large, 64, options.size_mib * 2**20 // 64)
        compare(f"{options.files} files / git hash-object", lambda: scan(small), git(small), options.pairs)
        compare(f"{options.size_mib} MiB / openssl sha256", lambda: scan(large), openssl(large), options.pairs)
        entries = scan_sources(small, Sources()).entries
        os.sync()
        print(f"store {options.files} files: {seconds(lambda: store.put_all(small, entries)):.3f} s")
        target = small / ".capsule" / "snapshot"
        print(f"make their snapshot: {seconds(lambda: store.materialise(small, entries, target)):.3f} s")
        print(f"check it: {seconds(lambda: store.verify_tree(entries, target)):.3f} s")
        store.remove_tree(target)


if __name__ == "__main__":
    main()

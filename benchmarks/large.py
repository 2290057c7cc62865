"""Freeze, run, pack, verify, show and extract one large study; prints seconds and peak memory of each command.

Run by hand, best with `nice`: `python benchmarks/large.py --output-mb 20000` (two processes print half each; thrice
as many bytes must be free on the disk) and `python benchmarks/large.py --sources 200000` (best with `--folder` on a
memory file system). The peak is that of the largest process of a command. Everything is removed at the end. It judges
nothing.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROTOCOL = """\
schema = "capsule.protocol/1"
name = "large"
title = "A large study"
question = "How much memory does evidence take?"
arms = [{{ name = "one", trial = "trial:measure" }}]
workloads = [{{ name = "only" }}]
observations = [{{ name = "amount", type = "float64", replay = {{ rule = "exact" }} }}]
gates = [{{ name = "positive", observation = "amount", rule = "above", limit = 0, on_failure = "exclude" }}]
hypotheses = [{{ name = "sane", claim = "Amounts are positive.", rule = "gates_pass", gates = ["positive"] }}]

[design]
seeds = [1, 2]
starts = 1
blocks = 1
order = "abba"
order_seed = 7
isolation = "start"

[analysis]
missing = "withhold"
multiplicity = "none"

[budget]
device = "cpu"
device_seconds = 40000
wall_limit_seconds = 7200
kill_grace_seconds = 1
release_grace_seconds = 1
exclusivity = "best_effort"
output_bytes_max = 1_000_000_000_000

[environment]
python = ">=3.11"
"""

TRIAL = """\
import base64, os, random

def measure(cell):
    rng = random.Random(cell.seed)
    text = b"".join(b"step %d loss %.6f\\\\n" % (n, rng.random()) for n in range(100_000))
    noise = base64.encodebytes(rng.randbytes(len(text) * 3 // 4))
    left = {output} // 2
    while left > 0:
        for block in (text, noise):
            view = memoryview(block)[:left]
            left -= len(view)
            while view:
                view = view[os.write(1, view):]
    return {{"amount": 1.0}}
"""


def generate(folder: Path, output: int, sources: int) -> Path:
    """Write a study whose trial prints `output` bytes, with so many small source files; return its protocol."""
    (folder / ".capsule").mkdir(parents=True)
    rng = random.Random(2026)
    for number in range(sources):
        path = folder / f"d{number % 1000}" / f"f{number}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"# %d %s\n" % (number, rng.randbytes(rng.randint(20, 400)).hex().encode()))
    (folder / "trial.py").write_text(TRIAL.format(output=output))
    protocol = folder / "large.toml"
    protocol.write_text(PROTOCOL.format())
    return protocol


def command(title: str, *arguments: str | Path, expected: int = 0) -> None:
    """Run a command of the product and print what it took."""
    start = time.perf_counter()
    line = [sys.executable, "-m", "capsule", *map(str, arguments)]
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    used = usage.ru_utime + usage.ru_stime
    peak = usage.ru_maxrss / 1024
    print(f"{title:28} exit {process.returncode}  {wall:8.2f} s  processor {used:8.2f} s  {peak:6.0f} MiB", flush=True)
    if process.returncode != expected:
        sys.exit(f"expected exit {expected} of {title}, found {process.returncode}")


def main() -> None:
    """Generate, run every command, clean up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-mb", type=int, default=1)
    parser.add_argument("--sources", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        protocol = generate(folder / "study", options.output_mb * 10**6, options.sources)
        capsule = folder / "large.capsule"
        command("start", "--help")
        command("freeze", "freeze", protocol)
        command("run", "run", protocol)
        command("pack", "pack", protocol, "--output", capsule)
        print(f"{'capsule':28} {capsule.stat().st_size / 1e6:.0f} MB")
        command("verify", "verify", capsule)
        with capsule.open("rb") as stream:
            sys.stdin.flush()
            saved = os.dup(0)
            os.dup2(stream.fileno(), 0)
            command("verify -", "verify", "-")
            os.dup2(saved, 0)
        command("show, all members", "show", capsule)
        command("show, one small member", "show", capsule, "7-results/results.json")
        command("extract", "extract", capsule, folder / "out")
        command("extract --sources", "extract", capsule, folder / "tree", "--sources")


if __name__ == "__main__":
    main()

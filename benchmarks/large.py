"""Freeze, run, pack, verify, show and extract one large study; prints seconds and peak memory of each command.

Run by hand, best with `nice`: `python benchmarks/large.py --large-mb 20000` (two source files of half each; thrice
as many bytes must be free on the disk) and `python benchmarks/large.py --files 200000 --large-mb 0` (four files on the
disk for each; without large files nothing is amended). `--command` takes a plain command in the place of a Python
trial. The peak is that of the largest process of a command. Everything is removed at the end. It judges nothing.
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

from capsule.host import store

PROTOCOL = """\
schema = "capsule.protocol/1"
name = "large"
title = "A large study"
question = "How much memory does evidence take?"
arms = [{ name = "one", @TRIAL@ }]
workloads = [{ name = "only" }]
observations = [{ name = "amount", type = "float64", replay = { rule = "exact" } }]
gates = [{ name = "positive", observation = "amount", rule = "above", limit = 0, on_failure = "exclude" }]
hypotheses = [{ name = "sane", claim = "Amounts are positive.", rule = "gates_pass", gates = ["positive"] }]

[design]
seeds = [1]
starts = 1
blocks = 1
order = "listed"
order_seed = 7
isolation = "cell"

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

[environment]
python = ">=3.11"
"""

TRIAL = """\
def measure(cell):
    return {"amount": 1.0}


if __name__ == "__main__":
    from capsule import record

    record(amount=1.0)
"""
PYTHON_TRIAL = 'trial = "trial:measure"'
COMMAND_TRIAL = 'command = ["python", "trial.py"]'


def generate(folder: Path, files: int, trial: str = PYTHON_TRIAL) -> Path:
    """Write a study of one cell with so many small source files; return its protocol."""
    (folder / ".capsule").mkdir(parents=True)
    rng = random.Random(2026)
    for number in range(files):
        path = folder / f"d{number % 1000}" / f"f{number}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"# %d %s\n" % (number, rng.randbytes(rng.randint(20, 400)).hex().encode()))
    (folder / "trial.py").write_text(TRIAL)
    protocol = folder / "large.toml"
    protocol.write_text(PROTOCOL.replace("@TRIAL@", trial))
    return protocol


def generate_large(folder: Path, size: int) -> None:
    """Write two source files that hold `size` bytes, one of zeros and one that does not compress."""
    block = random.Random(2026).randbytes(1 << 21)
    with (folder / "zeros.bin").open("wb") as stream:
        stream.truncate(size // 2)
    with (folder / "noise.bin").open("wb") as stream:
        while (left := size - size // 2 - stream.tell()) > 0:
            stream.write(block[:left])


def link_to_store(folder: Path) -> None:
    """Put the store's copies in the place of the two large files, which halves what they take on the disk."""
    for path in folder.joinpath(".capsule", "objects").glob("*/*"):
        for name in ("zeros.bin", "noise.bin"):
            if path.stat().st_size == (folder / name).stat().st_size > 1 << 20 and same_start(path, folder / name):
                (folder / name).unlink()
                (folder / name).hardlink_to(path)


def same_start(one: Path, other: Path) -> bool:
    """Whether two files begin alike."""
    with one.open("rb") as first, other.open("rb") as second:
        return first.read(4096) == second.read(4096)


def command(title: str, *arguments: str | Path, stdin: Path = Path("/dev/null")) -> None:
    """Run a command of the product and print what it took."""
    start = time.perf_counter()
    line = [sys.executable, "-m", "capsule", *map(str, arguments)]
    with stdin.open("rb") as stream:
        process = subprocess.Popen(line, stdin=stream, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    used = usage.ru_utime + usage.ru_stime
    peak = usage.ru_maxrss / 1024
    print(f"{title:28} exit {process.returncode}  {wall:8.2f} s  processor {used:8.2f} s  {peak:6.0f} MiB", flush=True)
    if process.returncode:
        sys.exit(f"expected exit 0 of {title}, found {process.returncode}")


def main() -> None:
    """Generate, run every command, clean up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large-mb", type=int, default=2)
    parser.add_argument("--files", type=int, default=1)
    parser.add_argument("--command", action="store_true")
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        study, capsule = folder / "study", folder / "large.capsule"
        protocol = generate(study, options.files, COMMAND_TRIAL if options.command else PYTHON_TRIAL)
        command("freeze", "freeze", protocol)
        command("run", "run", protocol)
        if options.large_mb:
            generate_large(study, options.large_mb * 10**6)
            command("amend, with the large files", "amend", protocol, "--reason", "add the large files")
            link_to_store(study)
        command("pack", "pack", protocol, "--output", capsule)
        print(f"{'capsule':28} {capsule.stat().st_size / 1e6:.0f} MB")
        command("verify", "verify", capsule)
        command("verify -", "verify", "-", stdin=capsule)
        command("show, all members", "show", capsule)
        command("show --json", "show", capsule, "--json")
        command("show, one small member", "show", capsule, "7-results/results.json")
        command("extract", "extract", capsule, folder / "out")
        store.remove_tree(folder / "out")
        command("extract --sources", "extract", capsule, folder / "out", "--sources")


if __name__ == "__main__":
    main()

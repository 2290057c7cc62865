"""A bounded run that is the same each time, by mutation alone: python -m tests.fuzz.sample [TIMES]

It prints one JSON object: executions by target, and by how many bytes the process grew beyond what a few seeds take.
Any fault ends it with a traceback and the input, in hexadecimal.
"""

from __future__ import annotations

import json
import random
import resource
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from tests.fuzz.guard import only_reading, within_time
from tests.fuzz.mutators import mutate_bytes, mutate_lines
from tests.fuzz.targets import TARGETS, Target

EACH = 6
"""Executions of a target of weight 1."""

ADDRESS_SPACE_BYTES = 512 << 20
"""What any input may take beyond the seeds; threads and their arenas are in it."""


def main() -> None:
    """Try every target."""
    times = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    for target in TARGETS.values():
        for seed in target.seeds()[:3]:
            target.run(seed)
    before = status("VmHWM")
    resource.setrlimit(resource.RLIMIT_AS, (status("VmSize") + ADDRESS_SPACE_BYTES, resource.RLIM_INFINITY))
    counts = {}
    for name, target in TARGETS.items():
        counts[name] = EACH * times * target.weight
        attempt(name, target, random.Random(name), counts[name])
    print(json.dumps({"executions": counts, "grown_bytes": status("VmHWM") - before}))


def attempt(name: str, target: Target, chance: random.Random, count: int) -> None:
    """Try so many mutations of the seeds, and of their mutations."""
    seeds = target.seeds()
    corpus = [*seeds]
    mutators: list[Callable[[random.Random, bytes], bytes]] = [mutate_bytes]
    if target.shape == "lines":
        mutators += [mutate_lines] * 2
    for _ in range(count):
        data = chance.choice(corpus)
        for _ in range(chance.choice((1, 1, 2, 3))):
            data = chance.choice(mutators)(chance, data)
        try:
            # Extraction guards itself: it may write below one folder.
            with within_time(), nullcontext() if name == "extraction" else only_reading():
                target.run(data)
        except BaseException:
            print(f"{name}: {data.hex()}", file=sys.stderr)
            raise
        corpus[chance.randrange(len(corpus))] = data if chance.random() < 0.2 else chance.choice(seeds)


def status(name: str) -> int:
    """Return a size of this process in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main()

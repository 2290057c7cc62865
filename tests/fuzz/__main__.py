"""Fuzz a target, guided by the coverage of `capsule`: python -m tests.fuzz TARGET [CORPUS] [-flags of libFuzzer]

With `--list` it lists the targets. Inputs that reached new code are kept in CORPUS. Over a fault it ends and writes the
input to where `-artifact_prefix=` says; once mended, the input goes to `tests/fuzz/found/TARGET` and is tried for ever.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

import atheris  # type: ignore[import-not-found]

with atheris.instrument_imports(include=["capsule", "rfc8785"]):
    from tests.fuzz.targets import TARGETS

from tests.fuzz.guard import only_reading
from tests.fuzz.mutators import mutate_lines

FLAGS = ["-timeout=2", "-rss_limit_mb=1024", "-malloc_limit_mb=256", "-max_len=16384"]
"""Two seconds and bounded memory for any input; a reader that exceeds them ends the run like a crash."""


def main() -> None:
    """Run libFuzzer on one target; it ends the process itself."""
    name, *rest = sys.argv[1:] or [""]
    if name == "--list":
        print(*TARGETS)
        return
    if name not in TARGETS:
        sys.exit(f"expected a target, found {name!r}; there are: {' '.join(TARGETS)}")
    target = TARGETS[name]

    def once(data: bytes) -> None:
        if name == "extraction":  # guards itself, with a folder that may be written
            target.run(data)
            return
        with only_reading():
            target.run(data)

    def mutate(data: bytes, size_max: int, seed: int) -> bytes:
        chance = random.Random(seed)
        if target.shape == "lines" and chance.random() < 0.6:
            return mutate_lines(chance, data)[:size_max]
        return bytes(atheris.Mutate(data, size_max))

    with tempfile.TemporaryDirectory() as folder:
        for number, seed in enumerate(target.seeds()):
            (Path(folder) / str(number)).write_bytes(seed)
        once(target.seeds()[0])
        corpus = [item for item in rest if not item.startswith("-")]
        flags = [item for item in rest if item.startswith("-")]
        atheris.Setup([sys.argv[0], *FLAGS, *flags, *corpus, folder], once, custom_mutator=mutate)
        atheris.Fuzz()


if __name__ == "__main__":
    main()

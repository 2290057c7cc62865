"""Every single bit of a golden capsule flipped on disk: none is intact, whichever bit it is.

Here a sample of them, the same each time; CAPSULE_EVERY_BIT=1 flips all of them, which takes minutes (`make fuzz`).
"""

from __future__ import annotations

import os
import random
from pathlib import Path

from capsule.archive.reader import examine
from capsule.core.errors import MalformedError
from capsule.steps.verify import verify
from tests.attacks.vectors import golden
from tests.golden.make import seal

EVERY_BIT = "CAPSULE_EVERY_BIT" in os.environ
VERIFIED_EACH = 97 if EVERY_BIT else 12
"""Of so many flips one is verified whole; of all of them the container is read, whose fault alone is enough."""


def test_no_flipped_bit_of_a_golden_capsule_is_intact(tmp_path: Path) -> None:
    """Each flip is read back from the disk, found, and undone."""
    path = tmp_path / "x.capsule"
    data = seal(golden())
    path.write_bytes(data)
    bits = range(8 * len(data))
    chosen = list(bits) if EVERY_BIT else sorted(random.Random(5).sample(bits, 700))
    with path.open("rb") as stream:
        assert verify(stream).integrity == "intact"
    with path.open("r+b", buffering=0) as stream:
        for count, bit in enumerate(chosen):
            place = bit // 8
            os.pwrite(stream.fileno(), bytes([data[place] ^ 1 << bit % 8]), place)
            on_disk = path.read_bytes()
            assert on_disk[place] == data[place] ^ 1 << bit % 8
            assert on_disk[:place] + data[place : place + 1] + on_disk[place + 1 :] == data
            stream.seek(0)
            found = examine(stream, threads=0)
            assert found.sealed is None, bit
            assert found.findings, bit
            if count % VERIFIED_EACH == 0:
                stream.seek(0)
                assert answer(path) in ("broken", "refused"), bit
            os.pwrite(stream.fileno(), data[place : place + 1], place)
    assert path.read_bytes() == data


def answer(path: Path) -> str:
    """Return the integrity of a file, or that it was refused as no capsule."""
    try:
        with path.open("rb") as stream:
            return verify(stream).integrity
    except MalformedError:
        return "refused"

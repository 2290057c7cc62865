"""What verifying takes of a long study: of many attempts, of hours of samples, of many rows; prints seconds and peaks.

Run by hand: `python benchmarks/long.py`. The histories are made by the builders of the tests, with one sample every two
seconds and as many heartbeats as an attempt writes; their capsules are verified by a process of its own. It judges
nothing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "core"), str(ROOT / "benchmarks")]

from builders import BOOT, SOURCES, History, edited, generation, sample  # noqa: E402
from large import command  # noqa: E402

from capsule.archive.writer import CapsuleWriter  # noqa: E402
from capsule.core.attempt import Clock, Heartbeat  # noqa: E402
from capsule.core.digest import digest_of  # noqa: E402
from capsule.core.table import TELEMETRY_COLUMNS, table_columns  # noqa: E402
from capsule.core.telemetry import Sample  # noqa: E402
from capsule.host.heartbeats import heartbeat_interval_ms  # noqa: E402
from tests.tables import table_bytes  # noqa: E402

STUDIES = {
    "1,000 attempts, no samples": (1000, 0, 1),
    "5,000 attempts, no samples": (5000, 0, 1),
    "100 attempts of an hour": (100, 3600, 1),
    "300 attempts of an hour": (300, 3600, 1),
    "50,000 rows of 10 attempts": (10, 0, 1250),
    "200,000 rows of 10 attempts": (10, 0, 5000),
}


class LongHistory(History):
    """A history whose attempts last, and write their heartbeats."""

    lasts_ms = 0

    def clock(self) -> Clock:
        """Return the next reading of the clocks; they may run for years."""
        self.now_ms += 10
        at = datetime.fromtimestamp(1893456000 + self.now_ms / 1000, UTC)
        realtime = at.strftime("%Y-%m-%dT%H:%M:%S.") + f"{self.now_ms % 1000:03}Z"
        return Clock(realtime=realtime, boottime_ms=self.now_ms, monotonic_ms=self.now_ms, boot_id=BOOT)

    def start(self, name: str) -> Clock:
        """Lease and spawn an attempt, and let it live."""
        leased = super().start(name)
        elapsed = 0
        while elapsed < self.lasts_ms:
            elapsed += heartbeat_interval_ms(elapsed)
            self.event("heartbeat", name, Heartbeat(elapsed_ms=elapsed))
        return leased


def capsule(path: Path, attempts: int, seconds: int, blocks: int) -> None:
    """Write the capsule of a study with so many attempts, each of so many seconds and four rows for every block."""
    wall = max(8, 2 * seconds + attempts)
    text = edited(
        ('order = "abba"', 'order = "listed"'),
        ('isolation = "start"', f'isolation = "start"\nstarts = {attempts}\nblocks = {blocks}'),
        ("seeds = [5, 3, 4]", "seeds = [5]"),
        ("wall_limit_seconds = 8", f"wall_limit_seconds = {wall}"),
        ("device_seconds = 300\n", f"device_seconds = {wall * attempts * 2}\n"),
    )
    history = LongHistory(generations=[generation(text)])
    history.lasts_ms = seconds * 1000
    history.opened()

    def samples(leased_ms: int) -> list[Sample]:
        return [sample(leased_ms + at) for at in range(0, seconds * 1000, 2000)]

    for process in range(attempts):
        history.attempt(process, samples=samples if seconds else None, lasts_ms=seconds * 1000)
    evidence = history.evidence()
    files = {f"1-manifest/001/{name}": data for name, data in history.generations[0].items()}
    files |= {"2-ledger.head.json": evidence.head, "2-ledger.jsonl": history.ledger}
    files |= {f"3-attempts/{name}/{file}": data for name in history.files for file, data in history.files[name].items()}
    files["4-records/rows.parquet"] = table_bytes(table_columns(history.manifest.protocol.observations), evidence.table)
    if seconds:
        files["4-records/telemetry.parquet"] = table_bytes(TELEMETRY_COLUMNS, evidence.telemetry_table)
    files |= {f"5-sources/{digest_of(data)[7:]}": data for data in SOURCES.values()}
    files |= {"7-results/results.json": evidence.results, "8-README/VERIFY.md": b"Look.\n"}
    with CapsuleWriter(path) as writer:
        for name in sorted(files):
            writer.add(name, len(files[name]), files[name])
        writer.close()


def main() -> None:
    """Make every study, verify it, clean up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--make", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        capsule(Path(options.make[1]), *STUDIES[options.make[0]])
        return
    for title in STUDIES:
        if options.only in title:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "long.capsule"
                # In a process of its own: the peak of a process begins with its parent's.
                subprocess.run([sys.executable, __file__, "--make", title, path], check=True)
                command(title, "verify", path)


if __name__ == "__main__":
    main()

"""`capsule --help` against the `--help` of a minimal Typer program, in turn; prints the median of the pair ratios.

The promise is at most 1.25x. Run by hand: python benchmarks/help.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PAIRS = 15
MINIMAL = """\
import typer

app = typer.Typer()


@app.command()
def hello(name: str) -> None:
    \"\"\"Say hello.\"\"\"
    print(name)


@app.command()
def bye(name: str) -> None:
    \"\"\"Say goodbye.\"\"\"
    print(name)


app()
"""


def seconds(command: list[str]) -> float:
    """Return the wall time of a command."""
    began = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def main() -> None:
    """Time both in turn and print the ratio."""
    with tempfile.TemporaryDirectory() as folder:
        minimal = Path(folder) / "minimal.py"
        minimal.write_text(MINIMAL, encoding="utf-8")
        ours = [sys.executable, "-m", "capsule", "--help"]
        theirs = [sys.executable, str(minimal), "--help"]
        for command in (ours, theirs):
            seconds(command)
        pairs = [(seconds(ours), seconds(theirs)) for _ in range(PAIRS)]
    ratio = statistics.median(a / b for a, b in pairs)
    print(f"capsule --help {statistics.median(a for a, _ in pairs):.3f} s")
    print(f"minimal Typer --help {statistics.median(b for _, b in pairs):.3f} s")
    print(f"ratio {ratio:.2f} (at most 1.25)")


if __name__ == "__main__":
    main()

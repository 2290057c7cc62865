"""A small study in a folder of its own: what most tests freeze, run and pack."""

from __future__ import annotations

import textwrap
from pathlib import Path

PROTOCOL = """\
schema = "capsule.protocol/1"
name = "study"
title = "A small study"
question = "Is twice twice as much as once?"

[[arms]]
name = "once"
trial = "trial:measure"
parameters = { factor = 1 }

[[arms]]
name = "twice"
trial = "trial:measure"
parameters = { factor = 2 }

[[workloads]]
name = "small"
parameters = { size = 10 }

[design]
seeds = [1, 2]
starts = 1
blocks = 1
order = "abba"
order_seed = 7
isolation = "start"

[[observations]]
name = "amount"
type = "float64"
minimum = 0
replay = { rule = "exact" }

[[observations]]
name = "seconds"
type = "float64"
unit = "s"
minimum = 0
replay = { rule = "never", reason = "a time is measured" }

[[gates]]
name = "positive"
observation = "amount"
rule = "above"
limit = 0
on_failure = "exclude"

[[estimates]]
name = "ratio"
rule = "log_ratio"
observation = "amount"
numerator = "twice"
denominator = "once"
confidence = 0.95

[[hypotheses]]
name = "more"
claim = "Twice is more than once."
rule = "interval_above"
estimate = "ratio"
threshold = 0

[[hypotheses]]
name = "sane"
claim = "Amounts are positive."
rule = "gates_pass"
gates = ["positive"]

[analysis]
missing = "withhold"
multiplicity = "none"

[budget]
device = "cpu"
device_seconds = 200
pilot_device_seconds = 40
wall_limit_seconds = 15
kill_grace_seconds = 1
release_grace_seconds = 1
exclusivity = "best_effort"

[retry]

[environment]
python = ">=3.11"
"""

TRIAL = """\
import time


def measure(cell):
    began = time.perf_counter()
    amount = float(cell.parameters["factor"] * cell.workload["size"] * (1 + cell.seed / 100 + cell.position / 1000))
    return {"amount": amount, "seconds": time.perf_counter() - began}
"""

COMMAND_PROTOCOL = PROTOCOL.replace('trial = "trial:measure"\n', "command = @COMMAND@\n").replace(
    'isolation = "start"', 'isolation = "cell"'
)


def make_study(folder: Path, *, trial: str = TRIAL, changes: dict[str, str] | None = None) -> Path:
    """Write a study with a Python trial and return its protocol; `changes` replace text of the protocol."""
    return _write(folder, PROTOCOL, trial, changes or {})


def make_command_study(folder: Path, command: str, *, script: str, changes: dict[str, str] | None = None) -> Path:
    """Write a study whose arms are a command (a TOML array) and a script `trial.py`."""
    return _write(folder, COMMAND_PROTOCOL.replace("@COMMAND@", command), script, changes or {})


def _write(folder: Path, protocol: str, trial: str, changes: dict[str, str]) -> Path:
    for old, new in changes.items():
        assert old in protocol, old
        protocol = protocol.replace(old, new)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".capsule").mkdir(exist_ok=True)
    (folder / "trial.py").write_text(textwrap.dedent(trial), encoding="utf-8")
    path = folder / "study.toml"
    path.write_text(protocol, encoding="utf-8")
    return path

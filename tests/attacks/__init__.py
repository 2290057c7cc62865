"""Every attack on a capsule by name, each built by one small generator; `python -m tests.attacks` lists them."""

import sys
from pathlib import Path

# The builders of containers are imported by their bare names, as their own tests do.
sys.path.append(str(Path(__file__).parents[1] / "archive"))

"""Exports, shown to other people's programs that the tested set has no room for: `make test-exports` installs them.

RO-Crate's validator needs an older `rich` than the tested set has and, without the web, the help of `crate.py`; both
need some forty packages more.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
from pathlib import Path

import pytest

from tests.conftest import Capsule

ROOT = Path(__file__).parents[2]
BIN = Path(os.environ.get("CAPSULE_EXPORT_TOOLS", ROOT / "build" / "exports")) / "bin"
GOLDEN = ROOT / "tests" / "golden"
KNOWN = ("ro-crate-1.1_22.2 ", "ro-crate-1.1_22.3 ")
"""Author and publisher of the root: what RO-Crate recommends and a capsule does not know: it names no people."""


def run(*arguments: str | Path) -> str:
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "MLFLOW_ALLOW_FILE_STORE": "true"}
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["supported", "budget-ended", "journal-edited"])
def test_the_validator_accepts_a_crate(capsule: Capsule, tmp_path: Path, name: str) -> None:
    """RO-Crate's validator objects to no MUST of 1.1, and to no SHOULD but two about people."""
    folder = tmp_path / "crate"
    assert capsule("export", GOLDEN / f"{name}.capsule", "--as", "ro-crate", "-o", folder, "--force").code == 0
    head, *issues = run(BIN / "python", Path(__file__).parent / "crate.py", folder).splitlines()
    assert head == "validated"
    assert [issue for issue in issues if not any(check in issue for check in KNOWN)] == []


def test_the_validator_would_object(capsule: Capsule, tmp_path: Path) -> None:
    """Without its date a crate breaks a MUST, and the validator says so: it does look."""
    folder = tmp_path / "crate"
    assert capsule("export", GOLDEN / "supported.capsule", "--as", "ro-crate", "-o", folder).code == 0
    metadata = folder / "ro-crate-metadata.json"
    document = json.loads(metadata.read_text())
    del document["@graph"][1]["datePublished"]
    metadata.write_text(json.dumps(document))
    issues = run(BIN / "python", Path(__file__).parent / "crate.py", folder).splitlines()
    assert any(issue.startswith("REQUIRED") and "datePublished" in issue for issue in issues), issues


def test_mlflow_takes_the_folder(capsule: Capsule, tmp_path: Path) -> None:
    """MLflow moves the folder into its database whole, and has there what the capsule says."""
    file = GOLDEN / "supported.capsule"
    folder = tmp_path / "mlruns"
    assert capsule("export", file, "--as", "mlflow", "-o", folder).code == 0
    database = tmp_path / "mlflow.db"
    run(BIN / "mlflow", "migrate-filestore", "--source", folder, "--target", f"sqlite:///{database}")
    (estimate,) = json.loads(capsule("show", file, "7-results/results.json").out)["estimates"]
    with sqlite3.connect(database) as connection:
        (means,) = connection.execute("select value from latest_metrics where key = 'ratio.small.mean'").fetchall()
        outcomes = connection.execute("select value from tags where key = 'outcome'").fetchall()
        (metrics,) = connection.execute("select count(*) from metrics where key = 'amount'").fetchone()
    assert means == (float(estimate["mean"]),)
    assert set(outcomes) == {("completed",)}
    assert metrics == 8

"""One real Slurm for all tests here; without it they fail and say what is missing, since nothing else shows this."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.host.conftest import bench  # noqa: F401
from tests.slurm.cluster import Cluster, missing_words, running


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Give a cluster that runs until the last test."""
    words = missing_words()
    assert words is None, words
    with running() as cluster:
        yield cluster


@pytest.fixture
def slurm(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Give the cluster, all of it up and idle, to the commands of this process; afterwards no job is left."""
    for name in [name for name in os.environ if name.startswith(("SLURM", "SBATCH"))]:
        monkeypatch.delenv(name)
    for name in ("PATH", "SLURM_CONF", "MYSQL_UNIX_PORT"):
        monkeypatch.setenv(name, cluster.environment[name])
    cluster.restore()
    yield cluster
    cluster.restore()

"""The cluster, created once for all tests that share it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.multinode.cluster import Cluster, missing, two_nodes
from tests.multinode.training import Training


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    lacks = missing()
    if lacks:
        pytest.skip("needs " + ", ".join(lacks) + " (make test-multinode installs it)")
    with two_nodes(tmp_path_factory.mktemp("cluster")) as nodes:
        yield nodes


@pytest.fixture(scope="session")
def training(tmp_path_factory: pytest.TempPathFactory) -> Training:
    return Training(tmp_path_factory.mktemp("training"))


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    path = tmp_path / "hosts"
    path.write_text("node1 slots=2\nnode2 slots=2\n")
    return path

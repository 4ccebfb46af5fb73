"""Groups of ranks within hosts, on two hosts that only share a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.multinode.cluster import AS_ROOT, Cluster, launch_words, run_on
from tests.multinode.training import Training, losses_in

pytestmark = [pytest.mark.multinode, pytest.mark.timeout(600)]
STEPS = 20
WAYS: dict[str, dict[str, Any]] = {
    "stage 3": {"zero_optimization": {"stage": 3}},
    "stage 2, a copy per host": {"zero_optimization": {"stage": 2}, "hf_zero": {"shard_group": "host"}},
    "stage 3, a copy per host": {"zero_optimization": {"stage": 3}, "hf_zero": {"shard_group": "host"}},
    "MiCS": {"zero_optimization": {"stage": 3, "mics_shard_size": 2}},
    "hpZ": {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}},
}


def test_losses_are_those_of_one_host(cluster: Cluster, training: Training, hostfile: Path, tmp_path: Path) -> None:
    """Hosts are identified by what ranks share, not by names."""
    found = {}
    for number, (name, config) in enumerate(WAYS.items()):
        run = tmp_path / f"run{number}"
        words = launch_words("--hostfile", hostfile, "--launcher", "pdsh", *training.words(run, 4, STEPS, config))
        environment = {**training.environment, **AS_ROOT}
        assert run_on(cluster[0], words, environment, tmp_path / f"launcher{number}") == 0, name
        found[name] = losses_in(run)
    plain = training.on_one_node(STEPS)
    assert len(plain) == STEPS
    for name, losses in found.items():
        assert losses == pytest.approx(plain, rel=1e-5), name
    assert found["hpZ"] == found["stage 3"], "the same sums in the same order"

"""Five steps over two nodes with every launcher: the same losses as on one node, over the network."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.multinode.cluster import AS_ROOT, Cluster, launch_words, run_on, wait_for
from tests.multinode.training import Training

pytestmark = [pytest.mark.multinode, pytest.mark.timeout(600)]


@pytest.mark.parametrize("launcher", ["pdsh", "openmpi", "mpich"])
def test_started_from_one_node(
    launcher: str, cluster: Cluster, training: Training, hostfile: Path, tmp_path: Path
) -> None:
    words = launch_words("--hostfile", hostfile, "--launcher", launcher, *training.words(tmp_path / "run", 4))
    with training.as_on_one_node(tmp_path / "run", cluster[1]):
        assert run_on(cluster[0], words, {**training.environment, **AS_ROOT}, tmp_path / "launcher") == 0


@pytest.mark.parametrize("way", ["nossh", "standard", "torchrun"])
def test_started_by_hand_on_each_node(
    way: str, cluster: Cluster, training: Training, hostfile: Path, tmp_path: Path
) -> None:
    outputs = [tmp_path / node.name for node in cluster]
    script = training.words(tmp_path / "run", 4)
    if way == "nossh":
        commands = [launch_words("--hostfile", hostfile, "--no_ssh", "--node_rank", n, *script) for n in range(2)]
    elif way == "standard":
        common = ["--hostfile", hostfile, "--launcher", "standard", "--node_rank"]
        commands = [launch_words(*common, n, *script) for n in range(2)]
    else:
        meeting = ["--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=node1:29400"]
        commands = [[sys.executable, "-m", "torch.distributed.run", *meeting, *script]] * 2
    with training.as_on_one_node(tmp_path / "run", cluster[1]):
        started = [
            node.start(words, training.environment, output) for node, words, output in zip(cluster, commands, outputs)
        ]
        assert wait_for(started, outputs) == [0, 0]


@pytest.mark.parametrize("launcher", ["pdsh", "openmpi"])
def test_accelerates_way_over_several_machines(
    launcher: str, cluster: Cluster, training: Training, hostfile: Path, tmp_path: Path
) -> None:
    """It calls a program `deepspeed`, which is not installed here, and writes variables to a file for it."""
    machines = ["--num_machines", 2, "--num_processes", 4, "--machine_rank", 0, "--mixed_precision", "no"]
    way = ["--deepspeed_multinode_launcher", launcher, "--deepspeed_hostfile", hostfile, "--main_process_port", 29631]
    script = training.words(tmp_path / "run", 4)
    words = [sys.executable, "-m", "accelerate.commands.launch", "--use_hf_zero", *machines, *way, *script]
    variables = {**training.environment, **AS_ROOT, "DS_ENV_FILE": str(tmp_path / "variables")}
    with training.as_on_one_node(tmp_path / "run", cluster[1]):
        assert run_on(cluster[0], words, variables, tmp_path / "launcher") == 0
    assert "HF_ZERO=1" in (tmp_path / "variables").read_text().splitlines()

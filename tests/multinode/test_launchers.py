"""Five steps over two nodes with every launcher: the same losses as on one node, over the network."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.multinode.cluster import Node, launch_words
from tests.multinode.training import STEPS, Training, losses_in

pytestmark = [pytest.mark.multinode, pytest.mark.timeout(600)]
Cluster = tuple[Node, Node]
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def wait_for(processes: Sequence[subprocess.Popen[bytes]], outputs: Sequence[Path], timeout_s: float = 200) -> object:
    """Exit statuses of all; their output is part of the report."""
    deadline = time.monotonic() + timeout_s
    try:
        return [process.wait(max(0.1, deadline - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.terminate()  # not kill: launchers end their ranks first
        for process in processes:
            process.wait(60)
        for output in outputs:
            print(f"--- {output.name}\n{output.read_text(errors='replace')[-6000:]}")


def check(training: Training, output: Path, sent: int) -> None:
    """The same losses as on one node; and at least one copy of the gradients was sent over the network."""
    losses = losses_in(output)
    assert len(losses) == STEPS
    assert losses == pytest.approx(training.losses, rel=1e-5)
    assert sent > STEPS * 100_000, "gradients have not gone over the network"


@pytest.mark.parametrize("launcher", ["pdsh", "openmpi", "mpich"])
def test_started_from_one_node(
    launcher: str, cluster: Cluster, training: Training, hostfile: Path, tmp_path: Path
) -> None:
    before = cluster[1].sent_bytes()
    words = launch_words("--hostfile", hostfile, "--launcher", launcher, *training.words(tmp_path / "run", 4))
    output = tmp_path / "launcher"
    started = cluster[0].start(words, {**training.environment, **AS_ROOT}, output)
    assert wait_for([started], [output]) == [0]
    check(training, tmp_path / "run", cluster[1].sent_bytes() - before)


@pytest.mark.parametrize("way", ["nossh", "standard", "torchrun"])
def test_started_by_hand_on_each_node(
    way: str, cluster: Cluster, training: Training, hostfile: Path, tmp_path: Path
) -> None:
    before = cluster[1].sent_bytes()
    outputs = [tmp_path / node.name for node in cluster]
    script = training.words(tmp_path / "run", 4)
    if way == "nossh":
        commands = [launch_words("--hostfile", hostfile, "--no_ssh", "--node_rank", n, *script) for n in range(2)]
    elif way == "standard":
        common = ["--hostfile", hostfile, "--launcher", "standard", "--node_rank"]
        commands = [launch_words(*common, n, *script) for n in range(2)]
    else:
        meeting = [
            "--nnodes=2",
            "--nproc-per-node=2",
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=node1:29400",
        ]
        commands = [[sys.executable, "-m", "torch.distributed.run", *meeting, *script]] * 2
    started = [
        node.start(words, training.environment, output) for node, words, output in zip(cluster, commands, outputs)
    ]
    assert wait_for(started, outputs) == [0, 0]
    check(training, tmp_path / "run", cluster[1].sent_bytes() - before)


@pytest.mark.parametrize("launcher", ["pdsh", "openmpi"])
def test_accelerates_way_over_several_machines(
    launcher: str, cluster: Cluster, training: Training, hostfile: Path, tmp_path: Path
) -> None:
    """It calls a program `deepspeed`, which is not installed here, and writes variables to a file for it."""
    before = cluster[1].sent_bytes()
    machines = ["--num_machines", 2, "--num_processes", 4, "--machine_rank", 0, "--mixed_precision", "no"]
    way = ["--deepspeed_multinode_launcher", launcher, "--deepspeed_hostfile", hostfile, "--main_process_port", 29631]
    script = training.words(tmp_path / "run", 4)
    words = [sys.executable, "-m", "accelerate.commands.launch", "--use_hf_zero", *machines, *way, *script]
    variables = {**training.environment, **AS_ROOT, "DS_ENV_FILE": str(tmp_path / "variables")}
    output = tmp_path / "launcher"
    assert wait_for([cluster[0].start(words, variables, output)], [output]) == [0]
    assert "HF_ZERO=1" in (tmp_path / "variables").read_text().splitlines()
    check(training, tmp_path / "run", cluster[1].sent_bytes() - before)

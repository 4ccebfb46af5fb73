"""A node is lost in the middle of training: the other one resumes from the last checkpoint, with the same losses."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.multinode.cluster import ROOT, Cluster, Node, wait_for
from tests.multinode.training import Training, losses_in

pytestmark = [pytest.mark.multinode, pytest.mark.timeout(900)]
STEPS, SAVED_EVERY, GLOBAL_BATCH = 60, 5, 8
# A dead node is detected after three seconds, and new ones are awaited for ten.
PATIENCE = "--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=10,join_timeout=120"


def start(node: Node, training: Training, folder: Path, port: int) -> subprocess.Popen[bytes]:
    meeting = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--monitor-interval=0.1", PATIENCE]
    meeting += ["--rdzv-backend=c10d", f"--rdzv-endpoint=node1:{port}", "--rdzv-id=elastic"]
    _, *arguments = training.words(folder / "run", 2, steps=STEPS)
    arguments += ["--global_batch_size", GLOBAL_BATCH, "--save_strategy", "steps", "--save_steps", SAVED_EVERY]
    words = [sys.executable, "-m", "torch.distributed.run", *meeting, ROOT / "examples/clusters/elastic.py", *arguments]
    return node.start(words, training.environment, folder / node.name)


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """Like a power failure: kills launcher and ranks at once."""
    for member in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
        member.send_signal(signal.SIGKILL)


def test_a_lost_node(cluster: Cluster, training: Training, tmp_path: Path) -> None:
    for name in ("calm", "hurt"):
        (tmp_path / name).mkdir()
    calm = [start(node, training, tmp_path / "calm", 29411) for node in cluster]
    assert wait_for(calm, [tmp_path / "calm" / node.name for node in cluster]) == [0, 0]

    staying, going = [start(node, training, tmp_path / "hurt", 29412) for node in cluster]
    while not (tmp_path / f"hurt/run/checkpoint-{2 * SAVED_EVERY}").exists() and staying.poll() is None:
        time.sleep(0.05)
    kill_all(going)
    assert wait_for([staying], [tmp_path / "hurt" / node.name for node in cluster], timeout_s=400) == [0]

    said = (tmp_path / "hurt/node1").read_text()
    assert "training on 1 process(es)" in said.partition("training on 2 process(es)")[2], "the node was lost too late"
    assert "resuming from " + str(tmp_path / "hurt/run/checkpoint-") in said
    losses = losses_in(tmp_path / "hurt/run")
    assert len(losses) == STEPS
    # Micro-batches are summed in another order, and 50 steps of Adam amplify the difference.
    assert losses == pytest.approx(losses_in(tmp_path / "calm/run"), rel=1e-4)

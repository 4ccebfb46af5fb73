"""A job under torchrun loses a host, continues without it, and trains as it would have with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.elastic import elastic_script
from tests.support.launch import LAUNCHER_VARIABLES, MARK, ROOT, a_port, launch

SCRIPT = Path(elastic_script.__file__)
UPDATES, LOST_AT = 8, 3


def two_hosts(folder: Path) -> list[subprocess.Popen[bytes]]:
    """Two of torchrun's agents on this machine, with one rank each; the job may continue with one."""
    port, mark = a_port(), uuid.uuid4().hex
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    environment |= {"OMP_NUM_THREADS": "1", MARK: mark, "PYTHONPATH": str(ROOT), "LOGLEVEL": "INFO"}
    quick = "join_timeout=60,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", f"--rdzv-conf={quick}"]
    hosts = []
    for number in range(2):
        with (folder / f"host{number}.txt").open("wb") as output:
            is_host = f"--rdzv-conf={quick},is_host={int(number == 0)}"
            words = [*command[:-1], is_host, str(SCRIPT), str(folder), str(UPDATES), str(LOST_AT)]
            hosts.append(subprocess.Popen(words, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT))
    return hosts


def lines_of(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "losses.jsonl").read_text().splitlines()]


def plain_losses(batches: list[list[int]]) -> list[float]:
    """The same batches in one process with PyTorch alone."""
    model, rows = elastic_script.make_model(), elastic_script.Rows()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    losses = []
    for batch in batches:
        chosen = [rows[index] for index in batch]
        x, y = (torch.stack([row[key] for row in chosen]) for key in ("x", "y"))
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_a_job_that_loses_a_host_keeps_its_batch_its_samples_and_its_losses(tmp_path: Path) -> None:
    """The page on elasticity promised this, but no test had killed a rank under torchrun."""
    folder, alone = tmp_path / "elastic", tmp_path / "alone"
    for each in (folder, alone):
        each.mkdir()
        elastic_script.analyze(each)
    hosts = two_hosts(folder)
    try:
        hosts[0].wait(timeout=150)
    finally:
        for host in hosts:
            host.kill()
            host.wait()
    output = (folder / "host0.txt").read_text()
    assert hosts[0].returncode == 0, output[-6000:]
    launch(SCRIPT, [alone, UPDATES], processes=1).check()

    lines, uninterrupted = lines_of(folder), lines_of(alone)
    assert [line["update"] for line in lines] == list(range(1, UPDATES + 1))
    assert [line["ranks"] for line in lines] == [2] * LOST_AT + [1] * (UPDATES - LOST_AT)
    batches = [sorted(sum(line["samples"], [])) for line in lines]
    assert batches == [sorted(sum(line["samples"], [])) for line in uninterrupted]
    assert all(len(batch) == 8 for batch in batches)
    torch.testing.assert_close([line["loss"] for line in lines], plain_losses(batches), rtol=1e-5, atol=1e-6)

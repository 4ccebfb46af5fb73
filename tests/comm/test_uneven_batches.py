"""Ranks with different numbers of batches: the error says so, with the counts of all ranks."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from torch import nn

from hf_zero import initialize
from hf_zero.comm import barrier, init_distributed
from hf_zero.comm.groups import set_timeout
from hf_zero.comm.progress import describe, explain
from tests.support.ranks import run_each

SECONDS = 2.0


def _run(rank: int, stage: int, where: str) -> str:
    """Rank 1 skips a batch, and then waits in a save, or in a barrier of the program. Returns this rank's error."""
    init_distributed()
    set_timeout(timedelta(seconds=SECONDS))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }
    engine = initialize(model=nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)), config=config)[0]
    try:
        for number in range(3):
            if rank == 1 and number == 1:
                continue
            engine.backward(engine(torch.ones(1, 8)).sum())
            engine.step()
        engine.save_checkpoint("unused") if where == "save" else barrier()
    except RuntimeError as error:
        explain(error)  # what the hook of uncaught errors does
        return str(error)
    return ""


@pytest.mark.parametrize(("stage", "where"), [(2, "save"), (3, "barrier")])
def test_the_counts_of_all_ranks_are_in_the_error_of_every_rank(stage: int, where: str) -> None:
    """One rank skipped a batch whose labels were all masked: after half an hour of waiting the job failed.

    One rank said that the other had not responded, the other showed gloo's "Timed out waiting 1800000ms for send
    operation". Nothing pointed to the batch.
    """
    ((waits, skipped),) = run_each(_run, 2, [(stage, where)])
    for text in (waits, skipped):
        assert "Micro-batches begun: 3 on rank 0, 2 on rank 1." in text, (waits, skipped)
    assert "Probably rank 1 has fewer batches than the others, or a batch was skipped" in waits
    assert "Probably this rank has fewer batches than the others" in skipped


def test_many_ranks_are_summed_up() -> None:
    text = describe({rank: 7 - (rank in (3, 5)) for rank in range(16)}, own=0)
    assert "begun: 7 on 14 ranks, 6 on rank 3, 6 on rank 5. Probably these ranks have fewer" in text
    text = describe({rank: 7 - (rank > 0) for rank in range(16)}, own=4)
    assert "7 on rank 0, 6 on rank 1," in text and "fewer on 7 others. Probably this rank has fewer" in text

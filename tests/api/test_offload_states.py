"""offload_states and reload_states restore the same values, in the same tensor objects and views."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_zero.api.offload_states import OffloadStates, OffloadStateTypeEnum
from tests.offload.offload_runs import Run, engine_for, train, train_run, weights_of
from tests.support.ranks import run_ranks


def relieved(rank: int, run: Run) -> tuple[list[float], dict[str, torch.Tensor], int, int]:
    """Like `train_run`, with states offloaded in between, treating the CPU as the device to free memory on."""
    engine = engine_for(run, 2)
    numbers = train(engine, run, rank, 2, steps=2)
    parts = engine.gradients.assembly
    engine.gradients.offloaded = OffloadStates(parts.optimizer, parts.reducer, home="somewhere else")
    states = [value for state in engine.optimizer.state.values() for value in state.values() if value.dim()]
    expected = sum(value.untyped_storage().nbytes() for value in states)
    expected += sum(shard.master.untyped_storage().nbytes() for shard in engine.optimizer.sub_groups if run.bf16)
    engine.offload_states()
    empty = sum(value.untyped_storage().nbytes() for value in states)
    engine.offload_states()  # offloading twice has no effect
    numbers += train(engine, run, rank, 2, first=2, steps=2)
    assert all(value.untyped_storage().nbytes() for value in states)
    sent = engine.gradients.offloaded.send()
    engine.reload_states()
    return numbers, weights_of(engine), empty, sent - expected


@pytest.mark.parametrize("run", [Run(2), Run(3), Run(0, bf16=False)], ids=str)
def test_training_goes_on_as_if_nothing_had_happened(run: Run) -> None:
    expected = run_ranks(train_run, 2, 2, run)
    for (numbers, weights, empty, difference), wanted in zip(run_ranks(relieved, 2, run), expected, strict=True):
        assert numbers == wanted[0] and empty == 0 and difference == 0
        assert all(torch.equal(weights[name], value) for name, value in wanted[1].items())


def refusals(rank: int) -> list[Any]:
    engine = engine_for(Run(1), 1)
    found = []
    for options in ({"include": [OffloadStateTypeEnum.lp_params]}, {"device": "nvme"}):
        with pytest.raises(ValueError) as caught:
            engine.offload_states(**options)
        found.append(str(caught.value))
    engine.reload_states()
    return found


def test_what_cannot_be_sent_is_refused_by_name() -> None:
    [[weights, place]] = run_ranks(refusals, 1)
    assert "offload_param" in weights and "only host memory" in place

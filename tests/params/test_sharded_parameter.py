"""Partitioning and gathering parameters: rank 0's values win, for any piece size, alone or together."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hf_zero.api.gathered_parameters import GatheredParameters
from hf_zero.comm import ledger, parallel_groups
from hf_zero.params import partitioning
from hf_zero.params.partitioning import shard_parameter
from hf_zero.params.stand_ins import ReleasedParameter
from hf_zero.params.store import of
from tests.support.ranks import run_ranks

SHAPES = [(3,), (7, 5), (4, 3), (1,), (10,), (11, 2)]


def run_round_trip(rank: int, together: int) -> SimpleNamespace:
    partitioning.TOGETHER_NUMEL = together
    groups = parallel_groups(torch.device("cpu"))
    drawn = [torch.randn(shape, generator=torch.Generator().manual_seed(rank)) for shape in SHAPES]
    parameters = [nn.Parameter(value.clone()) for value in drawn]
    for parameter in parameters:
        shard_parameter(parameter, groups)
    assert all(isinstance(parameter, ReleasedParameter) for parameter in parameters)
    with ledger.phase("reading"), GatheredParameters(parameters):
        gathered = [parameter.detach().clone() for parameter in parameters]
    with GatheredParameters(parameters, modifier_rank=1):
        if rank == 1:
            for parameter in parameters:
                parameter.data.mul_(2)
    with GatheredParameters(parameters):
        edited = [parameter.detach().clone() for parameter in parameters]
    handles = [of(parameter) for parameter in parameters]
    padding = [h.shard[max(0, h.numel - rank * len(h.shard)) :] for h in handles if h is not None]
    assert not any(tail.any() for tail in padding), "padding is no longer zero"
    gathers = ledger.tally("reading", "all_gather").calls
    return SimpleNamespace(drawn=drawn, gathered=gathered, edited=edited, gathers=gathers)


@pytest.mark.parametrize(("together", "gathers"), [(1 << 20, 1), (16, 5), (1, 6)])
@pytest.mark.parametrize("world", [2, 3])
def test_values_survive_in_pieces_of_any_size(world: int, together: int, gathers: int) -> None:
    runs = run_ranks(run_round_trip, world, together)
    for run in runs:
        assert run.gathers == gathers
        for begun, gathered, edited in zip(runs[0].drawn, run.gathered, run.edited, strict=True):
            assert torch.equal(gathered, begun) and torch.equal(edited, 2 * begun)

"""Parameters that are gathered where they are used, and gradients that are reduced where autograd has left them.

Every gathered byte was received in a buffer and copied from there, and every gradient was copied into another one: 12
of the 16.75 bytes per parameter that a step moved beside the model's own, and for a layer of an 8B model a buffer of
436 MB.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from hf_zero.comm import ledger
from hf_zero.comm.torch_backend import GatherStreamCollectives, NativeCollectives
from hf_zero.layout import buckets
from hf_zero.layout.buckets import MIN_DIRECT_BYTES, direct_chunks
from tests.support.ranks import run_ranks
from tests.support.simulation import META, live_bytes, simulated_world
from tests.support.step_passes import BF16, LAYERS, RANK, WIDTH, WORLD, Net
from tests.support.traffic import calls_and_bytes

SIZES = (64, 8, 1024)


def test_only_contiguous_and_large_chunks_move_directly() -> None:
    large = 8 * MIN_DIRECT_BYTES // 2
    assert direct_chunks([large, 2 * large], 8, 2) == (large // 8, large // 4)
    assert direct_chunks([large, 0], 8, 2) == (large // 8,), "an empty parameter has no chunk"
    assert direct_chunks([large - 64], 8, 2) == (), "too small"
    assert direct_chunks([3 * large, 64], 8, 2) == (3 * large // 8, 8), "large on average"
    assert direct_chunks([3 * large, 66], 8, 2) == (), "not divisible"
    assert direct_chunks([3 * large, 32], 8, 2) == (), "a gap follows in each row"
    assert direct_chunks([3 * large, 64], 8, 1) == (), "not of 16 bytes"


def run_grouped(rank: int, world: int, dtype: torch.dtype) -> None:
    """Over gloo, as NCCL is called."""
    gathers, sums = GatherStreamCollectives(), NativeCollectives()
    row = torch.randn(sum(SIZES), generator=torch.Generator().manual_seed(rank)).to(dtype)
    wholes = [torch.empty(world * size, dtype=dtype) for size in SIZES]
    rows = gathers._gather_pieces(row.split(SIZES), wholes)
    rows.wait()
    assert rows.is_direct and rows.flat is None and rows.buffer is None
    flat = torch.empty(world * row.numel(), dtype=dtype)
    gathers._gather_into(flat, row)
    columns = flat.view(world, -1).split(SIZES, dim=1)
    assert all(torch.equal(whole.view(world, -1), column) for whole, column in zip(wholes, columns, strict=True))

    shard = torch.empty(sum(SIZES), dtype=dtype)
    ledger.reset()
    sums.reduce_scatter_pieces(shard, SIZES, wholes).wait()
    assert torch.equal(shard, world * flat.view(world, -1)[rank]), "all ranks have sent the same"
    tally = ledger.tally(ledger.current_phase, "reduce_scatter")
    assert (tally.calls, tally.num_bytes) == (1, world * sum(SIZES) * dtype.itemsize)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_collectives_move_what_single_ones_move(dtype: torch.dtype) -> None:
    run_ranks(run_grouped, 2, 2, dtype)


def trained(smallest: int) -> tuple[dict[str, tuple[int, int]], int, int, set[bool]]:
    """The traffic of a step, live bytes in the last layer's forward and between steps, and which units are direct."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0},
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
    }
    before, inside = live_bytes(), []
    with (
        mock.patch.object(buckets, "MIN_DIRECT_BYTES", smallest),
        simulated_world(RANK, WORLD, negotiates=True) as world,
    ):
        with META:
            net, x = Net(), torch.zeros(1, WIDTH, dtype=BF16)
        engine: Any = world.engine(net, config)

        def note(_module: nn.Module, _args: Sequence[Tensor], _output: Tensor) -> None:
            inside.append(live_bytes() - before)

        engine.module.layers[-1][-1].register_forward_hook(note)
        for _ in range(3):
            ledger.reset()
            engine.backward(engine(x))
            engine.step()
        traffic = calls_and_bytes()
        are_direct = {unit.is_direct for unit in engine.module_view.store.units}
        between = live_bytes() - before
        engine.destroy()
    return traffic, inside[-1], between, are_direct


def test_a_direct_step_moves_the_same_bytes_and_needs_no_buffers() -> None:
    """In the last layer's forward nothing else is in flight: a receive buffer and two send buffers less. Between steps
    the next forward's first layer is, which takes a receive buffer or the memory where it will be used."""
    layer = 2 * WIDTH * WIDTH * BF16.itemsize
    direct, copied = trained(MIN_DIRECT_BYTES), trained(1 << 60)
    assert direct[3] == {True} and copied[3] == {False}
    assert direct[0] == copied[0]
    assert direct[0]["forward all_gather"] == (LAYERS, LAYERS * layer)
    assert direct[0]["backward reduce_scatter"] == (LAYERS, LAYERS * layer)
    assert copied[1] - direct[1] == pytest.approx(3 * layer, rel=0.01)
    assert copied[2] - direct[2] == pytest.approx(2 * layer, rel=0.01)

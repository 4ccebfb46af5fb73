"""`deepspeed.zero.TiledLinear` compared with the linear layer whose weights it has copied."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_zero import initialize
from hf_zero.integration.compat.tiling import TiledLinear, TiledLinearReturnBias, split_tensor_along_last_dim


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("in_splits", "out_splits"), [(1, 1), (3, 1), (1, 4), (3, 2), (7, 5)])
def test_it_is_the_layer_that_it_copied(in_splits: int, out_splits: int, bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(7, 5, bias=bias)
    tiled = TiledLinear(7, 5, bias, in_splits, out_splits, init_linear=plain)
    x = torch.randn(2, 3, 7)
    torch.testing.assert_close(tiled(x), plain(x))
    assert sum(p.numel() for p in tiled.parameters()) == sum(p.numel() for p in plain.parameters())
    tiled.input_is_already_split, tiled.combine_out_splits = True, False
    widths = [end - begin for begin, end in zip(tiled.in_parts, tiled.in_parts[1:])]
    given = x if in_splits == 1 else split_tensor_along_last_dim(x, widths)
    parts = tiled(given)
    assert len(parts) == out_splits
    torch.testing.assert_close(torch.cat(parts, -1), plain(x))


def test_layers_that_return_their_bias() -> None:
    class Returns(nn.Linear):
        def forward(self, input: Tensor) -> Any:
            return nn.functional.linear(input, self.weight), self.bias

    plain, x = nn.Linear(6, 4), torch.randn(3, 6)
    output, bias = TiledLinearReturnBias(6, 4, True, 2, 2, linear_cls=Returns, init_linear=plain)(x)
    torch.testing.assert_close(output + bias, plain(x))
    torch.testing.assert_close(bias, plain.bias)
    assert TiledLinearReturnBias(6, 4, False, 2, 2, linear_cls=Returns)(x)[1] is None


def test_wrong_sizes() -> None:
    with pytest.raises(RuntimeError, match=r"in_splits is 9: it must be from 1 to in_features \(7\)"):
        TiledLinear(7, 5, in_splits=9)
    with pytest.raises(ValueError, match=r"the weight to copy is \(5, 6\), and must be \(5, 7\)"):
        TiledLinear(7, 5, init_linear=nn.Linear(6, 5))
    with pytest.raises(ValueError, match="has no bias"):
        TiledLinear(7, 5, init_linear=nn.Linear(7, 5, bias=False))


def test_stage_3_gathers_it_tile_by_tile() -> None:
    module = nn.Sequential(TiledLinear(8, 8, in_splits=2, out_splits=2), nn.Tanh())
    plain = nn.Linear(8, 8)
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_param": {"device": "cpu"}}
    engine, _, _, _ = initialize(model=module, config={**config, "zero_optimization": zero})
    module[0].copy_params_from(plain)
    x = torch.randn(3, 8)
    loss = engine(x).square().sum()
    torch.testing.assert_close(loss, plain(x).tanh().square().sum())
    engine.backward(loss)
    engine.step()
    engine.destroy()
    assert importlib.import_module("deepspeed.zero").TiledLinear is TiledLinear

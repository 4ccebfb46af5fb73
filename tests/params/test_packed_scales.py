"""Scales of weights in 4 bit are sharded, gathered and released with the weights at stage 3.

They were whole on every rank: an eighth of the codes, which on 8 ranks is as much as a rank's share of the codes.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hf_zero
from bench.states import state_bytes
from hf_zero import initialize
from hf_zero.api.gathered_parameters import GatheredParameters, load_whole
from hf_zero.comm import ledger
from hf_zero.params.store import of
from tests.support.memory import live_bytes, most_allocated, profiled_memory, shared_blocks
from tests.support.packed import PackedLinear, quantise
from tests.support.ranks import run_ranks

WORLD, DEPTH, WIDTH, STEPS = 2, 3, 64, 3
WIDE = 256


class Block(nn.Module):
    """A frozen layer in 4 bit, and a trained gain."""

    def __init__(self, width: int, double_quant: bool) -> None:
        super().__init__()
        self.base = PackedLinear(width, width, bias=False)
        self.base.weight = quantise(torch.randn(width, width) / width**0.5, double_quant=double_quant)
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.base(x * self.gain).tanh()


class Stack(nn.Module):
    def __init__(self, depth: int, width: int, *, double_quant: bool = False, recomputes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(width, double_quant) for _ in range(depth))
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)  # type: ignore[assignment]
        return x.square().mean()


def config(**zero: Any) -> dict[str, Any]:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, **zero}
    zero["stage3_gather_16bit_weights_on_model_save"] = True
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    return {"train_micro_batch_size_per_gpu": 2, "optimizer": optimizer, "zero_optimization": zero}


def batches() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(2 * WORLD, WIDTH, generator=generator) for _ in range(STEPS))


def tensors_of(state: Any) -> list[Tensor]:
    return [state.absmax] if state.state2 is None else [state.absmax, state.offset, state.state2.absmax]


def in_bytes(tensor: Tensor) -> list[int]:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).tolist()  # type: ignore[no-any-return]


# --- values ------------------------------------------------------------------------------------------------------


def alone(double_quant: bool) -> tuple[Stack, list[float]]:
    """Trained by one process without an engine."""
    model = Stack(DEPTH, WIDTH, double_quant=double_quant)
    optimizer = torch.optim.AdamW([layer.gain for layer in model.layers], lr=1e-2)  # type: ignore[union-attr]
    losses = []
    for x in batches():
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def run_train(rank: int, folder: str, double_quant: bool, recomputes: bool, zero: dict[str, Any]) -> Any:
    model = Stack(DEPTH, WIDTH, double_quant=double_quant, recomputes=recomputes)
    engine, *_ = initialize(model=model, config=config(**zero))
    losses, evaluated = [], []
    for x in batches():
        own = x.chunk(WORLD)[rank]
        engine.eval()
        with torch.no_grad():
            evaluated += [engine(own).item(), engine(own).item()]
        engine.train()
        loss = engine(own)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.save_16bit_model(folder, "whole.bin")
    engine.save_checkpoint(folder, tag="last")
    state = engine.module_state_dict()
    with hf_zero.gathered(engine.module) as whole:
        copied = pickle.loads(pickle.dumps(copy.deepcopy(whole)))
    with torch.no_grad():
        for layer in engine.module.layers:
            layer.gain.mul_(0) if of(layer.gain) is None else of(layer.gain).write(torch.zeros(WIDTH))
    load_whole(engine.module, state)
    again, *_ = initialize(model=Stack(DEPTH, WIDTH, double_quant=double_quant), config=config(**zero))
    again.load_checkpoint(folder, tag="last")
    with torch.no_grad():
        ends = [each.eval()(own).item() for each in (engine, again, copied)]
    weight = engine.module.layers[1].base.weight
    with GatheredParameters([weight]):
        read = [in_bytes(each) for each in tensors_of(weight.quant_state)]
    return losses, evaluated, ends, state, read


def means(values: list[list[float]]) -> list[float]:
    return torch.tensor(values).mean(dim=0).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("double_quant", "recomputes", "zero"),
    [
        (False, True, {}),
        (True, False, {}),
        pytest.param(False, False, {"offload_param": {"device": "nvme"}}, marks=pytest.mark.slow),
        pytest.param(
            True, True, {"stage3_max_live_parameters": 0, "stage3_prefetch_bucket_size": 0}, marks=pytest.mark.slow
        ),
    ],
)
def test_training_saving_and_copying_are_those_of_one_process(
    double_quant: bool, recomputes: bool, zero: dict[str, Any], tmp_path: Path
) -> None:
    """Backward reads the scales again, by the object beside the weight."""
    if zero.get("offload_param"):
        zero = {"offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}}
    expected, losses = alone(double_quant)
    last = [*batches()][-1]
    ranks = run_ranks(run_train, WORLD, str(tmp_path), double_quant, recomputes, zero)
    assert means([found[0] for found in ranks]) == pytest.approx(losses, rel=1e-5)
    assert means([found[1][::2] for found in ranks]) == pytest.approx(losses, rel=1e-5)
    end = [expected(x).item() for x in last.chunk(WORLD)]
    for rank, (_, evaluated, ends, state, read) in enumerate(ranks):
        assert evaluated[::2] == evaluated[1::2] and ends == pytest.approx([end[rank]] * 3, rel=1e-5)
        assert read == [in_bytes(each) for each in tensors_of(expected.layers[1].base.weight.quant_state)]  # type: ignore[union-attr]
        whole = torch.load(tmp_path / "whole.bin")
        assert state.keys() == whole.keys() == expected.state_dict().keys()
        for name, value in expected.state_dict().items():
            if "gain" not in name:
                assert in_bytes(state[name]) == in_bytes(whole[name]) == in_bytes(value), name


# --- reads between uses ------------------------------------------------------------------------------------------


def run_reads(rank: int) -> None:
    engine, *_ = initialize(model=Stack(DEPTH, WIDTH), config=config())
    weight = engine.module.layers[1].base.weight
    state = weight.quant_state
    for read in (state.values().sum, lambda: state.values() * 2, lambda: torch.empty(64).copy_(state.values())):
        with pytest.raises(
            RuntimeError, match=r"'layers\.1\.base\.weight\.absmax' cannot be read .*GatheredParameters"
        ):
            read()
    assert state.absmax.shape == (WIDTH * WIDTH // 64,) and state.absmax.dtype == torch.float32
    with GatheredParameters([state.absmax]):
        alone = state.absmax.clone()
    with GatheredParameters(weight, modifier_rank=0):
        assert torch.equal(state.absmax, alone)
        if rank == 0:
            state.absmax.data.mul_(2)
    assert torch.equal(engine.module_state_dict()["layers.1.base.weight.absmax"], 2 * alone)


def test_scales_between_uses_are_refused_with_the_fix() -> None:
    """Code that dequantizes a weight by itself must not compute with scales that are not there."""
    run_ranks(run_reads, WORLD)


# --- memory and messages -----------------------------------------------------------------------------------------


def run_memory(rank: int, depth: int, double_quant: bool, dtype: str) -> dict[str, int]:
    before = live_bytes()
    model = Stack(depth, WIDE, double_quant=double_quant)
    base = [layer.base.weight for layer in model.layers]
    codes, scales = sum(each.nbytes for each in base), sum(each.quant_state.absmax.nbytes for each in base)
    del base
    one_at_a_time = config(stage3_max_live_parameters=0, stage3_prefetch_bucket_size=0)
    engine, *_ = initialize(model=model, config={**one_at_a_time, "bf16": {"enabled": dtype == "bf16"}})
    del model
    x = torch.randn(1, WIDE).to(engine.module.layers[0].gain.dtype)
    for _ in range(2):
        ledger.reset()
        with profiled_memory() as profiled:
            engine.backward(engine(x))
            engine.step()
    gathers = [ledger.tally(phase, "all_gather") for phase in ("forward", "backward")]
    engine.empty_partition_cache()
    return {
        "codes": codes,
        "scales": scales,
        "states": sum(state_bytes(engine).values()),
        "kept": live_bytes(excluded=shared_blocks()) - before,
        "in a step": most_allocated(profiled),
        "gathers": sum(each.calls for each in gathers),
    }


@pytest.mark.parametrize(
    ("double_quant", "dtype", "per_unit"),
    [
        (False, "bf16", 3),
        (True, "bf16", 2),
        pytest.param(False, "fp32", 2, marks=pytest.mark.slow),
        pytest.param(True, "fp32", 2, marks=pytest.mark.slow),
    ],
)
def test_a_rank_keeps_its_share_of_codes_and_scales(double_quant: bool, dtype: str, per_unit: int) -> None:
    """A unit is gathered in one message per dtype: scales in fp32 join gains in fp32, scales in 8 bit the codes. What
    is whole at a time does not depend on the number of units."""
    shallow, deep = 4, 24
    fewer, found = (run_ranks(run_memory, WORLD, depth, double_quant, dtype)[1] for depth in (shallow, deep))
    trained = 16 * deep * WIDE  # with gradients
    assert found["states"] == (found["codes"] + found["scales"] + trained) // WORLD
    assert found["kept"] - found["states"] < found["scales"] / WORLD / 4
    assert found["gathers"] == 2 * deep * per_unit, "in forward and in backward"
    unit = (found["codes"] + found["scales"]) / deep
    assert found["in a step"] - fewer["in a step"] < (deep - shallow) * unit / 4, "activations of the other units"

"""Frozen weights that pack several codes per element, like bitsandbytes' Params4bit, must keep their exact bits.

At stage 3 those stored as integers, bitsandbytes' default, stayed whole on every rank. Those stored in a floating-point
dtype were cast to the model's dtype at every stage if it differed, which corrupts the codes.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_zero import initialize
from hf_zero.api.gathered_parameters import GatheredParameters
from hf_zero.api.zero_init import Init
from hf_zero.params.store import of
from tests.support.packed import EightBitLinear, Params4bit, eight_bit, packed
from tests.support.ranks import run_ranks

WIDTH, STEPS = 16, 3
ROUNDED: list[dict[str, Any]] = [
    {"offload_param": {"device": "cpu"}},
    {"zero_quantized_weights": True},
    {"zero_quantized_nontrainable_weights": True},
]
STORAGES = [torch.uint8, torch.bfloat16, torch.float32]


class Packed(nn.Module):
    """x @ W / scale, with two codes of -8 to 7 per byte."""

    def __init__(self, storage: torch.dtype, scale: float) -> None:
        super().__init__()
        codes = torch.randint(0, 256, (WIDTH * WIDTH // 2,), dtype=torch.uint8)
        self.weight = packed(codes.view(storage).view(-1, 1), torch.full((1,), scale))
        self.adapter = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        codes = self.weight.data.reshape(-1).view(torch.uint8)
        weight = (torch.cat([codes & 15, codes >> 4]).view(WIDTH, WIDTH).to(x.dtype) - 8) / 64
        return x + x @ weight / self.weight.quant_state.absmax.to(x.dtype) + self.adapter(x)


def build(storage: torch.dtype, scale: float = 2.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Packed(storage, scale) for _ in range(2)))


def config_of(stage: int, **extra: Any) -> dict[str, Any]:
    """`extra`: keys of stage 3."""
    zero = {"stage": stage, **({"stage3_param_persistence_threshold": 0, **extra} if stage == 3 else {})}
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero}
    return {**config, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}


def losses_of(engine: Any, *, inputs_have_gradients: bool = False) -> list[float]:
    """Trains a few steps."""
    losses = []
    for step in range(STEPS):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).bfloat16()
        loss = engine(x.requires_grad_(inputs_have_gradients)).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def train(rank: int, stage: int, storage: torch.dtype, extra: dict[str, Any]) -> list[float]:
    model = build(storage, scale=2.0 + rank)  # rank 0's scales win, like its codes
    codes = [layer.weight.detach().clone() for layer in model]
    engine, *_ = initialize(model=model, config=config_of(stage, **extra))
    losses = losses_of(engine)
    if stage == 3:
        weight = model[1].weight
        handle = of(weight)
        assert handle is not None and handle.shard.numel() == codes[1].numel() // 2 and weight.dtype == storage
        assert type(weight).__name__ == "Params4bit" and isinstance(weight, Params4bit)  # peft checks the class name
        engine.empty_partition_cache()
        with pytest.raises(RuntimeError, match="holds it in shards"):
            weight.sum()
    saved = engine.module_state_dict()
    for index, before in enumerate(codes):
        assert torch.equal(saved[f"{index}.weight"].view(torch.uint8), before.view(torch.uint8))
    assert stage < 3 or saved["1.weight.absmax"].item() == 2.0
    return losses


def train_all(rank: int) -> None:
    expected = train(rank, 2, torch.uint8, {})
    for storage in STORAGES:
        assert train(rank, 3, storage, {}) == train(rank, 2, storage, {}) == expected
    for extra in ROUNDED:  # `train` checks the bits; trained values may be rounded in communication
        assert train(rank, 3, torch.bfloat16, extra)[0] == pytest.approx(expected[0], rel=0.02)


def test_packed_weights_keep_their_bits_at_every_stage() -> None:
    run_ranks(train_all, 2)


def copy_and_build(rank: int) -> None:
    """In `zero.Init` too: it left weights stored as integers whole, and cast those stored as other floats."""
    for storage in STORAGES:
        expected = build(storage)
        model = build(storage)
        Init(module=model, config_dict_or_path=config_of(3))
        weight = model[1].weight
        assert of(weight) is not None and weight.dtype == storage and model[1].adapter.weight.dtype == torch.bfloat16
        with GatheredParameters([weight]):
            copied = copy.deepcopy(weight)
        assert type(copied) is Params4bit and torch.equal(
            copied.quant_state.absmax, expected[1].weight.quant_state.absmax
        )
        assert torch.equal(copied.detach().view(torch.uint8), expected[1].weight.detach().view(torch.uint8))


def test_copies_of_packed_weights_have_their_class_and_scales() -> None:
    """PEFT copies a gathered layer to initialise DoRA: the weight's copy was a plain parameter, without scales, which
    PEFT took for one that is not quantized."""
    run_ranks(copy_and_build, 2)


class EightBit(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.base = EightBitLinear(WIDTH, WIDTH, bias=False)
        self.base.weight = eight_bit(torch.randn(WIDTH, WIDTH) * scale)
        self.adapter = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.base(x) / 8 + self.adapter(x)


def train_eight_bit(rank: int) -> None:
    runs: list[list[float]] = []
    for stage, is_built_in_shards in ((0, False), (2, False), (3, False), (3, True)):
        torch.manual_seed(0)
        model = nn.Sequential(*(EightBit(1.0 + rank) for _ in range(3)))  # rank 0's codes and scales win
        codes, scales = ([getattr(layer.base.weight, name).clone() for layer in model] for name in ("CB", "SCB"))
        if stage == 3 and not is_built_in_shards:  # a program may have used the model: the layer takes over the codes
            model[0].base(torch.ones(1, WIDTH))
        if is_built_in_shards:
            Init(module=model, config_dict_or_path=config_of(stage))
        engine, *_ = initialize(model=model, config=config_of(stage))
        losses = losses_of(engine, inputs_have_gradients=True)
        saved = engine.module_state_dict()
        for index in range(3):
            assert saved[f"{index}.base.weight"].dtype == torch.int8
            if rank == 0:
                assert torch.equal(saved[f"{index}.base.weight"], codes[index])
                assert torch.equal(saved[f"{index}.base.SCB"], scales[index])
            assert f"{index}.base.weight_format" in saved
        if stage == 3:
            engine.empty_partition_cache()
            weight = model[1].base.weight
            assert of(weight).shard.numel() == codes[1].numel() // 2 and type(weight).__name__ == "Int8Params"
            with pytest.raises(RuntimeError, match="holds it in shards"):
                model[1].base.state.CB.sum()
            with GatheredParameters([weight]):
                assert model[1].base.state.CB.data_ptr() == weight.data_ptr()
                copied = copy.deepcopy(model[1].base)
            assert copied.state.layer is copied and torch.equal(copied.state.CB, saved["1.base.weight"])
        runs.append(losses)
    assert runs[1:3] == runs[:1] * 2, runs
    assert runs[3] == pytest.approx(runs[0], rel=0.01), "masters of adapters that were built in shards start rounded"


def test_weights_in_8_bit_are_in_shards_at_stage_3() -> None:
    """bitsandbytes' Linear8bitLt computes with a second reference to its codes, in an object beside the weight. It kept
    the codes in memory, so stage 3 left such weights whole on every rank."""
    run_ranks(train_eight_bit, 2)


class Scaled(nn.Module):
    """A frozen layer in fp8, which like transformers' FP8Linear takes a wider weight for one without scales."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).to(torch.float8_e4m3fn), requires_grad=False)
        self.weight_scale_inv = nn.Parameter(torch.tensor([[1 / 3]]), requires_grad=False)
        self.adapter = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight_scale_inv if self.weight.element_size() == 1 else 1.0
        return x + nn.functional.linear(x, (self.weight.to(torch.float32) * scale).to(x.dtype)) + self.adapter(x)


def train_scaled(rank: int) -> None:
    runs = []
    for stage in (0, 1, 2, 3):
        torch.manual_seed(0)
        model = nn.Sequential(Scaled(), Scaled())
        codes = [layer.weight.detach().clone() for layer in model]
        engine, *_ = initialize(model=model, config=config_of(stage))
        losses = losses_of(engine)
        saved = engine.module_state_dict()
        for index, before in enumerate(codes):
            assert torch.equal(saved[f"{index}.weight"].view(torch.uint8), before.view(torch.uint8))
            assert saved[f"{index}.weight_scale_inv"].dtype == torch.float32
        if stage == 3:
            assert of(model[1].weight).shard.numel() == codes[1].numel() // 2
        runs.append(losses)
    assert runs[1:] == runs[:1] * 3, runs
    torch.manual_seed(0)
    plain = nn.Sequential(Scaled(), Scaled())
    for layer in plain:
        layer.adapter.bfloat16()
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert runs[0][0] == plain(x).float().square().mean().item()


def test_weights_in_fp8_keep_their_dtype_and_scales() -> None:
    """A base in fp8 was cast to bf16 by the engine, as other frozen weights. transformers' layer then takes it for one
    without scales: it computed with wrong weights, without an error, at every stage."""
    run_ranks(train_scaled, 2)

"""ZeRO++ at stage 3: traffic matches the formulas, losses stay close, all ranks agree, shards stay exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from hf_zero import initialize
from hf_zero.api.gathered_parameters import GatheredParameters
from hf_zero.comm import ledger
from hf_zero.comm.cpu import shared_memory
from hf_zero.kernels.message import message_bytes
from hf_zero.layout.traffic import ModelSizes, Wiring, traffic_of
from tests.support.in_process import InProcessWorld, run_engines
from tests.support.ranks import run_each, run_ranks
from tests.support.traffic import payloads

WORLD = 2
WIDTH, DEPTH, ROWS = 96, 3, 8
LAYER = WIDTH * WIDTH + WIDTH
WEIGHTS = {"zero_quantized_weights": True}
GRADIENTS = {"zero_quantized_gradients": True}
LOCO = {**GRADIENTS, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}}
KINDS: dict[str, dict[str, Any]] = {
    "qwZ": WEIGHTS,
    "qgZ": GRADIENTS,
    "qgZ with LoCo": LOCO,
    "all": {**WEIGHTS, **LOCO},
}


class Stack(nn.Module):
    def __init__(self, frozen: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        for layer in self.layers[:frozen]:
            layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return x


def config_for(zero: dict[str, Any], **more: Any) -> dict[str, Any]:
    released = {"stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0}
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "zero_optimization": {"stage": 3, **released, **zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        **more,
    }


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    return x, x.roll(1, dims=1)


def train(engine: Any, rank: int, steps: range) -> list[float]:
    losses = []
    dtype = next(engine.parameters()).dtype
    for step in steps:
        x, target = (part.to(dtype) for part in batch(rank, step))
        loss = (engine(x) - target).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def shards(engine: Any) -> list[Tensor]:
    return [part.kept.view().clone() for unit in engine.module_view.store.units for part in unit.parts]


def test_losses_stay_near_and_weights_are_the_same_everywhere() -> None:
    """Forward uses the same weights on all ranks: those of the shards, rounded; the shards are updated exactly."""

    def body(rank: int, make: Any, zero: dict[str, Any]) -> tuple[list[float], Tensor, bool]:
        engine = make(model=Stack(), config=config_for(zero))[0]
        losses, seen, layer = train(engine, rank, range(10)), [], engine.module.layers[1]
        layer.register_forward_hook(lambda module, _inputs, _output: seen.append(module.weight.detach().clone()))
        with torch.no_grad():
            engine(batch(rank, 99)[0])
        with GatheredParameters([layer.weight]):
            return losses, seen[0], torch.equal(seen[0], layer.weight)

    found = {name: run_engines(InProcessWorld(WORLD), body, zero=zero) for name, zero in {"plain": {}, **KINDS}.items()}
    for name, ranks in found.items():
        assert torch.equal(ranks[0][1], ranks[1][1]), name
        assert all(is_exact == (name not in ("qwZ", "all")) for _, _, is_exact in ranks), name
        for (losses, _, _), (plain, _, _) in zip(ranks, found["plain"], strict=True):
            assert losses[-1] == pytest.approx(plain[-1], rel=0.05), name
            assert (losses == plain) == (name == "plain")


def run_traffic(rank: int, zero: dict[str, Any]) -> dict[str, int]:
    engine = initialize(model=Stack(), config=config_for(zero, bf16={"enabled": True}))[0]
    train(engine, rank, range(1))
    ledger.reset()
    train(engine, rank, range(1, 2))
    return payloads()


def test_bytes_are_those_of_the_messages() -> None:
    """Rows of a layer have LAYER / world elements, without padding."""
    (in_8, in_4), plain = (message_bytes(LAYER // WORLD, bits) * WORLD for bits in (8, 4)), 2 * LAYER
    for name, ranks in zip(KINDS, run_each(run_traffic, WORLD, [(zero,) for zero in KINDS.values()]), strict=True):
        gathered, bits = in_8 if name in ("qwZ", "all") else plain, None if name == "qwZ" else 4
        expected = {"forward all_gather": gathered * DEPTH, "backward all_gather": gathered * (DEPTH - 1)}
        if bits is None:
            expected["backward reduce_scatter"] = plain * DEPTH
        else:
            expected["backward all_to_all"] = in_4 * DEPTH
        sizes = ModelSizes(gathered=LAYER * DEPTH, trained=LAYER * DEPTH, kept=LAYER)
        wiring = Wiring(ranks=WORLD, per_host=WORLD, quantized_weights=gathered == in_8, gradient_bits=bits)
        on_paper = {f"{each.phase} {each.operation}": each.payload for each in traffic_of(sizes, wiring)}
        for seen in ranks:
            assert seen == expected, name
            assert on_paper == pytest.approx(seen, rel=0.01), name


def test_frozen_weights_are_kept_and_gathered_in_8_bits() -> None:
    """The base model of LoRA: its shards take half of bf16's bytes, stay bitwise the same, and are writable."""

    def body(rank: int, make: Any) -> None:
        zero = {"zero_quantized_nontrainable_weights": True}
        engine = make(model=Stack(frozen=2), config=config_for(zero, bf16={"enabled": True}))[0]
        parts = [unit.parts[0] for unit in engine.module_view.store.units]
        assert [type(part.kept).__name__ for part in parts] == ["QuantizedVector"] * 2 + ["InMemoryVector"]
        before = shards(engine)
        train(engine, rank, range(3))
        after = shards(engine)
        assert torch.equal(before[0], after[0]) and not torch.equal(before[2], after[2])
        assert parts[0].kept.stored.numel == message_bytes(parts[0].layout.row_numel, 8)
        bias = engine.module.layers[0].bias
        with GatheredParameters([bias], modifier_rank=0):
            bias.data[3] = 0.5
        now = shards(engine)
        changed = (now[0] != after[0]).nonzero().flatten().tolist()
        with GatheredParameters([bias]):
            assert bias[3].item() == pytest.approx(0.5, rel=4e-3)
        assert (len(changed) > 0) == (rank == 0)
        assert not changed or max(changed) // 128 == min(changed) // 128

    run_engines(InProcessWorld(WORLD), body)


def test_a_write_into_what_inference_keeps_is_carried_over_alone() -> None:
    """Elements that the user has not written stay exact, although gathered weights are rounded."""

    def body(rank: int, make: Any) -> None:
        zero = {**WEIGHTS, "stage3_max_reuse_distance": 10**9}
        engine = make(model=Stack(), config=config_for(zero))[0]
        before = shards(engine)
        engine.eval()
        with torch.no_grad():
            engine(batch(rank, 0)[0])
            engine.module.layers[0].bias[5] = 7.0
        engine.train()
        train(engine, rank, range(0, 1))
        with GatheredParameters([engine.module.layers[0].bias]):
            pass
        engine.module_view.store.sync_masters()
        now = shards(engine)
        learned = 2e-2  # AdamW's first step moves every element by its learning rate
        assert (now[0] - before[0]).abs().gt(learned).sum().item() == (1 if rank == 0 else 0)

    run_engines(InProcessWorld(WORLD), body)


def run_resume(rank: int, zero: dict[str, Any], folder: str) -> tuple[list[float], list[float]]:
    config = config_for(zero, bf16={"enabled": True})
    engine = initialize(model=Stack(frozen=1), config=config)[0]
    train(engine, rank, range(3))
    engine.save_checkpoint(folder)
    straight = train(engine, rank, range(3, 6))
    resumed = initialize(model=Stack(frozen=1), config=config)[0]
    train(resumed, rank, range(7, 8))  # the current weights and error feedback are replaced by the checkpoint's
    resumed.load_checkpoint(folder)
    return straight, train(resumed, rank, range(3, 6))


def test_a_resumed_training_goes_on_to_the_bit(tmp_path: Path) -> None:
    """With all features: rounded weights, kept rows, int4 gradients and their error feedback."""
    zero = {**KINDS["all"], "zero_quantized_nontrainable_weights": True}
    for straight, resumed in run_ranks(run_resume, WORLD, zero, str(tmp_path)):
        assert straight == resumed


def test_errors_are_dropped_with_a_skipped_step() -> None:
    """In fp16 a step that overflows is not applied, so its error feedback must be dropped."""

    def body(rank: int, make: Any) -> None:
        fp16 = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 1, "hysteresis": 1}
        engine = make(model=Stack(), config=config_for(LOCO, fp16=fp16))[0]
        train(engine, rank, range(1))
        wires = [bucket.wire for bucket in engine.gradients.assembly.reducer.buckets]
        before = [wire.errors[0].clone() for wire in wires]
        assert all(bool(errors.any()) for errors in before)
        x, _ = batch(rank, 5)
        engine.backward((engine(x.half()) * 6e4).float().square().sum())
        engine.step()
        assert engine.skipped_steps == 1
        assert not any(bool(wire.errors[0].any()) or wire.num_reduced for wire in wires)

    run_engines(InProcessWorld(WORLD), body)


def run_on_two_hosts(rank: int, zero: dict[str, Any], accumulation: int) -> tuple[list[float], dict[str, int]]:
    with mock.patch.object(shared_memory, "host_name", lambda: f"host {rank // 2}"):
        config = config_for(zero, gradient_accumulation_steps=accumulation)
        engine = initialize(model=Stack(), config=config)[0]
        losses = train(engine, rank, range(3 * accumulation))
        ledger.reset()
        losses += train(engine, rank, range(3 * accumulation, 4 * accumulation))
    return losses, payloads()


def test_two_hosts_exchange_sums() -> None:
    """Four ranks on two hosts exchange the sums of hosts, half of what ranks of a host exchange among themselves. No
    rank waits for another that waits for a gather."""
    accumulation, row = 2, message_bytes(LAYER // 4, 4)
    found, plain = run_each(run_on_two_hosts, 4, [(KINDS["all"], accumulation), ({}, accumulation)])
    for (losses, seen), (expected, _) in zip(found, plain, strict=True):
        assert losses == pytest.approx(expected, rel=0.05)
        assert seen["backward all_to_all"] == row * (4 + 2) * DEPTH * accumulation

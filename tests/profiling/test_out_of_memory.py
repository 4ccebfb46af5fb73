"""An out-of-memory error lists what used the memory, and the change that would have made it fit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_zero.profiling import out_of_memory
from hf_zero.profiling.out_of_memory import (
    GATHERED,
    GRADIENTS,
    MASTERS,
    REST,
    STATES,
    ConfigChange,
    changes,
    explanation,
    is_out_of_memory,
    memory_by_kind,
    requested_bytes,
)
from tests.api.test_engine import ADAMW, ROWS, new_engine, one_step

GIB = 2**30
MESSAGE = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.11 GiB"


class Greedy(nn.Module):
    """Allocates more than any machine has, on request."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.wants: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.wants, Exception):
            raise self.wants
        if self.wants:
            x = x + torch.empty(self.wants)
        return self.linear(x).pow(2).mean()


def test_what_the_host_cannot_give_is_explained() -> None:
    model = Greedy()
    engine = new_engine(model, bf16={"enabled": True})
    engine.backward(engine(torch.ones(ROWS, 64, dtype=torch.bfloat16)))
    engine.step()
    model.wants = 1 << 55
    with pytest.raises(RuntimeError) as caught:
        engine(torch.ones(ROWS, 64, dtype=torch.bfloat16))
    text = str(caught.value)
    assert text.startswith("[enforce fail") or "allocate" in text.splitlines()[0]
    assert "in forward, this rank's memory on the device was used by" in text
    assert "optimizer states" in text and "master weights" in text
    assert "more were needed, and no change of the config frees as much" in text
    engine.destroy()


def test_an_accelerators_error_keeps_its_type_and_is_explained_once() -> None:
    model = Greedy()
    engine = new_engine(model)
    model.wants = torch.OutOfMemoryError(MESSAGE)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError, match="hf_zero: in forward") as caught:
            engine(torch.ones(ROWS, 64))
        assert str(caught.value).count("hf_zero: in forward") == 1 and str(caught.value).startswith(MESSAGE)
    model.wants = RuntimeError("something else")
    with pytest.raises(RuntimeError, match="^something else$"):
        engine(torch.ones(ROWS, 64))
    engine.destroy()


def test_kinds_are_those_of_the_live_tensors() -> None:
    model = Greedy()
    engine = new_engine(model, bf16={"enabled": True}, zero_optimization={"stage": 1})
    engine.backward(engine(torch.ones(ROWS, 64, dtype=torch.bfloat16)))
    engine.step()
    numel, kinds = sum(p.numel() for p in model.parameters()), memory_by_kind(engine)
    room = {kind: kinds[kind] / numel for kind in (GATHERED, MASTERS, STATES)}
    assert room == pytest.approx({GATHERED: 2, MASTERS: 4, STATES: 8}, rel=0.05)  # 4 bytes for step counters
    assert kinds[REST] > 0
    engine.destroy()


def test_the_first_change_that_is_enough_is_named() -> None:
    kinds = {REST: 10 * GIB, STATES: 30 * GIB}
    found = [
        ConfigChange("a smaller micro-batch", 5 * GIB),
        ConfigChange("stage 2", 15 * GIB),
        ConfigChange("stage 3", 25 * GIB),
    ]
    text = explanation("backward", kinds, 12 * GIB, found)
    assert text.splitlines()[1].split() == ["optimizer", "states", "30.00", "GB", "75.0%"]
    assert text.endswith("One change would have made it fit: stage 2 (frees about 15.00 GB)")
    text = explanation("backward", kinds, 40 * GIB, found)
    assert "these together are: a smaller micro-batch (about 5.00 GB); stage 2 (about 15.00 GB); stage 3" in text
    assert "use more ranks" in explanation("backward", kinds, 80 * GIB, found)
    assert "expandable_segments" in explanation("backward", kinds, -1, found, cached=GIB)


def test_changes_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out_of_memory, "runtime_is_separate", lambda engine: True)
    kinds = {GATHERED: 4 * GIB, MASTERS: 8 * GIB, STATES: 16 * GIB, GRADIENTS: 4 * GIB, REST: 12 * GIB}
    engine = new_engine(optimizer=ADAMW, zero_optimization={"stage": 1})
    shard, engine.groups.shard.size = engine.groups.shard, 4
    found = {change.what.partition(" (")[0]: change.frees / GIB for change in changes(engine, kinds)}
    assert found == {
        "train_micro_batch_size_per_gpu": 6,
        "zero_optimization.stage 2": 3,
        'zero_optimization.offload_optimizer {"device": "cpu"}': 28,
        "zero_optimization.stage 3": 6,
    }
    shard.size = 1
    one_step(engine)
    engine.destroy()
    partly = {"stage": 1, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}
    engine = new_engine(optimizer=ADAMW, zero_optimization=partly)
    found = {change.what: change.frees / GIB for change in changes(engine, kinds)}
    assert found["zero_optimization.offload_optimizer.ratio 1.0"] == 28
    assert not any("ratio" in change.what for change in changes(engine, {GATHERED: GIB})), "everything is offloaded"
    engine.destroy()


def test_what_shapes_say_of_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles, inputs on the host, ranks per sequence: bytes of [2, 8192] tokens of a model with known widths."""
    monkeypatch.setattr(out_of_memory, "runtime_is_separate", lambda engine: True)
    engine = new_engine(optimizer=ADAMW, zero_optimization={"stage": 2})
    widths = {"num_hidden_layers": 32, "hidden_size": 64, "intermediate_size": 256, "vocab_size": 1000}
    monkeypatch.setattr(out_of_memory, "text_config", lambda _: SimpleNamespace(num_attention_heads=6, **widths))
    shard, engine.groups.shard.size, engine.input_shape = engine.groups.shard, 4, torch.Size([2, 8192])
    size, tokens = next(engine.module.parameters()).element_size(), 2 * 8192
    found = {change.what: change.frees for change in changes(engine, {REST: 12 * GIB})}
    assert found['hf_zero {"tiled_loss": true}'] == (tokens - 1024) * 1000 * (size + 8)
    assert found['hf_zero {"tiled_mlp": true}'] == (tokens - 1024) * 256 * 4 * size
    assert found['activation_checkpointing {"cpu_checkpointing": true}'] == tokens * 64 * size * 30
    assert found["sequence_parallel_size 2"] == 6 * GIB
    names = [name.split()[0].split("_")[0] for name in found]
    assert names.index("hf") < names.index("activation") < names.index("sequence")
    shard.size = 1
    engine.destroy()


def test_errors_are_told_apart() -> None:
    assert requested_bytes(MESSAGE) == 20 * 2**20 and requested_bytes("no number") == 0
    assert requested_bytes("DefaultCPUAllocator: can't allocate memory: you tried to allocate 123 bytes.") == 123
    assert is_out_of_memory(MemoryError()) and not is_out_of_memory(RuntimeError("shape mismatch"))

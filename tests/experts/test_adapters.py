"""LoRA on packed experts and other layers with expert parallelism: training, saving and resuming as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.experts.training import batches, engine_of, in_one_process, model_of
from tests.support.one_process import Difference, assert_small, differences, train
from tests.support.ranks import run_ranks


def adapted(kind: str) -> Any:
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], target_parameters=targets)
    model: Any = get_peft_model(model_of(kind), config)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # initially zero, which hides errors
                parameter.normal_(std=0.05)
    return model


def _trained(rank: int, world: int, kind: str, ways: list[tuple[int, int]], folder: str) -> dict[str, Difference]:
    model, data = adapted(kind), batches(4 * world)
    found: dict[str, Difference] = {}
    plain = in_one_process(model, data, together=world)
    for first, then in zip(ways, ways[1:], strict=False):
        engine = engine_of(model, first[0], first[1], rank)
        before = train(engine, data[: 2 * world])
        engine.save_checkpoint(folder, "tag")
        engine.destroy()
        engine = engine_of(model, then[0], then[1], rank)
        engine.load_checkpoint(folder, "tag")
        after = train(engine, data[2 * world :])
        engine.destroy()
        found[f"{first} to {then}"] = differences(before.then(after), plain.seen_by(rank, world))
    return found


def _check(world: int, kind: str, ways: list[tuple[int, int]], folder: Path) -> None:
    assert_small(run_ranks(_trained, world, world, kind, ways, str(folder), timeout_s=1200))


def test_adapters_train_and_go_on(tmp_path: Path) -> None:
    _check(2, "mixtral", [(2, 2), (3, 2), (1, 1)], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["gpt-oss", "qwen3"])
def test_adapters_of_other_kinds(kind: str, tmp_path: Path) -> None:
    _check(4, kind, [(1, 2), (2, 4), (3, 2), (3, 1), (1, 4)], tmp_path)

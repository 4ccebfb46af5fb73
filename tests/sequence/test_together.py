"""Sequence parallelism with other features: recomputation, LoRA, tiles, checkpoints, an engine's loader."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import deepspeed
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_zero.sequence.batches import part_of
from tests.sequence.training import (
    RATE,
    batches,
    differences,
    in_one_process,
    in_parts,
    model_of,
    packed,
    weights_of,
    whole_loss,
)
from tests.support.ranks import run_ranks

TOLERANCE = 1e-5
CONFIG = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2}}


def _recomputed(rank: int, stage: int, *, reentrant: bool) -> float:
    """Backward recomputes attention, including its exchange."""
    model, data = model_of("qwen2"), batches(4)
    plain = in_one_process(model, data, data_ranks=1)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
    return max(differences(rank, in_parts(rank, model, data, stage=stage, size=2), plain, data_ranks=1, size=2))


def _lora(rank: int, stage: int, kind: str = "qwen2", layers: Any = ("q_proj", "v_proj")) -> float:
    data, base = [packed(batch) for batch in batches(4)], model_of(kind)
    torch.manual_seed(5)
    wanted = LoraConfig(r=2, target_modules=layers, init_lora_weights=False)
    model: nn.Module = get_peft_model(base, wanted)  # type: ignore[arg-type]
    plain = in_one_process(model, data, data_ranks=1)
    return max(differences(rank, in_parts(rank, model, data, stage=stage, size=2), plain, data_ranks=1, size=2))


def _tiled(rank: int, stage: int) -> float:
    model, data = model_of("llama"), batches(4)
    plain = in_one_process(model, data, data_ranks=1)
    tiles = {"tiled_mlp": True, "tiled_loss": True}
    trained = in_parts(rank, model, data, stage=stage, size=2, hf_zero=tiles)
    return max(differences(rank, trained, plain, data_ranks=1, size=2))


def _resumed_at_another_size(rank: int, folder: str) -> float:
    """Two updates on halves of sequences by the engine's own loader, then two on whole ones, which both ranks have."""
    model, data = model_of("llama"), batches(4)
    rows = [{name: values[i] for name, values in row.items()} for row in data[:2] for i in range(2)]
    plain = in_one_process(model, data, data_ranks=1)
    first = copy.deepcopy(model)
    engine, _, loader, _ = deepspeed.initialize(
        model=first,
        optimizer=torch.optim.SGD(first.parameters(), lr=RATE, momentum=0.9),
        config={**CONFIG, "sequence_parallel_size": 2},
        training_data=_InOrder(rows),
    )
    loader.sampler.shuffle = False
    for part in loader:
        loss = engine(**part).loss  # as in accelerate's example: labels are now shift_labels
        engine.backward(whole_loss(loss, part, engine.get_sequence_parallel_group()))
        engine.step()
    engine.save_checkpoint(folder, "saved")
    engine.destroy()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    engine.load_checkpoint(folder, "saved")
    for batch in data[2:]:
        engine.backward(engine(**batch).loss)
        engine.step()
    found = weights_of(engine.module)
    return max((found[name] - plain.weights[name]).abs().max().item() for name in found)


class _InOrder(torch.utils.data.Dataset[Any]):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def _all(rank: int, folder: str) -> dict[str, float]:
    torch.testing.assert_close(part_of({"input_ids": torch.ones(1, 2)}, 0, 2)["input_ids"], torch.ones(1, 1))
    return {
        "recomputed, reentrant, stage 3": _recomputed(rank, 3, reentrant=True),
        "recomputed, stage 2": _recomputed(rank, 2, reentrant=False),
        "LoRA": _lora(rank, 1),
        "LoRA, hybrid model": _lora(rank, 3, "lfm2", "all-linear"),
        "tiles": _tiled(rank, 3),
        "resumed": _resumed_at_another_size(rank, folder),
    }


def test_on_two_ranks(tmp_path: Path) -> None:
    for found in run_ranks(_all, 2, str(tmp_path)):
        assert {name: difference for name, difference in found.items() if difference > TOLERANCE} == {}
    names = {path.name for path in (tmp_path / "saved").iterdir()}
    shards = {f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)}
    assert {"mp_rank_00_model_states.pt", *shards} <= names  # those of two data-parallel ranks

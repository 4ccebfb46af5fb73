"""Sequence parallelism with other features: recomputation, LoRA, tiles, checkpoints, an engine's loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from tests.mesh.training import differences
from tests.sequence.training import batches, in_parts, packed
from tests.support.models import Samples
from tests.support.one_process import (
    CLIP,
    Difference,
    assert_small,
    difference_of_weights,
    engine_of,
    in_one_process,
    whole_loss,
)
from tests.support.ranks import run_ranks
from tests.tensor.models import model_of

CONFIG = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": CLIP, "zero_optimization": {"stage": 2}}


def _recomputed(rank: int, stage: int, *, reentrant: bool) -> Difference:
    """Backward recomputes attention, including its exchange."""
    model, data = model_of("qwen2, one key head"), batches(4)
    plain = in_one_process(model, data)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
    return differences(in_parts(rank, model, data, stage=stage, size=2), plain)


def _lora(rank: int, stage: int, kind: str = "qwen2, one key head", layers: Any = ("q_proj", "v_proj")) -> Difference:
    data, base = [packed(batch) for batch in batches(4)], model_of(kind)
    torch.manual_seed(5)
    wanted = LoraConfig(r=2, target_modules=layers, init_lora_weights=False)
    model: nn.Module = get_peft_model(base, wanted)  # type: ignore[arg-type]
    return differences(in_parts(rank, model, data, stage=stage, size=2), in_one_process(model, data))


def _tiled(rank: int, stage: int) -> Difference:
    model, data = model_of("llama"), batches(4)
    tiles = {"tiled_mlp": True, "tiled_loss": True}
    trained = in_parts(rank, model, data, stage=stage, size=2, hf_zero=tiles)
    return differences(trained, in_one_process(model, data))


def _resumed_at_another_size(rank: int, folder: str) -> Difference:
    """Two updates on halves of sequences by the engine's own loader, then two on whole ones, which both ranks have."""
    model, data = model_of("llama"), batches(4)
    plain = in_one_process(model, data)
    engine = engine_of(model, {**CONFIG, "sequence_parallel_size": 2}, training_data=Samples(data[:2]))
    engine.training_dataloader.sampler.shuffle = False
    for part in engine.training_dataloader:
        loss = engine(**part).loss  # as in accelerate's example: labels are now shift_labels
        engine.backward(whole_loss(loss, part["shift_labels"], engine.get_sequence_parallel_group()))
        engine.step()
    engine.save_checkpoint(folder, "saved")
    engine.destroy()
    engine = engine_of(model, CONFIG)
    engine.load_checkpoint(folder, "saved")
    for batch in data[2:]:
        engine.backward(engine(**batch).loss)
        engine.step()
    return difference_of_weights(engine.module_state_dict(), plain.weights)


def _all(rank: int, folder: str) -> dict[str, Difference]:
    return {
        "recomputed, reentrant, stage 3": _recomputed(rank, 3, reentrant=True),
        "recomputed, stage 2": _recomputed(rank, 2, reentrant=False),
        "LoRA": _lora(rank, 1),
        "LoRA, hybrid model": _lora(rank, 3, "lfm2", "all-linear"),
        "tiles": _tiled(rank, 3),
        "resumed": _resumed_at_another_size(rank, folder),
    }


def test_on_two_ranks(tmp_path: Path) -> None:
    assert_small(run_ranks(_all, 2, str(tmp_path)))
    names = {path.name for path in (tmp_path / "saved").iterdir()}
    shards = {f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)}
    assert {"mp_rank_00_model_states.pt", *shards} <= names  # those of two data-parallel ranks

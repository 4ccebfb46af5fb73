"""`ParallelismConfig(sp_size=..., sp_backend="deepspeed")` with an unmodified Trainer and Accelerator, on CPUs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_zero.config import ConfigError
from hf_zero.integration.huggingface.prepare import fill_autos
from hf_zero.integration.huggingface.views import sequence_size
from hf_zero.integration.patches.transformers_trainer import refuse_losses_of_whole_sequences
from tests.integration.flows import clean
from tests.sequence.hugging_face import by_accelerator, by_trainer, parallelism, rows_of
from tests.sequence.training import Trained, in_one_process, model_of
from tests.support.models import Samples
from tests.support.ranks import run_ranks

TOLERANCE = 1e-5


def largest_difference(found: Trained, losses: list[float], plain: Trained) -> float:
    weights = [(found.weights[name] - plain.weights[name]).abs().max().item() for name in plain.weights]
    return max(*weights, *(abs(one - other) for one, other in zip(found.losses, losses, strict=True)))


def _two_ranks(rank: int, folder: str) -> dict[str, float]:
    """Several Trainers and an Accelerator, one after the other in one process.

    A user compared training with accumulation with one process: the first update's loss was 5.58096 instead of 5.57635.
    transformers' loss for sequence parallelism ignores `num_items_in_batch`, so micro-batches counted equally,
    regardless of their tokens. It also ignores label_smoothing_factor, which was an error here."""
    found, rows = {}, rows_of(6)
    for stage, accumulation, smoothing in ((2, 1, 0.0), (3, 4, 0.1)):  # 6 batches: the last update has 2
        of_plain: dict[str, Any] = {"accumulation": accumulation, "by_tokens": True, "smoothing": smoothing}
        plain = in_one_process(model_of("llama"), rows, data_ranks=1, **of_plain)
        options = {"accumulation": accumulation, "label_smoothing_factor": smoothing}
        trained, trainer = by_trainer(rows, Path(folder) / str(stage), stage=stage, size=2, **options)
        found[f"Trainer, stage {stage}"] = largest_difference(trained, plain.losses, plain)
        if stage == 2:
            found["evaluation"] = abs(trainer.evaluate()["eval_loss"] - _evaluated(plain, rows[:4]))
        del trainer
        clean()
    plain = in_one_process(model_of("qwen3_next"), rows, data_ranks=1)
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    trained, trainer = by_trainer(rows, Path(folder) / "hybrid", stage=2, size=2, kind="qwen3_next", **options)
    found["hybrid model"] = largest_difference(trained, plain.losses, plain)
    found["hybrid model, evaluation"] = abs(trainer.evaluate()["eval_loss"] - _evaluated(plain, rows[:4], "qwen3_next"))
    del trainer
    clean()
    rows = rows_of(8)
    plain = in_one_process(model_of("llama"), rows, data_ranks=1)
    saved: dict[str, Any] = {"stage": 2, "size": 2, "save_strategy": "steps", "save_steps": 5}
    by_trainer(rows, Path(folder) / "saved", max_steps=5, **saved)
    clean()
    trained, _ = by_trainer(rows, Path(folder) / "saved", max_steps=8, resume=True, **saved)
    found["resumed within an epoch"] = largest_difference(trained, plain.losses, plain)
    clean()
    trained = by_accelerator(rows, stage=1, size=2)
    found["Accelerator"] = largest_difference(trained, plain.losses, plain)
    return found


def _evaluated(trained: Trained, rows: list[dict[str, torch.Tensor]], kind: str = "llama") -> float:
    model = model_of(kind).eval()
    model.load_state_dict(trained.weights, strict=False)
    with torch.no_grad():
        losses = [model(**row).loss.item() for row in rows]
    return sum(losses) / len(losses)


def test_two_ranks(tmp_path: Path) -> None:
    for found in run_ranks(_two_ranks, 2, str(tmp_path), init=False):
        assert {name: difference for name, difference in found.items() if difference > TOLERANCE} == {}


def _four_ranks(rank: int, folder: str) -> float:
    rows = rows_of(8)
    # accelerate gives batch i to rank i % 4; ranks 0 and 1 train on 0, 1, 4, 5 together, ranks 2 and 3 on the others.
    dealt = [rows[i] for i in (0, 2, 1, 3, 4, 6, 5, 7)]
    differences = []
    for accumulation, by_tokens in ((1, False), (3, True)):  # 4 batches for each data rank: the last update has 1 of 3
        sizes = {"data_ranks": 2, "accumulation": accumulation}
        plain = in_one_process(model_of("llama"), dealt, **sizes, by_tokens=by_tokens)
        options = {**sizes, "average_tokens_across_devices": by_tokens}
        trained, trainer = by_trainer(rows, Path(folder) / "four", stage=2, size=2, **options)
        assert trainer.model_wrapped.train_batch_size() == 4 * accumulation
        means = [sum(plain.losses[at : at + 2]) / 2 for at in range(0, 8, 2)]
        differences.append(largest_difference(trained, plain.losses if by_tokens else means, plain))
        del trainer
        clean()
    return max(differences)


@pytest.mark.slow
def test_two_groups_of_two_ranks(tmp_path: Path) -> None:
    """torch's own gather has no backward over gloo in a group without rank 0, and Trainer's recipe uses it."""
    assert max(run_ranks(_four_ranks, 4, str(tmp_path), init=False)) < TOLERANCE


def test_a_loss_of_whole_sequences_is_refused() -> None:
    """With sequence parallelism transformers returns the model's own loss, before it considers this one."""
    trainer = SimpleNamespace(accelerator=SimpleNamespace(parallelism_config=parallelism(2)), compute_loss_func=max)
    with pytest.raises(ValueError, match=r"compute_loss_func: .*sp_size = 2.* Trainer would take the model's own loss"):
        refuse_losses_of_whole_sequences(trainer)


def test_a_parallelism_config_that_does_not_fit_the_ranks() -> None:
    """accelerate counts samples by dp_shard_size, which users often omit."""
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}
    accelerator = SimpleNamespace(
        deepspeed_plugin=SimpleNamespace(deepspeed_config=config, is_train_batch_min=True),
        gradient_accumulation_steps=1,
        num_processes=4,
        parallelism_config=parallelism(2),
        _dataloaders=[],
    )
    with pytest.raises(ConfigError, match="dp_shard_size x sp_size does not hold: 4 != 1 x 1 x 2") as caught:
        fill_autos(accelerator, torch.nn.Linear(2, 2))
    assert "give dp_shard_size=2 beside it" in str(caught.value)
    accelerator.parallelism_config = parallelism(2, data_ranks=2)
    fill_autos(accelerator, torch.nn.Linear(2, 2))
    config["tensor_parallel"] = {"autotp_size": 2}
    with pytest.raises(ConfigError, match="x sp_size x tensor_parallel.autotp_size does not hold: 4 != 1 x 2 x 2 x 2"):
        fill_autos(accelerator, torch.nn.Linear(2, 2))
    accelerator.parallelism_config = parallelism(2)
    fill_autos(accelerator, torch.nn.Linear(2, 2))


@pytest.mark.parametrize(("name", "fix"), [("tp_size", '"autotp_size": 2'), ("cp_size", "give sp_size=2")])
def test_groups_that_no_engine_makes(name: str, fix: str) -> None:
    """A user passed ParallelismConfig(tp_size=2) without autotp_size: each rank silently held the whole model and got
    the batches of the other."""
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}
    sizes = {"tp_size": 1, "cp_size": 1, "sp_size": 1, "sp_backend": "deepspeed", name: 2}
    accelerator = SimpleNamespace(
        deepspeed_plugin=SimpleNamespace(deepspeed_config=config, is_train_batch_min=True),
        gradient_accumulation_steps=1,
        num_processes=2,
        parallelism_config=SimpleNamespace(**sizes),
        _dataloaders=[],
    )
    with pytest.raises(ConfigError, match=rf"ParallelismConfig\.{name} = 2") as caught:
        fill_autos(accelerator, torch.nn.Linear(2, 2))
    assert fix in str(caught.value)


def test_sequences_that_only_the_config_shares() -> None:
    """A user wrote `sequence_parallel_size` in ds.json, and no ParallelismConfig: accelerate dealt other samples to
    each rank, which silently became parts of one sequence."""
    config = {"train_micro_batch_size_per_gpu": 2, "sequence_parallel_size": 2}
    accelerator = SimpleNamespace(
        deepspeed_plugin=SimpleNamespace(deepspeed_config=config, is_train_batch_min=True),
        gradient_accumulation_steps=1,
        num_processes=4,
        parallelism_config=None,
        split_batches=False,
        _dataloaders=[],
    )
    fill_autos(accelerator, torch.nn.Linear(2, 2))  # with a loader of its own
    with pytest.raises(ConfigError, match=r"sequence_parallel_size = 2.*") as caught:
        fill_autos(accelerator, torch.nn.Linear(2, 2), [torch.utils.data.DataLoader(torch.ones(2, 2), batch_size=2)])
    assert 'ParallelismConfig(sp_size=2, dp_shard_size=2, sp_backend="deepspeed")' in str(caught.value)
    accelerator.parallelism_config = parallelism(2, data_ranks=2)
    fill_autos(accelerator, torch.nn.Linear(2, 2), [torch.utils.data.DataLoader(torch.ones(2, 2), batch_size=2)])


def test_who_says_how_many_ranks_share_sequences() -> None:
    assert sequence_size(parallelism(4), {}) == 4 and sequence_size(None, {}) is None
    launched = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_SP_SIZE": "2"}
    assert sequence_size(None, launched) == 2
    assert len(Samples(rows_of(2))) == 4

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
from tests.mesh.hugging_face import by_accelerator, run_trainer, trained_by
from tests.mesh.training import differences
from tests.sequence.hugging_face import parallelism
from tests.sequence.training import with_masks
from tests.support.models import Batch, Samples
from tests.support.one_process import Difference, Trained, assert_small, in_one_process
from tests.support.ranks import run_ranks
from tests.tensor.models import model_of

Found = dict[str, Difference]


def _two_ranks(rank: int, folder: str) -> Found:
    """Several Trainers and an Accelerator, one after the other in one process.

    A user compared training with accumulation with one process: the first update's loss was 5.58096 instead of 5.57635.
    transformers' loss for sequence parallelism ignores `num_items_in_batch`, so micro-batches counted equally,
    regardless of their tokens. It also ignores label_smoothing_factor, which was an error here."""
    found: Found = {}
    root, rows = Path(folder), with_masks(6)
    options: dict[str, Any] = {"sequence": 2, "save_strategy": "no"}
    for stage, accumulated, smoothing in ((2, 1, 0.0), (3, 4, 0.1)):  # 6 batches: the last update has 2
        shared = {"accumulated": accumulated, "label_smoothing_factor": smoothing}
        plain = in_one_process(model_of("llama"), rows, accumulated=accumulated, by_tokens=True, smoothing=smoothing)
        trainer = run_trainer(rows, root / str(stage), stage=stage, **options, **shared)
        found[f"Trainer, stage {stage}"] = differences(trained_by(trainer), plain)
        if stage == 2:
            found["evaluation"] = _evaluated(trainer, plain, rows[:4])
        del trainer
        clean()
    plain = in_one_process(model_of("qwen3_next"), rows)
    recomputed = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    trainer = run_trainer(rows, root / "hybrid", stage=2, model=model_of("qwen3_next"), **options, **recomputed)
    found["hybrid model"] = differences(trained_by(trainer), plain)
    found["hybrid model, evaluation"] = _evaluated(trainer, plain, rows[:4], "qwen3_next")
    del trainer
    clean()
    rows = with_masks(8)
    plain = in_one_process(model_of("llama"), rows)
    steps: dict[str, Any] = {"stage": 2, "sequence": 2, "save_steps": 5}
    run_trainer(rows, root / "saved", max_steps=5, **steps)
    clean()
    resumed = run_trainer(rows, root / "saved", max_steps=8, resume=root / "saved" / "checkpoint-5", **steps)
    found["resumed within an epoch"] = differences(trained_by(resumed), plain)
    del resumed
    clean()
    trained = by_accelerator(rows, stage=1, sequence=2, parallelism_config=parallelism(2))
    found["Accelerator"] = differences(trained, plain)
    return found


def _evaluated(trainer: Any, plain: Trained, rows: list[Batch], kind: str = "llama") -> float:
    """The difference of the loss from that of the plain model."""
    model = model_of(kind).eval()
    model.load_state_dict(plain.weights, strict=False)
    with torch.no_grad():
        losses = [model(**row).loss.item() for row in rows]
    return abs(float(trainer.evaluate(Samples(rows))["eval_loss"]) - sum(losses) / len(losses))


def test_two_ranks(tmp_path: Path) -> None:
    assert_small(run_ranks(_two_ranks, 2, str(tmp_path), init=False))


def _four_ranks(rank: int, folder: str) -> Found:
    found: Found = {}
    rows = with_masks(8)
    # accelerate gives batch i to rank i % 4; ranks 0 and 1 train on 0, 1, 4, 5 together, ranks 2 and 3 on the others.
    dealt = [rows[i] for i in (0, 2, 1, 3, 4, 6, 5, 7)]
    for accumulated, by_tokens in ((1, False), (3, True)):  # 4 batches for each data rank: the last update has 1 of 3
        plain = in_one_process(model_of("llama"), dealt, data_ranks=2, accumulated=accumulated, by_tokens=by_tokens)
        means = [sum(plain.losses[at : at + 2]) / 2 for at in range(0, 8, 2)]
        plain = Trained(plain.losses if by_tokens else means, plain.norms, plain.weights)
        options = {"accumulated": accumulated, "average_tokens_across_devices": by_tokens, "save_strategy": "no"}
        trainer = run_trainer(rows, Path(folder) / "four", stage=2, sequence=2, **options)
        found[f"{accumulated} accumulated"] = differences(trained_by(trainer), plain)
        del trainer
        clean()
    return found


@pytest.mark.slow
def test_two_groups_of_two_ranks(tmp_path: Path) -> None:
    """torch's own gather has no backward over gloo in a group without rank 0, and Trainer's recipe uses it."""
    assert_small(run_ranks(_four_ranks, 4, str(tmp_path), init=False))


def test_a_loss_of_whole_sequences_is_refused() -> None:
    """With sequence parallelism transformers returns the model's own loss, before it considers this one."""
    trainer = SimpleNamespace(accelerator=SimpleNamespace(parallelism_config=parallelism(2)), compute_loss_func=max)
    with pytest.raises(ValueError, match=r"compute_loss_func: .*sp_size = 2.* Trainer would take the model's own loss"):
        refuse_losses_of_whole_sequences(trainer)


def _accelerator(config: dict[str, Any], num_processes: int, shared: Any) -> Any:
    """As much of an Accelerator as filling in a config reads."""
    return SimpleNamespace(
        deepspeed_plugin=SimpleNamespace(deepspeed_config=config, is_train_batch_min=True),
        gradient_accumulation_steps=1,
        num_processes=num_processes,
        parallelism_config=shared,
        split_batches=False,
        _dataloaders=[],
    )


def test_a_parallelism_config_that_does_not_fit_the_ranks() -> None:
    """accelerate counts samples by dp_shard_size, which users often omit."""
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}
    accelerator = _accelerator(config, 4, parallelism(2))
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
    accelerator = _accelerator(config, 2, SimpleNamespace(**sizes))
    with pytest.raises(ConfigError, match=rf"ParallelismConfig\.{name} = 2") as caught:
        fill_autos(accelerator, torch.nn.Linear(2, 2))
    assert fix in str(caught.value)


def test_sequences_that_only_the_config_shares() -> None:
    """A user wrote `sequence_parallel_size` in ds.json, and no ParallelismConfig: accelerate dealt other samples to
    each rank, which silently became parts of one sequence."""
    config = {"train_micro_batch_size_per_gpu": 2, "sequence_parallel_size": 2}
    accelerator = _accelerator(config, 4, None)
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

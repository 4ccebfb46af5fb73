"""Training-time features enabled by ds.json under an unmodified Trainer: batches, counts, resuming, sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import hf_zero

hf_zero.install()

from transformers import Trainer  # noqa: E402

from hf_zero import ConfigError  # noqa: E402
from hf_zero.extras.data_efficiency.layers import ProgressiveLayerDrop, RandomLTD  # noqa: E402
from hf_zero.features import Progress  # noqa: E402
from tests.extras.data_efficiency.test_stream import SampleStream, analyse, metric, policy  # noqa: E402
from tests.support.models import stack, tiny_llama, token_rows  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

from .flows import ADAMW, BASE, arguments, clean  # noqa: E402

pytestmark = [pytest.mark.lengthy, pytest.mark.usefixtures("clean_libraries")]

ROWS, LENGTH = 24, 16
CURRICULUM = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 4,
    "max_difficulty": LENGTH,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 4},
}
ROUTING = {
    "enabled": True,
    "total_layer_num": 2,
    "random_ltd_layer_id": [1],
    "model_mask_name": "attention_mask",
    "model_type": "decoder",
    "hidden_state_order": "batch_seq_dim",
    "random_ltd_schedule": {
        "min_value": 2,
        "max_value": LENGTH,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 5, "seq_per_step": 2},
    },
}
LENGTHS = [4, 8, 12, 16, 16, 16]  # of updates 1 to 6: 4 + 3 n, rounded down to a multiple of 4: 4 8 12 16


class Watched(Trainer):
    """Records the inputs of every training forward."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        notes: list[Any] = self.__dict__.setdefault("notes", [])
        rows = [row[0] for row in inputs["input_ids"].tolist()]
        notes.append(
            (self.state.global_step, tuple(inputs["input_ids"].shape), int(kwargs["num_items_in_batch"]), rows)
        )
        return super().compute_loss(model, inputs, *args, **kwargs)


def run(folder: Path, sections: dict[str, Any], *, resume: Any = None, **options: Any) -> Watched:
    rows = token_rows(ROWS, LENGTH)
    for number, row in enumerate(rows):
        row["input_ids"][0] = number  # makes every row distinguishable
    options = {"max_steps": 6, "report_to": "none", "logging_steps": 1, **options}
    trainer = Watched(
        model=tiny_llama(),
        args=arguments(folder, {**BASE, "optimizer": ADAMW, **sections}, **options),
        train_dataset=rows,
        eval_dataset=rows[:4],
        data_collator=stack,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_batches_are_shorter_and_their_tokens_are_counted_after_that(tmp_path: Path) -> None:
    """The micro-batches of an update have the same length; evaluation uses whole rows."""
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    trainer = run(tmp_path, {"curriculum_learning": CURRICULUM}, **options)
    notes = trainer.notes  # type: ignore[attr-defined]
    lengths = [shape[1] for step, shape, _, _ in notes]
    engine = trainer.model_wrapped
    schedule = engine.training_features.named("curriculum_learning").difficulty
    assert lengths == [schedule.at(step + 1) for step in range(6) for _ in range(2)] and lengths[0] < LENGTH
    assert lengths[0] < lengths[2] and lengths[-1] == LENGTH
    rows = token_rows(ROWS, LENGTH)
    for first, second in zip(notes[::2], notes[1::2]):
        shown = [rows[number]["labels"][1 : first[1][1]] for number in (*first[3], *second[3])]
        assert first[2] == second[2] == sum(label != -100 for labels in shown for label in labels)
    trainer.notes.clear()  # type: ignore[attr-defined]
    trainer.evaluate()
    assert all(shape[1] == LENGTH for _, shape, _, _ in trainer.notes)  # type: ignore[attr-defined]


def sampled(folder: Path) -> tuple[dict[str, Any], list[list[int]]]:
    """The section, and the expected samples of every update."""
    prefix = analyse(folder, [row % 6 for row in range(ROWS)])
    one = {
        "difficulty_type": "value",
        "clustering_type": "schedule_based",
        "index_to_sample_path": prefix + "_index_to_sample",
        "index_to_metric_path": prefix + "_index_to_metric",
        "min_difficulty": 1,
        "max_difficulty": 5,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 8, "difficulty_step": 1},
    }
    sampling = {"curriculum_learning": {"enabled": True, "curriculum_metrics": {"m": one}}}
    stream = SampleStream(policy(metric(prefix, 1, 5, 8)), ROWS, 4)
    return {"data_efficiency": {"seed": 3, "data_sampling": sampling}}, [stream.batch().tolist() for _ in range(16)]


def test_samples_follow_the_curriculum_and_a_resumed_run_sees_the_same(tmp_path: Path) -> None:
    sections, expected = sampled(tmp_path)
    options: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 9}
    options |= {"save_strategy": "steps", "save_steps": 4}
    whole = run(tmp_path / "run", sections, **options).notes  # type: ignore[attr-defined]
    seen = [first[3] + second[3] for first, second in zip(whole[::2], whole[1::2])]
    assert seen == expected[:9]
    clean()
    again = run(tmp_path / "run", sections, resume=str(tmp_path / "run" / "checkpoint-4"), **options)
    found = again.notes  # type: ignore[attr-defined]
    assert found == whole[8:]


def test_another_way_of_sampling_contradicts_the_section(tmp_path: Path) -> None:
    sections, _ = sampled(tmp_path)
    with pytest.raises(ValueError, match="both choose samples"):
        run(tmp_path / "run", sections, train_sampling_strategy="group_by_length")


def test_elastic_batch_sizes_become_trainers(tmp_path: Path) -> None:
    section = {"enabled": True, "max_train_batch_size": 12, "micro_batch_sizes": [2, 3], "version": 0.1}
    trainer = run(tmp_path, {"elasticity": section}, max_steps=2, per_device_train_batch_size=5)
    args, engine = trainer.args, trainer.model_wrapped
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (3, 4)
    assert engine.get_batch_info() == (12, 3, 4)
    assert all(shape[0] == 3 for _, shape, _, _ in trainer.notes)  # type: ignore[attr-defined]
    clean()
    with pytest.raises(ConfigError, match="elasticity makes it 12"):
        run(tmp_path, {"elasticity": section, "train_batch_size": 7}, max_steps=1)


@pytest.mark.parametrize("stage", [2, 3])
def test_all_at_once(stage: int, tmp_path: Path) -> None:
    """Sparse attention, random-LTD and a length curriculum, at stages with and without partitioned weights."""
    sections = {
        "zero_optimization": {"stage": stage},
        "curriculum_learning": CURRICULUM,
        "data_efficiency": {"data_routing": {"random_ltd": ROUTING}},
    }
    trainer = run(tmp_path, sections)
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(losses) == 6 and all(torch.isfinite(torch.tensor(losses)))
    assert trainer.model_wrapped.random_ltd_scheduler.current() > 2


@pytest.mark.parametrize("feature", [RandomLTD, ProgressiveLayerDrop])
def test_every_micro_batch_draws_its_own_and_a_resumed_run_draws_the_same(feature: Any, tmp_path: Path) -> None:
    """A user trained with random-LTD, or with progressive layer drop, and gradient_accumulation_steps: 3.

    All micro-batches of an update dropped the same tokens or layers, and a resumed run dropped different ones than an
    uninterrupted run (loss 5.45211 instead of 5.45626). The choice depends on the number of the micro-batch in its
    update, which was derived from the calls of `engine.step()`: Accelerate only calls it after the last micro-batch, so
    that updates were counted instead, and loading a checkpoint set the number to updates x accumulation.
    """
    sections: dict[str, Any] = {"data_efficiency": {"data_routing": {"random_ltd": ROUTING}}}
    if feature is ProgressiveLayerDrop:
        sections = {"progressive_layer_drop": {"enabled": True, "theta": 0.3, "gamma": 5.0}}
    options: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    options |= {"save_strategy": "steps", "save_steps": 3}
    told: list[tuple[int, int]] = []
    own = feature.before_forward

    def noted(self: Any, progress: Progress, keywords: Any) -> Any:
        told.append((progress.step, progress.micro_step))
        return own(self, progress, keywords)

    with mock.patch.object(feature, "before_forward", noted):
        whole = run(tmp_path, sections, **options)
        assert told == [(step, micro) for step in range(6) for micro in range(3)]
        clean()
        again = run(tmp_path, sections, resume=str(tmp_path / "checkpoint-3"), **options)
    losses = [[line["loss"] for line in trainer.state.log_history if "loss" in line] for trainer in (whole, again)]
    assert losses[0] == losses[1]
    assert whole.model_wrapped.micro_steps == again.model_wrapped.micro_steps == 18


def _resumed_on_two_ranks(rank: int, folder: str, tensor: int) -> dict[str, Any]:
    """The differences between an uninterrupted run and one that was resumed in the middle of an epoch."""
    found: dict[str, Any] = {}
    for stage, kept in ((3, {"cpu_checkpointing": True, "contiguous_memory_optimization": True}), (1, {})):
        own, runs = Path(folder, str(stage), str(rank)), Path(folder, str(stage), "runs")
        own.mkdir(parents=True)
        sections, expected = sampled(own)
        sections |= {"zero_optimization": {"stage": stage}, "curriculum_learning": CURRICULUM}
        sections |= {"activation_checkpointing": kept | {"number_checkpoints": 2}}
        sections |= {"tensor_parallel": {"autotp_size": tensor}} if tensor > 1 else {}
        options: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 5}
        options |= {"save_strategy": "steps", "save_steps": 2, "gradient_checkpointing": True}
        whole, again = [], []
        for resume, seen in ((None, whole), (str(runs / "checkpoint-2"), again)):
            trainer = run(runs, sections, resume=resume, **options)
            losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            seen += [trainer.notes, losses]  # type: ignore[attr-defined]
            clean()
        found[f"losses at stage {stage}"] = [pair for pair in zip(whole[1], again[1], strict=True) if len({*pair}) > 1]
        found[f"batches at stage {stage}"] = [] if whole[0][4:] == again[0] else (whole[0], again[0])
        if tensor > 1:
            seen = [first[3] + second[3] for first, second in zip(whole[0][::2], whole[0][1::2], strict=True)]
            found[f"stream at stage {stage}"] = [] if seen == expected[:5] else (seen, expected)
    return {name: differences for name, differences in found.items() if differences}


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [1, 2])
def test_curricula_and_kept_activations_on_two_ranks_after_a_resume(tensor: int, tmp_path: Path) -> None:
    """The runs are resumed in the middle of an epoch. With `autotp_size` a user's curriculum over samples ran at half
    speed: the sampler counted the samples of an update by ranks, two of which get the same ones."""
    assert run_ranks(_resumed_on_two_ranks, 2, str(tmp_path), tensor, init=False, timeout_s=280) == [{}, {}]

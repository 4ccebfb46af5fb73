"""An evaluation on several ranks returns each sample once, in order, with any kind of parallelism."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import GenerationConfig, Seq2SeqTrainer, Seq2SeqTrainingArguments

from tests.integration.evaluated import (
    BATCH,
    Batch,
    Stream,
    accelerated,
    by_trainer,
    config_of,
    difference,
    in_one_process,
    of_trainer,
    padded,
    samples,
)
from tests.integration.flows import clean
from tests.sequence.hugging_face import parallelism
from tests.support.ranks import run_ranks
from tests.tensor.models import model_of

TENSOR: dict[str, Any] = {"tensor_parallel": {"autotp_size": 2}}
HYBRID: dict[str, Any] = {"zero_optimization": {"stage": 3, "mics_shard_size": 2}}


def _under_trainer(folder: Path, config: dict[str, Any], data_ranks: int, number: int = 7, **more: Any) -> Any:
    rows = samples(number)
    plain = in_one_process(rows, data_ranks, by_tokens="parallelism_config" not in more)
    trainer = by_trainer(rows, folder, config, **more)
    found = {"rows": difference(of_trainer(trainer, rows), plain)}
    metrics = {name.removeprefix("eval_"): value for name, value in trainer.evaluate().items()}
    found["evaluate"] = difference(metrics, plain)
    trainer.data_collator = functools.partial(padded, length=9)  # rank 0 splits batches that can be concatenated
    arguments = trainer.args
    arguments.include_num_input_tokens_seen, before = "all", trainer.state.num_input_tokens_seen
    trainer._track_num_input_tokens({"input_ids": torch.ones(2, 9)})
    assert trainer.state.num_input_tokens_seen - before == 18 * data_ranks
    found["stream"] = difference(of_trainer(trainer, Stream(rows)), plain)
    if data_ranks > 2:  # the last batches of a stream are smaller than Trainer assumes for their losses
        found["stream"].pop("loss", None)
    clean()
    return {name: differences for name, differences in found.items() if differences}


def _in_a_loop(config: dict[str, Any], data_ranks: int, **more: Any) -> dict[str, Any]:
    """The loop of accelerate's page on metrics, with varying lengths, nested outputs, objects and numbers."""
    rows, plain = samples(7), model_of("llama").eval()
    accelerator, model, loader = accelerated(rows, config_of(**config), **more)
    gathered, objects, numbers = [], [], []
    for batch in loader:
        with torch.no_grad():
            logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
        own = {"nested": (logits.argmax(-1), [batch["labels"]])}
        found = accelerator.gather_for_metrics(accelerator.pad_across_processes(own, dim=1, pad_index=-100))
        gathered += list(zip(found["nested"][0], found["nested"][1][0], strict=True))
        objects += accelerator.gather_for_metrics([str(row.tolist()) for row in batch["input_ids"]])
        numbers.append(accelerator.gather_for_metrics((batch["labels"] != -100).sum()))
    for row, (predicted, labels) in zip(rows, gathered, strict=True):
        length = len(row["labels"])
        assert torch.equal(labels[:length], row["labels"]) and (labels[length:] == -100).all()
        with torch.no_grad():
            assert torch.equal(predicted[:length], plain(**padded([row])).logits[0].argmax(-1))
    assert [text.strip("[]").split(", ")[0] for text in objects] == [str(int(row["labels"][0])) for row in rows]
    assert sum(map(len, numbers)) == data_ranks * len(numbers)
    return _of_accelerator(accelerator, data_ranks)


def _of_accelerator(accelerator: Accelerator, data_ranks: int) -> dict[str, Any]:
    """Results of `gather` and related functions: samples once, numbers of all ranks."""
    rank, world = accelerator.process_index, accelerator.num_processes
    size = world // data_ranks
    own = torch.tensor([[rank // size, row] for row in range(3)])
    samples_once = [[place, row] for place in range(data_ranks) for row in range(3)]
    assert accelerator.gather(own).tolist() == samples_once
    assert accelerator.gather({"a": [own[:0], own.float()]})["a"][0].shape == (0, 2)
    with accelerator.split_between_processes(list(range(5)), apply_padding=True) as part:
        dealt = accelerator.gather_for_metrics(part)
    assert sorted(set(dealt)) == list(range(5)) and len(dealt) == data_ranks * -(-5 // data_ranks)
    # A number from each rank matches `num_processes`, by which accelerate's page on accumulation divides.
    assert accelerator.gather(torch.tensor(rank)).tolist() == list(range(world))
    assert accelerator.reduce(torch.tensor(1.0), "sum").item() == world
    accelerator.set_trigger() if rank == 1 else None
    assert accelerator.check_trigger()
    return {}


def _before_the_model(rows: list[Batch]) -> None:
    """A loader is prepared before the model, as for evaluation only, or skips its first batches."""
    accelerator, model, _ = accelerated(rows, config_of(**TENSOR))
    del accelerator.state.ds_device_mesh
    loader = accelerator.prepare_data_loader(DataLoader(rows, BATCH, collate_fn=padded))
    found = [accelerator.gather_for_metrics(batch["input_ids"][:, 0]) for batch in loader]
    assert torch.cat(found).tolist() == [int(row["input_ids"][0]) for row in rows]
    stream = DataLoader(Stream(rows), BATCH, collate_fn=functools.partial(padded, length=9))  # type: ignore[arg-type]
    skipped = accelerator.skip_first_batches(accelerator.prepare(stream), 1)
    found = [accelerator.gather_for_metrics(batch["input_ids"][:, 0]) for batch in skipped]
    first = BATCH * (accelerator.num_processes // 2)
    assert torch.cat(found).tolist() == [int(row["input_ids"][0]) for row in rows][first:]


def _tensor(rank: int, folder: str, world: int) -> dict[str, Any]:
    found = _under_trainer(Path(folder), config_of(**TENSOR), world // 2)
    found |= _in_a_loop(TENSOR, world // 2)
    clean()
    _before_the_model(samples(7))
    if world > 2:  # evaluated on whole sequences, which tensor groups of two ranks share
        shared = {"parallelism_config": parallelism(world // 2)}
        clean()
        found |= {f"sequences, {name}": value for name, value in _under_trainer(
            Path(folder) / "sequences", config_of(**TENSOR), world // 2, **shared
        ).items()}  # fmt: skip
        found |= _in_a_loop(TENSOR, world // 2, **shared)
    return found


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_ranks_that_hold_parts_of_matrices(tmp_path: Path, world: int) -> None:
    """A user evaluated with `autotp_size`: compute_metrics got 14 rows of 7 on two ranks, 13 on four, and eval_loss was
    wrong. Trainer and Accelerate gather over all ranks, although those of a tensor-parallel group see the same samples,
    and then cut the remainder of the last batch, which counts samples, at the wrong place. With an iterable dataset,
    all ranks of all groups even got the same batches, in training, too."""
    assert run_ranks(_tensor, world, str(tmp_path), world, init=False)[0] == {}


def _hybrid_and_sequences(rank: int, folder: str) -> dict[str, Any]:
    found = _under_trainer(Path(folder) / "hybrid", config_of(**HYBRID), 4, number=11)
    found |= _in_a_loop(HYBRID, 4)
    clean()
    shared: dict[str, Any] = {"parallelism_config": parallelism(2, 2)}
    found |= {f"sequences, {name}": value for name, value in _under_trainer(
        Path(folder) / "sequences", config_of(), 4, number=11, **shared
    ).items()}  # fmt: skip
    found |= _in_a_loop({}, 4, **shared)
    clean()
    _parts_are_not_evaluated(shared)
    return found


def _parts_are_not_evaluated(shared: dict[str, Any]) -> None:
    """A user passed the evaluation loader to prepare() together with the model. It returned parts of sequences, each of
    which the model took for a whole one, since it does not split sequences in evaluation."""
    plugin = DeepSpeedPlugin(hf_ds_config=config_of(train_micro_batch_size_per_gpu=BATCH))
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin, **shared)
    model = model_of("llama")
    loader = DataLoader(samples(8), BATCH, collate_fn=padded)  # type: ignore[arg-type]
    model, _, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    part = next(iter(loader))
    trained = model(**part).loss
    # accelerate's example for Ulysses never calls train(), and from_pretrained returns a model in eval mode.
    assert torch.equal(model.eval()(**part).loss, trained)
    ranks = r"in eval mode.* ranks (0, 1|2, 3) share, which would be taken for whole ones"
    with torch.no_grad(), pytest.raises(RuntimeError, match=ranks):
        model(**part)
    group = model.get_sequence_parallel_group()
    assert accelerator.torch_device_mesh["sp"].get_group() is group, "as accelerate's example asks for it"


@pytest.mark.slow
def test_copies_of_shards_and_ranks_that_share_sequences(tmp_path: Path) -> None:
    """They evaluate different samples each: sequences are only shared in training."""
    assert run_ranks(_hybrid_and_sequences, 4, str(tmp_path), init=False)[0] == {}


def _generated(model: nn.Module, rows: list[Batch]) -> list[list[int]]:
    with torch.no_grad():
        return [model.generate(row["input_ids"][None], **_GENERATION)[0].tolist() for row in rows]  # type: ignore


_GENERATION: dict[str, Any] = {"max_length": 8, "do_sample": False, "pad_token_id": 0}


def _generating(rank: int, folder: str) -> list[list[int]]:
    arguments = Seq2SeqTrainingArguments(
        output_dir=folder, use_cpu=True, deepspeed=config_of(**TENSOR), per_device_eval_batch_size=BATCH,
        per_device_train_batch_size=BATCH, predict_with_generate=True, report_to="none", disable_tqdm=True,
        learning_rate=0.01, max_steps=1, generation_config=GenerationConfig(**_GENERATION),
    )  # fmt: skip
    model = model_of("llama")
    model.config.pad_token_id = 0
    trainer = Seq2SeqTrainer(model, arguments, train_dataset=_equal(), data_collator=padded)
    found: Tensor = torch.as_tensor(trainer.predict(_equal()).predictions)  # type: ignore[arg-type]
    return [row.tolist() for row in found]


def _equal() -> list[Batch]:
    return [{name: value[:4] for name, value in row.items()} for row in samples(5)]


@pytest.mark.slow
def test_generation_under_seq2seq_trainer(tmp_path: Path) -> None:
    """Seq2SeqTrainer gathers with `Accelerator.gather`."""
    expected = _generated(model_of("llama").eval(), _equal())
    assert run_ranks(_generating, 2, str(tmp_path), init=False) == [expected] * 2

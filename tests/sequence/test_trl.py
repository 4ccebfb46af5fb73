"""TRL's SFTTrainer with sequence parallelism: padded batches of different lengths, and packed documents."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.integration.flows import clean
from tests.sequence.hugging_face import parallelism
from tests.support.one_process import RATE
from tests.support.ranks import run_ranks
from tests.support.requirements import requires
from tests.tensor.models import model_of

pytestmark = [pytest.mark.slow, requires(modules=("trl",))]
SEEN = ("input_ids", "labels", "position_ids", "attention_mask")


def _trained(rank: int, folder: str, *, packing: bool, tensor: int) -> tuple[list[float], list[float]]:
    """Losses of SFTTrainer, and of plain PyTorch on the batches from its collator. Its metrics count a token once."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from tests.trl.material import tokenizer

    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(4, 13, (16,), generator=generator).tolist()
    rows = [{"input_ids": torch.randint(5, 60, (n,), generator=generator).tolist()} for n in lengths]
    model = model_of("llama")
    plain = copy.deepcopy(model)
    options: dict[str, Any] = {"packing": True, "padding_free": True} if packing else {}
    arguments = SFTConfig(
        output_dir=str(Path(folder) / str(packing)),
        use_cpu=True,
        bf16=False,
        deepspeed={
            "zero_optimization": {"stage": 2},
            "train_micro_batch_size_per_gpu": "auto",
            "tensor_parallel": {"autotp_size": tensor},
        },
        parallelism_config=parallelism(2),
        per_device_train_batch_size=2,
        max_steps=4,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        optim="sgd",
        train_sampling_strategy="sequential",
        gradient_checkpointing=False,
        max_length=12,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        **options,
    )
    trainer = SFTTrainer(
        model=model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer()
    )
    collate, made = trainer.data_collator, []

    def noted(samples: Any) -> Any:
        made.append(collate(samples))
        return made[-1]

    trainer.data_collator = noted
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    of_ranks: list[Any] = [None] * (2 * tensor)
    torch.distributed.all_gather_object(of_ranks, made)
    expected, optimizer, num_tokens = [], torch.optim.SGD(plain.parameters(), lr=RATE), 0
    for number in range(4):
        batch = of_ranks[number % 2 * tensor][number // 2]
        length = batch["input_ids"].shape[1]
        num_tokens += int(batch["attention_mask"].sum()) if "attention_mask" in batch else length + length % 2
        loss = plain(**{name: batch[name] for name in SEEN if name in batch}, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert trainer.state.log_history[-2]["num_tokens"] == num_tokens
    del trainer
    clean()
    return losses, expected


def _both(rank: int, folder: str, tensor: int) -> list[tuple[list[float], list[float]]]:
    return [_trained(rank, folder, packing=packing, tensor=tensor) for packing in (False, True)]


@pytest.mark.parametrize("tensor", [1, 2])
def test_losses_are_those_of_plain_pytorch(tmp_path: Path, tensor: int) -> None:
    for found in run_ranks(_both, 2 * tensor, str(tmp_path), tensor, init=False):
        for losses, expected in found:
            assert losses == pytest.approx(expected, abs=1e-5)

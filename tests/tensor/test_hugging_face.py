"""`tensor_parallel.autotp_size` under an unmodified Trainer and Accelerator, on CPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.sequence.test_hugging_face import fresh
from tests.sequence.training import packed
from tests.support.ranks import run_ranks
from tests.tensor.hugging_face import by_accelerator, by_trainer
from tests.tensor.training import Batch, Trained, batches, by_tokens, in_one_process, model_of, padded


def largest_difference(found: Trained, plain: Trained) -> float:
    weights = [(found.weights[name] - plain.weights[name]).abs().max().item() for name in plain.weights]
    norms = [abs(one - other) for one, other in zip(found.norms, plain.norms, strict=bool(found.norms))]
    losses = zip(found.losses, plain.losses, strict=True)
    return max(*weights, *norms, *(abs(one - other) for one, other in losses))


def _two_ranks(rank: int, folder: str) -> dict[str, float]:
    rows, found, root = batches(4), {}, Path(folder)
    plain = in_one_process(model_of("llama"), rows, data_ranks=1)
    found["Trainer"] = largest_difference(by_trainer(rows, root, stage=2), plain)
    fresh()
    saved = dict(AutoModelForCausalLM.from_pretrained(root / "saved").named_parameters())
    found["saved"] = max((saved[name] - value).abs().max().item() for name, value in plain.weights.items())
    found["resumed"] = largest_difference(by_trainer(rows, root, stage=2, resume=root / "checkpoint-2"), plain)
    fresh()
    found["Accelerator"] = largest_difference(by_accelerator(rows, stage=1), plain)
    fresh()
    found["padded"] = against_one_process(padded(6), root / "padded", accumulated=3)
    fresh()
    found["packed"] = against_one_process([packed(row) for row in batches(2)], root / "packed")
    return found


def against_one_process(
    rows: list[Batch], folder: Path, *, data_ranks: int = 1, accumulated: int = 1, stage: int = 2
) -> float:
    plain = by_tokens(model_of("llama"), rows, together=data_ranks * accumulated)
    found = by_trainer(rows, folder, stage=stage, accumulated=accumulated, save_strategy="no")
    return largest_difference(found, plain)


def test_two_ranks(tmp_path: Path) -> None:
    for found in run_ranks(_two_ranks, 2, str(tmp_path), init=False):
        assert {name: difference for name, difference in found.items() if difference > 1e-5} == {}


def _four_ranks(rank: int, folder: str) -> dict[str, float]:
    rows, root = batches(8), Path(folder)
    plain = in_one_process(model_of("llama"), rows, data_ranks=2)
    mean = [(one + other) / 2 for one, other in zip(plain.losses[::2], plain.losses[1::2], strict=True)]
    plain = Trained(mean, plain.norms, plain.weights)
    found = {"2 x 2": largest_difference(by_trainer(rows, root, stage=2), plain)}
    ways = {"4 parts": (4, 3, 2), "whole": (1, 1, 1)}
    for name, (tensor, stage, accumulated) in ways.items():
        fresh()
        sizes = {"tensor": tensor, "accumulated": accumulated} | ({"per_device": 1} if tensor == 1 else {})
        resumed = by_trainer(rows, root / name, stage=stage, resume=root / "checkpoint-2", **sizes)
        found[f"resumed as {name}"] = largest_difference(resumed, plain)
    return found


@pytest.mark.slow
def test_two_data_ranks_of_two_parts_under_trainer(tmp_path: Path) -> None:
    """Trainer deals other batches to them, and counts the tokens of all ranks; it goes on with other parts, too."""
    for found in run_ranks(_four_ranks, 4, str(tmp_path), init=False):
        assert {name: difference for name, difference in found.items() if difference > 1e-5} == {}


def _for_long(rank: int, folder: str, data_ranks: int, updates: int) -> dict[str, float]:
    found = {}
    for accumulated, stage in ((1, 2), (3, 2), (3, 3)):
        name, sizes = f"{accumulated} at stage {stage}", {"data_ranks": data_ranks, "accumulated": accumulated}
        for kind, rows in rows_of(updates * data_ranks * accumulated).items():
            found[f"{kind}, {name}"] = against_one_process(rows, Path(folder) / kind / name, stage=stage, **sizes)
            fresh()
    return found


def rows_of(number: int) -> dict[str, list[Batch]]:
    return {"padded": padded(number), "packed": [packed(row) for row in batches(number)]}


@pytest.mark.slow
@pytest.mark.parametrize("data_ranks", [1, 2])
def test_padding_packing_and_accumulation_under_trainer(tmp_path: Path, data_ranks: int) -> None:
    """20 updates; `gradient_accumulation_steps` 1 and 3."""
    for found in run_ranks(_for_long, 2 * data_ranks, str(tmp_path), data_ranks, 20, init=False, timeout_s=400):
        assert {number: difference for number, difference in found.items() if difference > 1e-5} == {}

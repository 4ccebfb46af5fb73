"""Batches by tokens: the packs, the learning rate scaled by them, and training on them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hf_zero import initialize
from hf_zero.config import ConfigError, resolve
from hf_zero.extras.data_efficiency.analyzer import DataAnalyzer, DistributedDataAnalyzer
from hf_zero.extras.data_efficiency.packs import VariableBatches, batch_by_seqlens, scale_lr
from hf_zero.extras.data_efficiency.sampling import sampler_for
from hf_zero.extras.data_efficiency.section import PackingPolicy
from hf_zero.extras.data_efficiency.variable_batches import (
    PackSampler,
    dataloader_for_variable_batch_size,
    get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed,
    lr_scheduler_for_variable_batch_size,
)
from tests.support.ranks import run_ranks

LENGTHS = [5, 3, 6, 2, 4, 7, 1, 5]


def test_packs_of_the_worked_example_with_its_last_sample() -> None:
    """DeepSpeed always omits the last sample."""
    packs, samples, longest = batch_by_seqlens(LENGTHS, 10)
    assert packs == [(0, [0, 1]), (1, [2, 3]), (2, [4]), (3, [5, 6]), (4, [7])]
    assert (samples, longest) == ([2, 2, 1, 2, 1], [5, 6, 4, 7, 5])
    packs, samples, longest = batch_by_seqlens(LENGTHS, 10, effective_batch_size=2)
    assert [number for number, _ in packs] == [0, 0, 1, 1]
    assert (samples, longest) == ([4, 3], [6, 7])


def test_limits_and_orders() -> None:
    assert batch_by_seqlens(LENGTHS, 10, max_batch_size=1)[1] == [1] * 8
    assert batch_by_seqlens(LENGTHS, 6, sequence_picking_order="seqlen")[0] == [
        (0, [6, 3, 1]), (1, [4]), (2, [0]), (3, [7]), (4, [2])
    ]  # fmt: skip
    assert [samples for _, samples in batch_by_seqlens(LENGTHS, 10, min_batch_size=2)[0]] == [[0, 1], [2, 3], [5, 6]]
    assert [samples for _, samples in batch_by_seqlens(LENGTHS, 10, sequence_ids_per_mb=[7, 6, 5])[0]] == [[7, 6], [5]]
    drawn = batch_by_seqlens(LENGTHS, 10, sequence_picking_order="random", seed=3)
    assert drawn == batch_by_seqlens(LENGTHS, 10, sequence_picking_order="random", seed=3)
    assert drawn != batch_by_seqlens(LENGTHS, 10, sequence_picking_order="random", seed=4)
    with pytest.raises(ValueError, match="must be dataloader, random, seqlen"):
        batch_by_seqlens(LENGTHS, 10, sequence_picking_order="longest")
    with pytest.raises(ValueError, match="but an update needs 9"):
        batch_by_seqlens(LENGTHS, 10, effective_batch_size=9)


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=60),
    most=st.integers(5, 60),
    fewest=st.integers(1, 3),
    largest=st.none() | st.integers(3, 8),
    per_update=st.integers(1, 4),
    alike=st.booleans(),
)
def test_every_pack_keeps_to_its_limits(
    lengths: list[int], most: int, fewest: int, largest: int | None, per_update: int, alike: bool
) -> None:
    try:
        packs, samples, longest = batch_by_seqlens(
            lengths, most, None, fewest, largest, "dataloader", per_update, required_microbatches_of_same_size=alike
        )
    except ValueError as error:
        assert "but an update needs" in str(error)
        return
    seen = [sample for _, of_one in packs for sample in of_one]
    assert len(seen) == len(set(seen)) and len(packs) % per_update == 0
    for _, of_one in packs:
        assert sum(lengths[sample] for sample in of_one) <= most
        assert fewest <= len(of_one) <= (largest or len(lengths))
    for update, (count, length) in enumerate(zip(samples, longest, strict=True)):
        mine = [of_one for number, of_one in packs if number == update]
        assert sum(map(len, mine)) == count and max(lengths[sample] for of_one in mine for sample in of_one) == length
        assert not alike or len(set(map(len, mine))) == 1


def test_a_drawn_order_is_another_one_in_every_epoch() -> None:
    """DeepSpeed's packs are the same in every epoch."""
    lengths = [random.Random(1).randint(1, 9) for _ in range(40)]
    drawn = VariableBatches(lengths, PackingPolicy(max_tokens=12, order="random"), 2)
    assert drawn.epoch(0).packs != drawn.epoch(1).packs
    sizes = [size for epoch in range(3) for size in drawn.epoch(epoch).samples]
    assert [drawn.samples_of(update) for update in range(len(sizes))] == sizes
    fixed = VariableBatches(lengths, PackingPolicy(max_tokens=12), 2)
    assert fixed.epoch(0) is fixed.epoch(7)


def test_rates_follow_the_samples_of_the_coming_update() -> None:
    assert scale_lr(8, 16, 1e-3) == pytest.approx(2e-3)
    assert scale_lr(8, 16, 1e-3, "sqrt") == pytest.approx(1.414e-3, rel=1e-3)
    assert scale_lr(8, 16, 1e-3, None) == 1e-3
    with pytest.raises(ValueError, match="must be linear, sqrt, none"):
        scale_lr(8, 16, 1e-3, "cubic")
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    base = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    schedule = lr_scheduler_for_variable_batch_size(2, [4, 1, 2], None, base)
    seen = [optimizer.param_groups[0]["lr"]]
    for _ in range(3):
        optimizer.step()
        schedule.step()
        seen.append(optimizer.param_groups[0]["lr"])
    assert seen == [2.0, 0.25, 0.25, 0.25]  # 1 x 4/2, 1/2 x 1/2, 1/4 x 2/2, 1/8 x 4/2
    assert schedule.get_last_lr() == [0.25]
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    again = lr_scheduler_for_variable_batch_size(
        2, [4, 1, 2], None, torch.optim.lr_scheduler.ExponentialLR(other, gamma=0.5)
    )
    again.load_state_dict(schedule.state_dict())
    schedule.step(), again.step()
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 1 / 16 * 1 / 2
    with pytest.raises(ValueError, match="neither a schedule nor an optimizer"):
        lr_scheduler_for_variable_batch_size(2, [4], None, 3)


def test_a_loader_over_given_packs_pads_to_the_longest_of_an_update() -> None:
    packs, _, longest = batch_by_seqlens(LENGTHS, 10, effective_batch_size=2)
    data = [[index] * length for index, length in enumerate(LENGTHS)]
    loader, _ = dataloader_for_variable_batch_size(
        data, packs, longest, dataloader_num_workers=0, required_microbatches_of_same_seqlen=True,
        sample_padding_fn=lambda sample, length: sample + [-1] * (length - len(sample)),
    )  # fmt: skip
    assert [[len(sample) for sample in batch] for batch in loader] == [[6, 6], [6, 6], [7], [7, 7]]


CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "data_efficiency": {"data_sampling": {"dynamic_batching": {"enabled": True, "max_tokens": 10}}},
}


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, samples: list[list[int]]) -> torch.Tensor:
        return self.weight * sum(map(len, samples))


def run_training(rank: int, folder: str, resume: bool, accumulation: int = 2) -> tuple[list[list[int]], list[float]]:
    """The samples of this rank in two epochs, and the learning rate of every update."""
    packing = {"enabled": True, "max_tokens": 10, "metrics_path": folder, "sequence_picking_order": "random"}
    config = {
        **CONFIG,
        "gradient_accumulation_steps": accumulation,
        "data_efficiency": {"data_sampling": {"dynamic_batching": packing}},
    }
    engine = initialize(model=Mean(), config=config)[0]
    data = [[index] * length for index, length in enumerate(LENGTHS * 3)]
    loader, schedule, keywords = get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed(
        data, engine, batch_seqlens_fn=lambda samples: torch.tensor([len(sample) for sample in samples])
    )
    engine.lr_scheduler = schedule
    if resume:
        engine.load_checkpoint(f"{folder}/checkpoint")
    seen, rates = [], []
    for epoch in range(1 if resume else 2):
        for samples in loader:
            seen.append([sample[0] for sample in samples])
            if engine.is_gradient_accumulation_boundary():
                rates.append(engine.get_lr()[0])
            engine.backward(engine(samples))
            engine.step()
        if epoch == 0 and not resume:
            engine.save_checkpoint(f"{folder}/checkpoint")
    assert not resume or [[s[0] for s in b] for b in engine.deepspeed_io(**keywords)]
    return seen, rates


def run_both(rank: int, folder: str) -> tuple[Any, Any]:
    return run_training(rank, folder, resume=False), run_training(rank, folder, resume=True)


def test_two_ranks_train_on_packs_and_resume_at_the_next_epoch(tmp_path: Path) -> None:
    results = run_ranks(run_both, 2, str(tmp_path))
    (whole, resumed), (other, _) = results
    batches = VariableBatches(LENGTHS * 3, PackingPolicy(max_tokens=10, order="random", seed=1234), 4)
    expected = [pack for epoch in range(2) for pack in batches.epoch(epoch).packs]
    assert [packs for pair in zip(whole[0], other[0], strict=True) for packs in pair] == expected
    sizes = [size for epoch in range(2) for size in batches.epoch(epoch).samples]
    assert whole[1] == other[1] == pytest.approx([0.1 * size / 4 for size in sizes])
    second = len(batches.epoch(1).packs) // 2
    rates = whole[1][-len(batches.epoch(1).samples) :]
    assert resumed == (whole[0][-second:], rates)
    assert run_training(0, str(tmp_path), resume=True, accumulation=4) == (batches.epoch(1).packs, rates)  # one rank


@pytest.mark.parametrize("order", ["dataloader", "random", "seqlen"])
def test_every_number_of_ranks_sees_the_same_packs_from_any_update_on(order: str) -> None:
    batches = VariableBatches(LENGTHS * 6, PackingPolicy(max_tokens=10, order=order, seed=3), 4)
    num_first, second = len(batches.epoch(0).samples), batches.epoch(1).packs
    for update in (0, 1, num_first - 1, num_first + 1):
        packs = batches.epoch(0).packs[update * 4 :] if update < num_first else second[(update - num_first) * 4 :]
        for world in (1, 2, 4):
            samplers = [PackSampler(batches.epoch, world, rank, lambda update=update: update) for rank in range(world)]
            places = [place for group in zip(*samplers, strict=True) for place in group]
            assert [batches.epoch(epoch).packs[number] for epoch, number in places] == packs


def run_analysis(rank: int, folder: str) -> None:
    data = [[index] * length for index, length in enumerate(LENGTHS)]
    function = [lambda samples: torch.tensor([len(sample) for sample in samples])]
    options: dict[str, Any] = {
        "metric_names": ["seqlen"], "metric_functions": function, "metric_types": ["single_value_per_sample"],
    }  # fmt: skip
    DistributedDataAnalyzer(data, save_path=f"{folder}/together", batch_size=3, **options).run_map_reduce()
    DataAnalyzer(data, 2, rank, save_path=f"{folder}/workers", batch_size=3, **options).run_map_reduce()
    if rank == 0:
        DataAnalyzer(data, save_path=f"{folder}/alone", batch_size=3, **options).run_map_reduce()


def test_ranks_analyse_together_what_one_process_finds(tmp_path: Path) -> None:
    run_ranks(run_analysis, 2, str(tmp_path))
    alone = {path.name: path.read_bytes() for path in (tmp_path / "alone/seqlen").iterdir() if path.suffix != ".npz"}
    assert len(alone) == 8
    for way in ("together", "workers"):
        found = {path.name: path.read_bytes() for path in (tmp_path / way / "seqlen").iterdir()}
        assert found == alone


@pytest.mark.parametrize(
    ("section", "key", "words"),
    [
        ({"enabled": True}, "dynamic_batching.max_tokens", "is required"),
        ({"enabled": True, "max_tokens": 0}, "dynamic_batching.max_tokens", "must be"),
        ({"enabled": True, "max_tokens": 9, "min_batch_size": 3, "max_batch_size": 2}, "max_batch_size", "at least"),
        ({"enabled": True, "max_tokens": 9, "lr_scaling_method": "cubic"}, "lr_scaling_method", "must be"),
        ({"enabled": True, "max_tokens": 9, "sentence_picking_order": "random"}, "sentence_picking_order", ""),
    ],
)
def test_wrong_sections_are_named(section: dict[str, Any], key: str, words: str) -> None:
    config = {**CONFIG, "data_efficiency": {"data_sampling": {"dynamic_batching": section}}}
    with pytest.raises(ConfigError) as caught:
        resolve(config, world_size=1)
    assert any(key in problem.path and words in problem.rule for problem in caught.value.problems)


def test_trainers_loader_refuses_it() -> None:
    with pytest.raises(ValueError, match="group_by_length"):
        sampler_for(CONFIG, 8, 2)


def test_without_lengths_or_section_the_call_says_what_to_give() -> None:
    engine = initialize(model=Mean(), config=CONFIG)[0]
    with pytest.raises(ValueError, match="give dataset_seqlens"):
        get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed([[1]], engine)
    plain = {key: value for key, value in CONFIG.items() if key != "data_efficiency"}
    engine = initialize(model=Mean(), config=plain)[0]
    with pytest.raises(RuntimeError, match="not enabled"):
        get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed([[1]], engine)

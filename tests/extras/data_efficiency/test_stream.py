"""Streams of samples: only admitted ones, clusters before repeats, independent of ranks, updates and resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_zero.extras.data_efficiency.analyzer import ACCUMULATED, PER_SAMPLE, DataAnalyzer, IndexedRows, fitting_dtype
from hf_zero.extras.data_efficiency.sampling import (
    DeepSpeedDataSampler,
    RankBatches,
    SampleStream,
    StreamSampler,
    reshape,
    sequence_length,
    truncate,
)
from hf_zero.extras.data_efficiency.section import DifficultyPolicy, MetricPolicy, SamplingPolicy

VALUES = [5, 3, 5, 2, 9, 3, 7, 2, 2, 9, 5, 3]


def analyse(folder: Path, values: list[int], name: str = "seqlen", **options: Any) -> str:
    DataAnalyzer(
        values,
        metric_names=[name],
        metric_functions=[lambda batch: torch.tensor(batch)],
        metric_types=[PER_SAMPLE],
        save_path=str(folder),
        batch_size=4,
        **options,
    ).run_map_reduce()
    return str(folder / name / name)


def metric(prefix: str, low: int, high: int, steps: int, *, percentile: bool = False, name: str = "m") -> MetricPolicy:
    return MetricPolicy(
        name=name,
        difficulty=DifficultyPolicy(schedule="fixed_linear", minimum=low, maximum=high, total_steps=steps),
        by_percentile=percentile,
        index_to_sample=prefix + ("_index_to_sample_percentile_merged" if percentile else "_index_to_sample"),
        index_to_metric=prefix + "_index_to_metric",
    )


def policy(*metrics: MetricPolicy, seed: int = 3, epochs: int = 1000) -> SamplingPolicy:
    return SamplingPolicy(seed=seed, num_epochs=epochs, num_workers=0, metrics=metrics)


@pytest.mark.parametrize("options", [{}, {"num_workers": 3}, {"num_threads": 2}])
def test_the_analyzers_files(tmp_path: Path, options: dict[str, Any]) -> None:
    prefix = analyse(tmp_path, VALUES, **options)
    names = IndexedRows(prefix + "_index_to_metric")
    assert names.flat().tolist() == [2, 3, 5, 7, 9] and names.lengths.tolist() == [1] * 5 and names.dtype == np.uint8
    rows = IndexedRows(prefix + "_index_to_sample")
    parts = np.split(rows.flat(), np.cumsum(rows.lengths)[:-1])
    assert [part.tolist() for part in parts] == [[3, 7, 8], [1, 5, 11], [0, 2, 10], [6], [4, 9]]
    assert IndexedRows(prefix + "_sample_to_metric").flat().tolist() == VALUES
    index = Path(prefix + "_index_to_metric.idx").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00" and index[9:17] == (1).to_bytes(8, "little") and index[17] == 1
    assert len(index) == 34 + 5 * 12 + 2 * 8
    samples = Path(prefix + "_index_to_sample.idx").read_bytes()
    assert np.frombuffer(samples, "<i8", 5, 34 + 4 * 5).tolist() == [0, 3, 6, 9, 10], "offsets of the rows in bytes"


def test_totals_and_metrics_that_are_wrong(tmp_path: Path) -> None:
    def counts(batch: Any) -> torch.Tensor:
        return torch.bincount(torch.tensor(batch), minlength=10)

    DataAnalyzer(
        VALUES,
        metric_names=["total"],
        metric_functions=[counts],
        metric_types=[ACCUMULATED],
        save_path=str(tmp_path),
        batch_size=5,
    ).run_map_reduce()
    total = IndexedRows(tmp_path / "total" / "total_metric_value").flat()
    assert total.tolist() == np.bincount(VALUES, minlength=10).tolist()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"metric_functions": [lambda batch: torch.ones(2)]}, "vector of integers"),
        ({"metric_functions": [lambda batch: torch.ones(7).long()]}, "returned 7 values for a batch of 4"),
        ({"metric_functions": [torch.tensor], "metric_dtypes": [torch.int32]}, "metric_dtypes requires int32"),
        ({"metric_functions": []}, "one of each"),
        ({"metric_functions": [torch.tensor], "metric_types": ["x"]}, "must be single_value_per_sample"),
    ]
    for options, words in wrong:
        with pytest.raises(ValueError, match=words):
            DataAnalyzer(
                VALUES,
                **{
                    "metric_names": ["a"],
                    "metric_types": [PER_SAMPLE],
                    "save_path": str(tmp_path),
                    "batch_size": 4,
                    **options,
                },
            ).run_map_reduce()
    assert fitting_dtype(-1, 5) is np.int8 and fitting_dtype(0, 256) is np.uint16


def test_only_what_is_easy_enough_and_clusters_before_repeats(tmp_path: Path) -> None:
    prefix = analyse(tmp_path, VALUES)
    stream = SampleStream(policy(metric(prefix, 3, 9, 6)), len(VALUES), 4)
    seen: list[int] = []
    for update in range(1, 9):
        allowed = min(9, 3 + update)
        batch = stream.batch().tolist()
        assert len(set(batch)) == 4 and all(VALUES[sample] <= allowed for sample in batch)
        seen += batch
    assert set(seen) == set(range(12))
    flat = SampleStream(policy(metric(prefix, 9, 9, 1)), len(VALUES), 4)
    passes = [sorted(s for _ in range(3) for s in flat.batch().tolist()) for _ in range(3)]
    assert passes == [list(range(12))] * 3


def test_percentiles_with_few_samples_and_several_metrics(tmp_path: Path) -> None:
    """Fewer samples than points of the percentile gave an empty cluster, and the draw failed."""
    prefix = analyse(tmp_path, VALUES)
    stream = SampleStream(policy(metric(prefix, 50, 100, 5, percentile=True)), len(VALUES), 2)
    assert all(VALUES[sample] <= 5 for sample in stream.batch())
    other = analyse(tmp_path, list(range(12)), "position")
    both = SampleStream(policy(metric(prefix, 3, 9, 3), metric(other, 5, 11, 3, name="p")), 12, 2)
    first = both.batch()
    assert all(VALUES[sample] <= 5 and sample <= 7 for sample in first)
    whole = SampleStream(policy(), 12, 12)
    assert sorted(whole.batch().tolist()) == list(range(12))
    with pytest.raises(ValueError, match="no sample is easy enough at update 1"):
        SampleStream(policy(metric(prefix, 1, 2, 100)), 12, 2).batch()
    with pytest.raises(ValueError, match="names sample 11, but the data set has 8"):
        SampleStream(policy(metric(prefix, 1, 9, 1)), 8, 2)


@pytest.mark.parametrize("at", [0, 1, 7, 20])
def test_resuming_at_any_update_and_number_of_ranks(tmp_path: Path, at: int) -> None:
    """The state of the random generator was not saved, so that a resumed run got different batches."""
    prefix = analyse(tmp_path, VALUES)
    settings = policy(metric(prefix, 2, 9, 15))
    whole = SampleStream(settings, 12, 4)
    expected = [whole.batch().tolist() for _ in range(30)]
    again = SampleStream(settings, 12, 4)
    again.seek(at)
    assert [again.batch().tolist() for _ in range(30 - at)] == expected[at:]
    for world, micro in ((1, 1), (1, 4), (2, 2), (2, 1), (4, 1)):
        loaders = [iter(RankBatches(SampleStream(settings, 12, 4), micro, world, r, lambda: at)) for r in range(world)]
        for update in expected[at : at + 5]:
            found: list[int] = []
            while len(found) < 4:
                found += [sample for loader in loaders for sample in next(loader)]
            assert found == update


def test_epochs_of_trainers_loader(tmp_path: Path) -> None:
    settings = policy(metric(analyse(tmp_path, VALUES), 2, 9, 15))
    straight = StreamSampler(SampleStream(settings, 12, 5))
    assert len(straight) == 10
    epochs = [list(straight) for _ in range(3)]
    later = StreamSampler(SampleStream(settings, 12, 5))
    later.set_epoch(2)
    assert list(later) == epochs[2] and epochs[0] != epochs[1]


def test_deepspeeds_sampler(tmp_path: Path) -> None:
    prefix = analyse(tmp_path, VALUES)
    section = {
        "seed": 3,
        "data_sampling": {
            "num_epochs": 2,
            "curriculum_learning": {
                "enabled": True,
                "curriculum_metrics": {
                    "m": {
                        "difficulty_type": "value",
                        "clustering_type": "schedule_based",
                        "min_difficulty": 2,
                        "max_difficulty": 9,
                        "index_to_sample_path": prefix + "_index_to_sample",
                        "index_to_metric_path": prefix + "_index_to_metric",
                        "schedule_type": "fixed_linear",
                        "schedule_config": {"total_curriculum_step": 3, "difficulty_step": 1},
                    }
                },
            },
        },
    }

    def sampler() -> DeepSpeedDataSampler:
        return DeepSpeedDataSampler(section, 12, 2, 0, 1, None, 2, 0)

    batches = list(sampler())
    assert len(batches) == len(sampler()) == 12 and all(len(batch) == 2 for batch in batches)
    first = sampler()
    drawn = iter(first)
    for _ in range(4):
        next(drawn)
    again = sampler()
    again.load_state_dict(first.state_dict())
    assert list(again) == batches[4:]
    with pytest.raises(ValueError, match="not enabled"):
        DeepSpeedDataSampler({}, 12, 2, 0, 1, None, 2, 0)


def test_lengths() -> None:
    ids = torch.arange(24).view(2, 12)
    batch = {"input_ids": ids, "labels": ids, "kind": torch.tensor([1, 2]), "mask": torch.ones(2, 1, 12, 12)}
    cut = truncate(batch, 5)
    assert sequence_length(cut) == 5 and cut["kind"].shape == (2,) and cut["mask"].shape == (2, 1, 5, 5)
    assert cut["input_ids"].tolist() == ids[:, :5].tolist()
    padded = {"input_ids": ids, "attention_mask": torch.ones(2, 12)}
    padded["attention_mask"][0, :7] = 0
    assert truncate(padded, 4)["input_ids"].tolist() == ids[:, 8:].tolist()
    folded = reshape({"input_ids": ids}, 5)["input_ids"]
    expected = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [12, 13, 14, 15, 16], [17, 18, 19, 20, 21], [7, 8, 9, 10, 11]]
    assert folded.tolist() == expected
    assert truncate({"x": ids}, 2)["x"] is ids and reshape({"input_ids": ids}, 12)["input_ids"] is ids
    with pytest.raises(ValueError, match="kind has the shape"):
        reshape(batch, 5)

"""From the section dynamic_batching to its policy, or to what is wrong with it."""

from __future__ import annotations

from hf_zero.config.errors import ABSENT, Problem
from hf_zero.config.features.policies import PackingPolicy
from hf_zero.config.schema.data import DataSampling

_PATH = "data_efficiency.data_sampling.dynamic_batching"


def packing_of(section: DataSampling | None, seed: int, problems: list[Problem]) -> PackingPolicy | None:
    """None where it is off; `problems` gets what keeps it from being on."""
    given = None if section is None else section.dynamic_batching
    if section is None or given is None or not given.enabled:
        return None
    if given.max_tokens is None:
        rule, fix = "is needed where dynamic_batching is on", "write the most tokens that one pack may have"
        problems.append(Problem(f"{_PATH}.max_tokens", ABSENT, rule, fix))
        return None
    if given.max_batch_size is not None and given.max_batch_size < given.min_batch_size:
        rule = f"must be at least min_batch_size ({given.min_batch_size})"
        problems.append(Problem(f"{_PATH}.max_batch_size", given.max_batch_size, rule, "raise it"))
        return None
    if section.curriculum_learning is not None and section.curriculum_learning.enabled:
        rule = "both choose the samples of a batch"
        paths = "data_efficiency.data_sampling.dynamic_batching, data_efficiency.data_sampling.curriculum_learning"
        problems.append(Problem(paths, True, rule, "switch one off"))
        return None
    return PackingPolicy(
        max_tokens=given.max_tokens,
        min_samples=given.min_batch_size,
        max_samples=given.max_batch_size,
        order=given.sequence_picking_order,
        scaling=given.lr_scaling_method,
        seed=seed,
        metrics_path=given.metrics_path,
        num_workers=section.num_workers,
        pin_memory=section.pin_memory,
        verbose=given.verbose,
    )

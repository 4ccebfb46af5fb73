"""Sizes of the groups that share states, gathers and matrices: their keys, and whether they divide the world."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from hf_zero.config.errors import Problem
from hf_zero.config.schema import Root
from hf_zero.config.schema.root import HfZero
from hf_zero.config.schema.training import TensorParallel
from hf_zero.config.schema.zero import Zero

MICS, SHARD_GROUP = "zero_optimization.mics_shard_size", "hf_zero.shard_group"
HPZ = "zero_optimization.zero_hpz_partition_size"
GROUP_KEYS = (MICS, SHARD_GROUP)


def shard_size_in(zero: Zero, own: HfZero) -> int | Literal["host"] | None:
    """Return the number of ranks that share the states of one model copy; None: all ranks."""
    if zero.stage == 0:
        return None
    return zero.mics_shard_size if zero.mics_shard_size > 0 else own.shard_group


def gather_size_in(zero: Zero, own: HfZero) -> int | Literal["host"] | None:
    """Return the size of the groups that gather parameters for use; "host": one host; None: the whole shard group."""
    if zero.stage == 3 and zero.zero_hpz_partition_size > 1:
        return zero.zero_hpz_partition_size
    in_two_hops = zero.stage == 3 and zero.mics_hierarchical_params_gather and shard_size_in(zero, own) is not None
    return "host" if in_two_hops else None


def group_problems(
    config: Root, world_size: int, host_sizes: tuple[int, ...], tensor_size: int = 1
) -> Iterator[Problem]:
    """
    Args:
        host_sizes: the number of ranks of every host; empty if not known yet.
        tensor_size: of so many ranks, which stand side by side, one has the same parts of the weights as one of others:
            states are shared among these.
    """
    if world_size % tensor_size:
        return  # reported as a separate problem
    world_size //= tensor_size
    whole = all(size % tensor_size == 0 for size in host_sizes)
    host_sizes = tuple(size // tensor_size for size in host_sizes) if whole else ()
    zero, own = config.zero_optimization or Zero(), config.hf_zero or HfZero()
    mics, ours = zero.mics_shard_size, own.shard_group
    if mics == 0 or mics < -1:
        yield Problem(MICS, mics, "must be a number of ranks, or -1 for all", "give a divisor of the number of ranks")
    if zero.stage == 0:
        return
    if mics > 0 and ours is not None and ours != mics:
        rule = f"{SHARD_GROUP} is the same setting, with another value ({ours})"
        yield Problem(MICS, mics, rule, f"keep one of the two keys, for example {SHARD_GROUP}")
    for path, size in ((MICS, mics if mics > 0 else None), (SHARD_GROUP, ours)):
        if isinstance(size, int) and world_size % size:
            rule = f"the number of ranks, {world_size}, is not a multiple of {size}"
            yield Problem(path, size, rule, f"give a divisor of {world_size}, or start another number of ranks")
    yield from _second_shard_problems(zero, own, world_size, host_sizes)
    if ours == "host" and len(set(host_sizes)) > 1:
        counts = ", ".join(map(str, host_sizes))
        rule = f"each host holds a copy, so all must have the same number of ranks, not {counts}"
        yield Problem(SHARD_GROUP, ours, rule, "start the same number on every host, or give a number of ranks")


def _second_shard_problems(zero: Zero, own: HfZero, world_size: int, host_sizes: tuple[int, ...]) -> Iterator[Problem]:
    """Check that hpZ's groups lie in one host and one shard group. On a single host, larger values mean all ranks."""
    size, shard = gather_size_in(zero, own), shard_size_in(zero, own)
    if not isinstance(size, int):
        return
    smallest = min(host_sizes, default=world_size)
    if len(host_sizes) > 1 and size > smallest:
        rule = f"second shards must be within a host, but one host only has {smallest} ranks"
        yield Problem(HPZ, size, rule, f"give {smallest} or a divisor of it; 1 disables them")
        return
    within = smallest if shard == "host" else shard or world_size
    if shard is not None and size > within:
        rule = f"second shards must be within a shard group, which has {within} ranks"
        yield Problem(HPZ, size, rule, f"give a divisor of {within}; 1 disables them")
    elif size < within and (within % size or any(each % size for each in host_sizes if len(host_sizes) > 1)):
        counts = f"{within} ranks" if within % size else f"hosts with {', '.join(map(str, host_sizes))} ranks"
        rule = f"{counts} cannot be divided into groups of {size}"
        yield Problem(HPZ, size, rule, "give a divisor of the number of ranks per host; 1 disables second shards")


TENSOR = "tensor_parallel.autotp_size"


def tensor_size_in(config: Root) -> int:
    """Return the configured size of the tensor-parallel groups."""
    return max(1, (config.tensor_parallel or TensorParallel()).autotp_size)


def tensor_problems(config: Root, world_size: int, sequence_size: int, tensor_size: int) -> Iterator[Problem]:
    section = config.tensor_parallel or TensorParallel()
    group = 1 if section.tp is None else section.tp.tp_size
    if group not in (1, tensor_size):
        yield Problem("tensor_parallel.tp.tp_size", group, f"autotp_size is {tensor_size}", "remove it")
    if section.autotp_size > 1 and section.autotp_size != tensor_size:
        rule = f"the script asks for {tensor_size} ranks (mpu, tp_model_init)"
        yield Problem(TENSOR, section.autotp_size, rule, f"remove it, or write {tensor_size}")
    if tensor_size == 1:
        return
    if world_size % tensor_size:
        rule = f"world size = data ranks x ranks per tensor group does not hold: {world_size} != n x {tensor_size}"
        fix = f"give a divisor of {world_size}, or start a multiple of {tensor_size} ranks"
        yield Problem(TENSOR, tensor_size, rule, fix)
    elif world_size % (tensor_size * sequence_size):
        ranks = f"{world_size} != n x {sequence_size} x {tensor_size}"
        rule = f"world size = data ranks x ranks per sequence x ranks per tensor group does not hold: {ranks}"
        yield Problem(TENSOR, tensor_size, rule, f"start a multiple of {tensor_size * sequence_size} ranks")
    if section.partition_config is not None:
        rule = "layers are cut by transformers' plan; custom rules are not supported"
        fix = "remove it, and set tp_plan on the model, with transformers' styles"
        yield Problem("tensor_parallel.partition_config", section.partition_config, rule, fix)
    if section.vocab_parallel_lm_head:
        rule = "logits are whole on every rank, as losses expect them"
        yield Problem("tensor_parallel.vocab_parallel_lm_head", True, rule, "remove it, or set it to false")

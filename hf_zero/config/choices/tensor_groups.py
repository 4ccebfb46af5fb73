"""How many ranks hold parts of the same matrices, and what does not go with it."""

from __future__ import annotations

from collections.abc import Iterator

from hf_zero.config.errors import Problem
from hf_zero.config.schema import Root
from hf_zero.config.schema.training import TensorParallel

TENSOR = "tensor_parallel.autotp_size"


def tensor_size_in(config: Root) -> int:
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
        rule = "layers are cut by transformers' plan; rules of one's own are not read"
        fix = "remove it, and set tp_plan on the model, with the styles of transformers"
        yield Problem("tensor_parallel.partition_config", section.partition_config, rule, fix)
    if section.vocab_parallel_lm_head:
        rule = "logits are whole on every rank, as losses expect them"
        yield Problem("tensor_parallel.vocab_parallel_lm_head", True, rule, "remove it, or set it to false")

"""Tensor parallelism: the section, and whether its groups divide the ranks."""

from __future__ import annotations

from typing import Any

from hf_zero.config.errors import Edit
from hf_zero.config.rules import RANKS, Ranks, Rule
from hf_zero.config.schema.batch import SEQUENCE, TENSOR
from hf_zero.config.schema.fields import Count, Flag, Positive, Section, check, detail, ignored, supported


class TensorParallelGroup(Section):
    """The tensor-parallel group."""

    tp_size: Positive = check(1, "Ranks per group: 1 or autotp_size.")
    tp_group: Any = detail(None, "Group object.")
    mpu: Any = detail(None, "Model-parallel unit.")


def _other_size(size: int, ranks: Ranks) -> object:
    """Whether the config asks for another size than the program."""
    return size > 1 and size != ranks.tensor_size and {"size": ranks.tensor_size}


def _undivided(ranks: Ranks, *, with_sequences: bool) -> object:
    world, tensor, sequence = ranks.world_size, ranks.tensor_size, ranks.sequence_size
    facts = {"value": tensor, "world": world, "size": tensor, "sequence": sequence, "parts": tensor * sequence}
    breaks = world % tensor == 0 and world % (tensor * sequence) if with_sequences else world % tensor
    return tensor > 1 and breaks and facts


class TensorParallel(Section):
    """Automatic tensor parallelism."""

    autotp_size: Count = supported(0, "Size of tensor-parallel groups; 0 and 1: no tensor parallelism.", unit="ranks")
    tp_overlap_comm: Flag = ignored(
        False, "Overlap its collectives.", why="gradients of inputs are summed where autograd needs them"
    )
    preset_model: str | None = ignored(
        None, "Known model family.", why="transformers' own plan says which layers are cut"
    )
    partition_config: Any = check(None, "Custom partition rules: refused with autotp_size; set the model's tp_plan.")
    vocab_parallel_lm_head: Flag | None = check(
        None, "Keep logits of a part of the vocabulary: with autotp_size, true needs hf_zero.tiled_loss, which does so."
    )
    vocab_parallel_ce_backend: str = ignored("torch", "Loss implementation.", why="hf_zero.tiled_loss has its own")
    dtype: Any = ignored(None, "Dtype.", why="the sections bf16 and fp16 decide", met=True)
    tp: TensorParallelGroup | None = detail(None, "Group of ranks.", names=("tensor_parallel",))

    rules = (
        Rule(
            keys=("tensor_parallel.tp.tp_size", RANKS),
            broken=lambda size, ranks: size not in (1, ranks.tensor_size) and {"size": ranks.tensor_size},
            rule="autotp_size is {size}",
            fix="remove it",
            edit=Edit.at("tensor_parallel.tp.tp_size"),
        ),
        Rule(
            keys=(TENSOR, RANKS),
            broken=_other_size,
            rule="the script asks for {size} ranks (mpu, tp_model_init)",
            fix="remove it, or write {size}",
            edit=Edit.at(TENSOR),
            unusable=True,
        ),
        Rule(
            keys=(TENSOR, RANKS),
            broken=lambda size, ranks: _undivided(ranks, with_sequences=False),
            rule="world size = data ranks x ranks per tensor group does not hold: {world} != n x {size}",
            fix="give a divisor of {world}, or start a multiple of {size} ranks",
        ),
        Rule(
            keys=(TENSOR, RANKS, SEQUENCE),
            broken=lambda size, ranks, sequence: _undivided(ranks, with_sequences=True),
            rule="world size = data ranks x ranks per sequence x ranks per tensor group does not hold: "
            "{world} != n x {sequence} x {size}",
            fix="start a multiple of {parts} ranks",
        ),
        Rule(
            keys=("tensor_parallel.partition_config", RANKS),
            broken=lambda custom, ranks: ranks.tensor_size > 1 and custom is not None,
            rule="layers are cut by transformers' plan; custom rules are not supported",
            fix="set tp_plan on the model, with transformers' styles, and remove it",
        ),
        Rule(
            keys=("tensor_parallel.vocab_parallel_lm_head", "hf_zero.tiled_loss", RANKS),
            broken=lambda parallel, tiled, ranks: ranks.tensor_size > 1 and parallel and not tiled,
            rule="logits are whole on every rank, as losses expect them, unless the loss is tiled",
            fix='set "hf_zero": {{"tiled_loss": true}}, or remove it',
            edit=Edit.at("hf_zero.tiled_loss", True),
        ),
    )

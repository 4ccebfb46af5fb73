"""Several dimensions of a mesh: results of one plain process, and checkpoints that move between shapes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from deepspeed.utils import groups
from torch import nn

from hf_zero.config import ConfigError, resolve
from tests.mesh.training import Shape, compare, differences, engine_of, plain_run
from tests.support.one_process import Difference, assert_small, batches, train
from tests.support.ranks import run_ranks
from tests.tensor.models import model_of

Found = dict[str, Difference]

COPIES: dict[str, Any] = {"own": {"shard_group": 1}}
FOUR = {
    "tensor x copies": Shape(tensor=2, **COPIES),
    "tensor x MiCS": Shape(tensor=2, zero={"mics_shard_size": 1}),
    "tensor x hpZ": Shape(tensor=2, zero={"zero_hpz_partition_size": 2}),
    "sequence x copies": Shape(sequence=2, own={"shard_group": 2}),
    "tensor x sequence": Shape(tensor=2, sequence=2),
    "tensor x sequence x copies": Shape(tensor=2, sequence=2, **COPIES),
    "hpZ x shard groups": Shape(zero={"zero_hpz_partition_size": 2}, own={"shard_group": 2}),
}
EIGHT = {
    "tensor x shard groups": Shape(tensor=2, own={"shard_group": 2}),
    "tensor x hpZ": Shape(tensor=2, zero={"zero_hpz_partition_size": 2}),
    "sequence x hpZ x shard groups": Shape(sequence=2, zero={"zero_hpz_partition_size": 2}, own={"shard_group": 4}),
    "hpZ x shard groups": Shape(zero={"zero_hpz_partition_size": 2}, own={"shard_group": 4}),
    "tensor x sequence": Shape(tensor=2, sequence=2),
    "tensor x sequence x shard groups": Shape(tensor=2, sequence=2, own={"shard_group": 2}),
}


# By default those that no pair of tests/products covers.
STAGES = {"tensor x MiCS": 3, "tensor x sequence x copies": 1, "hpZ x shard groups": 3}


def _each(rank: int, shapes: list[tuple[str, Shape, int]], world: int, steps: int, kind: str) -> Found:
    return {
        f"{name}, stage {stage}": compare(shape, stage, world, steps=steps, kind=kind) for name, shape, stage in shapes
    }


def _check(shapes: list[tuple[str, Shape, int]], *, world: int = 4, steps: int = 20, kind: str = "llama") -> None:
    assert_small(run_ranks(_each, world, shapes, world, steps, kind, timeout_s=600))


def _at(shapes: dict[str, Shape], stages: tuple[int, ...]) -> list[tuple[str, Shape, int]]:
    return [(name, shape, stage) for (name, shape), stage in itertools.product(shapes.items(), stages)]


def test_four_ranks_train_as_one_process() -> None:
    _check([(name, FOUR[name], stage) for name, stage in STAGES.items()], steps=4)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_four_ranks_train_as_one_process_at_every_stage() -> None:
    _check(_at(FOUR, (1, 2, 3)))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_eight_ranks_train_as_one_process(stage: int) -> None:
    _check(_at(EIGHT, (stage,)), world=8)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "mixtral", "qwen3_next"])
def test_other_models_train_as_one_process(kind: str) -> None:
    shapes = {name: shape for name, shape in FOUR.items() if shape.tensor > 1}
    _check(_at(shapes, (1, 3)), steps=4, kind=kind)


WAYS = (
    ("tensor x copies", "tensor x sequence"),
    ("tensor x sequence", "hpZ x shard groups"),
    ("hpZ x shard groups", "tensor x hpZ"),
    ("tensor x sequence x copies", "sequence x copies"),
    ("sequence x copies", "tensor x sequence x copies"),
)


IN_DEFAULT = WAYS[0], WAYS[2], WAYS[3]  # with every shape


def _resumed(rank: int, stage: int, ways: tuple[tuple[str, str], ...], folder: str) -> Found:
    """Two updates, saved in one shape and loaded in another, and two more. Every update takes four batches."""
    data, model = batches(16), model_of("llama")
    plain = plain_run("llama", steps=4, together=4)
    found: Found = {}
    for number, (first, then) in enumerate(ways):
        engine = _taking_four(model, FOUR[first], stage)
        before = train(engine, data[:8])
        engine.save_checkpoint(folder, f"{number}")
        engine.destroy()
        engine = _taking_four(model, FOUR[then], stage)
        engine.load_checkpoint(folder, f"{number}")
        after = train(engine, data[8:])
        expected = replace(plain, losses=plain.losses[8:]).seen_by(engine.groups.data.rank, engine.groups.data.size)
        engine.destroy()
        found[f"{first} to {then}"] = differences(replace(after, norms=before.norms + after.norms), expected)
    return found


def _taking_four(model: nn.Module, shape: Shape, stage: int) -> Any:
    """An engine whose updates take four batches."""
    return engine_of(model, shape, stage, accumulated=shape.tensor * shape.sequence)


@pytest.mark.parametrize(
    ("stage", "ways"),
    [
        pytest.param(3, IN_DEFAULT, id="3, some"),
        *(pytest.param(n, WAYS, id=f"{n}", marks=pytest.mark.slow) for n in (1, 2, 3)),
    ],
)
def test_checkpoints_go_from_shape_to_shape(stage: int, ways: tuple[tuple[str, str], ...], tmp_path: Path) -> None:
    assert_small(run_ranks(_resumed, 4, stage, ways, str(tmp_path), timeout_s=300))


def _registered(rank: int) -> tuple[dict[str, Any], tuple[float, ...]]:
    """Neighbours form sequence groups, created by a program before the config adds tensor-parallel groups."""
    mpu = UlyssesSPAttentionHF.register_with_transformers(model_of("llama"), None, 2, micro_batch_size=2)
    engine = engine_of(model_of("llama"), Shape(tensor=2, sequence=2), 2, mpu=mpu)
    told = {
        "sequence": engine.groups.along("sequence").ranks,
        "tensor": engine.groups.along("tensor").ranks,
        "mpu": (engine.mpu.get_sequence_parallel_world_size(), engine.mpu.get_tensor_model_parallel_rank()),
        "data": (engine.mpu.get_data_parallel_world_size(), mpu.get_sequence_data_parallel_world_size()),
        "groups": (groups.get_tensor_model_parallel_world_size(), groups._get_sequence_parallel_world_size()),
    }
    engine.destroy()
    mpu = UlyssesSPAttentionHF.register_with_transformers(model_of("llama"), None, 2, micro_batch_size=2)
    return told, compare(Shape(tensor=2, sequence=2), 2, 4, steps=2, mpu=mpu)


def test_groups_of_a_program_and_of_the_config_cross() -> None:
    for rank, (told, worst) in enumerate(run_ranks(_registered, 4)):
        assert told == {
            "sequence": ((0, 1), (2, 3))[rank // 2],
            "tensor": ((0, 2), (1, 3))[rank % 2],
            "mpu": (2, rank // 2),
            "data": (1, 2),
            "groups": (2, 2),
        }
        assert_small([{"losses, norms and weights": worst}])


def _dealt_out(rank: int) -> list[tuple[int, ...]]:
    """The engine's loader: the first forward checks that ranks of a tensor-parallel group get the same samples."""
    rows = [{name: values[0] for name, values in batch.items()} for batch in batches(4, size=1)]
    engine = engine_of(model_of("llama"), Shape(tensor=2, sequence=2), 1, training_data=rows)
    shapes = []
    for batch in engine.training_dataloader:
        engine.backward(engine(**batch, labels=batch["shift_labels"]).loss)
        engine.step()
        shapes.append(tuple(batch["input_ids"].shape))
    engine.destroy()
    return shapes


def test_an_engines_loader_deals_to_all_dimensions() -> None:
    assert run_ranks(_dealt_out, 4) == [[(2, 6), (2, 6)]] * 4


def test_sizes_must_divide_the_ranks_that_hold_the_same_parts() -> None:
    base = {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 2}}
    parts = r"ranks with the same parts of matrices \(4 / autotp_size 2\), 2, is not a multiple of 4"
    for more, words in (
        ({"hf_zero": {"shard_group": 4}}, parts),
        ({"zero_optimization": {"stage": 2, "mics_shard_size": 4}}, parts),
        ({"sequence_parallel_size": 4}, "x ranks per sequence x ranks per tensor group does not hold: 4 != n x 4 x 2"),
    ):
        with pytest.raises(ConfigError, match=words):
            resolve({"zero_optimization": {"stage": 2}, **base, **more}, world_size=4)
    resolved = resolve({**base, "sequence_parallel_size": 2, "gradient_accumulation_steps": 3}, world_size=8)
    assert (resolved.batch.train_batch_size, resolved.samples_per_update) == (12, 6)

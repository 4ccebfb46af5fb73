"""Experts over ranks and matrices over ranks together: training, checkpoints and adapters as in one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import nn

from hf_zero.comm.mesh import Dimension, Hosts, Mesh, agreeing, consecutive
from hf_zero.comm.parts import held_part
from hf_zero.ds_to_universal import main as ds_to_universal
from tests.experts.test_adapters import adapted
from tests.experts.training import KINDS, batches, engine_of, in_one_process, model_of
from tests.support.one_process import (
    Difference,
    Trained,
    assert_small,
    difference_of_weights,
    differences,
    train,
)
from tests.support.ranks import run_ranks

TOGETHER = 4  # batches of an update
Found = dict[str, Difference]


class Shape(NamedTuple):
    """Ranks per tensor group, and per expert group, which have the same parts of matrices; 1: none."""

    stage: int
    tensor: int
    experts: int

    @property
    def width(self) -> int:
        """Ranks that hold all experts."""
        return self.tensor * self.experts if self.experts > 1 else 1

    def engine(self, model: nn.Module, rank: int, world: int, zero: dict[str, Any] | None = None, **more: Any) -> Any:
        more["gradient_accumulation_steps"] = TOGETHER * self.tensor // world
        return engine_of(
            model, self.stage, self.width, rank, zero, tensor_parallel={"autotp_size": self.tensor}, **more
        )


def _differs(engine: Any, found: Trained, plain: Trained) -> Difference:
    return differences(found, plain.seen_by(engine.groups.data.rank, engine.groups.data.size))


def _load_whole_weights(engine: Any) -> None:
    """`load_module_state_dict` failed at a shape after it had written some of the weights."""
    moved = {name: value + 1 for name, value in engine.module_state_dict().items()}
    engine.load_module_state_dict({"module": moved})
    assert all(torch.equal(value, moved[name]) for name, value in engine.module_state_dict().items())


def _each(rank: int, world: int, cases: list[tuple[str, Shape, str]], steps: int, more: dict[str, Any]) -> Found:
    found: Found = {}
    data = batches(TOGETHER * steps)
    plain = {kind: in_one_process(model_of(kind), data, together=TOGETHER) for kind in {case[0] for case in cases}}
    for kind, shape, implementation in cases:
        engine = shape.engine(model_of(kind, implementation), rank, world, **more)
        found[f"{kind}, {shape}, {implementation}"] = _differs(engine, train(engine, data), plain[kind])
        _load_whole_weights(engine)
        engine.destroy()
    return found


def _check(world: int, cases: list[tuple[str, Shape, str]], *, steps: int = 3, **more: Any) -> None:
    assert_small(run_ranks(_each, world, world, cases, steps, more, timeout_s=1200))


def test_four_ranks_train_as_one_process() -> None:
    """A user had to choose between the two: `expert_parallel` beside `tensor_parallel` was refused, because the ranks
    of a tensor group see the same tokens. Each of them now sends its copy to a rank with the same part of the expert,
    and their sum is the expert's output. Parts of Mixtral's 24 features are unequal; GPT-OSS's plan cuts no experts."""
    _check(
        4,
        [
            ("mixtral", Shape(1, 2, 2), "eager"),
            ("mixtral", Shape(3, 2, 2), "grouped_mm"),
            ("qwen3", Shape(2, 2, 2), "batched_mm"),
            ("deepseek", Shape(3, 2, 2), "eager"),
            ("gpt-oss", Shape(2, 2, 2), "eager"),
        ],
    )


def test_models_that_zero_init_has_sharded() -> None:
    """`from_pretrained` after TrainingArguments at stage 3: matrices are cut from shards over all ranks, and experts
    are then distributed from shards over the ranks with the same parts."""
    _check(4, [("mixtral", Shape(3, 2, 2), "eager"), ("qwen3", Shape(3, 2, 2), "eager")], steps=2, in_shards=True)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_and_stages(kind: str) -> None:
    cases = [(kind, Shape(stage, 2, 2), name) for stage in (1, 2, 3) for name in ("eager", "batched_mm", "grouped_mm")]
    _check(4, cases, steps=8)
    _check(8, [(kind, Shape(stage, *sizes), "eager") for stage in (1, 3) for sizes in ((2, 2), (2, 4))], steps=8)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_eight_ranks_with_copies_of_the_states() -> None:
    """Two replicas: in each, two tensor groups together hold all experts."""
    _check(8, [("mixtral", Shape(stage, 2, 2), "eager") for stage in (1, 2, 3)], hf_zero={"shard_group": 2})


def _sizes(rank: int) -> tuple[int, int, int, int, tuple[int, ...], tuple[int, ...]]:
    engine = engine_of(deepspeed.tp_model_init(model_of("mixtral"), 2, torch.float32), 2, 4, rank)
    groups, weight = deepspeed.utils.groups, engine.module.model.layers[0].mlp.experts.down_proj
    part = held_part(weight)
    assert part is not None and weight.tensor_model_parallel and not weight.allreduce
    return (
        groups._get_expert_parallel_world_size(weight.group_name),
        groups._get_expert_parallel_rank(weight.group_name),
        groups._get_expert_data_parallel_world_size(weight.group_name),
        engine.mpu.get_tensor_model_parallel_rank(),
        tuple(weight.shape),
        part.shape,
    )


def test_each_rank_has_parts_of_some_experts() -> None:
    """No rank has the same part of the same experts; parts of 24 features are multiples of 8. The program gives the
    size of tensor groups, and the config that of all experts."""
    experts, hidden, features = 4, 16, 24
    for rank, found in enumerate(run_ranks(_sizes, 4)):
        part = (experts // 2, hidden, 8 if rank % 2 else 16)
        assert found == (2, rank // 2, 1, rank % 2, part, (experts, hidden, features))


def _in_a_tensor_group(rank: int) -> Found:
    found: Found = {}
    data, model = batches(TOGETHER * 2), model_of("mixtral")
    plain = in_one_process(model, data, together=TOGETHER)
    for stage in (0, 3):
        more = {"tensor_parallel": {"autotp_size": 2}, "gradient_accumulation_steps": TOGETHER}
        engine = engine_of(model, stage, 2, rank, **more)
        found[f"stage {stage}"] = _differs(engine, train(engine, data), plain)
        engine.destroy()
    return found


def test_a_tensor_group_that_holds_all_experts() -> None:
    """autoep_size = autotp_size, which DeepSpeed accepts: two ranks hold half of each expert, not half of them."""
    assert_small(run_ranks(_in_a_tensor_group, 2))


def _generated(rank: int, stage: int) -> tuple[list[int], list[int]]:
    """The output for a prompt of this tensor group, with a different length in each; and the dense model's."""
    model, data_rank = model_of("mixtral").eval(), rank // 2
    prompt = batches(2)[data_rank]["input_ids"][:1, : 3 + data_rank]
    options: dict[str, Any] = {"max_new_tokens": 4 + 3 * data_rank, "do_sample": False, "pad_token_id": 0}
    expected: Any = model.generate(prompt, **options)  # type: ignore[operator]
    engine = Shape(stage, 2, 2).engine(model, 0, 4)
    engine.eval()
    with torch.no_grad():
        found = engine.module.generate(prompt, synced_gpus=True, **options)
    return found[0].tolist(), expected[0].tolist()


def test_tensor_groups_generate_texts_of_other_lengths() -> None:
    for found, expected in run_ranks(_generated, 4, 3):
        assert found == expected


def test_the_mesh_of_eight_ranks() -> None:
    tensor = Dimension(name="tensor", groups=consecutive(range(8), 2), samples="same", weights="parts")
    among = (group for ranks in agreeing(8, [tensor]) for group in consecutive(ranks, 2))
    expert = Dimension(name="expert", groups=tuple(among), samples="own", weights="mixed")
    mesh = Mesh.of(Hosts.one(8), dimensions=[tensor, expert])
    assert mesh.shard == mesh.data == ((0, 2, 4, 6), (1, 3, 5, 7)) and mesh.whole_model == tensor.groups
    assert mesh.mixed == expert.groups == ((0, 2), (4, 6), (1, 3), (5, 7))
    inner = mesh.of_parts()
    assert inner is not None and inner.shard == ((0, 4), (2, 6), (1, 5), (3, 7))
    assert inner.whole_model == ((0, 1, 2, 3), (4, 5, 6, 7))


DEFAULT = [(Shape(1, 2, 2), Shape(3, 2, 2)), (Shape(3, 2, 2), Shape(2, 1, 1)), (Shape(2, 1, 2), Shape(1, 2, 2))]
ALL = [
    (Shape(3, 2, 1), Shape(3, 2, 2)),
    (Shape(2, 2, 2), Shape(3, 1, 4)),
    (Shape(0, 2, 1), Shape(1, 2, 2)),
    (Shape(1, 2, 2), Shape(0, 2, 1)),
    (Shape(3, 2, 2), Shape(1, 2, 2)),
]


def _resumed(
    rank: int, kind: str, ways: list[tuple[Shape, Shape]], folder: str, zero: dict[str, Any], has_lora: bool
) -> Found:
    data, model = batches(TOGETHER * 4), adapted(kind) if has_lora else model_of(kind)
    found: Found = {}
    plain = in_one_process(model, data, together=TOGETHER)
    half = in_one_process(model, data[: TOGETHER * 2], together=TOGETHER)
    zero["stage3_gather_16bit_weights_on_model_save"] = True
    for number, (first, then) in enumerate(ways):
        tag = str(number)
        engine = first.engine(model, rank, 4, zero)
        before = train(engine, data[: TOGETHER * 2])
        found[f"{first}"] = _differs(engine, before, half)
        engine.save_checkpoint(folder, tag)
        engine.save_16bit_model(f"{folder}/{tag}", "whole.bin")
        engine.destroy()
        engine = then.engine(model, rank, 4, zero)
        engine.load_checkpoint(folder, tag)
        after = train(engine, data[TOGETHER * 2 :])
        expected = replace(plain, losses=plain.losses[TOGETHER * 2 :])
        both = replace(after, norms=before.norms + after.norms)
        found[f"{first} to {then}"] = _differs(engine, both, expected)
        engine.destroy()
        if rank == 0:
            for whole in (
                get_fp32_state_dict_from_zero_checkpoint(folder, tag),
                torch.load(f"{folder}/{tag}/whole.bin"),
            ):
                found[f"{first}, {len(found)}"] = difference_of_weights(whole, half.weights)
    return found


def _check_resumed(
    ways: list[tuple[Shape, Shape]], folder: Path, kind: str = "mixtral", has_lora: bool = False, **zero: Any
) -> None:
    assert_small(run_ranks(_resumed, 4, kind, ways, str(folder), zero, has_lora, timeout_s=1200))


def test_training_goes_on_with_other_groups(tmp_path: Path) -> None:
    """Files have parts of all experts, which are joined into whole ones, and divided in any other way."""
    _check_resumed(DEFAULT, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["mixtral", "deepseek", "gpt-oss"])
def test_training_goes_on_any_way(kind: str, tmp_path: Path) -> None:
    _check_resumed(DEFAULT + ALL, tmp_path, kind)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_offloaded_training_goes_on(device: str, tmp_path: Path) -> None:
    place = {"device": device, "nvme_path": str(tmp_path)}
    _check_resumed([(Shape(3, 2, 2), Shape(3, 2, 2))], tmp_path, offload_optimizer=place, offload_param=place)


@pytest.mark.slow
def test_adapters_train_and_go_on(tmp_path: Path) -> None:
    """LoRA's A and B of packed experts: one is cut along its features, and both along their experts."""
    _check_resumed([(Shape(2, 2, 2), Shape(3, 2, 2))], tmp_path, has_lora=True)


def _universal(rank: int, folder: str, first: Shape, then: Shape) -> float:
    """The largest difference of a weight after a save, a conversion and a load."""
    model = model_of("mixtral")
    engine = first.engine(model, rank, 4)
    train(engine, batches(TOGETHER))
    before = engine.module_state_dict()
    engine.save_checkpoint(folder, "ours")
    if rank == 0:
        assert ds_to_universal(["--input_folder", f"{folder}/ours", "--output_folder", f"{folder}/all"]) == 0
    engine.groups.world.gather_objects(None)
    engine.destroy()
    engine = then.engine(model, rank, 4, checkpoint={"load_universal": True})
    engine.load_checkpoint(folder, "all")
    after = engine.module_state_dict()
    engine.destroy()
    return difference_of_weights(after, before)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [(Shape(2, 2, 2), Shape(3, 2, 2)), (Shape(3, 1, 2), Shape(1, 2, 2))])
def test_universal_checkpoints(first: Shape, then: Shape, tmp_path: Path) -> None:
    assert max(run_ranks(_universal, 4, str(tmp_path), first, then, timeout_s=300)) == 0

"""Which rank gets which part, and tests on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_zero.api.engine_module import EngineSettings
from hf_zero.comm import LoneCollectives
from hf_zero.comm.parts import HeldPart, held_part, keep_part, whole_shape, whole_value
from hf_zero.config import ConfigError, resolve
from hf_zero.errors import WrongArgument
from hf_zero.layout import Interval
from hf_zero.layout.cuts import Cut
from hf_zero.tensor.adapters import Heads, even, heads
from hf_zero.tensor.groups import TensorGroups, tp_model_init
from hf_zero.tensor.layers import (
    check_first_batch,
    digest,
    enter,
    gather,
    leave,
    partial_vocabulary,
    row_parallel,
    split,
)
from hf_zero.tensor.shard import plan_of, shard_model
from tests.support.one_process import batches
from tests.tensor.models import model_of

ALONE = LoneCollectives()


def test_parts_are_of_whole_units_and_together_everything() -> None:
    assert even(10, 4) == (
        (Interval(0, 3),), (Interval(3, 6),), (Interval(6, 8),), (Interval(8, 10),)
    )  # fmt: skip
    assert even(12, 2, unit=4) == ((Interval(0, 8),), (Interval(8, 12),))
    assert even(12, 2, unit=2, packed=3) == (
        (Interval(0, 2), Interval(4, 6), Interval(8, 10)),
        (Interval(2, 4), Interval(6, 8), Interval(10, 12)),
    )


def test_key_heads_go_with_their_query_heads() -> None:
    assert heads(8, 4, 2) == Heads((4, 4), None, (2, 2))
    assert heads(8, 1, 2) == Heads((4, 4), ((0,), (0,)), (4, 4))
    assert heads(6, 3, 2) == Heads((3, 3), ((0, 0, 1), (1, 2, 2)), (1, 1))
    with pytest.raises(ValueError, match="heads >= ranks per tensor group does not hold: 2 < 4"):
        heads(2, 1, 4)


class Second(LoneCollectives):
    """The second of two ranks, which assumes that the first has zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.size, self.ranks = 1, 2, (0, 1)


def test_a_parameter_in_parts() -> None:
    whole = torch.arange(24.0).view(6, 4)
    part = HeldPart(Second(), Cut((6, 4), 0, even(6, 2, packed=3)))
    parameter = nn.Parameter(whole.clone())
    keep_part(parameter, part)
    assert held_part(parameter) is part and whole_shape(parameter) == (6, 4)
    assert torch.equal(parameter.detach(), whole[1::2])
    expected = whole.clone()
    expected[::2] = 0
    assert torch.equal(whole_value(parameter, parameter.detach()), expected)


def test_alone_everything_is_as_it_was() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    y = leave(ALONE, split(ALONE, gather(ALONE, enter(ALONE, x), [4]), [4]))
    y.sum().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(y, x) and torch.equal(x.grad if x.grad is not None else x, torch.ones_like(x))
    row, table = nn.Linear(4, 5), nn.Embedding(7, 4, padding_idx=0)
    ids, before = torch.arange(7), (row(x), table(torch.arange(7)))
    row_parallel(row, ALONE, [4])
    partial_vocabulary(table, ALONE, 0)
    assert isinstance(row, nn.Linear) and torch.allclose(row(x), before[0]) and torch.equal(table(ids), before[1])
    table(ids).sum().backward()
    gradient = table.weight.grad
    assert gradient is not None and not gradient[0].any() and bool(gradient[1:].all())


def test_a_plan_is_of_this_model() -> None:
    llama, gpt2 = plan_of(model_of("llama")), plan_of(model_of("gpt2"))
    assert llama["model.layers.1.self_attn.q_proj"] == "colwise" and llama["lm_head"].startswith("colwise")
    assert gpt2["transformer.h.0.attn.c_attn"] == "fused_attention"
    with pytest.raises(ValueError, match="unknown styles: sideways"):
        model: Any = model_of("llama")
        model._tp_plan = {"model.layers.*.self_attn.q_proj": "colwise", "lm_head": "sideways"}
        plan_of(model)


def test_one_part_is_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = model_of("mixtral"), batches(1)[0]
    before: Tensor = model(**batch).loss
    shard_model(model, ALONE, torch.device("cpu"))
    check_first_batch(model, ALONE)
    assert torch.allclose(model(**batch).loss, before, atol=1e-6)
    assert digest(batch) == digest(dict(reversed(batch.items()))) != digest(batches(2)[1])


@pytest.mark.parametrize("kind", ["fp8", "4 bit in bf16"])
def test_quantized_weights_are_refused(kind: str) -> None:
    """Of weights in 8 bits with scales beside them, and of those in 4 bits that bitsandbytes stores as floating-point
    numbers, only dtypes were checked: codes would be cut like a matrix, without their scales."""
    model: Any = model_of("llama")
    weight: Any = model.model.layers[1].mlp.up_proj.weight
    weight.requires_grad_(False)
    weight.data = weight.data.to(torch.float8_e4m3fn if kind == "fp8" else torch.bfloat16)
    if kind.startswith("4 bit"):
        weight.quant_state = object()
    with pytest.raises(ValueError, match=r"not quantized, but model\.layers\.1\.mlp\.up_proj\.weight is, in torch\."):
        shard_model(model, ALONE, torch.device("cpu"))


def test_what_programs_say() -> None:
    model = nn.Linear(2, 2)
    assert TensorGroups.given(model) is None and tp_model_init(model, 1, None) is model
    with pytest.raises(WrongArgument, match="already marked for 1 ranks, not 2"):
        tp_model_init(model, 2, None)
    with pytest.raises(WrongArgument, match="1 != n x 2"):
        TensorGroups.of_size(2)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"autotp_size": 3}, "world size = data ranks x ranks per tensor group does not hold: 4 != n x 3"),
        ({"autotp_size": 2, "tp": {"tp_size": 4}}, "autotp_size is 2"),
        ({"autotp_size": 2, "partition_config": {}}, "set tp_plan on the model"),
        ({"autotp_size": 2, "vocab_parallel_lm_head": True}, 'set "hf_zero": {"tiled_loss": true}, or remove it'),
    ],
)
def test_what_the_config_cannot_have(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve({"train_micro_batch_size_per_gpu": 1, "tensor_parallel": more}, world_size=4)


def test_a_tiled_loss_keeps_logits_cut() -> None:
    parallel = {"autotp_size": 2, "vocab_parallel_lm_head": True}
    config = {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": parallel, "hf_zero": {"tiled_loss": True}}
    assert resolve(config, world_size=4).tensor_size == 2


def test_all_ranks_count_in_the_batch_size() -> None:
    """DeepSpeed, accelerate and OpenRLHF count all ranks; hf_zero counted only ranks with different samples."""
    config = {"train_micro_batch_size_per_gpu": 3, "tensor_parallel": {"autotp_size": 2}}
    found = resolve({**config, "train_batch_size": 24}, world_size=4)
    assert (found.batch.train_batch_size, found.batch.accumulation_steps, found.samples_per_update) == (24, 2, 12)
    elastic = {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [2], "version": 0.1}
    found = resolve({"elasticity": elastic, "tensor_parallel": {"autotp_size": 2}}, world_size=4)
    assert found.batch.micro_batch_size * found.batch.accumulation_steps * 4 == found.batch.train_batch_size
    assert found.samples_per_update == resolve({"elasticity": elastic}, world_size=2).batch.train_batch_size
    settings = EngineSettings(resolve(config, world_size=4), 2, 2)
    settings.set_train_batch_size(36)
    assert settings.get_batch_info() == (36, 3, 3) and settings.samples_per_update() == 18

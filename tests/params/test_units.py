"""How stage 3 partitions models into units, and what stays gathered."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_zero.comm.rows import FlatRows, GatherBuffers, Pending
from hf_zero.layout.buckets import KeptRows, MemberSpec, lay_rows
from hf_zero.params.gather_plan import Use, merge_orders, plan_gathers
from hf_zero.params.gathered_modules import assign_units, find_gathered_modules
from hf_zero.params.hooked_modules import set_z3_leaf_modules
from hf_zero.params.unit import LiveElements, Unit, plans_to_unpack
from tests.support.late import split_as_on_cuda
from tests.support.models import tiny_llama


def unit_names(model: nn.Module) -> list[str]:
    return [gathered.name for gathered, _ in assign_units(find_gathered_modules(model))]


def test_a_transformer_block_is_one_unit() -> None:
    assert unit_names(tiny_llama()) == [
        "model.embed_tokens",
        "model.layers.0",
        "model.layers.1",
        "model.norm",
        "lm_head",
    ]


def test_a_tied_head_is_a_gathered_module_without_a_unit() -> None:
    model = tiny_llama(tied=True)
    assert "lm_head" not in unit_names(model)
    head = next(found for found in find_gathered_modules(model) if found.name == "lm_head")
    assert head.parameters == (model.model.embed_tokens.weight,)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(nn.Linear(1, 4).weight)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), Experts()) for _ in range(2)])
        self.moe = Experts()


def test_experts_are_gathered_with_their_router() -> None:
    """Ranks route to different experts; if experts were gathered one by one, ranks would wait for each other."""
    assert unit_names(Mixture()) == ["", "blocks.0", "blocks.1", "moe"]


def test_gathered_modules_are_found_in_steps_that_grow_with_the_layers() -> None:
    """For each block all parameters of the model were counted: 500 layers took 9 s whenever an engine was created."""

    def calls(layers: int) -> int:
        with torch.device("meta"):
            model = nn.Module()
            model.layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(layers))
        counted = 0

        def count(frame: object, event: str, _argument: object) -> None:
            nonlocal counted
            counted += event == "call"

        sys.setprofile(count)
        try:
            assert len(assign_units(find_gathered_modules(model))) == layers
        finally:
            sys.setprofile(None)
        return counted

    few, many = calls(20), calls(80)
    assert many < 4.5 * few, (few, many)


def test_a_leaf_module_is_one_unit_whatever_is_in_it() -> None:
    model = tiny_llama()
    assert len(set_z3_leaf_modules(model, ["LlamaModel"])) == 1
    assert unit_names(model) == ["model", "lm_head"]


def use(unit: int, numel: int = 10, *, trained: bool = True, reads: bool = True) -> Use:
    return Use(units=(unit,), numel=numel, has_trained=trained, reads_in_backward=reads)


def gather_plan(uses: list[Use], live: int = 1000, reuse: int = 1000):  # noqa: ANN201
    return plan_gathers(uses, max_live_numel=live, max_reuse_numel=reuse, prefetch_numel=1)


def test_the_last_unit_needs_no_second_gather_even_at_distance_zero() -> None:
    assert gather_plan([use(0), use(1), use(2)], reuse=0).kept_for_backward == {2}


def test_the_reuse_distance_counts_what_is_gathered_in_between() -> None:
    uses = [use(0), use(1), use(2)]
    assert gather_plan(uses, reuse=20).kept_for_backward == {1, 2}  # unit 2 twice lies between the uses of unit 1
    assert gather_plan(uses, reuse=40).kept_for_backward == {0, 1, 2}


def test_max_live_parameters_bounds_what_is_kept() -> None:
    uses = [use(0), use(1), use(2)]
    assert gather_plan(uses, live=20).kept_for_backward == {1, 2}
    assert gather_plan(uses, live=20).kept_for_inference == {0, 1}
    assert gather_plan(uses, live=9).kept_for_backward == frozenset()


def test_a_tied_head_keeps_the_embedding_when_it_is_near() -> None:
    uses = [use(0, reads=False), use(1), use(2), use(0)]
    assert gather_plan(uses, reuse=19).kept_for_backward == {3}
    assert gather_plan(uses, reuse=20).kept_for_backward >= {0, 3}


def test_backward_does_not_gather_below_the_first_trained_unit() -> None:
    uses = [use(0, trained=False), use(1, trained=False), use(2), use(3, trained=False)]
    assert gather_plan(uses).needed_in_backward == {2, 3}


def test_ranks_that_see_different_parts_agree_on_one_order() -> None:
    assert merge_orders([[0, 3, 1], [0, 3, 2, 1]], 5) == [0, 3, 2, 1, 4]
    assert merge_orders([[1, 0], [0, 1]], 2) == [0, 1]  # a contradiction
    assert merge_orders([], 3) == [0, 1, 2]


def test_receive_buffers_fit_what_is_under_way() -> None:
    """Every buffer was as long as the longest unit (an embedding), which is too much for many small units in flight."""
    buffers, like = GatherBuffers(torch.device("cpu")), torch.empty(0)
    buffers.expect(1000, like.dtype)

    def give(buffer: Tensor) -> None:
        buffers.give(FlatRows(buffer, buffer, 1, Pending()))

    small = [buffers.take(100, like) for _ in range(5)]
    assert [buffer.numel() for buffer in small] == [100] * 5
    for buffer in small:
        give(buffer)
    assert buffers.take(80, like) is small[0]
    long = buffers.take(1000, like)
    assert long.numel() == 1000
    give(long)
    assert buffers.take(900, like) is long
    assert buffers.take(999, like).numel() == 999
    give(long)
    assert buffers.take(400, like) is not long, "more than twice as long"
    assert buffers.take(1000, like) is not long, "free buffers have gone: more than the longest is taken"


@pytest.mark.parametrize("split", [torch.split_with_sizes_copy, split_as_on_cuda], ids=["on the CPU", "on CUDA"])
@pytest.mark.parametrize("kept_rows", [1, 2])
@pytest.mark.parametrize(
    "numels, num_copies",
    [
        ([64, 128, 8, 0, 256], 2),
        ([64, 30, 128, 64], 3),  # 30 is not divisible by 4
        ([4, 64], 2),  # chunks of 1, with a gap before the next
        ([64, 128, 256], 1),  # the whole row
    ],
)
def test_adjacent_parameters_are_unpacked_by_one_call(
    numels: list[int], num_copies: int, kept_rows: int, split: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gather of seven matrices made seven copies and some 75 views: 0.4 ms of the host's time per unit.

    On four ranks of an H100, hpZ computed another loss from the first micro-batch on, with no error: kept rows were
    unpacked from a transposed tensor.
    """
    monkeypatch.setattr(torch, "split_with_sizes_copy", split)
    members = [MemberSpec(index, numel, 0) for index, numel in enumerate(numels)]
    layout = lay_rows(members, world=4, dtype="float32", full_align=16)
    rows = torch.zeros(4, layout.row_numel)
    wanted = [torch.randn(numel) for numel in numels]
    for slot, values in zip(layout.slots, wanted, strict=True):
        for row, chunk in zip(rows, values.split(slot.chunk) if slot.chunk else (), strict=False):
            row[slot.offset : slot.offset + chunk.numel()] = chunk
    kept = KeptRows(group=4 // kept_rows, place=0, count=kept_rows)
    gathered = [rows[kept.row(index) + place] for place in range(kept.group) for index in range(kept.count)]
    views = [torch.zeros(numel) for numel in numels]
    plans = plans_to_unpack(layout, views, kept)
    assert len(plans) == num_copies
    for plan in plans:
        plan.read(torch.stack(gathered).view(kept.group, kept.count, -1))
    assert all(torch.equal(view, values) for view, values in zip(views, wanted, strict=True))


def test_live_elements_follow_gathers_and_releases() -> None:
    """Every prefetch added up the gathered units anew, which grows with the square of their number."""
    live = LiveElements()
    units = [Unit(index, str(index), ()) for index in range(3)]
    for unit, numel in zip(units, (10, 20, 40), strict=True):
        unit.numel, unit.live = numel, live
        unit.gather_persistent(GatherBuffers(torch.device("cpu")))
    assert live.numel == 70
    units[1].is_held = True
    for unit in units:
        unit.release()
    assert live.numel == 20

"""What devices would wait for, as a graph: no program hangs over NCCL, and no memory is used too early.

hf_zero had never run over NCCL when this graph was first drawn. Of sixteen programs seven had a cycle, all of them with
ranks that run different modules: a row that a rank only served to others went back to the pool with an event of its
compute stream, and a rank's own gather could stand behind a reduction that another rank would start later.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from hf_zero.comm import Channel, EngineRows
from hf_zero.comm.negotiation.lockstep import LockstepNegotiation
from hf_zero.device.runtime import DONE, Event
from hf_zero.grads.replicas import ReplicaSums
from hf_zero.layout import buckets
from hf_zero.offload.placement import StagedVector
from hf_zero.params.unit import Unit
from tests.hostile.programs import random_program
from tests.hostile.spec import Call, Forward, Limits, Micro, ModuleSpec, RankMicro
from tests.hostile.spec import Program as HostileProgram
from tests.hostile.threads import GraphRunner
from tests.support.happens_before import Fault, Graph, GraphDevice, GraphWorld
from tests.support.in_process import Deadlock, InProcessWorld, engines_in
from tests.support.late import use

WIDTH = 16
NONE_KEPT = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
FAR_AHEAD = {**NONE_KEPT, "stage3_max_live_parameters": 2000, "stage3_prefetch_bucket_size": 1000}


class Block(nn.Module):
    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=number % 2 == 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class _RunInBackward(torch.autograd.Function):
    """Runs a module in backward, as a layer may that recomputes something."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.module(torch.ones(2, WIDTH))
        return gradient, None


@dataclass(frozen=True)
class Does:
    """What a rank does in a micro-batch beyond its text: see `Program`."""

    image: bool = False
    forward_more: bool = False
    in_backward: bool = False
    spare: str = ""  # "before" or "after" `between`


class TextAndImages(nn.Module):
    """Like a vision-language model: its vision blocks run only for batches with an image."""

    def __init__(self, num_vision: int, num_text: int, between: Callable[[], None]) -> None:
        super().__init__()
        self.vision = nn.ModuleList(Block(number) for number in range(num_vision))
        self.text = nn.ModuleList(Block(number) for number in range(num_text))
        self.spare = Block()
        self.between = between

    def forward(self, x: Tensor, does: Does) -> Tensor:
        if does.image:
            image = torch.ones(2, WIDTH)
            for block in self.vision:
                image = block(image)
            x = x + image
        if does.spare == "before":
            x = self.spare(x)
        self.between()
        if does.spare == "after":
            x = self.spare(x)
        for number, block in enumerate(self.text):
            x = block(x)
            if does.in_backward and number == len(self.text) // 2:
                x = _RunInBackward.apply(x, self.spare)  # type: ignore[no-untyped-call]
        return x.square().mean()


ALIKE = Does()
OnRank = Callable[[int, int], Does]  # (rank, step)


@dataclass(frozen=True)
class Program:
    """What ranks do.

    Attributes:
        does: what each rank does beyond its text: run vision blocks, one more forward without gradients between forward
            and backward, or another module in the middle of backward.
        evaluates: all ranks evaluate before every other update.
        sums: ranks sum something in the middle of forward, on the compute stream, over groups of that many; 0: nothing.
        is_direct: parameters of any size are gathered where they are used, and gradients reduced where they are.
    """

    does: OnRank = lambda rank, step: ALIKE
    num_vision: int = 6
    num_text: int = 6
    size: int = 2
    steps: int = 4
    micro: int = 1
    zero: dict[str, Any] = field(default_factory=lambda: NONE_KEPT)
    evaluates: bool = False
    sums: int = 0
    is_direct: bool = False


def on_first(**what: bool) -> OnRank:
    return lambda rank, step: Does(**what) if rank == 0 else ALIKE


PROGRAMS = {
    "alike": Program(lambda rank, step: Does(image=True)),
    "alike, all kept": Program(lambda rank, step: Does(image=True), zero={}),
    "alike, far ahead": Program(lambda rank, step: Does(image=True), zero=FAR_AHEAD),
    "alike, one reduction at a time": Program(zero={**NONE_KEPT, "overlap_comm": False}),
    "alike, 3 micro-batches, 4 ranks": Program(lambda rank, step: Does(image=True), size=4, micro=3),
    "alike, evaluations between": Program(zero=FAR_AHEAD, evaluates=True, steps=6),
    "alike, hpZ 2 of 4": Program(size=4, zero={**NONE_KEPT, "zero_hpz_partition_size": 2}),
    "alike, shard groups of 2 of 4": Program(size=4, zero={**NONE_KEPT, "mics_shard_size": 2}),
    "alike, offload": Program(
        zero={**NONE_KEPT, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    ),
    "alike, updates beside forward": Program(zero={**NONE_KEPT, "offload_optimizer": {"device": "cpu"}}),
    "alike, a half updated beside forward": Program(
        zero={**FAR_AHEAD, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}, evaluates=True, steps=5
    ),
    "images on one rank, updates beside forward": Program(
        on_first(image=True), micro=2, zero={**NONE_KEPT, "offload_optimizer": {"device": "cpu"}}
    ),
    "one rank runs a forward more, updates beside forward": Program(
        on_first(forward_more=True), num_text=10, steps=3, zero={**NONE_KEPT, "offload_optimizer": {"device": "cpu"}}
    ),
    "alike, stage 2": Program(zero={"stage": 2}),
    "images on one rank, 4 vision blocks": Program(on_first(image=True), num_vision=4, num_text=4, steps=3),
    "images on one rank, 12 vision blocks": Program(on_first(image=True), num_vision=12, num_text=4, steps=3),
    "images on one rank, all kept": Program(on_first(image=True), num_vision=12, zero={}),
    "images on one rank, far ahead": Program(on_first(image=True), num_vision=12, zero=FAR_AHEAD),
    "images on one rank, 3 micro-batches": Program(on_first(image=True), num_vision=12, micro=3),
    "images on one rank, offload": Program(
        on_first(image=True),
        micro=2,
        zero={**NONE_KEPT, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
    ),
    "images on one rank, hpZ 2 of 4": Program(
        on_first(image=True), size=4, zero={**NONE_KEPT, "zero_hpz_partition_size": 2}
    ),
    "images on one rank of each pair, shard groups of 2 of 4": Program(
        lambda rank, step: Does(image=rank in (0, 3)), size=4, zero={**NONE_KEPT, "mics_shard_size": 2}
    ),
    "images on both, later on one": Program(lambda rank, step: Does(image=rank == 0 or step < 4), num_text=4, steps=6),
    "images on one rank in turn": Program(lambda rank, step: Does(image=(rank + step) % 2 == 0), num_text=4, steps=6),
    "images on one rank, a sum over all before the text": Program(on_first(image=True), sums=2),
    "images on one pair, sums over pairs": Program(lambda rank, step: Does(image=rank < 2), size=4, sums=2),
    "one rank runs a forward more": Program(on_first(forward_more=True), num_vision=0, num_text=10, steps=3),
    "one rank runs a forward more, once": Program(
        lambda rank, step: Does(forward_more=rank == 0 and step == 4), num_text=10, steps=6
    ),
    "one rank leaves a plan in backward": Program(
        lambda rank, step: Does(in_backward=rank == 0 and step == 4), num_text=10, steps=6
    ),
}
FAST = ["alike, hpZ 2 of 4", "alike, offload", "images on one rank, 4 vision blocks"]
FAST += ["images on both, later on one", "images on one rank, a sum over all before the text"]
FAST += ["one rank leaves a plan in backward", "images on one rank, offload"]
FAST += ["images on one rank, updates beside forward", "images on one rank of each pair, shard groups of 2 of 4"]
PROGRAMS |= {f"{name}, direct": replace(each, is_direct=True) for name, each in PROGRAMS.items() if each.size == 2}
FAST += [f"{name}, direct" for name in FAST if f"{name}, direct" in PROGRAMS]
FAST += ["alike, far ahead, direct", "alike, evaluations between, direct"]


def train(world: InProcessWorld, program: Program) -> list[list[Tensor]]:
    """Each rank's losses, then its weights."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": program.micro,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **program.zero},
    }
    with engines_in(world) as initialize:

        def body(rank: int) -> list[Tensor]:
            torch.manual_seed(0)
            pairs = tuple((first, first + 1) for first in range(0, program.size, 2))
            layers = world.collectives(Channel.LAYERS, pairs)
            between = (lambda: layers.sum_small(torch.zeros(1))) if program.sums else (lambda: None)
            model = TextAndImages(program.num_vision, program.num_text, between)
            engine = initialize(model=model, config=config)[0]
            found = []
            for step in range(program.steps):
                if program.evaluates and step % 2:
                    with torch.no_grad():
                        engine(torch.ones(2, WIDTH), Does(image=True))
                for _ in range(program.micro):
                    does = program.does(rank, step)
                    loss = engine(torch.full((2, WIDTH), 0.1 * step + rank), does)
                    if does.forward_more:
                        with torch.no_grad():
                            engine(torch.ones(2, WIDTH), does)
                    engine.backward(loss)
                    engine.step()
                    found.append(loss.detach())
            if not isinstance(world, GraphWorld):
                found += [value.detach().clone() for value in engine.module_state_dict().values()]
            engine.destroy()
            return found

        return world.run(body)


def graph_of(program: Program, *, one_at_a_time: bool = False) -> Graph:
    world = GraphWorld(program.size, one_at_a_time=one_at_a_time)
    smallest = mock.patch.object(buckets, "MIN_DIRECT_BYTES", 0 if program.is_direct else buckets.MIN_DIRECT_BYTES)
    with use(world.device), smallest:
        train(world, program)
    return world.graph


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in PROGRAMS]
)
def test_no_operation_of_a_device_waits_for_ever(name: str) -> None:
    graph_of(PROGRAMS[name]).refuse_faults()


# Here a device must run kernels of two communicators at the same time: when a rank leaves a plan, and when a collective
# of the program's own comes in between.
TWO_AT_A_TIME = (
    "one rank leaves a plan in backward",
    "images on one rank, a sum over all before the text",
)
IN_ONE_ORDER = [name for name in PROGRAMS if name.removesuffix(", direct") not in TWO_AT_A_TIME]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in IN_ONE_ORDER]
)
def test_ranks_start_all_collectives_in_one_order(name: str) -> None:
    """CUDA does not promise that kernels of two communicators run at the same time. Ranks that ran alike started a
    gather before or after a reduction by how fast a message was, and ranks that differed as their programs had it: on a
    device that runs one collective after the other, 91 of 200 hostile programs hung. On an H100 one run did."""
    graph_of(PROGRAMS[name], one_at_a_time=True).refuse_faults()


def test_the_order_of_starts_matters() -> None:
    """Without held reductions, and with decisions as soon as messages are there."""
    at_once = mock.patch.object(LockstepNegotiation, "holds_reductions", False)
    with at_once, pytest.raises(Fault, match="operations never run"):
        graph_of(PROGRAMS["images on one rank, 4 vision blocks"], one_at_a_time=True).refuse_faults()


# Planted faults


def planted(*patches: Any) -> ExitStack:
    stack = ExitStack()
    for patch in patches:
        stack.enter_context(patch)
    return stack


def wait_at_once(_self: LockstepNegotiation, _reduction: int) -> None:
    """Wait for a reduction that others may not have started."""


def take_from_the_pool(self: EngineRows, numel: int, row: Tensor) -> Tensor:
    return self.buffers.take(numel, row)


def return_after_compute(self: EngineRows, rows: Any) -> None:
    rows.wait()
    with self._runtime.gather_lane():
        self.buffers.give(rows)


def put_back_after_compute(_self: EngineRows) -> ExitStack:
    return ExitStack()


RECORD = GraphDevice.record


def forget_reads(self: GraphDevice, *read: Tensor) -> Event:
    event = RECORD(self, *read)
    return DONE if read else event


SERVE = LockstepNegotiation._serve


def serve_another(self: LockstepNegotiation, unit: int) -> None:
    SERVE(self, unit + 1)


FAULTS = {
    "a row for others that is returned with an event of compute": (
        "images on one rank, a sum over all before the text",
        [
            mock.patch.object(EngineRows, "take_unread", take_from_the_pool),
            mock.patch.object(EngineRows, "give_unread", return_after_compute),
        ],
        "operations never run",
    ),
    "gathers in another order": (
        "images on one rank, 4 vision blocks",
        [mock.patch.object(LockstepNegotiation, "_serve", serve_another)],
        "gather of 128', 'gather of 136'",
    ),
    "reductions that do not follow a plan": (
        "one rank leaves a plan in backward",
        [mock.patch.object(LockstepNegotiation, "_start_due", lambda self, num_launched: None)],
        "operations never run",
    ),
    "a row that is put back before others have read it": (
        "images on one rank, offload",
        [mock.patch.object(EngineRows, "lane", put_back_after_compute)],
        "may still use",
    ),
    "a gather that nobody waits for": (
        "alike",
        [mock.patch("hf_zero.comm.torch_backend._LaneWork.wait", lambda self: None)],
        "may still use",
    ),
    "a gather that does not wait for the update of its row": (
        "alike, updates beside forward",
        [mock.patch.object(StagedVector, "join", lambda self: None)],
        "may still use",
    ),
    "a gather into memory that compute still reads": (
        "alike, direct",
        [mock.patch.object(GraphDevice, "record", forget_reads)],
        "may still use",
    ),
    "memory that is given back while it is gathered": (
        "alike, evaluations between, direct",
        [mock.patch.object(Unit, "is_direct", False)],
        "may still use",
    ),
    "a copy that does not wait for its buffer": (
        "alike, offload",
        [mock.patch.object(GraphDevice, "wait", lambda self, event: None)],
        "may still use",
    ),
}


@pytest.mark.parametrize("is_direct", [False, True])
def test_a_unit_on_different_sides_of_a_programs_own_collective(is_direct: bool) -> None:
    """A limit of direct gathers (docs/step.md): they wait for what compute has queued, and so for a collective that the
    program itself runs on the compute stream. Another rank may only reach that one with the gathered unit."""
    sides = Program(lambda rank, step: Does(spare="before" if rank == 0 else "after"), num_vision=0, sums=2)
    graph = graph_of(replace(sides, is_direct=is_direct))
    if is_direct:
        with pytest.raises(Fault, match="operations never run"):
            graph.refuse_faults()
    else:
        graph.refuse_faults()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str) -> None:
    name, patches, words = FAULTS[fault]
    with planted(*patches), pytest.raises((Fault, Deadlock), match=words):
        graph_of(PROGRAMS[name]).refuse_faults()


# Values


@pytest.mark.parametrize("name", ["one rank leaves a plan in backward", "one rank runs a forward more, once"])
def test_a_rank_that_leaves_a_plan_gets_the_same_values(name: str) -> None:
    """It starts reductions with the gradients that it has, and the later ones are added before the step."""
    program = PROGRAMS[name]
    found = train(InProcessWorld(2, apart=True), program)
    plain = train(InProcessWorld(2, apart=True), Program(num_text=program.num_text, steps=program.steps))
    for seen, wanted in zip(found, plain, strict=True):
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(seen, wanted, strict=True))


def test_hosts_that_foresee_different_forwards_update_in_one_order() -> None:
    """With hpZ, ranks of one host foresee a forward together, and those of another host may foresee another one. An
    update gathered buckets over all ranks in the order of each host's forward, which mixed up the weights."""
    images = Program(lambda rank, step: Does(image=rank < 2), size=4, steps=6)
    found, plain = (
        train(InProcessWorld(4, apart=True), replace(images, zero={**NONE_KEPT, **zero}))
        for zero in ({"zero_hpz_partition_size": 2}, {})
    )
    for seen, wanted in zip(found, plain, strict=True):
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(seen, wanted, strict=True))


@pytest.fixture(scope="module")
def hostile() -> list[HostileProgram]:
    """Small random programs of stage 3; 33 and 85 are among those that need `LockstepNegotiation.wait_for`."""
    programs = map(partial(random_program, size="small"), (*range(12), 33, 85))
    return [program for program in programs if program.stage == 3]


def test_hostile_programs_have_no_fault(hostile: list[HostileProgram]) -> None:
    """`python -m tests.hostile.campaign --ranks graph` runs any number of larger ones."""
    assert [GraphRunner().run(program).detail for program in hostile] == [""] * len(hostile)


def discarding_what_is_not_agreed() -> HostileProgram:
    """Rank 1 has no batch. Backward on rank 0 never reaches `second`, whose frozen weights it has asked for early."""
    calls = Call("second"), Call("second"), Call("first")
    step = Micro((RankMicro((Forward(0, 1, calls),)), RankMicro((Forward(1, 1, ()),))))
    modules = ModuleSpec("first", "linear", 1), ModuleSpec("second", "linear", 1)
    frozen, limits = ("second.inner.weight",), Limits(model_persistence=8)
    return HostileProgram(0, 2, 3, "divergent", 3, modules, ((step,),), ((1, 5),), frozen, limits=limits, overlap=False)


def test_a_reduction_is_filled_on_the_lane_of_gradients() -> None:
    """The end of a backward drops gathers that are not needed, on the lane of gathers, so that compute does not wait
    for them. The decision that this made ranks wait for there started a reduction, whose send buffer was filled while
    the reduction before it still read the buffer: on a GPU, wrong gradients."""
    assert GraphRunner().run(discarding_what_is_not_agreed()).detail == ""


def test_a_wait_for_what_another_rank_starts_later_is_found(hostile: list[HostileProgram]) -> None:
    with mock.patch.object(LockstepNegotiation, "wait_for", wait_at_once):
        details = [GraphRunner().run(program).detail for program in hostile]
    assert any("operations never run" in detail for detail in details)


def in_shard_groups() -> HostileProgram:
    """Two pairs of ranks. Three times before the step, each rank runs forward and backward; rank 1 once runs a module
    that no other rank needs, and rank 2 evaluates between forwards."""
    plain = RankMicro(tuple(Forward(seed, 1, ()) for seed in range(3)))
    more = RankMicro((Forward(3, 1, ()), Forward(4, 1, (Call("linear"), Call("linear"))), Forward(5, 1, ())))
    evaluating = RankMicro(plain.forwards, (Forward(6, 1, ()),), "between")
    first = RankMicro(plain.forwards[:1])
    evaluating_first = RankMicro(plain.forwards[:1], (Forward(7, 1, ()),))
    update = Micro((first, evaluating_first, first, first)), Micro((plain, more, evaluating, plain), "each")
    modules = (ModuleSpec("linear", "linear", 1),)
    limits = Limits(max_live=0, param_persistence=0)
    return HostileProgram(0, 4, 3, "divergent", 3, modules, (update,), limits=limits, groups="mics")


def test_replicas_are_summed_when_no_rank_needs_weights_before_its_own_sum() -> None:
    """Replicas of shards were summed before each backward after a boundary. A rank of another shard group could still
    be in the forward before that, and need a rank that already waited for the sum."""
    assert GraphRunner().run(in_shard_groups()).detail == ""


def test_no_backward_waits_for_a_sum_over_copies() -> None:
    """With several backwards for one step, the second waited for the sums that the first had started as soon as it had
    more gradients. A rank that waited for another copy served nobody, and that copy waited for a rank which needed its
    weights: four ranks on four hosts in two shard groups hung."""
    every = RankMicro(tuple(Forward(seed, 1, (Call("linear"),)) for seed in range(3)))
    modules = (ModuleSpec("linear", "linear", 1),)
    update = (Micro((every,) * 4, "late_reversed"),)
    program = HostileProgram(0, 4, 3, "same", 3, modules, (update,), limits=Limits(max_live=0), groups="mics")
    add, in_flight = ReplicaSums.about_to_add, []

    def about_to_add(sums: ReplicaSums, bucket: Any) -> None:
        in_flight.append(bucket.bucket.index in sums._beside)
        add(sums, bucket)

    with mock.patch.object(ReplicaSums, "about_to_add", about_to_add):
        assert GraphRunner().run(program).detail == ""
    assert in_flight and not any(in_flight)


def test_copies_of_the_shards_sum_their_gradients_beside_backward() -> None:
    """With hybrid sharding, the sums over copies began when backward had ended: some 75 ms per step for 8 billion
    parameters at 400 Gbit/s, while the network between hosts had nothing to do in backward."""
    graph = graph_of(PROGRAMS["alike, shard groups of 2 of 4"])
    graph.refuse_faults()
    started = [node.what for node in graph.nodes if node.rank == 0 and node.what.startswith("starts ")]
    last_step = started[[at for at, what in enumerate(started) if "sum_small" in what][-2] :]
    kinds = [what.split()[1] for what in last_step if "reduce_scatter" in what or "all_reduce" in what]
    assert kinds.count("all_reduce") == kinds.count("reduce_scatter") >= 12
    assert kinds[-2:] == ["all_reduce"] * 2 and "all_reduce" in kinds[:3], "all but two in flight by then"

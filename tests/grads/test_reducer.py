"""The reducer without processes: one rank, and a simulated second one that sends the same gradients later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.comm import MAX_SEND_BUFFERS, Pending
from hf_zero.comm.collectives import LoneCollectives, own_shard
from hf_zero.grads.boundary import Boundary
from hf_zero.grads.reducer import GradientReducer
from hf_zero.layout import Interval, ParameterSpec, plan_layout
from hf_zero.layout.sharding import Sharding
from hf_zero.offload.placement import in_memory_placement
from hf_zero.offload.sub_group import DeferredUpdate
from hf_zero.params.store import TrainedBucket
from hf_zero.precision import Precision
from tests.support.groups import groups_of

CPU = torch.device("cpu")
NUMEL, WORLD = 64, 2


class Travelling(Pending):
    """A reduction that ends when somebody waits for it, or when the test ends it."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self.finish = finish
        self.has_come = False

    def is_ready(self) -> bool:
        return self.has_come

    def wait(self) -> None:
        self.finish()


class Twins(LoneCollectives):
    """The first of two ranks with the same gradients. Records the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.size = WORLD
        self.launched: list[int] = []  # first element of each sent buffer
        self.travelling: list[Travelling] = []
        self.num_buffers = 0

    def take_send_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.num_buffers += 1
        return torch.full((numel,), 77.0, dtype=dtype)

    def give_send_buffer(self, buffer: Tensor) -> None:
        self.num_buffers -= 1

    def _reduce_scatter(self, shard: Tensor, flat: Tensor) -> Pending:
        self.launched.append(int(flat[0]))
        self.travelling.append(Travelling(lambda: shard.copy_(own_shard(flat, 0, WORLD) * WORLD)))
        return self.travelling[-1]

    def _all_reduce(self, flat: Tensor) -> Pending:
        self.launched.append(int(flat[0]))
        self.travelling.append(Travelling(lambda: flat.mul_(WORLD)))
        return self.travelling[-1]


class Store:
    """Three parameters with one bucket each; the last parameter is in the first bucket."""

    negotiation = None

    def __init__(self, owned: Callable[[Any], Interval]) -> None:
        specs = [ParameterSpec(f"p{i}", NUMEL, 0, "float32") for i in range(3)]
        self.layout = plan_layout(specs, world=WORLD, bucket_numel=NUMEL)
        self.parameters = tuple(nn.Parameter(torch.zeros(NUMEL)) for _ in specs)
        self.deferred = DeferredUpdate()
        place = in_memory_placement(CPU)
        self.buckets = tuple(
            TrainedBucket(b, owned(b), (), place, tuple(self.parameters[s.parameter] for s in b.slots), CPU)
            for b in self.layout.buckets
        )
        self.pass_by: Callable[[int], None] = lambda _: None

    def report_progress(self, pass_by: Callable[[int], None]) -> None:
        self.pass_by = pass_by

    def prepare_to_wait(self, reduction: int) -> None: ...


def made(stage: int, **options: Any) -> SimpleNamespace:
    sharding = Sharding(stage, 0, WORLD)
    store, collectives = Store(sharding.owned), Twins()
    reducer = GradientReducer(store, sharding, groups_of(collectives), Precision(None, None, None), **options)  # type: ignore[arg-type]
    return SimpleNamespace(reducer=reducer, store=store, collectives=collectives, parameters=store.parameters)


def backward(of: SimpleNamespace, order: Sequence[int]) -> None:
    """Gradients arrive in this order of parameters; parameter 0 has gradients of 10, 1 of 11, 2 of 12."""
    for index in order:
        (of.parameters[index] * float(10 + index)).sum().backward()


def summed(of: SimpleNamespace) -> list[float | None]:
    """The reduced gradient of each parameter's bucket, last parameter first."""
    sums = [bucket.reduced.at_hand for bucket in of.reducer.buckets]
    return [None if total is None else float(total[0]) for total in sums]


def test_buckets_are_launched_in_one_order_whatever_order_gradients_arrive_in() -> None:
    of = made(stage=2)
    of.reducer.begin(Boundary.LAST)
    backward(of, [0, 1])
    assert of.collectives.launched == [], "the first bucket is that of the last parameter"
    backward(of, [2])
    assert of.collectives.launched == [12, 11, 10]
    of.reducer.complete()
    assert summed(of) == [24, 22, 20]


def test_two_reductions_are_under_way_at_most() -> None:
    of = made(stage=2)
    of.reducer.begin(Boundary.LAST)
    backward(of, [2, 1])
    assert of.collectives.num_buffers == MAX_SEND_BUFFERS == 2 and summed(of) == [None, None, None]
    backward(of, [0])
    assert of.collectives.num_buffers == 2 and summed(of) == [24, None, None]
    of.reducer.wait()
    assert of.collectives.num_buffers == 0


def test_without_overlap_each_reduction_waits_for_the_one_before() -> None:
    of = made(stage=2, overlap=False)
    of.reducer.begin(Boundary.LAST)
    backward(of, [2, 1, 0])
    assert summed(of) == [24, 22, None] and of.collectives.num_buffers == 1


def test_what_has_come_is_counted_in_when_the_next_bucket_begins_to_arrive() -> None:
    of = made(stage=2)
    of.reducer.begin(Boundary.LAST)
    backward(of, [2])
    of.collectives.travelling[0].has_come = True
    backward(of, [1])
    assert summed(of) == [24, None, None]


def test_what_is_missing_at_the_end_counts_as_zero() -> None:
    of = made(stage=2)
    of.reducer.begin(Boundary.LAST)
    backward(of, [1])
    of.reducer.finish()
    assert of.collectives.launched == [0, 11, 0]


def test_buckets_that_backward_has_passed_are_launched_without_what_is_missing() -> None:
    of = made(stage=2)
    of.reducer.begin(Boundary.LAST)
    backward(of, [1])
    of.store.pass_by(1)
    assert of.collectives.launched == [0]
    of.store.pass_by(2)
    assert of.collectives.launched == [0, 11]


def test_another_order_counts_from_the_next_backward_on() -> None:
    of = made(stage=2)
    of.reducer.reorder([2, 1, 0])
    of.reducer.begin(Boundary.LAST)
    backward(of, [0, 1, 2])
    assert of.collectives.launched == [10, 11, 12]


def test_micro_batches_stay_local_until_the_boundary() -> None:
    for stage in (0, 1):
        of = made(stage=stage)
        of.reducer.begin(Boundary.ACCUMULATE)
        backward(of, [2, 1, 0])
        of.reducer.finish()
        assert of.collectives.launched == [] and of.parameters[0].grad is None
        of.reducer.begin(Boundary.LAST)
        backward(of, [2, 1, 0])
        of.reducer.complete()
        assert of.collectives.launched == [24, 22, 20] and summed(of) == [48, 44, 40]
        assert all(bucket.local is None for bucket in of.reducer.buckets)


def test_a_step_without_a_boundary_reduces_what_was_kept() -> None:
    of = made(stage=1)
    of.reducer.begin(Boundary.ACCUMULATE)
    backward(of, [2, 1])
    of.reducer.complete()
    assert of.collectives.launched == [12, 11, 0]


def test_who_wants_local_gradients_gets_them_unreduced() -> None:
    wants = [True]
    of = made(stage=2, wants_local=lambda: wants[0])
    of.reducer.begin(Boundary.LAST)
    backward(of, [2, 1, 0])
    of.reducer.complete()
    assert of.collectives.launched == [] and [float(b.local[0]) for b in of.reducer.buckets] == [12, 11, 10]
    wants[0] = False
    of.reducer.clear()
    backward(of, [2])
    assert of.collectives.launched == [12]


def test_gradients_of_a_bucket_already_taken_are_late_and_reduced_in_a_second_round() -> None:
    of = made(stage=2)
    of.reducer.begin(Boundary.LAST)
    backward(of, [2, 1, 0, 2])
    of.reducer.complete()
    assert of.reducer.late == {2} and summed(of) == [24, 22, 20]
    of.reducer.reduce_late()
    assert of.reducer.late == set() and summed(of) == [48, 22, 20]


def test_gradients_of_another_engine_s_backward_are_held_back() -> None:
    of = made(stage=2)
    held = of.reducer.hold_back()
    backward(of, [2, 1])
    of.store.pass_by(3)
    assert of.collectives.launched == [] and of.parameters[2].grad is not None
    assert of.reducer.stop_holding(held)
    of.reducer.begin(Boundary.LAST)
    of.reducer.finish()
    assert of.collectives.launched == [12, 11, 0] and of.reducer.late == set()


def test_holding_back_is_over_when_it_is_over() -> None:
    of = made(stage=2)
    assert not of.reducer.stop_holding(of.reducer.hold_back())
    backward(of, [2])
    assert of.collectives.launched == [12], "a plain backward finds an open reducer"


def test_clear_drops_what_is_reduced_late_and_under_way() -> None:
    of = made(stage=2)
    of.reducer.begin(Boundary.LAST)
    backward(of, [2, 1, 0, 1])
    of.reducer.clear()
    assert summed(of) == [None, None, None] and of.reducer.late == set()
    assert all(parameter.grad is None for parameter in of.parameters) and of.collectives.num_buffers == 0


def test_removed_hooks_leave_gradients_to_autograd() -> None:
    of = made(stage=2)
    of.reducer.remove_hooks()
    backward(of, [2])
    assert of.collectives.launched == [] and of.parameters[2].grad is not None

"""One bucket's gradients on one rank: arrival, taking, local accumulation and reduction."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from hf_zero.comm import LoneCollectives
from hf_zero.grads.bucket import Arrivals, BucketGradients, GradientDtypes
from hf_zero.layout import Bucket, Interval, MemberSpec, ParameterSpec, lay_rows, plan_layout
from hf_zero.offload.placement import in_memory_placement
from hf_zero.params.store import TrainedBucket
from tests.support.passes import Passes

CPU = torch.device("cpu")
FP32, BF16 = torch.float32, torch.bfloat16
SHAPES = [(3, 2), (5,)]  # at 0 and 32 of a flat bucket, with padding from 6 and 37 on


def flat_bucket(shapes: Sequence[tuple[int, ...]] = SHAPES, world: int = 2) -> Bucket:
    specs = [ParameterSpec(f"p{i}", torch.Size(shape).numel(), 0, "float32") for i, shape in enumerate(shapes)]
    return plan_layout(specs, world=world, bucket_numel=1000).buckets[0]


def rows_bucket(shapes: Sequence[tuple[int, ...]] = SHAPES, world: int = 2) -> Bucket:
    members = [MemberSpec(i, torch.Size(shape).numel(), 0) for i, shape in enumerate(shapes)]
    layout = lay_rows(members, world=world, dtype="float32", full_align=32)
    return layout.bucket(0, {i: i for i in range(len(shapes))})


def gradients(
    bucket: Bucket,
    *,
    owned: Interval | None = None,
    communication: torch.dtype = FP32,
    accumulation: torch.dtype = FP32,
) -> BucketGradients:
    """Gradients of the first rank, unless `owned` specifies another interval."""
    parameters = tuple(nn.Parameter(torch.zeros(SHAPES[slot.parameter])) for slot in bucket.slots)
    trained = TrainedBucket(bucket, owned or bucket.shard(0), (), in_memory_placement(CPU), parameters, CPU)
    return BucketGradients(trained, GradientDtypes(communication, accumulation), LoneCollectives())


def leave(of: BucketGradients, *factors: float | None) -> list[Tensor | None]:
    """Gives each parameter a gradient, as autograd does; None leaves one out."""
    left: list[Tensor | None] = []
    for slot, parameter, factor in zip(of.bucket.slots, of.trained.parameters, factors, strict=True):
        if factor is not None:
            parameter.grad = torch.arange(1.0, parameter.numel() + 1).view(parameter.shape) * factor
            of.arrivals.arrive(slot.parameter)
        left.append(None if factor is None else parameter.grad)
    return left


def dirty(of: BucketGradients, dtype: torch.dtype = FP32) -> Tensor:
    """A buffer with values of an earlier use."""
    return torch.full((of.bucket.numel,), 77.0, dtype=dtype)


def taken(of: BucketGradients, *factors: float | None, dtype: torch.dtype = FP32, add: bool = False) -> Tensor:
    """The buffer after each parameter has left a gradient and all have been taken."""
    leave(of, *factors)
    target = dirty(of, dtype)
    of.arrivals.take(target, add=add)
    return target


def counted(numel: int, factor: float = 1.0) -> Tensor:
    return torch.arange(1.0, numel + 1) * factor


# Within one backward


def test_a_bucket_is_open_until_it_is_taken() -> None:
    of = gradients(flat_bucket())
    assert (of.arrivals.is_open, of.arrivals.is_empty, of.arrivals.is_complete) == (True, True, False)
    leave(of, 1.0, None)
    assert (of.arrivals.is_open, of.arrivals.is_empty, of.arrivals.is_complete) == (True, False, False)
    leave(of, None, 1.0)
    assert (of.arrivals.is_open, of.arrivals.is_complete) == (True, True)
    of.arrivals.take(dirty(of), add=False)
    assert not of.arrivals.is_open
    of.arrivals.open()
    assert (of.arrivals.is_open, of.arrivals.is_empty, of.arrivals.is_complete) == (True, True, False)


def test_a_parameter_that_arrives_twice_counts_once() -> None:
    of = gradients(flat_bucket())
    arrivals = Arrivals(of.trained)
    arrivals.arrive(0)
    arrivals.arrive(0)
    assert not arrivals.is_complete
    arrivals.arrive(1)
    assert arrivals.is_complete


def test_what_is_taken_lies_in_its_slots_and_is_gone_from_the_parameters() -> None:
    of = gradients(flat_bucket())
    target = taken(of, 1.0, 10.0)
    assert torch.equal(target[0:6], counted(6)) and torch.equal(target[32:37], counted(5, 10.0))
    assert all(parameter.grad is None for parameter in of.trained.parameters)
    assert of.arrivals.used == {0, 1}


def test_gaps_between_slots_become_zero() -> None:
    of = gradients(flat_bucket())
    target = taken(of, 1.0, 1.0)
    assert [(gap.start, gap.stop) for gap in of.bucket.gaps()] == [(6, 32), (37, 64)]
    assert not target[6:32].any() and not target[37:64].any()


def test_what_has_not_arrived_is_zero_and_not_used() -> None:
    of = gradients(flat_bucket())
    target = taken(of, None, 2.0)
    assert not target[:32].any() and torch.equal(target[32:37], counted(5, 2.0))
    assert of.arrivals.used == {1}


def test_a_late_gradient_stays_with_its_parameter_until_the_next_time() -> None:
    of = gradients(flat_bucket())
    target = taken(of, 1.0, 1.0)
    late = leave(of, 3.0, None)[0]  # of a closed bucket
    assert of.trained.parameters[0].grad is late and not of.arrivals.is_open
    of.arrivals.open()
    of.arrivals.take(target, add=False)
    assert torch.equal(target[0:6], counted(6, 3.0)) and not target[32:37].any()
    assert of.trained.parameters[0].grad is None


def test_a_sparse_gradient_is_taken_as_a_dense_one() -> None:
    of = gradients(flat_bucket())
    values = torch.zeros(3, 2)
    values[1] = 4.0
    of.trained.parameters[0].grad = values.to_sparse()
    target = dirty(of)
    of.arrivals.take(target, add=False)
    assert target[0:6].tolist() == [0, 0, 4, 4, 0, 0]


@pytest.mark.parametrize("bucket", [flat_bucket(), rows_bucket()], ids=["flat", "rows"])
def test_gradients_change_their_dtype_when_they_are_taken(bucket: Bucket) -> None:
    of = gradients(bucket, communication=BF16)
    target, wide = (taken(of, 1.001, 1.0, dtype=dtype) for dtype in (BF16, FP32))
    assert torch.equal(target, wide.to(BF16)) and not torch.equal(target.float(), wide)


# By rows


def test_in_rows_every_parameter_is_cut_alone() -> None:
    of = gradients(rows_bucket())
    target = taken(of, 1.0, 10.0)
    # Two rows of 16: three of six elements at 0, three of five (the last one is padding) at 8.
    assert target.view(2, 16).tolist() == [
        [1, 2, 3, 0, 0, 0, 0, 0, 10, 20, 30, 0, 0, 0, 0, 0],
        [4, 5, 6, 0, 0, 0, 0, 0, 40, 50, 0, 0, 0, 0, 0, 0],
    ]


def test_in_rows_parameters_that_fill_their_chunks_are_copied_by_one_call() -> None:
    """Every parameter was copied by itself, which takes the host longer than it takes a GPU."""
    shapes = [(4, 8), (16,), (2, 8)]
    bucket = rows_bucket(shapes)
    parameters = tuple(nn.Parameter(torch.zeros(shape)) for shape in shapes)
    trained = TrainedBucket(bucket, bucket.shard(0), (), in_memory_placement(CPU), parameters, CPU)
    of = BucketGradients(trained, GradientDtypes(FP32, FP32), LoneCollectives())
    grads = leave(of, 1.0, 10.0, 100.0)
    target = dirty(of)
    with Passes() as passes:
        of.arrivals.take(target, add=False)
    assert [name for name, *_ in passes.calls[""]] == ["_foreach_copy_"]
    assert torch.equal(target.view(2, -1), torch.cat([grad.view(2, -1) for grad in grads if grad is not None], 1))


def test_in_rows_what_has_not_arrived_is_zero() -> None:
    of = gradients(rows_bucket())
    target = taken(of, None, 1.0)
    assert target.view(2, 16)[:, :8].eq(0).all()
    assert target.view(2, 16)[:, 8:11].tolist() == [[1, 2, 3], [4, 5, 0]]


def test_a_row_is_a_rank_s_part() -> None:
    of = gradients(rows_bucket())
    target = taken(of, 1.0, 10.0)
    assert of.trained.owned == Interval(0, 16)
    of.reduced.add(target[:16])
    assert of.reduced.at_hand is not None and torch.equal(of.reduced.at_hand, target[:16])


# Local gradients


@pytest.mark.parametrize("bucket", [flat_bucket(), rows_bucket()], ids=["flat", "rows"])
def test_micro_batches_add_up_locally(bucket: Bucket) -> None:
    of, once = gradients(bucket), gradients(bucket)
    for first, second in [(1.0, None), (2.0, 3.0), (None, 4.0)]:
        of.arrivals.open()
        leave(of, first, second)
        of.keep_local()
        assert not of.arrivals.is_open
    expected = taken(once, 3.0, 7.0)
    assert of.local is not None and torch.equal(of.local, expected)
    assert of.arrivals.used == {0, 1} and of.reduced.at_hand is None, "nothing is reduced yet"


def test_adding_leaves_padding_and_what_has_not_arrived_alone() -> None:
    of = gradients(flat_bucket())
    target = taken(of, 1.0, None, add=True)
    assert torch.equal(target[0:6], counted(6) + 77)
    assert target[6:].eq(77).all()


def test_low_precision_gradients_add_up_in_the_accumulation_dtype() -> None:
    of = gradients(flat_bucket(), communication=BF16)
    for _ in range(3):
        of.arrivals.open()
        leave(of, None, None)
        of.trained.parameters[0].grad = torch.full((3, 2), 0.01).bfloat16().float()
        of.keep_local()
    assert of.local is not None and of.local.dtype == FP32
    assert torch.allclose(of.local[0:6], torch.full((6,), 3 * 0.01001), rtol=1e-3)


def test_whole_local_gradients_lie_where_reduced_ones_stay() -> None:
    bucket = flat_bucket(world=1)
    of = gradients(bucket)
    leave(of, 1.0, 1.0)
    of.keep_local()
    assert of.local is not None and of.local.data_ptr() == of.reduced.vector.take().data_ptr()
    sharded = gradients(flat_bucket())
    leave(sharded, 1.0, 1.0)
    sharded.keep_local()
    assert sharded.local is not None and sharded.local.numel() == 64 and sharded.reduced.vector.numel == 32
    of.reduced.add(of.local)
    of.local = None
    of.arrivals.open()
    leave(of, 5.0, 5.0)
    of.keep_local()
    assert of.local is not None and of.local.data_ptr() != of.reduced.vector.take().data_ptr(), "it is taken"
    assert of.reduced.at_hand is not None and torch.equal(of.reduced.at_hand[0:6], counted(6))


# Reduced gradients


def test_the_result_of_a_first_reduction_is_written_in_place() -> None:
    of = gradients(flat_bucket())
    place = of.reduced.place_for_result()
    assert (
        place.numel() == 32 and place.data_ptr() == of.reduced.vector.take().data_ptr() and of.reduced.at_hand is None
    )
    place.copy_(counted(32))
    of.reduced.add(place)
    assert of.reduced.is_there and of.reduced.at_hand is not None and torch.equal(of.reduced.at_hand, counted(32)), (
        "counted once"
    )


def test_the_result_of_a_second_reduction_is_written_apart_and_added() -> None:
    of = gradients(flat_bucket())
    of.reduced.place_for_result().fill_(1.0)
    of.reduced.add(of.reduced.vector.take())
    place = of.reduced.place_for_result()
    assert place.data_ptr() != of.reduced.vector.take().data_ptr()
    of.reduced.add(place.copy_(counted(32)))
    assert of.reduced.at_hand is not None and torch.equal(of.reduced.at_hand, counted(32) + 1)


def test_a_result_in_another_dtype_is_written_apart_and_converted() -> None:
    of = gradients(flat_bucket(), communication=BF16)
    for factor in (1.0, 2.0):
        place = of.reduced.place_for_result()
        assert place.dtype == BF16 and place.data_ptr() != of.reduced.vector.take().data_ptr()
        of.reduced.add(place.copy_(counted(32, factor)))
    assert (
        of.reduced.at_hand is not None
        and of.reduced.at_hand.dtype == FP32
        and torch.equal(of.reduced.at_hand, counted(32, 3.0))
    )


def test_squares_are_those_of_a_part() -> None:
    of = gradients(flat_bucket())
    of.reduced.add(counted(32))
    assert of.reduced.squares(Interval(0, 32)).item() == sum(i * i for i in range(1, 33))
    assert of.reduced.squares(Interval(1, 3)).item() == 4 + 9
    assert of.reduced.squares(Interval(0, 32)).dtype == torch.float64


# Between steps


def test_clear_forgets_everything_and_keeps_the_room() -> None:
    of = gradients(flat_bucket())
    leave(of, 1.0, 1.0)
    of.arrivals.take(dirty(of), add=False)
    of.reduced.add(counted(32))
    room = of.reduced.vector.take().data_ptr()
    of.clear()
    assert (of.arrivals.is_open, of.arrivals.is_empty, of.reduced.is_there, of.arrivals.used, of.local) == (
        True,
        True,
        False,
        set(),
        None,
    )
    assert of.reduced.at_hand is None and of.reduced.vector.take().data_ptr() == room
    of.reduced.add(counted(32, 2.0))
    assert of.reduced.at_hand is not None and torch.equal(of.reduced.at_hand, counted(32, 2.0)), (
        "nothing of the last step is left"
    )


def test_clear_gives_up_the_room_where_whole_gradients_stand_beside_it() -> None:
    of = gradients(flat_bucket())
    leave(of, 1.0, 1.0)
    of.keep_local()
    of.reduced.add(counted(32))
    before = of.reduced.vector
    assert of.local is not None
    of.clear()
    assert of.local is None and of.reduced.vector is not before


def test_idle_room_is_dropped_and_used_room_is_not() -> None:
    of = gradients(flat_bucket())
    of.reduced.add(counted(32))
    used = of.reduced.vector
    of.give_up_room()
    assert of.reduced.vector is used
    of.clear()
    of.give_up_room()
    assert of.reduced.vector is not used

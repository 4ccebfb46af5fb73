"""Bytes of a rank by kind and place, from plain sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_zero.layout.memory import (
    BUFFERS,
    DEVICE,
    DISK,
    FP32_BYTES,
    GRADIENT_BUFFERS,
    GRADIENTS,
    HOST,
    OPTIMIZER,
    PARAMETERS,
    RESULTS,
    STAGING_BUFFERS,
    BucketSizes,
    RankSizes,
    UnitSizes,
    buffer_sizes,
    gathered_at_most,
    gradient_sizes,
    optimizer_sizes,
    parameter_sizes,
    place_of,
    receive_buffers,
    update_buffers,
    within,
)

# Adam in bf16 on four ranks; the sum of a gradient is in fp32.
BUCKET = BucketSizes(numel=400, owned=100, weight=2, master=4, states=8, summed=4, sent=2)
UNIT = UnitSizes(row=200, stored={DEVICE: 200}, whole=800)


def rank(bucket: BucketSizes = BUCKET, **sizes: object) -> RankSizes:
    return RankSizes(**{"buckets": [bucket], "ranks": 4, "shards_states": True, "send_buffers": 2, **sizes})  # type: ignore[arg-type]


@pytest.mark.parametrize("place", [DEVICE, HOST, DISK])
def test_states_and_sums_are_where_the_bucket_is_updated(place: str) -> None:
    found = rank(replace(BUCKET, place=place), other_weights=7)
    assert parameter_sizes(found) == {(PARAMETERS, DEVICE): 807}
    assert optimizer_sizes(found) == {(OPTIMIZER, place): 1200}
    assert gradient_sizes(found) == {(GRADIENTS, place): 400}


def test_local_gradients_are_whole_until_they_are_reduced() -> None:
    """The start block and the check before allocation of a stage 1 training with accumulation and offload did not
    count both: the whole gradients of the micro-batches on the device, and the sums on the host."""
    assert gradient_sizes(rank(keeps_local=True)) == {(GRADIENTS, DEVICE): 1600}
    far = rank(replace(BUCKET, place=HOST), keeps_local=True)
    assert gradient_sizes(far) == {(GRADIENTS, DEVICE): 1600, (GRADIENTS, HOST): 400}


def test_updates_during_backward_keep_no_sums() -> None:
    streams = rank(replace(BUCKET, place=HOST), keeps_sums=False, joined_numel=64, separate=False)
    assert gradient_sizes(streams) == {}
    assert buffer_sizes(replace(streams, ranks=1)) == {(BUFFERS, HOST): 2 * 400, (BUFFERS, DEVICE): 4 * 64}


def test_rows_and_persistent_units() -> None:
    """Persistent weights were counted where rows are offloaded to, although they stay on the device."""
    units = [replace(UNIT, stored={HOST: 400}), replace(UNIT, is_persistent=True)]
    found = rank(units=units)
    assert parameter_sizes(found) == {(PARAMETERS, HOST): 400, (PARAMETERS, DEVICE): 1000}
    assert gathered_at_most(found, 10_000) == 800 and gathered_at_most(rank(units=[UNIT] * 9), 100) == 1700


def test_buffers_of_reductions() -> None:
    """Two send buffers; none if sums are reduced in place, except on CPUs, where they go through shared memory."""
    assert buffer_sizes(rank()) == {(BUFFERS, DEVICE): 2 * 800}
    assert buffer_sizes(rank(ranks=1)) == {}
    in_place = replace(BUCKET, summed=2)
    assert buffer_sizes(rank(in_place, keeps_local=True)) == {}
    assert buffer_sizes(rank(in_place, keeps_local=True, separate=False))[BUFFERS, DEVICE] == 2 * 800 + 200


def test_buffers_between_device_and_host() -> None:
    found = buffer_sizes(rank(replace(BUCKET, place=HOST)))
    assert found == {(BUFFERS, DEVICE): 2 * 800 + RESULTS * 200, (BUFFERS, HOST): (RESULTS + STAGING_BUFFERS) * 200}
    alone = rank(replace(BUCKET, place=HOST), ranks=1, units=[UNIT])
    assert (BUFFERS, DEVICE) not in buffer_sizes(alone), "gradients are copied one by one"
    fetched = rank(units=[replace(UNIT, stored={HOST: 400})])
    assert buffer_sizes(fetched)[BUFFERS, DEVICE] == 2 * 800 + STAGING_BUFFERS * 400


def test_buffers_of_a_drive() -> None:
    far = rank(replace(BUCKET, place=DISK), separate=False, ranks=1, sub_group_numel=64, state_vectors=9)
    assert buffer_sizes(far) == {(BUFFERS, DEVICE): GRADIENT_BUFFERS * 400}
    assert update_buffers(far) == {(BUFFERS, DEVICE): FP32_BYTES * 64 * 9}, "a CPU: host memory is its own"
    assert update_buffers(replace(far, sub_group_numel=0)) == {(BUFFERS, DEVICE): FP32_BYTES * 100 * 9}


def test_buffers_of_an_update_that_streams_through_the_device() -> None:
    bucket = BucketSizes(numel=400, owned=100, weight=2, master=4, states=8, summed=2, sent=2, place=HOST)
    rank = RankSizes(buckets=[bucket, replace(bucket, place=DEVICE, owned=1000)], ranks=4, streamed_numel=64)
    assert update_buffers(rank) == {(BUFFERS, DEVICE): 3 * 64 * (2 + 4 + 8)}, "three chunks, of what is offloaded"
    assert update_buffers(replace(rank, streamed_numel=0)) == {}


@pytest.mark.parametrize(
    ("buffers", "numel", "expected"), [(5, 10**6, 5 * 200), (5, 350, 700), (1, 10**6, 3 * 200), (5, 1, 3 * 200)]
)
def test_buffers_of_rows_on_a_drive(buffers: int, numel: int, expected: int) -> None:
    """At least one row in use, one being fetched and one being written."""
    unit = replace(UNIT, stored={DISK: 200})
    found = rank(units=[unit], ranks=1, separate=False, row_buffers=buffers, row_buffer_numel=numel)
    assert buffer_sizes(found)[BUFFERS, DEVICE] == expected


def test_gathers_receive_into_buffers() -> None:
    found = rank(units=[UNIT, replace(UNIT, row=9000, is_persistent=True)])
    assert receive_buffers(found) == 4 * 200 * 2
    assert receive_buffers(replace(found, ahead=3000)) == 4 * 200 + 3000
    assert receive_buffers(replace(found, separate=False)) == 2 * 200, "peers' rows are in their shared memory"
    assert receive_buffers(replace(found, ranks=1)) == 0
    assert receive_buffers(replace(found, units=[replace(UNIT, is_direct=True)])) == 0


def test_places() -> None:
    assert [place_of(device, True) for device in (None, "none", "cpu", "nvme")] == [DEVICE, DEVICE, HOST, DISK]
    assert [place_of(device, False) for device in (None, "none", "cpu", "nvme")] == [DEVICE, DEVICE, DEVICE, DISK]
    assert within([30, 50, 20, 1], 50) == [True, False, True, False]

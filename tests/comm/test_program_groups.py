"""torch process groups that programs request."""

from __future__ import annotations

import pytest

from hf_zero.comm.mesh import Partition
from hf_zero.comm.process_group import Process
from hf_zero.errors import WrongArgument
from hf_zero.sequence.groups import SequenceGroups
from hf_zero.tensor.groups import TensorGroups


@pytest.fixture(params=range(4))
def rank(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """One of four ranks, whose groups are lists of their ranks."""
    rank: int = request.param

    def torch_group(partition: Partition) -> tuple[int, ...]:
        return next(ranks for ranks in partition if rank in ranks)

    monkeypatch.setattr("hf_zero.comm.groups.this_process", lambda: Process(rank, 4))
    monkeypatch.setattr("hf_zero.comm.groups.torch_group", torch_group)
    return rank


def test_neighbours_share_and_strides_do_not(rank: int) -> None:
    shared, others = ((0, 1), (2, 3))[rank // 2], ((0, 2), (1, 3))[rank % 2]
    sequences, tensors = SequenceGroups.of_size(2), TensorGroups.of_size(2)
    assert sequences.get_sequence_parallel_group() == tensors.get_model_parallel_group() == shared
    assert sequences.get_sequence_parallel_rank() == tensors.get_tensor_model_parallel_rank() == rank % 2
    for groups in (sequences, tensors):
        assert groups.get_data_parallel_group() == others
        assert (groups.get_data_parallel_rank(), groups.get_data_parallel_world_size()) == (rank // 2, 2)


@pytest.mark.parametrize("rank", [0], indirect=True)
@pytest.mark.parametrize("size", [0, 3, 8])
def test_sizes_must_divide_the_world(rank: int, size: int) -> None:
    with pytest.raises(WrongArgument, match=f"data ranks x sequence_parallel_size does not hold: 4 != n x {size}"):
        SequenceGroups.of_size(size)
    with pytest.raises(WrongArgument, match=f"data ranks x tensor_parallel.autotp_size does not hold: 4 != n x {size}"):
        TensorGroups.of_size(size)

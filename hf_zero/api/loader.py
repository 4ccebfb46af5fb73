"""The DataLoader that `initialize(training_data=...)` returns."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from hf_zero.comm import get_rank, get_world_size


def data_loader(dataset: Any, batch_size: int, *, collate_fn: Any = None, drop_last: bool = False) -> DataLoader[Any]:
    """Batches of this rank's part of `dataset`, shuffled anew when the caller sets `loader.sampler.set_epoch`.

    An IterableDataset is taken as it is: it has to yield each rank its own samples.
    """
    if isinstance(dataset, IterableDataset):
        return DataLoader(dataset, batch_size=batch_size, collate_fn=collate_fn, drop_last=drop_last)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=get_world_size(), rank=get_rank())
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler, collate_fn=collate_fn, drop_last=drop_last)

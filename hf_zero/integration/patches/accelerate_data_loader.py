"""accelerate.data_loader: sequences and samples that ranks share: resuming in the middle of an epoch, and batches that
rank 0 deals out."""

from __future__ import annotations

from typing import Any

from hf_zero.integration.huggingface.samples import DataRanks, deal_to_groups
from hf_zero.integration.patches import Function, Patches
from hf_zero.sequence.batches import UlyssesSPDataLoaderAdapter

PATCHES = Patches("accelerate.data_loader")


@PATCHES.add(
    "skip_first_batches(dataloader, num_batches)",
    without="resuming in the middle of an epoch feeds whole sequences to ranks that share them",
    until="skip_first_batches asks a loader to skip by itself, or knows UlyssesSPDataLoaderAdapter",
    importers=("accelerate", "transformers.trainer"),
)
def around_skip(original: Function, dataloader: Any, num_batches: int = 0) -> Any:
    """The adapter wraps the loader that is to skip: a new one wraps the result. A loader that
    distributes to groups of ranks continues to do so."""
    if not isinstance(dataloader, UlyssesSPDataLoaderAdapter):
        return deal_to_groups(original(dataloader, num_batches))
    size = dataloader.sp_world_size
    return dataloader.around(original(dataloader.dl, num_batches // size), skipped=num_batches % size)


@PATCHES.add(
    "DataLoaderDispatcher._fetch_batches(self, iterator)",
    without="under tensor parallelism, batches that rank 0 deals out are read by other ranks of its group, too",
    until="DataLoaderDispatcher deals to groups of ranks",
)
def around_fetch(original: Function, self: Any, iterator: Any) -> Any:
    """Rank 0 reads alone, though the other ranks of its group have the same place among those that are dealt to."""
    from accelerate.utils.operations import initialize_tensors

    groups = self.state
    if not isinstance(groups, DataRanks) or groups.process_index > 0 or groups.each.process_index == 0:
        return original(self, iterator)
    self.state = groups.each
    try:
        _, (structure, is_over) = original(self, iterator)
    finally:
        self.state = groups
    # To be filled by rank 0, as those of ranks with another place are.
    return (None if structure is None else initialize_tensors(structure)), [structure, is_over]

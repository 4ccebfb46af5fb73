"""accelerate.data_loader: resuming in the middle of an epoch of sequences that ranks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_zero.integration.patches import Patches
from hf_zero.sequence.batches import UlyssesSPDataLoaderAdapter

PATCHES = Patches("accelerate.data_loader")


@PATCHES.add(
    "skip_first_batches(dataloader, num_batches)",
    without="resuming in the middle of an epoch feeds whole sequences to ranks that share them",
    until="skip_first_batches asks a loader to skip by itself, or knows UlyssesSPDataLoaderAdapter",
    importers=("accelerate", "transformers.trainer"),
)
def around_skip(original: Callable[..., Any]) -> Callable[..., Any]:
    """The adapter stands around the loader that is to skip: a new one stands around what comes of that."""

    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        if not isinstance(dataloader, UlyssesSPDataLoaderAdapter):
            return original(dataloader, num_batches)
        size = dataloader.sp_world_size
        return dataloader.around(original(dataloader.dl, num_batches // size), skipped=num_batches % size)

    return skip_first_batches

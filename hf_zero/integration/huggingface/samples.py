"""Ranks that see the same samples under Accelerate, and gathering from them: each sample once, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor

from hf_zero.comm.mirror import initialize_mesh_device
from hf_zero.integration.huggingface.views import tensor_size


def ranks_per_sample() -> int:
    """Number of consecutive ranks that accelerate gives the same batches: those of a tensor group."""
    from accelerate.state import AcceleratorState

    mesh = AcceleratorState._shared_state.get("ds_device_mesh")  # made from tensor_parallel.autotp_size
    return 1 if mesh is None else int(mesh.size())


def note_groups(accelerator: Any) -> None:
    """Tell accelerate about tensor groups before it distributes batches, even before a model is prepared."""
    if accelerator.distributed_type != "DEEPSPEED" or hasattr(accelerator.state, "ds_device_mesh"):
        return
    size = tensor_size(accelerator.deepspeed_plugin.deepspeed_config)
    if size > 1:
        accelerator.state.ds_device_mesh = initialize_mesh_device((size,), ("tp",))


def deal_to_groups(loader: Any) -> Any:
    """Return the loader. If rank 0 reads for all, it serves groups of ranks; upstream, one batch to all ranks."""
    from accelerate.data_loader import DataLoaderDispatcher

    size = ranks_per_sample()
    if size > 1 and isinstance(loader, DataLoaderDispatcher) and not isinstance(loader.state, DataRanks):
        loader.state = DataRanks(loader.state, size)
        loader.submesh_tp = None  # for which upstream repeats one batch
    return loader


def gather_samples(gather: Callable[[Any], Any], values: Any, size: int) -> Any:
    """Gather `values` of the first rank of each `size`; numbers (without dimensions) of all ranks.

    A number is not a sample: programs divide gathered counts by `Accelerator.num_processes`, which counts ranks.

    Args:
        gather: takes one tensor; a collective of all ranks.
    """
    from accelerate.state import PartialState
    from accelerate.utils.operations import recursively_apply

    num_groups = PartialState().num_processes // size

    def gathered(tensor: Tensor) -> Tensor:
        all_values = cast(Tensor, gather(tensor))
        if tensor.dim() == 0:
            return all_values
        by_rank = cast(Tensor, all_values.unflatten(0, (num_groups, size, len(tensor))))
        return by_rank[:, 0].flatten(0, 1)

    return recursively_apply(gathered, values, error_on_other_type=True)


def with_samples(values: Any) -> Any:
    """Numbers (without dimensions) as one sample each; everything else unchanged."""
    from accelerate.utils.operations import recursively_apply

    return recursively_apply(lambda tensor: tensor[None] if tensor.dim() == 0 else tensor, values)


class DataRanks:
    """accelerate's state for code that distributes batches: `size` consecutive ranks are one process."""

    def __init__(self, state: Any, size: int) -> None:
        self._state = state
        self._size = size

    def __getattr__(self, name: str) -> Any:
        if name == "_state":  # not there yet: a copy is being made
            raise AttributeError(name)
        return getattr(self._state, name)

    @property
    def num_processes(self) -> int:
        return int(self._state.num_processes) // self._size

    @property
    def process_index(self) -> int:
        return int(self._state.process_index) // self._size

    @property
    def each(self) -> Any:
        """accelerate's own: every rank is a process."""
        return self._state

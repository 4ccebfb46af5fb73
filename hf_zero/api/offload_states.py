"""Moves states that only training needs from the device to host memory and back, for example during generation.

Tensor objects and their views stay valid; only their storages are emptied and refilled.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from enum import Enum

import torch
from torch import Tensor

from hf_zero.device.host_memory import host_empty
from hf_zero.grads.reducer import GradientReducer
from hf_zero.step.optimizer import ZeroOptimizer


class OffloadStateTypeEnum(str, Enum):
    """States that can be offloaded; names and values are DeepSpeed's."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class OffloadDeviceEnum(str, Enum):
    """Devices for offloading; names and values are DeepSpeed's."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


_ALL = tuple(kind for kind in OffloadStateTypeEnum if kind is not OffloadStateTypeEnum.lp_params)


class OffloadStates:
    """Moves states of one engine to host memory and back. States that are already in host memory stay.

    Attributes:
        away: emptied tensors with the copies of their data.
    """

    def __init__(self, optimizer: ZeroOptimizer, reducer: GradientReducer, *, home: str = "cpu") -> None:
        """`home`: tensors on a device of this type stay."""
        self._optimizer = optimizer
        self._reducer = reducer
        self._home = home
        self.away: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def send(self, include: Collection[str | OffloadStateTypeEnum] | None = None, *, pinned: bool = True) -> int:
        """Empty the storages of these states (None: all). Returns the number of bytes freed on the device.

        Raises:
            ValueError: for the weights of the model.
        """
        wanted = {OffloadStateTypeEnum(kind) for kind in _ALL if include is None or kind in include}
        if include is not None and OffloadStateTypeEnum.lp_params in include:
            raise ValueError(
                "offload_states(include=[lp_params]): reading a weight meanwhile would crash; at stage 3 "
                'zero_optimization.offload_param {"device": "cpu"} keeps the shards in host memory all the time'
            )
        self._optimizer.updater.stager.finish_update()  # it reads and writes what moves
        if OffloadStateTypeEnum.contiguous_grad_buffer in wanted:
            self._reducer.give_up_room()
        known = {tensor.untyped_storage().data_ptr() for tensor, _ in self.away}
        num_bytes = 0
        for kind in sorted(wanted):
            for tensor in self._tensors(kind):
                storage = tensor.untyped_storage()
                if tensor.device.type == self._home or not storage.nbytes() or storage.data_ptr() in known:
                    continue
                known.add(storage.data_ptr())
                num_bytes += self._empty(tensor, pinned=pinned)
        return num_bytes

    @torch.no_grad()
    def bring_back(self) -> None:
        """Refill all emptied storages."""
        for whole, copy in self.away:
            whole.untyped_storage().resize_(copy.numel())
            whole.copy_(copy)
        self.away.clear()

    def _empty(self, tensor: Tensor, *, pinned: bool) -> int:
        storage = tensor.untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        copy = host_empty(whole.numel(), torch.uint8, pinned=pinned).copy_(whole)
        self.away.append((whole, copy))
        storage.resize_(0)
        return copy.numel()

    def _tensors(self, kind: OffloadStateTypeEnum) -> Iterator[Tensor]:
        if kind is OffloadStateTypeEnum.hp_params:
            yield from (shard.master for shard in self._optimizer.sub_groups if shard.lp_param is not None)
        elif kind is OffloadStateTypeEnum.optim_states:
            for state in self._optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor) and value.dim())
        elif kind is OffloadStateTypeEnum.lp_grads:
            yield from (grad for bucket in self._reducer.buckets if (grad := bucket.reduced.at_hand) is not None)

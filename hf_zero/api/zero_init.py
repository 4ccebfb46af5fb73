"""zero.Init: shards modules one by one as they are created, so that no rank ever holds the whole model."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from hf_zero.comm import ParallelGroups, hosts, init_distributed, local_device, parallel_groups
from hf_zero.config import InitPolicy, load_config, resolve_for_init
from hf_zero.errors import WrongArgument
from hf_zero.offload.placement import store_at_init
from hf_zero.offload.vector import InMemoryVector, stop_if_any
from hf_zero.params.partitioning import reshard, shard_parameter, unshard
from hf_zero.params.sharded_parameter import HEAP, ReadHooks, ShardedParameter
from hf_zero.params.store import ACTIVE, of
from hf_zero.precision import (
    Precision,
    can_be_cut,
    is_packed,
    mark_packed,
    precision_from,
    prepare_packed,
    with_scales,
)

if TYPE_CHECKING:
    from hf_zero.offload.swap_store import SwapStore

MAX_OPENED_NUMEL = 1 << 26  # elements of parameters gathered by a read after they were sharded ...
MIN_OPENED = 8  # ... but the last ones, up to this number, always stay gathered
_IGNORED = ("data_parallel_group", "mpu", "zero_param_parallel_group", "sequence_data_parallel_group")


class Init(AbstractContextManager[Any]):
    """Context, or decorator, in which modules are built with sharded parameters. Collective.

        with deepspeed.zero.Init(config_dict_or_path="ds.json"):
            model = LlamaForCausalLM(config)

    A module is sharded as soon as it is assigned to another module, so at most one module's parameters are whole at a
    time. Rank 0's values are used. Code that reads a sharded parameter (an init function, `self.head.weight = ...`)
    gathers it until the next module is created, or until many others have been read; writes to it are kept.

    Args:
        module: shard this module at once, instead of modules built inside the context.
        remote_device: "cpu" keeps the shards in host memory until initialize(); None means the training device.
        config_dict_or_path: ds.json in any form; decides the dtype. `config` is its older name.
        dtype: of the parameters; default: the config's.
        enabled: False makes the context do nothing.
        data_parallel_group, mpu, zero_param_parallel_group, sequence_data_parallel_group: must be None;
            an mpu of sequence parallelism is allowed.
        DeepSpeed's other arguments are accepted and have no effect.

    Raises:
        NotImplementedError: for a group that is not None, or another `remote_device`.
        ConfigError: with every problem of the config at once.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        **others: Any,
    ) -> None:
        given = {"data_parallel_group": data_parallel_group, "mpu": mpu, **others}
        if hasattr(mpu, "get_sequence_data_parallel_group"):
            given["mpu"] = None  # of sequence parallelism, whose ranks hold shards like all others
        for name in _IGNORED:
            if given.get(name) is not None:
                raise NotImplementedError(f"zero.Init({name}=...): parameters are sharded over all ranks; leave it out")
        self._enabled = enabled
        if not enabled:
            return
        init_distributed()
        self._device = torch.device("cpu") if remote_device == "cpu" else local_device()
        if remote_device not in (None, "none", "cpu", self._device.type):
            raise NotImplementedError(
                f"zero.Init(remote_device={remote_device!r}): shards are made on the training device or in host memory "
                "(cpu); leave the argument out"
            )
        config = config_dict_or_path if config_dict_or_path is not None else config
        known = hosts()
        policy = None if config is None else resolve_for_init(load_config(config), sum(known.sizes), known.sizes)
        self._check(policy)
        groups = parallel_groups(local_device(), None if policy is None else policy.shard_size, by_host=False)
        self._precision = _precision(policy, dtype)
        store = None if policy is None else store_at_init(policy.offload, policy.files, groups.access_copies)
        self._init_rules = _InitRules(groups, self._precision, self._device, store)
        if module is not None:
            self._init_rules.shard_tree(module)
            self._init_rules.close()

    def _check(self, policy: InitPolicy | None) -> None:
        """Raise an error if this context's config is invalid; None is allowed."""

    def __enter__(self) -> Init:
        if self._enabled:
            ACTIVE.append(self._init_rules)
            if len(ACTIVE) == 1:  # nested contexts act as one
                self._init_rules.begin()
            self._before = ACTIVE[0].unattached()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._enabled:
            first = ACTIVE[0]
            ACTIVE.remove(self._init_rules)
            if not ACTIVE:
                first.end(shard=kind is None)
            elif kind is None:
                first.shard_since(self._before)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return inside


class MiCS_Init(Init):  # noqa: N801  (DeepSpeed's name)
    """`Init` over the shard groups of `zero_optimization.mics_shard_size` (DeepSpeed up to 0.19.6). `Init` itself does
    the same if its config has that key or `hf_zero.shard_group`.

    Raises:
        WrongArgument: without a config, or if it has neither key.
    """

    def _check(self, policy: InitPolicy | None) -> None:
        if policy is None or policy.shard_size is None:
            raise WrongArgument(
                "MiCS_Init(config_dict_or_path=...): it needs a config at stage 3 with "
                "zero_optimization.mics_shard_size, or hf_zero.shard_group; zero.Init does without"
            )


class ShardAsLoaded:
    """Shards parameters one by one while every rank loads the same files, so that no rank ever holds the whole model.

    For what `Init` cannot build in shards, because it gets its form from the values (quantized weights). Nothing is
    sent: each rank keeps its chunk of what it has read, in the dtype that it was loaded in.
    """

    def __init__(self, config: Any) -> None:
        """`config`: ds.json in any form. Collective."""
        self._rules = Init(config_dict_or_path=config)._init_rules

    def __call__(self, parameter: nn.Parameter) -> None:
        """Shard a parameter, and its scales, unless it is on the meta device, or stage 3 leaves it whole."""
        for each in with_scales([parameter]):
            if of(each) is None and _can_be_sharded(each):
                self._rules.shard(each, is_loaded=True)

    def end(self) -> None:
        """Collective if shards are on a drive.

        Raises:
            StorageError: on all ranks, if one could not write its shards.
        """
        self._rules.stop_if_failed()


class _InitRules:
    """Shards modules while a model is built."""

    def __init__(
        self, groups: ParallelGroups, precision: Precision, device: torch.device, store: SwapStore | None
    ) -> None:
        """`store`: storage of the shards from the start; None: the memory of `device`."""
        self._groups = groups
        self._precision = precision
        self._device = device
        self._store = store
        self._handles: list[Any] = []
        # In order of appearance, which is the same on all ranks.
        self._unattached: dict[int, weakref.ref[nn.Module]] = {}
        self._reads = ReadHooks(self.open)
        self._opened: list[ShardedParameter] = []
        self._paused = False

    def begin(self) -> None:
        self._handles = [
            register_module_module_registration_hook(self._on_child),
            register_module_parameter_registration_hook(self._on_parameter),
        ]

    def end(self, *, shard: bool) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if shard:
            for module in filter(None, [reference() for reference in self._unattached.values()]):
                self.shard_tree(module)
            self.close()
            self.stop_if_failed()
        self._unattached.clear()
        self._reads.unwatch()

    def stop_if_failed(self) -> None:
        """Raise StorageError on all ranks if one could not write its shards to a drive."""
        if self._store is not None:
            stop_if_any(self._store.failure, self._groups.access_copies)

    def unattached(self) -> frozenset[int]:
        """Ids of modules that are not part of another module yet."""
        return frozenset(self._unattached)

    def shard_since(self, before: frozenset[int]) -> None:
        """Shard modules built since `before`, as code expects at the end of a nested context."""
        for number in [number for number in self._unattached if number not in before]:
            module = self._unattached[number]()
            if module is not None:
                self.shard_tree(module)
        self.close()

    def pause(self) -> None:
        self.close()
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def shard_tree(self, module: nn.Module) -> None:
        """Shard parameters of `module` and its submodules that are still whole."""
        self.close()
        mark_packed(module)
        prepare_packed(module)
        for inner in module.modules():
            own = with_scales(inner.parameters(recurse=False))
            fresh = [parameter for parameter in own if of(parameter) is None and _can_be_sharded(parameter)]
            for parameter in inner.parameters(recurse=False):
                if parameter.is_floating_point() and not parameter.numel():
                    parameter.data = parameter.data.to(self._precision.parameter_dtype(parameter.dtype))
            for parameter in fresh:
                self.shard(parameter)
            if fresh:
                self._reads.watch(inner)

    def close(self) -> None:
        """Reshard parameters that were gathered by a read, with rank 0's values."""
        if self._opened:
            opened, self._opened = self._opened, []
            reshard(opened, modifier_rank=0)

    def _on_child(self, parent: nn.Module, _name: str, child: nn.Module | None) -> None:
        if child is not None and not self._paused:
            self._unattached.pop(id(child), None)
            self.shard_tree(child)
        self._unattached.setdefault(id(parent), weakref.ref(parent))

    def _on_parameter(self, module: nn.Module, _name: str, _parameter: nn.Parameter | None) -> None:
        if not self._paused:
            self._unattached.setdefault(id(module), weakref.ref(module))

    def open(self, handle: ShardedParameter) -> None:
        """Gather a parameter that is read or written. Collective."""
        if self._paused:
            return
        unshard([handle])
        self._opened.append(handle)
        # A function that initialises a whole model reads all parameters, and no new module follows.
        while len(self._opened) > MIN_OPENED and sum(opened.numel for opened in self._opened) > MAX_OPENED_NUMEL:
            reshard([self._opened.pop(0)], modifier_rank=0)

    @torch.no_grad()
    def shard(self, parameter: nn.Parameter, *, is_loaded: bool = False) -> None:
        """Collective, except with `is_loaded`: every rank has the same values, and they keep their dtype."""
        on_host = parameter.device.type == "cpu"
        if parameter.device != local_device():
            parameter.data = parameter.data.to(local_device())
        dtype = parameter.dtype
        if not is_loaded and not is_packed(parameter):
            dtype = self._precision.parameter_dtype(dtype)
        handle = shard_parameter(parameter, self._groups, dtype=dtype, broadcast=not is_loaded)
        if self._store is not None and handle.kept is None:
            handle.move(self._store.adopt("a parameter's shard", handle.shard), local_device())
        elif handle.shard.device != self._device:
            handle.move(InMemoryVector(handle.shard.to(self._device)), self._device)
        if on_host:
            # A packed weight has also been made of one with 16 bits per code, or more.
            made_of = 4 if is_loaded and is_packed(parameter) else 0
            HEAP.freed(parameter.numel() * parameter.element_size() * (1 + made_of))


def _can_be_sharded(parameter: nn.Parameter) -> bool:
    return can_be_cut(parameter) and parameter.device.type != "meta"


def _precision(policy: InitPolicy | None, dtype: torch.dtype | None) -> Precision:
    if dtype is not None or policy is None:
        return Precision(model=dtype, communication=None, accumulation=None)
    return precision_from(policy.precision)

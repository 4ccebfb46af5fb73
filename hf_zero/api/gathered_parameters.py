"""Temporary access to whole values of sharded parameters: for generation, editing, reading and loading.

Also stage 3 functions of DeepSpeed's API: removing and restoring hooks, parameters that other modules read.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from hf_zero.api.parameter_access import take_from
from hf_zero.comm.parts import held_part, whole_shape
from hf_zero.params.consolidation import unsharded_values, with_extra_states
from hf_zero.params.partitioning import TOGETHER_NUMEL, reshard, unshard
from hf_zero.params.sharded_parameter import ShardedParameter
from hf_zero.params.store import of
from hf_zero.precision import is_packed, named_with_scales, with_scales

if TYPE_CHECKING:
    from hf_zero.params.sharded import ShardedParameters


class GatheredParameters:
    """Context in which `params` have their whole values on every rank, quantized ones also their scales. Collective:
    enter and leave it on all ranks.

        with GatheredParameters(model.lm_head.weight, modifier_rank=0):
            if rank == 0:
                model.lm_head.weight.data.normal_()

    Parameters that are not sharded are left as they are, except that `modifier_rank` also applies to those of an engine
    with an optimizer: below stage 3, and with one rank.

    Args:
        params: a parameter, a list or any iterable; None is ignored.
        modifier_rank: all ranks keep this rank's edits at the end, also in the masters; None: edits of sharded
            parameters are dropped.
        fwd_module: accepted for compatibility; reads by other modules are detected automatically.
        enabled: False makes the context do nothing.
    """

    def __init__(
        self, params: Any, modifier_rank: int | None = None, fwd_module: nn.Module | None = None, enabled: bool = True
    ) -> None:
        given: list[Any] = [params] if isinstance(params, Tensor) else list(params or ())
        given = given if enabled else []
        self._handles = handles_of(given)
        self._whole = {id(each): each for each in given if isinstance(each, nn.Parameter) and of(each) is None}
        self._modifier_rank = modifier_rank

    def __enter__(self) -> None:
        unshard(self._handles)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an exception ranks may have diverged: run no collective, and drop the edits.
        modifier_rank = self._modifier_rank if kind is None else None
        reshard(self._handles, modifier_rank)
        if modifier_rank is not None:
            take_from(modifier_rank, self._whole.values())


@contextmanager
def gathered(model: nn.Module) -> Iterator[nn.Module]:
    """Context that yields `model` (or an engine's) with whole weights on every rank; edits are dropped. Collective.

    Can be nested, does nothing below stage 3, and does not affect training afterwards. Needs memory for the whole
    model; `generate` on the sharded model instead gathers units as they are used, and keeps as many as
    stage3_max_live_parameters allows.
    """
    inner = getattr(model, "module", model)
    with GatheredParameters(inner.parameters()):
        yield inner


unwrap_model_for_generation = gathered  # DeepSpeed's name


def handles_of(params: Any) -> list[ShardedParameter]:
    """The sharded parameters of `params` and their sharded scales, each once, in the order of sharding (the same on all
    ranks)."""
    candidates: Iterable[Any] = [params] if isinstance(params, Tensor) else (params or ())
    tensors = with_scales(item for item in candidates if isinstance(item, Tensor))
    handles = {id(handle): handle for tensor in tensors if (handle := of(tensor))}
    return sorted(handles.values(), key=lambda handle: handle.parameter.ds_id)  # type: ignore[attr-defined]


# Weights for an inference engine: whole, by the model's own names, never all at once.


def gathered_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the whole weights of `model` (or an engine's) one after the other, for example for an inference engine.

    Names are those of the Hugging Face model. PEFT adapters are merged into the yielded weights, layer by layer. The
    whole model is never in memory: besides the shards there is only one parameter (or small ones, 4 MB in fp32) and its
    sum with the adapter. Values are read-only and valid until the next iteration. Collective: every rank must iterate
    to the end. Tied weights are yielded under each of their names.

        for name, values in hf_zero.gathered_weights(trainer.model_wrapped):
            inference_model.load_weights([(name, values)])

    Raises:
        ValueError: for adapters that are not added to a weight (such as DoRA), or on quantized weights.
    """
    inner = getattr(model, "module", model)
    names, adapted = names_without_adapters(inner), adapted_layers(inner)
    for parameter, values in unsharded_values(inner, together_numel=TOGETHER_NUMEL):
        for layer in adapted.get(id(parameter), ()):
            own = [each for name, each in layer.named_parameters() if "base_layer" not in name.split(".")]
            with torch.no_grad(), GatheredParameters(own):
                for adapter in layer.active_adapters:
                    values = values + layer.get_delta_weight(adapter).to(values)
        for name in names.get(id(parameter), ()):
            yield name, values
        del values  # before the next parameters are gathered


def adapted_layers(model: nn.Module) -> dict[int, list[Any]]:
    """PEFT layers around each parameter, by the parameter's id.

    Raises:
        ValueError: as `gathered_weights`.
    """
    adapters: dict[int, list[Any]] = {}
    for name, layer in model.named_modules():
        if not hasattr(layer, "get_base_layer") or getattr(layer, "merged", False) or layer.disable_adapters:
            continue
        base = getattr(layer.get_base_layer(), getattr(layer, "parameter_name", "weight"), None)
        is_sum = hasattr(layer, "get_delta_weight") and not any((getattr(layer, "use_dora", None) or {}).values())
        if not is_sum or base is None or is_packed(base) or not base.is_floating_point():
            raise ValueError(
                f"gathered_weights: the adapter of {name} is not added to a weight; call merge_adapter() inside "
                "hf_zero.gathered(model), which needs memory for the whole model"
            )
        adapters.setdefault(id(base), []).append(layer)
    return adapters


def names_without_adapters(model: nn.Module) -> dict[int, list[str]]:
    """Names by parameter id, without parameters that only PEFT has. A tied parameter has several."""
    prefix = getattr(model, "prefix", None)  # "lora_" and so on
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if prefix is not None:
            if prefix in name or "original_module" in name:
                continue
            name = re.sub(r"\.base_layer|\.modules_to_save\.[^.]+", "", name.removeprefix("base_model.model."))
        names.setdefault(id(parameter), []).append(name)
    return names


def frozen_in_adapters(model: nn.Module) -> set[str]:
    """Names of frozen parameters that PEFT saves with the model's adapters: embeddings that are targeted or resized,
    adapters that are not being trained, frozen factors. PEFT itself is asked."""
    adapters: Any = getattr(model, "peft_config", None)
    if adapters is None:
        return set()
    from peft import get_peft_model_state_dict

    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    names = {name: torch.zeros(()).expand(tensor.shape) for name, tensor in named}  # no memory
    saved: set[int] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT repeats them when it saves
        for adapter in adapters:
            saved |= set(map(id, get_peft_model_state_dict(model, names, adapter).values()))
    frozen = (name for name, parameter in model.named_parameters() if not parameter.requires_grad)
    return {name for name in frozen if id(names[name]) in saved}


# Loading whole weights into an engine's model, parameter by parameter, sharded or not.


@torch.no_grad()
def load_whole(
    module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
) -> _IncompatibleKeys:
    """Like torch's method, without gathering: each rank takes its shard of each tensor, and masters are updated.

    Args:
        state_dict: the same values on all ranks; tensors may be memory-mapped, and each is read once.
        assign: no effect; parameters stay the same objects.

    Raises:
        RuntimeError: for tensors of other shapes and, with `strict`, for missing or unexpected names. Nothing has been
            written.
    """
    places: dict[str, Tensor] = dict(named_with_scales(module, remove_duplicate=False))
    places |= {name: place for name, place in module.state_dict().items() if name not in places}
    missing = [name for name in module.state_dict() if name not in state_dict]
    unexpected = [name for name in state_dict if name not in places]
    common = [name for name in state_dict if name in places]
    problems = [
        f"{name} has the shape {tuple(state_dict[name].shape)}, the model's {tuple(places[name].shape)}"
        for name in common
        if state_dict[name].shape != places[name].shape
    ]
    if strict:
        problems += [f"missing: {', '.join(missing)}"] * bool(missing)
        problems += [f"unexpected: {', '.join(unexpected)}"] * bool(unexpected)
    if problems:
        raise RuntimeError(f"these weights do not fit {type(module).__name__}: {'; '.join(problems)}")
    for name in common:
        handle = of(places[name])
        if handle is None:
            places[name].copy_(state_dict[name])
        else:
            handle.write(state_dict[name])
    return _IncompatibleKeys(missing, unexpected)


def load_module_state_dict(
    engine: Any,
    checkpoint: Mapping[str, Any],
    strict: bool = True,
    custom_load_fn: Callable[..., Any] | None = None,
    fetch_z3_params: bool = False,
    z3_params_to_fetch: Iterable[torch.nn.Parameter] | None = None,
    allowed_missing_keys: Collection[str] | None = None,
) -> None:
    """Load `checkpoint["module"]` (whole weights, the same on all ranks) into model and masters. Collective.

    At stage 3 parameters are gathered module by module, regardless of `fetch_z3_params` and `z3_params_to_fetch`. Ranks
    that hold parts of matrices or experts take theirs.

    Args:
        allowed_missing_keys: names that a strict load accepts as missing.

    Raises:
        RuntimeError: names differ (only if `strict`) or shapes do; nothing has been written then.
    """
    weights, module = checkpoint["module"], engine.module
    if custom_load_fn is not None:
        custom_load_fn(src=weights, dst=module)
        return
    known = {name for name, _ in _tensors(module)}
    extra = dict(with_extra_states(module))
    missing, unexpected = sorted(known - set(weights)), sorted(set(weights) - known - set(extra))
    may_lack = {*_unsaved(module), *(allowed_missing_keys or ())}
    needed = [name for name in missing if name not in may_lack]
    if strict and (needed or unexpected):
        raise RuntimeError(
            f"load_module_state_dict(strict=True): missing {needed or 'nothing'}, unexpected {unexpected or 'nothing'}"
        )
    mismatches = [
        f"size mismatch for {name}: {tuple(weights[name].shape)} instead of {whole_shape(target)}"
        for name, target in _tensors(module)
        if weights.get(name) is not None and not _fits(weights[name], target)
    ]
    if mismatches:
        raise RuntimeError(f"load_module_state_dict: {'; '.join(mismatches)}")
    for prefix, inner in module.named_modules():
        own = list(inner.parameters(recurse=False))
        with GatheredParameters(own, modifier_rank=0), torch.no_grad():
            for name, target in [*inner.named_parameters(recurse=False), *inner.named_buffers(recurse=False)]:
                value = weights.get(f"{prefix}.{name}" if prefix else name)
                if value is not None:
                    part = held_part(target)
                    target.copy_(value if part is None else part.of(value))
    for name, inner in extra.items():
        if name in weights:
            inner.set_extra_state(weights[name])


def _tensors(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers under all of their names."""
    named = module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    return [*named[0], *named[1]]


def _fits(value: torch.Tensor, target: torch.Tensor) -> bool:
    return tuple(value.shape) == whole_shape(target) or value.numel() == target.numel() == 1


def _unsaved(module: torch.nn.Module) -> set[str]:
    """Names of non-persistent buffers."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, inner in module.named_modules(remove_duplicate=False)
        for name in inner._non_persistent_buffers_set
    }


_REGISTERED = "_external_params"  # DeepSpeed's name


class ParameterOffload:
    """`engine.optimizer.parameter_offload`, or `engine.optimizer` itself without an optimizer.

    Attributes:
        module: the root module.
        forward_hooks, backward_hooks: removable handles; removing one removes all hooks until
            `_register_deepspeed_module` restores them.
        param_coordinator: invalidates a recorded gather order in DeepSpeed; ours is fixed, so it does nothing.
    """

    def __init__(self, module: nn.Module, store: ShardedParameters) -> None:
        self.module = module
        self.param_coordinator = SimpleNamespace(is_invalid_trace=lambda: True, _invalidate_trace=lambda: None)
        self.backward_hooks: list[Any] = []
        self.forward_hooks: list[Any] = [SimpleNamespace(remove=store.detach)]
        self._store = store
        vars(module)["ds_external_parameters"] = _OfThisModule(functools.partial(external_parameters, module))

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Restore the hooks on `module`, which must be the root."""
        self._store.attach()
        self.forward_hooks = [SimpleNamespace(remove=self._store.detach)]


class _OfThisModule:
    """A method of one module, which is None in its copies and pickles."""

    def __init__(self, method: Callable[[], Any]) -> None:
        self._method = method

    def __call__(self) -> Any:
        return self._method()

    def __reduce__(self) -> Any:
        return type(None), ()


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Register that `module` reads `parameter` of another module.

    Reading a parameter gathers it automatically, so this only records what `ds_external_parameters` returns.

    Raises:
        RuntimeError: if `parameter` is not an nn.Parameter.
    """
    if not isinstance(parameter, nn.Parameter):
        raise RuntimeError(f"register_external_parameter takes an nn.Parameter, got {type(parameter).__name__}")
    vars(module).setdefault(_REGISTERED, {})[id(parameter)] = parameter


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undo `register_external_parameter`.

    Raises:
        RuntimeError: if the parameter was not registered.
    """
    if vars(module).get(_REGISTERED, {}).pop(id(parameter), None) is None:
        raise RuntimeError("the parameter was not registered with this module")


def external_parameters(module: nn.Module) -> Iterator[tuple[Any, nn.Parameter]]:
    """(key, parameter) pairs registered with `module`."""
    return iter(vars(module).get(_REGISTERED, {}).items())

"""PEFT adapters around layers that are cut: which of their weights are cut with the layer.

LoRA adds B(A(x)) to the output of its layer. Hooks on the forward of a cut layer apply to both.

              layer cut in columns                       layer cut in rows
    layer     part of the outputs                        part of the inputs, outputs are summed
    A         whole, its gradient is summed over ranks   part of the inputs, outputs are summed
    B         part of the outputs                        whole

DoRA's magnitudes are cut like the outputs. PEFT is not imported here: without it, there are no adapters.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.comm import Collectives
from hf_zero.comm.parts import held_part
from hf_zero.features import unwrapped
from hf_zero.layout import Interval
from hf_zero.tensor import layers
from hf_zero.tensor.layers import summed

# Intervals of ranks along a dimension, as pure integers.


Intervals = tuple[tuple[Interval, ...], ...]


def even(extent: int, ranks: int, *, unit: int = 1, packed: int = 1) -> Intervals:
    """Parts in rank order, in whole units; the first ranks get one more if the number is not divisible.

    Args:
        unit: number of elements that stay together, such as those of a head.
        packed: number of concatenated matrices, each of which is divided separately.
    """
    inner = extent // packed
    sizes = counts(inner // unit, ranks)
    starts = [sum(sizes[:rank]) for rank in range(ranks)]
    return tuple(
        tuple(
            Interval(number * inner + start * unit, number * inner + (start + size) * unit) for number in range(packed)
        )
        for start, size in zip(starts, sizes, strict=True)
    )


def sizes_of(intervals: Intervals) -> list[int]:
    """The number of elements of every rank."""
    return [sum(piece.numel for piece in pieces) for pieces in intervals]


def counts(number: int, ranks: int) -> list[int]:
    """Divide `number` items among ranks."""
    return [number // ranks + (rank < number % ranks) for rank in range(ranks)]


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of an attention, divided among ranks.

    Attributes:
        query: number of query heads of every rank.
        key: indices of the key heads that every rank needs, in the order of its query heads; None if they are divided
            like the query heads.
        groups: number of query heads per key head on every rank.
    """

    query: tuple[int, ...]
    key: tuple[tuple[int, ...], ...] | None
    groups: tuple[int, ...]


def heads(num_query: int, num_key: int, ranks: int) -> Heads:
    """Divide heads among ranks; query head h uses key head h // (num_query / num_key).

    Raises:
        ValueError: if there are fewer query heads than ranks.
    """
    if num_query < ranks:
        raise ValueError(f"attention heads >= ranks per tensor group does not hold: {num_query} < {ranks}")
    group = num_query // num_key
    query = tuple(counts(num_query, ranks))
    if num_query % ranks == 0 and num_key % ranks == 0:
        return Heads(query, None, (group,) * ranks)
    keys, groups = [], []
    for rank in range(ranks):
        first = sum(query[:rank])
        wanted = [head // group for head in range(first, first + query[rank])]
        distinct = sorted(set(wanted))
        share = len(wanted) // len(distinct)
        is_even = [key for key in distinct for _ in range(share)] == wanted
        keys.append(tuple(distinct if is_even else wanted))
        groups.append(share if is_even else 1)
    return Heads(query, tuple(keys), tuple(groups))


Keep = Callable[[nn.Parameter, int, Intervals], None]
"""Function that keeps only this rank's intervals along a dimension of a parameter."""

_TYPES = ("LORA", "TRAINABLE_TOKENS", "PROMPT_TUNING", "P_TUNING")  # the last two are in front of the whole model
_AROUND_PARAMETERS = ("moe_tp_experts", "all_reduce", "local_params", "replicate")
_OTHERWISE = "or remove tensor_parallel.autotp_size (stage 3 shards the same matrices)"
_INNER = re.compile(r"\.(base_layer|original_module|token_adapter|modules_to_save\.[^.]+)(?=\.|$)")
_HANDLED = "_hf_zero_is_cut_with_its_layer"


def layer_in(module: nn.Module) -> nn.Module:
    """The layer that adapters wrap, or `module` itself."""
    while isinstance(module, _peft("tuners.tuners_utils", "BaseTunerLayer")) and "base_layer" in module._modules:
        module = module.get_submodule("base_layer")
    return module


def copies_of(module: nn.Module) -> list[nn.Module]:
    """The original and each adapter's copy of a module in `modules_to_save`; else only `module`."""
    if not isinstance(module, _peft("utils.other", "ModulesToSaveWrapper")):
        return [module]
    return [module.get_submodule("original_module"), *module.get_submodule("modules_to_save").children()]


def parameters_of(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of a layer, including its adapters."""
    return module.parameters(recurse=layer_in(module) is not module)


def stays_whole(module: Any) -> bool:
    """Whether adapters need the layer's full weight: those for single tokens, and DoRA of embeddings."""
    tokens = _peft("tuners.trainable_tokens.layer", "TrainableTokensLayer")
    if isinstance(module, (_peft("utils.other", "TrainableTokensWrapper"), tokens)):
        return True
    return _is_exactly(module, "Embedding") and bool(module.lora_variant)


def modules_in(base: nn.Module) -> dict[str, nn.Module]:
    """Modules by the names they would have without adapters; of a wrapped layer, the outermost wrapper."""
    modules: dict[str, nn.Module] = {}
    is_adapted = any(map(_is_adapter, base.modules()))
    for name, module in base.named_modules():
        modules.setdefault(name.replace(".base_layer", "") if is_adapted else name, module)
    return modules


def names_in(base: nn.Module) -> list[str]:
    """The names that modules and parameters would have without adapters."""
    names = [name for name, _ in base.named_modules()] + [name for name, _ in base.named_parameters()]
    return [_INNER.sub("", name) for name in names] if any(map(_is_adapter, base.modules())) else names


def check_adapters(model: nn.Module, plan: dict[str, str]) -> None:
    """
    Args:
        model: PEFT's model, or the model that it wraps.
        plan: style by name; names are those of `names_in`.

    Raises:
        ValueError: if an adapter cannot be cut; names it.
    """
    for adapter, config in dict(getattr(model, "peft_config", {})).items():
        kind = getattr(getattr(config, "peft_type", None), "value", None)
        if kind not in _TYPES:
            raise ValueError(
                f"tensor parallelism supports adapters of PEFT's types {', '.join(_TYPES)}, but adapter "
                f"{adapter!r} has type {kind}; train LoRA, {_OTHERWISE}"
            )
    modules = modules_in(unwrapped(model))
    for name, style in plan.items():
        owner, _, own = name.rpartition(".")
        if name not in modules and (owner not in modules or own not in layer_in(modules[owner])._parameters):
            around = next(part for part in _owners(name) if part in modules and _is_adapter(modules[part]))
            raise ValueError(
                f"{around}: PEFT's {type(modules[around]).__name__} wraps matrices of which ranks must hold parts "
                f"({name}); leave it out of modules_to_save, {_OTHERWISE}"
            )
        for module in copies_of(modules[name]) if name in modules else ():
            why = None if stays_whole(module) else _refused(module, style)
            if why is not None:
                raise ValueError(f"{name}: {why}; leave it out of the adapter's targets, {_OTHERWISE}")


def _owners(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]


def check_still_cut(base: nn.Module) -> None:
    """Raises ValueError if adapters were added to parts of matrices."""
    for name, module in base.named_modules():
        around = layer_in(module)
        if around is not module and _HANDLED not in vars(module) and any(map(held_part, around.parameters())):
            raise ValueError(
                f"{name}: an adapter was added to a matrix of which each rank only holds a part; add adapters before "
                "the first deepspeed.initialize of the model"
            )


def cut_outputs(module: Any, group: Collectives, intervals: Intervals, keep: Keep) -> None:
    """Cut the adapters of a layer of which rank r computes outputs `intervals[r]`."""
    for lora in _loras(module):
        keep(lora.b.weight, 0, intervals)
        if lora.b.bias is not None:
            keep(lora.b.bias, 0, intervals)
        if lora.magnitude is not None:
            keep(lora.magnitude.get_parameter("weight"), 0, intervals)
        lora.b.out_features = sizes_of(intervals)[group.rank]
        layers.sum_gradients(lora.a.parameters(), group)
        module.out_features = lora.b.out_features


def cut_inputs(module: Any, group: Collectives, intervals: Intervals, keep: Keep) -> None:
    """Cut the adapters of a layer of which rank r takes inputs `intervals[r]`."""
    sizes = sizes_of(intervals)
    for lora in _loras(module):
        keep(lora.a.weight, 1, intervals)
        lora.a.in_features = sizes[group.rank]
        layers.row_parallel(lora.a, group, sizes)
        if isinstance(lora.dropout, nn.Dropout):
            layers.stand_in_front(
                _DropoutOfPart, lora.dropout, nn.Dropout, row_size=sizes[group.rank], whole_size=sum(sizes),
                row_pieces=intervals[group.rank],
            )  # fmt: skip
        if lora.magnitude is not None:
            layers.stand_in_front(_DoraOfPart, lora.magnitude, type(lora.magnitude), tensor_group=group)
        module.in_features = lora.a.in_features


def cut_parameter(module: nn.Module, own: str, group: Collectives, dim: int, intervals: Intervals, keep: Keep) -> None:
    """Cut the adapters of a parameter that is cut along `dim`, such as packed experts. The dimensions of one matrix,
    B @ A, are (outputs, inputs), those of packed ones (experts, inputs, outputs) or (experts, outputs, inputs)."""
    for wrapper in _around_parameter(module, own):
        number = wrapper.get_param().dim()
        outputs = number - (2 if number == 2 or wrapper._did_swap_in_out_features else 1)
        for lora in _loras(wrapper):
            if dim == outputs:
                keep(lora.b.weight, 0, intervals)
                layers.sum_gradients(lora.a.parameters(), group)
            else:
                keep(lora.a.weight, 1, intervals)
                layers.sum_gradients(lora.b.parameters(), group)


def adapters_of(module: nn.Module) -> Iterator[nn.Parameter]:
    """The weights of all adapters of single parameters in `module`."""
    for wrapper in module.modules():
        if _is_exactly(wrapper, "ParamWrapper"):
            yield from (p for name, p in wrapper.named_parameters() if not name.startswith("base_layer."))


def adapters_around(module: nn.Module, own: str) -> Iterator[nn.Parameter]:
    """The weights of the adapters of the parameter `own` of the layer in `module`."""
    for wrapper in _around_parameter(module, own):
        for lora in _loras(wrapper):
            yield from (lora.a.weight, lora.b.weight)


def _around_parameter(module: Any, own: str) -> Iterator[Any]:
    while _is_exactly(module, "ParamWrapper"):
        if module.parameter_name == own:
            yield module
        module = module.base_layer


def note_handled(module: Any) -> None:
    """Mark adapters as cut with their layer, and forbid to unload them, which would lose hooks on their forward."""
    layer = layer_in(module)
    if _is_exactly(module, "Embedding"):
        module.merge = _refuse_unloading  # A is whole, but the layer holds a part
    while module is not layer:
        setattr(module, _HANDLED, True)
        module.unload_and_optionally_merge_module = _refuse_unloading
        module = module.base_layer


@dataclass(frozen=True, slots=True)
class _Lora:
    a: Any  # as b an nn.Linear
    b: Any
    dropout: nn.Module
    magnitude: nn.Module | None


def _loras(module: Any) -> list[_Lora]:
    if not _is_exactly(module, "Linear") and not _is_exactly(module, "ParamWrapper"):
        return []
    magnitudes = dict(module.lora_magnitude_vector.items())
    return [
        _Lora(a, module.lora_B[name], module.lora_dropout[name], magnitudes.get(name))
        for name, a in module.lora_A.items()
    ]


def _refuse_unloading(*_: Any, **__: Any) -> Any:
    raise ValueError(
        "an adapter of a matrix that is divided among ranks cannot be merged and unloaded: hooks on its forward would "
        "be lost, and every rank would save its part; save the adapter (Trainer.save_model), and merge it in a "
        "process that loads the whole model"
    )


def _refused(module: Any, style: str) -> str | None:
    """The reason why a layer's adapters prevent cutting it, or None."""
    if not _is_adapter(module) or (_is_exactly(module, "ParamWrapper") and style in _AROUND_PARAMETERS):
        return None
    if not _is_exactly(module, "Linear") and not _is_exactly(module, "Embedding"):
        return f"tensor parallelism only supports LoRA around layers, and this is PEFT's {type(module).__name__}"
    if _is_adapter(module.base_layer):
        return "tensor parallelism does not support adapters that wrap another adapter"
    for adapter, variant in module.lora_variant.items():
        if type(variant).__name__ != "DoraLinearVariant":
            return (
                f"tensor parallelism only supports LoRA and DoRA, and adapter {adapter!r} is another variant "
                f"({type(variant).__name__})"
            )
    return None


def _is_exactly(module: nn.Module, name: str) -> bool:
    """Whether `module` is exactly LoRA's layer of that name; subclasses are other adapters."""
    return type(module) is _peft("tuners.lora.layer", name)


def _is_adapter(module: nn.Module) -> bool:
    kinds = (_peft("tuners.tuners_utils", "BaseTunerLayer"), _peft("utils.other", "AuxiliaryTrainingWrapper"))
    return isinstance(module, kinds)


class _Nothing:
    """A class without instances."""


def _peft(module: str, name: str) -> type:
    kind: type = getattr(sys.modules.get(f"peft.{module}"), name, _Nothing)
    return kind


class _DropoutOfPart:
    """Mixin for nn.Dropout: ranks draw for the whole input, of which they have parts. So they drop the same elements as
    one process, and their random states stay equal even if parts differ in size."""

    row_size: int
    whole_size: int
    row_pieces: Sequence[Any]
    p: float
    training: bool

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training or inputs.shape[-1] != self.row_size:
            return nn.functional.dropout(inputs, self.p, self.training)
        factors = nn.functional.dropout(inputs.new_ones(*inputs.shape[:-1], self.whole_size), self.p)
        mine = torch.cat([factors[..., piece.start : piece.stop] for piece in self.row_pieces], dim=-1)
        return inputs * mine


class _DoraOfPart:
    """Mixin for PEFT's DoRA layer: the norm of an output's weights is over all inputs, of which ranks have parts."""

    tensor_group: Collectives

    def get_lora_weight(self, lora_A: nn.Linear, lora_B: nn.Linear, adapter_name: str | None = None) -> Tensor:
        return lora_B.weight @ lora_A.weight

    def get_weight_norm(
        self, weight: Tensor, lora_weight: Tensor, scaling: float, adapter_name: str | None = None
    ) -> Tensor:
        dims = self.__dict__.get("fan_in_fan_out")
        both = (weight.T if dims else weight) + scaling * lora_weight
        return summed(self.tensor_group, both.detach().float().square().sum(dim=1)).sqrt().to(weight.dtype)

    def forward(self, x: Tensor, *, base_layer: nn.Module, base_result: Tensor | None = None, **more: Any) -> Tensor:
        if base_result is None:  # the dropped input differs from the layer's
            base_result = base_layer(x)
        result: Tensor = super().forward(x, base_layer=base_layer, base_result=base_result, **more)  # type: ignore[misc]
        return result

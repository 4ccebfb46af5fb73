"""Cuts a transformers model: every rank of a tensor group keeps its part of each matrix in the plan."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.comm import Collectives
from hf_zero.comm.parts import HeldPart, held_part, keep_part, whole_shape
from hf_zero.features import text_config, unwrapped
from hf_zero.layout.cuts import Cut
from hf_zero.log import logger
from hf_zero.params.partitioning import make_plain
from hf_zero.params.store import of
from hf_zero.precision import is_packed, mark_packed
from hf_zero.tensor import layers
from hf_zero.tensor.adapters import (
    Heads,
    Intervals,
    adapters_around,
    adapters_of,
    check_adapters,
    check_still_cut,
    copies_of,
    counts,
    cut_inputs,
    cut_outputs,
    cut_parameter,
    even,
    heads,
    layer_in,
    modules_in,
    names_in,
    note_handled,
    parameters_of,
    sizes_of,
    stays_whole,
)
from hf_zero.tensor.layers import enter, split

# The plan of a model: which modules and parameters are cut, and how. It is transformers' tp_plan, or based on names.


COLUMNS = ("colwise", "colwise_gather_output", "colwise_rep")
ROWS = ("rowwise", "rowwise_split_input", "rowwise_rep")
_OF_BLOCKS = (*COLUMNS, *ROWS, "packed_colwise", "packed_rowwise", "moe_tp_experts")
STYLES = (
    *_OF_BLOCKS,
    "embedding_rowwise",
    "embedding_colwise",
    "replicated_with_grad_allreduce",
    "mla_kv_a_proj",
    "all_reduce",
    "moe_identity_expert",
    "rowwise_own_outputs",  # this and the next are our own: each rank takes its part of a full output
    "replicate_own_outputs",
    "local_params",
    "replicate",
)
# Layers of models without a plan, by name suffix. Fused query, key and value are three matrices in one.
_BY_NAME = {
    "gpt2": {"attn.c_attn": "fused_attention", "attn.c_proj": "rowwise", "mlp.c_fc": "colwise", "mlp.c_proj": "rowwise"}
}
# Modules between column-cut and row-cut matrices only process a rank's part of the features. Plans that omit them leave
# their parameters with only a part of the gradient in transformers.
_BETWEEN = ("q_norm", "k_norm", "act_fn")
# Modules cut by heads that plans omit or get wrong, by name suffix.
_BY_HEADS = {
    "doge": {"self_attn.A": "colwise", "self_attn.dt_proj": "rowwise_own_outputs"},
    "esmc": {  # norms are over all heads
        "self_attn.q_proj": "colwise_gather_output",
        "self_attn.k_proj": "colwise_gather_output",
        "self_attn.q_norm": "replicate_own_outputs",
        "self_attn.k_norm": "replicate_own_outputs",
    },
    "neomme": {
        "self_attn.exclusive_self_attention.alpha": "colwise",
        "model.value_embeddings": "replicate_own_outputs",
    },
}


def plan_of(model: nn.Module) -> dict[str, str]:
    """The style by full name of each module or parameter; names are those without adapters.

    Raises:
        ValueError: if the model has neither a plan nor known names, or its plan has an unknown style.
    """
    names = names_in(model)
    styles = dict(_by_plan(names, getattr(model, "tp_plan", None) or {}))
    if not set(styles.values()) & {*_OF_BLOCKS}:
        styles |= _by_name(model, names)
    styles |= _left_out(model, names, styles)
    unknown = sorted({style for style in styles.values() if style not in (*STYLES, "fused_attention")})
    if unknown:
        raise ValueError(f"the plan of {type(model).__name__} has unknown styles: {', '.join(unknown)}")
    return styles


def _by_plan(names: Iterable[str], plan: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name in names:
        style = plan.get(name) or plan.get(re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", name))
        if style is not None:
            yield name, style


def _left_out(model: nn.Module, names: Collection[str], plan: Mapping[str, str]) -> dict[str, str]:
    known = set(names)
    cut = {name.rpartition(".")[0] for name, style in plan.items() if style in ("colwise", "packed_colwise")}
    between = {
        f"{owner}.{own}": "replicated_with_grad_allreduce"
        for owner in cut
        for own in _BETWEEN
        if f"{owner}.{own}" in known and f"{owner}.{own}" not in plan
    }
    ends = _BY_HEADS.get(str(getattr(getattr(model, "config", None), "model_type", None)), {})
    return between | {name: style for name in names for end, style in ends.items() if f".{name}".endswith(f".{end}")}


def _by_name(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    kind: Any = getattr(getattr(model, "config", None), "model_type", None)
    rules = _BY_NAME.get(str(kind))
    if rules is None:
        raise ValueError(
            f"{type(model).__name__} ({kind or 'not of transformers'}) has no tensor-parallel plan (tp_plan) that cuts "
            f"layers, and is not a known architecture without one ({', '.join(_BY_NAME)}); set tp_plan on the "
            "model, or remove tensor_parallel.autotp_size"
        )
    return {name: style for name in names for end, style in rules.items() if name.endswith(f".{end}")}


_SHARDED = "_hf_zero_tensor_size"
_GROUPED = 8  # grouped matrix products of experts need rows of multiples of 16 bytes
_OUTPUTS = ("o_proj", "dense", "out_proj")  # names of output projections of attention


def shard_model(
    model: nn.Module, group: Collectives, device: torch.device, reshard: Callable[[nn.Parameter], object] | None = None
) -> None:
    """Cut `model` with the values of the group's first rank. Does nothing if it is already cut. Collective. Parameters
    and modules stay the same objects.

    Args:
        reshard: shards a part over the ranks that hold it. Parameters sharded by `zero.Init` are gathered, cut and
            sharded again one after the other; those that are not cut stay as they are. Default: parts stay whole.

    Raises:
        ValueError: if it cannot be cut for this number of ranks.
    """
    base = unwrapped(model)
    before = vars(base).get(_SHARDED)
    if before is not None:
        if before != group.ranks:
            raise ValueError(f"the model is already cut for ranks {before}, and cannot be cut for {group.ranks}")
        check_still_cut(base)
        return
    plan = _plan_for(model)
    _send_values(model, group, device)
    _cut(model, plan, group, reshard)
    cut = [name for name, parameter in model.named_parameters() if held_part(parameter) is not None]
    logger.info("tensor parallelism: %d parameters are cut for %d ranks", len(cut), group.size)


def cut_model(model: nn.Module, group: Collectives) -> None:
    """Cut a model on the meta device without communication, to find out its parts.

    Raises:
        ValueError: if it cannot be cut for this number of ranks.
    """
    _cut(model, _plan_for(model), group)


def _plan_for(model: nn.Module) -> dict[str, str]:
    plan = plan_of(unwrapped(model))
    check_adapters(model, plan)
    return plan


def _cut(
    model: nn.Module,
    plan: dict[str, str],
    group: Collectives,
    reshard: Callable[[nn.Parameter], object] | None = None,
) -> None:
    base = unwrapped(model)
    _Sharder(base, plan, group, reshard).run()
    if all(held_part(parameter) is None for parameter in model.parameters()):
        raise ValueError(
            f"the tensor-parallel plan of {type(base).__name__} cuts nothing: it names {', '.join(sorted(plan))}, but "
            "tied weights stay whole; remove tensor_parallel.autotp_size"
        )
    _check_forward(base)
    vars(base)[_SHARDED] = group.ranks


# Packages whose forwards of models multiply by the head's weight without calling the head.
_FUSED_LOSSES = ("liger_kernel", "cut_cross_entropy")


def _check_forward(base: nn.Module) -> None:
    """
    Raises:
        ValueError: if the model's forward would compute the loss of the part of the vocabulary that this rank has.
    """
    head = getattr(base, "get_output_embeddings", lambda: None)()
    package = str(getattr(base.forward, "__module__", None)).partition(".")[0]
    if package in _FUSED_LOSSES and head is not None and any(map(held_part, head.parameters())):
        raise ValueError(
            f"tensor_parallel.autotp_size: {package} has replaced the forward of {type(base).__name__} by one that "
            "computes the loss from the rows of the head that this rank has, which are not the whole vocabulary. "
            "Switch that off (Trainer: liger_kernel_config with fused_linear_cross_entropy false) and use tiled_loss"
        )


@torch.no_grad()
def _send_values(model: nn.Module, group: Collectives, device: torch.device) -> None:
    mark_packed(model)
    for name, parameter in model.named_parameters():
        if is_packed(parameter) or not parameter.is_floating_point():
            raise ValueError(
                f"tensor parallelism needs weights that are not quantized, but {name} is, in {parameter.dtype}: load "
                "the model without quantization_config, or remove tensor_parallel.autotp_size"
            )
        if of(parameter) is not None:
            continue  # sharded by zero.Init, with the same values on all ranks
        if parameter.is_meta:
            raise ValueError(f"tensor parallelism needs a model with weights, but {name} is on the meta device")
        values = parameter.data.to(device).contiguous()
        group.broadcast([values])
        parameter.data.copy_(values)


class _Sharder:
    """Applies a plan to a model once."""

    def __init__(
        self,
        model: nn.Module,
        plan: dict[str, str],
        group: Collectives,
        reshard: Callable[[nn.Parameter], object] | None,
    ) -> None:
        self._model = model
        self._group = group
        self._reshard = reshard
        self._modules = modules_in(model)
        uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
        self._tied = {id(p) for p in model.parameters() if uses[id(p)] > 1}
        copies = {name: copies_of(self._modules[name]) for name in plan if name in self._modules}
        is_cut = {name: name not in copies or any(map(self._is_cut, copies[name])) for name in plan}
        self._plan = {name: style for name, style in plan.items() if is_cut[name]}
        self._heads: dict[str, Heads] = {}

    def _is_cut(self, module: nn.Module) -> bool:
        """Whether a module is cut. Tied weights (an LM head that is the embedding) stay whole on every rank."""
        return not stays_whole(module) and all(id(parameter) not in self._tied for parameter in parameters_of(module))

    def run(self) -> None:
        self._check_heads()
        for name, style in self._plan.items():
            if name in self._modules:
                for module in filter(self._is_cut, copies_of(self._modules[name])):
                    self._apply(name, module, style)
                    note_handled(module)
            else:
                owner, _, own = name.rpartition(".")
                self._cut_bare(self._modules[owner], own, style)
        self._check_experts()

    def _check_experts(self) -> None:
        """Check that experts are cut completely, because whole parameters would be added once per rank."""
        for name in (name for name, style in self._plan.items() if style == "moe_tp_experts"):
            handled = {id(parameter) for parameter in adapters_of(self._modules[name])}
            named = self._modules[name].named_parameters()
            whole = [own for own, p in named if held_part(p) is None and id(p) not in handled]
            if whole:
                raise ValueError(f"the plan sums the outputs of {name} over ranks, but does not cut {whole}")

    def _text_config(self) -> Any:
        return text_config(getattr(self._model, "config", None))

    def _check_heads(self) -> None:
        number = getattr(self._text_config(), "num_attention_heads", None)
        if isinstance(number, int) and number < self._group.size:
            raise ValueError(
                f"attention heads >= ranks per tensor group does not hold: {number} < {self._group.size}; use a "
                f"tensor_parallel.autotp_size of at most {number}"
            )

    def _apply(self, name: str, module: nn.Module, style: str) -> None:
        group = self._group
        if style.startswith("colwise"):
            self._columns(name, module, gathers=style != "colwise")
        elif style == "rowwise_own_outputs":
            self._rows(name, module, splits=False)
            self._keep_own_outputs(module)
        elif style == "replicate_own_outputs":
            self._keep_own_outputs(module)
        elif style.startswith("rowwise"):
            self._rows(name, module, splits=style != "rowwise")
        elif style == "fused_attention":
            self._fused_attention(name, module)
        elif style == "packed_colwise":
            self._cut(module, even(_outputs(module), group.size, packed=2), of_outputs=True)
        elif style == "packed_rowwise":
            self._cut(module, even(_inputs(module), group.size, packed=2), of_outputs=False)
        elif style == "moe_tp_experts":
            layers.enter_inputs(module, group, number=2)  # tokens and routing weights
            layers.leave_output(module, group)
        elif style == "moe_identity_expert":
            module.register_forward_pre_hook(lambda _, args: (args[0] / group.size, *args[1:]))
        elif style == "all_reduce":
            if any(f"{name}.{own}" in self._plan for own in layer_in(module)._parameters):
                layers.enter_inputs(module, group, number=2)  # otherwise layers inside do this themselves
            layers.leave_output(module, group)
        elif style == "replicated_with_grad_allreduce":
            layers.sum_gradients(parameters_of(module), group)
        elif style == "mla_kv_a_proj":
            layers.change_output(module, self._rope_enters(layer_in(module)))
        elif style.startswith("embedding"):
            self._embedding(layer_in(module), by_tokens=style == "embedding_rowwise")

    def _columns(self, name: str, module: nn.Module, *, gathers: bool) -> None:
        group, extent = self._group, _outputs(module)
        head_split = None if gathers else self._heads_of(name)
        own = name.rpartition(".")[2]
        if head_split is not None and own in ("k_proj", "v_proj") and head_split.key is not None:
            self._whole_key_heads(name, module, head_split)
            return
        unit = 1
        if head_split is not None:
            unit = extent // sum(head_split.query) if own == "q_proj" else self._head_extent(name)
        intervals = even(extent, group.size, unit=unit)
        self._check_halves(name, extent, gathers=gathers or head_split is not None)
        self._cut(module, intervals, of_outputs=True)
        if gathers:
            layers.gather_output(module, group, sizes_of(intervals))
            layer: Any = layer_in(module)
            layer.out_features = extent  # the width that callers get

    def _rows(self, name: str, module: nn.Module, *, splits: bool) -> None:
        owner = self._modules[name.rpartition(".")[0]]
        knows_heads = not splits and (self._heads_of(name) is not None or hasattr(owner, "c_attn"))
        intervals = even(_inputs(module), self._group.size, unit=self._head_extent(name) if knows_heads else 1)
        self._check_halves(name, _inputs(module), gathers=splits or knows_heads)
        self._cut(module, intervals, of_outputs=False)

    def _keep_own_outputs(self, module: nn.Module) -> None:
        group = self._group
        config: Any = self._text_config()
        for key in ("num_attention_heads", "num_key_value_heads"):
            number = getattr(config, key, group.size)
            if number % group.size:
                raise ValueError(
                    f"{key} = ranks per tensor group x heads per rank does not hold: {number} != {group.size} x n; "
                    f"{type(self._model).__name__} can only be cut into equal shares of its heads"
                )
        layers.change_output(module, lambda output: split(group, output, counts(output.shape[-1], group.size)))

    def _check_halves(self, name: str, extent: int, *, gathers: bool) -> None:
        """Check that parts of attention are equal if its heads are not known; parts of MLPs may differ."""
        owner: Any = self._modules[name.rpartition(".")[0]]
        per_head = getattr(owner, "head_dim", 1)
        if name.endswith(("k_proj", "v_proj")) and not gathers and extent // per_head % self._group.size:
            raise ValueError(
                f"{name}: key heads = ranks per tensor group x heads per rank does not hold: {extent // per_head} != "
                f"{self._group.size} x n, and its attention is not of a known form; use a tensor_parallel.autotp_size "
                f"that divides {extent // per_head}"
            )
        owners = name.split(".")[-3:-1]  # self_attn.q_proj.linear, self_attn.0.q_b_proj
        is_attention = "attention" in name or any("attn" in owner for owner in owners)
        if is_attention and not gathers and extent % self._group.size:
            raise ValueError(
                f"{name}: features = ranks per tensor group x features per rank does not hold: {extent} != "
                f"{self._group.size} x n, and its heads are not known; use a tensor_parallel.autotp_size that divides "
                f"{extent}"
            )

    def _heads_of(self, name: str) -> Heads | None:
        """The heads of a projection's attention, if it has q_proj, k_proj and head_dim."""
        owner, _, own = name.rpartition(".")
        if own not in ("q_proj", "k_proj", "v_proj", *_OUTPUTS):
            return None
        if owner not in self._heads:
            attention: Any = self._modules[owner]
            numbers = _numbers_of_heads(attention)
            if numbers is None:
                return None
            head_split = heads(*numbers, self._group.size)
            self._heads[owner] = head_split
            if head_split.key is not None:
                attention.num_key_value_groups = head_split.groups[self._group.rank]
        return self._heads[owner]

    def _head_extent(self, name: str) -> int:
        attention: Any = self._modules[name.rpartition(".")[0]]
        return int(attention.head_dim)

    def _whole_key_heads(self, name: str, module: nn.Module, head_split: Heads) -> None:
        """Keep all key heads on every rank, which selects those that its query heads need: they cannot be divided."""
        assert head_split.key is not None
        wanted, extent = head_split.key[self._group.rank], self._head_extent(name)
        layers.enter_inputs(module, self._group)
        layers.sum_gradients(parameters_of(module), self._group)

        def take(output: Tensor) -> Tensor:
            chosen: Tensor = output.unflatten(-1, (-1, extent))[..., list(wanted), :]
            return chosen.flatten(-2)

        layers.change_output(module, take)

    def _fused_attention(self, name: str, module: nn.Module) -> None:
        attention: Any = self._modules[name.rpartition(".")[0]]
        extent, rank = int(attention.head_dim), self._group.rank
        intervals = even(_outputs(module), self._group.size, unit=extent, packed=3)
        self._cut(module, intervals, of_outputs=True)
        attention.split_size = intervals[rank][0].numel
        attention.num_heads = attention.split_size // extent

    def _rope_enters(self, module: nn.Module) -> Callable[[Tensor], Tensor]:
        config = text_config(getattr(module, "config", None) or self._text_config())
        extent = int(config.qk_rope_head_dim)

        def change(output: Tensor) -> Tensor:
            passed, rope = output.split([output.shape[-1] - extent, extent], dim=-1)
            return torch.cat([passed, enter(self._group, rope)], dim=-1)

        return change

    def _embedding(self, module: nn.Module, *, by_tokens: bool) -> None:
        if by_tokens and not layers.calls_forward_of(module, nn.Embedding):
            return  # it may use its rows in other ways, and stays whole on every rank
        weight: Any = module.weight
        intervals = even(weight.shape[0 if by_tokens else 1], self._group.size)
        self._keep(weight, 0 if by_tokens else 1, intervals)
        if by_tokens:
            first = intervals[self._group.rank][0].start
            layers.partial_vocabulary(module, self._group, first)
        else:
            layers.gather_output(module, self._group, sizes_of(intervals))

    def _cut_bare(self, module: nn.Module, own: str, style: str) -> None:
        """Cut a parameter that is not a layer's weight, such as packed experts."""
        owner = layer_in(module)
        parameter = owner._parameters[own]
        if parameter is None or style in ("replicate", "local_params"):
            return
        if style == "replicated_with_grad_allreduce":
            layers.sum_gradients([parameter, *adapters_around(module, own)], self._group)
            return
        packed = 2 if style.startswith("packed") or (own.startswith("gate_up") and layers.has_halves(owner)) else 1
        if style.endswith("colwise"):
            dim = max(parameter.dim() - 2, 0) if parameter.dim() != 1 else 0
        elif style.endswith("rowwise"):
            if parameter.dim() == 1:
                return
            dim = parameter.dim() - 1
        else:
            raise ValueError(f"the plan has style {style} for a parameter ({own}), which is only supported for layers")
        extent = parameter.shape[dim] // packed
        in_groups = parameter.dim() > 2 and extent % _GROUPED == 0 and extent >= _GROUPED * self._group.size
        unit = _GROUPED if in_groups else 1
        intervals = even(parameter.shape[dim], self._group.size, unit=unit, packed=packed)
        cut_parameter(module, own, self._group, dim, intervals, self._keep)
        self._keep(parameter, dim, intervals)

    def _cut(self, module: nn.Module, intervals: Intervals, *, of_outputs: bool) -> None:
        layer, sizes = layer_in(module), sizes_of(intervals)
        weight, outputs = layer._parameters["weight"], _outputs(module)
        assert weight is not None
        self._keep(weight, 0 if of_outputs == isinstance(layer, nn.Linear) else 1, intervals)
        for own in layer._parameters.values() if of_outputs else ():
            if own is not None and own is not weight and own.shape[:1] == (outputs,):  # a bias, or a scale of outputs
                self._keep(own, 0, intervals)
        name = ("out_features" if of_outputs else "in_features") if isinstance(layer, nn.Linear) else "nf"
        if of_outputs or isinstance(layer, nn.Linear):
            setattr(layer, name, sizes[self._group.rank])
        if of_outputs:
            cut_outputs(module, self._group, intervals, self._keep)
            layers.enter_inputs(module, self._group)
        else:
            cut_inputs(module, self._group, intervals, self._keep)
            layers.row_parallel(layer, self._group, sizes)

    def _keep(self, parameter: nn.Parameter, dim: int, intervals: Intervals) -> None:
        handle = of(parameter)
        if handle is not None:
            make_plain(handle)
        keep_part(parameter, HeldPart(self._group, Cut(tuple(parameter.shape), dim, intervals)))
        if handle is not None and self._reshard is not None:
            self._reshard(parameter)


def _numbers_of_heads(attention: Any) -> tuple[int, int] | None:
    """The numbers of query heads and key heads of an attention; None if its form is not known."""
    extent, query, key = (getattr(attention, name, None) for name in ("head_dim", "q_proj", "k_proj"))
    value = getattr(attention, "v_proj", None) or key  # some use keys as values
    output = next((getattr(attention, name) for name in _OUTPUTS if hasattr(attention, name)), None)
    if not isinstance(extent, int) or not all(_is_linear(each) for each in (query, key, value, output)):
        return None
    features = _inputs(output)
    if features % extent or _outputs(key) % extent or _outputs(value) != _outputs(key):
        return None
    if _outputs(query) % features:  # may be a multiple, if gates of heads are packed with queries
        return None
    return features // extent, _outputs(key) // extent


def _is_linear(module: Any) -> bool:
    return isinstance(module, nn.Module) and isinstance(layer_in(copies_of(module)[0]), nn.Linear)


def _outputs(module: Any) -> int:
    layer = layer_in(copies_of(module)[0])
    return whole_shape(layer.get_parameter("weight"))[0 if isinstance(layer, nn.Linear) else 1]


def _inputs(module: Any) -> int:
    layer = layer_in(copies_of(module)[0])
    return whole_shape(layer.get_parameter("weight"))[1 if isinstance(layer, nn.Linear) else 0]

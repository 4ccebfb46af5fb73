"""Which modules and parameters of a model are cut, and how: by the plan transformers has for it, or by its layers."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from hf_zero.tensor.adapters import names_in

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
    "rowwise_own_outputs",  # this and the next are not of transformers: of what is whole, a rank takes its part
    "replicate_own_outputs",
    "local_params",
    "replicate",
)
# Layers of models without a plan, by the ends of their names. Fused query, key and value are three matrices in one.
_BY_NAME = {
    "gpt2": {"attn.c_attn": "fused_attention", "attn.c_proj": "rowwise", "mlp.c_fc": "colwise", "mlp.c_proj": "rowwise"}
}
# What lies between matrices cut in columns and those cut in rows sees a rank's part of the features. Plans that leave
# out its parameters give them, upstream, a part of their gradient.
_BETWEEN = ("q_norm", "k_norm", "act_fn")
# What plans leave out, or have wrong, that is cut by heads: by the ends of names.
_BY_HEADS = {
    "doge": {"self_attn.A": "colwise", "self_attn.dt_proj": "rowwise_own_outputs"},
    "esmc": {  # its norms are over all heads
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
    """Style by full name of a module or parameter; adapters have no place in these names.

    Raises:
        ValueError: the model has no plan and is of no known shape, or its plan has an unknown style.
    """
    names = names_in(model)
    found = dict(_by_plan(names, getattr(model, "tp_plan", None) or {}))
    if not set(found.values()) & {*_OF_BLOCKS}:
        found |= _by_name(model, names)
    found |= _left_out(model, names, found)
    unknown = sorted({style for style in found.values() if style not in (*STYLES, "fused_attention")})
    if unknown:
        raise ValueError(f"the plan of {type(model).__name__} has styles that are not known: {', '.join(unknown)}")
    return found


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
            f"{type(model).__name__} ({kind or 'not of transformers'}) has no tensor-parallel plan (tp_plan), and its "
            f"layers are of no shape that is known without one ({', '.join(_BY_NAME)}); set tp_plan on the model, or "
            "remove tensor_parallel.autotp_size"
        )
    return {name: style for name in names for end, style in rules.items() if name.endswith(f".{end}")}

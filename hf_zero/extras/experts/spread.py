"""A model whose ranks hold some experts each: transformers' packed experts, cut along their first dimension."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.comm import Collectives
from hf_zero.comm.parts import HeldPart, keep_part
from hf_zero.extras.experts.exchange import through_experts
from hf_zero.layout import Interval
from hf_zero.layout.cuts import Cut
from hf_zero.log import logger
from hf_zero.params.partitioning import unpartition

_TELLS = ("num_experts", "is_transposed", "has_gate", "_apply_gate")  # what transformers' decorator leaves on experts


class SpreadExperts:
    """Before a class of packed experts: its forward gets tokens of all ranks for this rank's experts.

    Attributes:
        num_experts: this rank's.
    """

    expert_group: Collectives
    num_experts: int
    packed: tuple[str, ...]

    def forward(self, *args: Any, **keywords: Any) -> Tensor:
        hidden, chosen, weights = inspect.signature(super().forward).bind(*args, **keywords).args  # type: ignore[misc]
        return through_experts(
            self.expert_group, hidden, chosen, weights, super().forward, own=self.num_experts,  # type: ignore[misc]
            trains=any(getattr(self, name).requires_grad for name in self.packed),
        )  # fmt: skip


def spread(model: nn.Module, group: Collectives, device: torch.device) -> None:
    """Leave this rank its share of every layer's experts; those of the group's first rank count. Once. Collective.

    Modules and parameters stay the same objects. What `zero.Init` has sharded is gathered layer by layer.

    Raises:
        ValueError: the model has no packed experts, or not as many as can be dealt out.
    """
    found = [(name, module) for name, module in model.named_modules() if _is_packed(module)]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no packed experts of transformers (one tensor for all experts of a layer); "
            "modules of single experts are not spread"
        )
    for name, module in found:
        if isinstance(module, SpreadExperts):
            if module.expert_group.ranks != group.ranks:
                raise ValueError(f"the experts of {name} have been spread over ranks {module.expert_group.ranks}")
            continue
        _check(name, module, group.size)
        around = [wrapper for wrapper in _around(model) if wrapper.get_base_layer() is module]
        unpartition(module)
        for wrapper in around:
            unpartition(wrapper)
        _spread(module, around, group, device)
    logger.info("expert parallelism: the experts of %d layers are spread over %d ranks", len(found), group.size)


def _is_packed(module: nn.Module) -> bool:
    return all(hasattr(module, name) for name in _TELLS)


def _check(name: str, module: Any, size: int) -> None:
    if module.num_experts % size:
        rule = f"experts = ranks x experts per rank does not hold: {module.num_experts} != {size} x n"
        raise ValueError(f"{name}: {rule}")
    given = list(inspect.signature(module.forward).parameters)
    if len(given) != 3:
        raise ValueError(f"{name}: experts that take {', '.join(given)} are not known")
    for own, parameter in module.named_parameters(recurse=False):
        if not parameter.is_floating_point():
            raise ValueError(f"{name}.{own} is of {parameter.dtype}: load the model without quantization_config")


@torch.no_grad()
def _spread(module: Any, around: list[Any], group: Collectives, device: torch.device) -> None:
    number = module.num_experts
    share = number // group.size
    own = [name for name, p in module.named_parameters(recurse=False) if p.shape[0] == number]
    whole = tuple((Interval(rank * share, (rank + 1) * share),) for rank in range(group.size))
    for name in own:
        _keep(module.get_parameter(name), 0, whole, group, device)
    for wrapper in around:
        for adapter, a in wrapper.lora_A.items():
            b, rank = wrapper.lora_B[adapter], wrapper.r[adapter]
            # Rows of A are experts x rank, columns of B rank x experts.
            _keep(a.weight, 0, tuple((Interval(m.start * rank, m.stop * rank),) for (m,) in whole), group, device)
            columns = tuple(
                tuple(Interval(i * number + m.start, i * number + m.stop) for i in range(rank)) for (m,) in whole
            )
            _keep(b.weight, 1, columns, group, device)
            a.out_features = b.in_features = share * rank
        wrapper.num_experts = share
        if share == 1:  # which PEFT takes for a matrix, with its outputs first
            wrapper.get_delta_weight = partial(_delta_of_one, wrapper)
    module.expert_group, module.num_experts, module.packed = group, share, tuple(own)
    kind = type(module)
    module.__class__ = type(kind.__name__, (SpreadExperts, kind), {"__module__": kind.__module__})


def _delta_of_one(wrapper: Any, adapter: str) -> Tensor:
    """What the adapter adds to the only expert of a pack, in the pack's shape."""
    delta = wrapper.lora_B[adapter].weight @ wrapper.lora_A[adapter].weight * wrapper.scaling[adapter]
    turned: Tensor = delta if wrapper._did_swap_in_out_features else delta.T
    return turned.unsqueeze(0).to(wrapper.get_param().dtype)


def _keep(
    parameter: nn.Parameter,
    dim: int,
    intervals: tuple[tuple[Interval, ...], ...],
    group: Collectives,
    device: torch.device,
) -> None:
    values = parameter.data.to(device).contiguous()
    group.broadcast([values])
    parameter.data = values
    keep_part(parameter, HeldPart(group, Cut(tuple(values.shape), dim, intervals), is_mixed=True))


def _around(model: nn.Module) -> Iterator[Any]:
    """PEFT's adapters of single parameters. PEFT is never imported here: what is not imported stands around nothing."""
    kind = getattr(sys.modules.get("peft.tuners.lora.layer"), "ParamWrapper", None)
    if kind is not None:
        yield from (module for module in model.modules() if isinstance(module, kind))

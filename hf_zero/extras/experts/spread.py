"""A model whose ranks hold some experts each: transformers' packed experts, cut along their first dimension.

Tokens on their way to the ranks that hold their experts, and what experts make of them on its way back.

    rank 0, tokens t0 t1 t2, two experts each           rank 0 holds e0 e1, rank 1 holds e2 e3
        rows by expert    e0:t0 e1:t2 | e2:t0 e2:t1 e3:t1 e3:t2
        sent                  here    |        to rank 1             one all-to-all of rows, of any counts
        computed          what has come for each expert, from all ranks
        sent back         the same rows in the same order            one all-to-all, counts the other way round
        added up          each token's rows, weighted where the token is: so gradients of weights do not travel

Backward sends the gradients of both along the same ways. Per token a rank sends 2 x experts per token rows of
hidden_size elements forward and as many backward, as far as the experts are on other ranks; and counts forward.
`ExpertGroups` says which ranks hold all experts between them; each of them sees samples of its own.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from hf_zero.comm import (
    Collectives,
    ParallelGroups,
    Partition,
    ProgramGroups,
    across,
    group_of,
    local_device,
    torch_group,
    uncompiled,
)
from hf_zero.comm.parts import HeldPart, keep_part
from hf_zero.config import ConfigError, Problem, Resolved
from hf_zero.extras.experts import PATH, ExpertParallel
from hf_zero.layout import Interval
from hf_zero.layout.cuts import Cut
from hf_zero.log import logger
from hf_zero.params.partitioning import unpartition

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From rows [n, hidden], their experts [n, 1] and weights [n, 1] to rows."""


@uncompiled
def through_experts(
    group: Collectives, hidden: Tensor, chosen: Tensor, weights: Tensor, compute: Compute, *, own: int, trains: bool
) -> Tensor:
    """The output of all ranks' experts for this rank's tokens, in the shape of `hidden`. Collective, and in
    backward again.

    Args:
        hidden: [..., hidden_size], any number of tokens on each rank.
        chosen: [tokens, k], numbers of experts.
        weights: [tokens, k].
        compute: this rank's experts, by their own numbers.
        own: how many these are; rank r has those from r * own on.
        trains: whether they want gradients.

    On the meta device, where routes are unknown, as many tokens go to each rank.
    """
    tokens, k = chosen.shape
    flat = chosen.reshape(-1)
    order = torch.argsort(flat, stable=True)
    sent = torch.bincount(flat, minlength=own * group.size) if not flat.is_meta else flat.new_empty(own * group.size)
    received = torch.empty_like(sent)
    group.all_to_all(received.chunk(group.size), sent.chunk(group.size))
    if flat.is_meta:
        away = here = [(len(flat) + rank) // group.size for rank in range(group.size)]
    else:
        away, here = torch.stack([sent, received]).view(2, group.size, own).sum(-1).tolist()
    rows = hidden.reshape(tokens, -1)[order // k]
    if trains and torch.is_grad_enabled() and not rows.requires_grad:
        rows.requires_grad_()  # all ranks of the group meet in backward, also those to which no token has come
    arrived = _travel(group, rows, away, here)
    outputs = arrived  # as it is where nothing has come, which keeps it in the graph
    if len(arrived):
        experts = torch.arange(own, device=flat.device).repeat(group.size)
        numbers = experts.repeat_interleave(received, output_size=len(arrived))
        outputs = compute(arrived, numbers.unsqueeze(1), weights.new_ones(len(arrived), 1)).to(arrived.dtype)
    returned = _travel(group, outputs, here, away)
    by_token = returned[torch.argsort(order)].view(tokens, k, -1)
    return (by_token * weights.reshape(tokens, k, 1)).sum(1).to(hidden.dtype).view(hidden.shape)


def _travel(group: Collectives, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Send the first `sent[0]` of `rows` [n, hidden] to the first rank, and so on; returns what has arrived here."""
    return cast("Tensor", _Travel.apply(group, rows, tuple(sent), tuple(received)))


class _Travel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Collectives, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return _swapped(group, rows, sent, received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, _swapped(ctx.group, grads[0], ctx.received, ctx.sent), None, None


@uncompiled
def _swapped(group: Collectives, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    rows, width = rows.contiguous(), rows.shape[1]
    arrived = rows.new_empty(sum(received), width)
    group.all_to_all(
        arrived.view(-1).split([count * width for count in received]),
        rows.view(-1).split([count * width for count in sent]),
    )
    return arrived


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
    packed = [(name, each) for name, each in model.named_modules() if all(hasattr(each, tells) for tells in _TELLS)]
    if not packed:
        raise ValueError(
            f"{type(model).__name__} has no packed experts of transformers (one tensor for all experts of a layer); "
            "modules of single experts are not spread"
        )
    for name, module in packed:
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
    logger.info("expert parallelism: the experts of %d layers are spread over %d ranks", len(packed), group.size)


def _check(name: str, module: Any, size: int) -> None:
    if module.num_experts % size:
        rule = f"experts = ranks x experts per rank does not hold: {module.num_experts} != {size} x n"
        raise ValueError(f"{name}: {rule}")
    parameters = list(inspect.signature(module.forward).parameters)
    if len(parameters) != 3:
        raise ValueError(f"{name}: experts that take {', '.join(parameters)} are not known")
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


class ExpertGroups(ProgramGroups):
    """
    world 4, 2 ranks along it         rank 0 1 | 2 3
        all experts between them               2 3      of rank 2
        the same experts                     0   2
        everything else                      0 1 2 3    shards of the states
    """

    name = "expert"
    samples = "own"
    weights = "mixed"
    group_name = "expert group"
    size_name = PATH

    @classmethod
    def given(cls, model: nn.Module, mpu: Any, mesh_param: Any) -> ExpertGroups | None:
        """The config alone says it."""
        return None

    @classmethod
    def size_in(cls, resolved: Resolved) -> int:
        return resolved.section(ExpertParallel).size

    get_expert_parallel_group = ProgramGroups.own_group
    get_expert_parallel_world_size = ProgramGroups.own_size
    get_expert_parallel_rank = ProgramGroups.own_rank

    @property
    def _alike(self) -> Partition:
        """Ranks with the same experts."""
        return across(self.partition)

    def get_expert_data_parallel_group(self) -> Any:
        """Collective at first use."""
        return torch_group(self._alike)

    def get_expert_data_parallel_world_size(self) -> int:
        return len(self._alike[0])

    def get_expert_data_parallel_rank(self) -> int:
        return group_of(self._process.rank, self._alike).index(self._process.rank)

    @classmethod
    def prepare(cls, model: nn.Module, groups: ParallelGroups, asked: ExpertGroups | None) -> None:
        """Leave each rank its experts of `model`. Collective.

        Raises:
            ConfigError: its experts cannot be spread, or ranks are along another dimension, too.
        """
        assert asked is not None, "only loaded where the config asks"
        parts = [each.name for each in groups.mesh.dimensions if each.weights == "parts"]
        try:
            if parts:
                raise ValueError(f"experts over ranks do not go with {', '.join(parts)} parallelism yet")
            spread(model, groups.along(cls.name), local_device())
        except ValueError as error:
            fix = "give another size, or remove expert_parallel"
            raise ConfigError(Problem(PATH, asked.size, str(error), fix)) from error

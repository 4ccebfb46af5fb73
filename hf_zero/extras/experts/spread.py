"""Distributes transformers' packed experts over ranks, by cutting their parameters along the first dimension.

Tokens are sent to the ranks of their experts, and the outputs are sent back:

    rank 0, tokens t0 t1 t2, two experts each           rank 0 holds e0 e1, rank 1 holds e2 e3
        rows by expert    e0:t0 e1:t2 | e2:t0 e2:t1 e3:t1 e3:t2
        sent                  here    |        to rank 1             one all-to-all of rows, with any counts
        computed          all rows received for each expert, from all ranks
        sent back         the same rows in the same order            one all-to-all, with the counts reversed
        combined          each token's rows, weighted on the token's rank: no gradients of routing weights are sent

Backward sends the gradients of both in the reverse directions. Per token, a rank sends 2 x experts per token rows of
hidden_size elements in forward and as many in backward, as far as the experts are on other ranks, plus the counts in
forward. `ExpertGroups` defines the ranks that together hold all experts; each of them processes its own samples.

With tensor parallelism, matrices of experts are cut like others before: each rank of a tensor group holds a part of
the same experts, and sends its copy of the same tokens to ranks with the same parts. The sums over the tensor group
around a layer of experts (`hf_zero.tensor.shard`) then give whole outputs and gradients.
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
    Mesh,
    ParallelGroups,
    Partition,
    ProgramGroups,
    group_of,
    local_device,
    torch_group,
    uncompiled,
)
from hf_zero.comm.parts import HeldPart, held_part, keep_part
from hf_zero.config import ConfigError, Problem, Resolved
from hf_zero.extras.experts import PATH, ExpertParallel
from hf_zero.layout import Interval
from hf_zero.layout.cuts import Cut
from hf_zero.log import logger
from hf_zero.params.partitioning import unpartition

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps rows [n, hidden], their experts [n, 1] and weights [n, 1] to output rows."""


@uncompiled
def through_experts(
    group: Collectives, hidden: Tensor, chosen: Tensor, weights: Tensor, compute: Compute, *, own: int, trains: bool
) -> Tensor:
    """The output of all ranks' experts for this rank's tokens, in the shape of `hidden`. Collective in forward and
    backward.

    Args:
        hidden: [..., hidden_size], with any number of tokens on each rank.
        chosen: [tokens, k], indices of experts.
        weights: [tokens, k].
        compute: this rank's experts, by local index.
        own: their number; rank r holds the experts from r * own on.
        trains: whether they need gradients.

    On the meta device, where routes are unknown, every rank gets the same number of tokens.
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
        rows.requires_grad_()  # all ranks must join the collectives of backward, even without tokens
    arrived = _travel(group, rows, away, here)
    outputs = arrived  # unchanged if empty, which keeps it in the graph
    if len(arrived):
        experts = torch.arange(own, device=flat.device).repeat(group.size)
        numbers = experts.repeat_interleave(received, output_size=len(arrived))
        outputs = compute(arrived, numbers.unsqueeze(1), weights.new_ones(len(arrived), 1)).to(arrived.dtype)
    returned = _travel(group, outputs, here, away)
    by_token = returned[torch.argsort(order)].view(tokens, k, -1)
    return (by_token * weights.reshape(tokens, k, 1)).sum(1).to(hidden.dtype).view(hidden.shape)


def _travel(group: Collectives, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Send the first `sent[0]` of `rows` [n, hidden] to the first rank, and so on; returns the received rows."""
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


_TELLS = ("num_experts", "is_transposed", "has_gate", "_apply_gate")  # set by transformers' decorator of experts


class SpreadExperts:
    """Mixin for a class of packed experts, whose forward then gets the tokens of all ranks for this rank's experts.

    Attributes:
        num_experts: number of this rank's experts.
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
    """Keep only this rank's share of every layer's experts, with the values of the group's first rank. Layers that are
    already distributed are skipped. Collective.

    Modules and parameters stay the same objects. Parameters sharded by `zero.Init` are gathered layer by layer.

    Raises:
        ValueError: if the model has no packed experts, or their number is not divisible by the group's size.
    """
    packed = [(name, each) for name, each in model.named_modules() if all(hasattr(each, tells) for tells in _TELLS)]
    if not packed:
        raise ValueError(
            f"{type(model).__name__} has no packed experts of transformers (one tensor for all experts of a layer); "
            "modules of single experts are not supported"
        )
    for name, module in packed:
        if isinstance(module, SpreadExperts):
            if module.expert_group.ranks != group.ranks:
                raise ValueError(f"the experts of {name} are distributed over ranks {module.expert_group.ranks}")
            continue
        _check(name, module, group.size)
        around = [wrapper for wrapper in _around(model) if wrapper.get_base_layer() is module]
        unpartition(module)
        for wrapper in around:
            unpartition(wrapper)
        _spread(module, around, group, device)
    logger.info("expert parallelism: the experts of %d layers are distributed over %d ranks", len(packed), group.size)


def _check(name: str, module: Any, size: int) -> None:
    if module.num_experts % size:
        rule = f"experts = ranks x experts per rank does not hold: {module.num_experts} != {size} x n"
        raise ValueError(f"{name}: {rule}")
    parameters = list(inspect.signature(module.forward).parameters)
    if len(parameters) != 3:
        raise ValueError(f"{name}: experts with the arguments {', '.join(parameters)} are not supported")
    for own, parameter in module.named_parameters(recurse=False):
        if not parameter.is_floating_point():
            raise ValueError(f"{name}.{own} has dtype {parameter.dtype}: load the model without quantization_config")
        part = held_part(parameter)
        if part is not None and part.cut.dim == 0:
            raise ValueError(f"{name}.{own}: the model's tp_plan divides its experts over the ranks of a tensor group")


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
        if share == 1:  # PEFT would treat it as a matrix with its outputs first
            wrapper.get_delta_weight = partial(_delta_of_one, wrapper)
    module.expert_group, module.num_experts, module.packed = group, share, tuple(own)
    kind = type(module)
    module.__class__ = type(kind.__name__, (SpreadExperts, kind), {"__module__": kind.__module__})


def _delta_of_one(wrapper: Any, adapter: str) -> Tensor:
    """The adapter's delta weight for the only expert of a packed parameter, in the parameter's shape."""
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
    """PEFT's wrappers of single parameters. PEFT is not imported here: without it, no wrappers exist."""
    kind = getattr(sys.modules.get("peft.tuners.lora.layer"), "ParamWrapper", None)
    if kind is not None:
        yield from (module for module in model.modules() if isinstance(module, kind))


class ExpertGroups(ProgramGroups):
    """
    world 4, 2 ranks along it         rank 0 1 | 2 3    groups of rank 2:
        together all experts                   2 3
        the same experts                     0   2
        everything else                      0 1 2 3    shards of the states

    world 8, and 2 per tensor group   rank 0 1 | 2 3 | 4 5 | 6 7
        parts of the same matrices             2 3      the same samples
        together all experts                 0   2      and the same parts of matrices
        the same parts of the same experts       2           6
        everything else                      0   2     4     6
    """

    name = "expert"
    samples = "own"
    weights = "mixed"
    group_name = "expert group"
    size_name = PATH
    _alike: Partition  # ranks with the same parts of the same experts

    @classmethod
    def given(cls, model: nn.Module, mpu: Any, mesh_param: Any) -> ExpertGroups | None:
        """Always None: only the config defines expert groups."""
        return None

    @classmethod
    def size_in(cls, resolved: Resolved) -> int:
        return resolved.section(ExpertParallel).over(resolved.tensor_size)

    def belong_to(self, engine: Any, beside: Sequence[ProgramGroups], mesh: Mesh) -> None:
        parts = mesh.of_parts()
        assert parts is not None, "experts are mixed"
        self._alike = parts.same_weights
        super().belong_to(engine, beside, mesh)

    get_expert_parallel_group = ProgramGroups.own_group
    get_expert_parallel_world_size = ProgramGroups.own_size
    get_expert_parallel_rank = ProgramGroups.own_rank

    def get_expert_data_parallel_group(self) -> Any:
        """The torch process group of ranks with the same experts. Collective at first use."""
        return torch_group(self._alike)

    def get_expert_data_parallel_world_size(self) -> int:
        return len(self._alike[0])

    def get_expert_data_parallel_rank(self) -> int:
        return group_of(self._process.rank, self._alike).index(self._process.rank)

    @classmethod
    def prepare(cls, model: nn.Module, groups: ParallelGroups, asked: ExpertGroups | None) -> None:
        """Keep only each rank's experts of `model`. Collective.

        Raises:
            ConfigError: if the experts cannot be distributed.
        """
        if asked is None:  # a tensor group holds all experts
            return
        try:
            spread(model, groups.along(cls.name), local_device())
        except ValueError as error:
            fix = "give another size, or remove expert_parallel"
            raise ConfigError(Problem(PATH, asked.size, str(error), fix)) from error

"""Wrappers around the forward of layers that hold parts, on every rank of a tensor group."""

from __future__ import annotations

import hashlib
import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from hf_zero.comm import Collectives, uncompiled

# Results of parts of a matrix become those of the whole one, differentiably.
#
#                     forward                     backward
# enter               the same                    sum over ranks        before columns: each rank has part of dX
# leave               sum over ranks              the same              after rows: each rank has part of Y
# gather              parts side by side          own part              after columns whose whole output is needed
# split               own part                    parts side by side    before rows whose whole input is there
#
# Layers that take the same tensor (q, k and v; gate and up) enter it together: their gradients are added before ranks
# sum them, which is one message where there would be three. The first batch is compared: all must see the same.


@dataclass(frozen=True, slots=True)
class _Entered:
    """A tensor that has entered, for the next layer that takes it."""

    source: weakref.ref[Tensor]
    version: int  # of its values: models write into what they have
    result: Tensor


# Results are held, as the graph of a checkpointed layer does not, until what the layers gave is summed or gathered. A
# layer that is computed again may stop before that: then until backward comes by, lest its activations outlive it.
_ENTERED: dict[Collectives, list[_Entered]] = {}


@uncompiled
def enter(group: Collectives, tensor: Tensor) -> Tensor:
    """`tensor`, whose gradient is summed over ranks: once for all who enter it before the next `leave` or `gather`.
    Collective in backward."""
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return tensor
    entered = _ENTERED.setdefault(group, [])
    for entry in entered:
        if entry.source() is tensor and entry.version == tensor._version:
            return entry.result
    result = cast("Tensor", _Enter.apply(group, tensor))
    entered.append(_Entered(weakref.ref(tensor), tensor._version, result))
    return result


@uncompiled
def leave(group: Collectives, tensor: Tensor) -> Tensor:
    """The sum of all ranks' `tensor`. Collective."""
    _ENTERED.pop(group, None)
    return cast("Tensor", _Leave.apply(group, tensor))


@uncompiled
def gather(group: Collectives, tensor: Tensor, sizes: Sequence[int]) -> Tensor:
    """All ranks' `tensor` side by side in the last dimension, where rank r has `sizes[r]`. Collective."""
    _ENTERED.pop(group, None)
    return cast("Tensor", _Gather.apply(group, tensor, tuple(sizes)))


def split(group: Collectives, tensor: Tensor, sizes: Sequence[int]) -> Tensor:
    """This rank's part in the last dimension. Collective in backward."""
    return cast("Tensor", _Split.apply(group, tensor, tuple(sizes)))


@uncompiled
def summed(group: Collectives, tensor: Tensor) -> Tensor:
    """A new tensor: the sum over ranks. Collective."""
    numel = tensor.numel()
    total: Tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
    if numel % group.size == 0:
        group.all_reduce(total.view(-1)).wait()
        return total
    flat = tensor.new_zeros(-(-numel // group.size) * group.size)
    flat[:numel] = total.view(-1)
    group.all_reduce(flat).wait()
    total.view(-1).copy_(flat[:numel])
    return total  # never a view: models write into what their layers return


@uncompiled
def _side_by_side(group: Collectives, tensor: Tensor, sizes: tuple[int, ...]) -> Tensor:
    rows = tensor.numel() // tensor.shape[-1]
    flat = tensor.new_zeros(group.size, rows * max(sizes))
    flat[group.rank, : tensor.numel()] = tensor.reshape(-1)
    group.all_gather(flat.view(-1)).wait()
    parts = [flat[rank, : rows * size].view(*tensor.shape[:-1], size) for rank, size in enumerate(sizes)]
    return torch.cat(parts, dim=-1)


def _own(group: Collectives, tensor: Tensor, sizes: tuple[int, ...]) -> Tensor:
    own: Tensor = tensor.split(list(sizes), dim=-1)[group.rank]
    return own.contiguous()


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Collectives, tensor: Tensor) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        _ENTERED.pop(ctx.group, None)
        return None, summed(ctx.group, grads[0])


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Collectives, tensor: Tensor) -> Tensor:
        return summed(group, tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, grads[0]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Collectives, tensor: Tensor, sizes: tuple[int, ...]) -> Tensor:
        ctx.group, ctx.sizes = group, sizes
        return _side_by_side(group, tensor, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, _own(ctx.group, grads[0], ctx.sizes), None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Collectives, tensor: Tensor, sizes: tuple[int, ...]) -> Tensor:
        ctx.group, ctx.sizes = group, sizes
        return _own(group, tensor, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, _side_by_side(ctx.group, grads[0], ctx.sizes), None


def check_first_batch(model: nn.Module, group: Collectives) -> None:
    """The first forward of `model` compares what the ranks of `group` give it, and with dropout their random seeds.
    Collective then."""

    def hook(_: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        handle.remove()
        drops = any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
        seeds = group.gather_objects(torch.initial_seed() if drops and model.training else 0)
        if len(set(seeds)) > 1:
            shown = ", ".join(f"rank {rank}: {seed}" for rank, seed in zip(group.ranks, seeds, strict=True))
            raise ValueError(
                "ranks that hold parts of the same matrices must drop the same activations, and their random numbers "
                f"start from different seeds ({shown}): call transformers.set_seed(n) with the same n on all of them"
            )
        digests = group.gather_objects(digest((args, keywords)))
        if any(theirs != digests[0] for theirs in digests):
            shown = ", ".join(f"rank {rank}: {theirs}" for rank, theirs in zip(group.ranks, digests, strict=True))
            raise ValueError(
                "ranks that hold parts of the same matrices must see the same batches, and theirs differ (shapes, and "
                f"a digest of the values): {shown}. Let a sampler deal out batches by data ranks: "
                f"num_replicas=world size / {group.size}, rank=rank // {group.size}; "
                "initialize(training_data=...), Trainer and Accelerate do so"
            )

    handle = model.register_forward_pre_hook(hook, with_kwargs=True)


def digest(inputs: Any) -> str:
    """Digest of all tensors among a forward's inputs."""
    shapes, values = [], hashlib.sha256()
    for tensor in _tensors(inputs):
        shapes.append("x".join(map(str, tensor.shape)))
        values.update(tensor.detach().cpu().double().contiguous().numpy().tobytes())
    return f"{', '.join(shapes)} {values.hexdigest()[:8]}"


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for key in sorted(value, key=str) for tensor in _tensors(value[key])]
    return [tensor for each in value for tensor in _tensors(each)] if isinstance(value, (list, tuple)) else []


class RowParallel:
    """Before nn.Linear or transformers' Conv1D: their weight holds rows for a part of the input, the output is summed,
    and the bias is added once, after that. An input that is whole is split before: plans have some, such as linear
    attentions between others."""

    tensor_group: Collectives
    row_sizes: Sequence[int]
    weight: Tensor
    bias: Tensor | None

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.shape[-1] != self.row_sizes[self.tensor_group.rank] and inputs.shape[-1] == sum(self.row_sizes):
            inputs = split(self.tensor_group, inputs, self.row_sizes)
        product = nn.functional.linear(inputs, self.weight) if isinstance(self, nn.Linear) else inputs @ self.weight
        output = leave(self.tensor_group, product)
        return output if self.bias is None else output + self.bias


class PartialVocabulary:
    """Before nn.Embedding: its weight holds the rows of some tokens, the others come from other ranks."""

    tensor_group: Collectives
    first_token: int
    padding_idx: int | None
    weight: Tensor

    def forward(self, ids: Tensor) -> Tensor:
        local = ids - self.first_token
        is_here = (local >= 0) & (local < self.weight.shape[0])
        rows = nn.functional.embedding(local.clamp(0, self.weight.shape[0] - 1), self.weight)
        if self.padding_idx is not None:  # the row of the padding gets no gradient
            rows = torch.where((ids == self.padding_idx).unsqueeze(-1), rows.detach(), rows)
        return leave(self.tensor_group, rows * is_here.unsqueeze(-1).to(rows.dtype))


def stand_in_front(mixin: type, module: nn.Module, base: type, **attributes: Any) -> None:
    """`module`, still of its class, runs the forward of `mixin` in the place of that of `base`, one of its classes.

    What a subclass does around `super().forward()`, such as to scale an embedding, still happens.
    """
    for name, value in attributes.items():
        setattr(module, name, value)
    own = type(module)
    first = type(f"{mixin.__name__}{base.__name__}", (mixin, base), {})
    module.__class__ = first if own is base else type(f"{mixin.__name__}{own.__name__}", (own, first), {})


def row_parallel(module: nn.Module, group: Collectives, sizes: Sequence[int]) -> None:
    """`module`, an nn.Linear or transformers' Conv1D, of which rank r has rows for `sizes[r]` inputs."""
    base = nn.Linear if isinstance(module, nn.Linear) else type(module)
    stand_in_front(RowParallel, module, base, tensor_group=group, row_sizes=sizes)


def partial_vocabulary(module: nn.Module, group: Collectives, first_token: int) -> None:
    """`module`, an nn.Embedding."""
    stand_in_front(PartialVocabulary, module, nn.Embedding, tensor_group=group, first_token=first_token)


def has_halves(module: nn.Module) -> bool:
    """Whether experts take the first half of what their `gate_up` matrices give for the gate, the second for the rest
    (or else every second feature)."""
    is_concatenated = getattr(module, "is_concatenated", None)
    if is_concatenated is not None:
        return bool(is_concatenated)
    try:
        return "chunk(2" in inspect.getsource(type(module))
    except (OSError, TypeError):
        return False


def calls_forward_of(module: nn.Module, base: type[nn.Module]) -> bool:
    """Whether the forward of `module` is that of `base`, or is known to call it."""
    forward = type(module).forward
    if forward is base.forward:
        return True
    try:
        return "super().forward(" in inspect.getsource(forward)
    except (OSError, TypeError):
        return False


def enter_inputs(module: nn.Module, group: Collectives, number: int = 1) -> None:
    """The gradients of its first inputs, `number` floating ones, are summed over ranks."""

    def hook(_: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        left = number

        def entered(value: Any) -> Any:
            nonlocal left
            if left and isinstance(value, Tensor) and value.is_floating_point():
                left -= 1
                return enter(group, value)
            return value

        return tuple(map(entered, args)), {name: entered(value) for name, value in keywords.items()}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def gather_output(module: nn.Module, group: Collectives, sizes: Sequence[int]) -> None:
    """`module.whole_output` does it too, for who runs the module piece by piece (see `change_output`), and
    `module.whole_width` is what comes out."""

    def whole(output: Tensor) -> Tensor:
        return gather(group, output, sizes)

    vars(module)["whole_output"], vars(module)["whole_width"] = whole, sum(sizes)
    change_output(module, whole)


def leave_output(module: nn.Module, group: Collectives) -> None:
    change_output(module, lambda output: leave(group, output))


def change_output(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Not of what has been changed piece by piece already, or will be: what such a module takes or gives says so."""

    def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if any(getattr(value, "changes_in_pieces", False) for value in (*args, output)):
            return None
        if isinstance(output, tuple):
            return (change(output[0]), *output[1:])
        return None if output is None else change(output)

    module.register_forward_hook(hook)


def sum_gradients(parameters: Iterable[nn.Parameter], group: Collectives) -> None:
    """They are whole on every rank, which uses them for its own part of what follows. Also of those that are frozen
    now: another adapter may be chosen before training."""
    for parameter in parameters:
        is_trained = parameter.requires_grad
        parameter.requires_grad_(True)
        parameter.register_hook(lambda gradient: summed(group, gradient))
        parameter.requires_grad_(is_trained)

"""Communication around the forward of layers that hold parts, on every rank of a tensor group."""

from __future__ import annotations

import hashlib
import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states

from hf_zero.comm import Collectives, uncompiled
from hf_zero.comm.parts import part_of_model

# Differentiable communication that combines results of parts of a matrix.
#
#                     forward                     backward
# enter               identity                    sum over ranks        before columns: each rank has a part of dX
# leave               sum over ranks              identity              after rows: each rank has a part of Y
# gather              concatenate parts           own part              after columns whose full output is needed
# split               own part                    concatenate parts     before rows whose input is not split
#
# Layers with the same input (q, k and v; gate and up) share one `enter`: their gradients are added before the sum over
# ranks, which takes one message instead of three. The first batch is compared, because all ranks need the same one.


@dataclass(frozen=True, slots=True)
class _Entered:
    """The result of `enter` for a tensor, for other layers that take the same tensor."""

    source: weakref.ref[Tensor]
    version: int  # of its values, which models may change in place
    result: Tensor


# Results are kept until the outputs of the layers are summed or gathered, because the graph of a checkpointed layer
# does not keep them. Recomputation may stop before that: then they are dropped in backward, to free its activations.
_ENTERED: dict[Collectives, list[_Entered]] = {}


@uncompiled
def enter(group: Collectives, tensor: Tensor) -> Tensor:
    """Return `tensor` with its gradient summed over ranks, once for all layers that enter it before the next `leave` or
    `gather`. Collective in backward."""
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
    """The sum of `tensor` over ranks. Collective."""
    _ENTERED.pop(group, None)
    return cast("Tensor", _Leave.apply(group, tensor))


@uncompiled
def gather(group: Collectives, tensor: Tensor, sizes: Sequence[int]) -> Tensor:
    """Concatenate all ranks' `tensor` along the last dimension, where rank r has `sizes[r]`. Collective."""
    _ENTERED.pop(group, None)
    return cast("Tensor", _Parts.apply(group, tensor, tuple(sizes), True))


def split(group: Collectives, tensor: Tensor, sizes: Sequence[int]) -> Tensor:
    """This rank's part along the last dimension. Collective in backward."""
    return cast("Tensor", _Parts.apply(group, tensor, tuple(sizes), False))


@uncompiled
def summed(group: Collectives, tensor: Tensor) -> Tensor:
    """The sum over ranks as a new tensor. Collective."""
    numel = tensor.numel()
    total: Tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
    if numel % group.size == 0:
        group.all_reduce(total.view(-1)).wait()
        return total
    flat = tensor.new_zeros(-(-numel // group.size) * group.size)
    flat[:numel] = total.view(-1)
    group.all_reduce(flat).wait()
    total.view(-1).copy_(flat[:numel])
    return total  # never a view, because models may change outputs of layers in place


@uncompiled
def side_by_side(group: Collectives, tensor: Tensor, sizes: tuple[int, ...]) -> Tensor:
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


class _Parts(torch.autograd.Function):
    """Concatenates the ranks' parts, or takes this rank's part; backward does the other."""

    @staticmethod
    def forward(ctx: Any, group: Collectives, tensor: Tensor, sizes: tuple[int, ...], joins: bool) -> Tensor:
        ctx.group, ctx.sizes, ctx.joins = group, sizes, joins
        return side_by_side(group, tensor, sizes) if joins else _own(group, tensor, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        back = _own if ctx.joins else side_by_side
        return None, back(ctx.group, grads[0], ctx.sizes), None, None


class _PartialCrossEntropy(torch.autograd.Function):
    """Cross entropy of each token, from this rank's columns of the logits.

    The softmax over the whole vocabulary needs two numbers per token of every rank: the logarithm of its sum of
    exponentials, and the label's logit (0 if the label is elsewhere). Backward needs no communication.
    """

    @staticmethod
    def forward(ctx: Any, group: Collectives, logits: Tensor, labels: Tensor, first: int, ignored: int) -> Tensor:
        local = labels - first
        is_here = (local >= 0) & (local < logits.shape[-1]) & (labels != ignored)
        local = local.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)
        own = torch.stack([logits.logsumexp(-1), logits.gather(-1, local).squeeze(-1) * is_here], dim=-1)
        sums, chosen = side_by_side(group, own, (2,) * group.size).view(len(labels), -1, 2).unbind(-1)
        total = sums.logsumexp(-1)
        ctx.save_for_backward(logits, total, local, is_here, labels != ignored)
        return (total - chosen.sum(-1)).where(labels != ignored, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        logits, total, local, is_here, counts = ctx.saved_tensors
        back = (logits - total.unsqueeze(-1)).exp_()
        back.scatter_add_(-1, local, -is_here.unsqueeze(-1).to(back.dtype))
        return None, back.mul_(grads[0].where(counts, 0.0).unsqueeze(-1)), None, None, None


@uncompiled
def partial_cross_entropy(
    group: Collectives, logits: Tensor, labels: Tensor, sizes: Sequence[int], *, ignore_index: int
) -> Tensor:
    """The sum of the tokens' cross entropies, from parts of the logits. Collective: 8 bytes per token and rank.

    Args:
        logits: this rank's columns, [tokens, sizes[rank]], in fp32.
        labels: [tokens], the same on all ranks; tokens with `ignore_index` do not count.
        sizes: columns of every rank.
    """
    _ENTERED.pop(group, None)
    first = sum(sizes[: group.rank])
    return cast("Tensor", _PartialCrossEntropy.apply(group, logits, labels, first, ignore_index)).sum()


def check_first_batch(model: nn.Module, group: Collectives) -> None:
    """Compare the inputs of the first forward of `model` on the ranks of `group`, and with dropout their random seeds.
    That forward is collective."""

    def hook(_: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        handle.remove()
        drops = any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
        seeds = group.gather_objects(torch.initial_seed() if drops and model.training else 0)
        if len(set(seeds)) > 1:
            shown = ", ".join(f"rank {rank}: {seed}" for rank, seed in zip(group.ranks, seeds, strict=True))
            raise ValueError(
                "ranks that hold parts of the same matrices must drop the same activations, but they use different "
                f"random seeds ({shown}): call transformers.set_seed(n) with the same n on all of them"
            )
        digests = group.gather_objects(digest((args, keywords)))
        if any(theirs != digests[0] for theirs in digests):
            shown = ", ".join(f"rank {rank}: {theirs}" for rank, theirs in zip(group.ranks, digests, strict=True))
            raise ValueError(
                "ranks that hold parts of the same matrices must get the same batches, but theirs differ (shapes, and "
                f"a digest of the values): {shown}. Use a sampler that distributes batches by data ranks: "
                f"num_replicas=world size / {group.size}, rank=rank // {group.size}; "
                "initialize(training_data=...), Trainer and Accelerate do so"
            )

    handle = model.register_forward_pre_hook(hook, with_kwargs=True)


def check_random_states(model: nn.Module, tokens: Tensor) -> None:
    """Compare the random states with which the ranks that hold parts of `model` would draw tokens. Collective.

    Raises:
        ValueError: if they differ: ranks would continue different texts, and wait for each other where one ends.
    """
    parts = (part_of_model(parameter) for parameter in model.parameters())
    group = next((part.group for part in parts if part is not None), None)
    if group is None:
        return
    _, states = get_device_states(tokens)
    digests = group.gather_objects(digest(states or [torch.get_rng_state()]))
    if len(set(digests)) > 1:
        raise ValueError(
            "generate() with do_sample=True: ranks that hold parts of the same matrices must draw the same tokens, but "
            "their random states differ. Call transformers.set_seed(n) with the same n on all ranks of a tensor group "
            "before. TRL's trainers that generate (GRPO, RLOO, distillation) seed every rank differently: use them "
            "without tensor_parallel.autotp_size"
        )


def digest(inputs: Any) -> str:
    """Digest of all tensors in a forward's inputs."""
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
    """Mixin for nn.Linear or transformers' Conv1D with the rows for a part of the input: sums the output over ranks,
    and then adds the bias once. A full input, as some plans have it (for example in linear attention), is split first.
    """

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
    """Mixin for nn.Embedding with the rows of some tokens; other rows come from other ranks."""

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
    """Insert `mixin` before `base` in the class hierarchy of `module`, so that its forward replaces that of `base`.

    Code of subclasses around `super().forward()`, for example to scale an embedding, still runs.
    """
    for name, value in attributes.items():
        setattr(module, name, value)
    own = type(module)
    first = type(f"{mixin.__name__}{base.__name__}", (mixin, base), {})
    module.__class__ = first if own is base else type(f"{mixin.__name__}{own.__name__}", (own, first), {})


def row_parallel(module: nn.Module, group: Collectives, sizes: Sequence[int]) -> None:
    """Make `module`, an nn.Linear or transformers' Conv1D, row-parallel; rank r has rows for `sizes[r]` inputs."""
    base = nn.Linear if isinstance(module, nn.Linear) else type(module)
    stand_in_front(RowParallel, module, base, tensor_group=group, row_sizes=sizes)


def partial_vocabulary(module: nn.Module, group: Collectives, first_token: int) -> None:
    """Make `module`, an nn.Embedding, vocabulary-parallel."""
    stand_in_front(PartialVocabulary, module, nn.Embedding, tensor_group=group, first_token=first_token)


def has_halves(module: nn.Module) -> bool:
    """Whether the output of the experts' `gate_up` matrices is the gate in the first half and up in the second (instead
    of interleaved)."""
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
    """Sum the gradients of the first `number` floating-point inputs of `module` over ranks."""

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
    """Gather the output of `module`. For code that runs the module piece by piece (see `change_output`),
    `module.whole_output` does the same, `module.cross_entropy` computes that of logits that are not gathered, and
    `module.whole_width` is the width of whole ones."""

    def whole(output: Tensor) -> Tensor:
        return gather(group, output, sizes)

    vars(module)["whole_output"], vars(module)["whole_width"] = whole, sum(sizes)
    vars(module)["cross_entropy"] = partial(partial_cross_entropy, group, sizes=sizes)
    change_output(module, whole)


def leave_output(module: nn.Module, group: Collectives) -> None:
    change_output(module, lambda output: leave(group, output))


def change_output(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Apply `change` to the output of `module`, unless its input or output is marked as changed piece by piece."""

    def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if any(getattr(value, "changes_in_pieces", False) for value in (*args, output)):
            return None
        if isinstance(output, tuple):
            return (change(output[0]), *output[1:])
        return None if output is None else change(output)

    module.register_forward_hook(hook)


def sum_gradients(parameters: Iterable[nn.Parameter], group: Collectives) -> None:
    """Sum gradients of parameters that are whole on every rank but only used for its part. Frozen ones are included,
    because another adapter may be activated before training."""
    for parameter in parameters:
        is_trained = parameter.requires_grad
        parameter.requires_grad_(True)
        parameter.register_hook(lambda gradient: summed(group, gradient))
        parameter.requires_grad_(is_trained)

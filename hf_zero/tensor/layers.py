"""What stands around the forward of layers that hold parts, on every rank of a tensor group."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.comm import Collectives
from hf_zero.tensor.exchange import enter, gather, leave, split, summed


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
        found = nn.functional.embedding(local.clamp(0, self.weight.shape[0] - 1), self.weight)
        if self.padding_idx is not None:  # the row of the padding gets no gradient
            found = torch.where((ids == self.padding_idx).unsqueeze(-1), found.detach(), found)
        return leave(self.tensor_group, found * is_here.unsqueeze(-1).to(found.dtype))


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
    said = getattr(module, "is_concatenated", None)
    if said is not None:
        return bool(said)
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

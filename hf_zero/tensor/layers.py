"""What stands around the forward of layers that hold parts, on every rank of a tensor group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.comm import Collectives
from hf_zero.tensor.exchange import enter, gather, leave, split, summed


class RowParallel:
    """In front of nn.Linear or transformers' Conv1D: their weight holds rows for a part of the input, the output is
    summed, and the bias is added once, after that."""

    tensor_group: Collectives
    weight: Tensor
    bias: Tensor | None

    def forward(self, inputs: Tensor) -> Tensor:
        product = nn.functional.linear(inputs, self.weight) if isinstance(self, nn.Linear) else inputs @ self.weight
        output = leave(self.tensor_group, product)
        return output if self.bias is None else output + self.bias


class PartialVocabulary:
    """In front of nn.Embedding: its weight holds the rows of some tokens, the others come from other ranks."""

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


def stand_in_front(mixin: type, module: nn.Module, **attributes: Any) -> None:
    """`module`, still of its class, runs the forward of `mixin`."""
    for name, value in attributes.items():
        setattr(module, name, value)
    module.__class__ = type(f"{mixin.__name__}{type(module).__name__}", (mixin, type(module)), {})


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


def split_input(module: nn.Module, group: Collectives, sizes: Sequence[int]) -> None:
    """It gets its part of the last dimension of an input that is whole."""
    module.register_forward_pre_hook(lambda _, args: (split(group, args[0], sizes), *args[1:]))


def gather_output(module: nn.Module, group: Collectives, sizes: Sequence[int]) -> None:
    change_output(module, lambda output: gather(group, output, sizes))


def leave_output(module: nn.Module, group: Collectives) -> None:
    change_output(module, lambda output: leave(group, output))


def change_output(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (change(output[0]), *output[1:])
        return None if output is None else change(output)

    module.register_forward_hook(hook)


def sum_gradients(module: nn.Module, group: Collectives) -> None:
    """Its parameters are whole on every rank, which uses them for its own part of what follows."""
    for parameter in module.parameters(recurse=False):
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: summed(group, gradient))

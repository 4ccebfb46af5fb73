"""Parameters of which ranks hold different parts: slicing out parts, and assembling whole parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from hf_zero.comm.collectives import Collectives
from hf_zero.layout.cuts import Cut

_PART = "_hf_zero_part"
OF_ADAPTERS = (".lora_", ".modules_to_save.")  # in names of parameters that PEFT saves


@dataclass(frozen=True, slots=True)
class HeldPart:
    """This rank's part of a parameter.

    Attributes:
        group: the ranks that hold the parts.
        cut: the parts of all ranks.
        is_mixed: whether the ranks of `group` share the states of everything else (see `Dimension.weights`); then files
            have the whole parameter.
    """

    group: Collectives
    cut: Cut
    is_mixed: bool = False

    def of(self, whole: Tensor, rank: int | None = None) -> Tensor:
        """A copy of a rank's part of `whole`; default: this rank."""
        return torch.cat(self._places(whole, self.group.rank if rank is None else rank), dim=self.cut.dim)

    @torch.no_grad()
    def whole(self, part: Tensor) -> Tensor:
        """Assemble the whole parameter from all ranks' parts. Collective."""
        shapes = [self.cut.part_shape(rank) for rank in range(self.group.size)]
        row = max(torch.Size(shape).numel() for shape in shapes)
        flat = torch.zeros(self.group.size, row, dtype=part.dtype, device=part.device)
        flat[self.group.rank, : part.numel()] = part.detach().reshape(-1)
        self.group.all_gather(flat.view(-1)).wait()
        whole = part.new_empty(self.cut.shape)
        for rank, shape in enumerate(shapes):
            theirs = flat[rank, : torch.Size(shape).numel()].view(shape)
            pieces = theirs.split([piece.numel for piece in self.cut.intervals[rank]], dim=self.cut.dim)
            for place, values in zip(self._places(whole, rank), pieces, strict=True):
                place.copy_(values)
        return whole

    def _places(self, whole: Tensor, rank: int) -> list[Tensor]:
        return [whole.narrow(self.cut.dim, piece.start, piece.numel) for piece in self.cut.intervals[rank]]


@torch.no_grad()
def keep_part(parameter: nn.Parameter, part: HeldPart) -> None:
    """Reduce `parameter` to this rank's part. It stays the same object, because optimizers may hold it."""
    parameter.data = part.of(parameter.data)
    setattr(parameter, _PART, part)
    marks: Any = parameter  # attributes that Megatron and DeepSpeed read
    if part.is_mixed:
        marks.allreduce, marks.group_name = False, f"ep_size_{part.group.size}"
    else:
        marks.tensor_model_parallel = True


def held_part(parameter: Tensor) -> HeldPart | None:
    """This rank's part of a parameter; None if every rank has the whole."""
    return cast("HeldPart | None", getattr(parameter, _PART, None))


def whole_value(parameter: Tensor, values: Tensor) -> Tensor:
    """Assemble `values` of this rank's part of `parameter` with those of the other ranks. Collective."""
    part = held_part(parameter)
    return values if part is None else part.whole(values)


def refuse_parts(model: nn.Module, values: Mapping[str, object], of: Sequence[str] = ()) -> None:
    """
    Args:
        values: the values that `save_pretrained` is about to write, by name.
        of: substrings of the names to check; default: all names.

    Raises:
        ValueError: if one of them is this rank's part of a parameter.
    """
    for name in parts_among(model, values):
        if not of or any(word in name for word in of):
            raise ValueError(
                f"save_pretrained would write this rank's part of {name}, but other ranks hold the rest: on every "
                "rank, call state = accelerator.get_state_dict(model) (or engine.module_state_dict()), then "
                "save_pretrained(folder, state_dict=state, is_main_process=...); or Trainer.save_model(folder)"
            )


def parts_among(model: nn.Module, values: Mapping[str, object]) -> Iterator[str]:
    """Yield names of values that are this rank's part of a parameter."""
    for name, parameter in model.named_parameters():
        part, value = held_part(parameter), values.get(name)
        if part is not None and isinstance(value, Tensor) and tuple(value.shape) != part.cut.shape:
            yield name


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    part = held_part(parameter)
    return tuple(parameter.shape) if part is None else part.cut.shape

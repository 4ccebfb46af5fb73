"""Parameters of which ranks hold different parts: slicing out parts, and assembling whole parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from hf_zero.comm.collectives import Collectives
from hf_zero.layout.cuts import Cut

_PART = "_hf_zero_part"
OF_ADAPTERS = (".lora_", ".modules_to_save.")  # in names of parameters that PEFT saves


@dataclass(frozen=True, slots=True)
class HeldPart:
    """This rank's part of a parameter, or of a part of it that another group has divided before.

        experts in a tensor group               rank 0        1         2         3
            outer: features, ranks 0 1 | 2 3    left          right     left      right
            mixed: experts, ranks 0 2 | 1 3     left of 0 1   of 0 1    left of 2 3   right of 2 3

    Attributes:
        group: the ranks that hold the parts.
        cut: the parts of all ranks.
        is_mixed: whether the ranks of `group` share the states of everything else (see `Dimension.weights`); then files
            have what they hold together.
        outer: the part that `cut` divides, along another dimension; None: the whole parameter.
    """

    group: Collectives
    cut: Cut
    is_mixed: bool = False
    outer: HeldPart | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return self.cut.shape if self.outer is None else self.outer.shape

    @property
    def across(self) -> HeldPart | None:
        """How the ranks of `outer` divide what this rank holds: the same, of fewer elements along `cut.dim`."""
        if self.outer is None:
            return None
        extent = self.cut.part_shape(self.group.rank)[self.cut.dim]
        shape = (*self.outer.shape[: self.cut.dim], extent, *self.outer.shape[self.cut.dim + 1 :])
        return HeldPart(self.outer.group, replace(self.outer.cut, shape=shape))

    def of(self, whole: Tensor, rank: int | None = None) -> Tensor:
        """A copy of a rank's part of the whole parameter; default: this rank of `group`."""
        return self.within(whole if self.outer is None else self.outer.of(whole), rank)

    def within(self, joined: Tensor, rank: int | None = None) -> Tensor:
        """A copy of a rank's part of what the ranks of `group` hold together."""
        return torch.cat(self._places(joined, self.group.rank if rank is None else rank), dim=self.cut.dim)

    def whole(self, part: Tensor) -> Tensor:
        """Assemble the whole parameter from all ranks' parts. Collective."""
        joined = self.joined(part)
        return joined if self.outer is None else self.outer.whole(joined)

    @torch.no_grad()
    def joined(self, part: Tensor) -> Tensor:
        """Assemble what the ranks of `group` hold together. Collective."""
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
    """Reduce `parameter` to this rank's part of its value. It stays the same object, because optimizers may hold it.

    Raises:
        ValueError: if it is a part along the same dimension already, or a mixed one.
    """
    outer = held_part(parameter)
    if outer is not None and outer.is_mixed:
        raise ValueError("an engine has already distributed this model's experts over ranks; create a new model")
    if outer is not None and outer.cut.dim == part.cut.dim:
        raise ValueError(f"two groups of ranks would divide dimension {part.cut.dim} of a parameter {outer.shape}")
    parameter.data = part.within(parameter.data)
    setattr(parameter, _PART, part if outer is None else replace(part, outer=outer))
    marks: Any = parameter  # attributes that Megatron and DeepSpeed read
    if part.is_mixed:
        marks.allreduce, marks.group_name = False, f"ep_size_{part.group.size}"
    else:
        marks.tensor_model_parallel = True


def held_part(parameter: Tensor) -> HeldPart | None:
    """This rank's part of a parameter; None if every rank has the whole."""
    return cast("HeldPart | None", getattr(parameter, _PART, None))


def part_of_model(parameter: Tensor) -> HeldPart | None:
    """The part of a parameter that files have, and that differs between the ranks of one whole model
    (`Mesh.whole_model`); None: the whole. What ranks mix (`HeldPart.is_mixed`) counts as what they hold together."""
    part = held_part(parameter)
    return part.outer if part is not None and part.is_mixed else part


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
        if part is not None and isinstance(value, Tensor) and tuple(value.shape) != part.shape:
            yield name


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    part = held_part(parameter)
    return tuple(parameter.shape) if part is None else part.shape


def shape_in_files(parameter: Tensor) -> tuple[int, ...]:
    """The shape of `part_of_model`."""
    part = held_part(parameter)
    return tuple(parameter.shape) if part is None or not part.is_mixed else part.cut.shape

"""What one rank updates, as an optimizer sees it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from hf_zero.layout import Interval, Piece


@dataclass(frozen=True, slots=True)
class MasterTensor:
    """One tensor that the base optimizer holds in its `param_groups`: a view of `interval` of the owned part.

    Attributes:
        whole: index of the parameter that it is, whole and in its own shape; None for a flat part of several.
    """

    parameter: nn.Parameter
    interval: Interval
    whole: int | None = None


@dataclass(frozen=True, slots=True)
class SubGroup:
    """What one rank updates of one bucket for one of the optimizer's groups, or a sub-group of that.

    Attributes:
        bucket: index of the bucket.
        part: which elements of the rank's part of the bucket these are.
        group: index of the optimizer's param group.
        master: 1-D master weights of the owned part.
        lp_param: 1-D, same length, where the rounded weights go; None when the master is the weight.
        tensors: how the base optimizer sees `master`: one flat tensor, or one tensor per parameter.
        pieces: which parameters lie where in `master`.
    """

    bucket: int
    part: Interval
    group: int
    master: Tensor
    lp_param: Tensor | None
    tensors: tuple[MasterTensor, ...]
    pieces: tuple[Piece, ...]

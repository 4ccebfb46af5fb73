"""`deepspeed.runtime.zero.tiling`: a linear layer as a grid of smaller ones, which stage 3 can gather one by one.

    input [..., in]  =  | in_0 | in_1 |          linears[o][i]: in_i -> out_o, summed over i
    output [..., out] = | out_0 | out_1 |        the bias of out_o is that of its last tile

At stage 3 each tile is a separate unit, except inside a block of a list of layers, which is gathered as a whole
(unless it is so large that it is split: hf_zero.params.gathered_modules).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.api.gathered_parameters import GatheredParameters
from hf_zero.integration.compat.utils import partition_uniform


def split_tensor_along_last_dim(
    tensor: Tensor, partitions: Sequence[int], contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Pieces of the given sizes along the last dimension."""
    pieces = torch.split(tensor, list(partitions), dim=-1)
    return tuple(piece.contiguous() for piece in pieces) if contiguous_split_chunks else tuple(pieces)


class TiledLinear(nn.Module):
    """[..., in_features] -> [..., out_features], like `torch.nn.Linear`.

    Attributes:
        linears: `out_splits` lists of `in_splits` layers.
        in_parts, out_parts: the starts of the tiles, and the end.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Any = nn.Linear,
        init_linear: Any = None,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            input_is_already_split: forward takes a sequence of `in_splits` tensors.
            combine_out_splits: forward returns one tensor; else a list of `out_splits`.
            linear_cls: called with (in, out, bias=..., **kwargs) for every tile.
            init_linear: layer whose weight and bias are copied.

        Raises:
            RuntimeError: if there are more tiles than features, or none.
        """
        super().__init__()
        for name, splits, features in (("in", in_splits, in_features), ("out", out_splits, out_features)):
            if not 1 <= splits <= features:
                raise RuntimeError(f"{name}_splits is {splits}: it must be from 1 to {name}_features ({features})")
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self.in_parts = partition_uniform(in_features, in_splits)
        self.out_parts = partition_uniform(out_features, out_splits)
        widths = [end - begin for begin, end in pairwise(self.in_parts)]
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(width, end - begin, bias=bias and number == in_splits - 1, **kwargs)
                for number, width in enumerate(widths)
            )
            for begin, end in pairwise(self.out_parts)
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Any) -> Any:
        """See `input_is_already_split` and `combine_out_splits`."""
        inputs = self._inputs(input_)
        outputs: list[Any] = []
        rows: Any = self.linears
        for out_id, row in enumerate(rows):
            output: Any = None
            for in_id, linear in enumerate(row):
                output = self._reduce_local_output(in_id, out_id, output, linear(inputs[in_id]))
            outputs.append(output)
        return self._combine_output_splits(outputs) if self.combine_out_splits else outputs

    def _inputs(self, given: Any) -> Sequence[Any]:
        if self.in_splits == 1:
            return [given]
        if not self.input_is_already_split:
            return self._split_global_input(given, [end - begin for begin, end in pairwise(self.in_parts)])
        if len(given) != self.in_splits:
            raise ValueError(f"the input has {len(given)} pieces, and in_splits is {self.in_splits}")
        pieces: Sequence[Any] = given
        return pieces

    # Subclasses replace these three.

    def _split_global_input(self, input: Any, split_sizes: Sequence[int]) -> Sequence[Any]:
        return split_tensor_along_last_dim(input, split_sizes)

    def _reduce_local_output(self, in_id: int, out_id: int, current_out: Any, new_out: Any) -> Any:
        return new_out if current_out is None else current_out + new_out

    def _combine_output_splits(self, outputs: Sequence[Any]) -> Any:
        return torch.cat(list(outputs), dim=-1)

    @torch.no_grad()
    def copy_params_from(self, other: Any) -> None:
        """Copy weight and bias of a linear layer. Collective at stage 3: all ranks get rank 0's.

        Raises:
            ValueError: if its shape differs, or only one of the layers has a bias.
        """
        with GatheredParameters(list(other.parameters())):
            if tuple(other.weight.shape) != (self.out_features, self.in_features):
                shape = (self.out_features, self.in_features)
                raise ValueError(f"the weight to copy is {tuple(other.weight.shape)}, and must be {shape}")
            if (other.bias is not None) != self.use_bias:
                has = "no" if other.bias is None else "a"
                raise ValueError(f"bias is {self.use_bias}, and the layer to copy has {has} bias")
            rows = zip(self.linears, pairwise(self.out_parts), strict=True)
            for row, (top, bottom) in rows:
                tiles: list[Any] = list(row)  # type: ignore[call-overload]
                for linear, (left, right) in zip(tiles, pairwise(self.in_parts), strict=True):
                    bias = getattr(linear, "bias", None)
                    with GatheredParameters(list(linear.parameters()), modifier_rank=0):
                        linear.weight.copy_(other.weight[top:bottom, left:right])
                        if bias is not None:
                            linear.bias.copy_(other.bias[top:bottom])


class TiledLinearReturnBias(TiledLinear):
    """`TiledLinear` for layers that return (output, bias) without adding the bias, like Megatron-LM's."""

    def _reduce_local_output(self, in_id: int, out_id: int, current_out: Any, new_out: Any) -> Any:
        output, bias = new_out
        if current_out is None:
            return output, bias
        return current_out[0] + output, current_out[1] if bias is None else bias

    def _combine_output_splits(self, outputs: Sequence[Any]) -> Any:
        biases = [bias for _, bias in outputs if bias is not None]
        output = super()._combine_output_splits([output for output, _ in outputs])
        return output, super()._combine_output_splits(biases) if biases else None

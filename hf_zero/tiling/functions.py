"""Tiled compute under DeepSpeed's names, such as `TiledMLP.apply(...)`, with its arguments (ulysses_sp, 0.19.8).

Unlike in DeepSpeed, `compute_params` may be None, a tile's function may read unlisted parameters, gradients of the head
are correct for any later operation on the loss, and every tensor that requires a gradient gets one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from hf_zero.config import ConfigError, Problem, Resolved
from hf_zero.config.schema import long_sequences
from hf_zero.features import TrainingFeature
from hf_zero.log import logger
from hf_zero.tiling.compute import TiledFunction, chunk_rows, tiled

_REDUCTIONS: dict[Any, Callable[[Tensor], Tensor]] = {
    None: lambda output: output,
    "mean": lambda output: output.mean(),
    "sum": lambda output: output.sum(),
}


class TiledMLP:
    """Runs an MLP over a few tokens at a time; backward recomputes every tile."""

    @staticmethod
    def apply(
        fn: Callable[[Any, Tensor], Tensor],
        self: Any,
        x: Tensor,
        shards: int,
        compute_params: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Concatenated results of `fn(self, tile)` for tiles of `x`.

        Args:
            fn: a per-token function; [..., tile, hidden] -> [..., tile, any width].
            self: first argument of `fn`, usually the module whose forward it is.
            x: [batch, sequence, hidden] or [tokens, hidden].
            shards: maximum number of tiles.
            compute_params: parameters that `fn` reads; None: those of `self` if it is a module.
        """
        rows = chunk_rows(x.shape[-2], shards)
        tiling = TiledFunction(call=lambda tiles, _: fn(self, tiles[0]), dim=x.dim() - 2, rows=rows, join=-2)
        return tiled(tiling, [x], parameters=_parameters(self, compute_params), may_read_others=True)


class TiledFusedLogitsLoss:
    """A loss without full logits: each tile computes its own logits, loss and gradients."""

    @staticmethod
    def apply(
        fn: Callable[..., Tensor],
        self: Any,
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        shards: int,
        compute_params: Sequence[Tensor] | None = None,
        output_reduction: str = "mean",
    ) -> Tensor:
        """Sum or mean over tiles of `fn(self, tile of x, tile of y[, tile of mask])`; scalar.

        The mean is over the tiles' results: if tiles have different numbers of valid tokens, let `fn` return sums, and
        divide afterwards.

        Args:
            x: [batch, sequence, ...], usually hidden states; tiles are [tokens, ...] of the flattened rows.
            y: [batch, sequence, ...], usually labels.
            mask: [batch, sequence]; None: `fn` gets no mask.
            compute_params: parameters that `fn` reads; None: those of `self` if it is a module.

        Raises:
            ValueError: if shapes do not match, or for another reduction.
        """
        _check_loss(x, y, mask, output_reduction)
        flat = [x.flatten(0, 1), y.flatten(0, 1), *([] if mask is None else [mask.flatten()])]
        # In fp16, gradients of an unscaled loss would underflow; only backward knows the scale.
        eager = x.dtype != torch.float16 and not _autocasts_to(x, torch.float16)
        rows = chunk_rows(flat[0].shape[0], shards)
        tiling = TiledFunction(call=lambda tiles, _: fn(self, *tiles), dim=0, rows=rows, join=None, eager=eager)
        total = tiled(tiling, flat, parameters=_parameters(self, compute_params), may_read_others=True)
        return total / len(rows) if output_reduction == "mean" else total


class SequenceTiledCompute:
    """Runs any function with keyword arguments over tiles of a sequence; see `sequence_tiled_compute`."""

    @staticmethod
    def apply(
        fn: Callable[..., Tensor],
        seqlen: int,
        shards: int,
        keys_to_shard: Sequence[str],
        keys_to_pass: Sequence[str],
        grad_requiring_tensor_key: str,
        compute_params: Sequence[Tensor] | None,
        output_unshard_dimension: int,
        output_reduction: str | None,
        *args: Any,
    ) -> Tensor:
        """Like `sequence_tiled_compute`, with the values of both dictionaries as the last arguments."""
        cut, whole = args[: len(keys_to_shard)], args[len(keys_to_shard) :]
        return sequence_tiled_compute(
            fn,
            seqlen,
            shards,
            dict(zip(keys_to_shard, cut, strict=True)),
            dict(zip(keys_to_pass, whole, strict=True)),
            grad_requiring_tensor_key,
            compute_params,
            output_unshard_dimension,
            output_reduction,
        )


def sequence_tiled_compute(
    fn: Callable[..., Tensor],
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, Tensor],
    kwargs_to_pass: Mapping[str, Any],
    grad_requiring_tensor_key: str,
    compute_params: Sequence[Tensor] | None = None,
    output_unshard_dimension: int = 1,
    output_reduction: str | None = "mean",
) -> Tensor:
    """Combined results of `fn(**tiles, **kwargs_to_pass)` for tiles of a sequence; backward recomputes every tile.

    Args:
        seqlen: size of dimension 1 of the sharded tensors.
        shards: maximum number of tiles.
        kwargs_to_shard: tensors [batch, sequence, ...].
        kwargs_to_pass: other arguments of `fn`, which are passed whole.
        grad_requiring_tensor_key: must name an argument; all tensors that require gradients get them.
        output_unshard_dimension: dimension along which outputs are concatenated; 0: scalars, one per tile.
        output_reduction: reduction of the result: None, "mean" or "sum".

    Raises:
        ValueError: for another reduction, or an unknown key.
    """
    if output_reduction not in _REDUCTIONS:
        raise ValueError(f'output_reduction is {output_reduction!r}: it must be None, "mean" or "sum"')
    if grad_requiring_tensor_key not in {**kwargs_to_shard, **kwargs_to_pass}:
        raise ValueError(f"grad_requiring_tensor_key: there is no argument {grad_requiring_tensor_key!r}")
    cut = [name for name, value in kwargs_to_shard.items() if isinstance(value, Tensor)]
    others = {name: value for name, value in kwargs_to_shard.items() if name not in cut}
    # Also tensors within tuples, lists and dicts, whose graph no tile may walk through by itself.
    leaves, structure = tree_flatten({**others, **kwargs_to_pass})
    whole = [position for position, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def call(tiles: Sequence[Tensor], passed: Sequence[Tensor]) -> Tensor:
        places = dict(zip(whole, passed, strict=True))
        arguments = tree_unflatten([places.get(position, leaf) for position, leaf in enumerate(leaves)], structure)
        return fn(**dict(zip(cut, tiles, strict=True)), **arguments)

    tiling = TiledFunction(call=call, dim=1, rows=chunk_rows(seqlen, shards), join=output_unshard_dimension)
    output = tiled(
        tiling,
        [kwargs_to_shard[name] for name in cut],
        [leaves[position] for position in whole],
        compute_params or (),
        may_read_others=True,
    )
    return _REDUCTIONS[output_reduction](output)


def _parameters(owner: Any, compute_params: Sequence[Tensor] | None) -> Sequence[Tensor]:
    if compute_params:
        return list(compute_params)
    return list(owner.parameters()) if isinstance(owner, nn.Module) else []


def _autocasts_to(tensor: Tensor, dtype: torch.dtype) -> bool:
    kind = tensor.device.type
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == dtype


def _check_loss(x: Tensor, y: Tensor, mask: Tensor | None, reduction: str) -> None:
    if reduction not in ("mean", "sum"):
        raise ValueError(f'output_reduction is {reduction!r}: it must be "mean" or "sum"')
    for name, tensor in (("x", x), ("y", y)):
        if tensor.dim() < 2:
            raise ValueError(f"{name} must be [batch, sequence, ...], but is {list(tensor.shape)}")
    if x.shape[:2] != y.shape[:2]:
        raise ValueError(f"x and y must have the same batch and sequence: {list(x.shape)} and {list(y.shape)}")
    if mask is not None and mask.shape != x.shape[:2]:
        raise ValueError(f"mask must be [batch, sequence] like x: {list(mask.shape)} and {list(x.shape)}")


# Tiling of a model's per-token modules: its dense MLPs and norms.


# Minimum tokens per tile; otherwise the hidden width, for which activations are about as large as a weight.
TILE_TOKENS = 1024
_NAMES = frozenset(("mlp", "feed_forward", "feedforward", "ffn", "ff"))
_PER_TOKEN = ("LayerNorm", "RMSNorm")


def dense_mlps(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, module) of all modules that are per-token MLPs, judged by their names and contents."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in _NAMES and is_dense_mlp(module)
    ]


def is_dense_mlp(module: nn.Module) -> bool:
    """Whether all parameters belong to two or more linear layers, or to norms over the last dimension.

    Modules that route tokens (experts), mix them (convolutions) or have their own parameters do not count.
    """
    linear = 0
    for inner in module.modules():
        own = list(inner.named_parameters(recurse=False))
        if "expert" in type(inner).__name__.lower() or "router" in type(inner).__name__.lower():
            return False
        if isinstance(inner, (nn.ModuleList, nn.ParameterList)) and any(True for _ in inner.parameters()):
            return False
        if not own or isinstance(inner, nn.ParameterDict):
            continue
        weight = dict(own).get("weight")
        if weight is not None and weight.dim() == 2 and not isinstance(inner, nn.Embedding):
            linear += 1
        elif not any(kind in type(inner).__name__ for kind in _PER_TOKEN):
            return False
    return linear >= 2


def norms_of_tokens(model: nn.Module) -> list[tuple[str, nn.Module, int]]:
    """(name, norm, width) of norms over the last dimension, except those inside dense MLPs.

    transformers computes them in fp32, which autograd saves: without tiles, their backward is the memory peak of a
    checkpointed layer.
    """
    inside = tuple(f"{name}." for name, _ in dense_mlps(model))
    norms = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() != 1 or name.startswith(inside):
            continue
        if type(module).__name__.endswith(_PER_TOKEN):
            norms.append((name, module, weight.numel()))
    return norms


class TiledMLPs(TrainingFeature):
    """Tiles the forwards of all dense MLPs and of the norms between them until the engine is destroyed."""

    name = "tiled_mlp"
    waits_for_outcome = False

    def __init__(self, model: nn.Module) -> None:
        """Raises ValueError if there is no dense MLP."""
        mlps = dense_mlps(model)
        if not mlps:
            known = ", ".join(sorted(_NAMES))
            raise ValueError(
                f"{type(model).__name__} has no dense MLP (a module named {known} that consists of linear layers; "
                "experts do not count)"
            )
        self.names = [name for name, _ in mlps]
        self._modules = [module for _, module in mlps]
        for module in self._modules:
            vars(module)["forward"] = _tiled_forward(module)
        for _, norm, width in norms_of_tokens(model):
            vars(norm)["forward"] = _tiled_forward(norm, width)
            self._modules.append(norm)

    def close(self) -> None:
        for module in self._modules:
            vars(module).pop("forward", None)


def _tiled_forward(module: nn.Module, width: int | None = None) -> Any:
    """`width`: inputs that are not [samples, tokens, width] (heads, patches) are not tiled."""
    own = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        rows = _rows(args[0], width) if len(args) == 1 and not kwargs else ()
        if len(rows) < 2:
            return own(*args, **kwargs)
        x: Tensor = args[0]
        tiling = TiledFunction(call=lambda tiles, _: own(tiles[0]), dim=x.dim() - 2, rows=rows, join=-2)
        return tiled(tiling, [x], parameters=list(module.parameters()))

    return forward


def _rows(x: Any, width: int | None) -> tuple[int, ...]:
    """Tile sizes along the second to last dimension; one tile for few tokens."""
    if not isinstance(x, Tensor) or x.dim() < 2:
        return ()
    if width is not None and (x.dim() != 3 or x.shape[-1] != width):
        return ()
    length = x.shape[-2]
    tokens = math.prod(x.shape[:-1])
    return chunk_rows(length, -(-tokens // max(TILE_TOKENS, x.shape[-1]))) if length else ()


def tiled_mlp_of(model: nn.Module, resolved: Resolved) -> TrainingFeature | None:
    """The feature, if the config enables it.

    Raises:
        ConfigError: if the model has no dense MLP.
    """
    if not resolved.section(long_sequences.Tiling).tiled_mlp:
        return None
    try:
        feature = TiledMLPs(model)
    except ValueError as error:
        raise ConfigError([Problem("hf_zero.tiled_mlp", True, str(error), "set it to false")]) from error
    first, last = feature.names[0], feature.names[-1]
    logger.info("hf_zero.tiled_mlp: %d MLPs, from %s to %s, and the norms", len(feature.names), first, last)
    return feature

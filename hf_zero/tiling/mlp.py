"""What sees each token of a model alone, its dense MLPs and its norms, over a few tokens at a time."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from hf_zero.features import TrainingFeature
from hf_zero.tiling.compute import Tiling, chunk_rows, tiled

# Tokens of a tile: the hidden width, so that its activations are about as large as a weight, but at least these.
TILE_TOKENS = 1024
_NAMES = frozenset(("mlp", "feed_forward", "feedforward", "ffn", "ff"))
_PER_TOKEN = ("LayerNorm", "RMSNorm")


def dense_mlps(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules that by name and content are MLPs which look at each token alone, by their names in the model."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in _NAMES and is_dense_mlp(module)
    ]


def is_dense_mlp(module: nn.Module) -> bool:
    """All parameters are those of linear layers, two or more, or of norms over the last dimension.

    What routes tokens (experts), mixes them (convolutions) or has parameters of its own is none.
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
    """(name, norm, width) of norms over the last dimension, but for those inside of dense MLPs.

    Transformers computes them in fp32, which autograd keeps: without tiles, their backward is where a checkpointed
    layer needs most.
    """
    inside = tuple(f"{name}." for name, _ in dense_mlps(model))
    found = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() != 1 or name.startswith(inside):
            continue
        if type(module).__name__.endswith(_PER_TOKEN):
            found.append((name, module, weight.numel()))
    return found


class TiledMLPs(TrainingFeature):
    """The forwards of all dense MLPs and of the norms between them are tiled, until the engine is destroyed."""

    name = "tiled_mlp"
    waits_for_outcome = False

    def __init__(self, model: nn.Module) -> None:
        """
        Raises:
            ValueError: there is no dense MLP.
        """
        found = dense_mlps(model)
        if not found:
            known = ", ".join(sorted(_NAMES))
            raise ValueError(
                f"{type(model).__name__} has no dense MLP (a module named {known} that is made of linear layers; "
                "experts are none)"
            )
        self.names = [name for name, _ in found]
        self._modules = [module for _, module in found]
        for module in self._modules:
            vars(module)["forward"] = _tiled_forward(module)
        for _, norm, width in norms_of_tokens(model):
            vars(norm)["forward"] = _tiled_forward(norm, width)
            self._modules.append(norm)

    def close(self) -> None:
        for module in self._modules:
            vars(module).pop("forward", None)


def _tiled_forward(module: nn.Module, width: int | None = None) -> Any:
    """`width`: what is not [samples, tokens, width] is left alone (heads, patches)."""
    own = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        rows = _rows(args[0], width) if len(args) == 1 and not kwargs else ()
        if len(rows) < 2:
            return own(*args, **kwargs)
        x: Tensor = args[0]
        tiling = Tiling(call=lambda tiles, _: own(tiles[0]), dim=x.dim() - 2, rows=rows, join=-2)
        return tiled(tiling, [x], parameters=list(module.parameters()))

    return forward


def _rows(x: Any, width: int | None) -> tuple[int, ...]:
    """The tiles along the last dimension but one; one tile where there are few tokens."""
    if not isinstance(x, Tensor) or x.dim() < 2:
        return ()
    if width is not None and (x.dim() != 3 or x.shape[-1] != width):
        return ()
    length = x.shape[-2]
    tokens = math.prod(x.shape[:-1])
    return chunk_rows(length, -(-tokens // max(TILE_TOKENS, x.shape[-1]))) if length else ()

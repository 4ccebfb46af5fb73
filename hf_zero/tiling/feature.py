"""`hf_zero.tiled_mlp` and `hf_zero.tiled_loss`, made true for a model of transformers."""

from __future__ import annotations

from torch import nn

from hf_zero.config import ConfigError, Problem, Resolved
from hf_zero.config.features.long_sequences import Tiling
from hf_zero.features import TrainingFeature, unwrapped
from hf_zero.log import logger
from hf_zero.tiling.functions import TiledMLPs
from hf_zero.tiling.loss import TiledLoss


def tiled_mlp_of(model: nn.Module, resolved: Resolved) -> TrainingFeature | None:
    """The feature, where the config asks for it.

    Raises:
        ConfigError: the model has no dense MLP.
    """
    if not resolved.section(Tiling).tiled_mlp:
        return None
    try:
        feature = TiledMLPs(model)
    except ValueError as error:
        raise ConfigError([Problem("hf_zero.tiled_mlp", True, str(error), "set it to false")]) from error
    first, last = feature.names[0], feature.names[-1]
    logger.info("hf_zero.tiled_mlp: %d MLPs, from %s to %s, and the norms", len(feature.names), first, last)
    return feature


def tiled_loss_of(model: nn.Module, resolved: Resolved) -> TrainingFeature | None:
    """The feature, where the config asks for it.

    Raises:
        ConfigError: head or loss of the model are of another kind.
    """
    if not resolved.section(Tiling).tiled_loss:
        return None
    try:
        return TiledLoss(unwrapped(model))
    except ValueError as error:
        fix = "set it to false; deepspeed.runtime.sequence_parallel.ulysses_sp.TiledFusedLogitsLoss takes any loss"
        raise ConfigError([Problem("hf_zero.tiled_loss", True, str(error), fix)]) from error

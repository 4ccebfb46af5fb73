"""Tiles of a few tokens: keys of `hf_zero`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_zero.config.features import Examined, Extra
from hf_zero.config.schema.fields import Flag, Section, supported

if TYPE_CHECKING:
    from hf_zero.config.schema.root import Root


class Tiling(Section):
    """What is computed over a few tokens at a time (docs/long_sequences.md)."""

    tiled_loss: Flag = supported(
        False,
        "Compute the head and the loss of a causal language model over a few tokens at a time, and never the logits of "
        "a whole sequence (docs/long_sequences.md).",
    )
    tiled_mlp: Flag = supported(
        False,
        "Compute dense MLPs and norms over a few tokens at a time, in backward once more (docs/long_sequences.md).",
    )


def examine(config: Root) -> Examined:
    section = config.section(Tiling)
    return Examined(policy=section if section.tiled_loss or section.tiled_mlp else None)


TILING = Extra(
    name="tiling",
    examine=examine,
    features=("hf_zero.tiling.feature:tiled_mlp_of", "hf_zero.tiling.feature:tiled_loss_of"),
)

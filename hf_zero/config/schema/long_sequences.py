"""Settings for long sequences: the section `activation_checkpointing`, and tiles of a few tokens below `hf_zero`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_zero.config.features import Extra
from hf_zero.config.rules import Advice
from hf_zero.config.schema.fields import Count, Flag, Section, ignored, supported

if TYPE_CHECKING:
    from hf_zero.config.schema.root import Root

_PARTITION = (
    "ranks have different activations (also with sequence parallelism), except in tensor groups, which "
    "keep them whole; deepspeed.checkpointing.configure(mpu, ...) partitions over the tensor-parallel group of its mpu"
)


LOSS_BYTES = 8  # additional bytes per logit: its fp32 copy and its gradient
_ON_DEVICE = 2  # inputs on the device with cpu_checkpointing: the current layer's and the next one, being copied


def on_host(input_bytes: int, layers: int) -> int:
    """Return how many inputs of checkpointed layers `cpu_checkpointing` keeps in host memory. For `plan` and
    out-of-memory messages."""
    return input_bytes * max(0, layers - _ON_DEVICE)


class ActivationCheckpointing(Section):
    """Storage of the inputs that gradient checkpointing keeps (docs/long_sequences.md)."""

    partition_activations: Flag = ignored(
        False, "Each rank of a tensor-parallel group keeps a part of the inputs that all of them have.", why=_PARTITION
    )
    cpu_checkpointing: Flag = supported(
        False, "Keep the inputs of checkpointed layers in host memory; copies overlap with computation."
    )
    contiguous_memory_optimization: Flag = supported(
        False, "Copy the inputs into one buffer to avoid fragmentation of memory."
    )
    number_checkpoints: Count | None = supported(
        None, "The number of inputs that the buffer can hold. Unset: the number of layers."
    )
    synchronize_checkpoint_boundary: Flag = supported(
        False, "Synchronize the device before and after each checkpointed layer, in forward and recomputation."
    )
    profile: Flag = supported(
        False, "Log the time of a micro-batch's checkpointed layers in forward and in recomputation."
    )

    @property
    def is_on(self) -> bool:
        """Whether any option is enabled that applies to a layer of the model."""
        moves = self.cpu_checkpointing or self.contiguous_memory_optimization
        return moves or self.synchronize_checkpoint_boundary or self.profile

    rules = (
        Advice(
            keys=(
                "activation_checkpointing.number_checkpoints",
                "activation_checkpointing.contiguous_memory_optimization",
            ),
            applies=lambda number, contiguous: number is not None and not contiguous,
            text="no effect without contiguous_memory_optimization, whose buffer holds this number of inputs",
        ),
    )


def _checkpointing(config: Root) -> ActivationCheckpointing | None:
    section = config.section(ActivationCheckpointing)
    return section if section.is_on else None


ACTIVATIONS = Extra(
    name="activation_checkpointing",
    policy=_checkpointing,
    features=("hf_zero.activations.feature:activation_checkpointing_of",),
)


class Tiling(Section):
    """Tiled computation, over a few tokens at a time (docs/long_sequences.md)."""

    tiled_loss: Flag = supported(
        False,
        "Compute the head and the loss of a causal language model over a few tokens at a time, without ever holding "
        "the logits of a whole sequence (docs/long_sequences.md).",
    )
    tiled_mlp: Flag = supported(
        False,
        "Compute dense MLPs and norms over a few tokens at a time, recomputed in backward (docs/long_sequences.md).",
    )


def _tiling(config: Root) -> Tiling | None:
    section = config.section(Tiling)
    return section if section.tiled_loss or section.tiled_mlp else None


TILING = Extra(
    name="tiling",
    policy=_tiling,
    features=("hf_zero.tiling.functions:tiled_mlp_of", "hf_zero.tiling.loss:tiled_loss_of"),
)

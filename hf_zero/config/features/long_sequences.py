"""Settings for long sequences: the section `activation_checkpointing`, and tiles of a few tokens below `hf_zero`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_zero.config.errors import Edit, Remark
from hf_zero.config.features import Examined, Extra
from hf_zero.config.schema.fields import Count, Flag, Section, ignored, supported

if TYPE_CHECKING:
    from hf_zero.config.schema.root import Root

_PARTITION = (
    "no two ranks have the same activations (with sequence parallelism each has its own), but for tensor groups, which "
    "keep them whole; deepspeed.checkpointing.configure(mpu, ...) partitions over the tensor-parallel group of its mpu"
)


LOSS_BYTES = 8  # of a logit beside itself: in fp32, and its gradient
_ON_DEVICE = 2  # with cpu_checkpointing: of the layer at work, and of the next on its way back


def on_host(input_bytes: int, layers: int) -> int:
    """How many inputs of checkpointed layers `cpu_checkpointing` has in host memory. For `plan` and
    out-of-memory messages."""
    return input_bytes * max(0, layers - _ON_DEVICE)


class ActivationCheckpointing(Section):
    """Inputs that gradient checkpointing (`gradient_checkpointing=True`) keeps (docs/long_sequences.md)."""

    partition_activations: Flag = ignored(
        False, "Each rank of a tensor-parallel group keeps a part of what they all have.", why=_PARTITION
    )
    cpu_checkpointing: Flag = supported(
        False, "Keep the inputs of checkpointed layers in host memory, copied beside the computation."
    )
    contiguous_memory_optimization: Flag = supported(
        False, "Copy them into one buffer, so that memory between them is not broken into pieces."
    )
    number_checkpoints: Count | None = supported(
        None, "How many that buffer has room for; by default as many as the model has layers."
    )
    synchronize_checkpoint_boundary: Flag = supported(
        False, "Wait for the device before and after each checkpointed layer, in forward and when it runs again."
    )
    profile: Flag = supported(
        False, "Log how long the checkpointed layers of a micro-batch took, in forward and when they ran again."
    )

    @property
    def is_on(self) -> bool:
        """Whether anything is asked for that a layer of the model can have."""
        moves = self.cpu_checkpointing or self.contiguous_memory_optimization
        return moves or self.synchronize_checkpoint_boundary or self.profile


def examine_checkpointing(config: Root) -> Examined:
    section = config.activation_checkpointing
    if section is None:
        return Examined()
    remarks = []
    if section.number_checkpoints is not None and not section.contiguous_memory_optimization:
        path = ("activation_checkpointing", "number_checkpoints")
        text = "no effect without contiguous_memory_optimization, whose buffer has room for so many"
        remarks.append(Remark(".".join(path), text, section.number_checkpoints, edit=Edit(path)))
    return Examined(remarks=remarks, policy=section if section.is_on else None)


ACTIVATIONS = Extra(
    name="activation_checkpointing",
    examine=examine_checkpointing,
    features=("hf_zero.activations.feature:activation_checkpointing_of",),
)


class Tiling(Section):
    """Computation over a few tokens at a time (docs/long_sequences.md)."""

    tiled_loss: Flag = supported(
        False,
        "Compute the head and the loss of a causal language model over a few tokens at a time, and never the logits of "
        "a whole sequence (docs/long_sequences.md).",
    )
    tiled_mlp: Flag = supported(
        False,
        "Compute dense MLPs and norms over a few tokens at a time, in backward once more (docs/long_sequences.md).",
    )


def examine_tiling(config: Root) -> Examined:
    section = config.section(Tiling)
    return Examined(policy=section if section.tiled_loss or section.tiled_mlp else None)


TILING = Extra(
    name="tiling",
    examine=examine_tiling,
    features=("hf_zero.tiling.functions:tiled_mlp_of", "hf_zero.tiling.loss:tiled_loss_of"),
)

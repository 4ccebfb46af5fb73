"""The section `hf_zero.streaming`: all states in host memory, updated during backward (docs/offload.md)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator

from hf_zero.config.errors import Problem, Remark
from hf_zero.config.features import Examined, Extra, OwnSection
from hf_zero.config.schema.fields import Flag, Section, as_lower, supported
from hf_zero.config.schema.zero import OffloadOptimizer, OffloadParam, Zero

if TYPE_CHECKING:
    from hf_zero.config.schema.root import Root

Masters = Annotated[Literal["split", "fp32"], BeforeValidator(as_lower)]
States = Annotated[Literal["fp32", "bf16"], BeforeValidator(as_lower)]
Clipping = Annotated[Literal["exact", "last_norm"], BeforeValidator(as_lower)]

_SECTION = "hf_zero.streaming"


class Streaming(Section):
    """Stage 3 with everything in host memory and the fewest bytes per parameter (docs/offload.md)."""

    enabled: Flag = supported(
        False,
        "Keep weights, masters and states in host memory, and update each unit there during backward, so that the "
        'full gradient never exists. Needs offload_param.device "cpu".',
        stages=(3,),
    )
    masters: Masters = supported(
        "split",
        'Storage of fp32 masters of bf16 weights: "split" keeps only the 16 bits that the weight lacks (4 bytes per '
        'parameter for both, lossless), "fp32" keeps full masters (6 bytes).',
        stages=(3,),
    )
    states: States = supported(
        "fp32",
        "Dtype of optimizer states; updates compute in fp32 either way. AdamW8bit has its own format.",
        stages=(3,),
    )
    clipping: Clipping = supported(
        "exact",
        'With gradient_clipping: "exact" keeps the gradient in host memory until its norm is known and updates after '
        'backward (2 more bytes per parameter), "last_norm" clips by the norm of the previous update (the first update '
        "is not clipped) and keeps no gradient.",
        stages=(3,),
    )

    def master_bytes(self, weight: int, master: int) -> int:
        """Bytes stored for a master of `master` bytes in addition to its weight of `weight` bytes."""
        return master - weight if self.masters == "split" and (weight, master) == (2, 4) else master

    def state_bytes(self, state: int) -> int:
        """Bytes stored for a state of `state` bytes."""
        return 2 if self.states == "bf16" else state

    def why_gradients_stay(self, clip_norm: float, skips: bool) -> list[str]:
        """Reasons why updates must wait for all gradients, each with the setting that changes it.

        Args:
            clip_norm: maximum norm of the gradient; 0 for no clipping.
            skips: whether nonfinite gradients skip an update.
        """
        reasons = []
        if clip_norm > 0 and self.clipping == "exact":
            fixes = 'gradient_clipping 0, or hf_zero.streaming.clipping "last_norm"'
            reasons.append(f"gradient_clipping needs the norm of all gradients ({fixes} avoids this)")
        if skips:
            reasons.append(
                "nonfinite gradients skip the update (bf16.check_grad_overflow false applies gradients immediately;"
                " the loss scale of fp16 needs this)"
            )
        return reasons


def examine_streaming(config: Root) -> Examined:
    section = config.section(Streaming)
    if not section.enabled:
        return Examined()
    problems = list(_problems(config, section))
    remarks = []
    if section.clipping == "last_norm" and not config.gradient_clipping:
        text = "no effect, because gradient_clipping is 0"
        remarks.append(Remark(f"{_SECTION}.clipping", text, section.clipping))
    return Examined(problems, remarks, None if problems else section)


def _problems(config: Root, section: Streaming) -> Iterator[Problem]:
    path, zero = f"{_SECTION}.enabled", config.section(Zero)
    parameters, states = zero.offload_param or OffloadParam(), zero.offload_optimizer or OffloadOptimizer()
    if zero.stage != 3:
        yield Problem(path, True, "streaming gathers units, which only stage 3 has", "set zero_optimization.stage to 3")
    if parameters.device != "cpu":
        place = "zero_optimization.offload_param.device"
        yield Problem(place, parameters.device, "streaming keeps weights in host memory", 'set it to "cpu"')
    if states.device == "nvme" or (states.device == "cpu" and states.ratio < 1):
        place, value = "zero_optimization.offload_optimizer", states.device if states.device == "nvme" else states.ratio
        yield Problem(place, value, "streaming keeps all masters and states in host memory", "remove the section")
    if config.fp16 is not None and config.fp16.enabled and section.masters == "split":
        rule = "fp16 has a different exponent than fp32, so that 16 more bits cannot restore the fp32 master"
        yield Problem(f"{_SECTION}.masters", "split", rule, 'set bf16.enabled instead of fp16, or masters to "fp32"')
    has_groups = config.hf_zero is not None and config.hf_zero.shard_group is not None
    if zero.zero_hpz_partition_size > 1 or zero.mics_shard_size > 0 or has_groups:
        rule = "ranks with replicas of shards would have to synchronize every unit's update"
        fix = "remove zero_hpz_partition_size, mics_shard_size and hf_zero.shard_group"
        yield Problem(path, True, rule, fix)
    if not config.managed_gradient_accumulation:
        rule = "streaming updates weights during the last backward before a step, and must know which one that is"
        yield Problem("managed_gradient_accumulation", False, rule, "remove the key")
    if config.tensor_parallel is not None and (config.tensor_parallel.autotp_size or 0) > 1:
        yield Problem(path, True, "streaming does not support tensor parallelism", "remove tensor_parallel")


EXTRA = Extra(
    name="streaming",
    sections=(OwnSection(path=_SECTION, kind=Streaming, doc="Training in host memory (docs/offload.md)."),),
    examine=examine_streaming,
    services={"streamed_updates": "hf_zero.extras.streaming.updates:streamed_updates"},
)

"""The section `hf_zero.streaming`: what trains lives in host memory, updated beside backward (docs/offload.md)."""

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
    """Stage 3 with everything in host memory: the fewest bytes per parameter (docs/offload.md)."""

    enabled: Flag = supported(
        False,
        "Keep weights, masters and states in host memory, and update each unit there while backward goes on, so that "
        'no whole gradient exists. Needs offload_param.device "cpu".',
        stages=(3,),
    )
    masters: Masters = supported(
        "split",
        'How fp32 masters of bf16 weights are kept: "split" as the 16 bits that the weight has lost (4 bytes per '
        'parameter for both, the same bits), "fp32" as they are (6 bytes).',
        stages=(3,),
    )
    states: States = supported(
        "fp32",
        "Dtype of optimizer states, which are computed with in fp32 either way. AdamW8bit has a form of its own.",
        stages=(3,),
    )
    clipping: Clipping = supported(
        "exact",
        'Under gradient_clipping: "exact" keeps the gradient in host memory until its norm is known and updates after '
        'backward (2 bytes per parameter more), "last_norm" clips by the norm of the update before, the first not at '
        "all, and keeps no gradient.",
        stages=(3,),
    )

    def master_bytes(self, weight: int, master: int) -> int:
        """What is kept of a master of so many bytes beside its weight of so many."""
        return master - weight if self.masters == "split" and (weight, master) == (2, 4) else master

    def state_bytes(self, state: int) -> int:
        """Of a state that would have so many."""
        return 2 if self.states == "bf16" else state

    def why_gradients_stay(self, clip_norm: float, skips: bool) -> list[str]:
        """Why updates have to wait for all gradients, each with what changes that.

        Args:
            clip_norm: largest norm of the gradient; 0: it is not clipped.
            skips: a gradient that is not finite skips an update.
        """
        reasons = []
        if clip_norm > 0 and self.clipping == "exact":
            fixes = 'gradient_clipping 0, or hf_zero.streaming.clipping "last_norm"'
            reasons.append(f"gradient_clipping needs the norm of all gradients ({fixes} keep none)")
        if skips:
            reasons.append(
                "a gradient that is not finite skips the update (bf16.check_grad_overflow false applies what there is,"
                " and keeps none; the loss scale of fp16 cannot do without)"
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
        rule = "an fp16 weight has other exponents than its fp32 master, so 16 more bits do not give that"
        yield Problem(f"{_SECTION}.masters", "split", rule, 'set bf16.enabled instead of fp16, or masters to "fp32"')
    has_groups = config.hf_zero is not None and config.hf_zero.shard_group is not None
    if zero.zero_hpz_partition_size > 1 or zero.mics_shard_size > 0 or has_groups:
        rule = "ranks that hold copies of shards would have to agree on every unit's update"
        fix = "remove zero_hpz_partition_size, mics_shard_size and hf_zero.shard_group"
        yield Problem(path, True, rule, fix)
    if config.tensor_parallel is not None and (config.tensor_parallel.autotp_size or 0) > 1:
        yield Problem(path, True, "streaming does not know of parts of matrices", "remove tensor_parallel")


EXTRA = Extra(
    name="streaming",
    sections=(OwnSection(path=_SECTION, kind=Streaming, doc="Training that lives in host memory (docs/offload.md)."),),
    examine=examine_streaming,
    services={"streamed_updates": "hf_zero.extras.streaming.updates:streamed_updates"},
)

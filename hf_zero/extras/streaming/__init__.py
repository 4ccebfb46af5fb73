"""The section `hf_zero.streaming`: all states in host memory, updated during backward (docs/offload.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator

from hf_zero.config.errors import Edit
from hf_zero.config.features import Extra, OwnSection
from hf_zero.config.rules import Advice, Rule
from hf_zero.config.schema.fields import Flag, Section, as_lower, supported

if TYPE_CHECKING:
    from hf_zero.config.schema.root import Root

Masters = Annotated[Literal["split", "fp32"], BeforeValidator(as_lower)]
States = Annotated[Literal["fp32", "bf16"], BeforeValidator(as_lower)]
Clipping = Annotated[Literal["exact", "last_norm"], BeforeValidator(as_lower)]

_SECTION = "hf_zero.streaming"


_ON, _STAGE = f"{_SECTION}.enabled", "zero_optimization.stage"
_STATES, _PARAMETERS = "zero_optimization.offload_optimizer", "zero_optimization.offload_param"
_HPZ, _MICS = "zero_optimization.zero_hpz_partition_size", "zero_optimization.mics_shard_size"


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

    rules = (
        Rule(
            keys=(_ON, _STAGE),
            broken=lambda on, stage: on and stage != 3,
            rule="streaming gathers units, which only stage 3 has",
            fix="set zero_optimization.stage to 3",
            edit=Edit.at(_STAGE, 3),
        ),
        Rule(
            keys=(f"{_PARAMETERS}.device", _ON),
            broken=lambda device, on: on and device != "cpu",
            rule="streaming keeps weights in host memory",
            fix='set it to "cpu"',
            edit=Edit.at(f"{_PARAMETERS}.device", "cpu"),
        ),
        Rule(
            keys=(f"{_STATES}.device", f"{_STATES}.ratio", _ON),
            at=_STATES,
            broken=lambda device, ratio, on: (
                on
                and (device == "nvme" or (device == "cpu" and ratio != 1))
                and {"value": device if device == "nvme" else ratio}
            ),
            rule="streaming keeps all masters and states in host memory",
            fix="remove the section",
            edit=Edit.at(_STATES),
        ),
        Rule(
            keys=("hf_zero.offload_update", _ON),
            broken=lambda update, on: on and update != "cpu",
            rule="streaming updates each unit in host memory during backward",
            fix="remove the key",
            edit=Edit.at("hf_zero.offload_update"),
        ),
        Rule(
            keys=(f"{_SECTION}.masters", "fp16.enabled", _ON),
            broken=lambda masters, fp16, on: on and fp16 and masters == "split",
            rule="fp16 has a different exponent than fp32, so that 16 more bits cannot restore the fp32 master",
            fix='set bf16.enabled instead of fp16, or masters to "fp32"',
        ),
        Rule(
            keys=(_ON, _HPZ, _MICS, "hf_zero.shard_group"),
            broken=lambda on, hpz, mics, group: on and (hpz > 1 or mics > 0 or group is not None),
            rule="ranks with replicas of shards would have to synchronize every unit's update",
            fix="remove zero_hpz_partition_size, mics_shard_size and hf_zero.shard_group",
        ),
        Rule(
            keys=("managed_gradient_accumulation", _ON),
            broken=lambda managed, on: on and not managed,
            rule="streaming updates weights during the last backward before a step, and must know which one that is",
            fix="remove the key",
            edit=Edit.at("managed_gradient_accumulation"),
        ),
        Rule(
            keys=(_ON, "tensor_parallel.autotp_size"),
            broken=lambda on, size: on and size > 1,
            rule="streaming does not support tensor parallelism",
            fix="remove tensor_parallel",
            edit=Edit.at("tensor_parallel"),
        ),
        Advice(
            keys=(f"{_SECTION}.clipping", _ON, "gradient_clipping"),
            applies=lambda clipping, on, norm: on and clipping == "last_norm" and not norm,
            text="no effect, because gradient_clipping is 0",
        ),
    )


def _streaming(config: Root) -> Streaming | None:
    section = config.section(Streaming)
    return section if section.enabled else None


EXTRA = Extra(
    name="streaming",
    sections=(OwnSection(path=_SECTION, kind=Streaming, doc="Training in host memory (docs/offload.md)."),),
    policy=_streaming,
    services={"streamed_updates": "hf_zero.extras.streaming.updates:streamed_updates"},
)

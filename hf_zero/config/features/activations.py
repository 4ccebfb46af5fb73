"""From the sections of the core's training-time features to their policies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_zero.config.errors import ConfigError, Edit, Problem, Remark
from hf_zero.config.policies import ActivationsPolicy, FeaturesPolicy
from hf_zero.config.schema import Root
from hf_zero.config.schema.root import HfZero
from hf_zero.config.schema.training import ActivationCheckpointing
from hf_zero.config.validate import validate


def read_activations(config: Mapping[str, Any]) -> ActivationsPolicy:
    """Of a config of which nothing but this section is looked at, and may be missing.

    Raises:
        ConfigError: for values that cannot be.
    """
    section = config.get("activation_checkpointing")
    root, findings = validate({"activation_checkpointing": dict(section)} if isinstance(section, Mapping) else {})
    problems = [finding for finding in findings if isinstance(finding, Problem)]
    if problems:
        raise ConfigError(problems)
    return activations_policy(root.activation_checkpointing or ActivationCheckpointing())


def activations_policy(section: ActivationCheckpointing) -> ActivationsPolicy:
    """All of it."""
    return ActivationsPolicy(
        on_host=section.cpu_checkpointing,
        partition=section.partition_activations,
        contiguous=section.contiguous_memory_optimization,
        number=section.number_checkpoints,
        synchronize=section.synchronize_checkpoint_boundary,
        profile=section.profile,
    )


def resolve_features(config: Root, remarks: list[Remark]) -> FeaturesPolicy:
    """What has no effect is added to `remarks`."""
    own = config.hf_zero or HfZero()
    activations = resolve_activations(config.activation_checkpointing, remarks)
    return FeaturesPolicy(activations=activations, tiled_mlp=own.tiled_mlp, tiled_loss=own.tiled_loss)


def resolve_activations(section: ActivationCheckpointing | None, remarks: list[Remark]) -> ActivationsPolicy | None:
    """None where nothing is asked for; what has no effect is added to `remarks`."""
    if section is None:
        return None
    if section.number_checkpoints is not None and not section.contiguous_memory_optimization:
        path = ("activation_checkpointing", "number_checkpoints")
        text = "no effect without contiguous_memory_optimization, whose buffer has room for so many"
        remarks.append(Remark(".".join(path), text, section.number_checkpoints, edit=Edit(path)))
    policy = activations_policy(section)
    acts = policy.on_host or policy.contiguous or policy.synchronize or policy.profile
    return policy if acts else None

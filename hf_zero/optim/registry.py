"""From a ds.json optimizer section to an optimizer, and from an optimizer to the way it runs on shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hf_zero.config import ConfigError, OptimizerPolicy, Problem
from hf_zero.optim.adagrad import DeepSpeedCPUAdagrad
from hf_zero.optim.adam import DeepSpeedCPUAdam, FusedAdam
from hf_zero.optim.compressing import Ranks
from hf_zero.optim.elementwise import ElementwiseUpdater
from hf_zero.optim.lamb import FusedLamb, LambUpdater
from hf_zero.optim.lion import DeepSpeedCPULion, FusedLion
from hf_zero.optim.muon import Muon, MuonUpdater, muon_groups
from hf_zero.optim.native import compressing_updater_of, family_of, is_lamb
from hf_zero.optim.one_bit_adam import OneBitAdam
from hf_zero.optim.one_bit_lamb import OneBitLamb
from hf_zero.optim.updater import MasterShard, Peers, Updater, WholeStepUpdater
from hf_zero.optim.zero_one_adam import ZeroOneAdam
from hf_zero.precision import Precision

# Their update depends on whole matrices or on more than one pass, which a flat shard does not have.
NEEDS_WHOLE_TENSORS = (
    "Muon",
    "Adafactor",
    "LBFGS",
    "SparseAdam",
    "Shampoo",
    "SOAP",
    "LARS",
    "Lamb",
    "LAMB",
    "FusedLamb",
)

# By lower-case type; the names that ds.json and DeepSpeed's own classes use. Adam and AdamW are a matter of their own.
_BY_TYPE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "fusedadam": FusedAdam,
    "cpuadam": DeepSpeedCPUAdam,
    "deepspeedcpuadam": DeepSpeedCPUAdam,
    "lamb": FusedLamb,
    "fusedlamb": FusedLamb,
    "muon": Muon,
    "onebitadam": OneBitAdam,
    "onebitlamb": OneBitLamb,
    "zerooneadam": ZeroOneAdam,
    "lion": FusedLion,
    "fusedlion": FusedLion,
    "cpulion": DeepSpeedCPULion,
    "deepspeedcpulion": DeepSpeedCPULion,
    "cpuadagrad": DeepSpeedCPUAdagrad,
    "deepspeedcpuadagrad": DeepSpeedCPUAdagrad,
}


def build_optimizer(
    policy: OptimizerPolicy, groups: Sequence[dict[str, Any]], names: Mapping[int, str] | None = None
) -> torch.optim.Optimizer:
    """The optimizer that `optimizer.type` and `optimizer.params` of ds.json describe.

    Args:
        names: id of a parameter -> its name in the model; Muon asks which ones are embeddings.

    Raises:
        ConfigError: for a type that neither we nor torch.optim have, or parameters it does not take.
    """
    factory, params = _factory(policy)
    if factory is Muon:
        groups = muon_groups(groups, names or {})
    try:
        return factory(list(groups), **params)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            [Problem("optimizer.params", dict(policy.params), str(error), f"give only what {policy.type} takes")]
        ) from error


def _factory(policy: OptimizerPolicy) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    params = dict(policy.params)
    kind = policy.type.lower()
    if kind in ("adam", "adamw"):
        decoupled = kind == "adamw" or bool(params.pop("adam_w_mode", True))
        params.pop("adam_w_mode", None)
        if params.pop("torch_adam", False):
            return (torch.optim.AdamW if decoupled else torch.optim.Adam), params
        return FusedAdam, {**_without_what_is_so_anyway(params), "adam_w_mode": decoupled}
    ours = _BY_TYPE.get(kind)
    if ours is not None:
        params = _without_what_is_so_anyway(params)
        if ours is DeepSpeedCPUAdam and "adam_w_mode" in params:
            params["adamw_mode"] = params.pop("adam_w_mode")
        return ours, params
    found = getattr(torch.optim, policy.type, None)
    if isinstance(found, type) and issubclass(found, torch.optim.Optimizer) and found is not torch.optim.Optimizer:
        return found, params
    raise ConfigError(
        [
            Problem(
                "optimizer.type",
                policy.type,
                "is neither one of our optimizers nor a class of torch.optim",
                'write the class name exactly as torch.optim spells it, for example "SGD"',
            )
        ]
    )


def _without_what_is_so_anyway(params: dict[str, Any]) -> dict[str, Any]:
    """States are always fp32 here, and gradients are always set to None; not every class has the flags for it."""
    return {
        key: value
        for key, value in params.items()
        if key not in ("fp32_optimizer_states", "set_grad_none", "per_head_muon")
    }


def holds_whole_tensors(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer must see one tensor per parameter in its own shape."""
    if is_lamb(optimizer) or type(optimizer) is Muon:
        return False  # ours ask the other ranks for what their shards lack
    return any(ancestor.__name__ in NEEDS_WHOLE_TENSORS for ancestor in type(optimizer).__mro__)


def looks_at_elements(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a shard may be cut into portions that are updated one after the other, without changing the result."""
    looks_further = is_lamb(optimizer) or type(optimizer) is Muon or holds_whole_tensors(optimizer)
    return not looks_further and compressing_updater_of(optimizer) is None


def states_per_element(optimizer: torch.optim.Optimizer) -> int:
    """States that an optimizer keeps for every element; a guess (Adam's two) for those that only know themselves."""
    family = family_of(optimizer)
    return 2 if family is None else len(family.state_names(optimizer.param_groups[0]))


def refuse_on_flat_shards(optimizer: torch.optim.Optimizer, stage: int) -> None:
    """Raise for optimizers whose result would silently be wrong on flat shards."""
    highest = highest_stage(optimizer)
    if stage > highest:
        name = type(optimizer).__name__
        raise ConfigError(
            [Problem("zero_optimization.stage", stage, f"{name} works at stages up to {highest}", f"use {highest}")]
        )
    if holds_whole_tensors(optimizer):
        name = type(optimizer).__name__
        raise ConfigError(
            [
                Problem(
                    "zero_optimization.stage",
                    stage,
                    f"{name} works on whole tensors, and this stage gives it flat shards",
                    f"use stage 0 with {name}, or AdamW with this stage",
                )
            ]
        )


def suit_precision(optimizer: torch.optim.Optimizer, precision: Precision) -> None:
    """Give the optimizer's states the dtype that goes with 16-bit masters. After `adopt_masters`.

    Raises:
        ConfigError: for an optimizer whose update would be computed in 16 bits.
    """
    if not precision.narrow_masters:
        return
    family, name = family_of(optimizer), type(optimizer).__name__
    if family is None:
        path = f"{precision.model_name}.{precision.model_name}_master_weights_and_grads"
        rule = f"{name} computes in the dtype of its masters, and 16 bits are too few for that"
        fix = "use Adam, AdamW, Lion, Adagrad or SGD, which compute in fp32 whatever they keep, or remove the key"
        raise ConfigError([Problem(path, True, rule, fix)])
    dtype = None if precision.narrow_states else torch.float32
    optimizer.state_dtype = dtype  # type: ignore[attr-defined]
    for state in optimizer.state.values():  # that of an optimizer which makes it at birth
        for kind in family.state_names(optimizer.param_groups[0]):
            state[kind] = state[kind].to(dtype or state[kind].dtype)


def highest_stage(optimizer: torch.optim.Optimizer) -> int:
    """The last stage at which an optimizer works: those that average gradients themselves need them whole."""
    if type(optimizer) is ZeroOneAdam:
        return 0
    return 1 if type(optimizer) in (OneBitAdam, OneBitLamb) else 3


def updater_for(
    optimizer: torch.optim.Optimizer,
    shards: Sequence[MasterShard],
    peers: Peers | None = None,
    ranks: Ranks | None = None,
) -> Updater:
    """The fused way where it computes the same on flat shards, else the optimizer's own step.

    Args:
        peers: the ranks that share the parameters; None where every rank owns whole parameters.
        ranks: all ranks, for the optimizers that exchange gradients themselves.
    """
    compressing = compressing_updater_of(optimizer)
    if compressing is not None:
        assert ranks is not None, "the 1-bit optimizers need to know the other ranks"
        return compressing(optimizer, shards, ranks)
    if any(len(shard.tensors) != 1 for shard in shards):
        return WholeStepUpdater(optimizer, shards)
    if is_lamb(optimizer):
        return LambUpdater(optimizer, shards, peers)
    if type(optimizer) is Muon and peers is not None:
        return MuonUpdater(optimizer, shards, peers)
    family = family_of(optimizer)
    return WholeStepUpdater(optimizer, shards) if family is None else ElementwiseUpdater(optimizer, shards, family)


def adopt_masters(
    optimizer: torch.optim.Optimizer, shards: Sequence[MasterShard], groups: Sequence[dict[str, Any]]
) -> None:
    """Make `optimizer` hold the masters instead of the model's parameters; its groups stay the same objects."""
    made_state_at_birth = _refuse_used(optimizer)
    optimizer.state.clear()
    for index, group in enumerate(groups):
        masters: list[nn.Parameter] = []
        for shard in shards:
            if shard.group == index:
                masters.extend(tensor.parameter for tensor in shard.tensors)
        group["params"] = masters
    optimizer.param_groups[:] = groups
    if made_state_at_birth:
        # Adagrad and its like fill `state` in the constructor: let it do so again, for the masters.
        newborn = type(optimizer)([dict(group) for group in groups], **optimizer.defaults)
        optimizer.state.update(newborn.state)


def _refuse_used(optimizer: torch.optim.Optimizer) -> bool:
    """Raise when the optimizer has stepped; otherwise say whether it holds state all the same."""
    states = [state for state in optimizer.state.values() if state]
    if any(float(state.get("step", 1)) > 0 for state in states):
        raise RuntimeError(
            f"{type(optimizer).__name__} has already stepped, and its state describes the model's own parameters. "
            "Give initialize() an optimizer that has not been used yet."
        )
    return bool(states)

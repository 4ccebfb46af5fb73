"""Experts over ranks that a program asks for by transformers' `DistributedConfig(ep_size=...)`, beside a ds.json."""

from __future__ import annotations

from typing import Any

from hf_zero.config import ConfigError, Problem

_ASKED = "_hf_zero_experts"


def left_to_engine(distributed_config: Any) -> Any:
    """The same with nothing for transformers to do; `asked_experts` remembers what it asked for.

    Raises:
        ConfigError: it cuts matrices or layers, too.
    """
    cut = {name: size for name in ("tp_size", "pp_size") if (size := getattr(distributed_config, name, 1)) > 1}
    if cut and distributed_config.tp_plan != {}:
        rule = "beside a ds.json transformers does not cut the rest of the model"
        fix = "leave it out; tensor_parallel.autotp_size in the ds.json cuts matrices, without experts over ranks"
        raise ConfigError(Problem("DistributedConfig", cut, rule, fix))
    config = type(distributed_config)()
    setattr(config, _ASKED, distributed_config.ep_size)
    return config


def write_asked_experts(config: dict[str, Any], model: Any) -> None:
    """Into the ds.json, what `model` has been loaded with.

    Raises:
        ConfigError: it says something else.
    """
    size = getattr(getattr(getattr(model, "config", None), "distributed_config", None), _ASKED, 1)
    if size == 1:
        return
    section = config.setdefault("expert_parallel", {})
    written = section.get("autoep_size", 1) if section.get("enabled") else 1
    if written not in (1, size):
        rule = f"the program asks for {size} ranks (DistributedConfig(ep_size=...))"
        raise ConfigError(Problem("expert_parallel.autoep_size", written, rule, f"write {size}, or remove it"))
    section.update(enabled=True, autoep_size=size)

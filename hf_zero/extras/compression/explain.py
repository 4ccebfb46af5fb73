"""`explain` of compression_training: which modules of a model each rule means, without its weights."""

from __future__ import annotations

from typing import Any

from hf_zero.config import ConfigError, Findings, Problem
from hf_zero.explain.views import config_file
from hf_zero.extras.compression.feature import reduce_layers
from hf_zero.extras.compression.matching import listing, match_all

_SHOWN = 4


def compression_words(findings: Findings, model: str | None) -> tuple[list[str], list[Problem]]:
    """A line for each rule, and what does not fit the model.

    Args:
        model: folder, config.json or hub name of the model; None: only what to do to see more.
    """
    policy = findings.extras["compression"]
    if model is None:
        return ["compression_training: give --model to see which modules each rule means"], []
    try:
        built = _without_weights(model)
        if policy.layers is not None:
            reduce_layers(built, policy.layers)
        modules = listing(match_all(built, policy))
    except ConfigError as error:
        return [], list(error.problems)
    lines = [f"{path}: {len(names)} modules: {_few(names)}" for path, names in modules.items()]
    if policy.layers is not None:
        kept = ", ".join(map(str, policy.layers.teacher_layer))
        lines.insert(0, f"compression_training.layer_reduction: {policy.layers.module_name_prefix} keeps layers {kept}")
    return lines, []


def _few(names: list[str]) -> str:
    if len(names) <= _SHOWN:
        return ", ".join(names)
    return f"{', '.join(names[: _SHOWN - 1])} ... {names[-1]}"


def _without_weights(model: str) -> Any:
    """The model on the meta device, of the class that its config names."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(config_file(model))
    kind = getattr(transformers, (config.architectures or ["AutoModel"])[0], transformers.AutoModel)
    with torch.device("meta"):
        return kind.from_config(config) if kind is transformers.AutoModel else kind(config)

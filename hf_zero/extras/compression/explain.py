"""`explain` of compression_training: which modules of a model each rule means, without its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hf_zero.config import ConfigError, Findings, Problem
from hf_zero.extras.compression.feature import reduce_layers
from hf_zero.extras.compression.matching import listing, match_all

_SHOWN = 4


def compression_words(findings: Findings, model: str | None) -> tuple[list[str], list[Problem]]:
    """A line for each rule, and what does not fit the model.

    Args:
        model: folder or config.json of the model; None: only what to do to see more.
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

    path = Path(model)
    values = json.loads((path if path.is_file() else path / "config.json").read_text(encoding="utf-8"))
    architectures = values.get("architectures") or ["AutoModel"]
    config = transformers.AutoConfig.from_pretrained(path if path.is_dir() else path.parent)
    kind = getattr(transformers, architectures[0], transformers.AutoModel)
    with torch.device("meta"):
        if kind is transformers.AutoModel:
            return transformers.AutoModel.from_config(config)
        return kind(config)

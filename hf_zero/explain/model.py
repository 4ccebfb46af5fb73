"""A model's configuration by name: a folder, a file, or a name on the hub; never its weights."""

from __future__ import annotations

import json
from pathlib import Path

from hf_zero.config import ConfigError, ModelView, Problem

_FIX = "give a folder with config.json, a config.json, or a model name of the hub"


def model_view_by_name(name: str | None) -> ModelView | None:
    """The view, or None when no model was named."""
    if name is None:
        return None
    path = _file(name)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(Problem("--model", name, f"its configuration cannot be read: {error}", _FIX)) from None
    if not isinstance(values, dict):
        raise ConfigError(Problem("--model", name, "a model's configuration is one JSON object", _FIX))
    return ModelView(config=values)


def _file(name: str) -> Path:
    path = Path(name)
    if path.is_dir():
        return path / "config.json"
    if path.exists() or name.endswith(".json"):
        return path
    # From the cache if it is there, else from the hub.
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, "config.json"))
    except Exception as error:  # its own errors, those of the network, and names it does not allow
        reason = str(error).split("\n")[0]
        raise ConfigError(Problem("--model", name, f"no such file, and not found on the hub: {reason}", _FIX)) from None

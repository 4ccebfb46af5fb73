"""Folders of models whose shapes no config of their class can say: some lines of code beside config.json can.

`from_pretrained(folder, trust_remote_code=True)` of the Auto classes builds such a model; it needs transformers only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

FILE = "modeling_compressed.py"
KEY = "compressed_modules"
_AUTO = {
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
    "ForQuestionAnswering": "AutoModelForQuestionAnswering",
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "ForConditionalGeneration": "AutoModelForSeq2SeqLM",
    "ForImageClassification": "AutoModelForImageClassification",
}
_SOURCE = '''\
"""{base} with parts of it taken out: config.json says of which modules, in `{key}`."""

import torch
from transformers import {base}


class {name}({base}):
    """Shapes are those of the pruned model; everything else is the base class."""

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        for path, change in config.{key}.items():
            module = self.get_submodule(path)
            for attribute, value in change["attributes"].items():
                setattr(module, attribute, value)
            for parameter, shape in change["shapes"].items():
                old = getattr(module, parameter)
                setattr(module, parameter, torch.nn.Parameter(old.new_empty(shape)))
'''


def describe(model: nn.Module) -> dict[str, dict[str, Any]]:
    """By module, what its class would make otherwise: shapes of its own parameters and whole numbers that it keeps."""
    found = {}
    for name, module in model.named_modules():
        shapes = {key: list(parameter.shape) for key, parameter in module.named_parameters(recurse=False)}
        numbers = {
            key: value
            for key, value in vars(module).items()
            if type(value) is int and not key.startswith("_")  # flags are no sizes
        }
        found[name] = {"shapes": shapes, "attributes": numbers}
    return found


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The modules that have changed, with what has."""
    changed = {}
    for name, new in after.items():
        old = before.get(name, {"shapes": {}, "attributes": {}})
        parts = {
            part: {key: value for key, value in new[part].items() if old[part].get(key) != value}
            for part in ("shapes", "attributes")
        }
        if any(parts.values()):
            changed[name] = parts
    return changed


def save_with_code(model: Any, changed: Mapping[str, Any]) -> None:
    """From now on, `model.save_pretrained` also writes the code, and names it in config.json."""
    plain = model.save_pretrained

    def save_pretrained(save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        saved = plain(save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", True):
            _add_code(Path(save_directory), type(model).__name__, changed)
        return saved

    vars(model)["save_pretrained"] = save_pretrained


def _add_code(folder: Path, base: str, changed: Mapping[str, Any]) -> None:
    name = f"Compressed{base}"
    (folder / FILE).write_text(_SOURCE.format(base=base, name=name, key=KEY), encoding="utf-8")
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    auto = next((auto for ending, auto in _AUTO.items() if base.endswith(ending)), "AutoModel")
    config.update({KEY: dict(changed), "architectures": [name], "auto_map": {auto: f"{Path(FILE).stem}.{name}"}})
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

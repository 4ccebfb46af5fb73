"""config.json after a model has been cut: the values with which plain from_pretrained builds the same shapes.

Which of a config's numbers means what is not written down anywhere, so it is tried: numbers that had the old width are
given the new one until the model's own class, built without memory, has exactly the shapes of the cut model. Where no
config can say it, the folder gets a few lines of code that can: `from_pretrained(folder, trust_remote_code=True)` of
the Auto classes builds such a model; it needs transformers only.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

_MAX_TRIES = 64
_UNSET_WIDTHS = ("n_inner", "intermediate_size", "ffn_dim")  # None means a multiple of the hidden size
_HEADS = ("num_attention_heads", "num_key_value_heads", "n_head", "num_heads")


@dataclass(frozen=True, slots=True)
class Change:
    """A number of the model that has become another; `is_heads`: a count of attention heads."""

    before: int
    after: int
    is_heads: bool = False


def follow(model: nn.Module, changes: Sequence[Change]) -> bool:
    """Let `model.config` say what the model is now; False, and no change, where no config can."""
    config = getattr(model, "config", None)
    if config is None or not changes:
        return config is not None
    for edit in itertools.islice(_edits(config, list(dict.fromkeys(changes))), _MAX_TRIES):
        if _builds(model, edit):
            for name, value in edit.items():
                setattr(config, name, value)
            return True
    return False


def _edits(config: Any, changes: Sequence[Change]) -> Iterator[dict[str, int]]:
    """Sets of new values, the likeliest first."""
    values = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    choices = [list(_edits_of(config, values, change)) for change in changes]
    for parts in itertools.product(*choices):
        yield {name: value for part in parts for name, value in part.items()}


def _edits_of(config: Any, values: Mapping[str, Any], change: Change) -> Iterator[dict[str, int]]:
    if change.is_heads:
        counts = [name for name in _HEADS if isinstance(values.get(name), int)]
        scaled = {n: values[n] * change.after // change.before for n in counts if values[n] % change.before == 0}
        hidden, heads = getattr(config, "hidden_size", 0), getattr(config, "num_attention_heads", 0)
        if scaled and heads:
            size = values.get("head_dim") or hidden // heads
            yield {**scaled, "head_dim": size}
        return
    names = [name for name, value in values.items() if value == change.before and not isinstance(value, bool)]
    names += [name for name in _UNSET_WIDTHS if name in values and values[name] is None]
    for name in names:
        yield {name: change.after}
    for first, second in itertools.combinations(names, 2):
        yield {first: change.after, second: change.after}


def _builds(model: nn.Module, edit: Mapping[str, int]) -> bool:
    """Whether the model's class makes the same shapes of the edited config."""
    config = copy.deepcopy(model.config)
    for name, value in edit.items():
        setattr(config, name, value)
    try:
        with torch.device("meta"):
            built = type(model)(config)
    except Exception:  # a config that its own class refuses is no answer
        return False
    shapes = {name: tuple(parameter.shape) for name, parameter in built.named_parameters()}
    return shapes == {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


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

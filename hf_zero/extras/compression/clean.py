"""redundancy_clean: applies masks and quantization to the weights permanently, and removes pruned structures.

    rows       the layer's outputs            related: inputs of modules that read them (outputs of a gate's partner)
    heads      the layer's inputs             related: outputs of Q, K and V, which may be packed in one projection
    channels   the layer's filters            related: inputs of the next convolution; channels of a batch norm

Only plain tensors are cut, after the model has left its engine.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.errors import WrongArgument
from hf_zero.extras.compression.compressed_model import CompressedModel
from hf_zero.extras.compression.matching import Layer, Match, layers_of
from hf_zero.extras.compression.section import WeightShared
from hf_zero.log import logger

# config.json after a model has been cut must hold the values with which plain from_pretrained builds the same shapes.
#
# The meaning of a config's values is not declared anywhere, so they are tried: values equal to the old width are set to
# the new one until the model's own class, built on the meta device, has exactly the shapes of the cut model.
# If no config can express the shapes, the folder gets a short module that can: `from_pretrained(folder,
# trust_remote_code=True)` of the Auto classes builds such a model and only needs transformers.


_MAX_TRIES = 64
_UNSET_WIDTHS = ("n_inner", "intermediate_size", "ffn_dim")  # None means a multiple of the hidden size
_HEADS = ("num_attention_heads", "num_key_value_heads", "n_head", "num_heads")


@dataclass(frozen=True, slots=True)
class DimensionChange:
    """A changed dimension of the model; `is_heads`: it is a number of attention heads."""

    before: int
    after: int
    is_heads: bool = False


def follow(model: nn.Module, changes: Sequence[DimensionChange]) -> bool:
    """Update `model.config` to the model's new shapes; returns False, unchanged, if no config can express them."""
    config = getattr(model, "config", None)
    if config is None or not changes:
        return config is not None
    for edit in itertools.islice(_edits(config, list(dict.fromkeys(changes))), _MAX_TRIES):
        if _builds(model, edit):
            for name, value in edit.items():
                setattr(config, name, value)
            return True
    return False


def _edits(config: Any, changes: Sequence[DimensionChange]) -> Iterator[dict[str, int]]:
    """Candidate sets of new config values, most likely first."""
    values = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    choices = [list(_edits_of(config, values, change)) for change in changes]
    for parts in itertools.product(*choices):
        yield {name: value for part in parts for name, value in part.items()}


def _edits_of(config: Any, values: Mapping[str, Any], change: DimensionChange) -> Iterator[dict[str, int]]:
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
    """Whether the model's class builds the model's shapes from the edited config."""
    config = copy.deepcopy(model.config)
    for name, value in edit.items():
        setattr(config, name, value)
    try:
        with torch.device("meta"):
            built = type(model)(config)
    except Exception:  # the class rejects this config
        return False
    shapes = {name: tuple(parameter.shape) for name, parameter in built.named_parameters()}
    return shapes == {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


FILE = "modeling_compressed.py"
KEY = "compressed_modules"
_TASKS = "SequenceClassification TokenClassification QuestionAnswering MaskedLM CausalLM ImageClassification".split()
_AUTO = {f"For{task}": f"AutoModelFor{task}" for task in _TASKS}
_AUTO |= {"LMHeadModel": "AutoModelForCausalLM", "ForConditionalGeneration": "AutoModelForSeq2SeqLM"}
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
    """By module, the shapes of its own parameters and its integer attributes, which its class may set differently."""
    layers = {}
    for name, module in model.named_modules():
        shapes = {key: list(parameter.shape) for key, parameter in module.named_parameters(recurse=False)}
        numbers = {
            key: value
            for key, value in vars(module).items()
            if type(value) is int and not key.startswith("_")  # bool is not a size
        }
        layers[name] = {"shapes": shapes, "attributes": numbers}
    return layers


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The changed modules, each with its changed shapes and attributes."""
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
    """Make `model.save_pretrained` also write the modeling code and register it in config.json."""
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
    auto = next((auto for ending, auto in _AUTO.items() if base.endswith(ending)), "AutoModel")
    add_to_config(
        folder, {KEY: dict(changed), "architectures": [name], "auto_map": {auto: f"{Path(FILE).stem}.{name}"}}
    )


def add_to_config(folder: Path, values: Mapping[str, Any]) -> None:
    """Set top-level values in a folder's config.json."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text(encoding="utf-8")), **values}
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


@torch.no_grad()
def clean(compressed: CompressedModel) -> CleaningReport:
    """Make the compression of a model with plain tensors permanent, regardless of its schedules, and end it.

    Raises:
        WrongArgument: if related modules do not match the pruned layers.
    """
    model: Any = compressed.model
    if getattr(model, "_keys_to_ignore_on_save", None):
        model._keys_to_ignore_on_save = set(model._keys_to_ignore_on_save) - set(compressed.score_names())
    before = size_of(model, without={id(scores) for scores in compressed.scores()})
    compressed.advance(max(compressed.updates, _end(compressed)))
    masks = _bake(compressed)
    for pruned in compressed.pruned():
        pruned.layer.module._parameters.pop(pruned.scores_name, None)
    # Weights that are cut below are new tensors, and therefore not found in `bits`.
    weights = [layer.weight_bits for layer in compressed.layers if layer.weight_bits is not None]
    bits = {id(weight.layer.parameter): (weight.rule.bits, weight.num_groups) for weight in weights}
    compressed.close()
    before_cut, changes = describe(model), list[DimensionChange]()
    for technique in ("row_pruning", "channel_pruning", "head_pruning"):
        for match in compressed.matches.get(technique, ()):
            if not match.related:
                continue
            mask, is_heads = masks[technique, match.layer.name], technique == "head_pruning"
            if is_heads:
                cut_heads(model, match, mask)
            else:
                cut_rows(match, mask)
            changes.append(DimensionChange(mask.numel(), int(mask.sum()), is_heads))
    _tell_config(model, before_cut, changes)
    report = CleaningReport(before, size_of(model, bits))
    logger.info("%s", report)
    return report


def _end(compressed: CompressedModel) -> int:
    """The update after which all schedules are complete."""
    ends = [0]
    for technique in compressed.policy.techniques.values():
        shared = technique.shared
        ends.append(shared.end if getattr(shared, "method", "") == "snip_momentum" else shared.schedule_offset)
        if isinstance(shared, WeightShared):
            soft = 0 if shared.change_ratio is None else int(1 / shared.change_ratio) + 1
            for rule in technique.rules:
                steps = rule.start_bits - rule.bits
                ends.append(shared.schedule_offset + (rule.period * 2 ** (steps - 1) if steps else 0) + soft)
    return max(ends)


def _bake(compressed: CompressedModel) -> dict[tuple[str, str], torch.Tensor]:
    """Write the effective values into weights and biases. Returns the masks by technique and layer."""
    masks, written = {}, dict[int, torch.Tensor]()
    for layer in compressed.layers:
        weight, bias = layer.layer.parameter, layer.layer.bias
        new_weight, new_bias = layer.effective(weight, bias)
        written[id(weight)] = new_weight.detach().clone()
        if bias is not None and new_bias is not None:
            written[id(bias)] = new_bias.detach().clone()
        for technique, pruned in layer.pruned.items():
            masks[technique, layer.layer.name] = pruned.final_mask().clone()
    for layer in compressed.layers:
        for parameter in (layer.layer.parameter, layer.layer.bias):
            if parameter is not None and id(parameter) in written:
                parameter.copy_(written[id(parameter)])
    return masks


def _tell_config(model: nn.Module, before_cut: dict[str, Any], changes: list[DimensionChange]) -> None:
    if not changes or not hasattr(model, "config") or follow(model, changes):
        return
    if hasattr(model, "save_pretrained"):
        save_with_code(model, difference(before_cut, describe(model)))
        logger.info(
            "no config of %s can express these shapes: save_pretrained adds modeling_compressed.py to the folder, for "
            "AutoModel....from_pretrained(folder, trust_remote_code=True)",
            type(model).__name__,
        )


_HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_key_value_heads", "num_kv_heads")
_HEAD_WIDTHS = ("all_head_size", "split_size", "inner_dim")
_INTERLEAVED = ("query_key_value",)  # Q, K and V interleaved by head; others are all of Q, then K, then V


def cut(tensor: nn.Parameter, dim: int, kept: Tensor) -> nn.Parameter:
    """A parameter with only the kept indices along `dim`."""
    values = tensor.detach().index_select(dim, kept.to(tensor.device)).clone()
    return nn.Parameter(values, requires_grad=tensor.requires_grad)


def cut_outputs(module: nn.Module, kept: Tensor) -> None:
    """Keep only these outputs of a linear layer, a convolution or a batch norm."""
    layer = _layer(module)
    if layer is None:
        _cut_norm(module, kept)
        return
    before = layer.num_out
    module.register_parameter("weight", cut(layer.parameter, layer.out_dim, kept))
    if layer.bias is not None:
        module.register_parameter("bias", cut(layer.bias, 0, kept))
    _rename(module, ("out_features", "out_channels", "nf"), before, len(kept))


def cut_inputs(module: nn.Module, kept: Tensor) -> None:
    """Keep only these inputs of a linear layer or a convolution."""
    layer = _layer(module)
    assert layer is not None
    if getattr(module, "groups", 1) != 1:
        raise WrongArgument(f"{type(module).__name__} with groups={module.groups}: single inputs cannot be removed")
    before = layer.num_in
    module.register_parameter("weight", cut(layer.parameter, layer.in_dim, kept))
    _rename(module, ("in_features", "in_channels", "nx"), before, len(kept))


def _layer(module: nn.Module) -> Layer | None:
    layers = [layer for layer in layers_of(module) if layer.module is module]
    return layers[0] if layers and layers[0].kind in ("linear", "conv") else None


def _rename(module: nn.Module, names: Sequence[str], before: int, after: int) -> None:
    for name in names:
        if vars(module).get(name) == before:
            setattr(module, name, after)


def _cut_norm(module: nn.Module, kept: Tensor) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        module.register_parameter(name, cut(parameter, 0, kept))
    for name, buffer in list(module.named_buffers(recurse=False)):
        if buffer.dim() == 1:
            module.register_buffer(name, buffer.index_select(0, kept.to(buffer.device)).clone())
    if "num_features" in vars(module):
        vars(module)["num_features"] = len(kept)


def cut_rows(match: Match, mask: Tensor) -> None:
    """Remove the outputs that a mask drops, with the corresponding parts of related modules."""
    kept, total = _kept(mask), mask.numel()
    for name, module in match.related:
        related = _layer(module)
        if related is None or (related.num_in != total and related.num_out == total):
            _check(name, total, related.num_out if related else len(next(module.parameters(recurse=False))))
            cut_outputs(module, kept)
        else:
            _check(name, total, related.num_in)
            cut_inputs(module, kept)
    cut_outputs(match.layer.module, kept)


def cut_heads(model: nn.Module, match: Match, mask: Tensor) -> None:
    """Remove the heads that a mask drops: inputs of the output projection, and outputs of Q, K and V."""
    num_heads, kept = mask.numel(), _kept(mask)
    inputs = match.layer.num_in
    cut_inputs(match.layer.module, _elements(kept, inputs // num_heads))
    for name, module in match.related:
        related = _layer(module)
        if related is None or related.num_out % num_heads:
            raise WrongArgument(
                f"compression_training.head_pruning: {name} does not have {num_heads} equal heads; where keys and "
                "values have fewer heads than queries, set num_heads to their number (num_key_value_heads)"
            )
        segments = 1
        if related.num_out % inputs == 0 and not name.endswith(_INTERLEAVED):
            segments = related.num_out // inputs
        segment = related.num_out // segments
        own = _elements(kept, segment // num_heads)
        cut_outputs(module, torch.cat([own + number * segment for number in range(segments)]))
    names = [match.layer.name, *(name for name, _ in match.related)]
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in names):
        _count_heads(model.get_submodule(parent), num_heads, len(kept))


def _count_heads(module: nn.Module, before: int, after: int) -> None:
    for name, value in list(vars(module).items()):
        is_count = name in (*_HEAD_COUNTS, *_HEAD_WIDTHS) and isinstance(value, int)
        if is_count and value % before == 0:
            setattr(module, name, value // before * after)


def _kept(mask: Tensor) -> Tensor:
    return mask.reshape(-1).nonzero().view(-1).cpu()


def _elements(kept: Tensor, size: int) -> Tensor:
    """Indices of the elements in the kept blocks of `size` elements."""
    return (kept.view(-1, 1) * size + torch.arange(size)).view(-1)


def _check(name: str, wanted: int, actual: int) -> None:
    if wanted != actual:
        raise WrongArgument(
            f"compression_training: related module {name} has {actual} features, the pruned layer {wanted} outputs; "
            "name the modules that read the pruned layer's outputs in related_modules"
        )


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a model.

    Attributes:
        num_parameters: with tied parameters counted once.
        num_nonzero: number of nonzero parameters.
        num_bytes: size of the tensors in their dtypes.
        num_packed_bytes: size with quantized weights packed into their bits, plus fp32 scales.
        num_flops: FLOPs of linear layers per token and of convolutions per output position: two per weight.
    """

    num_parameters: int
    num_nonzero: int
    num_bytes: int
    num_packed_bytes: int
    num_flops: int


@dataclass(frozen=True, slots=True)
class CleaningReport:
    """A model before and after `redundancy_clean`."""

    before: Size
    after: Size

    def __str__(self) -> str:
        lines = ["redundancy_clean:         before          after   ratio"]
        for name, words in (
            ("num_parameters", "parameters"),
            ("num_nonzero", "not zero"),
            ("num_bytes", "bytes"),
            ("num_packed_bytes", "bytes, packed"),
            ("num_flops", "FLOPs per token"),
        ):
            old, new = getattr(self.before, name), getattr(self.after, name)
            lines.append(f"  {words:<16}{old:>14,}{new:>15,}{new / max(1, old):>8.3f}")
        return "\n".join(lines)


def size_of(model: nn.Module, bits: Mapping[int, tuple[int, int]] | None = None, without: Collection[int] = ()) -> Size:
    """The size of a model with plain tensors.

    Args:
        bits: id of a quantized weight -> (bits, number of scales).
        without: ids of parameters that do not count: scores, which are not saved.
    """
    packed = 0
    parameters = [parameter for parameter in model.parameters() if id(parameter) not in without]
    for parameter in parameters:
        num_bits, num_scales = (bits or {}).get(id(parameter), (8 * parameter.element_size(), 0))
        packed += math.ceil(parameter.numel() * num_bits / 8) + 4 * num_scales
    layers = [layer for layer in layers_of(model) if layer.kind != "embedding" and id(layer.parameter) not in without]
    worked = {id(layer.parameter): layer.parameter for layer in layers}
    return Size(
        num_parameters=sum(parameter.numel() for parameter in parameters),
        num_nonzero=sum(int(parameter.count_nonzero()) for parameter in parameters),
        num_bytes=sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        num_packed_bytes=packed,
        num_flops=2 * sum(parameter.numel() for parameter in worked.values()),
    )

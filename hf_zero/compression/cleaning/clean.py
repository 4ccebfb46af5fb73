"""redundancy_clean: masks and bits become part of the weights, and what masks drop leaves the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_zero.compression.cleaning.config_follows import Change, follow
from hf_zero.compression.cleaning.portable import describe, difference, save_with_code
from hf_zero.compression.cleaning.report import CleaningReport, size_of
from hf_zero.compression.cleaning.shrink import cut_heads, cut_rows
from hf_zero.compression.compressed_model import CompressedModel
from hf_zero.compression.matching import Match
from hf_zero.log import logger


@torch.no_grad()
def clean(compressed: CompressedModel) -> CleaningReport:
    """Make the compression of a model of plain tensors permanent, whatever its schedules say, and end it.

    Raises:
        WrongArgument: related modules do not fit what is pruned.
    """
    model = compressed.model
    _drop_ignored(compressed)
    before = size_of(_Without(model, compressed).model)
    compressed.advance(max(compressed.updates, _end(compressed)))
    masks = _bake(compressed)
    _remove_scores(compressed)
    bits = _packed_bits(compressed)
    compressed.close()
    before_cut, changes = describe(model), list[Change]()
    for technique in ("rows", "channels", "heads"):
        for match in compressed.matches.get(technique, ()):
            if match.related:
                changes.append(_cut(model, technique, match, masks[technique, match.layer.name]))
    _tell_config(model, before_cut, changes)
    report = CleaningReport(before, size_of(model, bits))
    logger.info("%s", report)
    return report


class _Without:
    """The model as it would be counted without scores: they are no part of what is saved."""

    def __init__(self, model: nn.Module, compressed: CompressedModel) -> None:
        self.model = nn.Module()
        own = {id(scores) for scores in compressed.scores()}
        for number, module in enumerate(model.modules()):
            kept = {name: p for name, p in module.named_parameters(recurse=False) if id(p) not in own}
            if kept:
                copied = type(module).__new__(type(module))
                copied.__dict__.update({**vars(module), "_parameters": kept, "_modules": {}})
                self.model.add_module(str(number), copied)


def _end(compressed: CompressedModel) -> int:
    """The update at which every schedule has come to its end."""
    policy, ends = compressed.policy, [0]
    if policy.weights is not None:
        for rule in policy.weights.rules:
            steps = rule.start_bits - rule.bits
            last = rule.period * 2 ** (steps - 1) if steps else 0
            soft = 0 if policy.weights.change_ratio is None else int(1 / policy.weights.change_ratio) + 1
            ends.append(policy.weights.offset + last + soft)
    for name in ("activations", "sparse", "rows", "channels", "heads"):
        wanted = getattr(policy, name)
        if wanted is not None:
            ends.append(max(wanted.offset, getattr(wanted, "end", 0)))
    return max(ends)


def _bake(compressed: CompressedModel) -> dict[tuple[str, str], torch.Tensor]:
    """Write what forward sees into the weights; returns the masks by technique and layer."""
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


def _remove_scores(compressed: CompressedModel) -> None:
    for pruned in compressed.pruned():
        pruned.layer.module._parameters.pop(pruned.scores_name, None)


def _drop_ignored(compressed: CompressedModel) -> None:
    model: Any = compressed.model
    ignored = getattr(model, "_keys_to_ignore_on_save", None)
    if ignored:
        model._keys_to_ignore_on_save = set(ignored) - set(compressed.score_names())


def _packed_bits(compressed: CompressedModel) -> dict[int, tuple[int, int]]:
    """Of every quantised weight its bits and scales; empty for those that are cut afterwards, which are new tensors."""
    found = {}
    for layer in compressed.layers:
        if layer.weight_bits is not None:
            found[id(layer.layer.parameter)] = (layer.weight_bits.rule.bits, layer.weight_bits.num_groups)
    return found


def _cut(model: nn.Module, technique: str, match: Match, mask: torch.Tensor) -> Change:
    total, kept = mask.numel(), int(mask.sum())
    if technique == "heads":
        cut_heads(model, match, mask)
        return Change(total, kept, is_heads=True)
    cut_rows(match, mask)
    return Change(total, kept)


def _tell_config(model: nn.Module, before_cut: dict[str, Any], changes: list[Change]) -> None:
    if not changes or not hasattr(model, "config") or follow(model, changes):
        return
    if hasattr(model, "save_pretrained"):
        save_with_code(model, difference(before_cut, describe(model)))
        logger.info(
            "no config of %s can say these shapes: save_pretrained adds modeling_compressed.py to the folder, which "
            "AutoModel....from_pretrained(folder, trust_remote_code=True) uses",
            type(model).__name__,
        )

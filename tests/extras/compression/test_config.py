"""The section compression_training: its meaning, and clear errors for mistakes in it."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
from torch import nn

from hf_zero.config import ConfigError, resolve, resolve_extra
from hf_zero.extras.compression.export import init_compression
from hf_zero.extras.compression.matching import match_all, nearest
from hf_zero.extras.compression.section import CompressionPolicy, TechniqueGroup
from tests.extras.compression.models import (
    BERT_OUT,
    BERT_QKV,
    EIGHT_BIT_INPUTS,
    EIGHT_BITS,
    HEADS,
    ROWS,
    SNIP,
    SPARSE,
    ds_config,
    group,
    technique,
    tiny_bert,
)


def _problems(**techniques: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve(ds_config(**techniques), world_size=1)
    return [f"{problem.path}: {problem.rule}; {problem.fix}" for problem in caught.value.problems]


def test_what_is_asked_for() -> None:
    groups = {
        "first": {"params": {"start_bits": 12, "target_bits": 4, "quantization_period": 50}, "modules": ["query"]},
        "second": {"params": {"target_bits": "8"}},
    }
    section = {"shared_parameters": {"enabled": True, "quantize_groups": 64}, "different_groups": groups}
    policy = resolve(ds_config(weight_quantization=section), world_size=1).extras["compression"]
    (weights,) = policy.techniques.values()
    assert weights.shared.quantize_groups == 64 and weights.shared.quantization_type == "symmetric"
    path = "compression_training.weight_quantization.different_groups"
    assert weights.rules == (
        TechniqueGroup(path=f"{path}.first", modules=("query",), start_bits=12, bits=4, period=50),
        TechniqueGroup(path=f"{path}.second", modules=("*",), start_bits=8, bits=8),
    )
    assert policy.is_on and list(policy.techniques) == ["weight_quantization"]


@pytest.mark.parametrize("section", [{}, {"sparse_pruning": {"shared_parameters": {"enabled": False}}}])
def test_what_is_off_asks_for_nothing(section: dict[str, Any]) -> None:
    assert "compression" not in resolve(ds_config(**section), world_size=1).extras


def test_open_autos_do_not_matter() -> None:
    config = {**ds_config(sparse_pruning=SPARSE), "train_micro_batch_size_per_gpu": "auto"}
    assert "sparse_pruning" in resolve_extra(config, "compression").techniques


@pytest.mark.parametrize(
    ("techniques", "words"),
    [
        ({"weight_quantization": {"shared_parameters": {"enabled": True}}}, "no groups"),
        ({"weight_quantization": technique(group({}, "*"))}, "needs its number of bits"),
        ({"weight_quantization": technique(group({"target_bits": 8, "start_bits": 4}, "*"))}, "at least target_bits"),
        ({"weight_quantization": technique(group({"target_bits": 2}, "*"), rounding="stochastic")}, "need nearest"),
        ({"weight_quantization": technique(group({"target_bitz": 8}, "*"))}, 'did you mean "target_bits"'),
        ({"activation_quantization": technique(group({"bits": 2}, "*"))}, "from 3 to 16"),
        ({"sparse_pruning": technique(group({}, "*"))}, "the fraction to keep"),
        ({"sparse_pruning": technique(group({"dense_ratio": 1.5}, "*"))}, "at most 1"),
        ({"sparse_pruning": technique({}, method="snip_momentum", block_pattern="4by1")}, "NxM"),
        ({"sparse_pruning": technique({}, method="snip_momentum", block_pattern="4:4")}, "N below M"),
        ({"head_pruning": technique(group({"dense_ratio": 0.5}, "*"))}, "number of heads"),
        ({"row_pruning": technique(group({"dense_ratio": 0.5}, "a("))}, "not a valid regular expression"),
        ({"row_pruning": technique(group({"dense_ratio": 0.5}, "a", "b", related=[["c"]]))}, "one list for each"),
        ({"layer_reduction": {"enabled": True, "module_name_prefix": "a", "teacher_layer": [2, 1]}}, "ascend"),
        ({"layer_reduction": {"enabled": True, "teacher_layer": [1]}}, "name of the list of layers"),
        ({"row_prunning": {}}, 'did you mean "row_pruning"'),
    ],
)
def test_what_is_wrong_is_said(techniques: dict[str, Any], words: str) -> None:
    assert any(words in problem for problem in _problems(**techniques)), _problems(**techniques)


def test_keys_of_another_method_are_named() -> None:
    section = technique(group({"dense_ratio": 0.5}, "*"), block_pattern="4x1")
    assert "used with snip_momentum" in str(resolve(ds_config(sparse_pruning=section), world_size=1).warnings)


def test_expressions_that_match_nothing_name_the_nearest() -> None:
    section = technique(group({"dense_ratio": 0.5}, "atention.output.dense", related=[["self.qerry"]]), num_heads=4)
    with pytest.raises(ConfigError) as caught:
        init_compression(tiny_bert(), ds_config(head_pruning=section))
    (problem,) = [problem for problem in caught.value.problems if problem.path.endswith(".modules")]
    assert problem.value == "atention.output.dense" and "attention.output.dense" in problem.fix
    assert nearest("self.qerry", ["bert.encoder.layer.0.attention.self.query"])[0] == "self.query"


def test_one_module_in_two_groups() -> None:
    groups = {**group({"dense_ratio": 0.5}, "query"), "other": {"params": {"dense_ratio": 0.2}, "modules": ["self"]}}
    with pytest.raises(ConfigError, match="already matches"):
        init_compression(tiny_bert(), ds_config(sparse_pruning=technique(groups)))


def test_related_modules_are_paired_by_position() -> None:
    """DeepSpeed cut the modules of the second expression with the masks of the first."""
    related = [["layer.0.attention.self.query"], ["layer.1.attention.self.query"]]
    names = (f"layer.0.{BERT_OUT}", f"layer.1.{BERT_OUT}")
    section = technique(group({"dense_ratio": 0.5}, *names, related=related), num_heads=4)
    policy = resolve(ds_config(head_pruning=section), world_size=1).extras["compression"]
    first, second = match_all(tiny_bert(), policy)["head_pruning"]
    assert [name for name, _ in first.related] == ["bert.encoder.layer.0.attention.self.query"]
    assert [name for name, _ in second.related] == ["bert.encoder.layer.1.attention.self.query"]
    narrow = technique(group({"dense_ratio": 0.5}, BERT_OUT, related=[["layer.0.attention.self.query"]]), num_heads=4)
    with pytest.raises(ConfigError, match="matches 1 modules, but the group matches 2"):
        match_all(tiny_bert(), resolve(ds_config(head_pruning=narrow), world_size=1).extras["compression"])


_WHOLE = {
    "weight_quantization": EIGHT_BITS,
    "activation_quantization": EIGHT_BIT_INPUTS,
    "sparse_pruning": SNIP,
    "row_pruning": ROWS,
    "head_pruning": HEADS,
    "channel_pruning": technique(group({"dense_ratio": 0.5}, "conv")),
    "layer_reduction": {"enabled": True, "module_name_prefix": "bert.encoder.layer", "teacher_layer": [1]},
}
_JUNK: list[Any] = [None, True, -1, 0, 3, 0.5, 1e30, "", "*", "(", "x", "topk", "static", "auto", [], [3], ["self"]]
_JUNK += [[["query"]], {}, {"a": {}}, {"params": {"dense_ratio": 0.5}}, {"enabled": True}, BERT_QKV, float("nan")]


def _places(value: Any, around: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    below = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in below for place in ((*around, key), *_places(inner, (*around, key)))]


def _mutated(rng: random.Random) -> dict[str, Any]:
    section = copy.deepcopy({name: _WHOLE[name] for name in rng.sample(list(_WHOLE), rng.randint(1, 3))})
    for _ in range(rng.randint(1, 3)):
        places = _places(section)
        if not places:
            break
        *path, key = rng.choice(places)
        holder = section
        for step in path:
            holder = holder[step]
        way = rng.random()
        if way < 0.6:
            holder[key] = copy.deepcopy(rng.choice(_JUNK))
        elif way < 0.8 or isinstance(holder, list):
            del holder[key]
        else:
            holder[f"{key}{rng.choice(['s', '_', ''])}x"] = holder.pop(key)
    return section


@pytest.mark.parametrize("count", [200, pytest.param(5000, marks=[pytest.mark.slow, pytest.mark.timeout(1500)])])
def test_wrong_sections_give_clear_errors_only(count: int) -> None:
    """Every section gives either a policy that the model accepts, or a ConfigError with a fix for each problem."""
    rng, counts = random.Random(7), {"taken": 0, "refused": 0, "does not fit the model": 0}
    model = nn.ModuleDict({"query": nn.Linear(8, 8), "conv": nn.Conv2d(2, 2, 1), "word_embeddings": nn.Embedding(4, 4)})
    for _ in range(count):
        config = ds_config(**_mutated(rng))
        try:
            policy = resolve_extra(config, "compression") or CompressionPolicy()
        except ConfigError as error:
            assert all(problem.path and problem.rule and problem.fix for problem in error.problems), str(error)
            counts["refused"] += 1
            continue
        try:
            match_all(model, policy)
            counts["taken"] += 1
        except ConfigError as error:
            assert all(problem.path and problem.rule and problem.fix for problem in error.problems), str(error)
            counts["does not fit the model"] += 1
    assert min(counts.values()) > count // 250, counts

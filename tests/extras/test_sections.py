"""Sections of training-time features: policies, rules, flags, and clear errors for invalid input."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_zero.config import ConfigError, resolve
from hf_zero.config.schema.fields import all_paths
from hf_zero.config.schema.whole import whole_schema
from hf_zero.extras.data_efficiency.section import CurriculumMetric, DifficultyPolicy, MetricPolicy, data_policy
from hf_zero.extras.sparse_attention import PATTERNS, SparseAttention, pattern_keys
from hf_zero.extras.sparse_attention.registered import pattern_of
from tests.config.building import put
from tests.config.test_fuzz import trees

BASE = {"train_micro_batch_size_per_gpu": 1}
LINEAR = {
    "min_difficulty": 8,
    "max_difficulty": 64,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8},
}
LEGACY = {"enabled": True, "curriculum_type": "seqlen", **LINEAR}
METRIC = {
    "difficulty_type": "value",
    "clustering_type": "schedule_based",
    "index_to_sample_path": "/x/s",
    "index_to_metric_path": "/x/m",
    **LINEAR,
}
LTD = {
    "enabled": True,
    "total_layer_num": 4,
    "random_ltd_layer_num": 2,
    "random_ltd_layer_id": [1, 2],
    "model_mask_name": "attention_mask",
    "model_type": "decoder",
    "hidden_state_order": "batch_seq_dim",
    "random_ltd_schedule": {
        "min_value": 8,
        "max_value": 32,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 10, "seq_per_step": 8},
    },
}


def sampling(metrics: Any = None, **outer: Any) -> dict[str, Any]:
    inner = {"enabled": True, "curriculum_metrics": metrics if metrics is not None else {"seqlen": METRIC}}
    return {"data_efficiency": {**outer, "data_sampling": {"curriculum_learning": inner}}}


def routing(**changes: Any) -> dict[str, Any]:
    return {"data_efficiency": {"data_routing": {"random_ltd": {**LTD, **changes}}}}


def features(**sections: Any) -> Any:
    return data_policy(resolve({**BASE, **sections}, world_size=1))


def test_policies() -> None:
    linear = DifficultyPolicy(schedule="fixed_linear", minimum=8, maximum=64, total_steps=10, multiple=8)
    assert features(curriculum_learning=LEGACY).sequence_length == linear
    found = features(**sampling(seed=7)).sampling
    assert (found.seed, found.num_epochs) == (7, 1000)
    assert found.metrics == (
        MetricPolicy(name="seqlen", difficulty=linear, index_to_sample="/x/s", index_to_metric="/x/m"),
    )
    ltd = features(**routing()).random_ltd
    assert (ltd.num_layers, ltd.layer_ids, ltd.sequence_first) == (4, (1, 2), False)
    drop = {"enabled": True, "theta": 0.5}
    dropping = features(progressive_layer_drop=drop).layer_drop
    assert (dropping.theta, dropping.gamma) == (0.5, 0.001)


@pytest.mark.parametrize("section", ["sparse_attention", "curriculum_learning", "data_efficiency"])
def test_empty_sections_ask_for_nothing(section: str) -> None:
    assert features(**{section: {}}) == features()


def test_an_outer_switch_that_says_false_switches_off_and_tells() -> None:
    resolved = resolve({**BASE, **sampling(enabled=False)}, world_size=1)
    assert data_policy(resolved).sampling is None
    assert any("data_efficiency.enabled is false" in warning for warning in resolved.warnings)
    assert features(**sampling()).sampling is not None and features(**sampling(enabled=True)).sampling is not None
    both = sampling()
    both["data_efficiency"]["data_sampling"]["enabled"] = False
    assert features(**both).sampling is None


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"curriculum_learning": {"curriculum_type": "seqlen"}}, "curriculum_learning.enabled"),
        ({"curriculum_learning": {**LEGACY, "curriculum_type": "voc"}}, "only metric that this section supports"),
        ({"curriculum_learning": {**LEGACY, "schedule_config": {}}}, "schedule_config.total_curriculum_step"),
        ({"curriculum_learning": {**LEGACY, "min_difficulty": 99}}, "more than max_difficulty = 64"),
        ({"curriculum_learning": {**LEGACY, "schedule_type": "cubic"}}, "schedule_type"),
        (
            {
                "curriculum_learning": {
                    **LEGACY,
                    "schedule_type": "fixed_discrete",
                    "schedule_config": {"difficulty": [8, 64], "max_step": [1, 2]},
                }
            },
            "one entry less than difficulty",
        ),
        (sampling({}), "write at least one metric"),
        (sampling({"a": {**METRIC, "clustering_type": None}}), "a.clustering_type"),
        (sampling({"a": {**METRIC, "index_to_metric_path": None}}), "a.index_to_metric_path"),
        (sampling({"a": {**METRIC, "colour": 1}}), "a metric has no such key"),
        (sampling({"a": 3}), "must be an object"),
        (sampling({"seqlen_truncate": METRIC, "seqlen_reshape": METRIC}), "keep one of them"),
        (routing(random_ltd_layer_num=3), "random_ltd_layer_id lists 2 layers"),
        (routing(random_ltd_layer_id=[1, 1], random_ltd_layer_num=2), "lists a layer twice"),
        (routing(random_ltd_layer_id=[1, 4]), "numbered from 0 to 3"),
        (routing(model_type=None), "random_ltd.model_type"),
        (routing(random_ltd_schedule=None), "random_ltd_schedule.min_value"),
        ({**routing(), "progressive_layer_drop": {"enabled": True}}, "disable one of them"),
        ({"progressive_layer_drop": {"enabled": True, "theta": 2}}, "progressive_layer_drop.theta"),
        ({"data_efficiency": {"data_sampling": {"dynamic_batching": {"enabled": True}}}}, "max_tokens"),
        ({"eigenvalue": {"enabled": True}}, "periods of MoQ"),
        ({"sparse_attention": {"num_global_blocks": 3}}, "must divide num_local_blocks = 4"),
        ({"sparse_attention": {"num_different_global_patterns": 2}}, "different_layout_per_head to true"),
        ({"sparse_attention": {"mode": "round"}}, "sparse_attention.mode"),
        ({"sparse_attention": {"mode": "bigbird", "attention": "unidirectional", "num_random_blocks": 2}}, "one block"),
        ({"sparse_attention": {"mode": "variable", "global_block_end_indices": [1, 2]}}, "one entry for each of the 1"),
        ({"sparse_attention": {"mode": "variable", "global_block_end_indices": [0]}}, "ends are exclusive"),
        ({"sparse_attention": {"attention": "unidirectional", "horizontal_global_attention": True}}, "later ones"),
    ],
)
def test_rules(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        features(**sections)


def test_the_published_section_is_taken_and_its_idle_keys_are_named() -> None:
    """The example in DeepSpeed's documentation lists the keys of all patterns at once."""
    section = {
        "mode": "fixed",
        "block": 16,
        "different_layout_per_head": True,
        "num_local_blocks": 4,
        "num_global_blocks": 1,
        "attention": "bidirectional",
        "horizontal_global_attention": False,
        "num_different_global_patterns": 4,
        "num_random_blocks": 0,
        "local_window_blocks": [4],
        "global_block_indices": [0],
        "global_block_end_indices": None,
        "num_sliding_window_blocks": 3,
    }
    resolved = resolve({**BASE, "sparse_attention": section}, world_size=1)
    assert resolved.extras.get("sparse_attention") is not None and not resolved.warnings
    idle = [note.split(":")[0] for note in resolved.notes if "no effect with mode fixed" in note]
    assert idle == [
        f"sparse_attention.{name}"
        for name in sorted(set(section) - pattern_keys("fixed") - {"mode", "block", "different_layout_per_head"})
    ]


PATHS = [
    path
    for path in all_paths(whole_schema())
    if path.split(".")[0]
    in ("sparse_attention", "curriculum_learning", "data_efficiency", "progressive_layer_drop", "elasticity")
]
numbers = st.integers(-2, 40)
likely = st.one_of(
    numbers,
    st.booleans(),
    st.lists(numbers, max_size=4),
    st.sampled_from(
        [
            *PATTERNS,
            "unidirectional",
            "bidirectional",
            "fixed_linear",
            "fixed_root",
            "fixed_discrete",
            "custom",
            "seqlen",
            "decoder",
            "encoder",
            "batch_seq_dim",
            "value",
            "percentile",
            0.1,
            0.2,
            "auto",
        ]
    ),
    trees,
)
metric = st.dictionaries(st.sampled_from([*CurriculumMetric.model_fields, "x"]), likely, max_size=9)


@st.composite
def sections(draw: st.DrawFn) -> dict[str, Any]:
    """Valid sections with some keys replaced, or keys alone."""
    config: dict[str, Any] = dict(draw(st.sampled_from([{}, BASE, {"train_batch_size": 16}])))
    right: list[dict[str, Any]] = [{}, {"curriculum_learning": LEGACY}, sampling(), routing()]
    right += [{"sparse_attention": {"mode": mode}} for mode in PATTERNS]
    right += [{"elasticity": {"enabled": True, "max_train_batch_size": 32, "micro_batch_sizes": [2, 4]}}]
    config.update(draw(st.sampled_from(right)))
    for path in draw(st.lists(st.sampled_from(PATHS), max_size=5)):
        named = st.dictionaries(st.text(max_size=5), metric, max_size=2)
        is_named = path.endswith(".curriculum_metrics") and draw(st.booleans())
        put(config, path, draw(named if is_named else likely))
    return config


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(config=sections(), world=st.sampled_from([1, 2, 8]))
def test_nonsense_gives_policies_or_errors_with_a_place(config: dict[str, Any], world: int) -> None:
    check_nonsense(config, world)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=5000, deadline=None, suppress_health_check=list(HealthCheck))
@given(config=sections(), world=st.sampled_from([1, 2, 8]))
def test_much_nonsense(config: dict[str, Any], world: int) -> None:
    check_nonsense(config, world)


def check_nonsense(config: dict[str, Any], world: int) -> None:
    try:
        resolved = resolve(config, world_size=world)
    except ConfigError as error:
        assert error.problems and all(problem.path and problem.rule for problem in error.problems)
        return
    if resolved.extras.get("sparse_attention") is not None:
        pattern = pattern_of(resolved.extras.get("sparse_attention"), num_heads=2)
        if pattern.least_blocks() < 64:
            pattern.head_rows(3)


def test_every_pattern_has_its_keys() -> None:
    keys = set().union(*map(pattern_keys, PATTERNS)) | {"mode", "block", "different_layout_per_head"}
    assert keys == set(SparseAttention.model_fields)

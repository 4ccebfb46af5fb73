"""For any input the resolver returns policies or raises a ConfigError that contains a key path."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_zero.config import (
    AcceleratorView,
    ConfigError,
    ModelView,
    Resolved,
    TrainingView,
    Views,
    examine,
    load_config,
    resolve,
)
from hf_zero.config.hosts import drop_unfilled, normalise, unfilled_autos, write_back
from hf_zero.config.schema.fields import all_paths
from hf_zero.config.schema.whole import whole_schema
from tests.config.building import put

PATHS = tuple(all_paths(whole_schema()))

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**40), 10**40),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from(
        ["auto", "", "true", "fp16", "cpu", "nvme", "NaN", "1e999", "9" * 5000, "AdamW", "WarmupLR", "\ud800"]
    ),
    st.text(max_size=8),
)
trees = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.one_of(st.text(max_size=6), st.sampled_from(["enabled", "params", "type", "stage"])), inner, max_size=3
        ),
    ),
    max_leaves=8,
)


@st.composite
def configs(draw: st.DrawFn) -> dict[Any, Any]:
    """Known keys with any values, in any number, added to a valid or invalid config."""
    config: dict[Any, Any] = draw(st.sampled_from([{}, {"train_batch_size": 8}]))
    config = dict(config)
    for path in draw(st.lists(st.sampled_from(PATHS), max_size=6)):
        put(config, path, draw(trees))
    if draw(st.booleans()):
        config.update(draw(st.dictionaries(st.one_of(st.text(max_size=8), st.integers()), trees, max_size=2)))
    return config


TRAINER = TrainingView(per_device_train_batch_size=2, gradient_accumulation_steps=2, total_steps=9, bf16=True)
ACCELERATOR = AcceleratorView(
    prepares=True, accumulation_steps=3, batch_sizes=(2, 4), optimizer={"lr": 1e-3}, schedule={"warmup_num_steps": 1}
)
MODELS = st.one_of(
    st.none(),
    st.builds(
        ModelView,
        config=st.one_of(st.none(), st.dictionaries(st.sampled_from(["hidden_size", "hidden_sizes", "x"]), trees)),
        shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=3).map(tuple),
    ),
)
SURROUNDINGS = st.tuples(st.sampled_from([None, TRAINER]), st.sampled_from([None, ACCELERATOR]), MODELS)


def check(config: dict[Any, Any], around: tuple[Any, Any, Any] = (None, None, None)) -> None:
    before = repr(config)
    try:
        resolved = resolve(config, *around, world_size=2)
    except ConfigError as error:
        assert error.problems and str(error)
        for problem in error.problems:
            assert problem.path and problem.rule and problem.fix
    else:
        assert_sane(resolved)
    assert repr(config) == before
    prepare_like_the_flows(config, around)


def prepare_like_the_flows(config: dict[Any, Any], around: tuple[Any, Any, Any]) -> None:
    """Modifies a config in place like the patches: fills it, drops leftovers, normalizes it."""
    training, accelerator, model = around
    try:
        own = load_config(config)
        normalise(own)
    except ConfigError:
        return
    views = Views(world_size=2, training=training, accelerator=accelerator, model=model)
    with contextlib.suppress(ConfigError):  # of sections that are no objects
        write_back(own, examine(own, views, complete=False))
    drop_unfilled(own)
    assert unfilled_autos(own) == []


def assert_sane(resolved: Resolved) -> None:
    batch = resolved.batch
    data_ranks = 2 // resolved.sequence_size
    assert batch.train_batch_size == batch.micro_batch_size * batch.accumulation_steps * data_ranks > 0
    assert resolved.zero.stage in (0, 1, 2) and resolved.zero.bucket_numel > 0
    assert 0 <= resolved.gradients.clip_norm < float("inf")
    assert resolved.precision.model in ("fp32", "fp16", "bf16")
    for path, entry in resolved.provenance.items():
        assert entry.path == path and str(entry.source)
    for policy in (resolved.optimizer, resolved.scheduler):
        assert policy is None or (policy.type.isidentifier() and "auto" not in policy.params.values())


SLOW_ONES = [HealthCheck.too_slow, HealthCheck.data_too_large]


@pytest.mark.lengthy
@settings(max_examples=150, deadline=None, suppress_health_check=SLOW_ONES)
@given(configs(), SURROUNDINGS)
def test_any_dict(config: dict[Any, Any], around: tuple[Any, Any, Any]) -> None:
    check(config, around)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=20_000, deadline=None, suppress_health_check=SLOW_ONES)
@given(configs(), SURROUNDINGS)
def test_any_dict_twenty_thousand_times(config: dict[Any, Any], around: tuple[Any, Any, Any]) -> None:
    check(config, around)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.one_of(st.text(max_size=40), st.text(alphabet='{}[]":,0123 e-+.#/*\n\\u', max_size=40)))
def test_any_text(text: str) -> None:
    try:
        assert isinstance(load_config("{" + text), dict)
    except ConfigError as error:
        assert error.problems


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.text(max_size=6), trees, max_size=4))
def test_text_of_any_dict_reads_as_json_does(config: dict[str, Any]) -> None:
    text = json.dumps(config)
    try:
        read = load_config(text)
    except ConfigError as error:
        assert "levels deep" in str(error)
    else:
        assert json.dumps(read) == json.dumps(json.loads(text))

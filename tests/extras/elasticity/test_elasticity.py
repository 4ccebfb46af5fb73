"""Elastic batches: worked examples, DeepSpeed's own answers to 300 sections, and the three batch sizes of a config."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_zero.config import ConfigError, resolve
from hf_zero.extras.elasticity import (
    Elasticity,
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
    compute_elastic_config,
    elastic_batch,
    elasticity_enabled,
    ensure_immutable_elastic_config,
)
from tests.extras.elasticity.record_elasticity import ANSWERS, NUMBER, questions

VERSION = "0.19.6"
COUNTS_2000 = [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 15, 20, 21, 24, 28, 30, 35, 40, 42, 56, 60, 70, 84, 105, 120, 140]
COUNTS_2000 += [168, 210, 280, 420, 840]
COUNTS_10000 = [32, 34, 36, 48, 51, 64, 68, 72, 96, 102, 136, 144, 153, 192, 204, 272, 288, 306, 408, 576, 612, 816]
COUNTS_10000 += [1224]


def section(most: int, micros: list[int], low: int = 1, high: int = 10000, **more: Any) -> dict[str, Any]:
    sizes = {"max_train_batch_size": most, "micro_batch_sizes": micros, "min_gpus": low, "max_gpus": high}
    return {"elasticity": {"enabled": True, "version": 0.1, **sizes, **more}}


NODES: dict[str, Any] = {"version": 0.2, "num_gpus_per_node": 8}


@pytest.mark.parametrize(
    ("config", "world", "expected"),
    [
        (section(2000, [2, 4, 6]), 8, (1680, COUNTS_2000, 6)),
        (section(10000, [8, 12, 16, 17], 32, 1500), 64, (9792, COUNTS_10000, 17)),
        (section(100, [4, 6], 1, 16), 12, (96, [1, 2, 3, 4, 6, 8, 12, 16], 4)),
        (section(2000, [2, 4, 6], 8, 64, **NODES), 24, (1920, [8, 16, 24, 32, 40, 48, 64], 4)),
        (section(2000, [2, 4, 6], 8, 64, **NODES), 40, (1920, [8, 16, 24, 32, 40, 48, 64], 6)),
        (section(2000, [2, 4, 6], 8, 64, **NODES, model_parallel_size=2), 16, (1920, [4, 8, 12, 16, 20, 24, 32], 6)),
        (section(2000, [2, 4, 6], 8, 64, **NODES), 56, (1904, [56], 2)),
        (section(2000, [2, 4, 6], 8, 64, **NODES, prefer_larger_batch=False), 56, (1680, [56], 6)),
    ],
)
def test_worked_examples(config: dict[str, Any], world: int, expected: tuple[Any, ...]) -> None:
    assert compute_elastic_config(config, VERSION, world) == expected
    assert json.dumps(expected) == json.dumps(compute_elastic_config(config, VERSION, world))


def test_deepspeeds_own_answers_to_random_sections() -> None:
    """If DeepSpeed returns an empty batch, hf_zero raises an error; where DeepSpeed raises a TypeError, nothing is
    compared. If no requested number of ranks is possible, DeepSpeed returns None, and hf_zero an empty list."""
    rows = json.loads(ANSWERS.read_text())
    assert [{"section": row["section"], "world": row["world"]} for row in rows] == questions() and len(rows) == NUMBER
    answered = 0
    for row in rows:
        config, world = {"elasticity": row["section"]}, row["world"]
        if row.get("answer", [0])[0]:
            answered += 1
            batch, counts, *micro = row["answer"]
            assert list(compute_elastic_config(config, VERSION, world)) == [batch, counts or [], *micro], row
        elif row.get("error") != "TypeError":
            kind: Any = {"ElasticityIncompatibleWorldSize": ElasticityIncompatibleWorldSize, "ValueError": ValueError}
            with pytest.raises(kind.get(row.get("error"), (ElasticityError, ValueError))):
                compute_elastic_config(config, VERSION, world)
    assert answered > NUMBER // 2


@settings(max_examples=300, deadline=None)
@given(
    most=st.integers(32, 5000),
    micros=st.lists(st.integers(1, 32), min_size=1, max_size=7, unique=True),
    by_nodes=st.booleans(),
)
def test_every_number_of_the_list_divides_the_batch_into_micro_batches(
    most: int, micros: list[int], by_nodes: bool
) -> None:
    rule = Elasticity(max_train_batch_size=most, micro_batch_sizes=micros, version=0.2 if by_nodes else 0.1)
    found = elastic_batch(rule)
    assert found.batch <= most and found.counts
    for count in found.counts:
        mine = elastic_batch(rule, count)
        assert mine.micro in micros and mine.batch == found.batch and mine.batch % (mine.micro * count) == 0


@pytest.mark.parametrize(
    ("config", "world", "kind", "words"),
    [
        ({}, 1, ElasticityConfigError, "no .elasticity. section"),
        ({"elasticity": {"enabled": False}}, 1, ElasticityConfigError, "is disabled"),
        ({"elasticity": {"enabled": True}}, 1, ElasticityConfigError, "max_train_batch_size"),
        (section(100, [4], version=0.3), 1, ElasticityConfigError, "must be 0.1 or 0.2"),
        (section(100, [4], model_parallel_size=2), 1, ElasticityConfigError, "needs version 0.2"),
        (section(100, [4], 5, 2), 1, ElasticityConfigError, "more than max_gpus = 2"),
        (section(100, [0]), 1, ElasticityConfigError, "at least 1"),
        (section(100, [200]), 1, ValueError, "200 is more than max_train_batch_size = 100"),
        (section(100, [4], **NODES, model_parallel_size=3), 8, ElasticityError, "not a multiple of 3"),
        (section(10000, [8, 12, 16, 17], 32, 1500), 63, ElasticityIncompatibleWorldSize, "63 ranks are not compatible"),
    ],
)
def test_sections_without_an_answer(config: Any, world: int, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        compute_elastic_config(config, VERSION, world)


def test_what_a_scheduler_asks(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    config = section(100, [4, 6], 1, 16)
    assert elasticity_enabled(config) and not elasticity_enabled({})
    assert compute_elastic_config(config, VERSION) == (96, [1, 2, 3, 4, 6, 8, 12, 16])
    assert compute_elastic_config(config, VERSION, return_microbatch=True)[2] == 6
    with pytest.raises(ElasticityError, match="needs at least 0.3.8"):
        compute_elastic_config(config, "0.3.1")
    with pytest.raises(ValueError, match="must be a dict"):
        compute_elastic_config([], VERSION)  # type: ignore[arg-type]
    nodes = section(2000, [2, 4, 6], 8, 64, **NODES)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ElasticityConfigError, match="set WORLD_SIZE"):
        compute_elastic_config(nodes, VERSION)
    monkeypatch.setenv("WORLD_SIZE", "24")
    assert compute_elastic_config(nodes, VERSION, return_microbatch=True)[2] == 4
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", json.dumps(config["elasticity"]))
    ensure_immutable_elastic_config(config["elasticity"])
    with pytest.raises(ElasticityConfigError, match="set by the scheduler, says 100"):
        ensure_immutable_elastic_config(nodes["elasticity"])


def test_an_engine_trains_with_the_schedulers_section_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only callers of ensure_immutable_elastic_config got the error; DeepSpeed's engine checks by itself."""
    config = section(100, [4, 6], 1, 16)
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", json.dumps(config["elasticity"]))
    assert resolve(config, world_size=4).batch.train_batch_size == 96
    other = section(200, [4, 8], 1, 16)
    with pytest.raises(ConfigError, match="says 100") as raised:
        resolve(other, world_size=4)
    assert "elasticity.micro_batch_sizes" in str(raised.value), "all differences at once"
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", "{max: 3")
    with pytest.raises(ConfigError, match="must hold the section as JSON"):
        resolve(config, world_size=4)


def test_the_batch_sizes_of_a_config_follow() -> None:
    config = section(100, [4, 6], 1, 16)
    for world in (1, 2, 3, 4, 6, 8, 12, 16):
        batch = resolve(config, world_size=world).batch
        assert batch.train_batch_size == 96 == batch.micro_batch_size * batch.accumulation_steps * world
        assert batch.micro_batch_size in (4, 6)
    with pytest.raises(ConfigError, match="5 ranks are not compatible with the batch size 96; valid: 1, 2, 3, 4, 6"):
        resolve(config, world_size=5)
    written = {**config, "train_micro_batch_size_per_gpu": 3}
    with pytest.raises(ConfigError, match="elasticity makes it 6 for this number of ranks"):
        resolve(written, world_size=4)
    assert resolve({**config, "train_batch_size": 96}, world_size=4).batch.train_batch_size == 96
    written["elasticity"] = {**config["elasticity"], "ignore_non_elastic_batch_info": True}
    assert resolve(written, world_size=4).batch.micro_batch_size == 6
    with pytest.raises(ConfigError, match="ranks of a tensor group are those of tensor_parallel.autotp_size"):
        resolve(section(2000, [2, 4, 6], 8, 64, **NODES, model_parallel_size=2), world_size=16)

"""The cost of a new key with an effect: this file has a feature with its section, and one line registers it."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.config import ConfigError, Resolved, resolve
from hf_zero.config.extras import ASKED_BY
from hf_zero.config.features import Extra, OwnSection
from hf_zero.config.rules import Rule
from hf_zero.config.schema.fields import Section, Whole, supported
from hf_zero.config.schema.long_sequences import ActivationCheckpointing, Tiling
from hf_zero.config.schema.profiling import Comet, CommsLogger, FlopsProfiler, Observation, Trace
from hf_zero.config.schema.root import HfZero, Root
from hf_zero.features import Progress, TrainingFeature

CONFIG = Path(hf_zero.__file__).parent / "config"


class Loudness(Section):
    factor: Whole = supported(2, "What outputs are multiplied by.")

    rules = (
        Rule(
            keys=("hf_zero.loudness.factor",),
            broken=lambda factor: factor > 9,
            rule="is too loud",
            fix="write 2",
        ),
    )


class Loud(TrainingFeature):
    name = "loudness"

    def __init__(self, section: Loudness) -> None:
        self.section = section

    def after_forward(self, progress: Progress, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Any:
        return output * self.section.factor


def policy(config: Root) -> Loudness:
    return config.section(Loudness)


def loud(model: nn.Module, resolved: Resolved) -> Loud:
    return Loud(resolved.section(Loudness))


EXTRA = Extra(
    name="loudness",
    sections=(OwnSection(path="hf_zero.loudness", kind=Loudness, doc="Louder outputs."),),
    policy=policy,
    features=(f"{__name__}:loud",),
)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hf_zero.extras.loudness", sys.modules[__name__])
    monkeypatch.setitem(ASKED_BY, "hf_zero.loudness", "loudness")  # the line


def test_the_engine_reads_the_section_itself(registered: None) -> None:
    model = nn.Linear(3, 2)
    batch = torch.ones(4, 3)
    expected = 3 * model(batch)
    engine = hf_zero.initialize(model=model, config={"train_batch_size": 4, "hf_zero": {"loudness": {"factor": 3}}})[0]
    torch.testing.assert_close(engine(batch), expected)


def test_its_rules_are_told_with_all_others(registered: None) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve({"train_batch_size": 0, "hf_zero": {"loudness": {"factor": 10, "fctor": 1}}}, world_size=1)
    assert {problem.path for problem in caught.value.problems} == {
        "train_batch_size",
        "hf_zero.loudness.factor",
        "hf_zero.loudness.fctor",
    }


def test_a_section_is_found_by_its_class_wherever_it_stands() -> None:
    resolved = resolve(
        {"train_batch_size": 1, "hf_zero": {"tiled_mlp": True, "trace": {"enabled": True}}, "memory_breakdown": True},
        world_size=1,
    )
    assert resolved.section(Tiling) is resolved.config.hf_zero and resolved.section(Tiling).tiled_mlp
    assert resolved.section(Observation) is resolved.config and resolved.section(Observation).memory_breakdown
    assert resolved.section(Trace).enabled and resolved.section(CommsLogger) == CommsLogger()
    assert list(resolved.extras) == ["tiling", "profiling"], "what is asked for, in the order of Root.features"
    assert resolve({"train_batch_size": 1}, world_size=1).section(HfZero) == HfZero()


@pytest.mark.parametrize(
    "kind", [Tiling, ActivationCheckpointing, Observation, FlopsProfiler, CommsLogger, Comet, Trace]
)
def test_a_key_of_a_feature_stands_in_one_file_of_config(kind: type[Section]) -> None:
    """`tiled_loss` was in five files here: section, two policies, their construction and the list of features."""
    sections = {"tensorboard", "csv_monitor", "wandb", "comet", "flops_profiler"}  # named by DeepSpeed's objects
    everywhere = {"steps_per_print"}  # its null and infinity are translated
    common = {"enabled", "verbose", "debug", "profile", "mode", "online"}
    keys = {*vars(kind)["__annotations__"]} - sections - everywhere - common
    assert keys
    owner = Path(sys.modules[kind.__module__].__file__ or "")
    for path in CONFIG.rglob("*.py"):
        if path == owner:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        named = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        named |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg}
        assert not keys & named, path

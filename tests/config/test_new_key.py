"""The cost of a new key with an effect: this file has all that config/ knows of it, and one line registers it."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.config import ConfigError, Findings, Resolved, Views, examine, load_config, resolve
from hf_zero.config.extras import ASKED_BY
from hf_zero.config.features import Extra, OwnSection
from hf_zero.config.rules import RANKS, Advice, Rule
from hf_zero.config.schema.fields import Section, Whole, all_paths, rules_of, supported
from hf_zero.config.schema.long_sequences import ActivationCheckpointing, Tiling
from hf_zero.config.schema.profiling import Comet, CommsLogger, FlopsProfilerSection, Observation, TraceSection
from hf_zero.config.schema.root import HfZero, Root
from hf_zero.config.schema.whole import whole_schema
from hf_zero.features import Progress, TrainingFeature

CONFIG = Path(hf_zero.__file__).parent / "config"


FACTOR, NORM = "hf_zero.loudness.factor", "gradient_clipping"


class Loudness(Section):
    """The key: its meaning, other name, rules and the words of DeepSpeed's error."""

    factor: Whole = supported(2, "What outputs are multiplied by.", names=("gain",), words="Invalid factor")

    rules = (
        Rule(
            keys=(FACTOR, NORM),
            broken=lambda factor, norm: factor > 9 and norm < 1 and {"most": 9},
            rule="{factor} is too loud with gradient_clipping {gradient_clipping}",
            fix="write {most} or less",
            raises=AssertionError,
            words="factor should be small",
        ),
        Advice(keys=(FACTOR,), applies=lambda factor: factor == 1, text="no effect, it changes nothing", ignored=True),
    )


class Loud(TrainingFeature):
    name = "loudness"

    def __init__(self, section: Loudness) -> None:
        self.section = section

    def after_forward(self, progress: Progress, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Any:
        return output * self.section.factor


def policy(config: Root) -> Loudness:
    """What the engine gets, for a config without problems in the section."""
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


def examined(loudness: Any, **keys: Any) -> Findings:
    """A config whose keys stand on lines of their own: the factor in line 2."""
    config = {"hf_zero": {"loudness": loudness}, "train_batch_size": 1, **keys}
    return examine(load_config(json.dumps(config).replace('"loudness": {', '"loudness": {\n')), Views(world_size=1))


def test_a_key_takes_all_stages_with_what_its_file_says(registered: None) -> None:
    """A key with a rule was in five files of config/: section, rules, policies, what made them, DeepSpeed's words."""
    renamed = examined({"gain": 3})
    assert renamed.notes == ("hf_zero.loudness.gain: other name, read as hf_zero.loudness.factor",)
    assert renamed.extras["loudness"].factor == 3 and str(renamed.provenance[FACTOR].source).startswith("line 2 ")
    assert examined({"factor": "auto"}).notes == (f'{FACTOR}: "auto" was not filled in; treated as unset',)
    assert examined({"factor": 1}).warnings == (f"{FACTOR}: no effect, it changes nothing",)
    (invalid,) = examined({"factor": "very"}).problems
    assert str(invalid) == (
        "hf_zero.loudness.factor = 'very'  [line 2 of the config text]\n"
        "    rule: Invalid factor: must be a whole number\n"
        "    fix:  correct it, or remove the key (default 2). Meaning: What outputs are multiplied by."
    )
    broken = examined({"gain": 10}, gradient_clipping=0.5)
    assert [str(problem) for problem in broken.problems] == [
        "hf_zero.loudness.factor = 10  [line 2 of the config text]\n"
        "    rule: factor should be small: 10 is too loud with gradient_clipping 0.5\n"
        "    fix:  write 9 or less"
    ]
    assert isinstance(ConfigError(broken.problems), AssertionError) and "loudness" not in broken.extras
    assert not examined({"factor": 10}, gradient_clipping="much").problems[1:], "a rule needs the values of its keys"


def test_its_rules_are_reported_with_all_others(registered: None) -> None:
    wrong = {"train_batch_size": 0, NORM: 0.0, "hf_zero": {"loudness": {"factor": 10, "fctor": 1}}}
    with pytest.raises(ConfigError) as caught:
        resolve(wrong, world_size=1)
    assert {problem.path for problem in caught.value.problems} == {
        "train_batch_size",
        "hf_zero.loudness.factor",
        "hf_zero.loudness.fctor",
    }


def test_rules_read_keys_that_there_are() -> None:
    """A rule with a misspelled key would fail where a user first meets it."""
    paths = set(all_paths(whole_schema()))
    for rule in rules_of(whole_schema()):
        assert {*rule.keys} - {RANKS} <= paths, rule.keys


def test_a_section_is_found_by_its_class_wherever_it_stands() -> None:
    resolved = resolve(
        {"train_batch_size": 1, "hf_zero": {"tiled_mlp": True, "trace": {"enabled": True}}, "memory_breakdown": True},
        world_size=1,
    )
    assert resolved.section(Tiling) is resolved.config.hf_zero and resolved.section(Tiling).tiled_mlp
    assert resolved.section(Observation) is resolved.config and resolved.section(Observation).memory_breakdown
    assert resolved.section(TraceSection).enabled and resolved.section(CommsLogger) == CommsLogger()
    assert list(resolved.extras) == ["tiling", "profiling"], "what is asked for, in the order of Root.features"
    assert resolve({"train_batch_size": 1}, world_size=1).section(HfZero) == HfZero()


@pytest.mark.parametrize(
    "kind", [Tiling, ActivationCheckpointing, Observation, FlopsProfilerSection, CommsLogger, Comet, TraceSection]
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

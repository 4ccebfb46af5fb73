"""How extras are found: hf_zero's own in one table, those of other packages by their entry points."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_zero.config import ConfigError, resolve
from hf_zero.config.extras import (
    ASKED_BY,
    extra_asked_by,
    installed,
    loaded,
    optimizer_names,
    section_names,
)
from hf_zero.config.schema.root import Root
from hf_zero.config.schema.whole import schema_for, whole_schema

_EXTRA = '''
import torch

from hf_zero.config.schema.arguments import at_least_zero
from hf_zero.config.rules import Rule
from hf_zero.config.schema.optimizer_types import OptimizerType
from hf_zero.config.features import Extra, OwnSection
from hf_zero.config.schema.fields import Positive, Section, supported
from hf_zero.features import TrainingFeature


class Doubling(Section):
    """Ours to test with."""

    factor: Positive = supported(2, "What the output is multiplied by.")

    rules = (
        Rule(keys=("doubling.factor",), broken=lambda factor: factor > 9, rule="is too much", fix="write 2"),
    )


class Multiply(TrainingFeature):
    name = "doubling"

    def __init__(self, factor):
        self.factor = factor

    def after_forward(self, progress, inputs, keywords, output):
        return output * self.factor


class Descent(torch.optim.SGD):
    pass


def policy(config):
    return config.doubling.factor


def feature(model, resolved):
    return Multiply(resolved.extras["doubling"])


EXTRA = Extra(
    name="doubling",
    sections=(OwnSection(path="doubling", kind=Doubling, doc="Larger outputs."),),
    policy=policy,
    features=("doubling_extra:feature",),
    optimizers=(OptimizerType(name="Descent", arguments={"lr": at_least_zero}, made_by="doubling_extra:Descent"),),
)
'''
_ENTRY_POINTS = "[hf_zero.extras]\ndoubling = doubling_extra:EXTRA\noptimizer.Descent = doubling_extra:EXTRA\n"
_ENTRY_POINTS += "broken = doubling_extra:NOTHING\n"
_RUN = """
import sys, torch, hf_zero
from hf_zero.config import ConfigError, resolve

plain = {"train_batch_size": 2}
resolve(plain, world_size=1)
assert "doubling_extra" not in sys.modules, "nobody has asked for it"
config = {**plain, "doubling": {"factor": 3}, "optimizer": {"type": "descent", "params": {"lr": 0.5}}}
torch.manual_seed(1)
model = torch.nn.Linear(4, 4)
expected = 3 * model(torch.ones(2, 4))
engine, *_ = hf_zero.initialize(model=model, config=config)
assert torch.allclose(engine(torch.ones(2, 4)), expected)
assert type(engine.optimizer.optimizer).__name__ == "Descent"
try:
    wrong = {"doubling": {"factor": 10, "fctr": 1}, "broken": {}, "optimizer": {"type": "Descent", "params": {"l": 1}}}
    resolve({**plain, **wrong}, world_size=1)
except ConfigError as error:
    said = {problem.path: problem.rule for problem in error.problems}
assert set(said) == {"doubling.factor", "doubling.fctr", "broken", "optimizer.params.l"}, said
assert "is not installed" in said["broken"], said
print("done")
"""


def test_another_packages_extra_is_found_by_its_entry_points(tmp_path: Path) -> None:
    (tmp_path / "doubling_extra.py").write_text(_EXTRA)
    info = tmp_path / "doubling_extra-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: doubling-extra\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(_ENTRY_POINTS)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", _RUN], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "done"


def test_the_table_and_what_extras_declare_are_the_same() -> None:
    sections = {section.path: extra.name for extra in installed() for section in extra.sections}
    types = {f"optimizer.{kind.name}": extra.name for extra in installed() for kind in extra.optimizers}
    asked = {key: name for key, name in ASKED_BY.items() if not key.startswith("service.")}
    assert asked == {**sections, **types}
    for key, name in ASKED_BY.items():
        extra = extra_asked_by(key)
        assert extra is not None and extra.name == name
        if key.startswith("service."):
            assert callable(loaded(extra.services[key.removeprefix("service.")]))
    for extra in installed():
        targets = (*extra.features, *extra.services.values(), *(kind.made_by for kind in extra.optimizers))
        assert all(callable(loaded(target)) for target in targets), extra.name


def test_a_config_has_the_sections_that_it_asks_for() -> None:
    schema, missing = schema_for({"elasticity": {}, "compression_training": None, "zero_optimization": {}})
    assert not missing and schema.features[0].name == "elasticity" and schema.features[1:] == Root.features
    assert "elasticity" in schema.model_fields and "compression_training" not in schema.model_fields
    assert schema_for({"train_batch_size": 1}) == (Root, [])
    assert set(section_names()) <= set(whole_schema().model_fields)
    assert set(optimizer_names()) == {"OneBitAdam", "OneBitLamb", "ZeroOneAdam"}


def test_a_misspelled_section_of_an_extra_is_recognised() -> None:
    for wrong, right in (("elastisity", "elasticity"), ("compresion_training", "compression_training")):
        with pytest.raises(ConfigError, match=f'did you mean "{right}"'):
            resolve({"train_batch_size": 1, wrong: {"enabled": True}}, world_size=1)
    with pytest.raises(ConfigError, match='did you mean "OneBitAdam"'):
        resolve({"train_batch_size": 1, "optimizer": {"type": "OneBitAdm"}}, world_size=1)

"""The functions that hf_zero takes over: upstream has the shape we know, ours are in force, a change is harmless."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import hf_zero

hf_zero.install()

from hf_zero.integration import startup  # noqa: E402
from hf_zero.integration.takeovers import MARK, TAKEOVERS, Takeover, take_over  # noqa: E402
from tests.integration.sites import Site  # noqa: E402


@pytest.mark.parametrize("takeover", TAKEOVERS, ids=lambda takeover: takeover.place)
def test_upstream_has_the_shape_we_know_and_ours_is_in_force(takeover: Takeover) -> None:
    """When this fails, upstream has moved: read its new code, then adapt the file `takeover.home`."""
    module = pytest.importorskip(takeover.module)
    found = takeover.find(module)
    assert found is not None, f"{takeover.module}.{takeover.place} has other parameters now"
    assert hasattr(found[2], MARK), "upstream's own function is in force"


def test_the_import_hook_knows_the_modules() -> None:
    assert {takeover.module for takeover in TAKEOVERS} == set(startup.TAKEN_OVER)


def test_trainer_itself_calls_ours() -> None:
    trainer = importlib.import_module("transformers.trainer")
    assert hasattr(trainer.deepspeed_init, MARK)


def imitation(**functions: Any) -> ModuleType:
    """A module of upstream's name with other content."""
    module = ModuleType("transformers.integrations.deepspeed")
    vars(module).update(functions)
    return module


def test_other_parameters_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    def deepspeed_init(trainer: Any, something_new: int) -> int:
        return something_new

    module = imitation(deepspeed_init=deepspeed_init)
    with listening(caplog):
        take_over(module)
    assert module.deepspeed_init is deepspeed_init
    assert "deepspeed_init has changed and is left as it is" in caplog.text


def test_a_module_without_the_function_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    module = imitation(HfTrainerDeepSpeedConfig=None)
    with listening(caplog):
        take_over(module)
    assert vars(module)["HfTrainerDeepSpeedConfig"] is None


def test_taking_over_twice_wraps_once() -> None:
    module = importlib.import_module("accelerate.utils.deepspeed")
    before = module.HfDeepSpeedConfig.__init__
    take_over(module)
    assert module.HfDeepSpeedConfig.__init__ is before


class listening:
    """hf_zero's logger does not propagate everything by itself under test runners: let the fixture hear it."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.caplog = caplog
        self.logger = logging.getLogger("hf_zero")

    def __enter__(self) -> None:
        self.logger.addHandler(self.caplog.handler)

    def __exit__(self, *_: object) -> None:
        self.logger.removeHandler(self.caplog.handler)


def test_arguments_of_an_unknown_shape_go_to_upstream(caplog: pytest.LogCaptureFixture) -> None:
    """Ours reads fields that these arguments lack; upstream then says what it thinks of them."""
    transformers_config = importlib.import_module("transformers.integrations.deepspeed")
    config = transformers_config.HfTrainerDeepSpeedConfig({"zero_optimization": {"stage": 2}})
    with listening(caplog), pytest.raises(AttributeError):
        config.trainer_config_process(object())
    assert "hf_zero steps aside" in caplog.text


def test_switched_off_nothing_is_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ZERO", "0")
    for name in startup.TAKEN_OVER:
        assert startup.FINDER.find_spec(name, None) is None


AFTERWARDS = """
import transformers.trainer, accelerate.accelerator
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig
mark = "_hf_zero_original"
before = [hasattr(transformers.trainer.deepspeed_init, mark), hasattr(HfTrainerDeepSpeedConfig.__init__, mark)]
import hf_zero
hf_zero.install()
places = [
    transformers.trainer.deepspeed_init,
    HfTrainerDeepSpeedConfig.trainer_config_process,
    accelerate.accelerator.Accelerator._prepare_deepspeed,
]
answer = {"before": before, "after": [hasattr(place, mark) for place in places]}
"""


def test_a_real_deepspeed_keeps_its_flows_until_hf_zero_is_asked_for(wheel: Path, tmp_path: Path) -> None:
    site = Site.empty(tmp_path / "site").unpack(wheel).borrow_libraries().add_real_deepspeed()
    assert site.ask(AFTERWARDS) == {"before": [False, False], "after": [True, True, True]}

"""The functions that hf_zero takes over: upstream has the shape we know, ours are in force, a change is harmless."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import hf_zero

hf_zero.install()

from hf_zero.integration import startup  # noqa: E402
from hf_zero.integration.takeovers import MARK, TAKEOVERS, WITHOUT, Takeover, take_over  # noqa: E402
from hf_zero.integration.takeovers.one_writer import around as around_saving  # noqa: E402
from hf_zero.integration.takeovers.unexpected_keys import NOTED  # noqa: E402
from hf_zero.integration.takeovers.unexpected_keys import around as around_loading  # noqa: E402
from hf_zero.params.sharded_parameter import HANDLE  # noqa: E402
from tests.integration.sites import Site  # noqa: E402


@pytest.mark.parametrize("takeover", TAKEOVERS, ids=lambda takeover: takeover.place)
def test_upstream_has_the_shape_we_know_and_ours_is_in_force(takeover: Takeover) -> None:
    """When this fails, upstream has moved: read its new code, then adapt the file `takeover.home`."""
    module = pytest.importorskip(takeover.module)
    if takeover.is_needed(module):
        assert hasattr(takeover.find(module)[2], MARK), "upstream's own function is in force"


def test_the_import_hook_knows_the_modules() -> None:
    assert {takeover.module for takeover in TAKEOVERS} == set(startup.TAKEN_OVER)


def test_every_takeover_says_what_goes_without_it() -> None:
    assert {takeover.home for takeover in TAKEOVERS} == set(WITHOUT)


def test_trainer_itself_calls_ours() -> None:
    trainer = importlib.import_module("transformers.trainer")
    assert hasattr(trainer.deepspeed_init, MARK)


def imitation(**functions: Any) -> ModuleType:
    """A module of upstream's name with other content."""
    module = ModuleType("transformers.integrations.deepspeed")
    vars(module).update(functions)
    return module


class Heard(logging.Handler):
    """What a logger said, each record once."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def lines_about(module: ModuleType) -> dict[str, str]:
    """Take over in there; place -> what the log says about it, one line each."""
    heard = Heard()
    logger = logging.getLogger("hf_zero")
    logger.addHandler(heard)
    try:
        take_over(module)
    finally:
        logger.removeHandler(heard)
    messages = [record.getMessage() for record in heard.records]
    assert all("\n" not in message and record.exc_info is None for message, record in zip(messages, heard.records))
    places = [takeover.place for takeover in TAKEOVERS if takeover.module == module.__name__]
    found = {place: [message for message in messages if f".{place} " in message] for place in places}
    assert all(len(about) <= 1 for about in found.values()), found
    return {place: about[0] for place, about in found.items() if about}


def test_other_parameters_are_left_alone() -> None:
    def deepspeed_init(trainer: Any, something_new: int) -> int:
        return something_new

    module = imitation(deepspeed_init=deepspeed_init)
    line = lines_about(module)["deepspeed_init"]
    assert module.deepspeed_init is deepspeed_init
    assert f"transformers {importlib.metadata.version('transformers')}: " in line
    assert "takes (trainer, something_new), not (trainer, num_training_steps, inference)" in line
    assert line.endswith(WITHOUT["trainer_evaluation"])


def test_a_module_without_the_function_is_left_alone() -> None:
    """One line for each name that is missing, and none of them stops the others."""

    def initialize_weights_zero3(model: Any) -> None: ...

    module = imitation(HfTrainerDeepSpeedConfig=None, initialize_weights_zero3=initialize_weights_zero3)
    lines = lines_about(module)
    assert vars(module)["HfTrainerDeepSpeedConfig"] is None
    assert "HfTrainerDeepSpeedConfig.trainer_config_process is not there" in " ".join(lines.values())
    missing = {takeover.place for takeover in TAKEOVERS if takeover.module == module.__name__}
    assert set(lines) == missing - {"initialize_weights_zero3"}
    assert hasattr(module.initialize_weights_zero3, MARK)


def test_a_takeover_that_breaks_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(original: object) -> None:
        raise ImportError("cannot import name 'gone'\nfrom 'upstream'")

    def initialize_weights_zero3(model: Any) -> None: ...

    monkeypatch.setattr("hf_zero.integration.takeovers.weight_norm.around", raises)
    module = imitation(initialize_weights_zero3=initialize_weights_zero3)
    line = lines_about(module)["initialize_weights_zero3"]
    assert (
        "is not taken over (ImportError: cannot import name 'gone' from 'upstream'); hf_zero leaves it as it is" in line
    )
    assert module.initialize_weights_zero3 is initialize_weights_zero3


def test_only_one_rank_says_that_something_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    assert lines_about(imitation()) == {}


def test_keys_without_home_are_found_under_the_older_name_of_a_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.3 calls the prefix `prefix`, later versions `base_model_prefix`: given by name, it stopped every
    load at stage 3 there."""

    def rename_source_key(key: str, renamings: Any, converters: Any, prefix: str, meta_state_dict: Any) -> Any:
        return key.replace("old", "new"), None

    monkeypatch.setattr("transformers.core_model_loading.rename_source_key", rename_source_key)
    model = SimpleNamespace(base_model_prefix="model", state_dict=lambda: {"model.new": 0, "head": 0})
    loader = around_loading(lambda model, state_dict, load_config: "loaded")
    assert loader(model, {"old": 0, "head": 0, "foreign": 0}) == "loaded"
    assert vars(model)[NOTED] == {"foreign"}


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("is_main_process", [False, True])
def test_a_rank_that_is_not_to_write_does_not(sharded: bool, is_main_process: bool) -> None:
    """`save_pretrained(..., is_main_process=False, state_dict=None)` of transformers up to 5.14 wrote on every rank: at
    stage 3, one without a state dict met released weights."""
    calls: list[Any] = []
    save = around_saving(lambda *arguments, **options: calls.append((arguments, options)))
    model = SimpleNamespace(parameters=lambda: [SimpleNamespace(**{HANDLE: None}) if sharded else object()])
    save(model, "folder", is_main_process, None, token="t")
    expected = ((model, "folder", is_main_process, None), {"token": "t"})
    assert calls == ([expected] if is_main_process or not sharded else [])


@pytest.mark.parametrize("upstream_asks", [False, True])
def test_what_newer_versions_do_themselves_is_left_to_them_in_silence(upstream_asks: bool) -> None:
    (takeover,) = (takeover for takeover in TAKEOVERS if takeover.unless)
    namespace: dict[str, Any] = {"save_pretrained": lambda self, something_new: None}
    if upstream_asks:
        namespace["should_save_on_this_rank"] = lambda self, is_main_process: is_main_process
    module = ModuleType(takeover.module)
    vars(module).update(PreTrainedModel=type("PreTrainedModel", (), namespace))
    assert (takeover.place in lines_about(module)) is not upstream_asks
    assert not hasattr(namespace["save_pretrained"], MARK)


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

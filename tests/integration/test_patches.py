"""The functions that hf_zero patches: upstream has the expected form, patches are active, and changes do no harm."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero

hf_zero.install()

from hf_zero.integration import startup  # noqa: E402
from hf_zero.integration.patches import MARK, Patch, Patches, patch, patches_of  # noqa: E402
from hf_zero.integration.patches.transformers import NOTED, around_save_pretrained  # noqa: E402
from hf_zero.integration.patches.transformers_integrations_deepspeed import around_loading  # noqa: E402
from hf_zero.params.store import HANDLE  # noqa: E402
from tests.integration.sites import Site  # noqa: E402
from tests.support.messages import heard  # noqa: E402

ALL = [one for module in sorted(startup.PATCHED) for one in patches_of(module)]


@pytest.mark.parametrize("one", ALL, ids=lambda one: f"{one.module}.{one.place}")
def test_upstream_has_the_shape_we_know_and_ours_is_in_force(one: Patch) -> None:
    """If this fails, upstream has changed: read its new code, then adapt the patch of that module."""
    module = pytest.importorskip(one.module)
    assert hasattr(one.find(module)[2], MARK), "upstream's own function is in force"


def test_the_import_hook_knows_the_modules() -> None:
    files = {path.stem for path in Path(inspect.getfile(Patches)).parent.glob("*.py")} - {"__init__"}
    assert files == {one.around.__module__.rpartition(".")[2] for one in ALL}
    assert all(patches_of(module).module == module for module in startup.PATCHED)


@pytest.mark.parametrize("one", ALL, ids=lambda one: f"{one.module}.{one.place}")
def test_every_patch_says_why_it_is_there_and_what_goes_without_it(one: Patch) -> None:
    assert one.around.__doc__ and one.without and one.until and one.since


def test_trainer_itself_calls_ours() -> None:
    trainer = importlib.import_module("transformers.trainer")
    assert hasattr(trainer.deepspeed_init, MARK)


def imitation(**functions: Any) -> ModuleType:
    """A module with upstream's name and other content."""
    module = ModuleType("transformers.integrations.deepspeed")
    vars(module).update(functions)
    return module


def lines_about(module: ModuleType) -> dict[str, str]:
    """Patches it; returns place -> the log's line about it."""
    with heard() as messages:
        patch(module)
    assert not any("\n" in message for message in messages)
    places = [one.place for one in patches_of(module.__name__)]
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
    assert line.endswith("evaluate() without train() works at stage 3 alone")


def test_a_module_without_the_function_is_left_alone() -> None:
    """One log line for each missing name; none of them prevents the other patches."""

    def initialize_weights_zero3(model: Any) -> None: ...

    module = imitation(HfTrainerDeepSpeedConfig=None, initialize_weights_zero3=initialize_weights_zero3)
    lines = lines_about(module)
    assert vars(module)["HfTrainerDeepSpeedConfig"] is None
    assert "HfTrainerDeepSpeedConfig.trainer_config_process is not there" in " ".join(lines.values())
    missing = {one.place for one in patches_of(module.__name__)}
    assert set(lines) == missing - {"initialize_weights_zero3"}
    assert hasattr(module.initialize_weights_zero3, MARK)


def test_a_patch_that_breaks_says_so_in_one_line() -> None:
    """For example in a module with lazy imports, one of which fails."""

    def raises(name: str) -> None:
        raise ImportError("cannot import name 'gone'\nfrom 'upstream'")

    module = imitation(__getattr__=raises)
    line = lines_about(module)["initialize_weights_zero3"]
    assert "is not patched (ImportError: cannot import name 'gone' from 'upstream'); hf_zero leaves it as it is" in line
    assert "initialize_weights_zero3" not in vars(module)


def test_a_file_of_patches_that_cannot_be_loaded_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(Patches.of, "transformers.integrations.deepspeed")
    with heard() as said:
        patch(imitation())
    (line,) = said
    assert "transformers.integrations.deepspeed is not patched (KeyError: " in line


def test_only_one_rank_says_that_something_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    assert lines_about(imitation()) == {}


def test_keys_without_home_are_found_under_the_older_name_of_a_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """In transformers 5.3 the parameter is called `prefix`, in later versions `base_model_prefix`. Passing it by name
    made every load at stage 3 fail there."""

    def rename_source_key(key: str, renamings: Any, converters: Any, prefix: str, meta_state_dict: Any) -> Any:
        return key.replace("old", "new"), None

    monkeypatch.setattr("transformers.core_model_loading.rename_source_key", rename_source_key)
    model = SimpleNamespace(base_model_prefix="model", state_dict=lambda: {"model.new": 0, "head": 0})
    keys = {"old": 0, "head": 0, "foreign": 0}
    assert around_loading(lambda model, state_dict, load_config: "loaded", model, keys) == "loaded"
    assert vars(model)[NOTED] == {"foreign"}


@pytest.mark.parametrize("upstream_asks", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("is_main_process", [False, True])
def test_a_rank_that_is_not_to_write_does_not(sharded: bool, is_main_process: bool, upstream_asks: bool) -> None:
    """`save_pretrained(..., is_main_process=False, state_dict=None)` of transformers up to 5.14 wrote on every rank,
    and at stage 3 a rank without a state dict met released weights. Newer versions ask which ranks save."""
    calls: list[Any] = []

    def save(*arguments: Any, **options: Any) -> None:
        calls.append((arguments, options))

    parameter = nn.Parameter(torch.ones(1))
    if sharded:
        setattr(parameter, HANDLE, None)
    named = {"parameters": lambda: [parameter], "named_parameters": lambda: [("weight", parameter)]}
    model = SimpleNamespace(**named, **({"should_save_on_this_rank": bool} if upstream_asks else {}))
    around_save_pretrained(save, model, "folder", is_main_process, None, token="t")
    expected = ((model, "folder", is_main_process, None), {"token": "t"})
    assert calls == ([expected] if is_main_process or not sharded or upstream_asks else [])


def test_a_folder_to_resume_from_that_has_weights_alone_says_what_to_do(tmp_path: Path) -> None:
    """Resuming from a checkpoint of save_only_model, or of a run without a ds.json, only raised an error that it was
    not valid."""
    load = importlib.import_module("transformers.integrations.deepspeed").deepspeed_load_checkpoint
    with pytest.raises(ValueError, match=r"Can't find a valid checkpoint at .*\n    rule: .*this is no folder\n"):
        load(None, str(tmp_path / "none"))
    with pytest.raises(ValueError, match="this has none, and no weights"):
        load(None, str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(
        ValueError, match=r"this has weights alone, .*\n    fix:  start from the weights, from_pretrained\("
    ):
        load(None, str(tmp_path))
    (tmp_path / "global_step4").mkdir()
    engine = SimpleNamespace(load_checkpoint=lambda *arguments, **options: (None, {}))
    with pytest.raises(ValueError, match=r"failed to resume from checkpoint [^\n]*$"):
        load(engine, str(tmp_path))


def test_patching_twice_wraps_once() -> None:
    module = importlib.import_module("accelerate.utils.deepspeed")
    before = module.HfDeepSpeedConfig.__init__
    patch(module)
    assert module.HfDeepSpeedConfig.__init__ is before


def test_arguments_of_an_unknown_shape_go_to_upstream() -> None:
    """The patch reads fields that these arguments lack; upstream then raises its own error."""
    transformers_config = importlib.import_module("transformers.integrations.deepspeed")
    config = transformers_config.HfTrainerDeepSpeedConfig({"zero_optimization": {"stage": 2}})
    with heard() as said, pytest.raises(AttributeError):
        config.trainer_config_process(object())
    assert any("hf_zero steps aside" in line for line in said)


def test_switched_off_nothing_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ZERO", "0")
    for name in startup.PATCHED:
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


@pytest.mark.slow  # test_startup.py tests which one is imported
def test_a_real_deepspeed_keeps_its_flows_until_hf_zero_is_asked_for(wheel: Path, tmp_path: Path) -> None:
    site = Site.empty(tmp_path / "site").unpack(wheel).borrow_libraries().add_real_deepspeed()
    assert site.ask(AFTERWARDS) == {"before": [False, False], "after": [True, True, True]}

"""DeepSpeedPlugin and Accelerator with ds.json: whether launcher, script or file decides, and the messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from torch.utils.data import DataLoader
from transformers.integrations.deepspeed import deepspeed_config

import hf_zero

hf_zero.install()

from hf_zero import ConfigError  # noqa: E402
from hf_zero.config import ConfigDict, resolve  # noqa: E402
from tests.support.messages import heard  # noqa: E402

from .flows import BASE, accelerator, write  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_rank")


def plugin_config(given: Any, **fields: Any) -> ConfigDict:
    config = DeepSpeedPlugin(hf_ds_config=given, **fields).deepspeed_config
    assert isinstance(config, ConfigDict)
    return config


AUTO: dict[str, Any] = {
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {
        "stage": "auto",
        "offload_optimizer": {"device": "auto"},
        "stage3_gather_16bit_weights_on_model_save": "auto",
    },
}


def test_a_file_without_a_zero_section_is_refused() -> None:
    with pytest.raises(ValueError, match="Please specify the ZeRO optimization config"):
        DeepSpeedPlugin(hf_ds_config={"train_batch_size": 8})


def test_a_misspelled_zero_section_is_named() -> None:
    with pytest.raises(ConfigError, match='Please specify the ZeRO(.|\n)*did you mean "zero_optimization"'):
        DeepSpeedPlugin(hf_ds_config={"train_batch_size": 8, "zero_optimisation": {"stage": 2}})


def test_a_drive_that_is_not_there_is_named_before_the_model_is_built(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not an existing folder of this machine"):
        DeepSpeedPlugin(
            zero_stage=2, offload_optimizer_device="nvme", offload_optimizer_nvme_path=str(tmp_path / "none")
        )


def test_what_the_file_leaves_out_is_left_to_the_code() -> None:
    """Accelerate set a missing gradient_accumulation_steps to 1, so Accelerator(gradient_accumulation_steps=4)
    conflicted with a file without it; DeepSpeedPlugin(gradient_clipping=0.5) was ignored for the same reason."""
    left = {"gradient_accumulation_steps": 1, "gradient_clipping": 1.0}
    config = plugin_config({"zero_optimization": {"stage": 1}})
    assert {key: config[key] for key in left} == left
    fields: dict[str, Any] = {"gradient_accumulation_steps": 4, "gradient_clipping": 0.5}
    config = plugin_config({"zero_optimization": {"stage": 1}}, **fields)
    assert {key: config[key] for key in left} == fields


def test_nobody_says_anything() -> None:
    config = plugin_config(AUTO)
    zero = {"stage": 2, "offload_optimizer": {"device": "none"}, "stage3_gather_16bit_weights_on_model_save": False}
    assert config["zero_optimization"] == zero
    assert (config["gradient_accumulation_steps"], config["gradient_clipping"]) == ("auto", "auto")
    assert config["steps_per_print"] == float("inf")
    assert str(config.source_of("zero_optimization.stage")) == "DeepSpeedPlugin(zero_stage)"


def test_the_launcher_fills_and_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "1")
    monkeypatch.setenv("ACCELERATE_GRADIENT_CLIPPING", "0.5")
    config = plugin_config(AUTO)
    assert config["zero_optimization"]["stage"] == 1 and config["gradient_clipping"] == 0.5
    source = str(config.source_of("gradient_clipping"))
    assert source == "ACCELERATE_GRADIENT_CLIPPING (accelerate launch --gradient_clipping, or its config file)"


def test_a_fixed_value_beats_field_and_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_CLIPPING", "0.5")
    config = plugin_config({**BASE, "gradient_clipping": 2.0}, zero_stage=1)
    assert config["gradient_clipping"] == 2.0 and config["zero_optimization"]["stage"] == 2


def test_what_the_config_overrides_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """DeepSpeedPlugin(hf_ds_config="ds.json", zero_stage=3), or the launcher's flag and a script that reads ds.json by
    itself, trained at the stage of the file without a word. The defaults of nobody are not reported."""
    monkeypatch.setenv("ACCELERATE_GRADIENT_CLIPPING", "0.5")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", "true")
    path = write(tmp_path, {**BASE, "gradient_clipping": 2.0})
    with heard() as said:
        plugin_config(str(path), zero_stage=3, offload_param_device="none")
        plugin_config(str(path), zero_stage=2, gradient_clipping=2)
    assert len(said) == 2
    assert "zero_stage = 3 (DeepSpeedPlugin(zero_stage)) has no effect" in said[1]
    assert "ds.json:7 has zero_optimization.stage = 2" in said[1]
    assert "gradient_clipping = '0.5' (ACCELERATE_GRADIENT_CLIPPING) has no effect" in said[0]


def test_without_a_file_the_fields_make_one() -> None:
    config = DeepSpeedPlugin(zero_stage=1, gradient_accumulation_steps=3, gradient_clipping=0.1).deepspeed_config
    assert config["zero_optimization"]["stage"] == 1
    assert (config["gradient_accumulation_steps"], config["gradient_clipping"]) == (3, 0.1)
    assert config["train_batch_size"] == config["train_micro_batch_size_per_gpu"] == "auto"


PRECISIONS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("fp16", {}, {"fp16": {"enabled": True, "auto_cast": True}, "bf16": {"enabled": False}}),
    ("bf16", {}, {"fp16": {"enabled": False}, "bf16": {"enabled": True}}),
    ("no", {}, {"fp16": {"enabled": False}, "bf16": {"enabled": False}}),
    ("bf16", {"bf16": {"enabled": "auto"}}, {"fp16": {"enabled": False}, "bf16": {"enabled": True}}),
    ("no", {"bf16": {"enabled": "auto"}}, {"fp16": {"enabled": False}, "bf16": {"enabled": False}}),
    ("fp16", {"bf16": {"enabled": "auto"}}, {"fp16": {"enabled": True, "auto_cast": True}, "bf16": {"enabled": False}}),
    ("no", {"bf16": {"enabled": True}}, {"fp16": {"enabled": False}, "bf16": {"enabled": True}}),
    ("bf16", {"bf16": {"enabled": False}}, {"fp16": {"enabled": False}, "bf16": {"enabled": False}}),
]


@pytest.mark.parametrize(("flag", "sections", "expected"), PRECISIONS)
def test_precision_of_flag_and_file(flag: str, sections: dict[str, Any], expected: dict[str, Any]) -> None:
    plugin = DeepSpeedPlugin(hf_ds_config={**BASE, **sections})
    plugin.set_mixed_precision(flag)
    assert {name: plugin.deepspeed_config[name] for name in ("fp16", "bf16")} == expected


@pytest.mark.parametrize(("flag", "section"), [("fp16", "bf16"), ("bf16", "fp16"), ("fp8", "fp16")])
def test_precision_of_flag_against_file(flag: str, section: str, tmp_path: Path) -> None:
    path = write(tmp_path, {**BASE, section: {"enabled": True}})
    with pytest.raises(ConfigError) as caught:
        DeepSpeedPlugin(hf_ds_config=str(path)).set_mixed_precision(flag)
    (problem,) = caught.value.problems
    assert problem.path == f"{section}.enabled" and problem.origin.startswith(f"{path}:")
    assert problem.other is not None and problem.other.value == flag
    assert f"cannot be {flag} when {section} is switched on" in problem.rule and '"auto"' in problem.fix


@pytest.mark.parametrize("text", ["comment", "base64", "json"])
def test_every_form_through_accelerate(text: str, tmp_path: Path) -> None:
    import base64
    import json

    content = json.dumps(BASE)
    given = {
        "comment": str(write(tmp_path, BASE)),
        "base64": base64.urlsafe_b64encode(content.encode()).decode(),
        "json": content,
    }[text]
    assert accelerator(given).deepspeed_plugin.deepspeed_config["zero_optimization"] == {"stage": 2}


@pytest.mark.parametrize(("micro", "kept"), [("auto", None), (None, None), (4, 16)])
def test_a_model_loads_before_the_batch_is_known(micro: Any, kept: int | None) -> None:
    """zero.Init reads a copy of the config: the batch equation is only checked if it is complete."""
    from transformers.integrations.deepspeed import deepspeed_config

    given = {"train_batch_size": 16, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 2}}
    if micro is not None:
        given["train_micro_batch_size_per_gpu"] = micro
    plugin = DeepSpeedPlugin(hf_ds_config=given)
    plugin.set_deepspeed_weakref()
    copied = deepspeed_config()
    assert copied.get("train_batch_size") == kept and plugin.deepspeed_config["train_batch_size"] == 16
    resolve(copied, world_size=2)


def test_a_switched_off_precision_is_said() -> None:
    with heard() as said:
        DeepSpeedPlugin(hf_ds_config={**BASE, "bf16": {"enabled": False}}).set_mixed_precision("bf16")
    assert len(said) == 1 and "bf16.enabled is false (the config): the config decides" in said[0]


def test_who_reads_a_number_finds_a_number_and_both_configs_are_the_same() -> None:
    """A program multiplied by `plugin.deepspeed_config["gradient_accumulation_steps"]`, which the file did not set:
    accelerate alone gives 1, hf_zero gave "auto" until prepare(). transformers' own view, created when a second plugin
    was selected, contained 1, and still did after prepare() had filled the other one."""
    without = {key: value for key, value in BASE.items() if key != "gradient_accumulation_steps"}
    plugins = {
        "first": DeepSpeedPlugin(hf_ds_config={**without, "zero_optimization": {"stage": 1}}),
        "second": DeepSpeedPlugin(hf_ds_config={**without, "zero_optimization": {"stage": 2}}),
    }
    assert [plugin.deepspeed_config["gradient_accumulation_steps"] for plugin in plugins.values()] == [1, 1]
    accelerator = Accelerator(cpu=True, deepspeed_plugins=plugins, gradient_accumulation_steps=2)
    accelerator.state.select_deepspeed_plugin("second")
    seen = plugins["second"].hf_ds_config.config
    numbers = ("gradient_accumulation_steps", "gradient_clipping")
    assert {key: deepspeed_config()[key] for key in numbers} == {key: seen[key] for key in numbers}
    seen["gradient_clipping"] = 1.0  # as on accelerate's pages: from here on it is set
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator.prepare(model, optimizer, DataLoader(torch.ones(4, 4), batch_size=2))
    assert deepspeed_config() == seen and seen["gradient_accumulation_steps"] == 2
    assert seen["train_batch_size"] == 4
    accelerator.state.select_deepspeed_plugin("first")
    assert deepspeed_config()["zero_optimization"]["stage"] == 1
    accelerator.state.select_deepspeed_plugin("second")
    assert deepspeed_config() == seen


def test_a_number_that_a_program_writes_is_not_taken_for_an_assumed_one() -> None:
    config = plugin_config({"zero_optimization": {"stage": 1}})
    assert config.assumes("gradient_accumulation_steps")
    assert ConfigDict.__deepcopy__(config, {}).assumes("gradient_accumulation_steps")
    config["gradient_accumulation_steps"] = 1
    config.update(gradient_clipping=0.5)
    assert not config.assumes("gradient_accumulation_steps") and not config.assumes("gradient_clipping")

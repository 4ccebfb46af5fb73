"""The activation_checkpointing section with transformers' gradient checkpointing gives bitwise identical training."""

from __future__ import annotations

import copy
import logging
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from hf_zero import initialize
from hf_zero.activations.feature import CheckpointedInputs
from tests.support.architectures import LLAMA
from tests.support.late import Late, use

EVERYTHING = {
    "cpu_checkpointing": True,
    "contiguous_memory_optimization": True,
    "number_checkpoints": 2,
    "synchronize_checkpoint_boundary": True,
    "profile": True,
}
_FUNCTION = "_gradient_checkpointing_func"


def llama() -> Any:
    """A Llama with dropout in its attention."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**LLAMA, "num_hidden_layers": 3}, attention_dropout=0.2)).train()


def train(
    model: Any, section: dict[str, Any] | None, stage: int = 0, *, compiled: bool = False, **more: Any
) -> tuple[list[Tensor], Any]:
    """Two updates of two micro-batches: losses and the engine's weights; `more` goes to transformers' checkpointing."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0},
    }
    if section is not None:
        config["activation_checkpointing"] = section
    engine, _, _, _ = initialize(model=model, config=config)
    # As in Trainer, after the engine has been created.
    model.activation_checkpointing_enable(**more)
    if compiled:
        engine.compile(backend="aot_eager")
    torch.manual_seed(3)
    losses = []
    for _ in range(4):
        ids = torch.randint(3, 90, (2, 16))
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().clone())
    weights = {name: value.clone() for name, value in engine.module_state_dict().items()}
    feature = engine.training_features.named("activation_checkpointing")
    assert (feature is None) == (section is None)
    if feature is not None:
        assert feature.calls.num_calls == 4 * 3
    engine.destroy()
    assert not any("_Around" in repr(vars(module).get(_FUNCTION)) for module in model.modules())
    return losses, weights


@pytest.mark.parametrize(
    ("stage", "section", "more"),
    [
        (0, {"cpu_checkpointing": True}, {}),
        (2, {"contiguous_memory_optimization": True}, {"activation_checkpointing_kwargs": {"use_reentrant": True}}),
        (3, EVERYTHING, {}),
        (3, EVERYTHING, {"activation_checkpointing_kwargs": {"use_reentrant": True}}),
        (0, {"cpu_checkpointing": True}, {"offload": True}),  # transformers' own offload, which hf_zero replaces
    ],
)
def test_the_same_bits(stage: int, section: dict[str, Any], more: dict[str, Any]) -> None:
    """Dropout draws the same numbers, stage 3 gathers as before; the device's copies arrive as late as possible."""
    plain = {name: value for name, value in more.items() if name != "offload"}
    expected = train(llama(), None, stage, **plain)
    with use(Late()) if section.get("cpu_checkpointing") else nullcontext():
        found = train(llama(), section, stage, **more)
    for one, other in zip(found[0], expected[0], strict=True):
        assert torch.equal(one, other)
    assert all(torch.equal(value, expected[1][name]) for name, value in found[1].items())


@pytest.mark.slow
def test_compiled() -> None:
    """The layers run outside the compiled code; nothing is compiled twice for them."""
    expected = train(llama(), None)
    with use(Late()):
        model = llama()
        found = train(model, {"cpu_checkpointing": True}, compiled=True)
    torch.testing.assert_close(found, expected)


def test_transformers_own_offload_is_left_alone_unless_we_keep_inputs_on_the_host() -> None:
    """Without the key it stays; with it, hf_zero copies instead, once and without waiting."""
    for section, stays in (({"profile": True}, True), ({"cpu_checkpointing": True}, False)):
        model = llama()
        model.activation_checkpointing_enable(offload=True)
        config = {"train_micro_batch_size_per_gpu": 2, "activation_checkpointing": section}
        engine, _, _, _ = initialize(model=model, config=config)
        feature: CheckpointedInputs = engine.training_features.named("activation_checkpointing")
        feature.before_forward(None, {})  # type: ignore[arg-type]
        around = vars(model.model.layers[0])[_FUNCTION]
        assert (around._checkpoint.func.__name__ == "checkpoint_func") == stays
        copied = copy.deepcopy(model.model.layers[0])  # a reference model, which continues on its own
        assert type(vars(copied)[_FUNCTION]) is type(around.original)
        engine.destroy()


def messages(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)


def test_without_gradient_checkpointing_it_says_that_it_does_nothing(caplog: pytest.LogCaptureFixture) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "activation_checkpointing": {"cpu_checkpointing": True, "partition_activations": True, "number_checkpoints": 3},
    }
    with caplog.at_level(logging.INFO, logger="hf_zero"):
        engine, _, _, _ = initialize(model=llama(), config=config)
        ids = torch.randint(3, 90, (2, 16))
        for _ in range(2):
            engine(input_ids=ids, labels=ids)
        engine.destroy()
    text = messages(caplog)
    assert text.count("activation_checkpointing has no effect: no layer of the model is checkpointed") == 1
    assert "partition_activations" in text and "ranks have different activations" in text
    everything = "\n".join(record.getMessage() for record in caplog.records)
    assert "no effect without contiguous_memory_optimization" in everything

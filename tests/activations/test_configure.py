"""`deepspeed.checkpointing`: the options of `configure`, also partitioning over a tensor-parallel group."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_zero.activations.kept import CONFIGURED
from hf_zero.comm import ledger
from hf_zero.config import ConfigError
from hf_zero.integration.compat import activation_checkpointing as checkpointing
from tests.activations.test_calls import LAYERS, ROWS, WIDTH, net, train
from tests.activations.test_feature import EVERYTHING, llama
from tests.activations.test_feature import train as train_llama
from tests.support.late import Late, use
from tests.support.memory import profiled_memory, still_allocated
from tests.support.ranks import run_ranks
from tests.support.traffic import calls_and_bytes


@pytest.fixture(autouse=True)
def unconfigured() -> Iterator[None]:
    yield
    CONFIGURED.calls, CONFIGURED.tensor_rank = None, 0


def same(found: list[Any], expected: list[Any]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def plain(*args: Any) -> Any:
    return checkpoint(*args, use_reentrant=True)


def test_the_section_is_read_and_arguments_go_first() -> None:
    config = {"train_batch_size": 1, "activation_checkpointing": {**EVERYTHING, "profile": False}}
    checkpointing.configure(None, config, synchronize=False, num_checkpoints=LAYERS)
    assert CONFIGURED.calls is not None
    policy = CONFIGURED.calls.policy
    assert policy.cpu_checkpointing and policy.contiguous_memory_optimization and policy.number_checkpoints == LAYERS
    assert not policy.synchronize_checkpoint_boundary and not policy.profile
    expected = train(net(), plain)
    with use(Late()):
        assert same(train(net(), checkpointing.checkpoint), expected)
        checkpointing.reset()
        assert same(train(net(), checkpointing.non_reentrant_checkpoint), expected)
    checkpointing.set_num_layers(3)
    assert CONFIGURED.calls.policy.number_checkpoints == 3 and CONFIGURED.calls.policy.cpu_checkpointing


def test_what_cannot_be_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"activation_checkpointing\.number_checkpoints"):
        checkpointing.configure(None, {"activation_checkpointing": {"number_checkpoints": -1}})
    with pytest.raises(ConfigError, match="no such key in activation_checkpointing"):
        checkpointing.configure(None, {"activation_checkpointing": {"unknown": 1}})
    with pytest.raises(ValueError, match="set num_checkpoints"):
        checkpointing.configure(None, contiguous_checkpointing=True)
    ulysses = SimpleNamespace(get_sequence_parallel_world_size=lambda: 2, get_model_parallel_world_size=lambda: 2)
    with caplog.at_level(logging.WARNING, logger="hf_zero"):
        checkpointing.configure(None, partition_activations=True)
        checkpointing.configure(ulysses, partition_activations=True)
        checkpointing.configure(SimpleNamespace(get_model_parallel_world_size=lambda: 1), partition_activations=True)
        checkpointing.partition_activations_in_checkpoint(True)
    texts = [record.getMessage() for record in caplog.records]
    assert [
        part in text for part, text in zip(("no mpu", "different activations", "one rank", "given no mpu"), texts)
    ] == [True] * 4
    assert same(train(net(), checkpointing.checkpoint), train(net(), plain))


def test_named_states_draw_the_same_again() -> None:
    """Dropout inside tracker.fork(), as in Megatron: without care the recomputation would draw the next numbers."""

    class Dropping(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with checkpointing_names.get_cuda_rng_tracker().fork():
                return nn.functional.dropout(x, 0.5)

    checkpointing_names = importlib.import_module("deepspeed").checkpointing
    checkpointing_names.model_parallel_cuda_manual_seed(7)
    x, layer = torch.ones(ROWS, WIDTH, requires_grad=True), Dropping()
    outputs = [checkpointing_names.checkpoint(layer, x) for _ in range(2)]
    tracker = checkpointing_names.get_cuda_rng_tracker()
    after = tracker.get_states()
    for output in outputs:
        x.grad = None
        output.sum().backward()
        assert x.grad is not None and torch.equal(output, x.grad)
    assert not torch.equal(*outputs)
    assert all(torch.equal(state, after[name]) for name, state in tracker.get_states().items())
    checkpointing_names.model_parallel_reconfigure_tp_seed(7)
    again = layer(x)
    assert torch.equal(again, outputs[0])
    tracker.reset()


class Held:
    """An object with a tensor, like the outputs of a model."""

    def __init__(self, values: Tensor) -> None:
        self.values = values


def gradients_of(run: Any, configured: dict[str, Any]) -> list[Tensor]:
    """Gradients of weights and of an input, all through containers that a checkpointed function takes or returns."""
    torch.manual_seed(0)
    layer, x = nn.Linear(WIDTH, WIDTH), torch.randn(ROWS, WIDTH, requires_grad=True)

    def from_dict(given: dict[str, Tensor]) -> dict[str, Any]:
        return {"hidden": torch.tanh(layer(given["hidden"])), "all": [given["hidden"] * 2]}

    def from_object(given: Held, *, scale: Tensor) -> Held:
        return Held(layer(given.values) * scale)

    if configured:
        checkpointing.configure(None, **configured)
    first = run(from_dict, {"hidden": x})
    second = run(from_object, Held(first["hidden"]), scale=x.sum())
    data = torch.ones(ROWS, WIDTH)  # no argument needs a gradient: only the weights do
    third = run(lambda plain: (layer(plain), "kept as it is"), data)
    (second.values.square().mean() + first["all"][0].mean() + third[0].mean()).backward()
    assert x.grad is not None and layer.weight.grad is not None and third[1] == "kept as it is"
    return [x.grad, layer.weight.grad]


def test_tensors_in_dicts_and_objects_have_gradients() -> None:
    """A layer took and returned a dict under `deepspeed.checkpointing.checkpoint`: its weights never changed.

    DeepSpeed's and torch's reentrant checkpoints see only tensors that are arguments or results themselves. There was
    no error; the same held if no argument needed a gradient, as in a first layer whose input is data.
    """
    expected = gradients_of(lambda function, *args, **kwargs: function(*args, **kwargs), {})
    assert all(gradient.abs().sum() > 0 for gradient in expected)
    for configured in ({}, {"checkpoint_in_cpu": True}, {"contiguous_checkpointing": True, "num_checkpoints": 3}):
        with use(Late()):
            found = gradients_of(checkpointing.checkpoint, configured)
        torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)
    all_outputs: list[Any] = []
    leaf = torch.ones(2, requires_grad=True)
    doubled = checkpointing.CheckpointFunction.apply(lambda given: {"y": given["x"] * 2}, all_outputs, {"x": leaf})
    all_outputs[0]["y"].sum().backward()
    assert doubled is all_outputs[0] and leaf.grad is not None and leaf.grad.tolist() == [2.0, 2.0]


def test_detached_variables() -> None:
    x = torch.ones(2, requires_grad=True) * 2
    detached, other, number = checkpointing.detach_variable((x, torch.ones(1), 3))
    assert detached.is_leaf and detached.requires_grad and not other.requires_grad and number == 3
    with pytest.raises(RuntimeError, match="takes a tuple, not list"):
        checkpointing.detach_variable([x])  # type: ignore[arg-type]


# --- ranks -------------------------------------------------------------------------------------------------------


def run_partitioned(rank: int) -> dict[str, Any]:
    """Both ranks compute the same, like ranks of a tensor-parallel group."""
    group = dist.new_group([0, 1])
    mpu = SimpleNamespace(
        get_model_parallel_world_size=lambda: 2,
        get_model_parallel_rank=lambda: rank,
        get_model_parallel_group=lambda: group,
    )
    found: dict[str, Any] = {}
    expected = train(net(), plain)
    for name, more in (
        ("parts", {}),
        ("host", {"checkpoint_in_cpu": True}),
        ("buffer", {"contiguous_checkpointing": True}),
    ):
        with use(Late()):
            checkpointing.configure(mpu, None, partition_activations=True, num_checkpoints=LAYERS, **more)
            found[name] = same(train(net(), checkpointing.checkpoint), expected)
    found["kept"] = {}
    for partition in (False, True):
        checkpointing.configure(mpu, None, partition_activations=partition)
        leaf, layers, shared = torch.ones(512, WIDTH, requires_grad=True), net(), torch.zeros(1)
        with profiled_memory() as forward:
            y: Tensor = leaf * 1  # created here: whether the profiler counts older tensors depends on the allocator
            for layer in layers:
                y = checkpointing.checkpoint(layer, y, shared)
        found["kept"][partition] = still_allocated(forward) / (512 * WIDTH * 4)
        y.sum().backward()
        del y  # not counted
    names = importlib.import_module("deepspeed").checkpointing
    names.model_parallel_cuda_manual_seed(5)
    found["seeds"] = names.get_cuda_rng_tracker().seeds_
    # Also with a partitioned model, whose gathers must not change.
    for section in (None, {"cpu_checkpointing": True}):
        ledger.reset()
        with use(Late()):
            losses, weights = train_llama(llama(), section, 3)
        found[f"stage 3 {section is not None}"] = losses, weights, calls_and_bytes()
    return found


def test_two_ranks() -> None:
    """Each keeps half of a shared input; gathered again it is bitwise the same."""
    for rank, found in enumerate(run_ranks(run_partitioned, 2)):
        assert found["parts"] and found["host"] and found["buffer"]
        whole, parts = found["kept"][False], found["kept"][True]  # both include the output
        assert whole == pytest.approx(LAYERS + 1, abs=0.25) and parts == pytest.approx(LAYERS / 2 + 1, abs=0.25)
        assert found["seeds"] == {5 + 2718 + rank}
        (losses, weights, calls), expected = found["stage 3 True"], found["stage 3 False"]
        assert calls == expected[2] and all(map(torch.equal, losses, expected[0]))
        assert all(torch.equal(value, expected[1][name]) for name, value in weights.items())

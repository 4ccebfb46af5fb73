"""zero.Init: nested contexts, and reads during the model's construction, which never make all of it whole."""

from __future__ import annotations

import torch
from torch import nn

from hf_zero.api import zero_init
from hf_zero.api.gathered_parameters import GatheredParameters
from hf_zero.api.zero_init import MIN_OPENED, Init
from hf_zero.params.store import of
from tests.support.ranks import run_ranks

NUM_LAYERS = 30


def open_parameters(model: nn.Sequential) -> int:
    """The number of gathered parameters, without reading them."""
    handles = [of(parameter) for layer in model for parameter in layer._parameters.values()]
    return sum(handle is not None and handle.unshard_count > 0 for handle in handles)


def initialise_after_birth(rank: int) -> tuple[int, list[float]]:
    zero_init.MAX_OPENED_NUMEL = 1000
    most = 0
    with Init(config_dict_or_path={"train_batch_size": 2, "zero_optimization": {"stage": 3}}):
        model = nn.Sequential(*(nn.Linear(20, 20) for _ in range(NUM_LAYERS)))
        for number, layer in enumerate(model):
            nn.init.constant_(layer.weight, number)
            nn.init.constant_(layer.bias, -number)
            most = max(most, open_parameters(model))
    with GatheredParameters(model.parameters()), torch.no_grad():
        return most, [float((layer.weight + layer.bias.abs()).mean()) for layer in model]


def test_an_init_function_that_reads_the_whole_model_does_not_make_it_whole() -> None:
    """post_init() of transformers' models did: 1.1 billion parameters for NVMe took 2.1 GB during construction."""
    for most, means in run_ranks(initialise_after_birth, 2):
        assert most == MIN_OPENED
        assert means == [2.0 * number for number in range(NUM_LAYERS)]


def run_nested(rank: int) -> list[bool]:
    found = []
    with Init():
        outer = nn.Linear(4, 4)
        with Init():
            inner = nn.Linear(4, 4)
        found += [hasattr(inner.weight, "ds_id"), hasattr(outer.weight, "ds_id")]
        both = nn.Sequential(outer, inner)
    return [*found, all(hasattr(parameter, "ds_id") for parameter in both.parameters())]


def test_what_a_nested_init_has_built_is_sharded_when_it_ends() -> None:
    """Parameters of a nested zero.Init had no `ds_id` until the outer one ended, but code inside it needs them."""
    for inner, _, both in run_ranks(run_nested, 2):
        assert inner and both

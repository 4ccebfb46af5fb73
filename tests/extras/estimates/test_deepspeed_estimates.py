"""DeepSpeed's memory estimators: the same formulas and tables, digit for digit."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero.extras import estimates
from tests.config.deepspeed_answers import ask_deepspeed
from tests.support.requirements import requires

STAGE_2 = importlib.import_module("deepspeed.runtime.zero.stage_1_and_2")
STAGE_3 = importlib.import_module("deepspeed.runtime.zero.stage3")
P, Y = 2851e6, 32e6
# Of DeepSpeed 0.19.8 (`_all_cold`), as (CPU, GPU) in GiB: rows by nodes x GPUs.
TABLES = {
    (1, 1): "63.72 5.31|15.93 53.10|71.69 0.12|71.69 0.12|63.72 5.43|63.72 5.43|0.18 47.91|15.93 47.91",
    (1, 8): "127.45 5.31|127.45 11.28|71.69 0.12|127.45 0.12|63.72 0.78|127.45 0.78|1.43 6.09|127.45 6.09",
    (2, 4): "127.45 5.31|63.72 11.28|35.85 0.12|63.72 0.12|31.86 0.78|63.72 0.78|0.72 6.09|63.72 6.09",
}
# Every function of both modules with various sizes, factors and flags, as DeepSpeed prints and returns it.
PROGRAM = """
import contextlib, io
from deepspeed.runtime.zero import stage3, stage_1_and_2
answer = []
for kind, arguments in given:
    module = stage_1_and_2 if "zero2" in kind else stage3
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        if kind.endswith("live"):
            import torch
            model = torch.nn.Sequential(torch.nn.Linear(3000, 2000), torch.nn.Linear(2000, 1000))
            model[0].weight.requires_grad_(False)
            found = getattr(module, kind)(model, *arguments)
        else:
            found = getattr(module, kind)(*arguments)
    answer.append([found, said.getvalue()])
"""


def printed(function: Any, *arguments: Any) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert function(*arguments) is None
    return said.getvalue()


@pytest.mark.parametrize(("nodes", "gpus"), TABLES)
def test_the_published_table(nodes: int, gpus: int) -> None:
    rows = [row.split() for row in TABLES[nodes, gpus].split("|")]
    second = printed(STAGE_2.estimate_zero2_model_states_mem_needs_all_cold, P, gpus, nodes).splitlines()
    third = printed(STAGE_3.estimate_zero3_model_states_mem_needs_all_cold, P, Y, gpus, nodes).splitlines()
    found = [(line[1:8].strip(), line[13:19].strip()) for line in second[4:] + third[4:]]
    assert found == [tuple(row) for row in rows]


def test_what_is_printed() -> None:
    assert printed(STAGE_3.estimate_zero3_model_states_mem_needs_all_cold, P, Y, 8).splitlines()[:5] == [
        "Estimated memory needed for params, optim states and gradients for a:",
        "HW: Setup with 1 node, 8 GPUs per node.",
        "SW: Model with 2851M total params, 32M largest layer params.",
        "  per CPU  |  per GPU |   Options",
        "   71.69GB |   0.12GB | offload_param=cpu , offload_optimizer=cpu , zero_init=1",
    ]


def test_bytes_are_whole_numbers() -> None:
    assert STAGE_2.estimate_zero2_model_states_mem_needs(1000, 4, 2) == (48000, 2000)
    assert STAGE_3.estimate_zero3_model_states_mem_needs(1000, 10, 4, 2) == (13500, 40, 40)


def test_a_model_on_the_meta_device_counts_whole_and_tied_weights_once() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(100, 30), nn.Linear(30, 100))
    model[1].weight = model[0].weight
    assert estimates.count_parameters(model) == (3100, 3100)
    whole = nn.Linear(30, 100)
    assert estimates.count_parameters(nn.Sequential(whole, nn.Linear(1, 1))) == (3102, 3100)


@pytest.mark.oracle
@requires(oracle=True)
def test_everything_is_as_deepspeed_says_it(tmp_path: Path) -> None:
    questions: list[tuple[str, list[Any]]] = []
    for total, largest in ((2851e6, 32e6), (7, 3), (123_456_789, 1_000_003), (70_553_706_496, 1_050_673_152)):
        for gpus, nodes in ((1, 1), (8, 1), (4, 2), (3, 7), (8, 512)):
            for factor in (1.5, 1.0, 1.37):
                for offload in (True, False):
                    common = [gpus, nodes, offload]
                    questions.append(("estimate_zero2_model_states_mem_needs", [total, *common, factor]))
                    questions += [
                        ("estimate_zero3_model_states_mem_needs", [total, largest, *common, params, init, factor])
                        for params in (True, False)
                        for init in (True, False)
                    ]
                questions.append(("estimate_zero2_model_states_mem_needs_all_cold", [total, gpus, nodes, factor]))
                both = [total, largest, gpus, nodes, factor]
                questions.append(("estimate_zero3_model_states_mem_needs_all_cold", both))
    questions += [(f"estimate_zero{stage}_model_states_mem_needs_all_live", [4, 2]) for stage in (2, 3)]
    theirs = ask_deepspeed(PROGRAM, questions, tmp_path)
    model = nn.Sequential(nn.Linear(3000, 2000), nn.Linear(2000, 1000))
    for (name, arguments), (value, said) in zip(questions, theirs, strict=True):
        ours = getattr(STAGE_2 if "zero2" in name else STAGE_3, name)
        given = [model, *arguments] if name.endswith("live") else arguments
        if said:
            assert printed(ours, *given) == said.replace("OffloadDeviceEnum.cpu", "cpu "), (name, given)
        else:
            assert json.loads(json.dumps(ours(*given))) == value, (name, given)

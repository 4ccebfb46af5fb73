"""Messages for wrong flags and configs: `python -m tests.config.messages > tests/config/messages.txt` writes them.

Proofread the file after a change: every rule must be a sentence, and every fix an instruction.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_zero.__main__ import main
from hf_zero.config import ConfigDict, Views, examine, load_config
from hf_zero.config.errors import ConfigError, Problem
from hf_zero.explain.views import left_aside
from hf_zero.launch import LaunchError
from hf_zero.launch.command_line import parse as parse_launch

FILE = Path(__file__).with_name("messages.txt")
FLAGS = (
    "plan",
    "plan 8b --gpus 8",
    "plan 8b --gpu h1000",
    "plan 8b --gpu gh100",
    "plan 8b --mem 80G",
    "plan 8b --batch-size 4",
    "plan 8b --context 8192",
    "plan 8b --lora-rnk 8",
    "plan 8b --precision int8",
    "plan 8b --seq-length long",
    "plan 8b 9b",
    "plan 8b --fast",
    "report --jsn",
    "report --queue-depth many",
    "universal --from out --output_folder u",
    "zero_to_fp32 out",
    "zero_to_fp32 out weights.bin --dtype fp8",
    "zero_to_fp32 out weights.bin --safetensor-shards",
    "launch --num_gpu 4 train.py",
    "launch --master_port 70000 train.py",
    "launch --include a --num_nodes 2 train.py",
    "launch",
)
LEFT_ASIDE = ("--lr", "--batch_size", "--epochs", "--gradient-clipping", "--my_own_flag")  # ignored by `explain`
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3}}


def _zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 2, **keys}}


def _adamw(**params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, **params}}}


CONFIGS: tuple[Any, ...] = (
    {"train_micro_batch_size_per_gpu": "Auto"},
    {"train_batch_size": "eight"},
    {"train_batch_size": 0},
    {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1},
    {"train_batch_size": True},
    {"max_grad_norm": 1.0},
    {"batch_size": 8},
    {"zero": {"stage": 2}},
    {"gradient_cliping": 1.0},
    {"gradient_clipping": -1},
    {"gradient_clipping": "one"},
    {"zero_optimisation": {"stage": 2}},
    {"stage": 2},
    {"zero_optimization": 2},
    _zero(stage=4),
    _zero(stage="two"),
    _zero(overlap_com=True),
    _zero(reduce_bucket_size=-1),
    _zero(reduce_bucket_size="5e8 bytes"),
    _zero(offload_optimizer="cpu"),
    _zero(offload_optimizer={"device": "disk"}),
    _zero(offload_optimizer={"device": "nvme"}),
    _zero(offload_optimizer={"device": "cpu", "ratio": 2}),
    _zero(offload_optimizer={"device": "cpu", "ratio": "half"}),
    _zero(offload_optimizer={"device": "cpu", "ratio": "auto "}),
    _zero(offload_optimizer={"device": "cpu", "ratio": "auto"}),
    _zero(stage=1, offload_param={"device": "cpu"}),
    _zero(stage=3, stage3_max_live_parameters="many"),
    _zero(stage=3, zero_quantized_weights="yes"),
    {"optimizer": "AdamW"},
    {"optimizer": {"params": {"lr": 1e-3}}},
    {"optimizer": {"type": "AdamWW", "params": {}}},
    {"optimizer": {"type": "AdamW", "params": {"learning_rate": 1e-3}}},
    _adamw(beta1=0.9),
    _adamw(betas=0.9),
    _adamw(betas=[0.9, 1.5]),
    _adamw(lr=-1),
    _adamw(weight_decay="little"),
    _adamw(max_grad_norm=1.0),
    {"scheduler": {"type": "WarmupLRR", "params": {}}},
    {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 10}}},
    {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
    {"fp16": True},
    {"fp16": {"enabled": "maybe"}},
    {"bf16": {"enable": True}},
    {"fp16": {"enabled": True, "loss_scale": -1}},
    {"communication_data_type": "int8"},
    {"sequence_parallel_size": 3},
    {"tensor_parallel": {"autotp_size": 3}},
    {"hf_zero": {"shard_group": "rack"}},
    {"hf_zero": {"tiled_los": True}},
    {"zenflow": {"topk_ratio": 0.1}},
    _zero(zenflow={"topk_ratio": 0.1}),
    {"compile": {"deepcompile": True}},
    {"aio": {"use_gds": True}},
    {"pipeline": {"stages": 2}},
    '{"zero_optimization": {"stage": 2},}}',
    '{"zero_optimization": {"stage": 2}, "zero_optimization": {"stage": 3}}',
    "[1, 2]",
)


def text() -> str:
    """The whole file."""
    return "\n".join([*_of_flags(), *_of_configs(), ""])


def _of_flags() -> Iterator[str]:
    for words in FLAGS:
        yield f"$ hf-zero {words}"
        yield f"    {_refusal(words.split())}\n"
    yield from (f"$ hf-zero explain ds.json {flag} ...\n    note: {left_aside(flag)}\n" for flag in LEFT_ASIDE)


def _refusal(words: list[str]) -> str:
    """The last line of stderr; argparse prints the usage before it."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parse_launch(words[1:]) if words[0] == "launch" else main(words)
    except LaunchError as error:
        return str(error)
    except SystemExit:
        return said.getvalue().rstrip().rpartition("\n")[2].replace("'", "")  # Python's versions quote differently
    raise AssertionError(f"{words} was accepted")


def _of_configs() -> Iterator[str]:
    for config in CONFIGS:
        yield f"{config}"
        yield from _findings(config)
        yield ""


VIEWS = Views(world_size=2)


def with_batch(config: Any) -> ConfigDict:
    """One of CONFIGS as it is read, with a batch size for two ranks if it has none."""
    loaded = copy.deepcopy(load_config(config))
    if not {"batch_size", "train_batch_size", "train_micro_batch_size_per_gpu"} & loaded.keys():
        loaded["train_batch_size"] = 6
    return loaded


def _findings(config: Any) -> Iterator[str]:
    try:
        found = examine(with_batch(config), VIEWS, complete=False)
        problems: tuple[Problem, ...] = tuple(found.problems)
        remarks = tuple(str(remark) for remark in found.warnings)
    except ConfigError as error:
        problems, remarks = tuple(error.problems), ()
    yield from ("    " + str(problem).replace("\n", "\n    ") for problem in problems)
    yield from (f"    warning: {remark}" for remark in remarks)
    if not problems and not remarks:
        yield "    nothing is wrong with it"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    sys.stdout.write(text())

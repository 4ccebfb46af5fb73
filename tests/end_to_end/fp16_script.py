"""A plain fp16 script with deepspeed.initialize whose inputs overflow where a string of letters says so.

python fp16_script.py given.json answer.json        (given: config, script; answer: one entry per update)
"""

from __future__ import annotations

import json
import os
import sys

import torch
from torch import nn


def run(config: dict, script: str) -> list[list[float]]:
    """[scale after the update, skipped, global steps, learning rate, norm] per letter; x: an infinite gradient."""
    import deepspeed

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 3, bias=False), nn.Linear(3, 2, bias=False))
    engine, optimizer, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    seen = []
    for letter in script:
        x = torch.ones(2, 6, dtype=torch.float16)
        if letter == "x":
            x[0, 0] = float("inf")
        engine.backward(engine(x).float().mean())
        engine.step()
        norm = engine.get_global_grad_norm()
        rate = round(engine.get_lr()[0], 9)
        counts = [engine.skipped_steps, engine.global_steps]
        seen.append([optimizer.cur_scale, *counts, rate, None if letter == "x" or norm is None else float(norm)])
    return seen


def main() -> None:
    """Processes every run in the file."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ[name] = value
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    if os.environ.get("HF_ZERO") == "0":
        # Real DeepSpeed rejects fp16 on a CPU, although torch supports it.
        type(get_accelerator()).is_fp16_supported = lambda self: True
        type(get_accelerator()).supported_dtypes = lambda self: [torch.float, torch.half, torch.bfloat16]
    with open(sys.argv[1]) as file:
        questions = json.load(file)
    deepspeed.init_distributed("gloo", distributed_port=int(questions["port"]))
    answers = [run(config, script) for config, script in questions["runs"]]
    with open(sys.argv[2], "w") as file:
        json.dump(answers, file)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

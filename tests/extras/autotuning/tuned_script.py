"""A script that trains a linear model with an engine; `--wall N`: micro-batches above N run out of memory."""

from __future__ import annotations

import argparse
import json
import time

import torch

import hf_zero

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank")
parser.add_argument("--deepspeed", required=True)
parser.add_argument("--per_device_train_batch_size", type=int, default=1)
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--wall", type=int, default=2)
arguments = parser.parse_args()
with open(arguments.deepspeed) as file:
    config = json.load(file)
micro = arguments.per_device_train_batch_size
config["train_micro_batch_size_per_gpu"] = micro
model = torch.nn.Linear(8, 1)
engine, *_ = hf_zero.initialize(model=model, model_parameters=model.parameters(), config=config)
if micro > arguments.wall:
    raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
for _ in range(arguments.steps):
    time.sleep(0.01)
    engine.backward(engine(torch.ones(micro, 8)).mean())
    engine.step()
if engine.global_rank == 0:
    with open("trained.json", "w") as file:
        json.dump({"micro": micro, "steps": engine.global_steps}, file)

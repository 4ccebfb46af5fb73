"""One rank of a trial of `plan --measure`: trains a model with random weights on random tokens for a few updates."""

from __future__ import annotations

import argparse
import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_zero.api.zero_init import Init
from hf_zero.comm import init_distributed
from hf_zero.integration.engine.engine import initialize
from hf_zero.planning.model import build_model, config_of


def main() -> None:
    """Train until the trial ends the process (hf_zero.extras.autotuning.measure)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deepspeed", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--updates", type=int, required=True)
    parser.add_argument("--lora-rank", type=int, default=0)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--local_rank")
    arguments = parser.parse_args()
    config: dict[str, Any] = json.loads(Path(arguments.deepspeed).read_text(encoding="utf-8"))
    init_distributed()
    transformers.set_seed(0)
    # Tensor parallelism cuts whole weights, so that parameters must not be sharded before.
    shards = config["zero_optimization"]["stage"] == 3 and "tensor_parallel" not in config
    around: AbstractContextManager[Any] = Init(config_dict_or_path=config) if shards else nullcontext()
    with around:
        model: Any = build_model(config_of(arguments.model), arguments.lora_rank)
    if arguments.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=config)
    vocabulary = model.get_input_embeddings().num_embeddings
    # All ranks draw the same tokens, because ranks of a tensor or sequence group share their samples.
    shape = config["train_micro_batch_size_per_gpu"], -(-arguments.length // config.get("sequence_parallel_size", 1))
    for _ in range(arguments.updates * config["gradient_accumulation_steps"]):
        tokens = torch.randint(0, vocabulary, shape, device=engine.device)
        engine.backward(engine(input_ids=tokens, labels=tokens, use_cache=False).loss)
        engine.step()


if __name__ == "__main__":
    main()

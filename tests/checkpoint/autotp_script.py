"""A script for any deepspeed: trains a tiny model of transformers under AutoTP, saves, loads, and writes its results.

    torchrun --nproc-per-node 2 autotp_script.py '{"kind": "uneven", "tensor": 2, "stage": 1, "dtype": "fp32", ...}'

Keys: those of `interchange_script.py`, `kind` (of the model) and `tensor` (ranks per tensor group). All ranks train on
the same batches, so results do not depend on the number of ranks.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import deepspeed
import torch

# Beside this script: DeepSpeed's interpreter does not find the package `tests`.
from interchange_script import config, train  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config, PreTrainedConfig

VOCABULARY, ROWS, LENGTH = 67, 2, 9  # the latter two: of a batch


def config_of(kind: str) -> PreTrainedConfig:
    """Tiny models. In all but "even", 2 ranks get unequal parts: in "uneven" of heads and vocabulary, with biases; in
    "fused" of gate and up, which are one matrix; in "tied" of the embedding, which is the head. "stored" is as small as
    possible, uneven, and partly frozen."""
    shape: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 50, "num_hidden_layers": 2}
    shape["num_attention_heads"] = 6
    common: dict[str, Any] = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "use_cache": False}
    if kind == "fused":
        return Phi3Config(**(shape | {"intermediate_size": 51}), **common, num_key_value_heads=3, pad_token_id=0)
    if kind == "stored":
        shape = {"hidden_size": 6, "intermediate_size": 7, "num_hidden_layers": 1, "num_attention_heads": 3}
        return LlamaConfig(**(shape | common | {"vocab_size": 11}), num_key_value_heads=3, attention_bias=True)
    if kind == "uneven":
        return LlamaConfig(**shape, **common, num_key_value_heads=3, attention_bias=True)
    common |= {"vocab_size": 68 if kind == "even" else VOCABULARY, "tie_word_embeddings": kind == "tied"}
    shape |= {"intermediate_size": 48, "num_attention_heads": 4}
    return LlamaConfig(**shape, **common, num_key_value_heads=2)


def main() -> None:
    """Run the case with a model of transformers."""
    case = json.loads(sys.argv[1])
    torch.manual_seed(case.get("seed", 0))
    model = AutoModelForCausalLM.from_config(config_of(case["kind"]), attn_implementation="eager").train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)  # biases and norms differ, too
    if case["kind"] == "stored":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("v_proj" not in name)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    settings = config(case)
    settings["optimizer"]["params"]["weight_decay"] = 0.1
    if case["tensor"] > 1:
        settings["tensor_parallel"] = {"autotp_size": case["tensor"], **settings.get("tensor_parallel", {})}
    engine: Any = deepspeed.initialize(model=model, model_parameters=trained, config=settings)[0]

    def loss_of() -> torch.Tensor:
        tokens = torch.randint(1, model.config.vocab_size, (ROWS, LENGTH))
        loss: torch.Tensor = engine(input_ids=tokens, labels=tokens).loss
        return loss

    train(engine, case, loss_of)


if __name__ == "__main__":
    main()

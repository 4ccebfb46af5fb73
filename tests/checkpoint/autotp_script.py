"""A script for any deepspeed: trains a tiny model of transformers under AutoTP, saves, loads, and writes its results.

    torchrun --nproc-per-node 2 autotp_script.py '{"kind": "uneven", "tensor": 2, "stage": 1, "dtype": "fp32", ...}'

Keys: those of `interchange_script.py`, `kind` (of the model) and `tensor` (ranks per tensor group). All ranks train on
the same batches, so results do not depend on the number of ranks.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
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


def config(case: dict[str, Any]) -> dict[str, Any]:
    """The ds.json of the case."""
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": case["stage"], "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 5}},
    }
    if case["tensor"] > 1:
        settings["tensor_parallel"] = {"autotp_size": case["tensor"]}
    if case["dtype"] == "bf16":
        settings["bf16"] = {"enabled": True}
    for key, section in case.get("config", {}).items():
        settings[key] = {**settings.get(key, {}), **section}
    return settings


def main() -> None:
    """Run the case; rank 0 writes losses and norms."""
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
    engine: Any = deepspeed.initialize(model=model, model_parameters=trained, config=config(case))[0]
    client_state = None
    if case.get("load"):
        path, client_state = engine.load_checkpoint(case["load"])
        assert path is not None, "nothing was loaded"
    losses, norms = [], []
    for step in range(*case["steps"]):
        torch.manual_seed(100 + step)
        tokens = torch.randint(1, model.config.vocab_size, (ROWS, LENGTH))
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(float(engine.get_global_grad_norm()))
        if case.get("save") and step + 1 == case["save_after"]:
            engine.save_checkpoint(case["save"], client_state={"note": ["hello", 1]})
    if engine.global_rank == 0:
        note = None if client_state is None else client_state.get("note")
        figures = {"losses": losses, "norms": norms, "note": note, "steps": engine.global_steps, "lr": engine.get_lr()}
        Path(case["out"]).write_text(json.dumps(figures))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

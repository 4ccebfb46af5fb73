"""Tied weights are saved once, at every stage and by every method, under the names that plain saving keeps.

Below stage 3 `accelerator.get_state_dict` copied tensors one by one, which lost the information about shared ones: a T5
saved by Trainer, `accelerator.save_model` or `save_pretrained` had 50 tensors instead of 47, with its embedding four
times.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
)

import hf_zero

hf_zero.install()

from accelerate import Accelerator  # noqa: E402

from tests.api.test_several_engines import kinds  # noqa: E402
from tests.integration.flows import accelerator, arguments, clean  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

RANKS = 2
Names = dict[str, set[str]]


def t5() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=64, decoder_start_token_id=0, **sizes))


def llama() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, tie_word_embeddings=True, **sizes))


MODELS = {"t5": t5, "llama": llama}


def names_in(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


def plain_names(folder: Path) -> Names:
    """Names saved without any engine."""
    found = {}
    for kind, make in MODELS.items():
        make().save_pretrained(folder / f"{kind}-pretrained")
        clean()
        Accelerator(cpu=True).save_model(make(), folder / f"{kind}-accelerate")
        clean()
        for way in ("pretrained", "accelerate"):
            found[f"{kind}-{way}"] = names_in(folder / f"{kind}-{way}")
    return found


def rows() -> list[dict[str, Any]]:
    tokens = torch.arange(8)
    return [{"input_ids": tokens + shift, "labels": tokens + shift} for shift in range(4)]


def save_in_every_way(rank: int, folder: Path, stage: int, limits: dict[str, int]) -> None:
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True, **limits},
    }
    for kind, make in MODELS.items():
        clean()
        one = accelerator({**config, "train_micro_batch_size_per_gpu": 1})
        model = make()
        engine, _ = one.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        one.save_model(engine, folder / f"{kind}-accelerate")
        state = one.get_state_dict(engine)
        if rank == 0:
            one.unwrap_model(engine).save_pretrained(folder / f"{kind}-pretrained", state_dict=state)
        engine.save_checkpoint(str(folder / f"{kind}-checkpoint"))
        engine.destroy()
        clean()
        options = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 2}
        run = Trainer(model=make(), args=arguments(folder / kind, config, **options), train_dataset=rows())
        run.train()
        run.save_model(str(folder / f"{kind}-trainer"))


@kinds("2", "3-limits-0")
def test_files_have_the_names_of_plain_saving(stage: int, limits: dict[str, int], tmp_path: Path) -> None:
    plain = plain_names(tmp_path / "plain")
    assert (len(plain["t5-pretrained"]), len(t5().state_dict())) == (47, 50)
    run_ranks(save_in_every_way, RANKS, tmp_path, stage, limits, init=False)
    for kind, make in MODELS.items():
        assert names_in(tmp_path / f"{kind}-accelerate") == plain[f"{kind}-accelerate"]
        for place in (f"{kind}-pretrained", f"{kind}-trainer", f"{kind}/checkpoint-1"):
            assert names_in(tmp_path / place) == plain[f"{kind}-pretrained"], place
        if stage < 3:
            check_engine_checkpoint(tmp_path / f"{kind}-checkpoint", make())


def check_engine_checkpoint(folder: Path, model: nn.Module) -> None:
    """All names, as in a state dict, with one storage for tied ones."""
    (path,) = folder.rglob("mp_rank_00_model_states.pt")
    module = torch.load(path, weights_only=False)["module"]
    assert set(module) == set(model.state_dict())
    storages = {value.untyped_storage().data_ptr() for value in module.values()}
    assert len(storages) == len({value.data_ptr() for value in model.state_dict().values()})

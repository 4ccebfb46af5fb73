"""QLoRA runs, and their table in docs/trl.md: quantized base x stage x adapter, on two ranks compared with one process
without an engine.

    python -m tests.trl.quantised       runs everything (minutes) and writes the table; needs bitsandbytes and torchao

Weights are quantized from fp32 and computed with in fp32, so that runs can be compared.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.launch import alone_is_not_distributed
from tests.support.ranks import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "trl.md"
HEAD = "| base | adapter | stage 0 | stage 1 | stage 2 | stage 3 |\n|---|---|---|---|---|---|\n"
STAGES = (0, 1, 2, 3)
RANKS, STEPS, GLOBAL_BATCH, WIDTH = 2, 4, 4, 64
TOLERANCE = 1e-5
ADAPTERS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "DoRA": {"use_dora": True},
    "LoRA, `lm_head` trained whole": {"modules_to_save": ["lm_head"]},
}


def _four_bit(**options: Any) -> Callable[[], Any]:
    def make() -> Any:
        from transformers import BitsAndBytesConfig

        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32, **options)

    return make


def _eight_bit() -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_8bit=True)


def _torchao() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


BASES: dict[str, Callable[[], Any]] = {
    "bitsandbytes nf4": _four_bit(bnb_4bit_quant_type="nf4"),
    "bitsandbytes nf4, scales quantized too": _four_bit(bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    "bitsandbytes nf4, `bnb_4bit_quant_storage` bf16": _four_bit(
        bnb_4bit_quant_type="nf4", bnb_4bit_quant_storage=torch.bfloat16
    ),
    "bitsandbytes fp4": _four_bit(bnb_4bit_quant_type="fp4"),
    "bitsandbytes 8-bit": _eight_bit,
    "torchao int8": _torchao,
}
CASES = [
    ("bitsandbytes nf4", "LoRA"),
    ("bitsandbytes nf4, scales quantized too", "LoRA"),
    ("bitsandbytes nf4, `bnb_4bit_quant_storage` bf16", "LoRA"),
    ("bitsandbytes fp4", "LoRA"),
    ("bitsandbytes 8-bit", "LoRA"),
    ("bitsandbytes nf4", "DoRA"),
]
WRAPPED = ("torchao int8",)


@dataclass(frozen=True)
class Outcome:
    """The results of a training."""

    losses: list[float]
    evaluation: float
    adapter: dict[str, Tensor]
    base_is_kept: bool


def train(rank: int, base: str, adapter: str, stage: int | None, folder: str) -> Any:
    """One rank of a Trainer run."""
    alone_is_not_distributed()
    import hf_zero

    hf_zero.install()
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    processes = int(os.environ.get("WORLD_SIZE", "1"))
    arguments = TrainingArguments(
        f"{folder}/out-{stage}",
        per_device_train_batch_size=GLOBAL_BATCH // processes,
        per_device_eval_batch_size=GLOBAL_BATCH // processes,
        max_steps=STEPS,
        learning_rate=1e-2,
        adam_epsilon=1e-6,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        eval_strategy="steps",
        eval_steps=2,
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
        deepspeed=None if stage is None else _config(stage),
    )
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/model", quantization_config=BASES[base](), dtype="float32")
    torch.manual_seed(0)
    options = {"r": 4, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM", **ADAPTERS[adapter]}
    model = get_peft_model(model, LoraConfig(**options))
    for module in model.modules():
        if stage is None and hasattr(module, "support_avx512bf16_for_cpu"):
            # Evaluation without an engine repacks weights, and training continues with wrong gradients.
            module.support_avx512bf16_for_cpu = False
    before = _quantised(model)
    rows = rows_to_train()
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:8])
    trainer.train()
    trainer.save_model()
    log = trainer.state.log_history
    after = trainer.accelerator.get_state_dict(trainer.model_wrapped) if stage is not None else _quantised(model)
    return {
        "losses": [entry["loss"] for entry in log if "loss" in entry],
        "evaluation": [entry["eval_loss"] for entry in log if "eval_loss" in entry][-1],
        "base_is_kept": after is None or all(_same_bits(after[name], before[name]) for name in before if after),
    }


def _same_bits(ours: Tensor, theirs: Tensor) -> bool:
    """Bitwise equality, also if codes, read as floating-point numbers, are NaN."""
    return torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))


def _quantised(model: Any) -> dict[str, Tensor]:
    """Copies of the quantized weights. Collective at stage 3, which has sharded them."""
    from hf_zero.api.gathered_parameters import GatheredParameters

    kinds = ("Params4bit", "Int8Params")
    quantised = {name: p for name, p in model.named_parameters() if type(p).__name__ in kinds}
    with GatheredParameters(quantised.values()):
        return {name: p.detach().clone() for name, p in quantised.items()}


def _config(stage: int) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    return {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "zero_optimization": zero}


def rows_to_train() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 96, (12,), generator=generator) for _ in range(GLOBAL_BATCH * STEPS)]
    return [{"input_ids": row, "labels": row} for row in rows]


def write_model(folder: Path, **more: Any) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape = LlamaConfig(vocab_size=96, num_key_value_heads=4, **{**sizes, **more})
    LlamaForCausalLM(shape).save_pretrained(folder / "model")


@cache
def run(base: str, adapter: str, stage: int | None) -> Outcome:
    """A run on two ranks at `stage`; for None, on one rank without an engine."""
    with tempfile.TemporaryDirectory(prefix="qlora-") as name:
        write_model(Path(name))
        ranks = run_ranks(train, 1 if stage is None else RANKS, base, adapter, stage, name, init=False)
        saved = load_file(Path(name) / f"out-{stage}" / "adapter_model.safetensors")
    kept = all(rank["base_is_kept"] for rank in ranks)
    return Outcome(ranks[0]["losses"], ranks[0]["evaluation"], saved, kept)


def differences(found: Outcome, expected: Outcome) -> list[str]:
    """Differences from the other run, relative to TOLERANCE."""
    pairs = {
        "losses": (torch.tensor(found.losses), torch.tensor(expected.losses)),
        "evaluation": (torch.tensor(found.evaluation), torch.tensor(expected.evaluation)),
        **{name: (values, expected.adapter[name]) for name, values in found.adapter.items()},
    }
    wrong = [] if found.adapter.keys() == expected.adapter.keys() else ["names of the adapter's weights"]
    wrong += [
        name
        for name, (ours, theirs) in pairs.items()
        if not (ours.double() - theirs).norm() <= TOLERANCE * theirs.double().norm()
    ]
    return wrong + ([] if found.base_is_kept else ["bits of the base"])


def cell(base: str, adapter: str, stage: int) -> str:
    """The table's cell for one run."""
    if base in WRAPPED and stage == 3:
        return "refused"
    wrong = differences(run(base, adapter, stage), run(base, adapter, None))
    if wrong:
        return f"differs: {', '.join(wrong[:3])}"
    return "same"


def rows_of_page() -> dict[tuple[str, str], list[str]]:
    """(base, adapter) -> cells in docs/trl.md."""
    body = PAGE.read_text(encoding="utf-8").split(HEAD)[1].split("\n\n")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in body.strip().splitlines()]
    return {(line[0], line[1]): line[2:] for line in lines}


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    lines = []
    for base, adapter in CASES:
        cells = [cell(base, adapter, stage) for stage in STAGES]
        lines.append(f"| {' | '.join([base, adapter, *cells])} |")
        print(lines[-1], flush=True)
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(HEAD)
    after = rest.partition("\n\n")[2]
    PAGE.write_text(f"{before}{HEAD}" + "\n".join(lines) + f"\n\n{after}", encoding="utf-8")


if __name__ == "__main__":
    main()

"""TRL's trainers used as in its documentation, without mentioning an engine.

torchrun --nproc-per-node 2 trl_script.py sft --model_name_or_path M --folder F --output_dir O [--deepspeed ds.json]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trl
from datasets import load_dataset
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import ModelConfig, TrlParser, get_peft_config

# Trainers and configs are looked up when they are used: older versions of TRL do not have all of them.
METHODS = {
    "sft": "SFT",
    "dpo": "DPO",
    "kto": "KTO",
    "reward": "Reward",
    "grpo": "GRPO",
    "rloo": "RLOO",
    "distillation": "Distillation",
}


@dataclass
class Script:
    """Options of this script in addition to TRL's."""

    folder: str = field(metadata={"help": "folder with train.json and eval.json"})
    reference: bool = field(default=False, metadata={"help": "DPO, KTO: load a reference model and pass it"})
    build_first: bool = field(default=False, metadata={"help": "pass a model instead of its path"})
    wrap_first: bool = field(default=False, metadata={"help": "pass a PeftModel instead of a peft_config"})
    cut: bool = field(
        default=False,
        metadata={"help": "for ranks that hold parts, which model.save_pretrained would write: leave it out"},
    )
    reward_model: str | None = field(default=None, metadata={"help": "GRPO, RLOO: folder of a reward model"})


def variety(completions: list[str], **columns: Any) -> list[float]:
    """A reward: the number of different characters."""
    return [float(len(set(completion))) for completion in completions]


def build(method: str, script: Script, args: Any, model: ModelConfig) -> Any:
    """The trainer with the arguments of its method."""
    files = {name: str(Path(script.folder) / f"{name}.json") for name in ("train", "eval")}
    data = load_dataset("json", data_files=files, cache_dir=str(Path(args.output_dir) / "cache"))
    path = model.model_name_or_path
    shared: dict[str, Any] = {
        "model": AutoModelForCausalLM.from_pretrained(path) if script.build_first else path,
        "args": args,
        "train_dataset": data["train"],
        "eval_dataset": data["eval"],
        "processing_class": AutoTokenizer.from_pretrained(path),
        "peft_config": get_peft_config(model),
    }
    if method in ("grpo", "rloo"):
        shared["reward_funcs"] = [variety, *([script.reward_model] if script.reward_model else [])]
    if method == "distillation":
        shared["teacher_model"] = str(Path(script.folder) / "teacher")
    if script.wrap_first:
        shared["model"] = get_peft_model(AutoModelForCausalLM.from_pretrained(path), shared.pop("peft_config"))
    if script.reference:
        shared["ref_model"] = AutoModelForCausalLM.from_pretrained(path)
    return getattr(trl, f"{METHODS[method]}Trainer")(**shared)


def save(trainer: Any, folder: Path, *, cut: bool) -> None:
    """Saves in the two ways that users know, in addition to training's checkpoints."""
    trainer.save_model(str(folder / "saved"))
    if not cut:
        trainer.model.save_pretrained(str(folder / "pretrained"), is_main_process=trainer.is_world_process_zero())


def main(words: Sequence[str]) -> None:
    """Train, evaluate, save, and write the results."""
    method, *options = words
    parser = TrlParser((Script, getattr(trl, f"{METHODS[method]}Config"), ModelConfig))
    script, args, model = parser.parse_args_and_config(options)
    trainer = build(method, script, args, model)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    numbers = {"log": list(trainer.state.log_history), "eval": trainer.evaluate()}
    folder = Path(args.output_dir)
    save(trainer, folder, cut=script.cut)
    if trainer.is_world_process_zero():
        (folder / "numbers.json").write_text(json.dumps(numbers))


if __name__ == "__main__":
    main(sys.argv[1:])

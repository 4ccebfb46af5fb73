"""Fine-tune LoRA adapters with TRL's SFTTrainer.

    make demo                                   # trains a small model into out/demo; any causal model works
    torchrun --nproc-per-node 2 examples/lora_sft.py --model_name_or_path out/demo --output_dir out/lora \\
        --deepspeed configs/zero2_bf16.json --max_steps 40 --save_only_model

The adapters load with peft.AutoPeftModelForCausalLM.from_pretrained("out/lora"). All fields of SFTConfig and
ModelConfig are command-line options: --use_dora, --lora_modules_to_save lm_head, ...
"""

from __future__ import annotations

from dataclasses import dataclass, field

from clm_data import standard_library_files
from datasets import Dataset
from trl import ModelConfig, SFTConfig, SFTTrainer, TrlParser, get_peft_config


@dataclass
class Data:
    """Training data."""

    num_texts: int = field(default=400, metadata={"help": "how many pieces of Python's standard library"})
    num_characters: int = field(default=400, metadata={"help": "length of a piece"})


def pieces(data: Data) -> Dataset:
    """The first characters of each source file: mostly module docstrings."""
    files = standard_library_files()[: data.num_texts]
    texts = []
    for file in files:
        with open(file, encoding="utf-8", errors="ignore") as source:
            texts.append(source.read(data.num_characters))
    return Dataset.from_dict({"text": texts})


def main() -> None:
    """Train, evaluate, save."""
    data, args, model = TrlParser((Data, SFTConfig, ModelConfig)).parse_args_and_config()
    model.use_peft = True
    split = pieces(data).train_test_split(test_size=0.1, seed=0)
    trainer = SFTTrainer(
        model=model.model_name_or_path,
        args=args,
        train_dataset=split["train"],
        eval_dataset=split["test"],
        peft_config=get_peft_config(model),
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(f"eval loss {before:.4f} before, {after:.4f} after; adapters in {args.output_dir}")
    trainer.end()


if __name__ == "__main__":
    main()

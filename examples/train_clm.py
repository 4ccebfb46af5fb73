"""Train a causal language model on text with the Hugging Face Trainer.

Without further arguments it trains a small Llama-style model on the sources of Python's standard library:

    python examples/train_clm.py --do_train --do_eval --output_dir out/clm --max_steps 200

Every field of `TrainingArguments` is a command-line option, including `--deepspeed ds.json`. `--resume_from_checkpoint`
takes a folder or `last`: the newest checkpoint of the output folder, or a fresh start if there is none.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from clm_data import (
    cached_tokenizer,
    expand_globs,
    hold_out,
    load_documents,
    standard_library_files,
    token_blocks,
)
from datasets import Dataset, DatasetDict
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

logger = logging.getLogger("train_clm")


@dataclass
class ModelArguments:
    """The model to train: an existing one, or a new Llama-style one of the given size."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Hub name or local folder of a model. Default: a new Llama-style model."}
    )
    tokenizer_name: str | None = field(
        default=None, metadata={"help": "Hub name or local folder of a tokenizer. Default: the model's own."}
    )
    dtype: str = field(
        default="auto",
        metadata={"help": "Dtype in which an existing model is loaded.", "choices": ["auto", "float32", "bfloat16"]},
    )
    attn_implementation: str | None = field(
        default=None, metadata={"help": "Attention implementation: eager, sdpa, flash_attention_2..."}
    )
    vocab_size: int = field(default=4096, metadata={"help": "New model: vocabulary size of its tokenizer."})
    hidden_size: int = field(default=384, metadata={"help": "New model: width."})
    intermediate_size: int | None = field(
        default=None, metadata={"help": "New model: width of the MLP. Default: 8/3 of hidden_size."}
    )
    num_layers: int = field(default=4, metadata={"help": "New model: number of transformer blocks."})
    num_heads: int = field(default=6, metadata={"help": "New model: attention heads per block."})

    def __post_init__(self) -> None:
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"--hidden_size {self.hidden_size} must be a multiple of twice --num_heads {self.num_heads}: "
                "every head needs the same, even width"
            )
        if self.vocab_size < 512:
            raise ValueError(f"--vocab_size {self.vocab_size} is too small: use at least 512, as bytes take 256")


@dataclass
class DataArguments:
    """The text to train on and how it is split."""

    dataset_name: str | None = field(default=None, metadata={"help": "Name of a Hub dataset with a text column."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "The dataset's config, if it has several."})
    train_files: list[str] | None = field(
        default=None, metadata={"help": "Text files or globs. Default: the Python standard library's sources."}
    )
    block_size: int = field(default=256, metadata={"help": "Tokens per training example."})
    validation_fraction: float = field(
        default=0.05, metadata={"help": "Share of held-out blocks, if the dataset has no validation split."}
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Maximum number of training blocks."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Maximum number of evaluation blocks."})
    preprocessing_num_workers: int | None = field(default=None, metadata={"help": "Number of tokenizing processes."})
    tokenizer_cache: str = field(
        default=os.path.join(os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface"), "train_clm"),
        metadata={"help": "Cache folder of trained tokenizers."},
    )
    document_seed: int = field(default=42, metadata={"help": "Seed of the document order and so of the split."})

    def __post_init__(self) -> None:
        if self.dataset_name is not None and self.train_files is not None:
            raise ValueError("--dataset_name and --train_files exclude each other: name one source of text")
        if not 0 < self.validation_fraction < 1:
            raise ValueError(f"--validation_fraction {self.validation_fraction} must lie between 0 and 1")
        if self.block_size < 2:
            raise ValueError(f"--block_size {self.block_size} must be at least 2: a token and the one after it")


def parse(arguments: list[str] | None = None) -> tuple[ModelArguments, DataArguments, TrainingArguments]:
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))  # type: ignore[arg-type]
    model_args, data_args, training_args = parser.parse_args_into_dataclasses(arguments)
    if not training_args.do_train and not training_args.do_eval:
        raise ValueError("nothing to do: pass --do_train, --do_eval or both")
    return model_args, data_args, training_args


def set_up_logging(training_args: TrainingArguments) -> None:
    """Logs from this script on the main process only; the libraries follow --log_level."""
    logging.basicConfig(
        format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S", handlers=[logging.StreamHandler(sys.stdout)]
    )
    logger.setLevel(logging.INFO if training_args.process_index == 0 else logging.WARNING)
    transformers.logging.set_verbosity(training_args.get_process_log_level())


def load_text(data_args: DataArguments) -> DatasetDict:
    """All documents; those of the training split in a random but fixed order."""
    files = expand_globs(data_args.train_files) if data_args.train_files else standard_library_files()
    documents = load_documents(data_args.dataset_name, data_args.dataset_config_name, files)
    documents["train"] = documents["train"].shuffle(seed=data_args.document_seed)
    return documents


def load_tokenizer(model_args: ModelArguments, data_args: DataArguments, documents: Dataset) -> PreTrainedTokenizerBase:
    """The given tokenizer, the model's own, or one trained on these documents."""
    name = model_args.tokenizer_name or model_args.model_name_or_path
    if name is None:
        return cached_tokenizer(documents, model_args.vocab_size, data_args.tokenizer_cache)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name)
    return tokenizer


def load_blocks(data_args: DataArguments, documents: DatasetDict, tokenizer: PreTrainedTokenizerBase) -> DatasetDict:
    """Splits `train` and `validation` of packed blocks, limited to the requested size."""
    parts = {
        split: token_blocks(documents[split], tokenizer, data_args.block_size, data_args.preprocessing_num_workers)
        for split in ("train", "validation")
        if split in documents
    }
    blocks = DatasetDict(parts) if "validation" in parts else hold_out(parts["train"], data_args.validation_fraction)
    limits = {"train": data_args.max_train_samples, "validation": data_args.max_eval_samples}
    for split, limit in limits.items():
        if limit is not None and limit < len(blocks[split]):
            # Evenly spaced, because consecutive blocks would come from very few documents.
            blocks[split] = blocks[split].select([k * len(blocks[split]) // limit for k in range(limit)])
    return blocks


def load_model(model_args: ModelArguments, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Loads the given model and enlarges its embeddings to the tokenizer's vocabulary if necessary."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        str(model_args.model_name_or_path), dtype=model_args.dtype, attn_implementation=model_args.attn_implementation
    )
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:  # type: ignore[index]
        model.resize_token_embeddings(len(tokenizer))
    return model


def new_model(model_args: ModelArguments, tokenizer: PreTrainedTokenizerBase, block_size: int) -> PreTrainedModel:
    """A Llama-style model of the given size with random weights."""
    # Multiples of 64 are efficient on all kinds of hardware.
    inner = model_args.intermediate_size or 64 * math.ceil(model_args.hidden_size * 8 / 3 / 64)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=model_args.hidden_size,
            intermediate_size=inner,
            num_hidden_layers=model_args.num_layers,
            num_attention_heads=model_args.num_heads,
            num_key_value_heads=model_args.num_heads,
            max_position_embeddings=max(1024, block_size),
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            attn_implementation=model_args.attn_implementation,  # type: ignore[call-arg]
        )
    )
    # With the default of 0.02 the first layers' noise hides a token; with 1.0 the residual stream starts with the token
    # itself. This lowers the loss by half a nat after 250 steps of a small model.
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=1.0)  # type: ignore[arg-type]
    return model


def checkpoint_to_resume(training_args: TrainingArguments) -> str | None:
    """The folder of `--resume_from_checkpoint`; for `last`, the newest checkpoint of the output folder, if any.

    With `last` the same command starts and restarts a job, as launchers do after losing a machine.
    """
    if training_args.resume_from_checkpoint != "last":
        return training_args.resume_from_checkpoint
    output_dir = str(training_args.output_dir)
    found: str | None = get_last_checkpoint(output_dir) if os.path.isdir(output_dir) else None
    if found is not None and not os.path.exists(os.path.join(found, TRAINER_STATE_NAME)):
        found = None  # the job ended while saving its first checkpoint
    logger.info("resuming from %s", found or "no checkpoint: there is none yet")
    return found


def train(trainer: Trainer, resume_from_checkpoint: str | None) -> None:
    result = trainer.train(resume_from_checkpoint=resume_from_checkpoint)
    trainer.save_model()  # also saves the tokenizer
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()


def evaluate(trainer: Trainer) -> None:
    metrics = trainer.evaluate()
    loss = metrics["eval_loss"]
    metrics["perplexity"] = math.exp(loss) if loss < 700 else math.inf
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


def main(arguments: list[str] | None = None) -> None:
    run(*parse(arguments))
    # Trainer creates the process group but does not destroy it; an open group can abort Python at exit.
    gc.collect()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def run(
    model_args: ModelArguments,
    data_args: DataArguments,
    training_args: TrainingArguments,
    callbacks: list[TrainerCallback] | None = None,
) -> None:
    set_up_logging(training_args)
    set_seed(training_args.seed)

    # The main process works and fills the caches; the others wait and read them.
    with training_args.main_process_first(desc="tokenizer and blocks"):
        documents = load_text(data_args)
        tokenizer = load_tokenizer(model_args, data_args, documents["train"])
        blocks = load_blocks(data_args, documents, tokenizer)
    num_tokens = {split: len(blocks[split]) * data_args.block_size for split in blocks}
    logger.info("text: %d documents, tokens %s, vocabulary %d", len(documents["train"]), num_tokens, len(tokenizer))

    if model_args.model_name_or_path is not None:
        model = load_model(model_args, tokenizer)
    else:
        model = new_model(model_args, tokenizer, data_args.block_size)
    logger.info("model: %s, %.2fM parameters", type(model).__name__, model.num_parameters() / 1e6)

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=blocks["train"] if training_args.do_train else None,
        eval_dataset=blocks["validation"],
        processing_class=tokenizer,
        data_collator=default_data_collator,
        callbacks=callbacks,
    )
    if training_args.do_train:
        logger.info("training on %d process(es), %s", training_args.world_size, training_args.device)
        train(trainer, checkpoint_to_resume(training_args))
    if training_args.do_eval:
        evaluate(trainer)
    if trainer.is_world_process_zero():
        logger.info("saved under %s", Path(str(training_args.output_dir)).resolve())


if __name__ == "__main__":
    main()

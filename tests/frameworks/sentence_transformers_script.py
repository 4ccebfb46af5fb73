"""An embedding model trained as described in the documentation of sentence-transformers.

sentence_transformers_script.py MODEL TEXTS.json [flags of SentenceTransformerTrainingArguments]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from datasets import Dataset
from deepspeed.zero import GatheredParameters
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import HfArgumentParser


def main() -> None:
    (args,) = HfArgumentParser(SentenceTransformerTrainingArguments).parse_args_into_dataclasses(sys.argv[3:])
    encoder = Transformer(sys.argv[1], max_seq_length=32)
    model = SentenceTransformer(modules=[encoder, Pooling(encoder.get_embedding_dimension())], device="cpu")
    texts = json.loads(Path(sys.argv[2]).read_text())
    rows = Dataset.from_list([{"anchor": row["instruction"], "positive": row["output"]} for row in texts])
    trainer = SentenceTransformerTrainer(
        model=model, args=args, train_dataset=rows, eval_dataset=rows, loss=MultipleNegativesRankingLoss(model)
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    numbers = {"eval_loss": trainer.evaluate()["eval_loss"]}
    numbers["losses"] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    with GatheredParameters(list(model.parameters())):
        if trainer.is_world_process_zero():
            model.save_pretrained(f"{args.output_dir}/saved")
    if trainer.is_world_process_zero():
        Path(args.output_dir, "numbers.json").write_text(json.dumps(numbers))


if __name__ == "__main__":
    main()

"""The demo's report after training: the loss history and curve, and text from the saved model."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # writes to a file, needs no display

import torch
from datasets import Dataset
from matplotlib import pyplot
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

Curve = list[tuple[int, float]]


@dataclass(frozen=True)
class History:
    """Trainer's log: (step, loss) of training and of held-out text, and the training time."""

    train: Curve
    held_out: Curve
    num_steps: int
    train_seconds: float

    @classmethod
    def read(cls, folder: Path) -> History:
        """Reads `trainer_state.json` and `eval_results.json` of an output folder."""
        state = json.loads((folder / "trainer_state.json").read_text())
        entries = state["log_history"]
        train = [(entry["step"], entry["loss"]) for entry in entries if "loss" in entry]
        held_out = [(entry["step"], entry["eval_loss"]) for entry in entries if "eval_loss" in entry]
        # The state is saved before the evaluation that follows the last step.
        final = json.loads((folder / "eval_results.json").read_text())["eval_loss"]
        if not held_out or held_out[-1][0] < state["global_step"]:
            held_out.append((state["global_step"], final))
        evaluating = sum(entry.get("eval_runtime", 0.0) for entry in entries)
        total = next(entry["train_runtime"] for entry in reversed(entries) if "train_runtime" in entry)
        return cls(train, held_out, state["global_step"], total - evaluating)

    @property
    def first_loss(self) -> float:
        return self.train[0][1]

    @property
    def last_loss(self) -> float:
        return self.train[-1][1]

    @property
    def final_held_out_loss(self) -> float:
        return self.held_out[-1][1]


def draw_loss_curve(history: History, vocab_size: int, title: str, path: Path) -> None:
    """Training and held-out loss over the steps, with the loss of uniform guessing for comparison."""
    figure, axes = pyplot.subplots(figsize=(8, 5), dpi=150)
    blind = math.log(vocab_size)
    axes.axhline(blind, color="0.6", linestyle="--", linewidth=1)
    axes.text(history.num_steps, blind, f"blind guessing: ln {vocab_size}", color="0.4", ha="right", va="bottom")
    axes.plot(*zip(*history.train), color="tab:blue", linewidth=1.5, label="training (mean since the last point)")
    axes.plot(*zip(*history.held_out), color="tab:orange", marker="o", linewidth=1.5, label="held-out text")
    for (step, loss), (right, up) in (
        (history.train[0], (10, 4)),
        (history.train[-1], (0, -14)),
        (history.held_out[-1], (0, 10)),
    ):
        side = "left" if right else "right"  # within the axes
        axes.annotate(f"{loss:.2f}", (step, loss), textcoords="offset points", xytext=(right, up), ha=side)
    axes.set(
        xlabel="step", ylabel="loss (nats per token)", title=title, ylim=(0, None), xlim=(0, 1.03 * history.num_steps)
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def load_back(folder: Path, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads the model and tokenizer from disk, as any other program would."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(str(folder), dtype="auto")
    model.to(torch.device(device))  # type: ignore[arg-type]  # its decorator hides that it is a method
    return model.eval(), AutoTokenizer.from_pretrained(str(folder))


@torch.inference_mode()
def mean_loss(model: PreTrainedModel, blocks: Dataset, batch_size: int = 8) -> float:
    """Mean loss per token over blocks of equal length."""
    total = 0.0
    for batch in blocks.with_format("torch", device=str(model.device)).iter(batch_size):
        total += model(input_ids=batch["input_ids"], labels=batch["labels"]).loss.item() * len(batch["input_ids"])
    return total / len(blocks)


@torch.inference_mode()
def write_code(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, num_tokens: int, seed: int = 0
) -> str:
    """Returns the prompt and the model's continuation."""
    torch.manual_seed(seed)
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    output = model.generate(  # type: ignore[operator]
        **inputs,
        max_new_tokens=num_tokens,
        do_sample=True,
        temperature=0.7,
        top_p=0.9,
        repetition_penalty=1.1,
        pad_token_id=tokenizer.eos_token_id,
    )
    return str(tokenizer.decode(output[0], skip_special_tokens=True))

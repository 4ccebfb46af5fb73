"""1-bit Adam against Adam on the demo's model: held-out loss after the same steps, and bytes per step.

    python -m bench.one_bit --name demo

Two ranks, stage 0, bf16: the demo's text, model, rates and batch. The second beta is 0.99 for both by default: the
demo's 0.95 averages over 20 steps, but 1-bit Adam freezes the variance, which should be a better average. Bytes are
those that rank 0 passes to collectives, by the engine's own ledger: an all-reduce counts the whole buffer once, an
all-to-all what is sent, a gather all rows.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench.surroundings import ROOT, keep

RANKS, PER_RANK = 2, 4
ADAM, ONE_BIT = "AdamW", "OneBitAdam"
LIMIT_OF_LOSS, LIMIT_OF_BYTES = 1.02, 4.0


def ds_config(kind: str, steps: int, freeze_step: int, beta2: float) -> dict[str, Any]:
    """The demo's settings; an eighth of the steps is learning rate warm-up."""
    params: dict[str, Any] = {"lr": 1.5e-3, "betas": [0.9, beta2], "weight_decay": 0.1}
    if kind == ONE_BIT:
        params["freeze_step"] = freeze_step
    schedule = {"warmup_max_lr": 1.5e-3, "warmup_num_steps": max(1, steps // 8), "total_num_steps": steps}
    return {
        "train_micro_batch_size_per_gpu": PER_RANK,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 0},
        "optimizer": {"type": kind, "params": params},
        "scheduler": {"type": "WarmupDecayLR", "params": {**schedule, "warmup_type": "linear"}},
    }


def worker(options: argparse.Namespace) -> None:
    """One rank of one training; rank 0 writes the results."""
    sys.path.insert(0, str(ROOT / "examples"))
    from demo import DATA, MODEL
    from train_clm import DataArguments, ModelArguments, load_blocks, load_text, load_tokenizer, new_model

    import hf_zero
    from hf_zero.comm import collectives_for, ledger

    steps = options.steps
    hf_zero.init_distributed()
    model_args, data_args = ModelArguments(**MODEL), DataArguments(**DATA)
    collectives = collectives_for(torch.device("cpu"))
    for turn in range(2):  # rank 0 fills the caches that the others read
        if min(collectives.rank, 1) == turn:
            documents = load_text(data_args)
            tokenizer = load_tokenizer(model_args, data_args, documents["train"])
            blocks = load_blocks(data_args, documents, tokenizer).with_format("torch")
        collectives.gather_objects(turn)
    torch.manual_seed(0)
    model = new_model(model_args, tokenizer, data_args.block_size)
    engine, *_ = hf_zero.initialize(
        model=model, config=ds_config(options.worker, steps, options.freeze_step, options.beta2)
    )
    order = torch.randperm(len(blocks["train"]), generator=torch.Generator().manual_seed(1))
    traffic: list[dict[str, int]] = []
    for step in range(steps):
        first = (step * RANKS + collectives.rank) * PER_RANK
        rows = [int(row) for row in order[torch.arange(first, first + PER_RANK) % len(order)]]
        ids = torch.stack([blocks["train"][row]["input_ids"] for row in rows])
        ledger.reset()
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        traffic.append({f"{phase} {what}": tally.num_bytes for (phase, what), tally in ledger.tallies.items()})
    loss = _held_out(engine, blocks["validation"], collectives)
    if collectives.rank == 0:
        figures = {
            "loss": loss,
            "first step": traffic[0],
            "last step": traffic[-1],
            "parameters": model.num_parameters(),
        }
        options.answer.write_text(json.dumps(figures))


@torch.no_grad()
def _held_out(engine: Any, rows: Any, collectives: Any) -> float:
    """Mean loss over all ranks' parts of the held-out blocks."""
    engine.eval()
    mine = range(collectives.rank, len(rows) - len(rows) % RANKS, RANKS)
    total = 0.0
    for row in mine:
        ids = rows[row]["input_ids"].unsqueeze(0)
        total += float(engine(input_ids=ids, labels=ids).loss)
    return sum(collectives.gather_objects(total)) / (len(mine) * RANKS)


def measure(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(RANKS), "-m", "bench.one_bit"]
        words += ["--worker", kind, "--steps", str(options.steps), "--answer", str(answer)]
        words += ["--freeze-step", str(options.freeze_step), "--beta2", str(options.beta2)]
        environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
        subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, check=True)
        found: dict[str, Any] = json.loads(answer.read_text())
        return found


def payload(step: dict[str, int]) -> int:
    return sum(size for name, size in step.items() if not name.startswith("control"))


def report(found: dict[str, dict[str, Any]], command: str) -> str:
    exact, compressed = found[ADAM], found[ONE_BIT]
    loss = compressed["loss"] / exact["loss"]
    fewer = payload(exact["last step"]) / payload(compressed["last step"])
    lines = [
        f"# 1-bit Adam on the demo's model, {exact['parameters'] / 1e6:.1f}M parameters, {RANKS} ranks, stage 0, bf16",
        f"{datetime.date.today()} · torch {torch.__version__} · `{command}`",
        "| optimizer | held-out loss | payload bytes of the first step | of the last step |\n|---|---|---|---|",
    ]
    for kind, figures in found.items():
        first, last = (payload(figures[f"{which} step"]) for which in ("first", "last"))
        lines[-1] += f"\n| {kind} | {figures['loss']:.4f} | {first:,} | {last:,} |"
    verdicts = (loss <= LIMIT_OF_LOSS, fewer >= LIMIT_OF_BYTES)
    words = ["met" if verdict else "missed" for verdict in verdicts]
    lines.append(f"Loss, 1-bit / exact: {loss:.4f} (at most {LIMIT_OF_LOSS}: {words[0]}). ")
    lines[-1] += f"Bytes, exact / 1-bit after warm-up: {fewer:.1f} (at least {LIMIT_OF_BYTES:g}: {words[1]})."
    return "\n\n".join(lines) + "\n"


def main() -> None:
    """Train twice, compare, and write the table and the raw figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--freeze-step", type=int, default=200)
    parser.add_argument("--beta2", type=float, default=0.99)
    parser.add_argument("--only", nargs="+", default=[ADAM, ONE_BIT], help="train only these, and print their results")
    parser.add_argument("--name", help="write bench/results/<date>-one-bit-<name>.md and .json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return
    found = {kind: measure(kind, options) for kind in options.only}
    if len(found) < 2:
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
        return
    command = " ".join(["python -m bench.one_bit", *sys.argv[1:]])
    text = report(found, command)
    sys.stdout.write(text)
    if options.name:
        keep({"command": command, **found}, text, f"one-bit-{options.name}")


if __name__ == "__main__":
    main()

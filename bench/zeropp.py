"""ZeRO++'s quantized gathers and reductions on the demo's model: held-out loss after the same steps, bytes per step.

    python -m bench.zeropp --name demo                                      # the demo's sizes
    python -m bench.zeropp --name small --hidden-size 128 --block-size 64   # if there is less time

Two ranks, stage 3, the demo's text, layers, rates and batch; matrices are gathered for each use, biases and norms are
persistent. All kinds are trained one after the other from the same weights on the same batches, and plain stage 3 once
more with another seed, to show the size of random differences. Bytes are payload, by the engine's ledger.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.surroundings import ROOT, about, keep

RANKS, PER_RANK = 2, 4
WEIGHTS, GRADIENTS = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}
LOCO = {"zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}}
PLAIN, OTHER_SEED = "plain stage 3", "plain stage 3, another seed"
# kind -> (keys of zero_optimization, bits of gradients, largest allowed loss relative to plain stage 3's)
KINDS: dict[str, tuple[dict[str, Any], int, float]] = {
    PLAIN: ({}, 4, 1.0),
    "qwZ": (WEIGHTS, 4, 1.01),
    "qgZ, int8": (GRADIENTS, 8, 1.01),
    "qgZ, int4": (GRADIENTS, 4, 1.02),
    "qgZ, int4, LoCo": ({**GRADIENTS, **LOCO}, 4, 1.01),
    "qwZ, qgZ int4": ({**WEIGHTS, **GRADIENTS}, 4, 1.02),
    "qwZ, qgZ int4, LoCo": ({**WEIGHTS, **GRADIENTS, **LOCO}, 4, 1.01),
    OTHER_SEED: ({}, 4, 2.0),
}


def ds_config(kind: str, steps: int, *, bf16: bool) -> dict[str, Any]:
    """The demo's settings; a tenth of the steps is learning rate warm-up."""
    zero, bits, _ = KINDS[kind]
    schedule = {"warmup_max_lr": 1.5e-3, "warmup_num_steps": max(1, steps // 10), "total_num_steps": steps}
    released = {"stage3_param_persistence_threshold": 5000, "stage3_max_reuse_distance": 0}
    return {
        "train_micro_batch_size_per_gpu": PER_RANK,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": 3, **released, **zero},
        "hf_zero": {"quantized_gradient_bits": bits},
        "optimizer": {"type": "AdamW", "params": {"lr": 1.5e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupDecayLR", "params": {**schedule, "warmup_type": "linear"}},
    }


def worker(options: argparse.Namespace) -> None:
    """One rank; rank 0 writes the results of each kind as they are measured."""
    sys.path.insert(0, str(ROOT / "examples"))
    from demo import DATA, MODEL
    from train_clm import DataArguments, ModelArguments, load_blocks, load_text, load_tokenizer, new_model

    import hf_zero
    from hf_zero.comm import get_rank
    from hf_zero.comm.torch_backend import NativeCollectives

    hf_zero.init_distributed()
    rank, everyone = get_rank(), NativeCollectives()
    model_args = ModelArguments(**{**MODEL, "hidden_size": options.hidden_size})
    data_args = DataArguments(**{**DATA, "block_size": options.block_size})
    for turn in range(2):  # rank 0 fills the caches that the others read
        if min(rank, 1) == turn:
            documents = load_text(data_args)
            tokenizer = load_tokenizer(model_args, data_args, documents["train"])
            blocks = load_blocks(data_args, documents, tokenizer).with_format("torch")
        everyone.gather_objects(turn)
    found: dict[str, Any] = {}
    for kind in options.only:
        seed = 1 if kind == OTHER_SEED else 0
        torch.manual_seed(seed)
        model = new_model(model_args, tokenizer, data_args.block_size)
        engine, *_ = hf_zero.initialize(model=model, config=ds_config(kind, options.steps, bf16=options.bf16))
        started = time.perf_counter()
        traffic = _train(engine, blocks["train"], rank, options.steps, seed)
        seconds = time.perf_counter() - started
        losses = everyone.gather_objects(_held_out(engine, blocks["validation"]))
        found[kind] = {"loss": losses[0], "same on all ranks": len(set(losses)) == 1, "bytes": traffic}
        found[kind] |= {"seconds": round(seconds), "parameters": sum(p.numel() for p in model.parameters())}
        engine.destroy()
        if rank == 0:
            options.answer.write_text(json.dumps(found))


def _train(engine: Any, blocks: Any, rank: int, steps: int, seed: int) -> dict[str, int]:
    """Trains; returns the payload of the last step."""
    from hf_zero.comm import ledger

    order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(1 + seed))
    for step in range(steps):
        first = (step * RANKS + rank) * PER_RANK
        rows = [int(row) for row in order[torch.arange(first, first + PER_RANK) % len(order)]]
        ids = torch.stack([blocks[row]["input_ids"] for row in rows])
        ledger.reset()
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    return {f"{p} {what}": t.num_bytes for (p, what), t in ledger.tallies.items() if p != "control"}


@torch.no_grad()
def _held_out(engine: Any, blocks: Any) -> float:
    """Mean loss over the held-out blocks; every rank computes all of them."""
    engine.eval()
    losses = []
    for first in range(0, len(blocks), 16):
        ids = torch.stack([blocks[row]["input_ids"] for row in range(first, min(first + 16, len(blocks)))])
        losses.append(float(engine(input_ids=ids, labels=ids).loss) * len(ids))
    return sum(losses) / len(blocks)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(RANKS), "-m", "bench.zeropp"]
        words += ["--worker", "--steps", str(options.steps), "--answer", str(answer)]
        words += ["--hidden-size", str(options.hidden_size), "--block-size", str(options.block_size)]
        words += [*(["--bf16"] if options.bf16 else []), "--only", *options.only]
        environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
        subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, check=True)
        found: dict[str, Any] = json.loads(answer.read_text())
        return found


def report(found: dict[str, dict[str, Any]], options: argparse.Namespace, command: str) -> str:
    plain = found[PLAIN]
    precision = "bf16" if options.bf16 else "fp32"
    lines = [
        f"# ZeRO++ on the demo's model, hidden size {options.hidden_size}, {plain['parameters'] / 1e6:.2f}M parameters"
        f", blocks of {options.block_size} tokens, {options.steps} steps, {RANKS} ranks, stage 3, {precision}",
        f"{datetime.date.today()} · torch {torch.__version__} · `{command}`",
        "| kind | held-out loss | of plain | allowed | the same on all ranks | payload bytes of a step | of plain |"
        "\n|---|---|---|---|---|---|---|",
    ]
    base = sum(plain["bytes"].values())
    for kind, figures in found.items():
        ratio, allowed = figures["loss"] / plain["loss"], KINDS[kind][2]
        verdict = "" if kind in (PLAIN, OTHER_SEED) else f"{allowed}: {'met' if ratio <= allowed else 'missed'}"
        same, sent = "yes" if figures["same on all ranks"] else "NO", sum(figures["bytes"].values())
        lines[-1] += (
            f"\n| {kind} | {figures['loss']:.4f} | {ratio:.4f} | {verdict} | {same} | {sent:,} | {sent / base:.3f} |"
        )
    return "\n\n".join(lines) + "\n"


def main() -> None:
    """Train all kinds, compare, and write the table and the raw figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--only", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--name", help="write bench/results/<date>-zeropp-<name>.md and .json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return
    found = measure(options)
    command = " ".join(["python -m bench.zeropp", *sys.argv[1:]])
    text = report(found, options, command)
    sys.stdout.write(text)
    if options.name:
        keep({**about("bench.zeropp"), "kinds": found}, text, f"zeropp-{options.name}")


if __name__ == "__main__":
    main()

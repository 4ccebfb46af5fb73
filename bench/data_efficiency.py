"""Cost and savings of sequence-length curricula and random-LTD: held-out loss and computed tokens, several seeds.

    python -m bench.data_efficiency --name demo
    python -m bench.data_efficiency --name small --layers 6 --hidden-size 128 --steps 300

Trains the demo's model, or a smaller one, on the demo's text with its rates and batch; one process, stage 0, fp32.
For each seed it trains three times from the same weights on the same batches: plain, with growing sequences, and with
layers that see part of the tokens. Tokens are counted where they are computed, at the embedding and at each layer.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from typing import Any

import torch

from bench.surroundings import ROOT, about, keep

sys.path.insert(0, str(ROOT / "examples"))
from demo import DATA, MODEL, SEQUENCES_PER_STEP  # noqa: E402
from train_clm import DataArguments, ModelArguments, load_blocks, load_text, load_tokenizer, new_model  # noqa: E402

from hf_zero import initialize  # noqa: E402

RATE = 1.5e-3
PLAIN, CURRICULUM, LTD = "plain", "short sequences first", "random-LTD"


def sections(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """The feature's section of ds.json."""
    whole, layers = options.block_size, options.layers
    if kind == CURRICULUM:
        growth = {"total_curriculum_step": int(0.45 * options.steps), "difficulty_step": 8}
        lengths = {"curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": whole}
        return {
            "curriculum_learning": {
                "enabled": True,
                **lengths,
                "schedule_type": "fixed_linear",
                "schedule_config": growth,
            }
        }
    if kind == LTD:
        # The first and the last layer see all tokens; a model without other layers drops fewer tokens in each.
        inner = list(range(1, layers - 1))
        shortest = whole // 4 if inner else whole // 2
        inner = inner or list(range(layers))
        schedule = {
            "min_value": shortest,
            "max_value": whole,
            "schedule_type": "fixed_linear",
            "schedule_config": {"require_steps": int(0.9 * options.steps), "seq_per_step": 8},
        }
        ltd = {
            "enabled": True,
            "total_layer_num": layers,
            "random_ltd_layer_num": len(inner),
            "random_ltd_layer_id": inner,
            "model_mask_name": "attention_mask",
            "model_type": "decoder",
            "hidden_state_order": "batch_seq_dim",
            "random_ltd_schedule": schedule,
        }
        return {"data_efficiency": {"data_routing": {"random_ltd": ltd}}}
    return {}


def ds_config(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    steps = options.steps
    schedule = {"warmup_max_lr": RATE, "warmup_num_steps": max(1, steps // 10), "total_num_steps": steps}
    return {
        "train_micro_batch_size_per_gpu": SEQUENCES_PER_STEP,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupDecayLR", "params": {**schedule, "warmup_type": "linear"}},
        **sections(kind, options),
    }


def count_tokens(model: Any) -> Counter[str]:
    """Counts tokens that pass the embedding and the layers from now on."""
    counted: Counter[str] = Counter()

    def at_embedding(_module: Any, inputs: tuple[Any, ...]) -> None:
        counted["tokens"] += inputs[0].numel()

    def in_layer(_module: Any, inputs: tuple[Any, ...]) -> None:
        counted["layer tokens"] += inputs[0].shape[0] * inputs[0].shape[1]

    model.model.embed_tokens.register_forward_pre_hook(at_embedding)
    for layer in model.model.layers:
        # On a submodule of the layer, because a hook of the layer itself runs before its tokens are selected.
        layer.input_layernorm.register_forward_pre_hook(in_layer)
    return counted


def train(model: Any, kind: str, blocks: Any, seed: int, options: argparse.Namespace) -> tuple[Any, Counter[str]]:
    engine = initialize(model=model, config=ds_config(kind, options))[0]
    engine.train()
    counted = count_tokens(model)
    order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(seed))
    for step in range(options.steps):
        places = torch.arange(step * SEQUENCES_PER_STEP, (step + 1) * SEQUENCES_PER_STEP) % len(order)
        ids = torch.stack([blocks[int(order[place])]["input_ids"] for place in places])
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    return engine, Counter(counted)


@torch.no_grad()
def held_out(model: Any, blocks: Any) -> float:
    """Mean loss over whole held-out blocks."""
    model.eval()
    losses = []
    for first in range(0, len(blocks), 16):
        ids = torch.stack([blocks[row]["input_ids"] for row in range(first, min(first + 16, len(blocks)))])
        losses.append(float(model(input_ids=ids, labels=ids).loss) * len(ids))
    return sum(losses) / len(blocks)


def measure(seed: int, options: argparse.Namespace, model_args: Any, tokenizer: Any, blocks: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in (PLAIN, CURRICULUM, LTD):
        torch.manual_seed(seed)
        model = new_model(model_args, tokenizer, options.block_size)
        started = time.process_time()
        engine, counted = train(model, kind, blocks["train"], seed, options)
        seconds = time.process_time() - started
        engine.destroy()
        found[kind] = {"loss": held_out(model, blocks["validation"]), "cpu seconds": round(seconds, 1), **counted}
        found[kind]["parameters"] = sum(parameter.numel() for parameter in model.parameters())
        sys.stderr.write(f"seed {seed}, {kind}: {found[kind]}\n")
    return {"seed": seed, "kinds": found}


def report(results: list[dict[str, Any]], options: argparse.Namespace) -> str:
    """The table in Markdown."""
    lines = [
        f"Held-out loss of a Llama with {options.layers} layers of width {options.hidden_size} "
        f"({results[0]['kinds'][PLAIN]['parameters'] / 1e6:.2f}M parameters) after {options.steps} steps of "
        f"{SEQUENCES_PER_STEP} x {options.block_size} tokens, {len(results)} seeds. Shares are of plain training.\n",
        "| kind | loss by seed | mean | of plain, by seed | mean | tokens | layer tokens | CPU time, median |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind in (PLAIN, CURRICULUM, LTD):
        found = [result["kinds"][kind] for result in results]
        plain = [result["kinds"][PLAIN] for result in results]

        def shares(key: str, found: Any = found, plain: Any = plain) -> list[float]:
            return [one[key] / other[key] for one, other in zip(found, plain, strict=True)]

        cells = [
            kind,
            ", ".join(f"{one['loss']:.4f}" for one in found),
            f"{statistics.mean(one['loss'] for one in found):.4f}",
            ", ".join(f"{share:.4f}" for share in shares("loss")),
            f"{statistics.mean(shares('loss')):.4f}",
            f"{statistics.mean(shares('tokens')):.3f}",
            f"{statistics.mean(shares('layer tokens')):.3f}",
            f"{statistics.median(shares('cpu seconds')):.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--layers", type=int, default=MODEL["num_layers"])
    parser.add_argument("--hidden-size", type=int, default=MODEL["hidden_size"])
    parser.add_argument("--block-size", type=int, default=DATA["block_size"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = time.perf_counter()
    model_args = ModelArguments(**{**MODEL, "hidden_size": options.hidden_size, "num_layers": options.layers})
    data_args = DataArguments(**{**DATA, "block_size": options.block_size})
    documents = load_text(data_args)
    tokenizer = load_tokenizer(model_args, data_args, documents["train"])
    blocks = load_blocks(data_args, documents, tokenizer).with_format("torch")
    results = [measure(seed, options, model_args, tokenizer, blocks) for seed in options.seeds]
    content = {
        **about("bench.data_efficiency"),
        "seconds": round(time.perf_counter() - started),
        "configs": {kind: ds_config(kind, options) for kind in (PLAIN, CURRICULUM, LTD)},
        "results": results,
    }
    text = report(results, options)
    keep(content, text, f"data-efficiency-{options.name}")
    sys.stdout.write(text)


if __name__ == "__main__":
    main()

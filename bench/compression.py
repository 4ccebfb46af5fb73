"""The accuracy cost of compression: the encoder of examples/nlp_accelerate.py on its topic task, with several seeds.

    python -m bench.compression --name first

For each seed the encoder is trained, then trained further once per technique, with a ds.json that enables the technique
from the first update, and once without any. Accuracy is measured on held-out files. One process, stage 0, fp32.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from bench.surroundings import ROOT, about, keep

sys.path.insert(0, str(ROOT / "examples"))
from topics import Samples, load_topics, new_model  # noqa: E402

from hf_zero import initialize  # noqa: E402
from hf_zero.extras.compression.export import redundancy_clean  # noqa: E402

BATCH, TEST_BATCH = 32, 128
RATE, RATE_AFTER = 1e-3, 5e-4
NONE = "no compression"


def _all(params: dict[str, Any], *modules: str, related: Sequence[Sequence[str]] = ()) -> dict[str, Any]:
    return {"all": {"params": params, "modules": list(modules), "related_modules": [list(names) for names in related]}}


def _on(groups: dict[str, Any], **shared: Any) -> dict[str, Any]:
    return {"shared_parameters": {"enabled": True, "schedule_offset": 0, **shared}, "different_groups": groups}


EIGHT_BITS = {
    "weight_quantization": _on(_all({"start_bits": 8, "target_bits": 8}, "*")),
    "activation_quantization": _on(_all({"bits": 8}, "encoder", "pooler", "classifier")),
}
HALF_SPARSE = {"sparse_pruning": _on(_all({"dense_ratio": 0.5}, "encoder"))}
HALF_LAYERS = {
    "layer_reduction": {"enabled": True, "module_name_prefix": "bert.encoder.layer", "teacher_layer": [1]},
}
HALF_HEADS = {
    "head_pruning": _on(
        _all({"dense_ratio": 0.5}, "attention.output.dense", related=[["self.query", "self.key", "self.value"]]),
        num_heads=4,
    )
}
HALF_ROWS = {
    "row_pruning": _on(_all({"dense_ratio": 0.5}, "intermediate.dense", related=[["layer.[0-9]+.output.dense"]])),
}
# Name -> (compression_training, distillation, allowed loss of accuracy in points; None if unspecified).
TECHNIQUES: dict[str, tuple[dict[str, Any], dict[str, Any] | None, float | None]] = {
    NONE: ({}, None, None),
    "8-bit weights and activations": (EIGHT_BITS, None, 0.5),
    "50% sparse": (HALF_SPARSE, None, 1.0),
    "half the layers, distilled": (HALF_LAYERS, {"temperature": 2.0, "logit_weight": 1.0}, 2.0),
    "half the heads": (HALF_HEADS, None, 2.0),
    "half the rows": (HALF_ROWS, None, None),
}


def ds_config(updates: int, rate: float, compression: dict[str, Any], distilled: dict[str, Any] | None) -> Any:
    schedule = {"warmup_max_lr": rate, "warmup_num_steps": max(1, updates // 10), "total_num_steps": updates}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": rate}},
        "scheduler": {"type": "WarmupDecayLR", "params": {**schedule, "warmup_type": "linear"}},
        "compression_training": compression,
    }
    if distilled is not None:
        config["hf_zero"] = {"distillation": distilled}
    return config


def train(model: Any, config: Any, samples: Samples, epochs: int, seed: int) -> Any:
    """Trains `model` in place; returns its engine."""
    order = torch.Generator().manual_seed(seed)
    loader = DataLoader(samples, batch_size=BATCH, shuffle=True, generator=order, drop_last=True)
    engine = initialize(model=model, config=config)[0]
    engine.train()
    for _ in range(epochs):
        for batch in loader:
            engine.backward(engine(**batch).loss)
            engine.step()
    return engine


@torch.no_grad()
def accuracy(model: Any, samples: Samples) -> float:
    """Accuracy in percentage points."""
    model.eval()
    right = 0
    for batch in DataLoader(samples, batch_size=TEST_BATCH):
        right += int((model(**batch).logits.argmax(-1) == batch["labels"]).sum())
    return 100 * right / len(samples)


def folder_bytes(model: Any) -> int:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))


def measure(seed: int, options: argparse.Namespace, parts: tuple[Samples, Samples]) -> dict[str, Any]:
    """One seed: the encoder, then each technique."""
    trained_on, held_out = parts
    torch.manual_seed(seed)
    model = new_model()
    updates = len(trained_on) // BATCH
    engine = train(model, ds_config(options.epochs * updates, RATE, {}, None), trained_on, options.epochs, seed)
    engine.destroy()
    result: dict[str, Any] = {"seed": seed, "trained": accuracy(model, held_out), "bytes": folder_bytes(model)}
    result["techniques"] = {}
    for name, (compression, distilled, _) in TECHNIQUES.items():
        torch.manual_seed(seed + 1)
        copied = copy.deepcopy(model)
        config = ds_config(options.more_epochs * updates, RATE_AFTER, compression, distilled)
        engine = train(copied, config, trained_on, options.more_epochs, seed + 1)
        found: dict[str, Any] = {"accuracy": accuracy(copied, held_out)}
        if name == NONE:
            engine.destroy()
        else:
            redundancy_clean(engine, config)
            found["accuracy_cleaned"] = accuracy(copied, held_out)
        found["bytes"] = folder_bytes(copied)
        result["techniques"][name] = found
        sys.stderr.write(f"seed {seed}, {name}: {found}\n")
    return result


def report(results: list[dict[str, Any]], options: argparse.Namespace, parts: tuple[Samples, Samples]) -> str:
    """The table in Markdown."""
    count = len(parts[1])
    lines = [
        f"Accuracy on {count} held-out samples in points (one sample is {100 / count:.2f}), {len(results)} seeds, "
        f"{len(parts[0])} samples to train on: {options.epochs} epochs, then {options.more_epochs} more for each line. "
        "Differences are to the same encoder trained on without compression, seed by seed. Cleaned: after "
        "redundancy_clean, when activations are exact again.\n",
        "| technique | accuracy by seed | mean | difference by seed | mean | allowed | cleaned | bytes / before |",
        "|---|---|---|---|---|---|---|---|",
    ]
    base = [result["techniques"][NONE]["accuracy"] for result in results]
    for name, (_, _, allowed) in TECHNIQUES.items():
        found = [result["techniques"][name] for result in results]
        reached = [one["accuracy"] for one in found]
        cleaned = [f"{one['accuracy_cleaned']:.2f}" for one in found if "accuracy_cleaned" in one]
        differences = [own - other for own, other in zip(reached, base, strict=True)]
        sizes = [one["bytes"] / result["bytes"] for one, result in zip(found, results, strict=True)]
        cells = [
            name,
            ", ".join(f"{value:.2f}" for value in reached),
            f"{statistics.mean(reached):.2f}",
            ", ".join(f"{value:+.2f}" for value in differences),
            f"{statistics.mean(differences):+.2f}",
            "" if allowed is None else f"-{allowed:g}",
            ", ".join(cleaned),
            f"{statistics.mean(sizes):.3f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--more-epochs", type=int, default=2)
    parser.add_argument("--limit", type=int, help="maximum number of samples per split")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started, parts = time.perf_counter(), load_topics(options.limit)
    results = [measure(seed, options, parts) for seed in options.seeds]
    content = {
        **about("bench.compression"),
        "seconds": round(time.perf_counter() - started),
        "configs": {name: compression for name, (compression, _, _) in TECHNIQUES.items()},
        "results": results,
    }
    text = report(results, options, parts)
    keep(content, text, f"compression-{options.name}")
    sys.stdout.write(text)


if __name__ == "__main__":
    main()

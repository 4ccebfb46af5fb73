"""Compares GPU training with plain PyTorch in one process: every stage, offload target and optimizer, whole steps.

    python -m bench.gpu_parity --json parity.json
    python -m bench.gpu_parity --dry-run                # tiny, on the CPU

A Llama-like model, clipped to a norm that every step exceeds, two micro-batches per update. The reference keeps its
own fp32 masters and updates them with torch.optim. Reported for each engine: the largest relative difference of a loss,
and whether all losses and weights equal those of stage 0 in the same precision bitwise. Then a checkpoint saved at
stage 3 with offload is resumed at stage 2 with offloaded states (the host's and the device's updates differ in the last
bits), and one saved asynchronously is resumed; their consolidated weights are compared.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.gpu_train import TINY_VOCABULARY, VOCABULARY, Llama
from hf_zero import initialize
from hf_zero.api.gathered_parameters import GatheredParameters
from hf_zero.comm import destroy_process_group, get_rank, get_world_size, init_distributed

UPDATES, MICRO_BATCHES, CLIP = 6, 2, 0.1
# Relative difference of a loss: sums are computed in another order; bf16 rounding is in both.
TOLERANCES = {"fp32": 2e-5, "bf16": 2e-3, "fp16": 2e-3}
CPU = {"device": "cpu", "pin_memory": True}
Config = dict[str, Any]


def cases(folder: str) -> Iterator[tuple[str, str, Config, Config]]:
    """(name, precision, zero_optimization, other sections)."""
    drive = {"device": "nvme", "nvme_path": folder, "pin_memory": True}
    for precision in ("fp32", "bf16", "fp16"):
        for stage in range(4):
            yield f"stage {stage}", precision, {"stage": stage}, {}
    for precision in ("fp32", "bf16"):
        for stage in (1, 2, 3):
            yield f"stage {stage}, states on the host", precision, {"stage": stage, "offload_optimizer": CPU}, {}
        both = {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}
        yield "stage 3, all on the host", precision, both, {}
        small = {**both, "sub_group_size": 100_000, "stage3_prefetch_bucket_size": 0}
        yield "stage 3, all on the host, small sub-groups, no prefetch", precision, small, {}
        drives = {"stage": 3, "offload_optimizer": drive, "offload_param": drive, "sub_group_size": 1_000_000}
        yield "stage 3, all on a drive", precision, drives, {}
        yield "stage 2, states on a drive", precision, {"stage": 2, "offload_optimizer": drive}, {}
        for who in ("device", "both"):
            update = {"hf_zero": {"offload_update": who}}
            yield (
                f"stage 2, states on the host, updated by {who}",
                precision,
                {"stage": 2, "offload_optimizer": CPU},
                update,
            )
            yield f"stage 3, all on the host, updated by {who}", precision, both, update
        fitting = {"stage": 2, "offload_optimizer": {**CPU, "ratio": "auto"}}
        yield "stage 2, states that fit on the device", precision, fitting, {}
        partly = {"stage": 3, "offload_optimizer": {**CPU, "ratio": 0.5}}
        yield "stage 3, half the states on the host", precision, partly, {}
        weights = {"stage": 3, "offload_param": CPU}
        # The device updates all of the states, or half, on its own stream beside the next forward.
        yield "stage 3, weights on the host", precision, weights, {}
        yield "stage 3, weights and half the states on the host", precision, {**weights, **partly}, {}
        yield "streaming", precision, weights, {"hf_zero": {"streaming": {"enabled": True}}}
        yield "stage 3, everything persistent", precision, {"stage": 3, "stage3_param_persistence_threshold": 10**9}, {}
    unclipped = {"gradient_clipping": 0.0, "bf16": {"enabled": True, "check_grad_overflow": False}}
    free = {"hf_zero": {"streaming": {"enabled": True}}, **unclipped}
    yield "stage 3, not clipped", "bf16", {"stage": 3}, unclipped
    yield "streaming, not clipped", "bf16", {"stage": 3, "offload_param": CPU}, free
    for kind, params in (
        ("Lion", {"lr": 1e-4}),
        ("SGD", {"lr": 1e-1, "momentum": 0.9}),
        ("Adagrad", {"lr": 1e-3}),
        ("Lamb", {"lr": 1e-3}),
        ("AdamW8bit", {"lr": 1e-3}),
        ("Muon", {"lr": 1e-3}),
    ):
        optimizer = {"optimizer": {"type": kind, "params": params}}
        for stage in (1, 3):
            yield f"{kind}, stage {stage}", "bf16", {"stage": stage}, optimizer
        if kind != "Muon":
            yield f"{kind}, states on the host", "bf16", {"stage": 2, "offload_optimizer": CPU}, optimizer


def ds_config(precision: str, zero: Config, other: Config) -> Config:
    config: Config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 30,
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    if precision == "fp16":
        config["fp16"] |= {"initial_scale_power": 8}
    return {**config, **other}


class Task:
    """One model and its tokens, the same for all engines."""

    def __init__(
        self, device: torch.device, hidden: int, layers: int, length: int, vocabulary: int = VOCABULARY
    ) -> None:
        self.device, self.hidden, self.layers, self.vocabulary = device, hidden, layers, vocabulary
        generator = torch.Generator().manual_seed(1)
        shape = (UPDATES + 2, MICRO_BATCHES, 2, length)
        self.tokens = torch.randint(vocabulary, shape, generator=generator).to(device)

    def model(self) -> Llama:
        torch.manual_seed(0)
        return Llama(self.hidden, max(1, self.hidden // 64), self.layers, self.vocabulary)

    def train(self, engine: Any, updates: range) -> list[float]:
        """Mean loss of each update."""
        found = []
        for update in updates:
            losses = []
            for tokens in self.tokens[update]:
                loss = engine(tokens)
                engine.backward(loss)
                engine.step()
                losses.append(loss.detach().float())
            found.append(sum(losses) / len(losses))
        return [float(loss) for loss in found]

    def reference(self, precision: str, clip: float) -> list[float]:
        """AdamW on fp32 masters, without hf_zero."""
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        scale = 2.0**8 if precision == "fp16" else 1.0
        model = self.model().to(self.device, dtype)
        weights = list(model.parameters())
        masters = [weight.detach().float().clone() for weight in weights]
        optimizer = torch.optim.AdamW(masters, lr=1e-3, weight_decay=0.01)
        found = []
        for update in range(UPDATES):
            losses = []
            for tokens in self.tokens[update]:
                loss = model(tokens)
                (loss.float() * scale / MICRO_BATCHES).backward()
                losses.append(loss.detach().float())
            for weight, master in zip(weights, masters, strict=True):
                assert weight.grad is not None
                master.grad, weight.grad = weight.grad.float() / scale, None
            if clip:
                torch.nn.utils.clip_grad_norm_(masters, clip)
            optimizer.step()
            with torch.no_grad():
                for weight, master in zip(weights, masters, strict=True):
                    weight.copy_(master)
            found.append(float(sum(losses) / len(losses)))
        return found


def weights_of(engine: Any) -> dict[str, Tensor]:
    """Full weights on the host."""
    parameters = dict(engine.module.named_parameters())
    with GatheredParameters(list(parameters.values())):
        return {name: parameter.detach().cpu().clone() for name, parameter in parameters.items()}


def examine(task: Task, config: Config) -> tuple[list[float], dict[str, Tensor]]:
    engine = initialize(model=task.model(), config=config)[0]
    try:
        return task.train(engine, range(UPDATES)), weights_of(engine)
    finally:
        engine.destroy()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def resumptions() -> Iterator[tuple[str, Config, Config, Config]]:
    """(name, zero_optimization that saves, the one that resumes, other sections of the first)."""
    offloaded = {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}
    yield "resumed", offloaded, {"stage": 2, "offload_optimizer": CPU}, {}
    yield "saved beside training", {"stage": 2}, {"stage": 2}, {"hf_zero": {"checkpoint": {"async": True}}}


def resumed(task: Task, folder: Path, saves: Config, resumes: Config, other: Config) -> dict[str, Any]:
    """Resumes a checkpoint and compares it with the engine that continued after saving; then consolidates it."""
    from hf_zero import zero_to_fp32

    engine = initialize(model=task.model(), config=ds_config("bf16", saves, other))[0]
    task.train(engine, range(UPDATES))
    engine.save_checkpoint(str(folder))
    further = task.train(engine, range(UPDATES, UPDATES + 2))
    engine.destroy()
    engine = initialize(model=task.model(), config=ds_config("bf16", resumes, {}))[0]
    engine.load_checkpoint(str(folder))
    weights = weights_of(engine)
    again = task.train(engine, range(UPDATES, UPDATES + 2))
    engine.destroy()
    out = folder / "out"
    code = zero_to_fp32.main([str(folder), str(out), "--safe_serialization"])
    merged: dict[str, Tensor] = {}
    if not code:
        from safetensors.torch import load_file

        for file in sorted(out.glob("*.safetensors")) if out.is_dir() else [out]:
            merged |= load_file(file)
    equal = bool(merged) and all(torch.equal(merged[name].bfloat16(), weights[name]) for name in weights)
    return {"losses": further, "again": again, "equal": further == again, "consolidated": equal}


def run(task: Task) -> list[dict[str, Any]]:
    """One row per engine, printed as they are measured."""
    rows: list[dict[str, Any]] = []
    references = {precision: task.reference(precision, CLIP) for precision in TOLERANCES}
    first: dict[tuple[str, str], tuple[list[float], dict[str, Tensor]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, precision, zero, other in cases(folder):
            row: dict[str, Any] = {"case": name, "precision": precision}
            rows.append(row)
            try:
                losses, weights = examine(task, ds_config(precision, zero, other))
            except Exception as error:
                row |= {"failed": f"{type(error).__name__}: {error}", "trace": traceback.format_exc(limit=-8)}
                sys.stdout.write(f"FAILED {name} {precision}\n{row['trace']}\n")
                continue
            row["losses"] = losses
            family = (precision, json.dumps({key: other[key] for key in other if key != "hf_zero"}))
            expected, beside = first.setdefault(family, (losses, weights))
            if not other or "hf_zero" in other and "gradient_clipping" not in other:
                pairs = zip(losses, references[precision], strict=True)
                row["difference"] = max(abs(one - two) / two for one, two in pairs)
                row["within"] = row["difference"] <= TOLERANCES[precision]
            row |= {"same_losses": losses == expected, "same_weights": same(weights, beside)}
            said = {key: value for key, value in row.items() if key not in ("case", "precision", "losses")}
            sys.stdout.write(f"{precision} {name:58} {losses[-1]:.6f} {said}\n")
            sys.stdout.flush()
        for number, (name, saves, resumes, other) in enumerate(resumptions()):
            try:
                row = {"case": name, **resumed(task, Path(folder, f"checkpoint{number}"), saves, resumes, other)}
            except Exception as error:
                row = {"case": name, "failed": str(error), "trace": traceback.format_exc(limit=-8)}
            rows.append(row)
            sys.stdout.write(f"{row}\n")
    return rows


def shared_cases() -> Iterator[tuple[str, Config]]:
    """(name, zero_optimization) for several ranks on one GPU (bench/gpu_nccl.py)."""
    for stage in range(4):
        yield f"stage {stage}", {"stage": stage}
    far = {"stage": 3, "stage3_prefetch_bucket_size": 10**7, "stage3_param_persistence_threshold": 0}
    yield "stage 3, gathers far ahead", far
    yield "stage 2, states on the host", {"stage": 2, "offload_optimizer": CPU}
    yield "stage 3, all on the host", {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, on any device")
    parser.add_argument("--json", type=Path, help="output file")
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        sys.exit("bench.gpu_parity needs a GPU; without one --dry-run tries it on the CPU")
    logging.getLogger("hf_zero").setLevel(logging.WARNING)
    init_distributed()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    task = Task(device, 64, 2, 32, TINY_VOCABULARY) if options.dry_run else Task(device, 512, 4, 256)
    rows = run(task)
    if options.json and get_rank() == 0:
        name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        answer = {"device": name, "torch": torch.__version__, "ranks": get_world_size(), "rows": rows}
        options.json.write_text(json.dumps(answer, indent=1))
    destroy_process_group()
    wrong = [row for row in rows if "failed" in row or row.get("within") is False or row.get("equal") is False]
    sys.exit(f"{len(wrong)} of {len(rows)} are wrong" if wrong else 0)


if __name__ == "__main__":
    main()
